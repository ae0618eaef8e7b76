"""Wait estimates, their correction, and refusals and drops because of deadlines."""

from __future__ import annotations

import dataclasses

import pytest

from inflight.common.errors import Reason
from inflight.router.ledger.types import Attempt, Demand, Dropped, DropReason, HeldSequence, Placement, Queued, Refused
from tests.support.ledger.store_pool import SETTINGS, StorePool

MILLION_HOURS_MS = 3_600_000_000_000


def asked(request_id: str, deadline_ms: int | None = None, tokens: int = 100) -> Demand:
    return Demand(request_id, 2, blocks=1, deadline_ms=deadline_ms, prompt_tokens=tokens)


async def line_moves(pool: StorePool, per_s: int = 2, duration_ms: int = 4000) -> None:
    """So many requests of 100 tokens a second board, in turn, while ten wait; the last stays on its seat."""
    a = pool.router("a")
    interval_ms = 1000 // per_s
    count = duration_ms // interval_ms
    await a.store.report(pool.next_report(sequences=1))
    await a.place_demand(asked("before"))
    for number in range(count + 10):
        await a.queue(asked(f"line{number}"))
    running = Attempt("before", 1)
    for _ in range(count):
        await pool.wait(interval_ms)
        held = (HeldSequence(running.request_id, 1, 1),)
        await a.store.report(pool.next_report(sequences=1, held=held))
        await a.store.settle([running])
        [placed] = await a.placed()
        running = Attempt(placed, 1)


async def test_nothing_is_estimated_before_anything_was_measured(store_pool: StorePool) -> None:
    a = store_pool.router("a")
    await a.store.report(store_pool.next_report(accepting=False))

    assert await a.store.submit(asked("r", deadline_ms=1)) == Queued(0, None)


async def test_wait_is_estimated_by_how_fast_the_line_moves(store_pool: StorePool) -> None:
    await line_moves(store_pool, per_s=2)

    queued = await store_pool.router("a").queue(asked("r"))

    assert queued.position == 10
    assert queued.estimated_wait_ms == pytest.approx(11 * 500, rel=0.4)  # the first window has one placement more


async def test_deadline_that_the_estimate_misses_is_refused_with_a_time_to_retry(store_pool: StorePool) -> None:
    a = store_pool.router("a")
    await line_moves(store_pool)
    queued = await a.queue(asked("probe"))
    assert queued.estimated_wait_ms

    result = await a.store.submit(asked("hurried", deadline_ms=200))

    assert isinstance(result, Refused)
    assert (result.reason, result.limit) == (Reason.DEADLINE_UNMEETABLE, "first token deadline")
    assert result.retry_after_ms is not None
    assert 100 <= result.retry_after_ms <= 60_000
    assert isinstance(await a.store.submit(asked("patient", deadline_ms=60_000)), Queued)
    assert await store_pool.num_waiting() == 12


async def test_retry_after_a_full_queue_follows_the_estimate(store_pool: StorePool) -> None:
    await line_moves(store_pool)
    a = store_pool.router("a")
    full = store_pool.router("b")
    for number in range(90):
        await a.queue(asked(f"more{number}"))

    result = await full.store.submit(asked("late"))

    assert isinstance(result, Refused)
    assert (result.reason, result.limit) == (Reason.QUEUE_FULL, "max_queue_requests")
    assert result.retry_after_ms is not None
    assert 100 <= result.retry_after_ms <= 60_000


async def test_estimates_are_corrected_by_what_came_of_them(store_pool: StorePool) -> None:
    a = store_pool.router("a")
    await line_moves(store_pool, per_s=2)
    before = (await a.queue(asked("r0"))).estimated_wait_ms
    await store_pool.wait(60_000)
    await a.store.report(store_pool.next_report(blocks=20, sequences=20))  # all at last

    estimates = (await a.store.snapshot()).estimates

    assert before
    assert estimates.num_estimates > 0
    assert estimates.mean_error > 0.5
    assert estimates.correction > 1


async def test_prompt_that_takes_longer_than_its_deadline_is_not_placed(store_pool: StorePool) -> None:
    a = store_pool.router("a")
    await a.store.report(store_pool.next_report(step_ms=20, prefill_tokens_per_s=100))

    result = await a.store.submit(asked("r", deadline_ms=100, tokens=1000))

    assert result == Dropped("r", DropReason.EXPIRED)
    assert await store_pool.reserved_blocks() == {"x": 0}
    assert isinstance(await a.store.submit(asked("in time", deadline_ms=20_000, tokens=1000)), Placement)


async def test_dead_request_is_dropped_where_there_is_no_room_for_it_either(store_pool: StorePool) -> None:
    """Five of them would be all that may be passed, and the line would stand still."""
    a = store_pool.router("a")
    await a.store.report(store_pool.next_report(blocks=10))
    await a.place("running", 6)
    for number in range(5):
        await a.queue(Demand(f"dead{number}", 2, blocks=5, deadline_ms=100))
    await store_pool.wait(101)

    assert await a.store.submit(Demand("small", 2, blocks=1)) == Placement("small", 1, "x", 1)
    assert await a.told() == [Dropped(f"dead{number}", DropReason.EXPIRED) for number in range(5)]


async def test_deadline_of_a_million_hours_is_none_that_matters(store_pool: StorePool) -> None:
    a = store_pool.router("a")
    await a.store.report(store_pool.next_report(sequences=1))
    await a.place("running")
    await a.queue(asked("late", MILLION_HOURS_MS))
    await store_pool.wait(1)
    await a.queue(asked("never"))

    await a.store.settle([Attempt("running", 1)])
    assert await a.placed() == ["late"]  # by arrival
    await a.store.settle([Attempt("late", 1)])
    assert await a.placed() == ["never"]


async def test_deadline_puts_no_request_before_one_that_came_a_minute_earlier(store_pool: StorePool) -> None:
    a = store_pool.router("a", dataclasses.replace(SETTINGS, age_ms=MILLION_HOURS_MS))
    await a.store.report(store_pool.next_report(accepting=False))
    await a.queue(asked("patient"))
    await store_pool.wait(59_000)
    await a.store.report(store_pool.next_report(accepting=False))
    await a.queue(asked("hurried", deadline_ms=10_000))
    await a.queue(asked("very hurried", deadline_ms=500))

    await a.store.report(store_pool.next_report())

    assert await a.placed() == ["very hurried", "patient", "hurried"]


async def test_clock_of_redis_alone_decides(store_pool: StorePool) -> None:
    """Routers send durations: nothing that they send changes with their clocks."""
    a, b = store_pool.router("a"), store_pool.router("b")
    await a.store.report(store_pool.next_report(accepting=False))
    await a.queue(asked("of a", deadline_ms=2000))
    await store_pool.wait(1000)
    await b.queue(asked("of b", deadline_ms=500))

    await store_pool.wait(501)
    await a.store.report(store_pool.next_report())

    assert await b.told() == [Dropped("of b", DropReason.EXPIRED)]
    assert await a.placed() == ["of a"]


async def test_requests_of_unknown_length_do_not_spoil_the_estimates(store_pool: StorePool) -> None:
    """After Redis was emptied, what executors hold comes back without its tokens; it may be placed from the line."""
    a = store_pool.router("a")
    held = tuple(HeldSequence(f"r{number}", 1, 1) for number in range(4))
    await a.store.report(store_pool.next_report("x", blocks=10, held=held))
    await a.store.report(store_pool.next_report("x", blocks=10, accepting=False))
    for one in held:
        await a.store.hand_back(one.request_id, 1, max_attempts=3, progressed=True)
    for sequences in (1, 2):
        await store_pool.wait(1000)
        await a.store.report(store_pool.next_report("y", sequences=sequences))

    assert await a.store.submit(asked("new", deadline_ms=1000)) == Queued(1, None)
    assert (await a.store.snapshot()).estimates.num_estimates == 0
