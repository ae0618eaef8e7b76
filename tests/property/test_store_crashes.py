"""Crashes between any two calls: the ledger stays consistent and every accepted request ends once."""

from __future__ import annotations

import asyncio
import itertools
import math
import random
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from redis.asyncio import Redis

from inflight.bench.simulation.store_link import REMEMBER, RESTORE
from inflight.router.ledger.connection import connect_node
from inflight.router.ledger.keys import PoolKeys
from inflight.router.ledger.settings import LedgerSettings
from inflight.router.ledger.types import Demand, TenantLimits
from tests.property.crashing_pool import (
    BUDGET_BLOCKS,
    Crashed,
    LossyRedis,
    SimpleExecutor,
    SimpleRouter,
    new_router,
)
from tests.property.store_invariants import check, check_step
from tests.property.store_records import read_records
from tests.support.examples import examples
from tests.support.ledger.store_pool import KEPT, PATIENT, START_MS

NUM_OPERATIONS = 120
REBUILD_MS = 10_000  # two leases
OPERATIONS = ("submit", "repeat", "finish", "token", "report", "wait", "react", "reap")
MAX_ROUNDS = 90  # seconds until everything has ended, some 30 of them for leases of what was lost
TENANTS = {"t": TenantLimits(weight=3), "u": TenantLimits(max_running=2), "v": TenantLimits()}

pool_numbers = itertools.count()


@dataclass(slots=True)
class Storm:
    """One schedule, from one seed."""

    redis: Redis
    rng: random.Random
    keys: PoolKeys
    settings: LedgerSettings
    now_ms: int = START_MS
    executors: dict[str, SimpleExecutor] = field(default_factory=lambda: {x: SimpleExecutor(x) for x in "xyz"})
    routers: list[SimpleRouter] = field(default_factory=list)
    num_routers: int = 0
    num_submitted: int = 0
    num_flushes: int = 0
    has_remembered: bool = False
    rolled_back_ms: int | None = None
    keyed: dict[str, Demand] = field(default_factory=dict)
    """What clients may ask for again, of any router."""
    current: SimpleRouter = field(init=False)

    @property
    def living(self) -> list[SimpleRouter]:
        """Routers that have not vanished."""
        return [one for one in self.routers if one.is_alive]

    @property
    def most_reserved(self) -> float:
        """Blocks of an executor that may be reserved. After a rollback the ledger may take requests that have ended for
        running ones until the next audits: it promises too little then, never too much."""
        is_rebuilding = self.rolled_back_ms is not None and self.now_ms < self.rolled_back_ms + REBUILD_MS
        return math.inf if is_rebuilding else BUDGET_BLOCKS

    def start_router(self) -> None:
        """Another router comes."""
        self.num_routers += 1
        lossy = LossyRedis(self.redis, self.rng, loses=0.1, crashes=0.01)
        self.routers.append(new_router(f"router {self.num_routers}", lossy, self.keys, self.settings, self.executors))

    async def wait(self, duration_ms: int) -> None:
        """Lets time pass."""
        self.now_ms += duration_ms
        await self.redis.set(self.keys.key("executors:clock"), self.now_ms)

    async def step(self) -> None:
        """Something happens."""
        self.current = router = self.rng.choice(self.living)
        rng = self.rng
        executor = rng.choice(list(self.executors.values()))
        match rng.choices(
            (*OPERATIONS, "restart", "flush", "remember", "roll back"), (10, 4, 5, 3, 8, 6, 6, 3, 0.4, 0.3, 1, 0.5)
        )[0]:
            case "submit":
                await router.submit(self._new_demand())
            case "repeat" if self.keyed:
                await router.react()  # of this client's former stream here, if there was one, nothing comes any more
                await router.submit(self.keyed[rng.choice(sorted(self.keyed))])
            case "token":
                await router.bring_token(rng)
            case "finish":
                await router.finish(rng)
            case "report":
                await router.relay(executor)
            case "wait":
                await self.wait(rng.choice((50, 300, 300, 1000, 2100)))
            case "react":
                await router.react()
            case "reap":
                await router.attend()
            case "restart":
                executor.generation, executor.seq = executor.generation + 1, 0
                executor.held.clear()
                executor.streams.clear()
                await router.notice_links()
            case "remember":
                await self.redis.eval(REMEMBER, 0, self.keys.key("*"), f"{KEPT}{self.keys.pool}:")
                self.has_remembered = True
            case "roll back" if self.has_remembered:
                self.has_remembered = False
                self.rolled_back_ms = self.now_ms
                self.num_flushes += 1
                await self.redis.eval(RESTORE, 0, self.keys.key("*"), f"{KEPT}{self.keys.pool}:")
                await self.wait(0)
            case "flush":
                self.num_flushes += 1
                await self.redis.delete(*self.keys.for_script(tuple(one.router_id for one in self.routers)))
                for one in self.living:
                    await one.mailbox.rewind_if_reset()

    def _new_demand(self) -> Demand:
        self.num_submitted += 1
        tenant = self.rng.choice(sorted(TENANTS))
        demand = Demand(
            f"r{self.num_submitted}",
            self.rng.randint(1, 3),
            blocks=self.rng.choice((1, 2, 3, 8)),
            deadline_ms=self.rng.choice((None, None, None, 2000)),
            tenant=tenant,
            limits=TENANTS[tenant],
            prompt_tokens=10,
            max_tokens=10,
            digest=self.rng.choice(("", "as asked")),
        )
        if demand.digest:
            self.keyed[demand.request_id] = demand
        return demand

    async def guarded_step(self) -> None:
        """A step in which a router may vanish; another takes its place."""
        try:
            await self.step()
        except Crashed:
            self.current.is_alive = False
            self.start_router()
        await asyncio.gather(*(one.store.aclose() for one in self.routers))

    async def drain(self) -> None:
        """No more crashes: time passes, executors report and finish, until nothing is left."""
        for router in self.routers:
            router.redis.loses = router.redis.crashes = 0
        for _ in range(MAX_ROUNDS):
            await self.wait(1000)
            self._end_orphans()
            for router in self.living:
                await router.attend()
                for executor in self.executors.values():
                    await router.relay(executor)
                await router.react()
                for _ in range(3):
                    await router.finish(self.rng)
            records = await read_records(self.redis, self.keys)
            check(records, self.most_reserved)
            if not records.of("requests") and not any(one.serves for one in self.living):
                return
        raise AssertionError(f"left: {records.of('requests')}, {[one.serves for one in self.living]}")

    def _end_orphans(self) -> None:
        """What no living router has a stream of comes to its end on its executor."""
        streams = {(one.router_id, name) for one in self.living for name in one.serves}
        for executor in self.executors.values():
            for name in [name for name in executor.held if (executor.streams[name], name) not in streams]:
                del executor.held[name], executor.streams[name]


@pytest.fixture(scope="session")
def redis_url(redis_admin_url: str) -> str:
    """A storm empties the pool, which no router may."""
    return redis_admin_url


@given(seed=st.integers(0, 2**32), max_bypass=st.integers(0, 3), preempts=st.booleans())
@settings(max_examples=examples(15))
def test_ledger_survives_any_schedule_of_crashes(redis_url: str, seed: int, max_bypass: int, preempts: bool) -> None:
    """Invariants tested: one state each, sums and indexes agree, no more reserved than there is, one end each, one
    suspect at a time on an executor, no attempt twice. Redis is emptied and rolled back, too.
    """
    store_settings = LedgerSettings(
        max_queue_requests=30, max_bypass=max_bypass, age_ms=3000, preempt_for_priority=preempts
    )
    asyncio.run(_run_storm(redis_url, random.Random(seed), store_settings))


async def _run_storm(redis_url: str, rng: random.Random, store_settings: LedgerSettings) -> None:
    redis = connect_node(redis_url, PATIENT)
    try:
        storm = Storm(redis, rng, PoolKeys(f"storm-{next(pool_numbers)}"), store_settings)
        await storm.wait(0)
        for _ in range(3):
            storm.start_router()
        before, num_flushes = await read_records(redis, storm.keys), 0
        for _ in range(NUM_OPERATIONS):
            await storm.guarded_step()
            after = await read_records(redis, storm.keys)
            check(after, storm.most_reserved)
            if num_flushes == storm.num_flushes:
                check_step(before, after)
            before, num_flushes = after, storm.num_flushes
        await storm.drain()
        assert all(set(one.ended.values()) <= {1} for one in storm.routers)
        assert all(one.submitted == one.ended.keys() for one in storm.living)
    finally:
        await redis.aclose()
