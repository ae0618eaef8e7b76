"""Sub-pools: two ledgers that look like one. A request is in one of them, and moves without being lost or doubled."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest

from inflight.common.errors import Reason, RequestError
from inflight.local.redis_server import PrivateRedis
from inflight.router.store.connection import close, connect, unavailable
from inflight.router.store.keys import PoolKeys
from inflight.router.store.ledgers import Ledgers
from inflight.router.store.types import (
    Adopted,
    Attempt,
    CancelOutcome,
    CancelRequested,
    Demand,
    Duplicate,
    Ending,
    LedgerState,
    Placement,
    PoolLoad,
    Queued,
    Refused,
    StoreEvent,
    TakenOver,
    TenantLimits,
)
from inflight.router.subpools.assignment import home_of, open_to, ranked, share_of_limits
from inflight.router.subpools.choice import SubPoolChoice
from inflight.router.subpools.claims import Claims
from inflight.router.subpools.ledgers import SubPoolLedgers
from inflight.router.subpools.store import SubPoolStore
from tests.support.ledger.store_pool import SETTINGS, RouterSide, StorePool

NUM_SUBPOOLS = 2
DIGEST = "d" * 32


def executor_of(subpool: int, num_subpools: int = NUM_SUBPOOLS) -> str:
    """The name of an executor that belongs to the sub-pool."""
    return next(name for number in range(1000) if home_of(name := f"x{number}", num_subpools) == subpool)


@dataclass
class SubPoolSide:
    """A router of two sub-pools, whose mailboxes the test reads."""

    store: SubPoolStore
    sides: list[RouterSide]
    events: list[StoreEvent]

    async def told(self) -> list[StoreEvent]:
        """What the router was told since the last look. Its mailboxes are read one after the other."""
        for number, side in enumerate(self.sides):
            for event in await side.mailbox.read():
                self.store._on_event(number, event)
        told = [*self.events]
        self.events.clear()
        return told


@dataclass
class TwoSubPools:
    """Two sub-pools on a real Redis, with one executor each, and routers that share them."""

    pools: list[StorePool]
    server: Ledgers
    sides: dict[str, SubPoolSide] = field(default_factory=dict)

    def router(self, name: str) -> SubPoolSide:
        if name not in self.sides:
            events = list[StoreEvent]()
            claims = Claims([(self.server, pool.keys) for pool in self.pools], name, SETTINGS)
            sides = [pool.router(name) for pool in self.pools]
            store = SubPoolStore(
                NUM_SUBPOOLS, lambda number, _: sides[number].store, claims, events.append, SubPoolChoice(NUM_SUBPOOLS)
            )
            for number, side in enumerate(sides):
                # What replies bring goes the way of all events.
                side.store._on_event = lambda event, number=number: store._on_event(number, event)  # type: ignore[misc]
            self.sides[name] = SubPoolSide(store, sides, events)
        return self.sides[name]

    async def report(self, subpool: int, sequences: int = 1, blocks: int = 10) -> None:
        """The executor of the sub-pool has so many seats, and all routers know the load."""
        reporter = self.router("a")
        name = executor_of(subpool)
        await reporter.store.report_all([self.pools[0].next_report(name, sequences=sequences, blocks=blocks)])
        await self.renew()

    async def renew(self) -> None:
        for side in self.sides.values():
            for one in side.sides:
                await one.store.renew()

    async def places(self, request_id: str) -> list[LedgerState | None]:
        """The state of a request in each ledger, without asking where it should be."""
        found = [await pool.router("observer").store.explain(request_id) for pool in self.pools]
        return [None if one is None else one.state for one in found]


@pytest.fixture
async def two(store_pool: StorePool, redis_url: str) -> AsyncIterator[TwoSubPools]:
    pools = [replace(store_pool, keys=PoolKeys(f"{store_pool.keys.pool}#{k}"), routers={}) for k in range(NUM_SUBPOOLS)]
    for pool in pools:
        await pool.set_clock(store_pool.now_ms)
    two = TwoSubPools(pools, Ledgers(redis_url, "", SETTINGS))
    two.router("a"), two.router("b")
    yield two
    await two.server.aclose()


def demand(request_id: str, **fields: Any) -> Demand:
    return replace(Demand(request_id, 2, 1, digest=DIGEST), **fields)


async def test_executors_report_to_their_own_ledger_and_the_snapshot_shows_both(two: TwoSubPools) -> None:
    await two.report(0)
    await two.report(1)
    for number, pool in enumerate(two.pools):
        assert [one.executor_id for one in (await pool.router("a").store.snapshot()).executors] == [executor_of(number)]
    assert {one.executor_id for one in (await two.router("b").store.snapshot()).executors} == {
        executor_of(0),
        executor_of(1),
    }


async def test_claims_that_wait_share_a_call(two: TwoSubPools, monkeypatch: pytest.MonkeyPatch) -> None:
    number_of_keys: list[int] = []
    run = Ledgers.run_source

    async def counting(ledgers: Ledgers, source: str, keys: Sequence[str], *args: str | int) -> Any:
        number_of_keys.append(len(keys))
        return await run(ledgers, source, keys, *args)

    monkeypatch.setattr(Ledgers, "run_source", counting)
    claims = two.router("a").store._claims
    ids = [name for number in range(200) if home_of(name := f"r{number}", NUM_SUBPOOLS) == 0][:50]
    other = two.router("b").store._claims
    assert await other.claim(ids[20], 1, takes_over=True) == 1
    number_of_keys.clear()
    found = await asyncio.gather(*(claims.claim(one, number % 2, takes_over=False) for number, one in enumerate(ids)))
    # Two calls are under way; what waits meanwhile is in as few as possible
    assert found == [1 if number == 20 else number % 2 for number in range(50)]
    assert (sum(number_of_keys), len(number_of_keys)) <= (50, 5)
    assert await asyncio.gather(*(claims.find(one) for one in ids)) == found


async def test_requests_fill_both_subpools_before_any_waits(two: TwoSubPools) -> None:
    await two.report(0)
    await two.report(1)
    a = two.router("a").store
    first, second = await a.submit(demand("r1")), await a.submit(demand("r2"))
    assert isinstance(first, Placement)
    assert isinstance(second, Placement | Queued)
    await two.renew()
    if isinstance(second, Queued):  # it was drawn for the same sub-pool, and may move
        assert await a.take_out(demand("r2"), 1 - (a.where("r2") or 0))
        second = await a.submit(demand("r2", is_served=True))
    assert isinstance(second, Placement)
    assert {first.executor_id, second.executor_id} == {executor_of(0), executor_of(1)}


async def test_subpool_without_executor_is_passed_over(two: TwoSubPools) -> None:
    await two.report(1)
    for name in ("a", "b"):
        for number in range(4):
            outcome = await two.router(name).store.submit(demand(f"{name}{number}"))
            assert not isinstance(outcome, Refused)
            assert two.router(name).store.where(f"{name}{number}") == 1


async def test_no_executor_anywhere_is_refused_as_such(two: TwoSubPools) -> None:
    assert await two.router("a").store.submit(demand("r")) == Refused(Reason.NO_EXECUTOR)


async def test_repeat_at_another_router_finds_the_request_wherever_it_is(two: TwoSubPools) -> None:
    await two.report(0)
    await two.report(1)
    for number in range(8):
        one = demand(f"r{number}")
        await two.router("a").store.submit(one)
        await two.router("b").store.submit(one)
        assert two.router("a").store.where(one.request_id) == two.router("b").store.where(one.request_id)
        assert sorted(state is None for state in await two.places(one.request_id)) == [False, True]


async def test_two_routers_that_get_the_same_request_at_once_choose_one_subpool(two: TwoSubPools) -> None:
    await two.report(0)
    await two.report(1)
    for number in range(20):
        one = demand(f"r{number}")
        await asyncio.gather(*(two.router(name).store.submit(one) for name in ("a", "b")))
        assert sorted(state is None for state in await two.places(one.request_id)) == [False, True]


async def test_other_routers_cancel_explain_and_adopt_by_id(two: TwoSubPools) -> None:
    await two.report(0)
    await two.report(1)
    a, b = two.router("a").store, two.router("b").store
    # Ids of clients, which are claimed, and ids that a router made, for which all sub-pools are asked
    for index, request_id in enumerate(("mine", "0" * 32)):
        digest = DIGEST if index == 0 else ""
        outcome = await a.submit(demand(request_id, digest=digest))
        assert isinstance(outcome, Placement)
        explained = await b.explain(request_id)
        assert explained is not None
        assert explained.state is LedgerState.PLACED
        assert isinstance(await b.adopt(request_id), Adopted)
        assert (await a.cancel(request_id)).placement == outcome
        assert await b.settle([Ending(request_id, outcome.attempt, cancelled=True)]) == 1
        await two.renew()
    assert await b.explain("unknown") is None
    assert await b.cancel("unknown") == CancelOutcome(None)
    assert await b.adopt("unknown") is None


async def queue_in(two: TwoSubPools, name: str, subpool: int, one: Demand) -> None:
    """Has the router's request wait in the sub-pool, whose only seat is taken. The other one has no executor then."""
    await two.report(subpool)
    in_the_way = await two.pools[subpool].router("z").store.submit(Demand("in the way", 2, 1))
    assert isinstance(in_the_way, Placement)
    assert isinstance(await two.router(name).store.submit(one), Queued)
    assert two.router(name).store.where(one.request_id) == subpool


@pytest.mark.parametrize("request_id", ["mine", "0" * 32])
async def test_waiting_request_moves_and_is_placed_once(two: TwoSubPools, request_id: str) -> None:
    one = demand(request_id, digest=DIGEST if request_id == "mine" else "")
    await queue_in(two, "a", 0, one)
    await two.report(1)
    a = two.router("a").store

    assert await a.take_out(one, 1)
    assert await two.places(request_id) == [None, None]
    placed = await a.submit(replace(one, is_served=True))

    assert isinstance(placed, Placement)
    assert placed.executor_id == executor_of(1)
    assert await two.places(request_id) == [None, LedgerState.PLACED]
    assert await a.settle([Ending(request_id, placed.attempt, 1, 1)]) == 1


async def test_request_can_move_there_and_back(two: TwoSubPools) -> None:
    one = demand("r")
    await queue_in(two, "a", 0, one)
    a = two.router("a").store
    await two.report(1)
    await two.pools[1].router("z").store.submit(Demand("in the way, too", 2, 1))
    for target in (1, 0, 1):
        assert await a.take_out(one, target)
        assert isinstance(await a.submit(replace(one, is_served=True)), Queued)
        assert await two.places("r") == [LedgerState.WAITING if target == k else None for k in range(2)]


async def test_placed_request_does_not_move(two: TwoSubPools) -> None:
    await two.report(0)
    a, one = two.router("a").store, demand("r")
    placed = await a.submit(one)
    assert isinstance(placed, Placement)
    await two.report(1)
    assert not await a.take_out(one, 1)
    assert a.where("r") == 0
    assert await two.router("b").store.submit(one) == Adopted(placed, ended=False)  # the claim is where it was


async def test_request_that_another_router_has_does_not_move(two: TwoSubPools) -> None:
    one = demand("r")
    await queue_in(two, "a", 0, one)
    await two.report(1)
    assert isinstance(await two.router("b").store.submit(one), Queued)
    assert not await two.router("a").store.take_out(one, 1)
    assert await two.router("a").told() == [TakenOver("r")]
    assert await two.places("r") == [LedgerState.WAITING, None]


@pytest.mark.parametrize("dies_after", ["claim", "take out"])
async def test_router_that_dies_in_the_middle_of_a_move_leaves_a_request_that_can_be_repeated(
    two: TwoSubPools, dies_after: str
) -> None:
    one = demand("r")
    await queue_in(two, "a", 0, one)
    await two.report(1)
    a, b = two.router("a"), two.router("b")
    # Given router a, which dies between two steps of a move
    assert await a.store._claims.move("r", 0, 1)
    if dies_after == "take out":
        await a.sides[0].store.take_out("r")
    # When the client repeats its request at b
    placed = await b.store.submit(one)
    # Then it runs in the other sub-pool, and nothing of it is ever sent to an executor of the first one
    assert isinstance(placed, Placement)
    assert placed.executor_id == executor_of(1)
    assert b.store.where("r") == 1
    for _ in range(8):  # the lease of a lapses, and its waiting request with it
        for pool in two.pools:
            await pool.wait(1000)
            for side in (b.sides[0], b.sides[1]):
                await side.store.renew()
                await side.store.reap()
    assert [event for event in await b.told() if isinstance(event, Placement)] == []
    assert await b.store.settle([Ending("r", placed.attempt, 1, 1)]) == 1


async def test_move_meets_a_repeat_of_another_router_that_came_between_its_steps(two: TwoSubPools) -> None:
    one = demand("r")
    await queue_in(two, "a", 0, one)
    await two.report(1)
    a, b = two.router("a"), two.router("b")
    # Given that a has moved the claim, and b repeats the request where the claim says
    move = a.store._claims.move

    async def move_and_let_b_repeat(request_id: str, source: int, target: int) -> bool:
        moved = await move(request_id, source, target)
        assert isinstance(await b.store.submit(one), Placement)
        return moved

    a.store._claims.move = move_and_let_b_repeat  # type: ignore[method-assign]
    # When a goes on, it takes the request out of its queue and finds it at b
    assert await a.store.take_out(one, 1)
    assert await a.store.submit(replace(one, is_served=True)) == Duplicate(LedgerState.PLACED)
    assert await two.places("r") == [None, LedgerState.PLACED]


async def test_request_that_is_placed_while_another_router_takes_its_claim_is_cancelled(two: TwoSubPools) -> None:
    one = demand("r")
    await queue_in(two, "a", 0, one)
    await two.report(1)
    a, b = two.router("a"), two.router("b")
    move = a.store._claims.move

    async def move_and_let_both_be_placed(request_id: str, source: int, target: int) -> bool:
        a.store._claims.move = move  # type: ignore[method-assign]
        moved = await move(request_id, source, target)
        assert isinstance(await b.store.submit(one), Placement)
        await two.pools[0].router("z").store.settle([Ending("in the way", 1)])
        return moved

    a.store._claims.move = move_and_let_both_be_placed  # type: ignore[method-assign]
    assert not await a.store.take_out(one, 1)
    told = await a.told()
    assert CancelRequested("r", 1) in told
    assert Placement("r", 1, executor_of(0), 1) in told


async def test_lost_reply_of_a_move_is_asked_for_again(two: TwoSubPools) -> None:
    one = demand("r")
    await queue_in(two, "a", 0, one)
    await two.report(1)
    a = two.router("a").store
    take_out, answers = a.stores[0].take_out, [RequestError(Reason.STORE_UNAVAILABLE, "lost")]

    async def lose_first(request_id: str) -> CancelOutcome:
        outcome = await take_out(request_id)
        if answers:
            raise answers.pop()
        return outcome

    a.stores[0].take_out = lose_first  # type: ignore[method-assign]
    assert await a.take_out(one, 1)
    assert isinstance(await a.submit(replace(one, is_served=True)), Placement)


async def test_calls_about_a_moving_request_wait_for_the_move(two: TwoSubPools) -> None:
    one = demand("r")
    await queue_in(two, "a", 0, one)
    await two.report(1)
    a = two.router("a").store
    moving, cancelling = asyncio.create_task(a.take_out(one, 1)), asyncio.Event()

    async def cancel() -> CancelOutcome:
        cancelling.set()
        return await a.cancel("r", is_own=True)

    await asyncio.sleep(0)  # the move has begun
    assert await a.find_forgotten([Attempt("r", 0)]) == frozenset()
    cancelled = asyncio.create_task(cancel())
    assert await moving
    assert await cancelled == CancelOutcome(None)
    assert await two.places("r") == [None, None]


async def test_full_queue_is_refused_only_if_all_are_full(two: TwoSubPools) -> None:
    for pool in two.pools:
        pool.settings = replace(SETTINGS, max_queue_requests=1)
    two.sides.clear()
    for pool in two.pools:
        pool.routers.clear()
    await two.report(0)
    await two.report(1)
    a = two.router("a").store
    outcomes = [await a.submit(demand(f"r{number}")) for number in range(6)]
    kinds = [type(outcome) for outcome in outcomes]
    assert (kinds.count(Placement), kinds.count(Queued), kinds.count(Refused)) == (2, 2, 2)
    assert isinstance(outcomes[-1], Refused)
    assert outcomes[-1].reason is Reason.QUEUE_FULL


async def test_rate_of_a_tenant_is_the_sum_over_its_subpools(two: TwoSubPools) -> None:
    await two.report(0, sequences=8)
    await two.report(1, sequences=8)
    limits = TenantLimits(requests_per_s=2.0, request_burst=4)
    a = two.router("a").store
    outcomes = [await a.submit(demand(f"r{number}", tenant="t", limits=limits)) for number in range(6)]
    assert [isinstance(outcome, Placement) for outcome in outcomes] == [True] * 4 + [False] * 2
    assert (await a.check_rates("t", limits, 1)) is not None
    assert await a.check_rates("t", limits, 1, "r0") is None  # a repeat


async def test_ends_for_a_subpool_that_is_away_are_settled_later_and_others_now(two: TwoSubPools) -> None:
    await two.report(0)
    a = two.router("a").store
    first = await a.submit(demand("r0"))
    await two.report(1)
    second = await a.submit(demand("r1"))
    assert isinstance(first, Placement)
    assert isinstance(second, Placement)
    settle = a.stores[0].settle

    async def away(endings: Sequence[Attempt | Ending]) -> int:
        raise unavailable(SETTINGS, "away")

    a.stores[0].settle = away  # type: ignore[method-assign]
    assert await a.settle([Ending("r0", 1), Ending("r1", 1)]) == 1
    assert (await two.places("r0"), await two.places("r1")) == (
        [LedgerState.PLACED, None],
        [None, LedgerState.ENDED],
    )
    with pytest.raises(RequestError, match="earlier end"):
        await a.submit(demand("r0"))
    a.stores[0].settle = settle  # type: ignore[method-assign]
    a.choice.loads[0].is_away = False
    assert await a.settle([]) == 1
    assert isinstance(await a.submit(demand("r0")), Adopted)


async def test_subpools_are_on_the_servers_in_turn(redis_server: PrivateRedis, pool: str, tmp_path: Path) -> None:
    with PrivateRedis.start(tmp_path / "redis.log") as second:
        servers = (redis_server, second)
        ledgers = SubPoolLedgers([server.url for server in servers], 3, "a", SETTINGS, lambda call: None)
        for store in ledgers.open(pool, lambda event: None).stores:
            await store.renew()
        found: list[set[str]] = []
        for server in servers:
            redis = connect(server.admin_url, SETTINGS)
            found.append({str(key).split("}")[0].rpartition("#")[2] for key in await redis.keys(f"*{{{pool}#*")})
            await close(redis)
        await ledgers.aclose()
    assert found == [{"0", "2"}, {"1"}]


@pytest.mark.parametrize("seed", range(3))
async def test_any_order_of_calls_leaves_each_request_in_one_ledger_and_ends_it_once(
    two: TwoSubPools, seed: int
) -> None:
    chance, placed, ended = random.Random(seed), dict[str, Placement](), Counter[str]()
    owners: dict[str, str] = {}
    await two.report(0, sequences=2)
    await two.report(1, sequences=2)

    async def read_events() -> None:
        for name, side in two.sides.items():
            for event in await side.told():
                if isinstance(event, Placement) and owners.get(event.request_id) == name:
                    placed[event.request_id] = event

    for number in range(60):
        name = chance.choice("ab")
        store = two.router(name).store
        waiting = [one for one in owners if one not in placed]
        match chance.choice(("submit", "submit", "repeat", "move", "move", "settle", "cancel")):
            case "submit" | "repeat" as kind:
                request_id = chance.choice(waiting) if kind == "repeat" and waiting else f"r{number}"
                outcome = await store.submit(demand(request_id))
                owners[request_id] = name
                if isinstance(outcome, Placement):
                    placed[request_id] = outcome
                elif isinstance(outcome, Adopted):
                    placed[request_id] = outcome.placement
            case "move" if waiting:
                request_id = chance.choice(waiting)
                own = two.router(owners[request_id]).store
                if await own.take_out(demand(request_id), chance.randrange(2)):
                    outcome = await own.submit(demand(request_id, is_served=True))
                    assert not isinstance(outcome, Duplicate)
                    if isinstance(outcome, Placement):
                        placed[request_id] = outcome
            case "settle" if placed:
                request_id, placement = placed.popitem()
                ended[request_id] += await two.router(owners.pop(request_id)).store.settle(
                    [Ending(request_id, placement.attempt, 1, 1)]
                )
            case "cancel" if waiting:
                request_id = chance.choice(waiting)
                if (await store.cancel(request_id)).state is LedgerState.WAITING:
                    del owners[request_id]
                    ended[request_id] += 1
        await read_events()
        for request_id in owners:
            states = await two.places(request_id)
            assert states.count(None) == 1, (number, request_id, states)
    assert set(ended.values()) <= {1}
    assert len(ended) > 5


# Assignment and choice, without Redis.


def test_executors_spread_evenly_and_never_change_their_subpool() -> None:
    counts = [0] * 8
    for number in range(1000):
        counts[home_of(f"executor-{number}", 8)] += 1
    assert min(counts) > 90
    assert max(counts) < 160
    assert ranked("executor-1", 8) == ranked("executor-1", 8)


@pytest.mark.parametrize(("max_running", "num_used"), [(None, 8), (1, 1), (31, 1), (32, 2), (1000, 8)])
def test_tenant_with_a_bound_on_running_requests_uses_few_subpools(max_running: int | None, num_used: int) -> None:
    limits = TenantLimits(max_running=max_running)
    assert len(open_to("t", limits, 8)) == num_used
    share = share_of_limits(limits, num_used).max_running
    assert share is None if max_running is None else share is not None and share * num_used <= max_running


def choice_of(*loads: PoolLoad) -> SubPoolChoice:
    choice = SubPoolChoice(len(loads), random.Random(1))
    for number, load in enumerate(loads):
        choice.record_load(number, load)
    return choice


def test_prompt_goes_where_its_longest_known_prefix_is_while_there_is_room() -> None:
    idle, full = PoolLoad(0, 4, 4), PoolLoad(9, 4, 0)
    for number in range(4):
        choice = choice_of(*[idle] * 4)
        one = Demand("r", 2, 1, prefix_hashes=("a", "b", "c"))
        choice.submitted(one, number, is_queued=False)
        assert choice.order_for(replace(one, prefix_hashes=("a", "b", "x")), range(4))[0] == number
        choice.record_load(number, full)
        assert choice.order_for(one, range(4))[0] != number
        for other in range(4):
            choice.record_load(other, full)
        assert choice.order_for(one, range(4))[0] == number  # no other one would be faster


def test_prompts_with_the_same_first_block_have_two_candidates() -> None:
    chosen = {
        choice_of(*[PoolLoad(0, 4, 4)] * 8).order_for(Demand(f"r{n}", 2, 1, prefix_hashes=("a", f"{n}")), range(8))[0]
        for n in range(50)
    }
    assert chosen <= set(ranked("a", 8)[:2])


def test_queued_request_counts_until_the_subpool_tells_its_load() -> None:
    choice = choice_of(PoolLoad(0, 4, 1), PoolLoad(0, 4, 1))
    one = Demand("r", 2, 1)
    choice.submitted(one, 0, is_queued=True)
    assert choice.order_for(one, range(2))[0] == 1
    choice.record_load(0, PoolLoad(0, 4, 4))
    assert choice.order_for(one, [0]) == [0]
