"""Watchdog of an engine that has work and makes no step. Runs on the event loop's thread.

A step is allowed `limit_s`, or `LARGEST_SURPRISE` times the time that it is expected to take if that is longer.

Only step progress counts, without a clock of another process or an external service. Only time in which this process
ran counts: a late poll means that the process itself was stopped (SIGSTOP, a suspended machine), and of such a gap no
more is counted than of a slightly late poll.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

from inflight.executor.engine.step_time import LARGEST_SURPRISE

log = logging.getLogger(__name__)

# Polls within the limit, so that a stall is noticed at most a tenth too late.
POLLS_PER_LIMIT = 10
MAX_INTERVAL_S = 1.0
# Most intervals that a gap between two polls counts for. A busy event loop polls late, a stopped process later.
MAX_GAP_INTERVALS = 2


class Watched(Protocol):
    """The interface of a watched engine."""

    @property
    def has_work(self) -> bool: ...

    @property
    def progress(self) -> tuple[int, ...]:
        """A value that changes with every step, and whenever the engine becomes idle."""
        ...

    @property
    def expected_step_s(self) -> float:
        """The seconds that the step in flight is expected to take."""
        ...


@dataclass(frozen=True, slots=True)
class Observation:
    """State at `at_s`. For `stalled_s` seconds there has been work and no progress."""

    at_s: float
    has_work: bool
    progress: tuple[int, ...]
    stalled_s: float = 0.0


def observe(before: Observation, at_s: float, watched: Watched, interval_s: float) -> Observation:
    """Returns the observation that follows `before`, at least `interval_s` later."""
    has_work, progress = watched.has_work, watched.progress
    if not (has_work and before.has_work) or progress != before.progress:
        return Observation(at_s, has_work, progress)
    passed_s = min(at_s - before.at_s, MAX_GAP_INTERVALS * interval_s)
    return Observation(at_s, has_work, progress, before.stalled_s + passed_s)


async def watch_engine(
    watched: Watched,
    limit_s: float,
    on_change: Callable[[bool], Awaitable[None]],
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Calls `on_change(True)` when the engine has stalled for longer than a step may take and `on_change(False)` when
    it goes on, until cancelled."""
    interval_s = min(MAX_INTERVAL_S, limit_s / POLLS_PER_LIMIT)
    seen = Observation(clock(), watched.has_work, watched.progress)
    is_stalled = False
    while True:
        await asyncio.sleep(interval_s)
        seen = observe(seen, clock(), watched, interval_s)
        expected_s = watched.expected_step_s
        if is_stalled != (seen.stalled_s >= max(limit_s, LARGEST_SURPRISE * expected_s)):
            is_stalled = not is_stalled
            if is_stalled:
                text = "the engine has work but has made no step for %.1f s; %.1f s were expected"
                log.error(text, seen.stalled_s, expected_s)
            else:
                log.warning("the engine makes steps again")
            await on_change(is_stalled)
