"""Fair order: shares by virtual token counters, weights, limits of what runs, ageing between classes."""

from __future__ import annotations

import dataclasses

import pytest

from inflight.router.store.types import NO_LIMITS, Attempt, Demand, Ending, Placement, TenantLimits
from tests.property.store_records import read_records
from tests.support.ledger.store_pool import SETTINGS, RouterSide, StorePool

QUICK_AGEING = dataclasses.replace(SETTINGS, age_ms=1000)


def asked(request_id: str, tenant: str, limits: TenantLimits = NO_LIMITS, class_: int = 2, tokens: int = 8) -> Demand:
    """A request that costs its tenant ten of its tokens: an output is at least one, and counts twice."""
    return Demand(request_id, class_, blocks=1, tenant=tenant, limits=limits, prompt_tokens=tokens)


async def serve(a: RouterSide, tenant: str, tokens: int, limits: TenantLimits = NO_LIMITS) -> None:
    """A request that comes, runs and goes while the queue is empty."""
    placement = await a.place_demand(asked(f"of {tenant} {tokens}", tenant, limits))
    await a.store.settle([Ending(placement.request_id, placement.attempt, tokens, 0)])


async def board_one_by_one(pool: StorePool, count: int) -> list[str]:
    """Who boards, when one seat is freed again and again."""
    a = pool.router("a")
    await a.store.report(pool.next_report(sequences=1))
    order = []
    for _ in range(count):
        [placement] = [event for event in await a.told() if isinstance(event, Placement)]
        order.append(placement.request_id)
        await a.store.settle([Attempt(placement.request_id, placement.attempt)])
    return order


async def fill_line(pool: StorePool, tenants: dict[str, TenantLimits], each: int) -> None:
    """Queues so many of each tenant, one tenant behind the other."""
    a = pool.router("a")
    await a.store.report(pool.next_report(sequences=8, accepting=False))
    for tenant, limits in tenants.items():
        for number in range(each):
            await a.queue(asked(f"{tenant}{number}", tenant, limits))


async def test_tenants_take_turns_however_many_one_has_in_line(store_pool: StorePool) -> None:
    await fill_line(store_pool, {"t": NO_LIMITS, "u": NO_LIMITS}, each=3)

    assert await board_one_by_one(store_pool, 6) == ["t0", "u0", "t1", "u1", "t2", "u2"]


async def test_tenant_of_twice_the_weight_gets_twice_the_turns(store_pool: StorePool) -> None:
    await fill_line(store_pool, {"t": NO_LIMITS, "u": TenantLimits(weight=2)}, each=4)

    assert await board_one_by_one(store_pool, 6) == ["t0", "u0", "u1", "t1", "u2", "u3"]


async def test_weight_changes_with_the_next_request(store_pool: StorePool) -> None:
    await fill_line(store_pool, {"t": NO_LIMITS, "u": TenantLimits(weight=2)}, each=3)
    await store_pool.router("a").queue(asked("u3", "u", NO_LIMITS))

    assert await board_one_by_one(store_pool, 6) == ["t0", "u0", "t1", "u1", "t2", "u2"]


async def test_turns_are_not_saved_up_by_being_away(store_pool: StorePool) -> None:
    a = store_pool.router("a")
    await a.store.report(store_pool.next_report())
    for _ in range(5):
        await store_pool.wait(75_001)
        await a.store.report(store_pool.next_report())
        await serve(a, "t", 10)

    await fill_line(store_pool, {"t": NO_LIMITS, "late": NO_LIMITS}, each=3)

    assert await board_one_by_one(store_pool, 5) == ["late0", "late1", "t0", "late2", "t1"]


async def test_tenant_is_charged_what_it_used(store_pool: StorePool) -> None:
    a = store_pool.router("a")
    await a.store.report(store_pool.next_report())
    await serve(a, "t", 100)
    await serve(a, "u", 70)

    await fill_line(store_pool, {"t": NO_LIMITS, "u": NO_LIMITS}, each=5)

    assert await board_one_by_one(store_pool, 5) == ["u0", "u1", "u2", "t0", "u3"]


async def test_tenant_whose_share_is_unused_output_is_charged_less_beforehand(store_pool: StorePool) -> None:
    a = store_pool.router("a")
    await a.store.report(store_pool.next_report(blocks=100, sequences=100))
    for tenant, output in (("brief", 1), ("long", 100)):
        for number in range(100):
            placement = await a.place_demand(Demand(f"{tenant}{number}", 2, 1, tenant=tenant, max_tokens=100))
            await a.store.settle([Ending(placement.request_id, 1, 0, output)])

    for tenant in ("brief", "long"):
        await a.place_demand(Demand(tenant, 2, 1, tenant=tenant, max_tokens=100))

    requests = (await read_records(store_pool.redis, store_pool.keys)).of("requests")
    assert requests["brief"]["charge"] < 5
    assert requests["long"]["charge"] > 195


async def test_tenant_at_its_limit_saves_up_no_turns_by_a_refund(store_pool: StorePool) -> None:
    a, one_at_a_time = store_pool.router("a"), TenantLimits(max_running=1)
    await a.store.report(store_pool.next_report())
    await a.place_demand(asked("running", "t", one_at_a_time, tokens=98))
    for request_id in ("t0", "t1"):
        await a.queue(asked(request_id, "t", one_at_a_time))
    await serve(a, "u", 200)
    await serve(a, "u", 210)  # who comes now starts at 200
    await a.store.report(store_pool.next_report(accepting=False))
    for request_id in ("v0", "v1"):
        await a.queue(asked(request_id, "v"))

    await a.store.settle([Ending("running", 1, 0, 0)])  # the tenant comes back

    assert await board_one_by_one(store_pool, 3) == ["t0", "v0", "t1"]


async def test_tenant_runs_no_more_than_it_may(store_pool: StorePool) -> None:
    a, two = store_pool.router("a"), TenantLimits(max_running=2)
    await a.store.report(store_pool.next_report())
    await a.place_demand(asked("t0", "t", two))
    await a.place_demand(asked("t1", "t", two))

    await a.queue(asked("t2", "t", two))
    assert await a.store.submit(asked("u0", "u")) == Placement("u0", 1, "x", 1)
    await a.store.settle([Attempt("t0", 1)])

    assert await a.placed() == ["t2"]


async def test_raised_limit_counts_even_where_the_request_that_brings_it_fits_nowhere(store_pool: StorePool) -> None:
    a = store_pool.router("a")
    await a.store.report(store_pool.next_report(blocks=10))
    await a.place_demand(asked("t0", "t", TenantLimits(max_running=1)))
    await a.queue(asked("t1", "t", TenantLimits(max_running=1)))

    await a.store.submit(Demand("huge", 2, blocks=11, tenant="t", limits=NO_LIMITS))
    await a.store.reap()

    assert await a.placed() == ["t1"]


async def test_request_that_waited_long_moves_up_a_class(store_pool: StorePool) -> None:
    store_pool.settings = QUICK_AGEING
    a = store_pool.router("a")
    await a.store.report(store_pool.next_report(accepting=False))
    await a.queue(asked("batch", "t", class_=3))
    await store_pool.wait(1000)
    await a.store.report(store_pool.next_report(accepting=False))
    await store_pool.wait(1000)
    await a.queue(asked("interactive", "t", class_=1))

    assert await board_one_by_one(store_pool, 2) == ["batch", "interactive"]


async def test_tenant_whose_only_request_moves_up_keeps_its_counter(store_pool: StorePool) -> None:
    store_pool.settings = QUICK_AGEING
    a = store_pool.router("a")
    await a.store.report(store_pool.next_report())
    for tenant in ("t", "u"):
        await a.place_demand(asked(f"{tenant} running", tenant, tokens=998))
    await serve(a, "v", 500)
    await serve(a, "v", 501)  # who comes now starts at 500
    await a.store.report(store_pool.next_report(accepting=False))
    await a.queue(asked("t0", "t", class_=2))
    await a.queue(asked("u0", "u", class_=1))
    await a.store.settle([Ending("t running", 1, 10, 0), Ending("u running", 1, 20, 0)])  # t at 10, u at 20
    await store_pool.wait(1000)

    assert await board_one_by_one(store_pool, 2) == ["t0", "u0"]


async def test_last_request_in_line_is_charged_from_where_its_tenant_stood(store_pool: StorePool) -> None:
    a = store_pool.router("a")
    await a.store.report(store_pool.next_report())
    await a.place_demand(asked("running", "t", tokens=998))
    await serve(a, "v", 500)
    await serve(a, "v", 505)  # at 1005; who comes now starts at 500
    await a.store.report(store_pool.next_report(accepting=False))
    await a.queue(asked("t0", "t"))
    await a.store.settle([Ending("running", 1, 10, 0)])  # t at 10
    await a.store.report(store_pool.next_report(sequences=1))
    assert await a.placed() == ["t0"]  # t at 20, not at 510
    await a.queue(asked("w0", "w", tokens=3))  # from 500
    await a.queue(asked("w1", "w"))  # from 505
    await a.queue(asked("t1", "t"))  # from 500, lifted

    await a.store.settle([Attempt("t0", 1)])

    assert await a.placed() == ["t1"]


async def test_new_tenant_is_charged_as_an_average_one_until_it_is_known(store_pool: StorePool) -> None:
    a = store_pool.router("a")
    await a.store.report(store_pool.next_report(blocks=1000, sequences=100))
    # Given outputs that are a tenth of what is asked for
    for number in range(100):
        await a.store.submit(Demand(f"r{number}", 2, blocks=1, tenant="known", prompt_tokens=0, max_tokens=100))
        await a.store.settle([Ending(f"r{number}", 1, computed_tokens=0, output_tokens=10, by_itself=True)])
    # When one of each runs
    await a.store.submit(Demand("old", 2, blocks=1, tenant="known", prompt_tokens=0, max_tokens=100))
    await a.store.submit(Demand("new", 2, blocks=1, tenant="new", prompt_tokens=0, max_tokens=100))
    # Then both are charged about what will be used, 2 for each output token
    requests = (await read_records(store_pool.redis, store_pool.keys)).of("requests")
    assert requests["old"]["charge"] == pytest.approx(20, abs=2)
    assert requests["new"]["charge"] == pytest.approx(20, abs=2)
