"""What tenants used, over several routers and executors: sums, deaths, what callers see."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import grpc
import pytest
from redis.asyncio import Redis

from inflight.executor.serving import usage as reporting
from inflight.router.settings import RouterSettings
from inflight.v1 import inference_pb2, types_pb2
from tests.integration.test_requests import expected_ids
from tests.integration.test_stats import api_key, shown
from tests.support.stack import cluster as clusters
from tests.support.stack.cluster import (
    BrakedStep,
    Cluster,
    ExecutorShape,
    RunningExecutor,
    RunningRouter,
    run_cluster,
    token_request,
)
from tests.support.stack.credentials import key_entry

TIMEOUT_S = 60
COUNTS = ("computed_prompt_tokens", "cached_prompt_tokens", "output_tokens")


class TimedStep(BrakedStep):
    """A step that is busy from its launch until its result is read."""

    @property
    def began_s(self) -> float:  # type: ignore[override]
        return self._began_s

    @property
    def ended_s(self) -> float:  # type: ignore[override]
        return self._ended_s

    def __init__(self, *args: object) -> None:
        super().__init__(*args)  # type: ignore[arg-type]
        self._began_s = self._ended_s = time.perf_counter()

    def result(self) -> tuple[int | None, ...]:
        ids = super().result()
        self._ended_s = time.perf_counter()
        return ids


@pytest.fixture(autouse=True)
def _steps_take_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(clusters, "BrakedStep", TimedStep)
    monkeypatch.setattr(reporting, "INTERVAL_S", 0.05)


async def generate(router: RunningRouter, tenant: str, number: int, max_tokens: int = 8) -> types_pb2.Usage:
    """What a request used, as its end says."""
    request = token_request([1 + number % 4, 2, 3, 4, number % 4], max_tokens, tenant=tenant)
    events = [response.event async for response in router.stub.Generate(request)]
    done: inference_pb2.Done = events[-1].done
    return done.usage


async def lines_of(router: RunningRouter, **asked: str) -> list[inference_pb2.UsageLine]:
    return list((await router.stub.GetUsage(inference_pb2.GetUsageRequest(**asked))).lines)


def busy_ns(lines: list[inference_pb2.UsageLine]) -> int:
    return sum(line.used.busy_ns for line in lines)


async def settled_lines(router: RunningRouter, executors: list[RunningExecutor]) -> list[inference_pb2.UsageLine]:
    """The lines, once they have all that these executors were busy with."""
    async with asyncio.timeout(TIMEOUT_S):
        while True:
            expected = sum(executor.engine.accounting.busy_ns for executor in executors)
            lines = await lines_of(router)
            if executors and all(one.scheduler.is_idle for one in executors) and busy_ns(lines) == expected > 0:
                return lines
            await asyncio.sleep(0.02)


async def run_tenants(cluster: Cluster, num_each: int = 6) -> dict[str, list[types_pb2.Usage]]:
    """Requests of two tenants, each over all routers; what each used."""
    calls = [
        (tenant, generate(cluster.routers[number % len(cluster.routers)], tenant, number))
        for number in range(num_each)
        for tenant in ("acme", "umbrella")
    ]
    used = await asyncio.gather(*(call for _, call in calls))
    return {name: [one for (tenant, _), one in zip(calls, used, strict=True) if tenant == name] for name, _ in calls}


async def test_sums_equal_the_busy_time_and_the_tokens_over_routers_and_executors(redis_url: str, pool: str) -> None:
    async with run_cluster(redis_url, pool, routers=2, executors=2) as cluster:
        used = await run_tenants(cluster)
        lines = await settled_lines(cluster.routers[0], cluster.executors)

        assert await lines_of(cluster.routers[1]) == lines
        for tenant, usages in used.items():
            mine = [line.used for line in lines if line.tenant == tenant]
            of_requests = [usage.resources for usage in usages]
            for name in (*COUNTS, "busy_ns"):
                assert sum(getattr(one, name) for one in mine) == sum(getattr(one, name) for one in of_requests), name
            assert sum(one.output_tokens for one in mine) == sum(usage.output_tokens for usage in usages)
            computed = sum(one.computed_prompt_tokens + one.cached_prompt_tokens for one in mine)
            assert computed == sum(usage.prompt_tokens for usage in usages)
        counted = [
            router.registry.get_sample_value(
                "inflight_usage_output_tokens_total",
                {"model": pool, "class": "standard", "executor_class": ""},
            )
            for router in cluster.routers
        ]
        assert sum(value or 0 for value in counted) == sum(line.used.output_tokens for line in lines)


async def test_executor_that_dies_is_charged_as_far_as_it_has_reported(redis_url: str, pool: str) -> None:
    shape = ExecutorShape(num_blocks=64)
    async with run_cluster(redis_url, pool, routers=2, executors=2, shape=shape) as cluster:
        for executor in cluster.executors:
            executor.brake.hold()
        calls = [asyncio.create_task(generate(cluster.routers[n % 2], "acme", n, max_tokens=20)) for n in range(4)]
        async with asyncio.timeout(TIMEOUT_S):
            while not all(executor.engine.num_steps >= 3 for executor in cluster.executors):
                for executor in cluster.executors:
                    executor.brake.permit(1)
                await asyncio.sleep(0.01)
        dead, alive = cluster.executors
        await dead.stop()
        alive.brake.release()
        usages = await asyncio.gather(*calls)
        async with asyncio.timeout(TIMEOUT_S):
            while (
                not alive.scheduler.is_idle
                or busy_ns(await lines_of(cluster.routers[0])) < alive.engine.accounting.busy_ns
            ):
                await asyncio.sleep(0.02)

        lines = await lines_of(cluster.routers[0])
        busy = [executor.engine.accounting.busy_ns for executor in (dead, alive)]
        assert busy[1] <= busy_ns(lines) <= sum(busy)
        mine = [line.used for line in lines if not line.is_system]
        assert sum(one.recomputed_tokens for one in mine) > 0
        assert sum(one.output_tokens for one in mine) <= sum(usage.output_tokens for usage in usages) == 80


async def test_router_that_dies_costs_no_usage(redis_url: str, pool: str) -> None:
    async with run_cluster(redis_url, pool, routers=2) as cluster:
        await run_tenants(cluster, num_each=2)
        await cluster.routers[1].kill()
        for number in range(3):
            await generate(cluster.routers[0], "acme", number)

        lines = await settled_lines(cluster.routers[0], cluster.executors)
        assert sum(line.used.output_tokens for line in lines) == (4 + 3) * 8


async def test_lost_redis_costs_no_usage_of_an_executor_that_lives(
    redis_url: str, redis_admin_url: str, pool: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(reporting, "REPEAT_S", 0.2)
    async with run_cluster(redis_url, pool) as cluster, Redis.from_url(redis_admin_url) as redis:
        await run_tenants(cluster)
        before = await settled_lines(cluster.routers[0], cluster.executors)
        await redis.delete(*[key async for key in redis.scan_iter(f"*{{{pool}}}:usage:*")])

        assert await settled_lines(cluster.routers[0], cluster.executors) == before
        assert "the ledger has lost the usage of" in caplog.text


async def test_callers_see_their_own_tenant_and_operators_all(redis_url: str, pool: str, tmp_path: Path) -> None:
    keys = tmp_path / "keys.toml"
    keys.write_text(
        key_entry(api_key("acme"), "acme") + key_entry(api_key("boss"), "umbrella", operator="true", id='"boss"')
    )
    settings = RouterSettings(api_keys_file=keys)
    async with run_cluster(redis_url, pool, settings=settings, metadata=shown("boss")) as cluster:
        router = cluster.routers[0]
        for name in ("acme", "boss"):
            request = token_request([1, 2, 3], 4)
            async for _ in router.stub.Generate(request, metadata=shown(name)):
                pass
        seen: set[str] = set()
        async with asyncio.timeout(TIMEOUT_S):
            while seen != {"acme", "umbrella"}:
                response = await router.stub.GetUsage(inference_pb2.GetUsageRequest(), metadata=shown("boss"))
                seen = {line.tenant for line in response.lines if not line.is_system}
        own = await router.stub.GetUsage(inference_pb2.GetUsageRequest(), metadata=shown("acme"))
        assert {(line.tenant, line.is_system) for line in own.lines} == {("acme", False)}
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await router.stub.GetUsage(inference_pb2.GetUsageRequest(tenant="umbrella"), metadata=shown("acme"))
        assert refused.value.code() == grpc.StatusCode.PERMISSION_DENIED


@pytest.mark.parametrize(
    ("asked", "field"),
    [
        ({"since": "yesterday"}, "since"),
        ({"since": "2026-11-30", "until": "2026-11-29"}, "until"),
        ({"since": "2020-01-01"}, "since"),
    ],
)
async def test_days_that_are_none_are_refused(redis_url: str, pool: str, asked: dict[str, str], field: str) -> None:
    async with run_cluster(redis_url, pool) as cluster:
        with pytest.raises(grpc.aio.AioRpcError) as refused:
            await lines_of(cluster.routers[0], **asked)
        assert refused.value.code() == grpc.StatusCode.INVALID_ARGUMENT
        assert field in (refused.value.details() or "")


async def mine_of(router: RunningRouter, executors: list[RunningExecutor]) -> list[types_pb2.ResourceUsage]:
    return [line.used for line in await settled_lines(router, executors) if not line.is_system]


@pytest.mark.parametrize("how", ["stop", "stop choices", "cancel", "deadline"])
async def test_request_that_the_router_ends_has_its_figures_if_it_asks(redis_url: str, pool: str, how: str) -> None:
    async with run_cluster(redis_url, pool) as cluster:
        router, brake = cluster.routers[0], cluster.executors[0].brake
        output = inference_pb2.OutputOptions(token_ids=True, resources=True)
        request = token_request([1, 2, 3], 30, request_id="r", tenant="acme", output=output)
        if how.startswith("stop"):
            text = "".join(f"t{token}" for token in expected_ids([1, 2, 3], 30, b"acme\0"))
            request.stopping.stop.append(text[8:14])
            request.n = 2 if "choices" in how else 1
        else:
            brake.hold()
        if how == "deadline":
            request.deadlines.total.FromMilliseconds(300)
        brake.permit(3)  # of 30
        usage = types_pb2.Usage()
        async for response in router.stub.Generate(request):
            event = response.event
            if how == "cancel" and event.HasField("delta"):
                await router.stub.Cancel(inference_pb2.CancelRequest(request_id="r", tenant="acme"))
                brake.release()
            if how == "deadline" and event.HasField("finished"):
                brake.release()  # the executor learns of the end after the client
            usage.MergeFrom(event.done.usage)

        (mine,) = await mine_of(router, cluster.executors)
        for name in (*COUNTS, "busy_ns"):
            assert getattr(usage.resources, name) == getattr(mine, name), name
        assert mine.output_tokens >= usage.output_tokens > 0


async def test_client_that_leaves_costs_no_usage(redis_url: str, pool: str) -> None:
    async with run_cluster(redis_url, pool) as cluster:
        executor = cluster.executors[0]
        executor.brake.hold()
        executor.brake.permit(3)
        call = cluster.routers[0].stub.Generate(token_request([1, 2, 3], 30, tenant="acme"))
        async for response in call:
            if response.event.HasField("delta"):
                break
        call.cancel()
        executor.brake.release()
        (mine,) = await mine_of(cluster.routers[0], cluster.executors)
        assert mine.computed_prompt_tokens == 3
        assert mine.output_tokens >= 1
