"""A schedule of faults, drawn from a seed before the simulation starts."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum

from inflight.bench.timeline.timeline import US_PER_MS, US_PER_S


class FaultKind(Enum):
    ROUTER_CRASH = "router_crash"
    ROUTER_DOOM = "router_doom"
    """As a crash, but between the next few operations of the router."""
    ROUTER_HANG = "router_hang"
    EXECUTOR_CRASH = "executor_crash"
    EXECUTOR_DOOM = "executor_doom"
    EXECUTOR_HANG = "executor_hang"
    LINK_BREAK = "link_break"
    STORE_EMPTY = "store_empty"
    STORE_AWAY = "store_away"
    STORE_CLOCK_BACK = "store_clock_back"
    STORE_STALE = "store_stale"


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault. `place` chooses among what can break; `duration_us` is until it is back."""

    at_us: int
    kind: FaultKind
    place: int
    duration_us: int
    num_operations: int


@dataclass(frozen=True, slots=True)
class FaultRates:
    """How often each kind happens, per minute over the whole system."""

    router_crash: float = 0.0
    router_doom: float = 0.0
    router_hang: float = 0.0
    executor_crash: float = 0.0
    executor_doom: float = 0.0
    executor_hang: float = 0.0
    link_break: float = 0.0
    store_empty: float = 0.0
    store_away: float = 0.0
    store_clock_back: float = 0.0
    store_stale: float = 0.0

    @classmethod
    def of(cls, kinds: str, per_minute: float) -> FaultRates:
        """`all`, `none`, or some kinds with commas between them, each so often."""
        names = [kind.value for kind in FaultKind]
        chosen = {"all": names, "none": [], "": []}.get(kinds, kinds.split(","))
        if unknown := [name for name in chosen if name not in names]:
            raise ValueError(f"{unknown[0]!r} is no fault; there are {', '.join(names)}")
        return cls(**dict.fromkeys(chosen, per_minute))

    def schedule(self, seed: int, until_us: int) -> list[Fault]:
        """Returns all faults of a run, by time."""
        faults = [fault for kind in FaultKind for fault in self._of_kind(kind, seed, until_us)]
        return sorted(faults, key=lambda fault: (fault.at_us, fault.kind.value))

    def _of_kind(self, kind: FaultKind, seed: int, until_us: int) -> Iterator[Fault]:
        rate: float = getattr(self, kind.value)
        rng = random.Random(f"{seed}/faults/{kind.value}")
        at_us = 0
        while rate > 0:
            at_us += round(rng.expovariate(rate / 60) * US_PER_S)
            if at_us > until_us:
                return
            # From a hiccup to beyond every lease (5 s).
            duration_us = round(US_PER_MS * 10 ** rng.uniform(1, 4.1))
            yield Fault(at_us, kind, rng.randrange(1 << 30), duration_us, rng.randrange(0, 12))


@dataclass(frozen=True, slots=True)
class SpacedFaults:
    """One kind of fault, again and again, so far apart that each is over before the next."""

    kind: FaultKind
    every_s: float
    duration_s: float

    def schedule(self, seed: int, until_us: int) -> list[Fault]:
        """Returns all faults of a run, by time."""
        rng = random.Random(f"{seed}/faults/{self.kind.value}")
        every_us, duration_us = round(self.every_s * US_PER_S), round(self.duration_s * US_PER_S)
        return [
            Fault(at_us + rng.randrange(US_PER_S), self.kind, rng.randrange(1 << 30), duration_us, rng.randrange(0, 12))
            for at_us in range(every_us // 2, until_us, every_us)
        ]


NO_FAULTS = FaultRates()
