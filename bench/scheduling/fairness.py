"""One tenant floods: how the others fare, and what keeps them from harm.

The others' first token waits for three things: a turn in the ledger's line, a seat on the executor, and the prompt.
Where they wait how long says which of them the flood makes longer.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from inflight.bench.scheduling.figures import Figures, measured, tokens_per_s, wait_figures
from inflight.bench.scheduling.lab import ROOMY, Comparison, Lab, Mode, change
from inflight.bench.simulation.invariants import Record
from inflight.bench.simulation.sim_executor import ExecutorShape
from inflight.bench.simulation.world import World, WorldSettings
from inflight.bench.timeline.traffic import SimRequest, heavy_tailed, one_by_one
from inflight.router.ledger.types import DEFAULT_TENANT, NO_LIMITS, TenantLimits

NINE_PER_S, BUSY_PER_S, SHARE_PER_S, FLOOD_PER_S = 60.0, 40.0, 12.0, 200.0
FLOODER = "flooder"
# Of 64 seats. The nine need about half of them.
MAX_RUNNING = (24, 16, 8)
# What the ids of the nine's requests begin with, and of the tenth's.
NINE, TENTH = "q", "f"
NO_FLOOD, SHARE, BUSY = "no flood: the tenth is away", "no flood: the tenth sends its share", "no flood, but busy"
FAIR, FIRST_COME = "flood, fair shares (VTC)", "flood, first come, first served"
NO_STANDBY = replace(ROOMY, num_standby=0)


@dataclass(frozen=True, slots=True)
class Way:
    """The requests and the executor of one mode."""

    name: str
    requests: Sequence[SimRequest]
    executor: ExecutorShape = field(default=ROOMY)


def fairness(lab: Lab) -> Comparison:
    """Nine tenants beside a tenth that floods: with fair shares, with more than that, and without any."""
    duration_s = 40 * lab.scale
    modes = []
    for way in ways_to_bear_a_flood(lab, duration_s):
        settings = WorldSettings(executor=way.executor, num_executors=2, duration_s=duration_s)
        world = lab.run(f"fairness {way.name}", settings, way.requests)
        modes.append(Mode(way.name, _figures(world)))
    of = {mode.name: mode.figures for mode in modes}
    shielded = [mode.name for mode in modes if mode.name.startswith("flood")]
    baselines = [NO_FLOOD, SHARE, BUSY]
    found = tuple(
        f"the nine's TTFT p99 under {name}: "
        + ", ".join(f"{change(of[name].ttft_p99_ms, of[quiet].ttft_p99_ms)} against {quiet}" for quiet in baselines)
        + _cost_to_tenth(name, of)
        for name in shielded
    )
    setting = (
        f"2 executors of {ROOMY.num_seats} seats that serve about 120 requests/s; nine tenants with {NINE_PER_S:g} "
        f"requests/s together; a tenth with {FLOOD_PER_S:g}, or with its share, {SHARE_PER_S:g}, or away, also while "
        f"nine more send {BUSY_PER_S:g}; requests and TTFT are those of the first nine"
    )
    return Comparison("Fair shares when one tenant floods", setting, tuple(modes), found)


def ways_to_bear_a_flood(lab: Lab, duration_s: float) -> list[Way]:
    """Without a flood, with one, and with what helps."""
    rng = random.Random(f"{lab.seed}/fairness")
    lengths = heavy_tailed(max_tokens=512, median_output=60)

    def come(rate_per_s: float, name: str, prefix: str, tenant: str) -> list[SimRequest]:
        return one_by_one(lengths, lab.arrivals(rate_per_s, duration_s, name), rng, prefix, tenant=tenant)

    nine = [_of_tenant(request, "tenant") for request in come(NINE_PER_S, "calm", NINE, DEFAULT_TENANT)]
    flood = _merged(nine, come(FLOOD_PER_S, "flood", TENTH, FLOODER))
    others = [_of_tenant(request, "other") for request in come(BUSY_PER_S, "others", "o", DEFAULT_TENANT)]
    share = come(SHARE_PER_S, "share", TENTH, FLOODER)
    return [
        Way(NO_FLOOD, nine),
        Way(SHARE, _merged(nine, share)),
        Way(BUSY, _merged(nine, others)),
        Way(FAIR, flood),
        Way(f"{FAIR}, no standby", flood, NO_STANDBY),
        Way("flood, the nine in a class above", [_above(request) for request in flood]),
        *(Way(f"{FAIR}, max_running {most} for the tenth", _limited(flood, most)) for most in MAX_RUNNING),
        Way(FIRST_COME, [replace(request, tenant=DEFAULT_TENANT) for request in flood]),
    ]


def _figures(world: World) -> Figures:
    figures = measured(world, _is_of_nine)
    records = world.checker.records.values()
    tenth = tokens_per_s(world, [record for record in records if record.request.request_id.startswith(TENTH)])
    return replace(figures, extra={**wait_figures(world, filter(_is_of_nine, records)), "tenth's tokens/s": tenth})


def _cost_to_tenth(name: str, of: dict[str, Figures]) -> str:
    if name in (FAIR, FIRST_COME):
        return ""
    ours, theirs = (of[one].extra["tenth's tokens/s"] for one in (name, FAIR))
    return f"; the tenth's tokens/s {change(ours, theirs)} against {FAIR}"


def _is_of_nine(record: Record) -> bool:
    return record.request.request_id.startswith(NINE)


def _above(request: SimRequest) -> SimRequest:
    is_of_nine = request.request_id.startswith(NINE)
    return replace(request, priority_class=1 if is_of_nine else 2)


def _of_tenant(request: SimRequest, name: str) -> SimRequest:
    return replace(request, tenant=f"{name}{request.number % 9}")


def _merged(*traces: Sequence[SimRequest]) -> list[SimRequest]:
    """In order of arrival. A request's tokens follow from its number, so each gets one of its own."""
    requests = sorted((request for trace in traces for request in trace), key=lambda request: request.arrival_us)
    return [replace(request, number=number) for number, request in enumerate(requests)]


def _limited(requests: Sequence[SimRequest], max_running: int) -> list[SimRequest]:
    limits = {FLOODER: TenantLimits(max_running=max_running)}
    return [replace(request, limits=limits.get(request.tenant, NO_LIMITS)) for request in requests]
