"""A real system on the tiny model for the tests of this folder, and streams that are checked token by token."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any

from inflight import AsyncClient
from inflight.aio_stream import AsyncStream
from inflight.bench.chaos.observed import Observed, judge
from inflight.bench.chaos.requests import Expected, SampleKind, SampleRequest
from inflight.bench.fleet.fleet import Fleet, Member
from inflight.bench.fleet.health import Leak, Observer
from tests.support.stack.braked import ProcessBrake

# Nothing here takes so long unless it hangs: a limit of liveness, not a bound.
PATIENCE_S = 90.0

# A sequence with so many output tokens waits for the brake, while it is held.
BRAKED_FROM = 20
STEP_INTERVAL_S = 0.05

LONG = SampleRequest("long", SampleKind.IDS, 220, prompt_ids=tuple(range(40, 60)))
SHORT = SampleRequest("short", SampleKind.IDS, 24, prompt_ids=(7, 8, 9, 10, 11, 12, 13, 14))


def numbered(sample: SampleRequest, number: int) -> SampleRequest:
    """Another one of the same size."""
    assert sample.prompt_ids is not None
    return replace(sample, name=f"{sample.name}-{number}", prompt_ids=(number, *sample.prompt_ids[1:]))


@dataclass(eq=False)
class Reading:
    """A stream that is being read to its end."""

    stream: AsyncStream
    observed: Observed
    ended: asyncio.Task[None]
    changed: asyncio.Event = field(default_factory=asyncio.Event)

    async def until(self, is_so: Callable[[Observed], bool]) -> None:
        """Returns when what came is as asked for."""
        async with asyncio.timeout(PATIENCE_S):
            while not is_so(self.observed):
                self.changed.clear()
                await self.changed.wait()

    @property
    def longest_pause_s(self) -> float:
        """Between two tokens."""
        times = self.observed.arrivals_s
        return max((b - a for a, b in itertools.pairwise(times)), default=0.0)


@dataclass(eq=False)
class System:
    """A fleet, a client of all its routers, and what requests bring undisturbed."""

    fleet: Fleet
    client: AsyncClient
    observer: Observer
    brake: ProcessBrake
    expected: dict[SampleRequest, Expected] = field(default_factory=dict)

    async def learn(self, *samples: SampleRequest) -> None:
        """Generates what is not known yet."""
        unknown = [sample for sample in samples if sample not in self.expected]
        completions = await asyncio.gather(*(self.client.send(one.request()).result() for one in unknown))
        for sample, done in zip(unknown, completions, strict=True):
            assert done.finish_reason is not None
            self.expected[sample] = Expected(done.token_ids, done.text, done.finish_reason.value)

    def read(self, sample: SampleRequest, client: AsyncClient | None = None, **options: Any) -> Reading:
        """Begins to read a request."""
        stream = (client or self.client).send(sample.request(**options))
        observed = Observed(sample, time.monotonic())

        async def follow() -> None:
            async with aclosing(stream.events()) as events:
                async for event in events:
                    observed.add(event, time.monotonic())
                    reading.changed.set()
            observed.ended_s = time.monotonic()

        reading = Reading(stream, observed, asyncio.create_task(follow()))
        return reading

    async def read_running(self, samples: list[SampleRequest], num_tokens: int = 10) -> list[Reading]:
        """Begins to read requests, and returns when each has brought so many tokens. The brake is held: steps are
        made only until each has begun, so none ends before its test has done something to it."""
        await self.learn(*samples)
        self.brake.hold()
        readings = [self.read(sample) for sample in samples]
        await self.step_until(readings, num_tokens)
        return readings

    async def step_until(self, readings: list[Reading], num_tokens: int) -> None:
        """Permits steps, and returns when each request has brought so many tokens. The brake is held."""
        async with asyncio.timeout(PATIENCE_S):
            while any(reading.observed.num_tokens < num_tokens for reading in readings):
                self.brake.permit_next()
                await asyncio.sleep(STEP_INTERVAL_S)

    async def finish(self, readings: list[Reading]) -> float:
        """Releases the brake, reads to the end, checks every token, and returns the longest pause."""
        self.brake.release()
        async with asyncio.timeout(PATIENCE_S):
            await asyncio.gather(*(reading.ended for reading in readings))
        for reading in readings:
            verdict = judge(reading.observed, self.expected[reading.observed.sample])
            assert verdict.is_right, (reading.observed.sample.name, verdict)
        return max(reading.longest_pause_s for reading in readings)

    def executor_of(self, reading: Reading) -> Member:
        """Where a stream runs."""
        name = reading.stream.transcript.executor_id
        return next(executor for executor in self.fleet.executors if executor.name == name)

    async def until_left(self, num_requests: int) -> None:
        """Returns when the ledger has so few requests."""
        async with asyncio.timeout(PATIENCE_S):
            while (await self.observer.leak(0.0)).num_requests > num_requests:
                await asyncio.sleep(0.01)

    async def whole(self) -> None:
        """Returns when everything is up, and nothing is left of what was asked for."""
        await self.observer.wait_until_whole(PATIENCE_S)
        assert await self.observer.leak(PATIENCE_S) == Leak(0, 0, 0)
