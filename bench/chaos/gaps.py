"""The pauses of streams around a fault, compared with their bounds. Pure.

A stream's gap is its longest pause between two tokens that overlaps the time from the fault until the system was whole
again. Streams that went on elsewhere or were resumed then are the interrupted ones; the others may have noticed
something, too.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from inflight.bench.chaos.observed import Observed
from inflight.bench.chaos.schedule import Fault, FaultKind
from inflight.bench.measures.run import percentile

LEASE_S = 5.0
# What a prefill among others may take on a busy machine; where nothing is to be noticed, what a pause may be.
PREFILL_S = 1.0


@dataclass(frozen=True, slots=True)
class Window:
    """A fault, when it began, when it was over, and when the system was whole again; None: it was not by the end."""

    fault: Fault
    began_s: float
    over_s: float
    whole_s: float | None


@dataclass(frozen=True, slots=True)
class Gaps:
    """The gaps of one kind of fault, in seconds. `num_running` streams ran when it happened."""

    kind: FaultKind | None
    num_faults: int
    num_running: int
    num_interrupted: int
    p50_s: float | None
    p99_s: float | None
    max_s: float | None
    recovery_max_s: float | None
    bound_s: float | None

    @property
    def holds(self) -> bool | None:
        """Whether the bound was kept; None if there is no bound, or nothing to hold against it."""
        return None if self.bound_s is None or self.max_s is None else self.max_s <= self.bound_s


def bound_s(fault: Fault) -> float | None:
    """Longest pause that DESIGN §6 allows; None if it says nothing of running streams."""
    match fault.kind:
        case FaultKind.EXECUTOR_KILL | FaultKind.EXECUTOR_HANG | FaultKind.LINK_CUT | FaultKind.LINK_BLACK_HOLE:
            return LEASE_S + PREFILL_S
        case FaultKind.STORE_STALE:
            return LEASE_S + PREFILL_S  # what was placed in the lost interval may be placed once more
        case FaultKind.ROUTER_KILL | FaultKind.ROUTER_RESTART:
            return 1.0 + PREFILL_S
        case FaultKind.EXECUTOR_RESTART:
            return PREFILL_S
        case FaultKind.ROUTER_HANG:
            return None
        case _:
            return PREFILL_S  # running streams notice nothing: what a busy machine takes anyway


def gap_s(observed: Observed, began_s: float, until_s: float) -> float | None:
    """Returns the stream's longest pause that overlaps [began_s, until_s); None if it did not run when that
    began."""
    times = observed.arrivals_s
    if not times or times[0] >= began_s or observed.ended_s <= began_s:
        return None
    pauses = [b - a for a, b in itertools.pairwise(times) if b > began_s and a < until_s]
    return max(pauses, default=None)


def gaps_by_kind(windows: Sequence[Window], streams: Sequence[Observed]) -> list[Gaps]:
    """Returns a row for each kind that happened, in order of kind; the first is of the times in between."""
    kinds = [kind for kind in FaultKind if any(window.fault.kind is kind for window in windows)]
    return [_calm(windows, streams)] + [
        _of_kind(kind, [window for window in windows if window.fault.kind is kind], streams) for kind in kinds
    ]


def _of_kind(kind: FaultKind, windows: Sequence[Window], streams: Sequence[Observed]) -> Gaps:
    running: list[float] = []
    interrupted: list[float] = []
    for window in windows:
        until_s = window.whole_s if window.whole_s is not None else math.inf
        for observed in streams:
            gap = gap_s(observed, window.began_s, until_s)
            if gap is None:
                continue
            running.append(gap)
            moved = (*observed.migrated_s, *observed.resumed_s)
            if any(window.began_s <= at < until_s for at in moved):
                interrupted.append(gap)
    counted = interrupted or running
    recoveries = [window.whole_s - window.began_s for window in windows if window.whole_s is not None]
    bounds = [bound for window in windows if (bound := bound_s(window.fault)) is not None]
    return Gaps(
        kind,
        len(windows),
        len(running),
        len(interrupted),
        percentile(counted, 0.5),
        percentile(counted, 0.99),
        max(running, default=None),
        max(recoveries, default=None),
        max(bounds, default=None),
    )


def _calm(windows: Sequence[Window], streams: Sequence[Observed]) -> Gaps:
    """Pauses that no fault overlaps: what streams have anyway."""
    longest: list[float] = []
    for observed in streams:
        pauses = [
            b - a
            for a, b in itertools.pairwise(observed.arrivals_s)
            if not any(b > w.began_s and (w.whole_s is None or a < w.whole_s) for w in windows)
        ]
        if pauses:
            longest.append(max(pauses))
    p50_s, p99_s = percentile(longest, 0.5), percentile(longest, 0.99)
    return Gaps(None, 0, len(longest), 0, p50_s, p99_s, max(longest, default=None), None, None)
