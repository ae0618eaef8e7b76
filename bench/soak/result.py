"""The result of a soak: whether something grows, and the report. Pure.

The median of early readings is compared with the median of late ones. Medians, because a reading under load is a
moment's; thirds, because a leak shows over all of the time. Falling is no leak. An allowance covers what a system at
work varies by. Growth is compared with it whole, however long the run was.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from inflight.bench.report.page import Page, Part
from inflight.bench.report.table import Table, count_table
from inflight.bench.soak.readings import Series

KIND = "soak"
# Pools, caches and allocators fill once, and ends are remembered for a minute.
WARM_UP_SHARE = 0.2
MIN_READINGS = 6


@dataclass(frozen=True, slots=True)
class Allowance:
    """How much larger the late median may be: an amount plus a share of the early one."""

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
    """One figure of one process after the warm-up: medians of the first and last third, and the extremes."""

    process: str
    figure: str
    early: float
    late: float
    least: float
    most: float
    is_flat: bool


@dataclass(frozen=True, slots=True)
class SoakResult:
    """A soak that has ended. `left` is what was still held after all requests had ended."""

    circumstances: Mapping[str, str]
    seconds: float
    num_requests: int
    num_cancelled: int
    num_vanished: int
    num_tokens: int
    num_failed: int
    errors: Sequence[str]
    left: Mapping[str, int]
    trends: Sequence[Trend]
    too_few: Sequence[str]

    @property
    def is_flat(self) -> bool | None:
        """Whether nothing grows and nothing is left; None if there are too few readings for a verdict."""
        if any(self.left.values()):
            return False
        return all(one.is_flat for one in self.trends) if self.trends else None

    @property
    def last_line(self) -> str:
        """The line for machines."""
        flat = {True: "yes", False: "no", None: "unknown"}[self.is_flat]
        return f"soak: seconds={self.seconds:.0f} requests={self.num_requests} failed={self.num_failed} flat={flat}"


def trend(process: str, figure: str, readings: Sequence[float]) -> Trend | None:
    """Returns the verdict on readings at even intervals; None if there are too few."""
    later = readings[int(WARM_UP_SHARE * len(readings)) :]
    if len(later) < MIN_READINGS:
        return None
    third = len(later) // 3
    early, late = median(later[:third]), median(later[-third:])
    allowance = ALLOWANCES[figure]
    is_flat = late - early <= allowance.amount + allowance.share * early
    return Trend(process, figure, early, late, min(later), max(later), is_flat)


def trends_of(series: Series) -> tuple[list[Trend], list[str]]:
    """Returns a trend for each process and figure, and the names of those with too few readings for one."""
    trends, too_few = [], []
    for (process, figure), readings in series.items():
        found = trend(process, figure, readings)
        if found is None:
            too_few.append(f"{process} {figure}")
        else:
            trends.append(found)
    return trends, too_few


def values_of(outcome: SoakResult, at_s: Sequence[float], series: Series) -> dict[str, Any]:
    """Everything as plain values, with every reading."""
    readings = {f"{process} {figure}": values for (process, figure), values in series.items()}
    values = {"report": KIND, **asdict(outcome), "last_line": outcome.last_line}
    return {**values, "at_s": at_s, "readings": readings}


def page(outcome: SoakResult) -> Page:
    counts = {
        "requests": outcome.num_requests,
        "of these cancelled by their client": outcome.num_cancelled,
        "of these left by a connection that went away": outcome.num_vanished,
        "output tokens": outcome.num_tokens,
        "failed": outcome.num_failed,
        **{f"{name} at the end": number for name, number in outcome.left.items()},
    }
    rows = [
        [one.process, one.figure, *map(_number, (one.early, one.late, one.least, one.most)), _verdict(one)]
        for one in outcome.trends
    ]
    held = Table(["process", "figure", "early", "late", "least", "most", "flat"], rows)
    note = "Medians of the first and of the last third of the readings after the warm-up."
    parts = [Part("Requests", table=count_table("what", counts)), Part("What the processes held", note, table=held)]
    if outcome.errors:
        parts.append(Part("Failures", problems=outcome.errors))
    return Page("Soak", outcome.circumstances, parts, last_lines=[outcome.last_line])


def _number(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


def _verdict(one: Trend) -> str:
    return "yes" if one.is_flat else "**no**"
