"""The path of requests through the ledger: queued, on executors, cancelled, handed back."""

from __future__ import annotations

import dataclasses

import pytest

from inflight.common.errors import Reason
from inflight.router.ledger.functions import ScriptCalls, load_scripts
from inflight.router.ledger.keys import PoolKeys
from inflight.router.ledger.types import (
    Attempt,
    Cancelled,
    CancelOutcome,
    CancelRequested,
    Demand,
    Dropped,
    DropReason,
    Duplicate,
    HandBackRefusal,
    HeldSequence,
    LedgerState,
    Placement,
    Queued,
    Refused,
)
from tests.support.ledger.store_pool import SETTINGS, STEERED_CLOCK, StorePool

NO_BYPASS = dataclasses.replace(SETTINGS, max_bypass=0)


async def test_request_that_fits_is_placed_by_the_submit_itself(store_pool: StorePool) -> None:
    a = store_pool.router("a")
    await a.store.report(store_pool.next_report(generation=7))

    assert await a.store.submit(Demand("r", 2, blocks=4)) == Placement("r", 1, "x", 7)
    assert await store_pool.reserved_blocks() == {"x": 4}
    assert await a.told() == []


async def test_placement_takes_the_executor_with_most_available_blocks(store_pool: StorePool) -> None:
    a = store_pool.router("a")
    await a.store.report(store_pool.next_report("x", blocks=10))
    await a.store.report(store_pool.next_report("y", blocks=12))
    await a.store.report(store_pool.next_report("z", blocks=90, accepting=False))

    executors = [(await a.place(name, 3)).executor_id for name in ("r1", "r2", "r3")]

    assert executors == ["y", "x", "y"]  # 12 of 12, 10 of 10 against 9, 9 against 7


async def test_request_is_refused_where_it_can_never_run(store_pool: StorePool) -> None:
    a = store_pool.router("a")
    assert await a.store.submit(Demand("r", 2, blocks=1)) == Refused(Reason.NO_EXECUTOR)

    await a.store.report(store_pool.next_report(blocks=10, sequences=2))

    assert await a.store.submit(Demand("r", 2, blocks=11)) == Refused(Reason.NEVER_FITS)
    assert await a.store.submit(Demand("r", 2, blocks=1, sequences=3)) == Refused(Reason.NEVER_FITS)
    await store_pool.wait(5001)
    assert await a.store.submit(Demand("r", 2, blocks=1)) == Refused(Reason.NO_EXECUTOR)


async def test_full_queue_refuses_the_next_and_keeps_the_others(store_pool: StorePool) -> None:
    a = store_pool.router("a")
    await a.store.report(store_pool.next_report(sequences=1))
    await a.place("running")
    for number in range(store_pool.settings.max_queue_requests):
        assert await a.store.submit(Demand(f"r{number}", 2, blocks=1)) == Queued(number)

    assert await a.store.submit(Demand("late", 1, blocks=1)) == Refused(Reason.QUEUE_FULL, "max_queue_requests")
    assert await store_pool.num_waiting() == store_pool.settings.max_queue_requests


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


async def test_head_that_may_not_be_passed_holds_the_line_except_for_higher_classes(store_pool: StorePool) -> None:
    store_pool.settings = NO_BYPASS
    a = store_pool.router("a")
    await a.store.report(store_pool.next_report(blocks=10))
    await a.place("running", 6)

    assert await a.store.submit(Demand("large", 2, blocks=5)) == Queued(0)
    assert await a.store.submit(Demand("small", 2, blocks=1)) == Queued(1)
    assert await a.store.submit(Demand("urgent", 1, blocks=4)) == Placement("urgent", 1, "x", 1)


async def test_one_report_boards_more_than_one_call_may(store_pool: StorePool) -> None:
    a = store_pool.router("a")
    await a.store.report(store_pool.next_report(blocks=100, sequences=100, accepting=False))
    for number in range(80):
        await a.store.submit(Demand(f"r{number}", 2, blocks=1))

    await a.store.report(store_pool.next_report(blocks=100, sequences=100))

    told = await a.told()
    assert [event.request_id for event in told if isinstance(event, Placement)] == [f"r{n}" for n in range(80)]


async def test_expired_request_is_dropped_at_its_turn(store_pool: StorePool) -> None:
    a = store_pool.router("a")
    await a.store.report(store_pool.next_report(sequences=1))
    await a.place("running")
    await a.store.submit(Demand("due", 2, blocks=1, deadline_ms=100))
    await store_pool.wait(101)

    await a.store.settle([Attempt("running", 1)])

    assert await a.told() == [Dropped("due", DropReason.EXPIRED)]
    assert await store_pool.reserved_blocks() == {"x": 0}


async def test_request_with_output_waits_on_past_its_deadline(store_pool: StorePool) -> None:
    a = store_pool.router("a")
    await a.store.report(store_pool.next_report(sequences=1))
    assert await a.store.submit(Demand("begun", 2, blocks=1, deadline_ms=100)) == Placement("begun", 1, "x", 1)
    assert await a.store.hand_back("begun", 1, max_attempts=3, output_tokens=1) == Queued(0)
    await store_pool.wait(101)

    await a.store.report(store_pool.next_report(sequences=1))

    assert await a.told() == [Placement("begun", 2, "x", 1)]


async def test_request_that_no_executor_left_can_hold_frees_the_line(store_pool: StorePool) -> None:
    store_pool.settings = NO_BYPASS
    a = store_pool.router("a")
    await a.store.report(store_pool.next_report("x", blocks=10))
    await a.place("running", 1)
    assert await a.store.submit(Demand("large", 2, blocks=10)) == Queued(0)
    assert await a.store.submit(Demand("small", 2, blocks=2)) == Queued(1)

    await a.store.report(store_pool.next_report("x", blocks=5))

    assert await a.told() == [Dropped("large", DropReason.NEVER_FITS), Placement("small", 1, "x", 1)]


async def test_repeated_submit_returns_what_holds(store_pool: StorePool) -> None:
    a, b = store_pool.router("a"), store_pool.router("b")
    await a.store.report(store_pool.next_report(sequences=1))
    running, waiting = Demand("running", 2, blocks=1), Demand("waiting", 2, blocks=1, deadline_ms=9000)
    placed, queued = await a.store.submit(running), await a.store.submit(waiting)

    assert await a.store.submit(running) == placed
    assert await a.store.submit(waiting) == queued
    assert await store_pool.reserved_blocks() == {"x": 1}
    assert await b.store.submit(running) == Duplicate(LedgerState.PLACED)
    assert await a.store.submit(Demand("waiting", 2, blocks=2)) == Duplicate(LedgerState.WAITING)


async def test_id_of_a_request_that_ended_is_refused_for_a_while(store_pool: StorePool) -> None:
    a = store_pool.router("a")
    await a.store.report(store_pool.next_report())
    await a.place("r")
    await a.store.settle([Attempt("r", 1)])

    assert await a.store.submit(Demand("r", 2, blocks=1)) == Duplicate(LedgerState.ENDED)
    await store_pool.wait(75_001)
    await a.store.report(store_pool.next_report())
    assert await a.store.submit(Demand("r", 2, blocks=1)) == Placement("r", 1, "x", 1)


async def test_settle_ends_each_placement_once(store_pool: StorePool) -> None:
    a = store_pool.router("a")
    await a.store.report(store_pool.next_report())
    await a.place("r", 3)
    await a.place("other", 2)

    assert await a.store.settle([Attempt("r", 1), Attempt("other", 2)]) == 1
    assert await a.store.settle([Attempt("r", 1)]) == 0
    assert await store_pool.reserved_blocks() == {"x": 2}


async def test_cancel_of_a_waiting_request_frees_the_line_and_tells_its_owner(store_pool: StorePool) -> None:
    store_pool.settings = NO_BYPASS
    a, b = store_pool.router("a"), store_pool.router("b")
    await a.store.report(store_pool.next_report(blocks=10))
    await a.place("running", 6)
    await a.store.submit(Demand("large", 2, blocks=5))
    await b.store.submit(Demand("small", 2, blocks=1))

    assert await b.store.cancel("large") == CancelOutcome(LedgerState.WAITING, None, "a", owner_notified=True)

    assert await a.told() == [Cancelled("large")]
    assert await b.told() == [Placement("small", 1, "x", 1)]
    assert await b.store.cancel("large") == CancelOutcome(LedgerState.ENDED)
    assert await b.store.cancel("never seen") == CancelOutcome(None)


async def test_cancel_of_a_placed_request_is_its_owners_affair(store_pool: StorePool) -> None:
    a, b = store_pool.router("a"), store_pool.router("b")
    await a.store.report(store_pool.next_report())
    placement = await a.place("r", 3)

    assert await b.store.cancel("r") == CancelOutcome(LedgerState.PLACED, placement, "a", owner_notified=True)
    assert await a.told() == [CancelRequested("r", 1)]
    assert await a.store.cancel("r") == CancelOutcome(LedgerState.PLACED, placement, "a", owner_notified=False)
    assert await a.told() == []
    assert await store_pool.reserved_blocks() == {"x": 3}


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


async def test_seat_of_an_expired_request_goes_to_the_one_handed_back_behind_it(store_pool: StorePool) -> None:
    a, b = store_pool.router("a"), store_pool.router("b")
    await a.store.report(store_pool.next_report(sequences=1))
    await a.place("running")
    await b.store.submit(Demand("due", 1, blocks=1, deadline_ms=100))
    await store_pool.wait(101)

    assert await a.store.hand_back("running", 1, max_attempts=3) == Queued(1)
    await a.store.report(store_pool.next_report(sequences=1))

    assert await b.told() == [Dropped("due", DropReason.EXPIRED)]
    assert await a.told() == [Placement("running", 2, "x", 1)]


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


async def test_attempts_run_out_but_for_those_rejected(store_pool: StorePool) -> None:
    a = store_pool.router("a")
    await a.store.report(store_pool.next_report())
    await a.place("r")
    for attempt, rejected in ((1, True), (2, False), (3, True)):
        assert await a.store.hand_back("r", attempt, max_attempts=2, rejected=rejected) == Queued(0)
        await a.store.report(store_pool.next_report(generation=attempt))

    assert await a.store.hand_back("r", 4, max_attempts=2) is HandBackRefusal.UNDECIDED
    await a.store.report(store_pool.next_report(generation=4))
    assert await a.store.hand_back("r", 4, max_attempts=2) is HandBackRefusal.EXHAUSTED
    assert await store_pool.reserved_blocks() == {"x": 0}
    assert await a.store.hand_back("r", 4, max_attempts=2) is HandBackRefusal.STALE
    assert await a.store.hand_back("never seen", 1, max_attempts=2) is HandBackRefusal.UNKNOWN


async def test_request_that_the_ledger_lost_goes_on_counting_its_attempts(store_pool: StorePool) -> None:
    a = store_pool.router("a")
    await a.store.report(store_pool.next_report())

    assert await a.store.submit(Demand("r", 2, blocks=1, last_attempt=4)) == Placement("r", 5, "x", 1)


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
