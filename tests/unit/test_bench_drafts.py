"""The replay of answers through proposers."""

from __future__ import annotations

from pathlib import Path

import pytest

import inflight.bench.workloads
from inflight.bench.drafts.replay import Answer, decode_s, num_equal, replay, speed_up, step_s
from inflight.bench.workloads.trace import read_trace
from inflight.executor.speculation.proposer import NgramProposer

COPY = Answer("copy", (9, 1, 2, 3, 4, 5, 6, 7, 8, 0), (1, 2, 3, 4, 5, 6, 7, 8, 0))
NEW = Answer("new", (1, 2, 3), (11, 12, 13, 14))


def test_leading_equal_ids_are_counted() -> None:
    assert num_equal((1, 2, 3), (1, 2, 9)) == 2
    assert num_equal((), (1,)) == 0


def test_a_copy_takes_one_step_per_draft_and_a_new_text_one_per_token() -> None:
    copied = replay(COPY, NgramProposer(), 4)
    # After 1 nothing matches; then come 2 | 3 4 5 6 7 | 8 0.
    assert (copied.num_steps, copied.num_accepted) == (3, 5)
    assert replay(NEW, NgramProposer(), 4).num_steps == 3


def test_time_between_measured_steps_is_on_a_line() -> None:
    assert step_s(1) == 0.0117
    assert step_s(8) < step_s(20) < step_s(32)
    assert step_s(1024) == pytest.approx(2 * step_s(512))


def test_speed_compares_the_steps_with_and_without_drafts() -> None:
    assert decode_s([NEW], NgramProposer, 0, 1) == pytest.approx(5 * 3 * step_s(1))
    assert speed_up([NEW], NgramProposer, 4, 1) == 1
    assert speed_up([COPY], NgramProposer, 4, 2) > 1.5


def test_requests_of_the_trace_of_edits_are_all_different() -> None:
    trace = Path(inflight.bench.workloads.__file__).with_name("edits.jsonl")
    requests = read_trace(trace, lambda num_tokens: (), scale=1.0)
    assert len({request.prompt_ids for request in requests}) == len(requests) == 32
