"""Placement compared: by prefix until saturation, by load, and by an oracle."""

from __future__ import annotations

from dataclasses import dataclass, replace

from inflight.bench.measures.run import percentile
from inflight.bench.scheduling.figures import Figures, measured, ttft_ms
from inflight.bench.scheduling.lab import Comparison, Lab, Mode, change
from inflight.bench.simulation.push import PushPolicy
from inflight.bench.simulation.sim_executor import ExecutorShape
from inflight.bench.simulation.world import World, WorldSettings
from inflight.bench.timeline.conversations import Conversations
from inflight.bench.timeline.timeline import US_PER_S

NUM_EXECUTORS = 4
# Agents' chats last half a minute, so the first 40 % of the time are left out: they fill an empty system.
DURATION_S = 80.0
WARM_FRACTION = 0.4
CACHING = ExecutorShape(
    num_blocks=16_384, num_seats=32, num_standby=4, max_num_tokens=2048, context_length=65_536, has_prefix_cache=True
)
# One turn each: a long beginning that many share, a short question, a short answer.
SHARED = Conversations(
    num_turns=1, system_tokens=4096, num_systems=256, turn_tokens=(64, 512), output_tokens=(20, 120)
)  # fmt: skip
# Long prompts that grow by the outputs of tools, short answers, pauses.
AGENTIC = Conversations(
    num_turns=8, pause_s=4.0, system_tokens=2048, turn_tokens=(500, 4000), output_tokens=(20, 120)
)  # fmt: skip

P90, CACHED, BUSIEST = "TTFT p90 ms", "prompt tokens cached %", "busiest executor / mean"


@dataclass(frozen=True, slots=True)
class Way:
    """A rule of placement: the ledger's, with or without the names of prefixes, or placement on arrival."""

    name: str
    names_prefixes: bool
    push: PushPolicy | None = None


WAYS = (
    Way("prefix until saturation", names_prefixes=True),
    Way("least loaded", names_prefixes=False),
    Way("oracle", names_prefixes=False, push=PushPolicy.ORACLE),
)


@dataclass(frozen=True, slots=True)
class Trace:
    """Chats, and the loads by the chats that begin per second."""

    title: str
    chats: Conversations
    loads: tuple[tuple[str, float], ...]


TRACES = {
    "shared": Trace("Placement of requests with shared prefixes", SHARED, (("80 %", 90.0), ("saturated", 135.0))),
    "agents": Trace("Placement of agents' requests", AGENTIC, (("80 %", 2.25), ("saturated", 4.5))),
}


def run_way(lab: Lab, trace: Trace, load: str, way: Way) -> Figures:
    """One way on one trace at one load."""
    duration_s = DURATION_S * lab.scale
    settings = WorldSettings(
        executor=CACHING,
        num_executors=NUM_EXECUTORS,
        duration_s=duration_s,
        push=way.push,
    )
    chats = replace(trace.chats, rate_per_s=dict(trace.loads)[load])
    requests = chats.requests(lab.seed, duration_s, names_prefixes=way.names_prefixes)
    return _figures(lab.run(f"{trace.title} {load} {way.name}", settings, requests))


def placement(lab: Lab, trace: Trace) -> Comparison:
    """All ways on one kind of trace, at several rates."""
    modes = [Mode(f"{load}: {way.name}", run_way(lab, trace, load, way)) for load, _ in trace.loads for way in WAYS]
    found = tuple(
        f"{load}, TTFT p90 of {WAYS[0].name}: "
        + ", ".join(
            f"{change(_p90(modes, load, WAYS[0]), _p90(modes, load, other))} against {other.name}" for other in WAYS[1:]
        )
        for load, _ in trace.loads
    )
    setting = f"{NUM_EXECUTORS} executors of {CACHING.num_seats} seats; " + ", ".join(
        f"{load}: {rate * trace.chats.num_turns:g} requests/s" for load, rate in trace.loads
    )
    return Comparison(trace.title, setting, tuple(modes), found)


def shared_prefixes(lab: Lab) -> Comparison:
    """Requests that begin like many others."""
    return placement(lab, TRACES["shared"])


def agents(lab: Lab) -> Comparison:
    """Agents that ask again and again with all that they have so far."""
    return placement(lab, TRACES["agents"])


def _p90(modes: list[Mode], load: str, way: Way) -> float:
    return next(mode.figures.extra[P90] for mode in modes if mode.name == f"{load}: {way.name}")


def _figures(world: World) -> Figures:
    figures, duration_s = measured(world, warm_fraction=WARM_FRACTION), world.settings.duration_s
    begin_us, end_us = (world.begin_us + round(share * duration_s * US_PER_S) for share in (WARM_FRACTION, 1.0))
    records = [one for one in world.checker.records.values() if one.arrived_us >= begin_us]
    waits_ms = [wait for one in records if (wait := ttft_ms(one, end_us)) is not None]
    cached = sum(one.cached_tokens for one in records if one.first_token_us)
    asked = sum(len(one.request.prompt) for one in records if one.first_token_us)
    computed = [executor.scheduler.num_computed_tokens for executor in world.executors]
    return replace(
        figures,
        extra={
            P90: percentile(waits_ms, 0.9) or 0.0,
            CACHED: 100 * cached / max(1, asked),
            BUSIEST: max(computed) * len(computed) / max(1, sum(computed)),
        },
    )
