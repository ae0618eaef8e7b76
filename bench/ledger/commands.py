"""The script calls of the load: made by the real `RedisLedger`, repeated with other ids.

The store is asked once for every kind of call, and its commands are kept as templates. So the load sends what a router
sends, whatever arguments the scripts take, without a router's cost for each call.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from enum import Enum, auto
from functools import partial
from typing import Any, cast

from inflight.bench.ledger.figures import BATCHED, SETTLED
from inflight.bench.ledger.scale import PoolScale, executor_id, request_id, router_id
from inflight.bench.ledger.wire import Template
from inflight.common.errors import RequestError
from inflight.router.ledger.connection import connect_node
from inflight.router.ledger.keys import NUM_CLASSES, PoolKeys
from inflight.router.ledger.redis_ledger import RedisLedger
from inflight.router.ledger.settings import LedgerSettings
from inflight.router.ledger.types import Demand, Ending, ExecutorReport, HeldSequence, Snapshot, TenantLimits

BLOCK_SIZE = 16
# Ids of placed requests that a report names beyond the seats: those whose end is on its way.
MAX_EXTRA_HELD = 64
# Far beyond any estimate, so that nothing is refused and nothing expires while it is measured.
MIN_DEADLINE_MS, MAX_DEADLINE_MS = 3 * 3_600_000, 24 * 3_600_000
# Of the mixed traffic: one kind of request in so many has a deadline that it may miss, needs up to half an executor, or
# shares no prefix with others; the others share the beginning of so many prompts.
NEAR_DEADLINE_EVERY, LARGE_EVERY, UNSHARED_EVERY = 20, 50, 3
NEAR_DEADLINES_MS = (500, 5_000)
NUM_SHARED_PROMPTS = 40
NUM_PREFIXES, NUM_SHARED_PREFIXES = 4, 2
QUANTILE = 0.9
# A queue that was filled in seconds would age in seconds, and the measured calls would bear the cost of all of it.
AGE_NEVER_MS = 24 * 3_600_000
# Ends of this many lengths take turns, and calls with several submits of so many mixes of tenants and classes.
NUM_USAGES = 4
NUM_MIXES = 8

ID_MARKERS = tuple(request_id(-1 - index) for index in range(128))
EXECUTOR_MARKER = executor_id(99_999)
PREFIX_MARKERS = tuple(b"%016x" % (0xFEED_0000_0000_0000 + index) for index in range(NUM_PREFIXES))
SEQ_MARKER = b"1999999999"
FIRST_SEQ = 1_000_000_000
GENERATION = 1


class CallKind(Enum):
    """The purpose of a call."""

    SUBMIT = auto()
    SETTLE = auto()
    CANCEL = auto()
    BOARD = auto()
    """Continues a call that stopped at its bound."""
    UPKEEP = auto()
    """Reports, renewals and reaping, which go on whatever else happens."""


@dataclass(frozen=True, slots=True)
class Call:
    """One script call: `ids` are the requests that it is about, `due_s` is when it was to be sent, `executor` the one
    whose requests it ends."""

    kind: CallKind
    encoded: bytes
    ids: tuple[bytes, ...] = ()
    due_s: float = 0.0
    executor: bytes = b""
    upkeep: int | None = None
    """Which of the periodic calls it is."""
    again: Callable[[], bytes] | None = None
    """Makes the command for the case that it needs the mailboxes of other routers."""


class NotSentError(ConnectionError):
    """What a recorded call meets in place of a reply; the store takes it for a Redis that is away."""


class Recorder:
    """A Redis client for a store: passes calls on, or keeps the next one to itself."""

    def __init__(self, redis: Any) -> None:
        self._redis = redis
        self._is_recording = False
        self._recorded: list[tuple[Any, ...]] = []

    async def execute_command(self, *command: Any, **options: Any) -> Any:
        """Sends a command, or remembers it."""
        if not self._is_recording:
            return await self._redis.execute_command(*command)
        self._recorded.append(command)
        raise NotSentError("recorded")

    async def record(self, call: Callable[[], Awaitable[object]]) -> tuple[Any, ...]:
        """Returns the command that the call would have sent."""
        self._recorded.clear()
        self._is_recording = True
        with suppress(RequestError):
            await call()
        self._is_recording = False
        return self._recorded[0]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._redis, name)


@dataclass(frozen=True, slots=True)
class Reports:
    """A router's call of `report`: how it begins, and one report by the number of ids that it names."""

    beginning: Template
    one: Sequence[Template]

    def fill(self, filled: Sequence[tuple[int, Mapping[bytes, bytes]]]) -> bytes:
        """Returns the call with reports, each by the number of its ids and its values."""
        num_words = self.beginning.num_words + sum(self.one[num_held].num_words for num_held, _ in filled)
        reports = (self.one[num_held].fill(values) for num_held, values in filled)
        return b"*%d\r\n%b%b" % (num_words, self.beginning.fill({}), b"".join(reports))


@dataclass(frozen=True, slots=True)
class Commands:
    """Templates by router. `settles` and `reports` are by the number of ids that they name, too."""

    submits: Sequence[Sequence[tuple[Template, Template]]]
    """Each also with the mailboxes of all routers, for a repeated call."""
    batches: Mapping[int, Sequence[Template]]
    """By the number of submits in a call, with the mailboxes of all routers."""
    settles: Mapping[int, Sequence[Sequence[Template]]]
    reports: Sequence[Reports]
    cancels: Sequence[Template]
    boards: Sequence[bytes]
    """Each continues what a call before it has left."""
    renews: Sequence[bytes]
    reaps: Sequence[bytes]
    mailboxes: Sequence[str]


async def record_commands(url: str, pool: str, scale: PoolScale, seed: int) -> Commands:
    """Registers the routers and records what they send."""
    # A submit says until when it is waited for, and these are sent again and again.
    settings = LedgerSettings(max_queue_requests=10**9, age_ms=AGE_NEVER_MS, call_timeout_ms=AGE_NEVER_MS)
    redis = connect_node(url, settings)
    try:
        recorder = Recorder(redis)
        names = [router_id(number) for number in range(scale.routers)]
        stores = [RedisLedger(cast(Any, recorder), pool, name, settings, lambda event: None) for name in names]
        for _ in range(2):  # in the second round all routers know each other
            for store in stores:
                await store.renew()
        random_numbers = random.Random(seed)
        mailboxes = [PoolKeys(pool).mailbox(name) for name in names]
        demands = [_demand(number, scale, random_numbers) for number in range(NUM_CLASSES * scale.tenants)]
        return Commands(
            [[await _submit(recorder, store, demand, mailboxes) for demand in demands] for store in stores],
            {
                count: [
                    await _batch(recorder, one, random_numbers.sample(demands, count), mailboxes)
                    for one in stores
                    for _ in range(NUM_MIXES)
                ]
                for count in BATCHED
            },
            {count: [await _settles(recorder, store, count) for store in stores] for count in SETTLED},
            [await _reports(recorder, store, scale) for store in stores],
            [await _about_one(recorder, store.cancel) for store in stores],
            [Template(await recorder.record(partial(store._repeat, "board")), ID_MARKERS).fill({}) for store in stores],
            [Template(await recorder.record(store.renew), ID_MARKERS).fill({}) for store in stores],
            [Template(await recorder.record(store.reap), ID_MARKERS).fill({}) for store in stores],
            mailboxes,
        )
    finally:
        await redis.aclose()


async def take_snapshot(url: str, pool: str) -> Snapshot:
    """Returns the store's snapshot of the pool."""
    settings = LedgerSettings()
    redis = connect_node(url, settings)
    try:
        return await RedisLedger(redis, pool, "observer", settings, lambda event: None).snapshot()
    finally:
        await redis.aclose()


def _demand(number: int, scale: PoolScale, random_numbers: random.Random) -> Demand:
    """One tenant's usual request of one class; they differ in lengths and deadline, a third have none."""
    tenant = number % scale.tenants
    prompt_tokens, max_tokens = random_numbers.randint(50, 2000), random_numbers.randint(50, 800)
    deadlines_ms = (MIN_DEADLINE_MS, MAX_DEADLINE_MS)
    if scale.is_mixed and number % LARGE_EVERY == 1:
        max_tokens = scale.blocks * BLOCK_SIZE * random_numbers.randint(10, 50) // 100 - prompt_tokens
    if scale.is_mixed and number % NEAR_DEADLINE_EVERY == 2:
        deadlines_ms = NEAR_DEADLINES_MS
    return Demand(
        request_id=ID_MARKERS[0].decode(),
        priority_class=1 + number // scale.tenants,
        blocks=-(-(prompt_tokens + max_tokens) // BLOCK_SIZE),
        deadline_ms=random_numbers.randint(*deadlines_ms) if number % 3 else None,
        tenant=f"tenant-{tenant:03d}",
        limits=TenantLimits(weight=float(1 + tenant % 4)),
        prompt_tokens=prompt_tokens,
        max_tokens=max_tokens,
        block_size=BLOCK_SIZE,
        num_bytes=4 * prompt_tokens,
        prefix_hashes=_prefixes(number, scale, random_numbers),
    )


def _prefixes(number: int, scale: PoolScale, random_numbers: random.Random) -> tuple[str, ...]:
    """The prefixes of a prompt. Markers stand for those that no other request has."""
    if not scale.is_mixed:
        return tuple(f"{random_numbers.getrandbits(64):016x}" for _ in range(NUM_PREFIXES))
    own = tuple(marker.decode() for marker in PREFIX_MARKERS)
    if number % UNSHARED_EVERY == 0:
        return own
    shared = random.Random(number % NUM_SHARED_PROMPTS)
    return tuple(f"{shared.getrandbits(64):016x}" for _ in range(NUM_SHARED_PREFIXES)) + own[NUM_SHARED_PREFIXES:]


async def _submit(
    recorder: Recorder, store: RedisLedger, demand: Demand, mailboxes: Sequence[str]
) -> tuple[Template, Template]:
    markers = (ID_MARKERS[0], *PREFIX_MARKERS)
    words = await recorder.record(partial(store.submit, demand))
    return Template(words, markers), Template(_with_mailboxes(words, mailboxes), markers)


async def _batch(
    recorder: Recorder, store: RedisLedger, demands: Sequence[Demand], mailboxes: Sequence[str]
) -> Template:
    markers = ID_MARKERS[: len(demands)]

    async def submit_all() -> None:
        one_each = (replace(one, request_id=marker.decode()) for one, marker in zip(demands, markers, strict=True))
        await asyncio.gather(*(store.submit(one) for one in one_each), return_exceptions=True)

    words = await recorder.record(submit_all)
    return Template(_with_mailboxes(words, mailboxes), (*markers, *PREFIX_MARKERS))


def _with_mailboxes(words: tuple[Any, ...], mailboxes: Sequence[str]) -> tuple[Any, ...]:
    first_argument = 3 + int(words[2])
    return (*words[:2], int(words[2]) + len(mailboxes), *words[3:first_argument], *mailboxes, *words[first_argument:])


async def _settles(recorder: Recorder, store: RedisLedger, count: int) -> list[Template]:
    templates = []
    for usage in range(1, NUM_USAGES + 1):
        endings = [Ending(marker.decode(), 1, 200 * usage, 90 * usage, True) for marker in ID_MARKERS[:count]]
        templates.append(Template(await recorder.record(partial(store.settle, endings)), ID_MARKERS))
    return templates


async def _reports(recorder: Recorder, store: RedisLedger, scale: PoolScale) -> Reports:
    markers = (*ID_MARKERS, EXECUTOR_MARKER, SEQ_MARKER)
    templates = []
    for num_held in range(min(len(ID_MARKERS), scale.seats + MAX_EXTRA_HELD) + 1):
        words = await recorder.record(partial(store.report_all, [_report(scale, num_held)]))
        first_report = 3 + int(words[2]) + 1  # behind the keys and the caller
        templates.append(Template(words[first_report:], markers, is_whole=False))
    return Reports(Template(words[:first_report], markers, is_whole=False), templates)


def _report(scale: PoolScale, num_held: int) -> ExecutorReport:
    return ExecutorReport(
        EXECUTOR_MARKER.decode(),
        GENERATION,
        int(SEQ_MARKER),
        scale.blocks,
        scale.blocks,
        scale.seats,
        accepting=True,
        reserve_quantile=QUANTILE if scale.is_mixed else 1.0,
        held=tuple(HeldSequence(marker.decode(), 1, 64) for marker in ID_MARKERS[:num_held]),
        step_ms=20.0,
        prefill_tokens_per_s=20_000.0,
    )


async def _about_one(recorder: Recorder, call: Callable[[str], Awaitable[object]]) -> Template:
    return Template(await recorder.record(partial(call, ID_MARKERS[0].decode())), ID_MARKERS[:1])
