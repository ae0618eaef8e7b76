"""Exit of an executor's process when an indispensable part fails; its device is a hash."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any, cast
from urllib.error import URLError

import pytest

from inflight.common.process import EXIT_FAILED
from inflight.executor import main
from inflight.executor.engine.runner import PendingStep
from inflight.executor.loader import Loaded
from inflight.executor.main import run_executor
from inflight.executor.scheduler.sequence import StepPlan, TokenLogprobs
from inflight.executor.serving.service import ExecutorService, Identity
from inflight.executor.serving.submission import SubmissionLimits
from inflight.executor.settings import ExecutorSettings
from inflight.local.ports import free_ports
from inflight.v1 import executor_pb2
from tests.support.device.fake_device import VOCABULARY_SIZE, RunStep
from tests.support.scheduler.scheduling import LIMITS
from tests.support.stack.http_pages import page
from tests.support.stack.router_stream import make_submit, router_stream

NUM_BLOCKS = 32
LENGTH = 40


class NoCollection:
    """In place of what takes over the garbage collection of the whole process."""

    def start(self) -> None:
        """Nothing is frozen."""

    def after_step(self) -> None:
        """Nothing is collected."""

    def when_idle(self) -> None:
        """Nothing is collected."""


class FaultyStep(RunStep):
    """A step whose tokens are there; reading anything else of it is a bug, which no step's failure covers."""

    def logprobs(self) -> Mapping[int, TokenLogprobs]:
        raise AssertionError("a bug of the engine's")


class FaultyDevice:
    """Runs a number of good steps; the next one ends the engine's thread."""

    def __init__(self, num_good_steps: int) -> None:
        self._num_good_steps = num_good_steps

    def launch(self, plan: StepPlan) -> PendingStep:
        self._num_good_steps -= 1
        step = RunStep if self._num_good_steps >= 0 else FaultyStep
        return step((3,) * sum(plan.samples))

    def close(self) -> None:
        """See `StepRunner`."""


def free_address() -> str:
    (port,) = free_ports("127.0.0.1", 1)
    return f"127.0.0.1:{port}"


def start_process(
    monkeypatch: pytest.MonkeyPatch, device: FaultyDevice, http_listen: str = ""
) -> tuple[str, asyncio.Task[int]]:
    """The body of an executor's process without a model; returns where it listens."""
    address = free_address()
    identity = Identity(
        executor_pb2.DescribeResponse(generation=1, model="m"),
        SubmissionLimits(LIMITS.context_length, VOCABULARY_SIZE, frozenset()),
    )
    monkeypatch.setattr(main, "GarbageCollection", NoCollection)
    monkeypatch.setattr(main, "start_runner", lambda settings, loaded: device)
    monkeypatch.setattr(main, "identity", lambda settings, loaded: identity)
    settings = ExecutorSettings(listen=address, tokens_per_block=16, http_listen=http_listen)
    loaded = Loaded(cast("Any", None), cast("Any", None), NUM_BLOCKS, LIMITS)
    return address, asyncio.create_task(run_executor(settings, loaded, None))


async def test_process_ends_with_1_when_its_engine_dies_and_hands_nothing_back(monkeypatch: pytest.MonkeyPatch) -> None:
    address, process = start_process(monkeypatch, FaultyDevice(num_good_steps=3))
    async with router_stream(address) as router:
        router.send(submits=[make_submit("a", [1], LENGTH)])
        assert await asyncio.wait_for(process, 60) == EXIT_FAILED
        await router.until(lambda: router.is_over)
    (slot,) = router.of("a")
    assert slot.end is None


async def test_process_ends_with_1_when_a_steps_output_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_memory(self: ExecutorService, output: object) -> None:
        raise MemoryError

    address, process = start_process(monkeypatch, FaultyDevice(num_good_steps=100))
    async with router_stream(address) as router:
        monkeypatch.setattr(ExecutorService, "on_output", no_memory)
        router.send(submits=[make_submit("a", [1], LENGTH)])
        assert await asyncio.wait_for(process, 60) == EXIT_FAILED


async def test_process_ends_with_1_when_its_reports_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    address, process = start_process(monkeypatch, FaultyDevice(num_good_steps=100))
    async with router_stream(address) as router:
        monkeypatch.setattr("inflight.executor.serving.service.report_of", None)
        router.send(submits=[make_submit("a", [1], LENGTH)])
        assert await asyncio.wait_for(process, 60) == EXIT_FAILED


async def test_process_shows_its_metrics_until_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    http_address = free_address()
    address, process = start_process(monkeypatch, FaultyDevice(num_good_steps=10), http_address)
    async with router_stream(address) as router:
        router.send(submits=[make_submit("a", [1], 5)])
        await router.until(lambda: router.of("a") != [] and router.of("a")[0].end is not None)
        assert 'inflight_computed_tokens_total{model="m"} 5.0' in (await page(http_address))[1]
        router.send(submits=[make_submit("b", [1], LENGTH)])
        assert await asyncio.wait_for(process, 60) == EXIT_FAILED
    with pytest.raises(URLError):
        await page(http_address)
