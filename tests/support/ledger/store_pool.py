"""A pool on a real Redis with a clock that the test sets, and routers that share it."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from redis.asyncio import Redis

from inflight.bench.simulation.store_link import REMEMBER, RESTORE
from inflight.router.ledger.functions import Library, load_scripts
from inflight.router.ledger.keys import PoolKeys
from inflight.router.ledger.mailbox import Mailbox
from inflight.router.ledger.redis_ledger import RedisLedger
from inflight.router.ledger.settings import LedgerSettings
from inflight.router.ledger.types import Demand, ExecutorReport, HeldSequence, LedgerEvent, Placement, Queued

STEERED_CLOCK = "local function now_ms() return tonumber(redis.call('GET', KEYS[1] .. ':clock')) end\n"
"""Takes the place of `clock.lua`: the time is what `StorePool.set_clock` wrote."""

# No call that a test expects to be answered is too late, however slow the machine is.
PATIENT = LedgerSettings(call_timeout_ms=60_000)
SETTINGS = replace(PATIENT, max_queue_requests=100, mailbox_block_ms=100)
START_MS = 1_000_000
KEPT = "kept:"
"""Before the names of keys that are kept, to be brought back."""


def steered_scripts() -> Library:
    """The scripts with that clock."""
    return load_scripts(STEERED_CLOCK)


@dataclass(slots=True)
class RouterSide:
    """A router as far as the store is concerned."""

    store: RedisLedger
    mailbox: Mailbox
    replied: list[LedgerEvent]

    async def told(self) -> list[LedgerEvent]:
        """What it was told since the last look, replies first."""
        events = [*self.replied, *await self.mailbox.read()]
        self.replied.clear()
        return events

    async def place(self, request_id: str, blocks: int = 1, priority_class: int = 2) -> Placement:
        """Submits a request that is placed at once."""
        return await self.place_demand(Demand(request_id, priority_class, blocks))

    async def place_demand(self, demand: Demand) -> Placement:
        """Submits what is placed at once."""
        result = await self.store.submit(demand)
        assert isinstance(result, Placement)
        return result

    async def queue(self, demand: Demand) -> Queued:
        """Submits what has to wait."""
        result = await self.store.submit(demand)
        assert isinstance(result, Queued)
        return result

    async def placed(self) -> list[str]:
        """The ids of those placed since the last look."""
        return [event.request_id for event in await self.told() if isinstance(event, Placement)]


@dataclass(slots=True)
class StorePool:
    """The pool. Routers come into being when first named. `redis` is the test's own, which may do everything; theirs
    may do what a router needs."""

    redis: Redis
    routers_redis: Redis
    keys: PoolKeys
    settings: LedgerSettings = SETTINGS
    now_ms: int = START_MS
    routers: dict[str, RouterSide] = field(default_factory=dict)
    num_reports: int = 0

    def router(self, router_id: str, settings: LedgerSettings | None = None) -> RouterSide:
        """The router of this name; settings other than the pool's only when it is first named."""
        if router_id not in self.routers:
            told: list[LedgerEvent] = []
            scripts = steered_scripts()
            store = RedisLedger(
                self.routers_redis, self.keys.pool, router_id, settings or self.settings, told.append, scripts
            )
            mailbox = Mailbox(self.routers_redis, self.keys.mailbox(router_id), self.settings)
            self.routers[router_id] = RouterSide(store, mailbox, told)
        return self.routers[router_id]

    async def set_clock(self, now_ms: int) -> None:
        """Sets the time that the scripts see."""
        self.now_ms = now_ms
        await self.redis.set(self.keys.key("executors:clock"), now_ms)

    async def wait(self, duration_ms: int) -> None:
        """Lets time pass."""
        await self.set_clock(self.now_ms + duration_ms)

    def next_report(
        self,
        executor_id: str = "x",
        *,
        blocks: int = 10,
        sequences: int = 8,
        generation: int = 1,
        accepting: bool = True,
        held: tuple[HeldSequence, ...] = (),
        reserve_quantile: float = 1.0,
        step_ms: float = 0.0,
        prefill_tokens_per_s: float = 0.0,
        output_tokens_per_s: float = 0.0,
        num_standby: int = 0,
    ) -> ExecutorReport:
        """A report newer than every one before."""
        self.num_reports += 1
        return ExecutorReport(
            executor_id,
            generation,
            self.num_reports,
            blocks,
            blocks,
            sequences,
            accepting,
            held,
            reserve_quantile,
            step_ms,
            prefill_tokens_per_s,
            output_tokens_per_s,
            num_standby,
        )

    async def remember(self) -> None:
        """Keeps what Redis holds of the pool now, for `roll_back`."""
        await self.redis.eval(REMEMBER, 0, self.keys.key("*"), KEPT)

    async def roll_back(self) -> None:
        """Redis forgets what was written since, and no call fails: a replica that was behind has taken over."""
        await self.redis.eval(RESTORE, 0, self.keys.key("*"), KEPT)
        await self.set_clock(self.now_ms)

    async def reserved_blocks(self) -> dict[str, int]:
        """What the ledger has promised, by executor."""
        snapshot = await self.router("a").store.snapshot()
        return {one.executor_id: one.reserved_blocks for one in snapshot.executors}

    async def num_waiting(self) -> int:
        """Requests in line."""
        return sum((await self.router("a").store.snapshot()).num_waiting)
