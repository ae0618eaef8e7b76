"""The path of requests through the ledger: queued, on executors, cancelled, handed back."""

from __future__ import annotations

import pytest

from inflight.router.ledger.functions import ScriptCalls, load_scripts
from inflight.router.ledger.keys import PoolKeys
from inflight.router.ledger.types import (
    Attempt,
    Demand,
    HandBackRefusal,
    HeldSequence,
    Placement,
    Queued,
)
from tests.support.ledger.store_pool import STEERED_CLOCK, StorePool


async def test_request_that_fits_is_placed_by_the_submit_itself(store_pool: StorePool) -> None:
    a = store_pool.router("a")
    await a.store.report(store_pool.next_report(generation=7))

    assert await a.store.submit(Demand("r", 2, blocks=4)) == Placement("r", 1, "x", 7)
    assert await store_pool.reserved_blocks() == {"x": 4}
    assert await a.told() == []


async def test_freed_seat_goes_to_the_first_in_line_for_any_router_that_settles(store_pool: StorePool) -> None:
    a, b = store_pool.router("a"), store_pool.router("b")
    await a.store.report(store_pool.next_report(sequences=1))
    await a.place("running")
    assert await b.store.submit(Demand("first", 2, blocks=1)) == Queued(0)
    assert await a.store.submit(Demand("second", 2, blocks=1)) == Queued(1)

    await a.store.settle([Attempt("running", 1)])  # a has not heard of b, and must find its mailbox

    assert await b.told() == [Placement("first", 1, "x", 1)]
    assert await a.told() == []
    await b.store.settle([Attempt("first", 1)])
    assert await a.told() == [Placement("second", 1, "x", 1)]
    assert await b.told() == []


async def test_line_goes_by_class_then_deadline_then_arrival(store_pool: StorePool) -> None:
    a = store_pool.router("a")
    await a.store.report(store_pool.next_report(sequences=0))
    line = [
        Demand("batch", 3, blocks=1, deadline_ms=10),
        Demand("standard", 2, blocks=1),
        Demand("standard later", 2, blocks=1),
        Demand("standard due", 2, blocks=1, deadline_ms=2000),
        Demand("standard due sooner", 2, blocks=1, deadline_ms=1000),
        Demand("interactive", 1, blocks=1),
    ]
    await a.store.report(store_pool.next_report("large", blocks=10, accepting=False))
    for demand in line:
        assert isinstance(await a.store.submit(demand), Queued)

    await a.store.report(store_pool.next_report(sequences=8))

    order = [event.request_id for event in await a.told() if isinstance(event, Placement)]
    assert order == [
        "interactive",
        "standard due sooner",
        "standard due",
        "standard",
        "standard later",
        "batch",
    ]


async def test_one_report_boards_more_than_one_call_may(store_pool: StorePool) -> None:
    a = store_pool.router("a")
    await a.store.report(store_pool.next_report(blocks=100, sequences=100, accepting=False))
    for number in range(80):
        await a.store.submit(Demand(f"r{number}", 2, blocks=1))

    await a.store.report(store_pool.next_report(blocks=100, sequences=100))

    told = await a.told()
    assert [event.request_id for event in told if isinstance(event, Placement)] == [f"r{n}" for n in range(80)]


async def test_request_handed_back_stands_where_it_stood(store_pool: StorePool) -> None:
    a = store_pool.router("a")
    await a.store.report(store_pool.next_report(sequences=1))
    await a.place("first")
    await a.store.submit(Demand("second", 2, blocks=1))

    assert await a.store.hand_back("first", 1, max_attempts=3) == Queued(0)
    assert await a.store.hand_back("first", 1, max_attempts=3) == Queued(0)  # a repeat
    await a.store.report(store_pool.next_report(sequences=1))

    assert await a.told() == [Placement("first", 2, "x", 1)]
    assert await a.store.hand_back("first", 1, max_attempts=3) is HandBackRefusal.STALE


async def test_records_that_redis_evicted_do_not_stop_the_line(store_pool: StorePool) -> None:
    a = store_pool.router("a")
    await a.store.report(store_pool.next_report(sequences=1))
    await a.place("placed")
    await a.store.submit(Demand("waiting", 2, blocks=1))
    await store_pool.redis.delete(store_pool.keys.key("requests"))

    await store_pool.wait(2001)
    held = (HeldSequence("placed", 1, 1),)
    await a.store.report(store_pool.next_report(held=held))

    assert await store_pool.num_waiting() == 0
    assert await a.store.submit(Demand("new", 2, blocks=1)) == Placement("new", 1, "x", 1)


async def test_change_by_another_version_of_the_scripts_is_seen(store_pool: StorePool) -> None:
    """What a function keeps for the next call is dropped as soon as another library has written."""
    a = store_pool.router("a")
    await a.store.report(store_pool.next_report(sequences=1, blocks=8))
    await a.place("first", 5)
    await a.queue(Demand("second", 2, blocks=5))
    others = ScriptCalls(store_pool.redis, load_scripts(STEERED_CLOCK.replace("tonumber", "0 + tonumber")))
    await others.run("settle", store_pool.keys.for_script(()), ["a", "first", 1, "", "", 0, 0])
    assert await store_pool.reserved_blocks() == {"x": 5}
    await a.store.settle([Attempt("second", 1)])
    assert await store_pool.reserved_blocks() == {"x": 0}


@pytest.mark.parametrize("name", ["", "a{b", "a}b"])
def test_pool_name_that_would_break_the_hash_tag_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="pool's name"):
        PoolKeys(name)


def test_all_keys_of_a_pool_share_its_hash_tag() -> None:
    keys = PoolKeys("model").for_script(("a", "b"))

    assert all("{model}" in key for key in keys)
    assert len(set(keys)) == len(keys)


async def test_executor_gets_nothing_between_a_hand_back_and_its_next_report(store_pool: StorePool) -> None:
    a = store_pool.router("a")
    report = store_pool.next_report("x", blocks=90)
    await a.store.report(report)
    await a.store.report(store_pool.next_report("y", blocks=10))
    assert (await a.place("r")).executor_id == "x"

    assert await a.store.hand_back("r", 1, max_attempts=3, rejected=True) == Placement("r", 2, "y", 1)
    await a.store.report(report)  # an old one
    assert (await a.place("other")).executor_id == "y"
    await a.store.report(store_pool.next_report("x", blocks=90))
    assert (await a.place("another")).executor_id == "x"
