"""The board's history: a bounded ring, filled from what a router knows, shown to each caller as it may see it."""

from __future__ import annotations

import asyncio
import math
import tracemalloc
from typing import Any

import pytest

from inflight.common.errors import Reason
from inflight.router.dashboard.history import (
    EXECUTOR_FIELDS,
    MAX_EXECUTORS,
    MAX_TENANTS,
    MODEL_FIELDS,
    NUM_SAMPLES,
    TENANT_FIELDS,
    History,
    ModelSample,
    row_of,
    sample_as_json,
)
from inflight.router.dashboard.requests import RequestLog
from inflight.router.dashboard.sampling import Growth, Sampler, Totals, growth_of
from inflight.router.ledger.types import ClassQueue, ExecutorStanding, Snapshot, TenantQueue
from inflight.router.telemetry.events import PlacedAt, RequestEnd, RequestFacts
from inflight.router.telemetry.latencies import Latencies
from inflight.v1 import executor_pb2
from tests.support.clock import Clock

MODEL = "tiny"


class FakeLink:
    """An executor that has reported."""

    def __init__(self, name: str = "executor-0", **report: Any) -> None:
        self.executor_id = name
        self.description = executor_pb2.DescribeResponse(generation=1, max_num_sequences=8, total_blocks=100)
        self.report: executor_pb2.Report | None = executor_pb2.Report(**report)


class FakePool:
    """A model with its executors."""

    name = MODEL

    def __init__(self, *links: FakeLink) -> None:
        self.links = links


def figures(model: dict[str, Any]) -> dict[str, Any]:
    return dict(zip(MODEL_FIELDS, model["figures"], strict=True))


def tenants(count: int) -> dict[str, Any]:
    values = {f"tenant-{n}": {"outputTokens": n, "waiting": 1, "running": 0, "promptTokens": 0} for n in range(count)}
    return {name: row_of(TENANT_FIELDS, {**value, "ended": 0}) for name, value in values.items()}


def sampler_of(pool: FakePool, snapshot: Snapshot | None) -> tuple[Sampler, History, RequestLog, Latencies, Clock]:
    clock, history = Clock(), History()
    requests, latencies = RequestLog(clock), Latencies([MODEL], clock)

    async def looks() -> list[Any]:
        return [(pool, snapshot)]

    return Sampler(history, requests, latencies, looks, clock), history, requests, latencies, clock


def shown(history: History, **sees: Any) -> dict[str, Any]:
    """The newest sample's model, as an operator sees it."""
    sample = history.since(history.newest - 1)[0]
    names = sees.get("names_tenant", lambda tenant: True)
    model: dict[str, Any] = sample_as_json(sample, sample.at_s, lambda model: True, names)["models"][MODEL]
    return model


def test_history_keeps_fifteen_minutes_and_no_more() -> None:
    history = History()
    for number in range(NUM_SAMPLES + 20):
        history.add(5.0 * number, 5.0, {MODEL: ModelSample(row_of(MODEL_FIELDS, {"waiting": number}))})
    kept = history.since(0)
    assert len(kept) == NUM_SAMPLES
    assert kept[-1].at_s - kept[0].at_s == 15 * 60 - 5
    assert [sample.number for sample in history.since(NUM_SAMPLES + 18)] == [NUM_SAMPLES + 19, NUM_SAMPLES + 20]


def test_tenants_beyond_the_most_are_taken_together_and_nothing_is_lost() -> None:
    history = History()
    history.add(0, 5, {MODEL: ModelSample(row_of(MODEL_FIELDS, {}), tenants=tenants(MAX_TENANTS + 5))})
    named = shown(history)["tenants"]
    assert len(named) == MAX_TENANTS + 1
    assert "tenant-16" in named
    assert "tenant-0" not in named
    assert named[""] == [5, 0, 0, 0 + 1 + 2 + 3 + 4, 0]


def test_caller_reads_its_own_tenant_by_name_and_the_others_together() -> None:
    history = History()
    history.add(0, 5, {MODEL: ModelSample(row_of(MODEL_FIELDS, {}), tenants=tenants(4))})
    named = shown(history, names_tenant=lambda tenant: tenant == "tenant-1")["tenants"]
    assert named == {"tenant-1": [1, 0, 0, 1, 0], "": [3, 0, 0, 0 + 2 + 3, 0]}
    hidden = sample_as_json(history.since(0)[0], 7.0, lambda model: False, lambda tenant: True)
    assert hidden == {"number": 1, "ageMs": 7000, "seconds": 5, "models": {}}


def test_executors_beyond_the_most_are_left_out_idle_ones_first() -> None:
    rows = {f"executor-{n}": row_of(EXECUTOR_FIELDS, {"running": n}) for n in range(MAX_EXECUTORS + 1)}
    history = History()
    history.add(0, 5, {MODEL: ModelSample(row_of(MODEL_FIELDS, {}), executors=rows)})
    assert len(shown(history)["executors"]) == MAX_EXECUTORS
    assert "executor-0" not in shown(history)["executors"]


async def test_sample_has_queue_seats_blocks_tokens_and_latencies() -> None:
    snapshot = Snapshot(
        (ExecutorStanding("executor-0", 1, 100, 100, 8, 40, 3, True, True),),
        (ClassQueue(3, 90),),
        tenant_queues=(TenantQueue(1, "acme", 2, 60, 5), TenantQueue(1, "globex", 1, 30, 5)),
    )
    pool = FakePool(FakeLink(num_running=3, used_blocks=25))
    sampler, history, requests, latencies, clock = sampler_of(pool, snapshot)
    facts = RequestFacts(model=MODEL, arrived=999.0, prompt_tokens=100, tenant="acme", request_id="one")
    for record in (requests.follow(facts), latencies.follow(facts)):
        record.admitted()
        record.placed(PlacedAt("executor-0", 1, 0.1))
        record.boarded(64)
        record.first_sent(0.2)
        record.sent(10, 0.05)
    requests.refused(MODEL, "standard", Reason.QUEUE_FULL)
    clock.now_s += 5
    latencies.by_model[MODEL].sent(1, 0.005)
    await sampler.sample()
    model = shown(history)
    seen = figures(model)
    assert (seen["waiting"], seen["running"], seen["seats"]) == (3, 3, 8)
    assert (seen["kvUsed"], seen["kvReserved"], seen["kvTotal"]) == (25, 40, 100)
    assert (seen["promptTokens"], seen["cachedTokens"], seen["outputTokens"], seen["refused"]) == (100, 64, 10, 1)
    assert seen["interTokenP50Ms"] == pytest.approx(5, rel=0.02)
    assert seen["ttftP50Ms"] is None  # it was sent longer ago than a sample lasts
    assert model["tenants"] == {"acme": [2, 1, 100, 10, 0], "globex": [1, 0, 0, 0, 0]}
    # When it has ended, the next sample has the reason, and then nothing of it is left
    requests.find(MODEL, "acme", "one").ended(RequestEnd("length", False, 1.0, 10, 0.5))  # type: ignore[union-attr]
    await sampler.sample()
    assert shown(history)["finished"] == {"length": 1}
    await sampler.sample()
    assert shown(history)["tenants"] == {"acme": [2, 0, 0, 0, 0], "globex": [1, 0, 0, 0, 0]}


async def test_sample_that_fails_is_a_gap_and_the_next_one_comes() -> None:
    clock, history, looked = Clock(), History(), 0

    async def looks() -> list[Any]:
        nonlocal looked
        looked += 1
        clock.now_s += 5  # time for the next
        if looked == 1:
            raise ValueError("broken")
        return [(FakePool(), Snapshot((), ()))]

    sampler = Sampler(history, RequestLog(clock), Latencies([MODEL], clock), looks, clock)
    clock.now_s += 5
    running = asyncio.create_task(sampler.run())
    while looked < 2:
        clock.now_s += 5
        await asyncio.sleep(0)
    running.cancel()
    await asyncio.wait([running])
    assert running.cancelled()
    assert history.newest == 1


async def test_queue_is_not_known_while_the_ledger_is_away() -> None:
    sampler, history, *_ = sampler_of(FakePool(FakeLink(num_running=1)), None)
    await sampler.sample()
    seen = figures(shown(history))
    assert seen["waiting"] is None
    assert seen["kvReserved"] is None
    assert seen["running"] == 1


async def test_step_time_is_split_into_device_and_exposed_host() -> None:
    link = FakeLink(num_steps=10, device_busy_s=1.0, elapsed_s=1.2)
    sampler, history, *_ = sampler_of(FakePool(link), Snapshot((), ()))
    await sampler.sample()
    assert figures(shown(history))["deviceMs"] is None  # of what was before nothing is known
    link.report = executor_pb2.Report(num_steps=30, device_busy_s=1.4, elapsed_s=1.65, num_preemptions=2)
    await sampler.sample()
    seen = figures(shown(history))
    assert seen["steps"] == 20
    assert seen["preemptions"] == 2
    assert seen["deviceMs"] == pytest.approx(20, rel=1e-3)
    assert seen["hostMs"] == pytest.approx(2.5, rel=1e-3)
    await sampler.sample()
    assert figures(shown(history))["deviceMs"] is None  # idle: no step, no time


def test_growth_begins_again_with_a_new_start_of_an_executor() -> None:
    before = Totals(1, 100, 5, 2.0, 3.0)
    assert growth_of(before, Totals(2, 10, 1, 0.2, 0.3)) == Growth()
    assert growth_of(before, Totals(1, 110, 7, None, None)) == Growth(10, 2)


def test_history_of_a_model_and_an_executor_stays_within_its_memory() -> None:
    """docs/design/dashboard.md: about 130 KiB for a model, 34 KiB an executor, 34 KiB a tenant."""

    def held(num_executors: int, num_tenants: int) -> float:
        history = History()
        tracemalloc.start()
        for number in range(NUM_SAMPLES):
            rows = {f"executor-{n}": row_of(EXECUTOR_FIELDS, {"running": 0.5}) for n in range(num_executors)}
            model = ModelSample(row_of(MODEL_FIELDS, {}), {"length": 1}, tenants(num_tenants), rows)
            history.add(5.0 * number, 5.0, {MODEL: model})
        current, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        return current / 1024

    alone = held(0, 0)
    print(f"model {alone:.0f}, executor {(held(20, 0) - alone) / 20:.0f}, tenant {(held(0, 10) - alone) / 10:.0f} KiB")
    assert alone < 200
    assert (held(20, 0) - alone) / 20 < 50
    assert (held(0, 10) - alone) / 10 < 50


def test_unknown_figures_are_null_in_json() -> None:
    row = row_of(MODEL_FIELDS, {"waiting": 2.0, "ttftP50Ms": 123.456789})
    assert math.isnan(row[1])
    history = History()
    history.add(0, 5, {MODEL: ModelSample(row)})
    assert figures(shown(history))["running"] is None
    assert figures(shown(history))["ttftP50Ms"] == 123.5
