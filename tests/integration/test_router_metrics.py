"""A router's metrics of real requests, with real Redis and executors with a fake device."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc.aio
import pytest
from prometheus_client import CollectorRegistry

from inflight.router.stats.gauges import ScrapeGauges
from inflight.v1 import inference_pb2
from tests.support.stack.cluster import Cluster, ExecutorShape, RunningRouter, run_cluster, run_router, token_request

ONE_SEAT = ExecutorShape(max_num_sequences=1)


class Scrape:
    """The figures of one router, with the difference to when it was made."""

    def __init__(self, router: RunningRouter, model: str) -> None:
        self._registry: CollectorRegistry = router.registry
        self._model = model

    def __call__(self, name: str, **labels: str) -> float | None:
        return self._registry.get_sample_value(name, {"model": self._model, **labels})

    def gen_ai(self, name: str, **labels: str) -> float | None:
        own = {"gen_ai_provider_name": "inflight", "gen_ai_request_model": self._model}
        own["gen_ai_operation_name"] = "text_completion"
        return self._registry.get_sample_value(f"gen_ai_server_{name}", {**own, **labels})


async def whole(router: RunningRouter, request: inference_pb2.GenerateRequest) -> list[Any]:
    return [response.event async for response in router.stub.Generate(request)]


async def queued_behind(cluster: Cluster, request: inference_pb2.GenerateRequest) -> Any:
    """A call whose request waits, since the one seat's step waits for the brake."""
    cluster.executors[0].brake.hold()
    first = cluster.routers[0].stub.Generate(token_request([1, 2], 4))
    await asyncio.to_thread(cluster.executors[0].brake.is_waited_for.wait)
    request.want_queue_events = True
    waiting = cluster.routers[0].stub.Generate(request)
    assert (await waiting.read()).event.HasField("queued")
    return first, waiting


async def test_request_is_counted_from_admission_to_end(redis_url: str, pool: str) -> None:
    async with run_cluster(redis_url, pool) as cluster:
        (router,) = cluster.routers
        await whole(router, token_request([1, 2, 3, 4, 0, 1], 5))
        await whole(router, token_request([1, 2, 3, 4, 0, 1], 5))
        see = Scrape(router, pool)
        standard = {"class": "standard"}
        assert see("inflight_requests_total", **standard, outcome="length") == 2
        assert see("inflight_admissions_total", **standard) == 2
        assert see("inflight_queue_wait_seconds_count", **standard) == 2
        assert see("inflight_prompt_tokens_total") == 12
        assert see("inflight_cached_prompt_tokens_total") == 4
        assert see("inflight_output_tokens_total") == 10
        assert see.gen_ai("time_to_first_token_seconds_count") == 2
        assert see.gen_ai("time_per_output_token_seconds_count") == 2
        assert see.gen_ai("request_duration_seconds_count", error_type="") == 2
        registry = router.registry
        assert registry.get_sample_value("inflight_redis_up") == 1
        assert registry.get_sample_value("inflight_redis_call_seconds_count", {"script": "submit"}) == 2


async def test_refusals_are_counted_by_reason_and_never_as_ends(redis_url: str, pool: str) -> None:
    async with run_cluster(redis_url, pool, shape=ExecutorShape(num_blocks=4)) as cluster:
        (router,) = cluster.routers
        refused = [
            (token_request([1], 30), {"model": pool, "class": "standard", "reason": "NEVER_FITS"}),
            (token_request([], 3), {"model": pool, "class": "standard", "reason": "INVALID_FIELD"}),
            (token_request([1], 3, model="unknown"), {"model": "", "class": "standard", "reason": "UNKNOWN_MODEL"}),
        ]
        for request, labels in refused:
            with pytest.raises(grpc.aio.AioRpcError):
                await whole(router, request)
            assert router.registry.get_sample_value("inflight_refusals_total", labels) == 1
        assert "inflight_requests_total{" not in str(list(router.registry.collect()))


async def test_client_that_goes_away_while_it_waits_ends_cancelled(redis_url: str, pool: str) -> None:
    async with run_cluster(redis_url, pool, shape=ONE_SEAT) as cluster:
        (router,) = cluster.routers
        first, waiting = await queued_behind(cluster, token_request([1, 2], 4))
        dispatcher = router.pools.by_name[pool].dispatcher
        cancelled = dispatcher.streams[-1]
        waiting.cancel()
        # The seat stays taken until the router has seen the cancellation
        await asyncio.wait_for(cancelled.forgotten.wait(), 60)
        cluster.executors[0].brake.release()
        async for _ in first:
            pass
        await asyncio.wait_for(dispatcher.wait_until_empty(), 60)
        see = Scrape(router, pool)
        assert see("inflight_requests_total", **{"class": "standard"}, outcome="cancelled") == 1
        assert see("inflight_requests_total", **{"class": "standard"}, outcome="length") == 1
        assert see("inflight_admissions_total", **{"class": "standard"}) == 1


async def test_ledger_is_looked_up_at_most_once_a_second(redis_url: str, pool: str) -> None:
    now, registry = [0.0], CollectorRegistry()
    async with run_cluster(redis_url, pool, shape=ONE_SEAT) as cluster:
        (router,) = cluster.routers
        looked_up = ScrapeGauges(registry, list(router.pools.by_name.values()), lambda: now[0])

        def see(name: str, **labels: str) -> float | None:
            return registry.get_sample_value(f"inflight_{name}", {"model": pool, **labels})

        await looked_up.refresh()
        assert (see("streams"), see("executor_links"), see("executors_accepting")) == (0, 1, 1)
        assert (see("ledger_blocks"), see("ledger_reserved_blocks")) == (32, 0)
        first, waiting = await queued_behind(cluster, token_request([1, 2, 3], 5))
        await looked_up.refresh()
        # What this router holds is always new, what the ledger says a second later
        assert (see("streams"), see("queue_requests", **{"class": "standard"})) == (2, 0)
        now[0] += 1
        await looked_up.refresh()
        assert see("queue_requests", **{"class": "standard"}) == 1
        assert see("queue_tokens", **{"class": "standard"}) == 8
        assert (see("ledger_reserved_blocks"), see("ledger_reserved_sequences")) == (2, 1)
        assert see("ledger_sequences") == 1
        for call in (first, waiting):
            call.cancel()
        cluster.executors[0].brake.release()


async def test_figures_of_a_redis_that_is_away_are_left_out(pool: str) -> None:
    registry = CollectorRegistry()
    async with run_router("lonely", pool, "redis://127.0.0.1:1/0", []) as router:
        await ScrapeGauges(registry, list(router.pools.by_name.values())).refresh()
        assert registry.get_sample_value("inflight_streams", {"model": pool}) == 0
        assert registry.get_sample_value("inflight_ledger_blocks", {"model": pool}) is None
        assert router.registry.get_sample_value("inflight_redis_up") == 0
        assert router.registry.get_sample_value("inflight_redis_errors_total", {"script": "snapshot"}) == 1
