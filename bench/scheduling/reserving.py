"""Reservations on executors with few blocks: max_utilization against guaranteed_no_evict."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from inflight.bench.scheduling.figures import Figures, measured
from inflight.bench.scheduling.lab import Comparison, Lab, Mode, change
from inflight.bench.simulation.sim_executor import ExecutorShape
from inflight.bench.simulation.world import World, WorldSettings
from inflight.bench.timeline.traffic import Lengths, SimRequest, heavy_tailed, published
from inflight.executor.scheduler.scheduler import SchedulerPolicy

SEATS = 48
# About a third of what 48 heavy-tailed requests reserve to their end, and hardly enough for what they use.
TIGHT = ExecutorShape(num_blocks=1200, num_seats=SEATS, num_standby=4, max_num_tokens=2048, num_host_blocks=800)


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


def _run(
    lab: Lab,
    name: str,
    requests: Sequence[SimRequest],
    duration_s: float,
    policy: SchedulerPolicy,
    max_inter_token_ms: float = 0.0,
) -> World:
    shape = replace(TIGHT, policy=policy, max_inter_token_ms=max_inter_token_ms)
    settings = WorldSettings(executor=shape, num_executors=2, duration_s=duration_s)
    return lab.run(f"{name} {policy.value} {max_inter_token_ms:g}", settings, requests)


def _gain(ours: Figures, theirs: Figures) -> str:
    return (
        f"{change(ours.output_tokens_per_s, theirs.output_tokens_per_s)} output tokens/s, "
        f"{change(ours.inter_token_p99_ms, theirs.inter_token_p99_ms)} inter-token p99, and computes "
        f"{ours.extra['recomputed %']:.2f} % of its tokens again"
    )


def _setting(rate_per_s: float, duration_s: float) -> str:
    return f"2 executors of {SEATS} seats and {TIGHT.num_blocks} blocks, {rate_per_s:g} requests/s for {duration_s:g} s"
