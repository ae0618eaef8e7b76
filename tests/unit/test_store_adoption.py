"""Changes of a request's owner: repeats from another router, and adoption by attaching."""

from __future__ import annotations

import dataclasses

from inflight.common.errors import Reason
from inflight.router.ledger.codec import parse_reply, submit_args
from inflight.router.ledger.functions import ScriptCalls
from inflight.router.ledger.mailbox import KEPT_MS, OwnershipFilter
from inflight.router.ledger.types import (
    Adopted,
    Attempt,
    Cancelled,
    Demand,
    Duplicate,
    Ending,
    HandBackRefusal,
    LedgerEvent,
    LedgerState,
    Placement,
    Queued,
    Refused,
    TakenOver,
)
from tests.support.ledger.store_pool import StorePool, steered_scripts

KEYED = Demand("k", 2, blocks=1, digest="as asked")


async def test_repeat_by_another_router_keeps_its_place_in_line(store_pool: StorePool) -> None:
    a, b = store_pool.router("a"), store_pool.router("b")
    await a.store.report(store_pool.next_report(sequences=1))
    await a.place("running")
    await a.queue(KEYED)
    await a.queue(Demand("behind", 2, blocks=1))

    assert await b.store.submit(KEYED) == Queued(0)
    assert await a.told() == [TakenOver("k")]
    await a.store.settle([Attempt("running", 1)])

    assert await b.told() == [Placement("k", 1, "x", 1)]
    assert await a.told() == []


async def test_repeat_of_what_runs_is_told_where_and_so_is_the_repeat_of_that(store_pool: StorePool) -> None:
    a, b = store_pool.router("a"), store_pool.router("b")
    await a.store.report(store_pool.next_report())
    placement = await a.place_demand(KEYED)

    assert await a.store.submit(KEYED) == placement
    assert await b.store.submit(KEYED) == Adopted(placement, ended=False)
    assert await b.store.submit(KEYED) == Adopted(placement, ended=False)
    assert await a.told() == [TakenOver("k")]
    assert await a.store.hand_back("k", 1, max_attempts=2) is HandBackRefusal.STALE


async def test_what_differs_is_no_repeat(store_pool: StorePool) -> None:
    a, b = store_pool.router("a"), store_pool.router("b")
    await a.store.report(store_pool.next_report())
    await a.place_demand(KEYED)
    await a.place("plain")

    other = dataclasses.replace(KEYED, digest="something else")
    assert await a.store.submit(other) == Duplicate(LedgerState.PLACED)
    assert await b.store.submit(other) == Duplicate(LedgerState.PLACED)
    assert await b.store.submit(Demand("plain", 2, blocks=1)) == Duplicate(LedgerState.PLACED)
    await a.store.settle([Attempt("k", 1)])
    assert await b.store.submit(other) == Duplicate(LedgerState.ENDED)
    assert await a.told() == []


async def test_repeat_after_the_end_is_told_where_it_ran(store_pool: StorePool) -> None:
    a, b = store_pool.router("a"), store_pool.router("b")
    await a.store.report(store_pool.next_report())
    placement = await a.place_demand(KEYED)
    await a.store.settle([Ending("k", 1, 1, 1, by_itself=True)])

    assert await b.store.submit(KEYED) == Adopted(placement, ended=True)
    assert await b.store.adopt("k") == Adopted(placement, ended=True)
    await store_pool.wait(75_001)
    await a.store.report(store_pool.next_report())
    assert await b.store.adopt("k") is None
    assert await b.store.submit(KEYED) == Placement("k", 1, "x", 1)


async def test_word_of_a_take_over_from_before_the_request_came_back_is_not_told(store_pool: StorePool) -> None:
    a, b = store_pool.router("a"), store_pool.router("b")
    await a.store.report(store_pool.next_report())
    told: list[LedgerEvent] = []
    ownership = OwnershipFilter(told.append)
    a.store._ownership = ownership
    placement = await a.place_demand(KEYED)
    await store_pool.wait(10)
    assert await b.store.submit(KEYED) == Adopted(placement, ended=False)
    await store_pool.wait(10)
    assert await a.store.adopt("k") == Adopted(placement, ended=False)

    (stale,) = await a.told()
    ownership.receive(stale)
    assert told == []
    await store_pool.wait(10)
    await b.store.adopt("k")
    (current,) = await a.told()
    ownership.receive(current)
    assert told == [TakenOver("k")]


def test_word_of_a_take_over_is_held_until_the_answer_says_which_came_first() -> None:
    told: list[LedgerEvent] = []
    ownership = OwnershipFilter(told.append)
    with ownership.during_call("k"):
        ownership.receive(TakenOver("k", 5))
        ownership.take("k", 7)
        assert told == []
    with ownership.during_call("k"):
        ownership.take("k", 8)
        ownership.receive(TakenOver("k", 9))
        assert told == []
    assert told == [TakenOver("k")]


def test_word_of_a_take_over_counts_in_a_ledger_whose_clock_is_behind_that_of_the_lost_one() -> None:
    told: list[LedgerEvent] = []
    ownership = OwnershipFilter(told.append)
    ownership.take("k", 3_600_000)
    ownership.take("other", 10_000)

    ownership.receive(TakenOver("k", 10_500))

    assert told == [TakenOver("k")]


async def test_word_of_a_cancel_says_nothing_of_a_repeat_that_began_behind_it(store_pool: StorePool) -> None:
    a, b = store_pool.router("a"), store_pool.router("b")
    await a.store.report(store_pool.next_report(sequences=1))
    told: list[LedgerEvent] = []
    ownership = OwnershipFilter(told.append)
    a.store._ownership = ownership
    await a.place("running")
    await a.queue(KEYED)
    await store_pool.wait(10)
    await b.store.cancel("k")
    await store_pool.wait(10)
    await a.queue(KEYED)
    await store_pool.wait(10)

    (stale,) = await a.told()
    ownership.receive(stale)
    assert (stale, told) == (Cancelled("k"), [])
    await b.store.cancel("k")
    (current,) = await a.told()
    ownership.receive(current)
    assert told == [Cancelled("k")]


async def test_call_that_comes_when_its_caller_has_given_up_takes_nothing(store_pool: StorePool) -> None:
    a, late = store_pool.router("a"), store_pool.router("late")
    await late.store.report(store_pool.next_report())
    placement = await a.place_demand(KEYED)
    await store_pool.wait(10_000)
    keys = store_pool.keys.for_script(("a",))
    submit = submit_args(KEYED, store_pool.settings)
    until = store_pool.now_ms - 1
    for name, args in (
        ("submit", [until, *submit]),
        ("adopt", ["k", until]),
        ("cancel", [until, "k", 1]),
        ("cancel", [until, "k", 0]),
    ):
        reply = await ScriptCalls(store_pool.redis, steered_scripts()).run(name, keys, ["late", *args])
        assert parse_reply(reply).status == "LATE"

    assert await a.told() == []
    assert await a.store.submit(KEYED) == placement
    assert await late.store.adopt("k") == Adopted(placement, ended=False)  # its clock was ten seconds behind


def test_old_ownership_is_forgotten() -> None:
    ownership = OwnershipFilter(lambda event: None)
    ownership.take("old", 1)
    ownership.take("new", KEPT_MS + 2)
    assert list(ownership._since_ms) == ["new"]


async def test_router_that_has_lost_the_first_choice_gets_none_of_the_later_ones(store_pool: StorePool) -> None:
    """Of two routers with calls of one request, one must get all choices, however their submits are mixed."""
    a, b = store_pool.router("a"), store_pool.router("b")
    await a.store.report(store_pool.next_report())
    later = dataclasses.replace(KEYED, request_id="k~1", num_choices=0)
    first = await a.place_demand(KEYED)
    assert await b.store.submit(KEYED) == Adopted(first, ended=False)

    refused = Refused(Reason.TAKEN_OVER)
    assert await a.store.submit(later) == refused
    placement = await b.store.submit(later)
    assert isinstance(placement, Placement)
    assert await a.store.submit(later) == refused
    assert await a.store.adopt("k~1") == refused

    # Once it has the first choice again, it gets the others, too
    assert await a.store.submit(KEYED) == Adopted(first, ended=False)
    assert await a.store.submit(later) == Adopted(placement, ended=False)
