"""The order in which a benchmark runs what takes part, and what happens when one of them breaks."""

from __future__ import annotations

import io
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from rich.console import Console

from inflight.bench.comparison.options import parse_options
from inflight.bench.comparison.progress import Progress, run_line
from inflight.bench.comparison.start import Field, circumstances
from inflight.bench.main import compare, main, warm_up
from inflight.bench.measures.run import Run
from inflight.bench.targets.target import OnTokens, TargetError
from inflight.bench.workloads.plan import Workload
from inflight.cli.console import CommandError
from tests.support.bench.runs import WORKLOAD, finished_run


@dataclass
class FakeTarget:
    """Writes down what it ran; breaks in the round that it is told."""

    mode: str
    log: list[tuple[str, int]]
    breaks_in: int | None = None
    words: dict[str, str] = field(default_factory=lambda: {"engine": "fake 1", "dtype": "bf16"})
    workloads: list[Workload] = field(default_factory=list)

    async def run(self, workload: Workload, round_number: int, on_tokens: OnTokens) -> Run:
        if round_number == self.breaks_in:
            raise TargetError(f"{self.mode} fell over")
        on_tokens(1)
        self.log.append((self.mode, round_number))
        self.workloads.append(workload)
        return finished_run(self.mode, round_number)


def silent(num_runs: int = 9) -> Progress:
    return Progress(Console(file=io.StringIO()), num_runs)


def field_of(*targets: FakeTarget, peers: tuple[str, ...] = ()) -> Field:
    started = Field("toy", 100, peer_modes=peers)
    for target in targets:
        started.enter(target)
    return started


async def test_each_round_begins_with_another_target_and_is_reported_in_one_order() -> None:
    log: list[tuple[str, int]] = []
    started = field_of(FakeTarget("inflight", log), FakeTarget("static", log))
    options = parse_options(["--rounds", "2", "--requests", "2"])
    await warm_up(started, options, silent())
    found = await compare(started, options, "short", silent())
    assert log == [("inflight", 0), ("static", 0), ("inflight", 1), ("static", 1), ("static", 2), ("inflight", 2)]
    assert [(run.mode, run.round) for run in found.runs] == [
        ("inflight", 1),
        ("static", 1),
        ("inflight", 2),
        ("static", 2),
    ]


async def test_peer_that_breaks_is_left_out_and_the_others_go_on() -> None:
    log: list[tuple[str, int]] = []
    started = field_of(FakeTarget("inflight", log), FakeTarget("vllm", log, breaks_in=2), peers=("vllm",))
    options = parse_options(["--rounds", "3", "--requests", "2"])
    found = await compare(started, options, "short", silent())
    assert [(run.mode, run.round) for run in found.runs] == [
        ("inflight", 1),
        ("vllm", 1),
        ("inflight", 2),
        ("inflight", 3),
    ]
    assert started.left_out == {"vllm": "vllm fell over"}
    assert circumstances(options, started)["without vllm"] == "vllm fell over"


async def test_one_of_ours_that_breaks_ends_the_benchmark() -> None:
    started = field_of(FakeTarget("inflight", [], breaks_in=0))
    with pytest.raises(TargetError, match="inflight fell over"):
        await warm_up(started, parse_options(["--requests", "2"]), silent())
    with pytest.raises(TargetError, match="inflight fell over"):
        await compare(
            field_of(FakeTarget("inflight", [], breaks_in=1)), parse_options(["--requests", "2"]), "short", silent()
        )


async def test_each_concurrency_is_a_section_whose_requests_no_other_has() -> None:
    target = FakeTarget("inflight", [])
    options = parse_options(["--concurrency", "1,4", "--turns", "2", "--rounds", "1"])
    for load in options.loads():
        await compare(field_of(target), load, "short", silent())
    assert [(len(run.requests), run.concurrency) for run in target.workloads] == [(2, 1), (8, 4)]
    assert target.workloads[0].requests[0].prompt_ids != target.workloads[1].requests[0].prompt_ids


def test_circumstances_say_what_each_mode_is() -> None:
    words = circumstances(parse_options(["--seats", "4"]), field_of(FakeTarget("inflight", [])))
    assert words["inflight"] == "fake 1, dtype: bf16"
    assert (words["model"], words["seats"]) == ("toy", "4")


def test_finished_run_is_one_line_with_its_first_error() -> None:
    assert run_line(WORKLOAD, finished_run("inflight", 1)) == (
        "mixed round 1 inflight: 1 requests in 2.0 s, 300.0 output tokens/s, 6.5 seats in use"
    )


def test_progress_off_a_terminal_is_a_line_for_each_run_and_no_bar() -> None:
    out = io.StringIO()
    with Progress(Console(file=out, width=200), 1) as progress:
        progress.say("starting [the] stack")
        progress.begin(WORKLOAD, "inflight")
        progress.advance(5)
        progress.end(WORKLOAD, finished_run("inflight", 1))
    lines = out.getvalue().splitlines()
    assert lines[0] == "starting [the] stack"
    assert lines[1].startswith("mixed round 1 inflight:")
    assert len(lines) == 2


def test_wrong_workload_file_is_found_before_anything_starts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "day.jsonl").write_text("nonsense\n")
    with pytest.raises(CommandError, match="line 1: Invalid JSON"):
        main(["--workload", "day.jsonl"])
    assert not (tmp_path / "run").exists()
