"""A small simulation of sub-pools with every kind of fault; `tests/simulation/test_subpools.py` has the larger ones."""

from __future__ import annotations

from inflight.bench.simulation.invariants import RequestOutcome
from inflight.bench.timeline.faults import FaultRates
from tests.simulation.worlds import make_world, run_world


def test_invariants_hold_in_every_subpool_under_faults(redis_admin_url: str, pool: str) -> None:
    world = make_world(
        redis_admin_url,
        pool,
        2,
        num_subpools=3,
        num_executors=6,
        rate_per_s=30.0,
        duration_s=4.0,
        faults=FaultRates.of("all", 10.0),
    )
    run_world(world)
    assert sum(world.num_faults.values()) > 6
    assert world.checker.outcomes[RequestOutcome.COMPLETED] > 40
