"""Reservations on executors with few blocks: max_utilization against guaranteed_no_evict, and requests without
max_tokens."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace

from inflight.bench.scheduling.figures import Figures, measured
from inflight.bench.scheduling.lab import Comparison, Lab, Mode, change
from inflight.bench.simulation.sim_executor import ExecutorShape
from inflight.bench.simulation.world import World, WorldSettings
from inflight.bench.timeline.timeline import US_PER_S
from inflight.bench.timeline.traffic import Lengths, SimRequest, heavy_tailed, one_by_one, prompt_of, published
from inflight.executor.scheduler.scheduler import SchedulerPolicy

SEATS = 48
# About a third of what 48 heavy-tailed requests reserve to their end, and hardly enough for what they use.
TIGHT = ExecutorShape(num_blocks=1200, num_seats=SEATS, num_standby=4, max_num_tokens=2048, num_host_blocks=800)
# Of the time that is simulated: when lengths change.
CHANGE_FRACTION = 0.4
# Requests a second, and what half of their outputs exceed.
BEFORE, AFTER = (40.0, 60.0), (160.0, 400.0)
# Output tokens reserved at a time where a request sets no max_tokens; the first is the router's default.
RESERVATIONS = (1024, 256)
CHANGING_MODES = (
    (SchedulerPolicy.GUARANTEED_NO_EVICT, TIGHT.num_host_blocks),
    (SchedulerPolicy.MAX_UTILIZATION, TIGHT.num_host_blocks),
    (SchedulerPolicy.MAX_UTILIZATION, 0),
)


@dataclass(frozen=True, slots=True)
class ReserveTrace:
    """More requests than can be served. Where they are `generous`, outputs are much shorter than their max_tokens."""

    name: str
    lengths: Lengths
    rate_per_s: float
    generous: bool = False


def reserve_traces() -> Sequence[ReserveTrace]:
    """Returns the traces, in the order of the report."""
    return (
        ReserveTrace("heavy-tailed, outputs far below max_tokens", heavy_tailed(), 110.0, generous=True),
        ReserveTrace("mixed, max_tokens three times the longest output", published("mixed", 3.0), 30.0, generous=True),
        ReserveTrace("mixed, max_tokens exact", published("mixed"), 40.0),
        ReserveTrace("short, max_tokens exact", published("short"), 340.0),
        ReserveTrace("long, max_tokens exact", published("long"), 24.0),
        ReserveTrace("chat, max_tokens three times the longest output", published("chat", 3.0), 110.0, generous=True),
    )


def reserve_policies(lab: Lab, trace: ReserveTrace) -> Comparison:
    """Both policies as they are; where there is much to gain, also both held to the same longest step: as long as
    guaranteed_no_evict's slowest one in a hundred."""
    duration_s = 40 * lab.scale
    requests = lab.trace(trace.lengths, trace.rate_per_s, duration_s)
    modes = [Mode(p.value, measured(_run(lab, trace.name, requests, duration_s, p))) for p in SchedulerPolicy]
    guaranteed, overcommitted = (mode.figures for mode in modes)
    found = [f"max_utilization gives {_gain(overcommitted, guaranteed)}"]
    if trace.generous:
        longest_ms = round(guaranteed.inter_token_p99_ms or 0.0, 1)
        for policy in SchedulerPolicy:
            world = _run(lab, trace.name, requests, duration_s, policy, longest_ms)
            modes.append(Mode(f"{policy.value}, max_inter_token_ms={longest_ms:g}", measured(world)))
        both, bounded = modes[-2].figures, modes[-1].figures
        found.append(
            f"max_utilization held to max_inter_token_ms={longest_ms:g} gives {_gain(bounded, guaranteed)}, against "
            f"guaranteed_no_evict as it is; against it with the same bound, {_gain(bounded, both)}"
        )
    title = f"How much to reserve: {trace.name}"
    return Comparison(title, _setting(trace.rate_per_s, duration_s), tuple(modes), tuple(found))


def changing_lengths(lab: Lab) -> Comparison:
    """From one moment on outputs are seven times as long and four times as many come, so that executors fill up with
    sequences for which too little is reserved."""
    duration_s = 60 * lab.scale
    change_us = round(CHANGE_FRACTION * duration_s * US_PER_S)
    early, late = (
        one_by_one(
            heavy_tailed(median_output=median),
            lab.arrivals(rate_per_s, duration_s, f"changing {median:g}"),
            random.Random(f"{lab.seed}/changing/{median:g}"),
        )
        for rate_per_s, median in (BEFORE, AFTER)
    )
    before = [request for request in early if request.arrival_us < change_us]
    after = [request for request in late if request.arrival_us >= change_us]
    requests = [_renumbered(request, number) for number, request in enumerate([*before, *after])]
    modes = []
    for policy, num_host_blocks in CHANGING_MODES:
        name = policy.value if num_host_blocks else f"{policy.value}, no host memory"
        world = _run(lab, "changing", requests, duration_s, policy, num_host_blocks=num_host_blocks)
        figures = measured(world)
        extra = {"tokens/s after change": _speed_after(world, change_us), **figures.extra}
        modes.append(Mode(name, replace(figures, extra=extra)))
    guaranteed, *others = modes
    found = tuple(
        f"{mode.name} gives {_gain(mode.figures, guaranteed.figures)}; after the change "
        f"{_change_of('tokens/s after change', mode.figures, guaranteed.figures)} output tokens/s, with "
        f"{mode.figures.extra['preemptions']:.0f} preemptions in all"
        for mode in others
    )
    setting = (
        f"2 executors of {SEATS} seats and {TIGHT.num_blocks} blocks for {duration_s:g} s; {BEFORE[0]:g} requests/s of "
        f"which half exceed {BEFORE[1]:g} output tokens, and from {change_us / US_PER_S:g} s on {AFTER[0]:g} and "
        f"{AFTER[1]:g}, of at most 1024"
    )
    return Comparison("How much to reserve: outputs longer from one moment on", setting, tuple(modes), found)


def open_ended(lab: Lab) -> Comparison:
    """Requests without max_tokens: the rest of the context is reserved at once, or a part at a time."""
    duration_s, rate_per_s = 40 * lab.scale, 80.0
    shape = replace(TIGHT, has_prefix_cache=True)
    requests = [
        replace(request, max_tokens=shape.context_length - len(request.prompt))
        for request in lab.trace(heavy_tailed(max_tokens=2048), rate_per_s, duration_s)
    ]
    modes = []
    for num_tokens in (shape.context_length, *RESERVATIONS):
        asked = [replace(request, reservation_tokens=num_tokens) for request in requests]
        settings = WorldSettings(executor=shape, num_executors=2, duration_s=duration_s)
        world = lab.run(f"open ended {num_tokens}", settings, asked)
        records = world.checker.records.values()
        extra = {
            "output tokens per step": world.checker.num_tokens / sum(one.engine.num_steps for one in world.executors),
            "placements per request": sum(one.num_placements for one in records)
            / max(1, sum(one.num_placements > 0 for one in records)),
            "computed tokens per output token": sum(one.scheduler.num_computed_tokens for one in world.executors)
            / max(1, world.checker.num_tokens),
        }
        name = "the whole context" if num_tokens == shape.context_length else f"{num_tokens} tokens at a time"
        modes.append(Mode(name, replace(measured(world), extra=extra)))
    whole, *parts = modes
    found = tuple(
        f"{mode.name}: {change(mode.figures.output_tokens_per_s, whole.figures.output_tokens_per_s)} output tokens/s, "
        f"{mode.figures.extra['output tokens per step']:.1f} output tokens per step against "
        f"{whole.figures.extra['output tokens per step']:.1f}, "
        f"TTFT p99 {change(mode.figures.ttft_p99_ms, whole.figures.ttft_p99_ms)}"
        for mode in parts
    )
    setting = (
        f"{_setting(rate_per_s, duration_s)}; a context of {shape.context_length} tokens; half of the outputs are "
        "shorter than 90 tokens and some reach 2,048"
    )
    return Comparison("How much to reserve: no max_tokens", setting, tuple(modes), found)


def _renumbered(request: SimRequest, number: int) -> SimRequest:
    prompt = prompt_of(number, len(request.prompt))
    return replace(request, number=number, request_id=f"q{number}", prompt=prompt)


def _run(
    lab: Lab,
    name: str,
    requests: Sequence[SimRequest],
    duration_s: float,
    policy: SchedulerPolicy,
    max_inter_token_ms: float = 0.0,
    num_host_blocks: int = TIGHT.num_host_blocks,
) -> World:
    shape = replace(TIGHT, policy=policy, max_inter_token_ms=max_inter_token_ms, num_host_blocks=num_host_blocks)
    settings = WorldSettings(executor=shape, num_executors=2, duration_s=duration_s)
    return lab.run(f"{name} {policy.value} {max_inter_token_ms:g}", settings, requests)


def _speed_after(world: World, change_us: int) -> float:
    begin_us = world.begin_us + change_us
    end_us = world.begin_us + round(world.settings.duration_s * US_PER_S)
    return world.checker.tokens_between(begin_us, end_us) / ((end_us - begin_us) / US_PER_S)


def _gain(ours: Figures, theirs: Figures) -> str:
    return (
        f"{change(ours.output_tokens_per_s, theirs.output_tokens_per_s)} output tokens/s, "
        f"{change(ours.inter_token_p99_ms, theirs.inter_token_p99_ms)} inter-token p99, and computes "
        f"{ours.extra['recomputed %']:.2f} % of its tokens again"
    )


def _change_of(name: str, ours: Figures, theirs: Figures) -> str:
    return change(ours.extra[name], theirs.extra[name])


def _setting(rate_per_s: float, duration_s: float) -> str:
    return f"2 executors of {SEATS} seats and {TIGHT.num_blocks} blocks, {rate_per_s:g} requests/s for {duration_s:g} s"
