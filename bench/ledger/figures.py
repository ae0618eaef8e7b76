"""What a run of the ledger's benchmark found. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from bench.ledger.scale import PoolScale
from bench.ledger.server import NOTHING, SCRIPT, Usage, Usages

SETTLED = (1, 4, 16)
"""Ends in one settle: a router settles those of a step frame together."""
QUEUED = "submit, queued"


def refilled(num_ends: int) -> str:
    """The name of settling so many at once while others wait for their seats."""
    return f"settle of {num_ends}, refilled"


@dataclass(slots=True)
class ScriptCost:
    """What one kind of script call costs Redis, summed over many."""

    script: Usage = NOTHING
    inner: dict[str, Usage] = field(default_factory=dict)

    def add(self, used: Usages) -> None:
        """Adds a difference of usages in which only this kind of script ran."""
        self.script += used.get(SCRIPT, NOTHING)
        for name, usage in used.items():
            if name not in (SCRIPT, "info", "xread"):
                self.inner[name] = self.inner.get(name, NOTHING) + usage

    @property
    def us(self) -> float:
        """Microseconds of a call."""
        return self.script.us / max(1, self.script.calls)

    @property
    def num_commands(self) -> float:
        """Redis commands in a call."""
        return sum(usage.calls for usage in self.inner.values()) / max(1, self.script.calls)

    @property
    def commands_us(self) -> float:
        """Microseconds of a call that its Redis commands take; the rest is Lua."""
        return sum(usage.us for usage in self.inner.values()) / max(1, self.script.calls)


@dataclass(frozen=True, slots=True)
class Saturation:
    """As many requests as get through, and what they cost."""

    num_admitted: int
    wall_s: float
    redis_cpu_s: float
    script_us: float
    """Of all scripts, upkeep included."""
    mail_us: float
    """Of the reads of mailboxes."""

    @property
    def admitted_per_core_s(self) -> float:
        """Requests per second of Redis' processor time."""
        return self.num_admitted / self.redis_cpu_s

    @property
    def admitted_per_wall_s(self) -> float:
        """Requests per second of this run."""
        return self.num_admitted / self.wall_s

    @property
    def busy(self) -> float:
        """The share of the time in which Redis had a core."""
        return self.redis_cpu_s / self.wall_s


@dataclass(frozen=True, slots=True)
class Latency:
    """Milliseconds of an admission at a moderate rate, by what they are of."""

    rate_per_s: float
    busy: float
    admission_ms: tuple[float, float]
    """Submit and seat together; p50 and p99."""
    submit_ms: tuple[float, float]
    seat_ms: tuple[float, float]
    late_ms: tuple[float, float]
    """By how much the load itself was late, which is part of the rest."""


@dataclass(frozen=True, slots=True)
class Point:
    """Everything at one size of the pool."""

    scale: PoolScale
    redis_version: str
    fill_s: float
    memory_bytes: int
    bytes_per_waiting: float
    costs: Mapping[str, ScriptCost]
    saturation: Saturation
    latency: Latency

    @property
    def scripts_per_s(self) -> dict[int, float]:
        """Requests per second that a core would admit if it did nothing but run scripts, by ends in a settle."""
        submit_us = self.costs[QUEUED].us
        return {num: 1e6 / (submit_us + self.costs[refilled(num)].us / num) for num in SETTLED}

    @property
    def line(self) -> str:
        """The result in one line."""
        p50_ms, p99_ms = self.latency.admission_ms
        return (
            f"admission: queued={self.scale.queued} executors={self.scale.executors} "
            f"admitted_per_s={self.saturation.admitted_per_core_s:.0f} p50_ms={p50_ms:.3f} p99_ms={p99_ms:.3f}"
        )


def percentiles_ms(seconds: Sequence[float]) -> tuple[float, float]:
    """Median and 99th percentile of some seconds, in milliseconds; 0 of nothing."""
    if not seconds:
        return 0.0, 0.0
    ordered = sorted(seconds)
    return 1000 * ordered[len(ordered) // 2], 1000 * ordered[len(ordered) * 99 // 100]
