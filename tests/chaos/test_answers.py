"""A short `make answers` on the tiny model, and its checker: it sees an answer that violates its schema."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from inflight.events import Choice, Completion, FinishReason, Timing, Usage
from tests.answers.schemas import QUESTIONS, closed
from tests.answers.verdict import Verdict, judge, problem_of

LAST_LINE = re.compile(r"answers: valid=(\d+) cut_off=(\d+) invalid=0 failed=0 deaths=(\d+) leaked_blocks=0")
COUNT = 120


def test_no_answer_is_invalid_whatever_dies(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.answers", "--model", "tiny", "--count", str(COUNT), "--seed", "5"]
    # Few seats: the answers outlast the pause before the first fault.
    few = ("--copies", "--seats", "2", "--clients", "6", "--faults", "executor-kill,router-kill,redis-empty,link-cut")
    ended = subprocess.run(
        [*command, *few, "--run-dir", str(tmp_path)], capture_output=True, text=True, timeout=500, check=False
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr
    found = LAST_LINE.fullmatch(ended.stdout.splitlines()[-1])
    assert found is not None, ended.stdout
    num_valid, num_cut_off, num_deaths = map(int, found.groups())
    assert num_valid + num_cut_off == COUNT
    assert num_valid > 0.8 * COUNT
    assert num_deaths >= 1


def answer(text: str, reason: FinishReason, *, unfinished: bool = False) -> Completion:
    choice = Choice(text, finish_reason=reason, constraint_unfinished=unfinished)
    return Completion("r", (choice,), Usage(1, 0, 1, 0), Timing(None, None, None, None, 0))


@pytest.mark.parametrize(
    ("text", "reason", "unfinished", "verdict"),
    [
        ('{"a": 1}', FinishReason.STOP_TOKEN, False, Verdict.VALID),
        ('{"a": 1}', FinishReason.LENGTH, False, Verdict.VALID),
        ('{"a": ', FinishReason.LENGTH, True, Verdict.CUT_OFF),
        ('{"a": ', FinishReason.LENGTH, False, Verdict.INVALID),
        ('{"a": "1"}', FinishReason.STOP_TOKEN, False, Verdict.INVALID),
        ('{"a": 1}', FinishReason.STOP_TOKEN, True, Verdict.INVALID),
        ('{"a": 1}', FinishReason.DEADLINE, False, Verdict.FAILED),
    ],
)
def test_answer_is_valid_cut_off_or_wrong(text: str, reason: FinishReason, unfinished: bool, verdict: Verdict) -> None:
    judged, problem = judge(closed(a={"type": "integer"}), answer(text, reason, unfinished=unfinished))
    assert judged is verdict
    assert bool(problem) is (verdict in (Verdict.INVALID, Verdict.FAILED))


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("date", "2020-13-01"),
        ("time", "25:00:00Z"),
        ("duration", "P"),
        ("hostname", "-a"),
        ("uri", "a b"),
        ("uuid", "0"),
    ],
)
def test_formats_are_checked(name: str, wrong: str) -> None:
    assert problem_of({"type": "string", "format": name}, f'"{wrong}"')


def test_every_question_has_its_own_schema() -> None:
    assert len({str(question.schema) for question in QUESTIONS}) == len(QUESTIONS) == 40
