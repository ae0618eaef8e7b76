"""Wrong or extreme configurations, as the ledger sees them."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable

from inflight.common.errors import Reason
from inflight.router.ledger.codec import Argument, settle_args, submit_args
from inflight.router.ledger.functions import ScriptCalls
from inflight.router.ledger.types import (
    NO_LIMITS,
    Attempt,
    Demand,
    Ending,
    HeldSequence,
    Lost,
    Placement,
    Queued,
    Refused,
    ReportOutcome,
    TenantLimits,
)
from tests.support.ledger.store_pool import SETTINGS, StorePool, steered_scripts

HOUR_MS = 3_600_000
MILLION = 1_000_000
ODD_NAMES = (
    "a",
    "a b",
    "A",
    "a:waiting:1",
    "{a}",
    "*",
    "[a",
    "(a",
    "-inf",
    "+",
    "0",
    "__proto__",
    "' or 1=1 --",
    '"\\0"',
    "%s%d",
    "ä€😀",
    "a\u0301",
    "\u00e1",
    "x" * 256,
    "x" * 255,
)


def asked(request_id: str, tenant: str, limits: TenantLimits = NO_LIMITS, **fields: int) -> Demand:
    return dataclasses.replace(Demand(request_id, 2, 1, tenant=tenant, limits=limits, prompt_tokens=8), **fields)  # type: ignore[arg-type]


async def call_often(pool: StorePool, script: str, arguments: Iterable[list[Argument]]) -> None:
    """Runs a script many times, a thousand to a round trip."""
    function, keys, queued = steered_scripts().function(script), pool.keys.for_script(()), list(arguments)
    await ScriptCalls(pool.redis, steered_scripts()).forget([pool.keys.key("none")])  # loads them
    for start in range(0, len(queued), 1000):
        pipeline = pool.redis.pipeline(transaction=False)
        for args in queued[start : start + 1000]:
            pipeline.execute_command("FCALL", function, len(keys), *keys, "a", *args)
        await pipeline.execute()


# --- clocks


async def test_executor_that_starts_again_with_its_clock_an_hour_back_is_used_after_its_lease(
    store_pool: StorePool,
) -> None:
    """Its generation is the time of day when it started, so this one looks older than the one before."""
    a, began_ms = store_pool.router("a"), 1_800_000_000_000
    await a.store.report(store_pool.next_report(generation=began_ms))
    await a.place("running")

    async def report() -> ReportOutcome:
        return await a.store.report(store_pool.next_report(generation=began_ms - HOUR_MS + 1000))

    assert await report() == ReportOutcome(taken=False)
    await store_pool.wait(5000)
    assert await report() == ReportOutcome(taken=False)
    await store_pool.wait(1)
    assert await report() == ReportOutcome(taken=True)
    assert await a.told() == [Lost("running", 1, "x", began_ms)]
    assert (await a.place("next")).generation == began_ms - HOUR_MS + 1000


async def test_executor_that_starts_again_with_its_clock_an_hour_ahead_is_used_at_once(store_pool: StorePool) -> None:
    a = store_pool.router("a")
    await a.store.report(store_pool.next_report(generation=1))
    assert await a.store.report(store_pool.next_report(generation=1 + HOUR_MS)) == ReportOutcome(taken=True)
    assert (await a.place("next")).generation == 1 + HOUR_MS


async def test_redis_clock_that_jumps_an_hour_loses_no_request(store_pool: StorePool) -> None:
    """All leases start again, because no router was there to take reports. Waiting requests keep their order."""
    a = store_pool.router("a")
    await a.store.report(store_pool.next_report(sequences=1))
    await a.place("running")
    await a.queue(asked("waits", "t"))
    for jump_ms in (HOUR_MS, -2 * HOUR_MS):
        await store_pool.wait(jump_ms)
        await a.store.reap()
        await a.store.renew()
        await a.store.report(store_pool.next_report(sequences=1))

    settled = await a.store.settle([Attempt("running", 1)])
    told = await a.told()
    if not settled:  # the audit was first
        assert isinstance(told[0], Lost)
        await a.store.settle([Attempt("running", 1)])
    assert [one.request_id for one in told if isinstance(one, Placement)] == ["waits"]


# --- tenants


async def test_tenants_of_odd_names_each_have_a_line_and_limits_of_their_own(store_pool: StorePool) -> None:
    a = store_pool.router("a")
    await a.store.report(store_pool.next_report(accepting=False))
    one_waits = TenantLimits(max_queue_requests=1)
    for number, name in enumerate(ODD_NAMES):
        await a.queue(asked(f"r{number}", name, one_waits))
        refused = await a.store.submit(asked(f"s{number}", name, one_waits))
        assert refused == Refused(Reason.QUEUE_FULL, "tenant max_queue_requests")

    await a.store.report(store_pool.next_report(blocks=100, sequences=100))
    assert sorted(await a.placed()) == sorted(f"r{number}" for number in range(len(ODD_NAMES)))
    assert await store_pool.num_waiting() == 0


async def test_extreme_weights_order_tenants_and_break_nothing(store_pool: StorePool) -> None:
    a = store_pool.router("a")
    await a.store.report(store_pool.next_report(sequences=1))
    await a.place("running")
    for number in range(3):
        await a.queue(asked(f"light {number}", "light", TenantLimits(weight=1e-6), max_tokens=MILLION))
        await a.queue(asked(f"heavy {number}", "heavy", TenantLimits(weight=1e6), max_tokens=MILLION))
    order, running = [], "running"
    for _ in range(6):
        await a.store.settle([Ending(running, 1, MILLION, MILLION)])
        [running] = await a.placed()
        order.append(running)

    # One of each at first, when neither has had anything
    assert order.index("heavy 2") < order.index("light 1")
    assert sorted(order) == sorted(f"{tenant} {number}" for tenant in ("light", "heavy") for number in range(3))


async def test_tenant_that_may_run_nothing_waits_and_holds_up_no_other(store_pool: StorePool) -> None:
    """Routers refuse it before; where one has an older file, its requests wait until they may run again."""
    a = store_pool.router("a")
    await a.store.report(store_pool.next_report())
    assert await a.store.submit(asked("shut out", "t", TenantLimits(max_running=0))) == Queued(0)
    await a.place_demand(asked("other", "u"))

    await a.place_demand(asked("in again", "t", TenantLimits(max_running=2)))
    assert await a.placed() == ["shut out"]


async def test_records_of_many_tenants_do_not_stay(store_pool: StorePool) -> None:
    """Also where what they asked for teaches how long outputs become."""
    a, count = store_pool.router("a"), 1500
    for generation in range(2):
        await a.store.report(store_pool.next_report(blocks=1000, sequences=1000, reserve_quantile=0.9))
        demands = [asked(f"r{generation} {i}", f"t{generation} {i}", max_tokens=16) for i in range(count)]
        for start in range(0, count, 500):
            some = demands[start : start + 500]
            await call_often(store_pool, "submit", (["", *submit_args(one, SETTINGS)] for one in some))
            endings = (Ending(one.request_id, 1, 8, 4, by_itself=True) for one in some)
            await call_often(store_pool, "settle", (settle_args([ending]) for ending in endings))
        assert await store_pool.redis.hlen(store_pool.keys.key("tenants")) == count

        await store_pool.wait(600_001)
        for _ in range(1000):
            await a.store.reap()
            if not await store_pool.redis.hlen(store_pool.keys.key("tenants")):
                break
        sizes = {name: await store_pool.redis.hlen(store_pool.keys.key(name)) for name in ("tenants", "lengths")}
        assert sizes == {"tenants": 0, "lengths": 1}
        assert await store_pool.redis.hlen(store_pool.keys.key("requests")) == 0


async def test_lengths_of_all_tenants_outlast_them(store_pool: StorePool) -> None:
    """Also where requests are known by their executor alone, which are of a tenant without a name."""
    a = store_pool.router("a")
    report = store_pool.next_report(reserve_quantile=0.9, held=(HeldSequence("unknown", 1, 1),))
    await a.store.report(report)
    await a.place_demand(asked("r", "t", max_tokens=16))
    await a.store.settle([Ending("r", 1, 8, 4, by_itself=True), Attempt("unknown", 1)])
    assert sorted(await store_pool.redis.hkeys(store_pool.keys.key("tenants"))) == ["", "t"]

    await store_pool.wait(600_001)
    await a.store.reap()
    assert await store_pool.redis.hkeys(store_pool.keys.key("tenants")) == []
    assert await store_pool.redis.hkeys(store_pool.keys.key("lengths")) == ["\x0016"]


async def test_sweep_of_many_tenants_takes_no_longer_than_they_are_remembered(store_pool: StorePool) -> None:
    """However many there are: so those that come in ten minutes are gone in the next ten, if routers reap."""
    a, tenants, num_others = store_pool.router("a"), store_pool.keys.key("tenants"), 70_000
    await a.store.report(store_pool.next_report())
    await a.place_demand(asked("r", "t"))
    await a.store.settle([Attempt("r", 1)])
    await store_pool.redis.eval(
        "local one = redis.call('HGET', KEYS[1], 't') for i = 1, ARGV[1] do redis.call('HSET', KEYS[1], i, one) end",
        1,
        tenants,
        num_others,
    )

    await store_pool.wait(600_001)
    await a.store.reap()
    assert await store_pool.redis.hlen(tenants) <= num_others * (1 - 1 / 700)


# --- requests


async def test_million_tokens_are_refused_where_they_never_fit_and_cost_nothing(store_pool: StorePool) -> None:
    a, limits = store_pool.router("a"), TenantLimits(tokens_per_s=100, token_burst=1000)
    await a.store.report(store_pool.next_report(blocks=1000))
    large = asked("large", "t", limits, max_tokens=MILLION, blocks=MILLION // 16 + 1)
    assert await a.store.submit(large) == Refused(Reason.NEVER_FITS)
    await a.place_demand(asked("small", "t", limits, max_tokens=992))


async def test_million_tokens_that_fit_are_paid_for_as_they_are_used(store_pool: StorePool) -> None:
    a, limits = store_pool.router("a"), TenantLimits(tokens_per_s=100, token_burst=1000)
    await a.store.report(store_pool.next_report(blocks=MILLION))
    await a.place_demand(asked("large", "t", limits, max_tokens=MILLION, blocks=MILLION // 16 + 1))
    refused = await a.store.submit(asked("while it runs", "t", limits))
    assert isinstance(refused, Refused)
    assert (refused.reason, refused.limit) == (Reason.RATE_LIMITED, "tenant tokens_per_s")

    await a.store.settle([Ending("large", 1, 8, 100)])
    await a.place_demand(asked("after it", "t", limits))
