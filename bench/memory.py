"""Whether memory grows: a line through readings that were taken while requests went by. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import linear_regression

# The first requests fill pools, caches and allocators once; after this share of them memory should be flat.
WARM_UP_SHARE = 0.2
BYTES_PER_MIB = 1 << 20
REQUESTS_PER_SLOPE = 1000


@dataclass(frozen=True, slots=True)
class MemoryReading:
    """What a process held when so many requests had ended."""

    num_requests: int
    resident_bytes: int


@dataclass(frozen=True, slots=True)
class MemoryTrend:
    """How a process's memory went after the warm-up."""

    start_mib: float
    end_mib: float
    least_mib: float
    most_mib: float
    mib_per_1000_requests: float


def trend(readings: Sequence[MemoryReading], num_requests: int) -> MemoryTrend | None:
    """The line through the readings after the warm-up; None where there are too few for one."""
    later = [reading for reading in readings if reading.num_requests >= WARM_UP_SHARE * num_requests]
    at = [reading.num_requests for reading in later]
    if len(set(at)) < 2:
        return None
    mib = [reading.resident_bytes / BYTES_PER_MIB for reading in later]
    slope = linear_regression(at, mib).slope
    return MemoryTrend(mib[0], mib[-1], min(mib), max(mib), slope * REQUESTS_PER_SLOPE)
