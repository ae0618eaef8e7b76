"""A small pool whose routers and executors may vanish between any two calls, and whose replies get lost.

Routers and executors are as simple as the contract allows: a router resubmits, hands back and settles what it serves;
an executor is the last gate before its blocks.
"""

from __future__ import annotations

import contextlib
import dataclasses
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, cast

from redis.asyncio import Redis
from redis.exceptions import ConnectionError as RedisConnectionError

from inflight.common.errors import Reason, RequestError
from inflight.router.ledger.keys import PoolKeys
from inflight.router.ledger.mailbox import Mailbox
from inflight.router.ledger.redis_ledger import RedisLedger
from inflight.router.ledger.settings import LedgerSettings
from inflight.router.ledger.types import (
    Adopted,
    Attempt,
    Demand,
    Dropped,
    Duplicate,
    Ending,
    ExecutorReport,
    HandBackRefusal,
    HeldSequence,
    LeaseLapsed,
    LedgerEvent,
    LedgerState,
    Lost,
    Placement,
    PreemptRequested,
    Refused,
    TakenOver,
)
from tests.support.ledger.store_pool import steered_scripts

BUDGET_BLOCKS, BUDGET_SEQUENCES = 10, 4
MAX_ATTEMPTS = 1000  # only what clients and deadlines end shall end


class Crashed(Exception):
    """The router that was calling is no more."""


@dataclass(slots=True)
class LossyRedis:
    """Runs calls, or does not, and loses replies, or the caller."""

    redis: Redis
    rng: random.Random
    loses: float = 0.0
    crashes: float = 0.0

    async def execute_command(self, *args: Any, **options: Any) -> Any:
        """Sends one command; what happens before and behind it is chance."""
        fate = self.rng.random()
        if fate < self.loses / 4:
            raise RedisConnectionError("not sent")
        if fate < self.loses / 4 + self.crashes / 4:
            raise Crashed
        reply = await cast(Any, self.redis).execute_command(*args)
        if fate > 1 - self.loses:
            raise RedisConnectionError("the reply was lost")
        if fate > 1 - self.loses - self.crashes:
            raise Crashed
        return reply


@dataclass(slots=True)
class SimpleExecutor:
    """Holds what it accepted; a new generation holds nothing."""

    executor_id: str
    generation: int = 1
    seq: int = 0
    is_alive: bool = True
    held: dict[str, HeldSequence] = field(default_factory=dict)
    streams: dict[str, str] = field(default_factory=dict)
    """The router that gets a request's tokens."""

    def attaches(self, placement: Placement, router_id: str) -> bool:
        """Sends the tokens there from now on, if it holds the placement."""
        held = self.held.get(placement.request_id)
        if placement.generation != self.generation or not held or held.attempt != placement.attempt:
            return False
        self.streams[placement.request_id] = router_id
        return True

    def accepts(self, placement: Placement, blocks: int, router_id: str) -> bool:
        """Takes the placement in, if it is for this start and there is room."""
        is_here = self.is_alive and placement.generation == self.generation
        free = BUDGET_BLOCKS - sum(one.blocks for one in self.held.values())
        if not is_here or blocks > free or placement.request_id in self.held:
            return False
        self.held[placement.request_id] = HeldSequence(placement.request_id, placement.attempt, blocks)
        self.streams[placement.request_id] = router_id
        return True

    def drop(self, one: Attempt, router_id: str | None = None) -> None:
        """Gives up the sequence, if it is this attempt, and this router's where one is named."""
        held = self.held.get(one.request_id)
        if held and held.attempt == one.attempt and router_id in (None, self.streams[one.request_id]):
            del self.held[one.request_id], self.streams[one.request_id]

    def next_report(self) -> ExecutorReport:
        """How it stands."""
        self.seq += 1
        held = tuple(self.held.values())
        return ExecutorReport(
            self.executor_id,
            self.generation,
            self.seq,
            BUDGET_BLOCKS,
            BUDGET_BLOCKS,
            BUDGET_SEQUENCES,
            accepting=True,
            held=held,
        )


@dataclass(slots=True)
class Served:
    """A request in its router's hands: its latest attempt, and where that runs."""

    demand: Demand
    attempt: int = 0
    placement: Placement | None = None
    is_accepted: bool = False


@dataclass(slots=True)
class SimpleRouter:
    """A router. `ended` counts the ends that its clients saw."""

    router_id: str
    store: RedisLedger
    redis: LossyRedis
    mailbox: Mailbox
    executors: dict[str, SimpleExecutor]
    events: list[LedgerEvent]
    is_alive: bool = True
    serves: dict[str, Served] = field(default_factory=dict)
    submitted: set[str] = field(default_factory=set)
    ended: Counter[str] = field(default_factory=Counter)

    async def call(self, operation: Callable[[], Awaitable[Any]]) -> Any:
        """Repeats an operation until its reply comes."""
        while True:
            try:
                return await operation()
            except RequestError:
                continue

    async def attend(self) -> None:
        """What a router does every second; where it fails, the next will do."""
        for operation in (self.store.renew, self.store.reap, self._verify):
            with contextlib.suppress(RequestError):
                await operation()

    async def _verify(self) -> None:
        """Submits again what the ledger does not have in line."""
        waiting = {name: one for name, one in self.serves.items() if not one.placement}
        forgotten = await self.store.find_forgotten([Attempt(name, one.attempt) for name, one in waiting.items()])
        for name in sorted(forgotten):
            await self._submit(waiting[name])

    async def submit(self, demand: Demand) -> None:
        """Takes a client's request: a new one, or one that it asked another router for."""
        self.submitted.add(demand.request_id)
        self.ended.pop(demand.request_id, None)
        served = self.serves[demand.request_id] = Served(demand)
        await self._submit(served, is_served=False)

    async def _submit(self, served: Served, *, is_served: bool = True) -> None:
        demand = dataclasses.replace(served.demand, last_attempt=served.attempt, is_served=is_served)
        result = await self.call(lambda: self.store.submit(demand))
        was_accepted, served.is_accepted = served.is_accepted, not isinstance(result, Refused)
        match result:
            case Placement():
                await self._place(result)
            case Adopted(placement, ended=False):
                await self._attach(served, placement)
            case Refused(Reason.NO_EXECUTOR) if was_accepted:
                served.is_accepted = True
                self.events.append(LeaseLapsed())  # again when one reports
            case Refused() | Dropped() | Duplicate(LedgerState.ENDED) | Adopted():
                self._end(demand.request_id)
            case Duplicate(LedgerState.LOST):
                await self.hand_back(served, Attempt(demand.request_id, served.attempt))
                self.events.append(LeaseLapsed())  # it may be another's: again when that shows
            case Duplicate():
                self._give_away(demand.request_id)

    async def _attach(self, served: Served, placement: Placement) -> None:
        """Continues what runs; submits what the executor has not received yet."""
        served.attempt, served.placement = placement.attempt, placement
        executor = self.executors[placement.executor_id]
        if not executor.attaches(placement, self.router_id) and not executor.accepts(
            placement, served.demand.blocks, self.router_id
        ):
            await self.hand_back(served, Attempt(placement.request_id, placement.attempt), rejected=True)

    def _give_away(self, request_id: str) -> None:
        """Another router has it, and its client."""
        if self.serves.pop(request_id, None):
            self.submitted.discard(request_id)

    async def react(self) -> None:
        """Deals with what it was told, by reply or by mailbox."""
        events = [*self.events, *await self.mailbox.read()]
        self.events.clear()
        for event in events:
            match event:
                case Placement():
                    await self._place(event)
                case Lost(request_id, attempt) | PreemptRequested(request_id, attempt):
                    await self._give_up(Attempt(request_id, attempt), preempted=isinstance(event, PreemptRequested))
                case Dropped(request_id):
                    self._end(request_id)
                case TakenOver(request_id):
                    self._give_away(request_id)
                case LeaseLapsed():
                    for served in [one for one in self.serves.values() if not one.placement]:
                        await self._submit(served)

    async def _give_up(self, one: Attempt, *, preempted: bool) -> None:
        """Hands back what runs, or would if it had been told."""
        served = self.serves.get(one.request_id)
        if served and (served.attempt < one.attempt or (served.attempt == one.attempt and served.placement)):
            served.attempt = one.attempt
            await self.hand_back(served, one, preempted=preempted)

    async def _place(self, placement: Placement) -> None:
        served = self.serves.get(placement.request_id)
        if served is None:
            await self.call(lambda: self.store.settle([Attempt(placement.request_id, placement.attempt)]))
        elif served.attempt < placement.attempt:
            served.attempt, served.placement = placement.attempt, placement
            executor = self.executors[placement.executor_id]
            if not executor.accepts(placement, served.demand.blocks, self.router_id):
                await self.hand_back(served, Attempt(placement.request_id, placement.attempt), rejected=True)
        elif not served.placement:  # told twice, or of an attempt that is spent: the ledger had forgotten the request
            await self.hand_back(served, Attempt(placement.request_id, placement.attempt), rejected=True)

    async def hand_back(self, served: Served, one: Attempt, *, rejected: bool = False, preempted: bool = False) -> None:
        """Returns a placement that came to nothing."""
        if served.placement:
            self.executors[served.placement.executor_id].drop(one, self.router_id)
        served.placement = None
        result = await self.call(
            lambda: self.store.hand_back(
                one.request_id, one.attempt, MAX_ATTEMPTS, rejected=rejected, preempted=preempted
            )
        )
        match result:
            case Placement():
                await self._place(result)
            case Dropped():
                self._end(one.request_id)
            case HandBackRefusal.UNKNOWN:
                await self._submit(served)
            case HandBackRefusal.STALE:
                self.events.append(LeaseLapsed())  # a submit says how it stands

    async def notice_links(self) -> None:
        """Hands back what ran on executors that are gone."""
        for served in list(self.serves.values()):
            placement = served.placement
            executor = placement and self.executors[placement.executor_id]
            if placement and executor and not (executor.is_alive and placement.generation == executor.generation):
                await self.hand_back(served, Attempt(placement.request_id, placement.attempt))

    async def finish(self, rng: random.Random) -> None:
        """One of its running requests comes to its end."""
        running = [one for one in self.serves.values() if one.placement]
        if running:
            served = rng.choice(running)
            assert served.placement
            one = Attempt(served.demand.request_id, served.attempt)
            executor = self.executors[served.placement.executor_id]
            if executor.streams.get(one.request_id, self.router_id) != self.router_id:
                self._give_away(one.request_id)  # as the executor says; the ledger's word for it can be lost
                return
            executor.drop(one, self.router_id)
            self._end(one.request_id)
            ending = Ending(one.request_id, one.attempt, 1, 1, by_itself=True, cancelled=rng.random() < 0.2)
            await self.call(lambda: self.store.settle([ending]))

    async def bring_token(self, rng: random.Random) -> None:
        """One of its running requests has output."""
        running = [one for one in self.serves.values() if one.placement]
        if running:
            served = rng.choice(running)
            await self.call(lambda: self.store.clear_suspect(served.demand.request_id, served.attempt))

    async def relay(self, executor: SimpleExecutor) -> None:
        """Relays a report, and has cancelled what is superseded."""
        report = executor.next_report()
        outcome = await self.call(lambda: self.store.report(report))
        for one in outcome.superseded:
            executor.drop(one)

    def _end(self, request_id: str) -> None:
        if self.serves.pop(request_id, None):
            self.ended[request_id] += 1


def new_router(
    router_id: str,
    redis: LossyRedis,
    keys: PoolKeys,
    settings: LedgerSettings,
    executors: dict[str, SimpleExecutor],
) -> SimpleRouter:
    """A router that has just started."""
    events: list[LedgerEvent] = []
    scripts = steered_scripts()
    store = RedisLedger(cast(Redis, redis), keys.pool, router_id, settings, events.append, scripts)
    mailbox = Mailbox(redis.redis, keys.mailbox(router_id), settings)
    return SimpleRouter(router_id, store, redis, mailbox, executors, events)
