"""Engines behind their drivers: the loop that sends and counts, and the protocol with a process that speaks it."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import Any

import pytest

from inflight.bench.measures.run import Run, Slo
from inflight.bench.peers.driver import Request, Setup, TokenBatch, drive
from inflight.bench.targets.driven import Driver, driven, last_words
from inflight.bench.targets.record import DriverRecord
from inflight.bench.targets.target import TargetError
from inflight.bench.workloads.plan import PlannedRequest, Workload
from tests.support.bench.scripted_peer import ScriptedEngine

SETUP = Setup(model="", cache_folder="", seats=2, max_request_tokens=64, num_threads=1)


def workload(*output_tokens: int, concurrency: int | None = None) -> Workload:
    planned = tuple(PlannedRequest((1, 2, 3), number, 0.0) for number in output_tokens)
    return Workload("short", planned, concurrency)


def driver(tmp_path: Path, variant: str = "") -> Driver:
    setup = Setup(model="", cache_folder="", seats=2, max_request_tokens=64, num_threads=1, variant=variant)
    command = (sys.executable, "-m", "tests.support.bench.scripted_peer")
    return Driver("scripted", command, dict(os.environ), setup, tmp_path / "logs" / "scripted.log")


async def run_process(tmp_path: Path, planned: Workload, variant: str = "") -> Run:
    async with driven(driver(tmp_path, variant), Slo()) as target:
        assert target.words == {"engine": "scripted 1.0"}
        return await target.run(planned, 1, lambda number: None)


async def until_stopped(pid: int) -> None:
    """A signal is sent at once and takes effect a little later."""
    async with asyncio.timeout(60):
        while not is_stopped(pid):
            await asyncio.sleep(0.001)


def is_stopped(pid: int) -> bool:
    """What the system says of a process after its command's name."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T"


def drive_scripted(engine: ScriptedEngine, requests: list[Request], concurrency: int | None) -> list[dict[str, Any]]:
    lines: list[dict[str, Any]] = []
    lines.append(drive(engine, requests, concurrency, lines.append))
    return lines


def test_every_request_is_sent_once_and_all_of_its_tokens_are_reported() -> None:
    requests = [Request(index, [1], number, 0.0) for index, number in enumerate((3, 1, 2))]
    *lines, done = drive_scripted(ScriptedEngine(SETUP), requests, None)
    sent = [request_id for line in lines for request_id, _ in line.get("sent", ())]
    tokens = [request_id for line in lines for request_id, _ in line.get("tokens", ())]
    assert sent == [0, 1, 2]
    assert sorted(tokens) == [0, 0, 0, 1, 2, 2]
    assert done["figures"]["num_steps"] == 3
    assert done["at_s"] == lines[-1]["at_s"]


def test_closed_loop_holds_no_more_than_its_concurrency() -> None:
    engine = ScriptedEngine(SETUP)
    requests = [Request(index, [1], 2, 0.0) for index in range(7)]
    lines = drive_scripted(engine, requests, 3)
    assert engine.most_held == 3
    sent_s = [at_s for line in lines for _, at_s in line.get("sent", ())]
    assert len(sent_s) == 7
    assert sent_s == sorted(sent_s)


def test_open_loop_counts_from_the_arrival_however_late_the_engine_takes_it() -> None:
    requests = [Request(0, [1], 5, 0.0), Request(1, [1], 1, 0.002)]
    lines = drive_scripted(ScriptedEngine(SETUP), requests, None)
    sent = {request_id: at_s for line in lines for request_id, at_s in line.get("sent", ())}
    assert sent == {0: 0.0, 1: 0.002}


def test_engine_on_a_thread_of_its_own_is_waited_for_until_the_next_arrival() -> None:
    waits: list[float | None] = []

    class WaitingEngine(ScriptedEngine):
        def advance(self, wait_s: float | None) -> list[TokenBatch]:
            waits.append(wait_s)
            return super().advance(wait_s)

    drive_scripted(WaitingEngine(SETUP), [Request(0, [1], 1, 0.0), Request(1, [1], 1, 0.001)], None)
    assert waits[0] is not None
    assert waits[-1] is None


def test_record_turns_lines_into_outcomes_and_seats() -> None:
    record = DriverRecord(workload(3, 2, 1))
    assert record.take({"sent": [[0, 0.0], [1, 0.0]]}) == 0
    assert record.take({"at_s": 0.1, "tokens": [[0, 1], [1, 1]]}) == 2
    record.take({"at_s": 0.3, "tokens": [[0, 2]]})
    first, second, third = record.outcomes()
    assert (first.first_token_s, first.ended_s, first.error) == (0.1, 0.3, None)
    assert first.gaps_ms == pytest.approx((100.0, 100.0))
    assert second.error == "1 tokens came of 2"
    assert third.error == "0 tokens came of 1"
    assert [sample.seats_used for sample in record.samples(0.35, seats=2)] == [0, 1, 1, 0]


async def test_process_runs_a_workload_and_the_next_one(tmp_path: Path) -> None:
    async with driven(driver(tmp_path), Slo()) as target:
        came: list[int] = []
        first = await target.run(workload(4, 2, 3), 1, came.append)
        second = await target.run(workload(5), 2, came.append)
    assert (first.mode, first.round, first.errors) == ("scripted", 1, ())
    assert (first.measures.num_failed, first.measures.output_tokens) == (0, 9)
    assert first.measures.tokens_per_step == pytest.approx(9 / 5)
    assert first.figures == {"device_busy_fraction": 0.5}
    assert first.cores.keys() == {"scripted", "bench"}
    assert (second.measures.output_tokens, sum(came)) == (5, 14)


async def test_engine_is_stopped_between_its_runs(tmp_path: Path) -> None:
    async with driven(driver(tmp_path), Slo()) as target:
        pid = target.pid
        await until_stopped(pid)
        run = await target.run(workload(2), 1, lambda number: None)
        assert run.measures.num_failed == 0
        await until_stopped(pid)


async def test_what_an_engine_prints_does_not_disturb_the_protocol(tmp_path: Path) -> None:
    run = await run_process(tmp_path, workload(2), variant="noisy")
    assert run.measures.num_failed == 0
    assert "and so do its children" in (tmp_path / "logs" / "scripted.log").read_text()


async def test_engine_that_cannot_run_here_says_why(tmp_path: Path) -> None:
    with pytest.raises(TargetError, match="scripted: CannotRun: this machine has no such engine"):
        await run_process(tmp_path, workload(2), variant="absent")


async def test_engine_that_dies_is_reported_with_its_last_words(tmp_path: Path) -> None:
    with pytest.raises(TargetError, match="scripted ended: the engine ran out of luck; see "):
        await run_process(tmp_path, workload(9), variant="dies")


async def test_interpreter_that_is_not_there_is_an_error_and_no_crash(tmp_path: Path) -> None:
    absent = Driver("gone", ("/nowhere/python",), {}, SETUP, tmp_path / "gone.log")
    with pytest.raises(TargetError, match="gone ended"):
        async with driven(absent, Slo()):
            pass


def test_last_words_of_a_log_that_is_not_there_are_none(tmp_path: Path) -> None:
    assert last_words(tmp_path / "none.log") == ""
