"""Wait estimates, their correction, and refusals and drops because of deadlines."""

from __future__ import annotations

from dataclasses import replace

import pytest

from inflight.common.errors import Reason
from inflight.router.ledger.types import Attempt, Demand, Ending, HeldSequence, Queued, Refused
from tests.support.ledger.store_pool import StorePool


def asked(request_id: str, deadline_ms: int | None = None, tokens: int = 100) -> Demand:
    return Demand(request_id, 2, blocks=1, deadline_ms=deadline_ms, prompt_tokens=tokens)


async def line_moves(pool: StorePool, per_s: int = 2, duration_ms: int = 4000, step_ms: float = 0.0) -> None:
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
        await a.store.report(pool.next_report(sequences=1, held=held, step_ms=step_ms))
        await a.store.settle([running])
        [placed] = await a.placed()
        running = Attempt(placed, 1)


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


async def test_total_deadline_that_the_wait_would_make_the_output_miss_is_refused(store_pool: StorePool) -> None:
    # Given outputs that use all of their reservation, and a wait of some 5 s
    a = store_pool.router("a")
    await a.store.report(store_pool.next_report(sequences=1))
    for number in range(5):
        await a.place_demand(replace(asked(f"known{number}"), max_tokens=100))
        await a.store.settle([Ending(f"known{number}", 1, 100, 100, by_itself=True)])
    await line_moves(store_pool, step_ms=10.0)
    # When a request comes whose output takes 1 s
    long = replace(asked("long"), max_tokens=100)

    result = await a.store.submit(replace(long, total_ms=4000))

    assert isinstance(result, Refused)
    assert (result.reason, result.limit) == (Reason.DEADLINE_UNMEETABLE, "deadline")
    # Where the output alone takes longer, the deadline is meant to cut it off
    assert isinstance(await a.store.submit(replace(long, request_id="cut", total_ms=500)), Queued)
    assert isinstance(await a.store.submit(replace(long, request_id="patient", total_ms=60_000)), Queued)


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
