"""Limits on waiting requests and their rates: of the pool and of each tenant, exact over all routers."""

from __future__ import annotations

import dataclasses

import pytest

from inflight.common.errors import Reason
from inflight.router.ledger.types import NO_LIMITS, Attempt, Demand, Ending, Placement, Queued, Refused, TenantLimits
from tests.support.ledger.store_pool import RouterSide, StorePool

TWO_PER_SECOND = TenantLimits(requests_per_s=2, request_burst=2)
HUNDRED_TOKENS_PER_SECOND = TenantLimits(tokens_per_s=100, token_burst=100)


def asked(request_id: str, limits: TenantLimits, tokens: int = 0, tenant: str = "t", num_bytes: int = 0) -> Demand:
    return Demand(request_id, 2, 1, tenant=tenant, limits=limits, prompt_tokens=tokens, num_bytes=num_bytes)


async def full_pool(pool: StorePool) -> RouterSide:
    """A router of a pool in which every request has to wait."""
    a = pool.router("a")
    await a.store.report(pool.next_report(accepting=False))
    return a


@pytest.mark.parametrize(
    ("limits", "limit"),
    [
        (TenantLimits(max_queue_requests=2), "tenant max_queue_requests"),
        (TenantLimits(max_queue_tokens=29), "tenant max_queue_tokens"),
        (TenantLimits(max_queue_bytes=299), "tenant max_queue_bytes"),
    ],
)
async def test_tenant_waits_with_no_more_than_it_may(store_pool: StorePool, limits: TenantLimits, limit: str) -> None:
    a = await full_pool(store_pool)
    for number in range(2):
        assert await a.store.submit(asked(f"r{number}", limits, 10, num_bytes=100)) == Queued(number)

    assert await a.store.submit(asked("late", limits, 10, num_bytes=100)) == Refused(Reason.QUEUE_FULL, limit)
    assert await a.store.submit(asked("other", NO_LIMITS, 10, "u", 100)) == Queued(1)
    await a.store.cancel("r0")
    assert isinstance(await a.store.submit(asked("late", limits, 10, num_bytes=100)), Queued)


async def test_rate_of_requests_is_exact_over_routers(store_pool: StorePool) -> None:
    routers = [store_pool.router("a"), store_pool.router("b")]
    await routers[0].store.report(store_pool.next_report(blocks=1000, sequences=1000))
    num_placed = 0
    for number in range(100):
        await store_pool.wait(50)
        await routers[0].store.report(store_pool.next_report(blocks=1000, sequences=1000))
        result = await routers[number % 2].store.submit(asked(f"r{number}", TWO_PER_SECOND))
        num_placed += isinstance(result, Placement)

    assert num_placed == 2 + 2 * 5 - 1  # the burst, and two in each of the five seconds behind the first 50 ms


async def test_refusal_for_a_rate_says_when_to_come_back_and_then_it_is_so(store_pool: StorePool) -> None:
    a = store_pool.router("a")
    await a.store.report(store_pool.next_report())
    for number in range(2):
        await a.place_demand(asked(f"r{number}", TWO_PER_SECOND))

    refused = Refused(Reason.RATE_LIMITED, "tenant requests_per_s", 500)
    assert await a.store.submit(asked("r2", TWO_PER_SECOND)) == refused
    await store_pool.wait(499)
    assert await a.store.submit(asked("r2", TWO_PER_SECOND)) == dataclasses.replace(refused, retry_after_ms=1)
    await store_pool.wait(1)
    await a.place_demand(asked("r2", TWO_PER_SECOND))


async def test_rates_can_be_asked_before_a_submit_and_are_not_reduced_by_that(store_pool: StorePool) -> None:
    a = store_pool.router("a")
    await a.store.report(store_pool.next_report())
    for number in range(2):
        for _ in range(3):
            assert await a.store.check_rates("t", TWO_PER_SECOND, 1) is None
        await a.place_demand(asked(f"r{number}", TWO_PER_SECOND))

    refused = Refused(Reason.RATE_LIMITED, "tenant requests_per_s", 500)
    assert await a.store.check_rates("t", TWO_PER_SECOND, 1) == refused
    assert await a.store.check_rates("u", TWO_PER_SECOND, 1) is None
    assert await a.store.check_rates("t", NO_LIMITS, 1) is None
    # Then the submit is refused for the same reason, unless it repeats a request
    assert await a.store.submit(asked("late", TWO_PER_SECOND)) == refused
    assert await a.store.check_rates("t", TWO_PER_SECOND, 1, "r0") is None
    await a.store.settle([Attempt("r0", 1)])
    assert await a.store.check_rates("t", TWO_PER_SECOND, 1, "r0") is None


async def test_rates_asked_for_few_tokens_refuse_no_more_than_a_submit_of_more(store_pool: StorePool) -> None:
    a = store_pool.router("a")
    await a.store.report(store_pool.next_report(blocks=1000, sequences=1000))
    await a.place_demand(asked("r0", HUNDRED_TOKENS_PER_SECOND, 60))

    assert await a.store.check_rates("t", HUNDRED_TOKENS_PER_SECOND, 40) is None
    refused = await a.store.check_rates("t", HUNDRED_TOKENS_PER_SECOND, 50)
    assert refused == Refused(Reason.RATE_LIMITED, "tenant tokens_per_s", 100)
    assert await a.store.submit(asked("r1", HUNDRED_TOKENS_PER_SECOND, 50)) == refused


async def test_work_that_is_no_request_takes_from_the_rates(store_pool: StorePool) -> None:
    a = store_pool.router("a")
    for _ in range(2):
        assert await a.store.check_rates("t", TWO_PER_SECOND, 0, takes=True) is None
    refused = Refused(Reason.RATE_LIMITED, "tenant requests_per_s", 500)
    assert await a.store.check_rates("t", TWO_PER_SECOND, 0, takes=True) == refused
    await store_pool.wait(500)
    assert await a.store.check_rates("t", TWO_PER_SECOND, 0, takes=True) is None


# --- several choices


def choice(number: int, limits: TenantLimits, of: int = 3, tokens: int = 10, num_bytes: int = 0) -> Demand:
    """One of three choices. The first one admits all."""
    name = f"r~{number}" if number else "r"
    return dataclasses.replace(asked(name, limits, tokens, num_bytes=num_bytes), num_choices=0 if number else of)


@pytest.mark.parametrize(
    ("limits", "limit"),
    [
        (TenantLimits(max_queue_requests=2), "tenant max_queue_requests"),
        (TenantLimits(max_queue_tokens=29), "tenant max_queue_tokens"),
        (TenantLimits(max_queue_bytes=299), "tenant max_queue_bytes"),
    ],
)
async def test_choices_that_do_not_all_fit_in_the_queue_are_refused_as_one(
    store_pool: StorePool, limits: TenantLimits, limit: str
) -> None:
    a = await full_pool(store_pool)
    assert await a.store.submit(choice(0, limits, num_bytes=100)) == Refused(Reason.QUEUE_FULL, limit)
    for number in range(2):
        assert await a.store.submit(choice(number, limits, of=2, num_bytes=100)) == Queued(number)


async def test_choices_beyond_the_queue_are_refused_although_the_first_finds_a_seat(store_pool: StorePool) -> None:
    a, limits = store_pool.router("a"), TenantLimits(max_queue_requests=1)
    await a.store.report(store_pool.next_report(sequences=1))
    assert await a.store.submit(choice(0, limits)) == Refused(Reason.QUEUE_FULL, "tenant max_queue_requests")
    await a.place_demand(choice(0, limits, of=2))
    assert await a.store.submit(choice(1, limits)) == Queued(0)


async def test_later_choices_are_admitted_with_the_first(store_pool: StorePool) -> None:
    a, limits = await full_pool(store_pool), TenantLimits(max_queue_requests=3)
    assert await a.store.submit(choice(0, limits)) == Queued(0)
    for number in range(2):  # between the choices others take the rest of the queue
        assert await a.store.submit(asked(f"other{number}", limits)) == Queued(number + 1)
    assert await a.store.submit(asked("late", limits)) == Refused(Reason.QUEUE_FULL, "tenant max_queue_requests")
    for number in (1, 2):
        assert isinstance(await a.store.submit(choice(number, limits)), Queued)


async def test_choices_count_as_one_request_and_with_all_their_tokens(store_pool: StorePool) -> None:
    a = store_pool.router("a")
    limits = TenantLimits(requests_per_s=1, request_burst=2, tokens_per_s=10, token_burst=40)
    await a.store.report(store_pool.next_report())
    for number in range(3):
        await a.place_demand(choice(number, limits))

    await a.place_demand(asked("second", limits, tokens=10))
    assert await a.store.submit(asked("third", limits)) == Refused(Reason.RATE_LIMITED, "tenant requests_per_s", 1000)
    await store_pool.wait(1000)
    await a.store.report(store_pool.next_report())
    assert await a.store.submit(asked("third", limits, tokens=20)) == Refused(
        Reason.RATE_LIMITED, "tenant tokens_per_s", 1000
    )
    # Each choice returns what it has not used.
    await a.store.settle([Ending(name, 1, computed_tokens=0, output_tokens=0) for name in ("r", "r~1", "r~2")])
    await a.place_demand(asked("third", limits, tokens=20))
