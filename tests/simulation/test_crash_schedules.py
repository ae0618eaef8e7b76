"""Crashes between any two operations: no request is lost, runs twice or leaves a record behind."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest

from inflight.bench.simulation.invariants import RequestOutcome
from inflight.bench.simulation.sim_executor import ExecutorShape
from inflight.bench.simulation.world import SimulationFailed, World
from inflight.bench.timeline.faults import NO_FAULTS, FaultKind, FaultRates
from inflight.bench.timeline.population import Population
from inflight.executor.scheduler.states import StatePool
from tests.simulation.conversations import Conversations
from tests.simulation.worlds import HYBRID, OVERCOMMITTED, OVERCOMMITTED_HYBRID, SHAPE, make_world, run_world


def test_every_request_completes_where_nothing_breaks(redis_url: str, pool: str) -> None:
    world = run_world(make_world(redis_url, pool, 1))
    assert world.checker.outcomes[RequestOutcome.COMPLETED] > 80
    assert world.checker.outcomes[RequestOutcome.FAILED] == world.checker.outcomes[RequestOutcome.ROUTER_LOST] == 0


@pytest.mark.parametrize("kind", list(FaultKind), ids=lambda kind: kind.value)
def test_invariants_hold_under_one_kind_of_fault(redis_url: str, pool: str, kind: FaultKind) -> None:
    world = run_world(make_world(redis_url, pool, 2, faults=FaultRates.of(kind.value, 24.0)))
    assert world.num_faults[kind] > 0


# Without anti-entropy between routers and ledger each of these leaves requests waiting for ever.
@pytest.mark.parametrize("seed", range(3))
def test_no_request_waits_for_ever_when_redis_forgets_its_newest_writes(redis_url: str, pool: str, seed: int) -> None:
    run_world(make_world(redis_url, pool, seed, faults=FaultRates(store_stale=24.0), rate_per_s=14))


@pytest.mark.parametrize("seed", range(4))
def test_invariants_hold_under_all_faults_at_once(redis_url: str, pool: str, seed: int) -> None:
    run_world(make_world(redis_url, pool, seed, faults=FaultRates.of("all", 8.0)))


@pytest.mark.parametrize("seed", range(4))
def test_invariants_hold_when_executors_promise_more_than_they_have(redis_url: str, pool: str, seed: int) -> None:
    run_world(make_world(redis_url, pool, seed, shape=OVERCOMMITTED, faults=FaultRates.of("all", 5.0)))


@pytest.mark.parametrize("per_minute", [2.0, 8.0, 25.0])
@pytest.mark.parametrize("shape", [SHAPE, OVERCOMMITTED], ids=["guaranteed", "overcommitted"])
def test_invariants_hold_for_many_seeds(redis_url: str, pool: str, shape: ExecutorShape, per_minute: float) -> None:
    for seed in range(100, 103):
        faults = FaultRates.of("all", per_minute)
        run_world(make_world(redis_url, f"{pool}-{seed}", seed, shape=shape, faults=faults))


def make_hybrid_chats(redis_url: str, pool: str, seed: int, faults: FaultRates = NO_FAULTS) -> World:
    """Turns find the state of the last one."""
    chats = Conversations(
        rate_per_s=1.0,
        num_turns=4,
        pause_s=3.0,
        system_tokens=48,
        turn_tokens=(8, 40),
        output_tokens=(4, 20),
        state_grid_tokens=16,
    )
    return make_world(redis_url, pool, seed, shape=HYBRID, faults=faults, requests=chats.requests(seed, 15.0))


@pytest.mark.parametrize("seed", range(2))
def test_invariants_hold_with_recurrent_state(redis_url: str, pool: str, seed: int) -> None:
    world = run_world(make_hybrid_chats(redis_url, pool, seed, FaultRates.of("all", 8.0)))
    counts = [executor.scheduler.kv_counts().states for executor in world.executors]
    assert sum(one.usable_tokens for one in counts if one is not None) > 0


def make_overcommitted_hybrid(redis_url: str, pool: str, seed: int, faults: FaultRates = NO_FAULTS) -> World:
    """The first outputs are short, so that too little is reserved for the later ones."""
    requests = (
        replace(one, output_tokens=2 if one.number < 64 else 60, max_tokens=100)
        for one in Population(num_tenants=1, rate_per_s=12.0).requests(seed, 7.0)
    )
    return make_world(
        redis_url, pool, seed, shape=OVERCOMMITTED_HYBRID, faults=faults, requests=requests, num_executors=1
    )


def test_sequences_with_recurrent_state_are_preempted_and_go_on(redis_url: str, pool: str) -> None:
    """Their state comes back from host memory, or is computed again behind a checkpoint."""
    (executor,) = run_world(make_overcommitted_hybrid(redis_url, pool, 1)).executors
    assert executor.scheduler.num_preemptions > 0
    assert executor.scheduler.num_recomputed_tokens > 0
    assert executor.device.states is not None
    assert executor.device.states.num_swapped_in > 0


@pytest.mark.parametrize("seed", range(2))
def test_invariants_hold_when_sequences_with_recurrent_state_are_preempted(
    redis_url: str, pool: str, seed: int
) -> None:
    run_world(make_overcommitted_hybrid(redis_url, pool, seed, FaultRates.of("all", 5.0)))


@pytest.mark.parametrize(
    ("restores", "make"),
    [("swap_in", make_overcommitted_hybrid), ("load", make_hybrid_chats)],
    ids=["host", "checkpoint"],
)
def test_run_fails_if_recurrent_state_is_not_restored(
    redis_url: str, pool: str, monkeypatch: pytest.MonkeyPatch, restores: str, make: Callable[[str, str, int], World]
) -> None:
    monkeypatch.setattr(StatePool, restores, lambda *arguments: None)
    with pytest.raises(SimulationFailed, match=r"token \d+ is \d+, not \d+"):
        run_world(make(redis_url, pool, 1))


# Seeds that once failed: a reply was lost that said that the pool had forgotten the router, and a router that had hung
# took up placements from before it was forgotten.
@pytest.mark.parametrize(("seed", "per_minute"), [(7, 5.0), (10, 5.0), (42, 20.0)])
def test_seed_that_failed_before_holds(redis_url: str, pool: str, seed: int, per_minute: float) -> None:
    run_world(make_world(redis_url, pool, seed, faults=FaultRates.of("all", per_minute), rate_per_s=10, duration_s=20))


def test_equal_seeds_give_equal_runs(redis_url: str, pool: str) -> None:
    def trace(name: str) -> list[tuple[str, int | None, int, str]]:
        world = run_world(make_world(redis_url, name, 5, faults=FaultRates.of("all", 10.0)))
        assert world.timeline.num_steps > 1000
        return [
            (request_id, record.ended_us, record.num_tokens, str(record.outcome))
            for request_id, record in world.checker.records.items()
        ]

    assert trace(pool) == trace(f"{pool}-again")
