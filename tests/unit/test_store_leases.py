"""Leases: executors and routers that fall silent, restart, or report what the ledger does not expect."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from inflight.router.ledger.functions import ScriptCalls
from inflight.router.ledger.types import (
    Attempt,
    Demand,
    HeldSequence,
    LeaseLapsed,
    Lost,
    Placement,
    Queued,
    ReportOutcome,
)
from tests.support.ledger.store_pool import StorePool, steered_scripts


async def attend(
    pool: StorePool, duration_ms: int, reporting: Sequence[str] = (), held: tuple[HeldSequence, ...] = ()
) -> None:
    """Lets time pass second by second while router a renews and reaps, and these executors of one seat report."""
    store = pool.router("a").store
    await store.reap()
    for _ in range(duration_ms // 1000):
        await pool.wait(1000)
        for executor_id in reporting:
            await store.report(pool.next_report(executor_id, sequences=1, held=held))
        await store.renew()
        await store.reap()


async def test_restarted_executor_has_lost_its_placements(store_pool: StorePool) -> None:
    a, b = store_pool.router("a"), store_pool.router("b")
    await a.store.report(store_pool.next_report(generation=1))
    await a.place("of a", 2)
    await b.place("of b", 3)

    await a.store.report(store_pool.next_report(generation=2))

    assert await a.told() == [Lost("of a", 1, "x", 1)]
    assert await b.told() == [Lost("of b", 1, "x", 1)]
    assert await store_pool.reserved_blocks() == {"x": 0}
    assert await a.store.report(store_pool.next_report(generation=1)) == ReportOutcome(taken=False)
    assert await b.store.hand_back("of b", 1, max_attempts=3) == Placement("of b", 2, "x", 2)
    assert await a.store.settle([Attempt("of a", 1)]) == 1


async def test_silence_while_no_router_listened_costs_no_lease(store_pool: StorePool) -> None:
    a, b = store_pool.router("a"), store_pool.router("b")
    await a.store.report(store_pool.next_report(sequences=1))
    await a.place("running")
    await b.store.submit(Demand("waiting", 2, blocks=1))
    await attend(store_pool, 3000, ["x"], held=(HeldSequence("running", 1, 1),))

    await store_pool.wait(60_000)  # Redis was away
    await attend(store_pool, 1000)

    assert await a.told() == []
    assert await b.store.submit(Demand("waiting", 2, blocks=1)) == Queued(0)
    assert await store_pool.num_waiting() == 1


async def test_reap_goes_on_where_one_call_ends(store_pool: StorePool) -> None:
    a = store_pool.router("a")
    executors = [f"x{number}" for number in range(6)]
    for executor_id in executors:
        await a.store.report(store_pool.next_report(executor_id, accepting=False))
    settings = dataclasses.replace(store_pool.settings, max_queue_requests=300)
    b = store_pool.router("b", settings)
    for number in range(300):
        assert await b.store.submit(Demand(f"r{number}", 2, blocks=1)) == Queued(number)

    await attend(store_pool, 8000, ["y"])

    assert [one.executor_id for one in (await a.store.snapshot()).executors] == ["y"]
    assert await store_pool.num_waiting() == 0
    assert await store_pool.redis.zrange(store_pool.keys.key("routers"), 0, -1) == ["a"]


async def test_router_that_returns_while_it_is_reaped_is_told(store_pool: StorePool) -> None:
    a = store_pool.router("a")
    b = store_pool.router("b", dataclasses.replace(store_pool.settings, max_queue_requests=300))
    await a.store.report(store_pool.next_report(accepting=False))
    for number in range(300):
        await b.store.submit(Demand(f"r{number}", 2, blocks=1))
    await attend(store_pool, 5000)
    await store_pool.wait(1000)

    reap = ScriptCalls(store_pool.redis, steered_scripts())
    reply = await reap.run("reap", store_pool.keys.for_script(()), ["a"])

    assert reply[0] == ["AGAIN"]
    assert 0 < await store_pool.num_waiting() < 300
    await b.store.renew()
    assert await b.told() == [LeaseLapsed()]


class Listening:
    """What a router is told of the pool."""

    def __init__(self) -> None:
        self.peers: list[frozenset[str]] = []
        self.overdue: list[tuple[str, float]] = []

    def on_routers(self, peers: frozenset[str]) -> None:
        self.peers.append(peers)

    def on_report_overdue(self, executor_id: str, silent_s: float) -> None:
        self.overdue.append((executor_id, silent_s))


async def test_reap_names_executors_that_have_been_silent_for_a_second(store_pool: StorePool) -> None:
    a, listening = store_pool.router("a"), Listening()
    a.store.listen(listening)
    await a.store.report(store_pool.next_report("x"))
    await store_pool.wait(500)
    await a.store.report(store_pool.next_report("y"))
    await store_pool.wait(499)
    await a.store.reap()
    assert listening.overdue == []
    await store_pool.wait(1)
    await a.store.reap()
    assert listening.overdue == [("x", 1.0)]
    await store_pool.wait(600)
    await a.store.report(store_pool.next_report("x"))
    await a.store.reap()
    assert listening.overdue[1:] == [("y", 1.1)]


async def test_router_is_told_when_other_routers_come(store_pool: StorePool) -> None:
    a, b, listening = store_pool.router("a"), store_pool.router("b"), Listening()
    a.store.listen(listening)
    for store in (a.store, b.store, a.store, a.store):
        await store.renew()
    assert listening.peers == [frozenset({"b"})]


async def test_report_that_was_held_back_counts_from_when_it_came(store_pool: StorePool) -> None:
    a = store_pool.router("a")
    await a.store.report(dataclasses.replace(store_pool.next_report(), age_ms=1500))
    await store_pool.wait(500)
    assert isinstance(await a.store.submit(Demand("in time", 2, 1)), Placement)
    await store_pool.wait(1)
    await a.queue(Demand("late", 2, 1))
    # And an older report that is newer by its number does not set the time back
    await a.store.report(store_pool.next_report())
    await a.store.report(dataclasses.replace(store_pool.next_report(), age_ms=1500))
    assert isinstance(await a.store.submit(Demand("again", 2, 1)), Placement)
    await store_pool.wait(2000)
    assert isinstance(await a.store.submit(Demand("still", 2, 1)), Placement)


async def test_reports_of_several_executors_are_audited_and_placed_on_in_one_call(store_pool: StorePool) -> None:
    a = store_pool.router("a")
    await a.store.report(store_pool.next_report("x", sequences=1))
    await a.store.settle([Attempt("ended", 1)])
    first = await a.place("first")
    await a.queue(Demand("second", 2, 1))
    await a.queue(Demand("third", 2, 1))
    await store_pool.wait(2001)
    held = HeldSequence("ended", 1, 1)
    reports = [
        store_pool.next_report("x", sequences=1, held=(HeldSequence("first", first.attempt, 1), held)),
        store_pool.next_report("y", sequences=2),
    ]
    outcomes = await a.store.report_all(reports)
    superseded = (Attempt("ended", 1),)
    assert outcomes == [ReportOutcome(taken=True, superseded=superseded), ReportOutcome(taken=True)]
    assert await a.placed() == ["second", "third"]
    assert await a.store.report_all(reports) == [ReportOutcome(taken=False), ReportOutcome(taken=False)]


async def test_reports_are_told_whole_if_the_call_has_to_be_repeated(store_pool: StorePool) -> None:
    a, b = store_pool.router("a"), store_pool.router("b")
    await b.store.renew()  # unknown to the other
    await a.store.report(store_pool.next_report("y"))
    await b.place("lost on y")
    await a.store.report(store_pool.next_report("x"))
    await a.store.settle([Attempt("ended", 1)])
    await store_pool.wait(2001)
    held = (HeldSequence("ended", 1, 1),)
    outcomes = await a.store.report_all([store_pool.next_report("x", held=held), store_pool.next_report("y")])
    assert outcomes == [ReportOutcome(taken=True, superseded=(Attempt("ended", 1),)), ReportOutcome(taken=True)]
    assert [type(event) for event in await b.told()] == [Lost]


async def test_executor_silent_for_its_lease_is_reaped(store_pool: StorePool) -> None:
    a = store_pool.router("a")
    await a.store.report(store_pool.next_report("x", blocks=50))
    await a.place("r")
    await attend(store_pool, 5000, ["y"])
    assert await a.told() == []

    await attend(store_pool, 1000, ["y"])

    assert await a.told() == [Lost("r", 1, "x", 1)]
    assert [one.executor_id for one in (await a.store.snapshot()).executors] == ["y"]
    assert await a.store.hand_back("r", 1, max_attempts=3) == Placement("r", 2, "y", 1)
