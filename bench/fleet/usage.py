"""Conservation of busy time: what executors say that they were busy, beside what the ledger has booked.

`BusyWatch` looks at every executor's total while the system runs, since a process that is killed cannot be asked any
more. `costs_of` then compares. It holds that

- the lines of `GetUsage`, of all tenants and the system, sum to what the ledger counted of all executors, to the
  nanosecond;
- of an executor that runs, the ledger has counted all;
- of one that ended, all but what it had not reported: what it used in its last `UNREPORTED_S` seconds;
- unless Redis lost data after that end. Then what it had reported may be missing as well.
"""

from __future__ import annotations

import asyncio
import struct
import time
from collections.abc import Iterable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from inflight import AsyncClient
from inflight.bench.fleet.fleet import Fleet
from inflight.bench.fleet.metrics import metric_sum
from inflight.common.time_of_day import day_text, unix_day
from inflight.errors import InflightError
from inflight.router.ledger.connection import connect_node
from inflight.router.ledger.keys import PoolKeys
from inflight.router.ledger.settings import LedgerSettings
from inflight.router.ledger.types import FIGURES

BUSY = "inflight_device_busy_seconds_total"
LOOK_EVERY_S = 0.2
CALL_TIMEOUT_S = 2.0
LAST_CALL_TIMEOUT_S = 60.0
# Totals are taken once a second and sent once a second, each time to another router. The report before the last one may
# have gone to a router that ended with it.
UNREPORTED_S = 3.0
# A step is counted when it has ended, so more may be added between two looks than the time between them.
LONGEST_STEP_S = 1.0
# Of the time of day against `time.monotonic` during a run. Starts of an executor are further apart.
CLOCK_DRIFT_S = 0.1
NS = 1_000_000_000
# Executor and its generation, which is the time of its start in milliseconds.
Source = tuple[str, int]


@dataclass(frozen=True, slots=True)
class Look:
    """The busy time of an executor since its start. It was asked for at `at_s`."""

    at_s: float
    busy_ns: int


@dataclass(slots=True)
class Life:
    """A start of an executor. Times are those of `time.monotonic`; `ended_s` is None while it runs."""

    name: str
    started_s: float
    looks: list[Look] = field(default_factory=list)
    ended_s: float | None = None

    @property
    def seen_ns(self) -> int:
        """The busy time at the last look."""
        return self.looks[-1].busy_ns if self.looks else 0

    def unreported_s(self, booked_ns: int) -> float:
        """Returns for how long an executor that ended had used more than what is booked."""
        assert self.ended_s is not None
        known_s = max((look.at_s for look in self.looks if look.busy_ns <= booked_ns), default=self.started_s)
        return max(0.0, self.ended_s - known_s) if booked_ns < self.seen_ns else 0.0


@dataclass(frozen=True, slots=True)
class Booked:
    """What the ledger has: the sums of all lines of `GetUsage`, and what it counted of each start of an executor."""

    tenants_ns: int
    system_ns: int
    by_source: Mapping[Source, int]

    @property
    def total_ns(self) -> int:
        return self.tenants_ns + self.system_ns


@dataclass(frozen=True, slots=True)
class Costs:
    """The comparison. `busy_ns` is what all executors were seen to be busy, `unreported_ns` what is missing of those
    that ended, `lost_ns` what is missing of those that ended before Redis lost data."""

    busy_ns: int
    tenants_ns: int
    system_ns: int
    unreported_ns: int
    max_unreported_s: float
    lost_ns: int
    problems: tuple[str, ...]


class BusyWatch:
    """Looks at the executors of a fleet until cancelled."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._lives: dict[tuple[str, int], Life] = {}

    async def run(self) -> None:
        """Looks at all executors again and again."""
        while True:
            await self.look()
            await asyncio.sleep(LOOK_EVERY_S)

    async def look(self) -> None:
        """Looks at each executor once. One that does not answer is left out."""
        await asyncio.gather(*(self._look_at(index) for index in range(len(self._fleet.executors))))

    async def _look_at(self, index: int) -> None:
        member = self._fleet.executors[index]
        start = (member.name, member.num_starts)
        life = self._lives.setdefault(start, Life(member.name, member.started_s))
        at_s = time.monotonic()
        try:
            busy_s = await metric_sum(member.http_address, BUSY, CALL_TIMEOUT_S)
        except OSError:
            return
        if start == (member.name, member.num_starts):
            life.looks.append(Look(at_s, round(busy_s * NS)))

    def lives(self) -> list[Life]:
        """Returns every start that was looked at."""
        running = {(member.name, member.num_starts) for member in self._fleet.executors}
        for (name, number), life in self._lives.items():
            if (name, number) not in running and life.ended_s is None:
                ends = (ended.at_s for ended in self._fleet.exits if ended.name == name)
                life.ended_s = min((at_s for at_s in ends if at_s > life.started_s), default=time.monotonic())
        return list(self._lives.values())

    async def costs(self, client: AsyncClient, pool: str, lost_s: float | None, timeout_s: float) -> Costs:
        """Returns the comparison, once there is no problem or after `timeout_s` seconds. `lost_s`: when Redis last lost
        data. A Redis that did gets the totals of executors again within a minute."""
        ends_s = time.monotonic() + timeout_s
        while True:
            await self.look()
            booked = await booked_of(client, self._fleet.redis_process.url(), pool)
            costs = costs_of(self.lives(), booked, lost_s, _wall_ms_at_zero())
            if not costs.problems or time.monotonic() >= ends_s:
                return costs
            await asyncio.sleep(LOOK_EVERY_S)


def costs_of(lives: Sequence[Life], booked: Booked, lost_s: float | None, wall_ms_at_zero: float) -> Costs:
    """Returns the comparison. `wall_ms_at_zero` is the time of day, milliseconds, at which `time.monotonic` was 0."""
    by_life = [0] * len(lives)
    problems = []
    for (name, generation), counted_ns in booked.by_source.items():
        at = _life_at(lives, name, (generation - wall_ms_at_zero) / 1000)
        if at is None:
            problems.append(f"the ledger counted {counted_ns} ns of {name} before it was started")
        else:
            by_life[at] += counted_ns
    if booked.total_ns != (counted_ns := sum(booked.by_source.values())):
        problems.append(f"the lines of usage sum to {booked.total_ns} ns, and {counted_ns} ns were counted")
    unreported_ns = lost_ns = 0
    max_unreported_s = 0.0
    for life, counted_ns in zip(lives, by_life, strict=True):
        missing_ns = max(0, life.seen_ns - counted_ns)
        problems += _excess(life, counted_ns)
        if life.ended_s is None:
            if missing_ns:
                problems.append(f"{life.name} runs and was busy for {missing_ns} ns more than were counted")
        elif lost_s is not None and life.ended_s <= lost_s:
            lost_ns += missing_ns
        else:
            unreported_ns += missing_ns
            unreported_s = life.unreported_s(counted_ns)
            max_unreported_s = max(max_unreported_s, unreported_s)
            if unreported_s > UNREPORTED_S:
                problems.append(f"{life.name} ended, and nothing of its last {unreported_s:.1f} s was counted")
    busy_ns = sum(life.seen_ns for life in lives)
    return Costs(
        *(busy_ns, booked.tenants_ns, booked.system_ns, unreported_ns, max_unreported_s, lost_ns, tuple(problems))
    )


def _excess(life: Life, counted_ns: int) -> Iterable[str]:
    """Yields a problem if more was counted than the executor can have used."""
    most_ns = life.seen_ns
    if life.ended_s is not None:
        seen_s = life.looks[-1].at_s if life.looks else life.started_s
        most_ns += round((life.ended_s - seen_s + LONGEST_STEP_S) * NS)
    if counted_ns > most_ns:
        yield f"{counted_ns} ns of {life.name} were counted, and it was busy for {life.seen_ns} ns when last asked"


def _life_at(lives: Sequence[Life], name: str, started_s: float) -> int | None:
    """Returns the index of the start that a generation is of: the last one before it."""
    latest_s = started_s + CLOCK_DRIFT_S
    found = [at for at, life in enumerate(lives) if life.name == name and life.started_s <= latest_s]
    return max(found, key=lambda at: lives[at].started_s, default=None)


def _wall_ms_at_zero() -> float:
    return (time.time() - time.monotonic()) * 1000


async def booked_of(client: AsyncClient, redis_url: str, pool: str) -> Booked:
    """Returns what the ledger has of today and yesterday, or nothing while it does not answer."""
    days = (unix_day() - 1, unix_day())
    try:
        usage = await client.usage(since=day_text(days[0]), until=day_text(days[1]), model=pool, timeout=CALL_TIMEOUT_S)
    except InflightError:
        return Booked(0, 0, {})
    tenants_ns, system_ns = (
        sum(round(line.used.busy_s * NS) for line in usage.lines if line.is_system == is_system)
        for is_system in (False, True)
    )
    by_source: dict[Source, int] = {}
    settings = LedgerSettings(call_timeout_ms=round(LAST_CALL_TIMEOUT_S * 1000))
    node: Any = connect_node(redis_url, settings)
    async with aclosing(node) as redis:
        for day in days:
            key = PoolKeys(pool).usage(day)[1]
            counted = await redis.execute_command("HGETALL", key, NEVER_DECODE=True)  # the figures are packed
            for entry, figures in counted.items():
                source, busy_ns = _counted(entry, figures)
                by_source[source] = by_source.get(source, 0) + busy_ns
    return Booked(tenants_ns, system_ns, by_source)


def _counted(entry: bytes, figures: bytes) -> tuple[Source, int]:
    """Reads an entry of what is counted (`scripts/charge.lua`): executor, generation, account; its packed figures."""
    name, generation, _ = entry.split(b"\0", 2)
    values = dict(zip(FIGURES, struct.unpack(f"<{len(FIGURES)}d", figures), strict=True))
    return (name.decode(), int(generation)), round(values["busy_ns"])
