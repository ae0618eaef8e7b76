"""The results of the ledger's benchmark. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from inflight.bench.ledger.scale import PoolScale
from inflight.bench.ledger.server import NOTHING, SCRIPT, Usage, Usages
from inflight.bench.measures.run import percentile

SETTLED = (1, 4, 16)
"""Ends in one settle: a router settles those of a step frame together."""
PLACED = "submit, seated at once"
QUEUED = "submit, queued"
BATCHED = (4, 16)
"""Submits in one call: as many as come while the calls before them are under way."""
UNFILLED = f"settle of {SETTLED[-1]}, empty queue"
REPORT = "report with audit"
REPORTS_TOGETHER = 8
REPORTS = f"reports of {REPORTS_TOGETHER}"
REAP = "reap, nothing to remove"
CANCEL = "cancel, queued"


def batched(num_submits: int) -> str:
    """Returns the name of submitting so many in one call."""
    return f"submits of {num_submits}, queued"


def refilled(num_ends: int) -> str:
    """Returns the name of settling so many at once while others wait for their seats."""
    return f"settle of {num_ends}, refilled"


@dataclass(slots=True)
class ScriptCost:
    """What one kind of script call costs Redis, summed over many."""

    script: Usage = NOTHING
    inner: dict[str, Usage] = field(default_factory=dict)
    cpu_s: float = 0.0
    """Redis' processor time, requests and replies included. Where other work takes the core, only this counts."""

    def add(self, used: Usages, cpu_s: float = 0.0) -> None:
        """Adds a difference of usages in which only this kind of script ran."""
        self.cpu_s += cpu_s
        self.script += used.get(SCRIPT, NOTHING)
        for name, usage in used.items():
            if name not in (SCRIPT, "info", "xread"):
                self.inner[name] = self.inner.get(name, NOTHING) + usage

    @property
    def us(self) -> float:
        """Microseconds of a call."""
        return self.script.us / max(1, self.script.calls)

    @property
    def cpu_us(self) -> float:
        """Microseconds of processor time for a call."""
        return 1e6 * self.cpu_s / max(1, self.script.calls)

    @property
    def num_commands(self) -> float:
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
    load_cpu_s: float
    """Of this load generator."""
    num_refused: int = 0
    """Whose deadline could not be met when they came."""
    num_dropped: int = 0
    """Whose deadline passed while they waited."""

    @property
    def admitted_per_core_s(self) -> float:
        """Requests per second of Redis' processor time."""
        return self.num_admitted / self.redis_cpu_s

    @property
    def redis_us(self) -> float:
        """Microseconds of Redis' processor time for an admitted request, everything else that it did included."""
        return 1e6 * self.redis_cpu_s / max(1, self.num_admitted)

    @property
    def admitted_per_wall_s(self) -> float:
        """Requests per second of this run."""
        return self.num_admitted / self.wall_s

    @property
    def busy(self) -> float:
        """The share of the time in which Redis had a core."""
        return self.redis_cpu_s / self.wall_s

    @property
    def load_busy(self) -> float:
        """The share of the time in which the load generator had a core."""
        return self.load_cpu_s / self.wall_s


@dataclass(frozen=True, slots=True)
class Latency:
    """Milliseconds at a moderate rate, p50 and p99. The load's own lateness is not in them."""

    rate_per_s: float
    busy: float
    submit_ms: tuple[float, float]
    """The round trip of a submit."""
    seat_ms: tuple[float, float]
    """From an end until the owner of a request that the same call placed on that executor knows of it."""
    late_ms: tuple[float, float]
    """By how much the load sent later than it meant to."""


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
    allocator: str = ""
    """Of the server's memory."""

    @property
    def line(self) -> str:
        """The result in one line."""
        submit_ms, seat_ms = self.latency.submit_ms, self.latency.seat_ms
        return (
            f"admission: queued={self.scale.queued} executors={self.scale.executors} routers={self.scale.routers} "
            f"admitted_per_s={self.saturation.admitted_per_wall_s:.0f} redis_us={self.saturation.redis_us:.1f} "
            f"submit_p50_ms={submit_ms[0]:.3f} submit_p99_ms={submit_ms[1]:.3f} "
            f"seat_p50_ms={seat_ms[0]:.3f} seat_p99_ms={seat_ms[1]:.3f}"
        )


def percentiles_ms(seconds: Sequence[float]) -> tuple[float, float]:
    """Median and 99th percentile of some seconds, in milliseconds; 0 of nothing."""
    p50, p99 = (percentile(seconds, fraction) or 0.0 for fraction in (0.5, 0.99))
    return 1000 * p50, 1000 * p99
