"""`stats()` of both clients: typed messages, one after the other, until the caller leaves."""

from __future__ import annotations

import json
from collections.abc import Iterator

import pytest

from inflight import aio, sync
from inflight.errors import InflightError
from inflight.statistics import Statistics, decode_stats
from inflight.v1 import inference_pb2, stats_pb2, types_pb2
from tests.unit.scripted_router import ScriptedRouter, asked, serving

WAIT_S = 60.0


def message(timestamp_ms: int = 1_000) -> inference_pb2.GetStatsResponse:
    """An executor of four seats that has made a step with one sequence on a seat and one without."""
    iteration = stats_pb2.IterationStats(
        iter=7,
        timestamp_ms=timestamp_ms,
        iter_latency_ms=12.5,
        parts=[stats_pb2.StepPart(name="plan", ms=0.25)],
        max_num_active_requests=4,
        kv_cache_stats=stats_pb2.KvCacheStats(max_num_blocks=64, used_num_blocks=3, evictable_num_blocks=1),
        inflight_batching_stats=stats_pb2.InflightBatchingStats(num_gen_requests=1, num_gen_tokens=1),
        constraint=types_pb2.STEP_CONSTRAINT_BLOCKS,
    )
    sequences = [
        stats_pb2.SequenceStats(request_id="r1", phase=stats_pb2.SEQUENCE_PHASE_DECODE, seat=0, tenant="acme"),
        stats_pb2.SequenceStats(phase=stats_pb2.SEQUENCE_PHASE_STANDBY),
    ]
    capacity = inference_pb2.ExecutorCapacity(executor_id="<e0>", seats_used=1, seats_total=4)
    return inference_pb2.GetStatsResponse(
        router_id="router-0",
        timestamp_ms=timestamp_ms,
        executors=[inference_pb2.ExecutorStats(capacity=capacity, iterations=[iteration], sequences=sequences)],
        queues=[
            inference_pb2.TenantQueue(
                model="smol", priority=types_pb2.PRIORITY_CLASS_BATCH, num_requests=5, longest_wait_ms=1500
            )
        ],
        latencies=[inference_pb2.ModelLatency(model="smol", ttft_p50_ms=80)],
    )


@pytest.fixture
def router() -> ScriptedRouter:
    router = ScriptedRouter()
    router.stats = [message(1_000), message(2_000)]
    return router


@pytest.fixture
def address(router: ScriptedRouter) -> Iterator[str]:
    with serving(router) as served:
        yield served


def check(first: Statistics) -> None:
    (executor,) = first.executors
    (iteration,) = executor.iterations
    assert (iteration.number, iteration.latency_ms, iteration.parts_ms) == (7, 12.5, {"plan": 0.25})
    assert (iteration.constraint, iteration.blocks_used, iteration.num_decodes) == ("blocks", 3, 1)
    assert [(one.phase, one.seat, one.tenant) for one in executor.sequences] == [
        ("decode", 0, "acme"),
        ("standby", None, ""),
    ]
    assert executor.capacity.seats_total == 4
    assert (first.queues[0].priority, first.queues[0].longest_wait_s) == ("batch", 1.5)
    assert (first.latencies[0].ttft_p50_ms, first.latencies[0].ttft_p99_ms) == (80.0, None)


def test_the_sync_client_tells_until_it_is_left(address: str, router: ScriptedRouter) -> None:
    with sync.Client(address) as client:
        stats = client.stats(model="smol", interval=0.25, want_iterations=True, want_sequences=True)
        check(next(stats))
        assert next(stats).time.timestamp() == 2.0
        stats.close()
        assert router.stats_left.wait(WAIT_S)
    assert asked(router) == [
        inference_pb2.GetStatsRequest(model="smol", interval_ms=250, want_iterations=True, want_sequences=True)
    ]


async def test_the_async_client_does_the_same(address: str, router: ScriptedRouter) -> None:
    async with aio.AsyncClient(address) as client:
        stats = client.stats()
        check(await anext(stats))
        await stats.aclose()
        assert router.stats_left.wait(WAIT_S)
    assert asked(router)[0].interval_ms == 1000


async def test_closing_the_client_ends_its_statistics(address: str) -> None:
    client = aio.AsyncClient(address)
    stats = client.stats()
    await anext(stats)
    await anext(stats)
    await client.close()
    with pytest.raises(InflightError, match="the client was closed"):
        await anext(stats)


def test_an_interval_that_no_router_takes_is_refused_before_a_call(address: str, router: ScriptedRouter) -> None:
    with sync.Client(address) as client, pytest.raises(ValueError, match=r"interval: 0\.01"):
        next(client.stats(interval=0.01))
    assert not asked(router)


def test_statistics_as_json_bear_the_names_of_tensorrt_llm() -> None:
    shown = json.loads(decode_stats(message()).as_json())
    iteration = shown["executors"][0]["iterations"][0]
    assert iteration["iterLatencyMS"] == 12.5
    assert iteration["kvCacheStats"]["maxNumBlocks"] == 64
    assert iteration["inflightBatchingStats"]["numGenRequests"] == 1
    assert iteration["numQueuedRequests"] == 0


def test_statistics_in_a_notebook_are_an_escaped_table() -> None:
    shown = decode_stats(message())._repr_html_()
    assert "<td>&lt;e0&gt;</td>" in shown
    assert "<td>1/4</td>" in shown
    assert "5 wait" in shown
