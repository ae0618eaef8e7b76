"""The ledger's time bounds, each at the last millisecond that is in time and the first that is not.

The bounds are those of docs/design/time-bounds.md.
"""

from __future__ import annotations

from inflight.router.ledger.codec import report_args
from inflight.router.ledger.functions import ScriptCalls
from inflight.router.ledger.types import (
    Attempt,
    Cancelled,
    CancelOutcome,
    Demand,
    Dropped,
    DropReason,
    Duplicate,
    HeldSequence,
    LeaseLapsed,
    LedgerState,
    Lost,
    Placement,
    Queued,
    ReportOutcome,
)
from tests.support.ledger.store_pool import StorePool, steered_scripts

SILENT_MS, LEASE_MS, GRACE_MS, AUDIT_INTERVAL_MS = 2000, 5000, 2000, 1000


async def test_executor_gets_new_work_for_two_seconds_after_its_report_and_no_longer(store_pool: StorePool) -> None:
    a = store_pool.router("a")
    await a.store.report(store_pool.next_report())
    await store_pool.wait(SILENT_MS)
    assert await a.store.submit(Demand("in time", 2, blocks=1)) == Placement("in time", 1, "x", 1)
    await store_pool.wait(1)
    assert await a.store.submit(Demand("too late", 2, blocks=1)) == Queued(0)


async def attend(store_pool: StorePool, until_ms: int, step_ms: int = 500) -> None:
    """Router a lives, and looks at leases, up to this time."""
    while store_pool.now_ms < until_ms:
        await store_pool.set_clock(min(until_ms, store_pool.now_ms + step_ms))
        await store_pool.router("a").store.renew()
        await store_pool.router("a").store.reap()


async def test_lease_of_an_executor_lapses_after_five_seconds_and_its_requests_are_lost(
    store_pool: StorePool,
) -> None:
    a = store_pool.router("a")
    await attend(store_pool, store_pool.now_ms + LEASE_MS + 500)
    await a.store.report(store_pool.next_report("x"))
    await a.place("r", 3)
    last_ms = store_pool.now_ms + LEASE_MS
    await attend(store_pool, last_ms)
    assert await a.told() == []
    assert await store_pool.reserved_blocks() == {"x": 3}

    await attend(store_pool, last_ms + 1)

    assert await a.told() == [Lost("r", 1, "x", 1)]
    assert await store_pool.reserved_blocks() == {}


async def test_place_of_a_dead_router_is_kept_for_five_seconds_and_no_longer(store_pool: StorePool) -> None:
    a, b = store_pool.router("a"), store_pool.router("b")
    await attend(store_pool, store_pool.now_ms + LEASE_MS + 500)
    await a.store.report(store_pool.next_report(accepting=False))
    await b.store.submit(Demand("of b", 2, blocks=1))
    last_ms = store_pool.now_ms + LEASE_MS
    await attend(store_pool, last_ms)
    assert await store_pool.num_waiting() == 1
    await attend(store_pool, last_ms + 1)
    assert await store_pool.num_waiting() == 0
    await b.store.renew()
    assert await b.told() == [LeaseLapsed()]


async def test_leaked_reservation_is_returned_by_the_first_report_after_its_grace(store_pool: StorePool) -> None:
    a = store_pool.router("a")
    await a.store.report(store_pool.next_report(sequences=1))
    await a.place("leaked", 3)
    assert await a.store.submit(Demand("next", 2, blocks=1)) == Queued(0)
    await store_pool.wait(GRACE_MS - AUDIT_INTERVAL_MS + 1)
    await a.store.report(store_pool.next_report(sequences=1))  # audits, and the grace is not over
    assert await a.told() == []
    await store_pool.wait(AUDIT_INTERVAL_MS - 1)
    await a.store.report(store_pool.next_report(sequences=1))
    assert await a.told() == []
    await store_pool.wait(1)
    await a.store.report(store_pool.next_report(sequences=1))
    # Its blocks are back and its seat is taken, in the same call
    assert await a.told() == [Lost("leaked", 1, "x", 1), Placement("next", 1, "x", 1)]
    assert await store_pool.reserved_blocks() == {"x": 1}


async def test_reports_are_audited_once_a_second(store_pool: StorePool) -> None:
    a = store_pool.router("a")
    await a.store.report(store_pool.next_report())
    await a.place("leaked", 3)
    await store_pool.wait(GRACE_MS)
    await a.store.report(store_pool.next_report())
    await store_pool.wait(AUDIT_INTERVAL_MS - 1)
    await a.store.report(store_pool.next_report())
    assert await store_pool.reserved_blocks() == {"x": 3}
    await store_pool.wait(1)
    await a.store.report(store_pool.next_report())
    assert await store_pool.reserved_blocks() == {"x": 0}


async def test_emptied_ledger_knows_everything_after_one_report(store_pool: StorePool) -> None:
    a = store_pool.router("a")
    held = (HeldSequence("r1", 1, 2), HeldSequence("r2", 3, 4))
    await a.store.report(store_pool.next_report(held=held))
    await store_pool.redis.delete(*(store_pool.keys.key(name) for name in ("executors", "requests", "placements")))
    assert await store_pool.reserved_blocks() == {}
    await a.store.report(store_pool.next_report(held=held))
    assert await store_pool.reserved_blocks() == {"x": 6}


async def test_sequence_whose_request_has_ended_is_returned_for_cancelling_after_the_grace(
    store_pool: StorePool,
) -> None:
    a = store_pool.router("a")
    await a.store.report(store_pool.next_report())
    await a.place("r", 2)
    await a.store.settle([Attempt("r", 1)])
    held = (HeldSequence("r", 1, 2),)
    await store_pool.wait(GRACE_MS)
    assert (await a.store.report(store_pool.next_report(held=held))).superseded == ()
    await store_pool.wait(AUDIT_INTERVAL_MS)
    outcome = await a.store.report(store_pool.next_report(held=held))
    assert outcome == ReportOutcome(taken=True, superseded=(Attempt("r", 1),))


async def test_seat_of_a_settled_request_is_given_in_the_same_call(store_pool: StorePool) -> None:
    a = store_pool.router("a")
    await a.store.report(store_pool.next_report(sequences=1))
    await a.place("first", 3)
    assert await a.store.submit(Demand("next", 2, blocks=1)) == Queued(0)
    await a.store.settle([Attempt("first", 1)])
    assert await a.told() == [Placement("next", 1, "x", 1)]
    assert await store_pool.reserved_blocks() == {"x": 1}


async def test_place_of_a_cancelled_request_is_free_in_the_same_call(store_pool: StorePool) -> None:
    a, b = store_pool.router("a"), store_pool.router("b")
    await a.store.report(store_pool.next_report(accepting=False))
    await a.store.submit(Demand("first", 2, blocks=1))
    assert await a.store.submit(Demand("second", 2, blocks=1)) == Queued(1)
    assert await b.store.cancel("first") == CancelOutcome(LedgerState.WAITING, None, "a", owner_notified=True)
    assert await a.told() == [Cancelled("first")]
    assert await store_pool.num_waiting() == 1
    assert await a.store.submit(Demand("second", 2, blocks=1)) == Queued(0)


async def test_deadline_in_line_holds_to_its_millisecond(store_pool: StorePool) -> None:
    a = store_pool.router("a")
    await a.store.report(store_pool.next_report(sequences=1))
    await a.place("running")
    for name in ("first", "second"):
        await a.store.submit(Demand(name, 2, blocks=1, deadline_ms=1000))
    await store_pool.wait(1000)
    await a.store.settle([Attempt("running", 1)])
    assert await a.told() == [Placement("first", 1, "x", 1)]
    await store_pool.wait(1)
    await a.store.settle([Attempt("first", 1)])
    assert await a.told() == [Dropped("second", DropReason.EXPIRED)]


async def test_lost_request_is_forgotten_thirty_seconds_after_its_owner_was_told(store_pool: StorePool) -> None:
    a = store_pool.router("a")
    await attend(store_pool, store_pool.now_ms + LEASE_MS + 500)
    await a.store.report(store_pool.next_report(generation=1))
    await a.place("r")
    await a.store.report(store_pool.next_report(generation=2))
    last_ms = store_pool.now_ms + 30_000
    await attend(store_pool, last_ms, step_ms=2000)
    assert await a.store.submit(Demand("r", 2, blocks=1)) == Duplicate(LedgerState.LOST)
    await attend(store_pool, last_ms + 1)
    assert await a.store.cancel("r") == CancelOutcome(None)


async def test_restarted_executor_loses_32_placements_in_a_call_and_gets_none_before_the_last(
    store_pool: StorePool,
) -> None:
    a = store_pool.router("a")
    await a.store.report(store_pool.next_report(blocks=100, sequences=40))
    for number in range(40):
        await a.place(f"{number:02}")
    restarted = store_pool.next_report(blocks=100, sequences=40, generation=2)
    keys, args = store_pool.keys.for_script(("a",)), ["b", *report_args(restarted, store_pool.settings)]
    reply = await ScriptCalls(store_pool.routers_redis, steered_scripts()).run("report", keys, args)

    assert reply[0] == ["AGAIN"]
    assert await store_pool.reserved_blocks() == {"x": 8}
    assert await a.store.submit(Demand("new", 2, blocks=1)) == Queued(0)
    await store_pool.router("b").store.report(restarted)
    told = await a.told()
    assert len(told) == 41
    assert set(told) == {*(Lost(f"{number:02}", 1, "x", 1) for number in range(40)), Placement("new", 1, "x", 2)}


async def test_report_that_loses_many_placements_leaves_their_seats_to_another_call(store_pool: StorePool) -> None:
    a = store_pool.router("a")
    await a.store.report(store_pool.next_report(blocks=100, sequences=9))
    for number in range(9):
        await a.place(f"{number}")
    assert await a.store.submit(Demand("next", 2, blocks=1)) == Queued(0)
    await store_pool.wait(GRACE_MS + 1)
    report = store_pool.next_report(blocks=100, sequences=9)
    keys, args = store_pool.keys.for_script(("a",)), ["b", *report_args(report, store_pool.settings)]
    reply = await ScriptCalls(store_pool.routers_redis, steered_scripts()).run("report", keys, args)

    assert (reply[0][0], reply[3]) == ("REPORTED", 1)  # there is more to do
    assert await store_pool.reserved_blocks() == {"x": 0}
    await store_pool.router("b").store.report(store_pool.next_report(blocks=100, sequences=9))
    told = await a.told()
    assert (len(told), told[-1]) == (10, Placement("next", 1, "x", 1))
