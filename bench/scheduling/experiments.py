"""The comparisons: what runs against what, on which requests, and what is said of it.

Devices are modelled on an 8B model on an H200 (`device.H200`); `scale` stretches or shrinks the time that is simulated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from inflight.bench.scheduling.fairness import fairness
from inflight.bench.scheduling.figures import deadline_figures, measured
from inflight.bench.scheduling.lab import ROOMY, Comparison, Lab, Mode
from inflight.bench.scheduling.placing import agents, shared_prefixes
from inflight.bench.scheduling.reserving import reserve_policies, reserve_traces
from inflight.bench.simulation.world import WorldSettings
from inflight.bench.timeline.traffic import heavy_tailed


def deadlines(lab: Lab) -> Comparison:
    """More requests than can be served, each wanting its first token within 2 s."""
    duration_s, rate_per_s, deadline_ms = 40 * lab.scale, 200.0, 2_000
    requests = [
        replace(request, first_token_deadline_ms=deadline_ms)
        for request in lab.trace(heavy_tailed(max_tokens=512), rate_per_s, duration_s)
    ]
    settings = WorldSettings(executor=ROOMY, num_executors=2, duration_s=duration_s)
    modes = []
    for name, tells in [("told", True), ("not told", False)]:
        told = [replace(request, tells_deadline=tells) for request in requests]
        world = lab.run(f"deadlines {name}", settings, told)
        extra = deadline_figures(world, world.checker.records.values())
        modes.append(Mode(name, replace(measured(world), extra=extra)))
    with_refusal, without = (mode.figures.extra for mode in modes)
    found = (
        f"goodput {with_refusal['goodput requests/s']:.1f} requests/s with refusal at once, "
        f"{without['goodput requests/s']:.1f} without; begun when dead: {with_refusal['begun when dead']:.0f} "
        f"against {without['begun when dead']:.0f}",
    )
    setting = f"2 executors of 32 seats, {rate_per_s:g} requests/s, first token within {deadline_ms} ms"
    return Comparison("Deadline refusal under overload", setting, tuple(modes), found)


def all_comparisons() -> Sequence[Callable[[Lab], Comparison]]:
    """Everything, in the order of the report. Each is known by its place here."""
    return [
        *(partial(reserve_policies, trace=trace) for trace in reserve_traces()),
        fairness,
        shared_prefixes,
        agents,
        deadlines,
    ]
