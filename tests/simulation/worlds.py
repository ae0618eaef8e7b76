"""Small deployments on a busy, tight pool: what the tests of the simulation run."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

from inflight.bench.simulation.device import SLOW
from inflight.bench.simulation.sim_executor import ExecutorShape
from inflight.bench.simulation.sim_router import RouterShape
from inflight.bench.simulation.world import World, WorldSettings
from inflight.bench.timeline.faults import NO_FAULTS, FaultRates, SpacedFaults
from inflight.bench.timeline.population import Population
from inflight.bench.timeline.traffic import SimRequest
from inflight.executor.scheduler.scheduler import SchedulerPolicy

SHAPE = ExecutorShape(
    num_blocks=32, num_seats=4, max_num_tokens=64, context_length=512, cost=SLOW, has_prefix_cache=True
)
OVERCOMMITTED = ExecutorShape(
    num_blocks=24,
    num_seats=6,
    max_num_tokens=64,
    context_length=512,
    cost=SLOW,
    policy=SchedulerPolicy.MAX_UTILIZATION,
    num_host_blocks=8,
)
HYBRID = replace(SHAPE, num_blocks=96, num_checkpoints=10)
OVERCOMMITTED_HYBRID = replace(OVERCOMMITTED, num_blocks=18, has_prefix_cache=True, num_checkpoints=3, num_host_slots=1)
ROUTER = RouterShape()
PART = 8


def make_world(
    url: str,
    pool: str,
    seed: int,
    *,
    shape: ExecutorShape = SHAPE,
    router: RouterShape = ROUTER,
    faults: FaultRates | SpacedFaults = NO_FAULTS,
    rate_per_s: float = 8.0,
    duration_s: float = 15.0,
    num_routers: int = 3,
    num_executors: int = 3,
    requests: Iterable[SimRequest] | None = None,
    look_s: float = 0.5,
    has_room: bool = False,
) -> World:
    """A world that has not begun."""
    settings = WorldSettings(
        seed=seed,
        num_routers=num_routers,
        num_executors=num_executors,
        executor=shape,
        router=router,
        faults=faults,
        duration_s=duration_s,
        look_s=look_s,
        has_room=has_room,
    )
    if requests is None:
        population = Population(num_tenants=7, rate_per_s=rate_per_s)
        # A third sets no max_tokens and is served in parts.
        requests = (
            replace(one, reservation_tokens=PART) if one.number % 3 == 0 else one
            for one in population.requests(seed, duration_s)
        )
    return World(url, pool, settings, requests)


def run_world(world: World, then: Callable[[World], None] = lambda world: None) -> World:
    """Runs it to its end, and leaves Redis as it was."""
    try:
        then(world)
        world.run()
    finally:
        world.close()
    return world
