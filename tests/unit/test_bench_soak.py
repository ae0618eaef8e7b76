"""The verdict of a soak and its load, without a stack."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

import grpc
import pytest

from inflight import AsyncClient
from inflight.bench.soak.load import SoakLoad
from inflight.bench.soak.readings import Readings, num_open_files, num_threads
from inflight.bench.soak.result import SoakResult, page, trend, trends_of, values_of
from inflight.bench.targets.target import TargetError
from inflight.bench.workloads.plan import PlannedRequest
from inflight.v1 import inference_pb2
from tests.unit.scripted_router import ScriptedRouter, serving, speak

REQUESTS = [PlannedRequest((1, 2, 3), num_tokens, 0.0) for num_tokens in range(1, 9)]


def noisy(start: float, growth: float, number: int = 100) -> list[float]:
    """So many readings, of which every tenth is far off."""
    return [start + growth * i + (50.0 if i % 10 == 3 else 0.0) for i in range(number)]


@pytest.mark.parametrize(
    ("readings", "is_flat"),
    [
        pytest.param(noisy(200.0, 0.0), True, id="noise"),
        pytest.param(noisy(200.0, 0.5), False, id="a leak"),
        pytest.param(noisy(200.0, -0.5), True, id="falling"),
        pytest.param([100.0] * 15 + [200.0] * 85, True, id="the warm-up"),
        pytest.param([200.0] * 60 + [215.0] * 40, False, id="a step that stays"),
    ],
)
def test_memory_is_flat_where_its_late_middle_is_its_early_one(readings: Sequence[float], is_flat: bool) -> None:
    found = trend("router-0", "resident MiB", readings)
    assert found is not None
    assert found.is_flat is is_flat


def test_too_few_readings_give_no_verdict() -> None:
    assert trend("router-0", "threads", [1.0] * 5) is None


def outcome(readings: Sequence[float], left: int = 0) -> SoakResult:
    trends, too_few = trends_of({("router-0", "open files"): list(readings)})
    return SoakResult({}, 60.4, 10, 2, 1, 100, 0, (), {"blocks held": left}, trends, too_few)


def test_last_line_says_whether_it_was_flat() -> None:
    flat = outcome([20.0] * 20)
    assert flat.last_line == "soak: seconds=60 requests=10 failed=0 flat=yes"
    assert page(flat).markdown().endswith(f"```\n{flat.last_line}\n```\n")
    assert values_of(flat, [0.0], {})["last_line"] == flat.last_line
    assert outcome([20.0] * 10 + [90.0] * 10).last_line.endswith("flat=no")
    assert outcome([20.0] * 20, left=1).last_line.endswith("flat=no")
    assert outcome([20.0] * 2).last_line.endswith("flat=unknown")


def test_open_files_and_threads_are_counted() -> None:
    before = num_open_files(os.getpid())
    with open(os.devnull) as _:
        assert num_open_files(os.getpid()) == before + 1
    assert num_threads(os.getpid()) >= 1


async def test_load_reads_cancels_and_vanishes_and_stops_when_it_is_told() -> None:
    def answer(
        request: inference_pb2.GenerateRequest, context: grpc.ServicerContext
    ) -> Iterator[inference_pb2.StreamEvent]:
        if load.num_sent >= 60:
            load.is_stopping = True
        yield from speak(["x"] * request.stopping.max_tokens)

    with serving(ScriptedRouter(answer)) as address:
        async with AsyncClient(address) as client:
            load = SoakLoad(client, (address,), REQUESTS, seed=1)
            await load.run(num_clients=3)
    assert load.num_sent >= 60
    assert load.num_failed == 0, load.errors
    assert load.num_cancelled > 0
    assert load.num_vanished > 0


async def test_load_counts_an_answer_that_is_too_short() -> None:
    def answer(
        request: inference_pb2.GenerateRequest, context: grpc.ServicerContext
    ) -> Iterator[inference_pb2.StreamEvent]:
        load.is_stopping = load.num_failed > 0
        yield from speak(["x"])

    with serving(ScriptedRouter(answer)) as address:
        async with AsyncClient(address) as client:
            load = SoakLoad(client, (address,), [PlannedRequest((1,), 3, 0.0)], seed=1)
            await load.run(num_clients=1)
    assert load.num_failed >= 1
    assert load.errors[0] == "1 of 3 tokens"


async def test_process_that_ended_ends_the_soak(redis_admin_url: str) -> None:
    async with (
        AsyncClient("127.0.0.1:1") as client,
        Readings({"executor-0": 2**30}, redis_admin_url, client) as readings,
    ):
        with pytest.raises(TargetError, match="executor-0 cannot be read"):
            await readings.read(0.0)
