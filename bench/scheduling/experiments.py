"""The comparisons: what runs against what, on which requests, and what is said of it.

Devices are modelled on an 8B model on an H200 (`device.H200`); `scale` stretches or shrinks the time that is simulated.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

from inflight.bench.scheduling.fairness import fairness
from inflight.bench.scheduling.figures import deadline_figures, measured
from inflight.bench.scheduling.lab import ROOMY, Comparison, Lab, Mode, change
from inflight.bench.scheduling.placing import agents, shared_prefixes
from inflight.bench.scheduling.reserving import changing_lengths, open_ended, reserve_policies, reserve_traces
from inflight.bench.simulation.push import PushPolicy
from inflight.bench.simulation.world import WorldSettings
from inflight.bench.timeline.conversations import Conversations
from inflight.bench.timeline.traffic import heavy_tailed


def late_binding(lab: Lab) -> Comparison:
    """One line for all executors against a line for each."""
    duration_s, rate_per_s, num_executors = 40 * lab.scale, 120.0, 8
    requests = lab.trace(heavy_tailed(), rate_per_s, duration_s)
    shape = replace(ROOMY, num_seats=12)
    modes = []
    for name, push in [("central queue", None), *((policy.value, policy) for policy in PushPolicy)]:
        routers = 1 if push else 4
        settings = WorldSettings(
            executor=shape, num_executors=num_executors, num_routers=routers, push=push, duration_s=duration_s
        )
        modes.append(Mode(name, measured(lab.run(f"binding {name}", settings, requests))))
    central = modes[0].figures
    found = tuple(
        f"the central queue's TTFT p99 is {change(central.ttft_p99_ms, mode.figures.ttft_p99_ms)} against {mode.name}"
        for mode in modes[1:]
    )
    setting = f"{num_executors} executors of {shape.num_seats} seats, {rate_per_s:g} heavy-tailed requests/s"
    return Comparison("Late binding against push", setting, tuple(modes), found)


def prefix_affinity(lab: Lab) -> Comparison:
    """Chats of several turns, placed with and without regard to who holds their beginning."""
    duration_s = 40 * lab.scale
    chats = Conversations(rate_per_s=16.0)
    shape = replace(ROOMY, has_prefix_cache=True)
    settings = WorldSettings(executor=shape, num_executors=4, duration_s=duration_s)
    modes = []
    for name, names_prefixes in [("by prefix", True), ("by room alone", False)]:
        requests = chats.requests(lab.seed, duration_s, names_prefixes=names_prefixes)
        world = lab.run(f"affinity {name}", settings, requests)
        figures = measured(world)
        cached = sum(record.cached_tokens for record in world.checker.records.values())
        asked = sum(len(record.request.prompt) for record in world.checker.records.values())
        modes.append(
            Mode(name, replace(figures, extra={**figures.extra, "prompt tokens cached %": 100 * cached / asked}))
        )
    by_prefix, by_room = (mode.figures for mode in modes)
    saved = change(100 - by_prefix.extra["prompt tokens cached %"], 100 - by_room.extra["prompt tokens cached %"])
    found = (
        f"prompt tokens that must be computed: {saved} by prefix affinity; "
        f"TTFT p50 {change(by_prefix.ttft_p50_ms, by_room.ttft_p50_ms)}, "
        f"p99 {change(by_prefix.ttft_p99_ms, by_room.ttft_p99_ms)}",
    )
    setting = "4 executors of 32 seats, 16 chats/s of 6 turns, prompts from 100 to about 2,000 tokens"
    return Comparison("Prefix affinity on multi-turn chat", setting, tuple(modes), found)


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
        changing_lengths,
        open_ended,
        late_binding,
        fairness,
        prefix_affinity,
        shared_prefixes,
        agents,
        deadlines,
    ]
