"""Problem 5: a request that does not fit blocks the head of the queue, and no request behind it is served."""

from __future__ import annotations

from dataclasses import replace

from inflight.router.ledger.types import Attempt, Demand
from tests.scheduling_problems.served_line import Asked, open_line
from tests.support.ledger.store_pool import SETTINGS, StorePool
from tests.support.scheduler.scheduling import LIMITS, make_scheduler

FOUR_PASS = replace(SETTINGS, max_bypass=4)
LIMITS_OF_FOUR = replace(LIMITS, max_num_sequences=4, num_standby_sequences=0, max_num_tokens=16)


async def test_request_that_does_not_fit_holds_up_none_that_does(store_pool: StorePool) -> None:
    a = store_pool.router("a")
    await a.store.report(store_pool.next_report(blocks=10))
    await a.place("running", 6)
    await a.queue(Demand("large", 2, blocks=8))

    for i in range(4):
        await a.place(f"small {i}", 1)
    # In line, too: a seat that falls free goes to who fits it
    await a.queue(Demand("next", 2, blocks=1))
    await a.store.settle([Attempt("small 0", 1)])
    assert await a.placed() == ["next"]


async def test_one_that_does_not_fit_is_not_passed_for_ever(store_pool: StorePool) -> None:
    a = store_pool.router("a", FOUR_PASS)
    await a.store.report(store_pool.next_report(blocks=10))
    await a.place("running", 6)
    await a.queue(Demand("large", 2, blocks=8))
    for i in range(4):
        await a.place(f"small {i}", 1)
    for i in range(20):
        await a.queue(Demand(f"later {i}", 2, blocks=1))

    for request_id in ("small 0", "small 1", "small 2", "small 3"):
        await a.store.settle([Attempt(request_id, 1)])
    assert await a.placed() == []
    await a.store.settle([Attempt("running", 1)])
    assert await a.placed() == ["large", "later 0", "later 1"]


async def test_stream_of_small_ones_and_large_ones_is_served_to_the_last(store_pool: StorePool) -> None:
    """Through ledger and scheduler: small ones never wait for a large one to fit, nor large ones for ever."""
    line = await open_line(store_pool, make_scheduler(LIMITS_OF_FOUR, num_blocks=16), store_pool.router("a", FOUR_PASS))
    await line.submit(Asked("first", prompt_tokens=20, output_tokens=12, max_tokens=12))
    await line.submit(Asked("large", prompt_tokens=44, output_tokens=8, max_tokens=8))
    for i in range(24):
        await line.submit(Asked(f"small {i}", prompt_tokens=2, output_tokens=2, max_tokens=2))

    await line.run(26, max_turns=120)
    # Four passed it while it did not fit, then those already on their seats ended, and it was next
    assert 4 <= line.boarded.index("large") - line.boarded.index("first") - 1 <= 4 + LIMITS_OF_FOUR.max_num_sequences
