"""Waits that the ledger estimates under overload: who is accepted is served in time, who would be is not refused.

An executor with some seats is modelled. It reports what executors do, whatever their engine is: sequences with a seat,
the time of a step, speeds.
"""

from __future__ import annotations

import heapq
import random
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

import pytest

from inflight.router.ledger.types import Demand, Dropped, Ending, HeldSequence, Placement, Queued, Refused
from tests.support.ledger.store_pool import RouterSide, StorePool

STEP_MS = 50
PREFILL_MS = 100
REPORT_MS = 250
FIRST_TOKEN_MS = 10_000
OUTPUTS = (20, 100)
PROMPT = 40
FLOODING = "flood"


@dataclass(frozen=True, slots=True)
class Asked:
    """A request: `output` of the `max_tokens` that are reserved."""

    name: str
    tenant: str
    at_ms: int
    output: int
    max_tokens: int

    @property
    def busy_ms(self) -> int:
        """How long it has a seat."""
        return PREFILL_MS + self.output * STEP_MS


@dataclass(slots=True)
class Load:
    """The executor, its router, and what became of the requests: `early`, `late`, `refused`, of each tenant."""

    pool: StorePool
    num_seats: int
    num_standby: int = 1
    total_ms: int | None = None
    began_ms: int = 0
    asked: dict[str, Asked] = field(default_factory=dict)
    placed: dict[str, Placement] = field(default_factory=dict)
    standby: list[str] = field(default_factory=list)
    ends: list[tuple[int, str]] = field(default_factory=list)
    outcomes: Counter[tuple[str, str]] = field(default_factory=Counter)

    @property
    def router(self) -> RouterSide:
        return self.pool.router("a")

    def per_s(self, mean_output: float) -> float:
        """Requests that the seats serve in a second."""
        return 1000 * self.num_seats / (PREFILL_MS + mean_output * STEP_MS)

    def count(self, outcome: str) -> int:
        return sum(number for (_, found), number in self.outcomes.items() if found == outcome)

    async def run(self, requests: Iterable[Asked]) -> None:
        """Sends the requests at their times, and returns when all have ended."""
        coming = sorted(requests, key=lambda one: one.at_ms, reverse=True)
        began_ms, report_ms = self.pool.now_ms, 0
        self.began_ms = began_ms
        while coming or self.placed or self.count("waiting"):
            next_ms = min(
                [report_ms, *(one.at_ms for one in coming[-1:]), *(at_ms - began_ms for at_ms, _ in self.ends[:1])]
            )
            await self.pool.set_clock(began_ms + next_ms)
            if self.ends and self.ends[0][0] - began_ms == next_ms:
                await self._end(heapq.heappop(self.ends)[1])
            elif coming and coming[-1].at_ms == next_ms:
                await self._submit(coming.pop())
            else:
                await self._report()
                report_ms += REPORT_MS
            self._take()

    async def _submit(self, one: Asked) -> None:
        self.asked[one.name] = one
        demand = Demand(
            one.name,
            2,
            blocks=1,
            tenant=one.tenant,
            deadline_ms=FIRST_TOKEN_MS,
            total_ms=self.total_ms,
            prompt_tokens=PROMPT,
            max_tokens=one.max_tokens,
        )
        result = await self.router.store.submit(demand)
        if isinstance(result, Placement):
            self._place(result)
        elif isinstance(result, Queued):
            self.outcomes[one.tenant, "waiting"] += 1
        else:
            assert isinstance(result, Refused)
            self.outcomes[one.tenant, "refused"] += 1

    async def _end(self, name: str) -> None:
        placement, one = self.placed.pop(name), self.asked[name]
        ending = Ending(name, placement.attempt, PROMPT, one.output, by_itself=True)
        if self.standby:
            self._board(self.standby.pop(0))
        await self.router.store.settle([ending])

    async def _report(self) -> None:
        held = tuple(HeldSequence(name, one.attempt, 1) for name, one in self.placed.items())
        report = self.pool.next_report(
            blocks=1000,
            sequences=self.num_seats + self.num_standby,
            held=held,
            step_ms=STEP_MS if held else 0.0,
            prefill_tokens_per_s=1000 * PROMPT / PREFILL_MS if held else 0.0,
            output_tokens_per_s=1000 * len(self.ends) / STEP_MS,
            num_standby=len(self.standby),
        )
        await self.router.store.report(report)

    def _take(self) -> None:
        for event in self.router.replied:
            if isinstance(event, Placement):
                self.outcomes[self.asked[event.request_id].tenant, "waiting"] -= 1
                self._place(event)
            elif isinstance(event, Dropped):
                tenant = self.asked[event.request_id].tenant
                self.outcomes[tenant, "waiting"] -= 1
                self.outcomes[tenant, "late"] += 1
        self.router.replied.clear()

    def _place(self, placement: Placement) -> None:
        self.placed[placement.request_id] = placement
        if len(self.ends) < self.num_seats:
            self._board(placement.request_id)
        else:
            self.standby.append(placement.request_id)

    def _board(self, name: str) -> None:
        one = self.asked[name]
        heapq.heappush(self.ends, (self.pool.now_ms + one.busy_ms, name))
        waited_ms = self.pool.now_ms - self.began_ms - one.at_ms
        is_early = waited_ms + PREFILL_MS <= FIRST_TOKEN_MS
        if self.total_ms is not None:
            is_early = is_early and waited_ms + one.busy_ms <= self.total_ms
        self.outcomes[one.tenant, "early" if is_early else "late"] += 1


def arrivals(tenant: str, per_s: float, seconds: float, seed: int) -> list[Asked]:
    """A Poisson process of requests that use all that they reserve."""
    rng, at_s, found = random.Random(f"{tenant}/{seed}"), 0.0, list[Asked]()
    while (at_s := at_s + rng.expovariate(per_s)) < seconds:
        output = rng.randint(*OUTPUTS)
        found.append(Asked(f"{tenant}/{len(found)}", tenant, round(1000 * at_s), output, output))
    return found


@pytest.mark.parametrize(
    ("num_seats", "num_standby", "total_ms"), [(8, 1, None), (8, 8, None), (16, 1, None), (8, 1, 8000), (16, 1, 12_000)]
)
async def test_flood_is_refused_at_once_and_those_accepted_are_in_time(
    store_pool: StorePool, num_seats: int, num_standby: int, total_ms: int | None
) -> None:
    # Given an executor that was busy before, without a queue: the queue's speed is unknown
    load, seconds = Load(store_pool, num_seats, num_standby, total_ms), 40.0
    await load.router.store.report(store_pool.next_report(blocks=1000, sequences=num_seats + num_standby))
    await load.run(Asked(f"before/{i}", "before", i, 50, 50) for i in range(num_seats))
    # When a tenant floods beside light ones, with three times what can be served
    capacity_per_s = load.per_s(sum(OUTPUTS) / 2)
    requests = arrivals(FLOODING, 2.7 * capacity_per_s, seconds, 1)
    for light in ("light-1", "light-2"):
        requests += arrivals(light, 0.15 * capacity_per_s, seconds, 1)
    load.outcomes.clear()
    await load.run(requests)
    # Then few of the accepted are late, the seats were full, and no light tenant was refused
    accepted = len(requests) - load.count("refused")
    assert load.count("late") <= 0.09 * accepted, load.outcomes
    assert load.count("early") >= 0.95 * capacity_per_s * (seconds + FIRST_TOKEN_MS / 1000) - num_seats, load.outcomes
    refused = {tenant for (tenant, outcome), number in load.outcomes.items() if number and outcome != "early"}
    assert refused <= {FLOODING}, load.outcomes


async def test_burst_that_is_served_in_time_is_not_refused(store_pool: StorePool) -> None:
    load = Load(store_pool, 8)
    await load.router.store.report(store_pool.next_report(blocks=1000, sequences=9))
    await load.run(Asked(f"before/{i}", "before", i, 50, 200) for i in range(8))
    load.outcomes.clear()
    # As before, they use a quarter of what they reserve. The last one waits for 6 s
    await load.run(Asked(f"burst/{i}", FLOODING, i, 50, 200) for i in range(26))
    assert (load.count("early"), load.count("refused"), load.count("late")) == (26, 0, 0)


async def test_nothing_is_refused_while_no_output_is_known(store_pool: StorePool) -> None:
    load = Load(store_pool, 2)
    await load.router.store.report(store_pool.next_report(blocks=1000, sequences=3))
    # Of the outputs that they reserve, each would take a minute
    await load.run(Asked(f"r{i}", FLOODING, i, 20, 1000) for i in range(6))
    assert (load.count("early"), load.count("refused")) == (6, 0)
