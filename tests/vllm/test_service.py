"""Routers' streams to an executor around a fake vLLM: attach and replay, refusals, reports and drain are those of the
service that serves our own engine."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from inflight.common.model_source import ModelSource
from inflight.executor.serving.process import Serving
from inflight.executor.settings import ExecutorSettings
from inflight.executor.vllm import main
from inflight.executor.vllm.main import build_vllm_executor
from inflight.v1 import executor_pb2, executor_pb2_grpc, types_pb2
from tests.support.checkpoints.adapter_files import save_adapter
from tests.support.stack.router_stream import make_submit, router_stream
from tests.vllm.fake_backend import FACTS, FakeBackend, greedy

STOP_ID = 7


@dataclass(frozen=True, slots=True)
class Running:
    """An executor that serves, and its fake vLLM."""

    backend: FakeBackend
    serving: Serving
    address: str

    @property
    def generation(self) -> int:
        return self.serving.service.description.generation


@asynccontextmanager
async def run_executor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, **more: Any) -> AsyncIterator[Running]:
    """An executor with these settings besides."""
    monkeypatch.setattr(main, "find_end_tokens", lambda *given: (STOP_ID,))
    settings = ExecutorSettings(engine="vllm", insecure=True, executor_id="v", num_standby_sequences=1, **more)
    backend = FakeBackend()
    engine, serving = build_vllm_executor(settings, ModelSource("m", tmp_path, None, "r"), backend, None)
    address = await serving.server.start("127.0.0.1:0")
    engine.start()
    reports = asyncio.create_task(serving.service.run())
    yield Running(backend, serving, address)
    reports.cancel()
    await serving.service.close(0)
    await serving.server.stop(0)
    await engine.close()


@pytest.fixture
async def running(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Running]:
    async with run_executor(tmp_path, monkeypatch) as one:
        yield one


async def test_description_has_vllms_sizes_and_what_a_resume_cannot_keep(running: Running) -> None:
    async with grpc.aio.insecure_channel(running.address) as channel:
        stub = executor_pb2_grpc.ExecutorServiceStub(channel)
        described = await stub.Describe(executor_pb2.DescribeRequest())
    assert (described.model, described.backend, described.eos_token_ids) == ("m", "vllm 0.0", [STOP_ID])
    assert (described.block_size, described.total_blocks) == (FACTS.block_size, FACTS.num_blocks)
    assert (described.max_num_sequences, described.num_standby_sequences) == (FACTS.max_num_sequences, 1)
    assert (described.batching, described.num_adapter_slots) == (
        types_pb2.BATCHING_MODE_INFLIGHT,
        FACTS.num_adapter_slots,
    )
    assert any("sampled tokens" in text for text in described.inexact_resume)


async def test_output_is_replayed_to_a_router_that_attaches_after_the_end(running: Running) -> None:
    expected = greedy([1, 2], 3)
    async with router_stream(running.address, generation=running.generation) as router:
        router.send(submits=[make_submit("a", [1, 2], 3)])
        await router.until(lambda: running.backend.requests)
        for number in range(3):
            running.backend.step()
            await router.until(lambda number=number: len(router.of("a")[0].tokens) == number + 1)  # type: ignore[misc]
        await router.until(lambda: router.of("a")[0].end)
        assert router.of("a")[0].token_ids == expected
    async with router_stream(running.address, generation=running.generation) as router:
        router.attach("a", 1, 1)
        await router.until(lambda: router.of("a") and router.of("a")[0].end)
        assert router.of("a")[0].tokens == list(enumerate(expected))[1:]


async def test_sequence_whose_router_is_gone_runs_on_for_another_one(running: Running) -> None:
    async with router_stream(running.address, generation=running.generation) as router:
        router.send(submits=[make_submit("a", [1, 2], 4)])
        await router.until(lambda: running.backend.requests)
        running.backend.step()
        await router.until(lambda: router.of("a")[0].tokens)
    running.backend.step()
    async with router_stream(running.address, generation=running.generation) as router:
        router.attach("a", 1, 0)
        await router.until(lambda: router.of("a") and len(router.of("a")[0].tokens) == 2)
        running.backend.step()
        running.backend.step()
        await router.until(lambda: router.of("a")[0].end)
        assert router.of("a")[0].token_ids == greedy([1, 2], 4)


async def test_what_vllm_cannot_do_is_refused_by_name(running: Running) -> None:
    submit = make_submit("a", [1, 2], 4)
    submit.sampling.no_repeat_ngram_size = 2
    async with router_stream(running.address, generation=running.generation) as router:
        router.send(submits=[submit])
        await router.until(lambda: router.rejected)
        (rejected,) = router.rejected
    assert rejected.reason == executor_pb2.REJECT_REASON_UNSUPPORTED
    assert rejected.detail == "sampling.no_repeat_ngram_size: vLLM has none"
    assert running.backend.requests == []


async def test_adapters_take_each_others_slot_and_are_known_by_their_content(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for seed, name in enumerate(("one", "two")):
        save_adapter(tmp_path / "adapters" / name, seed)
    save_adapter(tmp_path / "adapters" / "large", rank=16)
    async with (
        run_executor(tmp_path, monkeypatch, adapter_folder=tmp_path / "adapters", max_adapter_rank=8) as running,
        router_stream(running.address, generation=running.generation) as router,
    ):
        await router.until(lambda: router.reports and router.reports[-1].adapters)
        known = {one.name: one.hash for one in router.reports[-1].adapters}
        assert known.keys() == {"one", "two"}
        for name, adapter_hash in known.items():
            submit = make_submit(name, [1, 2], 1)
            submit.adapter_hash = adapter_hash
            router.send(submits=[submit])
            await router.until(lambda: running.backend.requests)
            running.backend.step()
            await router.until(lambda name=name: router.of(name) and router.of(name)[0].end)  # type: ignore[misc]
            assert router.of(name)[0].token_ids == greedy([1, 2], 1, adapter_hash)
            assert running.backend.adapters == {0: adapter_hash}


async def test_report_lists_what_is_held_and_vllms_blocks(running: Running) -> None:
    async with router_stream(running.address, generation=running.generation) as router:
        router.send(submits=[make_submit(name, [1, 2], 20) for name in "abc"])
        await router.until(lambda: len(running.backend.requests) == 3)
        running.backend.step()
        await router.until(lambda: router.reports[-1].num_running == 2)
        report = router.reports[-1]
        assert [one.request_id for one in report.held] == ["a", "b", "c"]
        assert (report.num_waiting, report.used_blocks, report.total_blocks) == (1, 2, FACTS.num_blocks)
        assert report.num_steps == 1
        assert not report.HasField("device_busy_s")


async def test_drain_hands_back_what_has_not_begun_and_finishes_the_rest(running: Running) -> None:
    async with router_stream(running.address, generation=running.generation) as router:
        router.send(submits=[make_submit(name, [1, 2], 2) for name in "abc"])
        await router.until(lambda: len(running.backend.requests) == 3)
        running.backend.step()
        await router.until(lambda: router.of("b") and router.of("b")[0].tokens)
        draining = asyncio.create_task(running.serving.service.drain(60))
        await router.until(lambda: router.of("c")[0].end)
        running.backend.step()
        await draining
        await router.until(lambda: len(router.ended) == 3)
        reasons = {slot.request_id: slot.end.reason for slot in router.slots if slot.end is not None}
    assert reasons == {
        "a": types_pb2.FINISH_REASON_LENGTH,
        "b": types_pb2.FINISH_REASON_LENGTH,
        "c": types_pb2.FINISH_REASON_PREEMPTED,
    }


async def test_death_of_vllm_fails_the_process_and_ends_no_sequence(running: Running) -> None:
    async with router_stream(running.address, generation=running.generation) as router:
        router.send(submits=[make_submit("a", [1, 2], 4)])
        await router.until(lambda: running.backend.requests)
        running.backend.die()
        await asyncio.wait_for(running.serving.failed.wait(), 60)
        await asyncio.wait_for(running.backend.wait_until_lost(), 60)
        assert router.of("a")[0].end is None
