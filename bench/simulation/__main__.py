"""`python -m inflight.bench.simulation`: a deployment in virtual time, its invariants checked throughout."""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from inflight.bench.simulation.device import SLOW
from inflight.bench.simulation.invariants import RequestOutcome
from inflight.bench.simulation.sim_executor import ExecutorShape
from inflight.bench.simulation.world import SimulationFailed, World, WorldSettings
from inflight.bench.timeline.faults import FaultRates
from inflight.bench.timeline.population import Population
from inflight.executor.scheduler.scheduler import SchedulerPolicy
from inflight.local.redis_server import PrivateRedis

SHAPE = ExecutorShape(num_blocks=64, num_seats=8, max_num_tokens=256, context_length=512, cost=SLOW)
PROGRESS_S = 5.0


def main(argv: Sequence[str] | None = None) -> int:
    """Runs a simulation; 0 if everything held."""
    options = _parser().parse_args(argv)
    duration_s = options.hours * 3600
    settings = WorldSettings(
        seed=options.seed,
        num_routers=options.routers,
        num_executors=options.executors,
        executor=replace(SHAPE, policy=SchedulerPolicy(options.policy)),
        faults=FaultRates.of(options.faults, options.faults_per_minute),
        duration_s=duration_s,
        look_s=max(1.0, duration_s / 360),
    )
    population = Population(num_tenants=options.tenants, rate_per_s=options.rate)
    with (
        tempfile.TemporaryDirectory() as folder,
        PrivateRedis.start(
            Path(folder) / "redis.log", binary=options.redis_server, unix_socket=Path(folder) / "redis.sock"
        ) as redis,
    ):
        world = World(redis.admin_url, "simulation", settings, population.requests(options.seed, duration_s))
        began_s = time.perf_counter()
        progress = _Progress(duration_s, began_s)
        try:
            world.run(progress)
        except SimulationFailed as failed:
            print(f"simulation: FAILED {failed}", file=sys.stderr)
            return 1
        finally:
            world.close()
    print(summary(world, duration_s, time.perf_counter() - began_s))
    return 0


def summary(world: World, simulated_s: float, took_s: float) -> str:
    """Returns the run in one line."""
    checker, settings = world.checker, world.settings
    outcomes = " ".join(f"{outcome.value}={checker.outcomes[outcome]}" for outcome in RequestOutcome)
    waits = max(checker.longest_wait_us.values(), default=0) / 1e6
    return (
        f"simulation: held seed={settings.seed} executors={settings.num_executors} routers={settings.num_routers} "
        f"simulated_s={simulated_s:g} took_s={took_s:.1f} requests={len(checker.records)} {outcomes} "
        f"tokens={checker.num_tokens} faults={sum(world.num_faults.values())} calls={world.link.num_calls} "
        f"events={world.timeline.num_steps} longest_wait_s={waits:.2f}"
    )


class _Progress:
    """A line every few seconds."""

    def __init__(self, duration_s: float, began_s: float) -> None:
        self._duration_s = duration_s
        self._began_s = began_s
        self._next_s = began_s + PROGRESS_S

    def __call__(self, simulated_s: float) -> None:
        now_s = time.perf_counter()
        if now_s >= self._next_s:
            self._next_s = now_s + PROGRESS_S
            speed = simulated_s / (now_s - self._began_s)
            print(f"{simulated_s:.0f} of {self._duration_s:.0f} s, {speed:.1f} times real time", flush=True)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m inflight.bench.simulation", description=__doc__)
    parser.add_argument("--hours", type=float, default=0.05, help="simulated time (default: 0.05)")
    parser.add_argument("--executors", type=int, default=20, help="(default: 20)")
    parser.add_argument("--routers", type=int, default=4, help="(default: 4)")
    parser.add_argument("--tenants", type=int, default=20, help="(default: 20)")
    parser.add_argument("--rate", type=float, default=10.0, help="requests per second (default: 10)")
    parser.add_argument("--seed", type=int, default=0, help="(default: 0)")
    parser.add_argument("--faults", default="all", help="all, none, or kinds with commas between (default: all)")
    parser.add_argument("--faults-per-minute", type=float, default=0.5, help="of each kind (default: 0.5)")
    parser.add_argument("--redis-server", type=Path, metavar="PATH", help="its binary (default: the one on PATH)")
    policies = [policy.value for policy in SchedulerPolicy]
    parser.add_argument("--policy", choices=policies, default=policies[0], help=f"(default: {policies[0]})")
    return parser


if __name__ == "__main__":
    sys.exit(main())
