"""Comparisons of scheduling modes, and their runs. All modes get the same requests at the same times."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

from inflight.bench.scheduling.figures import Figures
from inflight.bench.simulation.sim_executor import ExecutorShape
from inflight.bench.simulation.world import World, WorldSettings
from inflight.bench.timeline.timeline import US_PER_S
from inflight.bench.timeline.traffic import Lengths, SimRequest, one_by_one, poisson_us

# Enough blocks for all requests: seats are scarce.
ROOMY = ExecutorShape(num_blocks=8192, num_seats=32, num_standby=4, max_num_tokens=2048)


@dataclass(frozen=True, slots=True)
class Mode:
    """One mode and its figures."""

    name: str
    figures: Figures


@dataclass(frozen=True, slots=True)
class Comparison:
    """One trace in several modes; `found` says what follows."""

    title: str
    setting: str
    modes: tuple[Mode, ...]
    found: tuple[str, ...]

    def of(self, name: str) -> Figures:
        return next(mode.figures for mode in self.modes if mode.name == name)


@dataclass(frozen=True, slots=True)
class Lab:
    """Makes and runs simulated worlds."""

    url: str
    seed: int
    scale: float
    on_run: Callable[[str], None] = field(default=lambda name: None)

    def run(self, name: str, settings: WorldSettings, requests: Iterable[SimRequest]) -> World:
        """One run of the window in which requests arrive. Its invariants are checked as in every simulation."""
        self.on_run(name)
        world = World(self.url, f"compare-{name.replace(' ', '-')}", replace(settings, seed=self.seed), requests)
        try:
            world.run_window()
        finally:
            world.close()
        return world

    def arrivals(self, rate_per_s: float, duration_s: float, name: str = "arrivals") -> list[int]:
        """Times of a Poisson process."""
        arrivals: list[int] = []
        for at_us in poisson_us(rate_per_s, random.Random(f"{self.seed}/{name}")):
            if at_us > duration_s * US_PER_S:
                return arrivals
            arrivals.append(at_us)
        return arrivals

    def trace(self, lengths: Lengths, rate_per_s: float, duration_s: float) -> list[SimRequest]:
        """Independent requests."""
        rng = random.Random(f"{self.seed}/lengths/{lengths.name}")
        return one_by_one(lengths, self.arrivals(rate_per_s, duration_s), rng)


def change(ours: float | None, theirs: float | None) -> str:
    """`+23.4 %`."""
    if not ours or not theirs:
        return "–"
    return f"{100 * (ours / theirs - 1):+.1f} %"
