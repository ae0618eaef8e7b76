"""The size that the ledger is built for, with everything breaking now and then."""

from __future__ import annotations

import pytest

from inflight.bench.simulation.invariants import RequestOutcome
from inflight.bench.simulation.world import World, WorldSettings
from inflight.bench.timeline.faults import FaultRates
from inflight.bench.timeline.population import Population
from tests.simulation.worlds import SHAPE, run_world

DURATION_S = 6.0


@pytest.mark.timeout(600)
def test_invariants_hold_with_a_thousand_executors(redis_url: str, pool: str) -> None:
    settings = WorldSettings(
        seed=1,
        num_routers=16,
        num_executors=1000,
        executor=SHAPE,
        faults=FaultRates.of("all", 12.0),
        duration_s=DURATION_S,
        look_s=2.0,
    )
    population = Population(num_tenants=100, rate_per_s=60.0)
    world = run_world(World(redis_url, pool, settings, population.requests(1, DURATION_S)))
    assert world.link.num_calls > 1000 * DURATION_S
    assert world.checker.outcomes[RequestOutcome.COMPLETED] > 200
