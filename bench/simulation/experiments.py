"""The comparisons: what runs against what, on which requests, and what is said of it.

All modes of an experiment get the same requests at the same times. Devices are modelled on an 8B model on an H200
(`device.H200`); `scale` stretches or shrinks the time that is simulated.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace

from bench.simulation.conversations import Conversations
from bench.simulation.figures import Figures, deadline_figures, measured
from bench.simulation.push import PushPolicy
from bench.simulation.sim_executor import ExecutorShape
from bench.simulation.timeline import US_PER_S
from bench.simulation.traffic import Lengths, SimRequest, heavy_tailed, one_by_one, poisson_us, published
from bench.simulation.witness import Record
from bench.simulation.world import World, WorldSettings
from executor.scheduler import SchedulerPolicy
from router.store.types import TenantLimits

SEATS = 48
# About a third of what 48 heavy-tailed requests reserve to their end, and hardly enough for what they use.
TIGHT = ExecutorShape(num_blocks=1200, num_seats=SEATS, num_standby=4, max_num_tokens=2048)
# Blocks for everybody: seats are what is short.
ROOMY = ExecutorShape(num_blocks=8192, num_seats=32, num_standby=4, max_num_tokens=2048)
FLOODER = "flooder"


@dataclass(frozen=True, slots=True)
class Mode:
    """One way of doing it, and how it went."""

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
        """The figures of a mode."""
        return next(mode.figures for mode in self.modes if mode.name == name)


@dataclass(frozen=True, slots=True)
class Lab:
    """Where worlds are made and run."""

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


def reserve_policies(lab: Lab, name: str, lengths: Lengths, rate_per_s: float) -> Comparison:
    """max_utilization against guaranteed_no_evict, with more requests than can be served."""
    duration_s = 40 * lab.scale
    requests = lab.trace(lengths, rate_per_s, duration_s)
    modes = []
    for policy in SchedulerPolicy:
        shape = replace(TIGHT, policy=policy, num_host_blocks=800)
        settings = WorldSettings(executor=shape, num_executors=2, duration_s=duration_s)
        world = lab.run(f"{name} {policy.value}", settings, requests)
        modes.append(Mode(policy.value, measured(world)))
    guaranteed, overcommitted = (mode.figures for mode in modes)
    found = (
        f"max_utilization gives {_change(overcommitted.output_tokens_per_s, guaranteed.output_tokens_per_s)} output "
        f"tokens/s, {_change(overcommitted.inter_token_p99_ms, guaranteed.inter_token_p99_ms)} inter-token p99, and "
        f"computes {overcommitted.extra['recomputed %']:.2f} % of its tokens again",
    )
    setting = (
        f"2 executors of {SEATS} seats and {TIGHT.num_blocks} blocks, {rate_per_s:g} requests/s for {duration_s:g} s"
    )
    return Comparison(f"How much to reserve: {name}", setting, tuple(modes), found)


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
        f"the central queue's TTFT p99 is {_change(central.ttft_p99_ms, mode.figures.ttft_p99_ms)} against {mode.name}"
        for mode in modes[1:]
    )
    setting = f"{num_executors} executors of {shape.num_seats} seats, {rate_per_s:g} heavy-tailed requests/s"
    return Comparison("Late binding against push", setting, tuple(modes), found)


def fairness(lab: Lab) -> Comparison:
    """One tenant floods; how the others fare, with fair shares and first come, first served."""
    duration_s = 40 * lab.scale
    lengths = heavy_tailed(max_tokens=512, median_output=60)
    rng = random.Random(f"{lab.seed}/fairness")
    calm = [
        replace(request, tenant=f"tenant{request.number % 9}")
        for request in one_by_one(lengths, lab.arrivals(60, duration_s, "calm"), rng)
    ]
    flood = one_by_one(lengths, lab.arrivals(200, duration_s, "flood"), rng, "f", tenant=FLOODER)
    both = sorted([*calm, *flood], key=lambda request: request.arrival_us)
    others = one_by_one(lengths, lab.arrivals(40, duration_s, "others"), rng, "o")
    spread = [replace(request, tenant=f"other{request.number % 9}") for request in others]
    merged = [replace(request, number=number) for number, request in enumerate(both)]
    in_one_line = [replace(request, tenant="default", limits=TenantLimits()) for request in merged]
    busy = sorted([*calm, *spread], key=lambda request: request.arrival_us)
    traces = {
        "no flood": calm,
        "no flood, but busy": busy,
        "fair shares (VTC)": merged,
        "first come, first served": in_one_line,
    }
    settings = WorldSettings(executor=ROOMY, num_executors=2, duration_s=duration_s)
    modes = [
        Mode(name, measured(lab.run(f"fairness {name}", settings, requests), _is_calm))
        for name, requests in traces.items()
    ]
    quiet, busy_figures, fair, fifo = (mode.figures for mode in modes)
    found = tuple(
        f"the nine's TTFT p99 under the flood, against {name}: {_change(fair.ttft_p99_ms, calm_figures.ttft_p99_ms)} "
        f"with fair shares, {_change(fifo.ttft_p99_ms, calm_figures.ttft_p99_ms)} first come, first served"
        for name, calm_figures in [("an idle pool", quiet), ("a pool that others keep as busy", busy_figures)]
    )
    setting = (
        "2 executors of 32 seats, nine tenants with 60 requests/s together, a tenth with 200 or nine more with 40; "
        "figures of the first nine"
    )
    return Comparison("Fair shares when one tenant floods", setting, tuple(modes), found)


def _is_calm(record: Record) -> bool:
    return record.request.request_id.startswith("q")


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
        cached = sum(record.cached_tokens for record in world.witness.records.values())
        asked = sum(len(record.request.prompt) for record in world.witness.records.values())
        modes.append(
            Mode(name, replace(figures, extra={**figures.extra, "prompt tokens cached %": 100 * cached / asked}))
        )
    by_prefix, by_room = (mode.figures for mode in modes)
    saved = _change(100 - by_prefix.extra["prompt tokens cached %"], 100 - by_room.extra["prompt tokens cached %"])
    found = (
        f"prompt tokens that must be computed: {saved} by prefix affinity; "
        f"TTFT p50 {_change(by_prefix.ttft_p50_ms, by_room.ttft_p50_ms)}, "
        f"p99 {_change(by_prefix.ttft_p99_ms, by_room.ttft_p99_ms)}",
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
        extra = deadline_figures(world, world.witness.records.values())
        modes.append(Mode(name, replace(measured(world), extra=extra)))
    with_refusal, without = (mode.figures.extra for mode in modes)
    found = (
        f"goodput {with_refusal['goodput requests/s']:.1f} requests/s with refusal at once, "
        f"{without['goodput requests/s']:.1f} without; begun when dead: {with_refusal['begun when dead']:.0f} "
        f"against {without['begun when dead']:.0f}",
    )
    setting = f"2 executors of 32 seats, {rate_per_s:g} requests/s, first token within {deadline_ms} ms"
    return Comparison("Deadline refusal under overload", setting, tuple(modes), found)


def all_comparisons(lab: Lab) -> Sequence[Comparison]:
    """Everything, in the order of the report."""
    traces = [
        ("heavy-tailed, outputs far below max_tokens", heavy_tailed(), 110.0),
        ("mixed, max_tokens three times the longest output", published("mixed", 3.0), 30.0),
        ("mixed, max_tokens exact", published("mixed"), 40.0),
        ("short, max_tokens exact", published("short"), 340.0),
        ("long, max_tokens exact", published("long"), 24.0),
        ("chat, max_tokens three times the longest output", published("chat", 3.0), 110.0),
    ]
    return [
        *(reserve_policies(lab, name, lengths, rate) for name, lengths, rate in traces),
        late_binding(lab),
        fairness(lab),
        prefix_affinity(lab),
        deadlines(lab),
    ]


def _change(ours: float | None, theirs: float | None) -> str:
    """`+23.4 %`."""
    if not ours or not theirs:
        return "–"
    return f"{100 * (ours / theirs - 1):+.1f} %"
