"""Notices an engine that has work and makes no step. Event loop's thread.

What counts is step progress and nothing else: no clock of another process, no external service. Only time in which this
process ran counts: a look that comes late says that the process itself stood still (SIGSTOP, a suspended machine), and
of such a gap no more is counted than a look that is somewhat late.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Protocol

log = logging.getLogger(__name__)

# Looks within the limit, so that a standstill is noticed at most a tenth too late.
LOOKS_PER_LIMIT = 10
MAX_INTERVAL_S = 1.0
# Of a gap between two looks so many intervals count: a busy event loop may be late, and a stopped process is later.
MAX_GAP_INTERVALS = 2


class Watched(Protocol):
    """An engine as its watchdog sees it."""

    @property
    def has_work(self) -> bool:
        """Whether it has something to do."""
        ...

    @property
    def progress(self) -> tuple[int, ...]:
        """Changes with every step, and whenever there is nothing left to do."""
        ...


@dataclass(frozen=True, slots=True)
class Look:
    """What was seen at `at_s`; for `still_s` seconds there has been work and no progress."""

    at_s: float
    has_work: bool
    progress: tuple[int, ...]
    still_s: float = 0.0


def next_look(before: Look, at_s: float, watched: Watched, interval_s: float) -> Look:
    """The next look, `interval_s` after the one before or later."""
    has_work, progress = watched.has_work, watched.progress
    if not (has_work and before.has_work) or progress != before.progress:
        return Look(at_s, has_work, progress)
    passed_s = min(at_s - before.at_s, MAX_GAP_INTERVALS * interval_s)
    return Look(at_s, has_work, progress, before.still_s + passed_s)


async def watch_engine(
    watched: Watched,
    limit_s: float,
    tell: Callable[[bool], Awaitable[None]],
    clock: Callable[[], float] = time.monotonic,
) -> None:
    """Tells when the engine has stood still for `limit_s`, and when it moves again, until cancelled."""
    interval_s = min(MAX_INTERVAL_S, limit_s / LOOKS_PER_LIMIT)
    seen = Look(clock(), watched.has_work, watched.progress)
    stands_still = False
    while True:
        await asyncio.sleep(interval_s)
        seen = next_look(seen, clock(), watched, interval_s)
        if stands_still != (seen.still_s >= limit_s):
            stands_still = not stands_still
            if stands_still:
                log.error("the engine has work but has made no step for %.1f s", seen.still_s)
            else:
                log.warning("the engine makes steps again")
            await tell(stands_still)
