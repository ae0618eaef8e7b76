"""Whether something grows: the middle of what was read early against the middle of what was read late. Pure.

Medians, because a reading under load is a moment's; thirds, because a leak shows over all of the time. Falling is no
leak. What may differ is what a system at work varies by, not what an hour of a slow leak may come to: growth is held
against it whole, however long the run was.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median

# Pools, caches and allocators fill once, and ends are remembered for a minute.
WARM_UP_SHARE = 0.2
MIN_READINGS = 6


@dataclass(frozen=True, slots=True)
class Allowance:
    """How much larger the late middle may be: so much, and so large a share of the early one."""

    amount: float
    share: float


ALLOWANCES: Mapping[str, Allowance] = {
    "resident MiB": Allowance(6.0, 0.02),
    "open files": Allowance(8.0, 0.0),
    "threads": Allowance(2.0, 0.0),
    "keys": Allowance(8.0, 0.05),
    "used MiB": Allowance(1.0, 0.05),
    "clients": Allowance(4.0, 0.0),
    "used blocks": Allowance(4.0, 0.1),
    "reserved blocks": Allowance(4.0, 0.1),
}


@dataclass(frozen=True, slots=True)
class Trend:
    """How one figure of one process went after the warm-up."""

    process: str
    figure: str
    early: float
    late: float
    least: float
    most: float
    is_flat: bool


def trend(process: str, figure: str, readings: Sequence[float]) -> Trend | None:
    """The verdict on readings at even intervals; None where there are too few."""
    later = readings[int(WARM_UP_SHARE * len(readings)) :]
    if len(later) < MIN_READINGS:
        return None
    third = len(later) // 3
    early, late = median(later[:third]), median(later[-third:])
    allowance = ALLOWANCES[figure]
    is_flat = late - early <= allowance.amount + allowance.share * early
    return Trend(process, figure, early, late, min(later), max(later), is_flat)
