"""Sub-pools under faults: the invariants of a pool hold in each of them, and waiting requests move to an idle one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import replace
from typing import Any

import pytest

from inflight.bench.simulation.device import SLOW
from inflight.bench.simulation.invariants import RequestOutcome
from inflight.bench.simulation.world import SimulationFailed, World
from inflight.bench.timeline.faults import FaultKind, FaultRates
from inflight.bench.timeline.traffic import SimRequest, prompt_of
from inflight.router.dispatch.moves import Moves
from inflight.router.store.types import Demand
from inflight.router.subpools.choice import SubPoolChoice
from tests.simulation.worlds import SHAPE, make_world, run_world

NUM_SUBPOOLS = 3


def make_subpools(url: str, pool: str, seed: int, **settings: Any) -> World:
    """Six executors, of which each sub-pool has one at least, under more load than they serve at once."""
    settings = {"num_executors": 6, "rate_per_s": 24.0, "duration_s": 10.0} | settings
    return make_world(url, pool, seed, num_subpools=NUM_SUBPOOLS, **settings)


def test_every_request_completes_and_waiting_ones_move_where_nothing_breaks(redis_url: str, pool: str) -> None:
    world = run_world(make_subpools(redis_url, pool, 1, rate_per_s=40.0, duration_s=5.0))
    assert world.checker.outcomes[RequestOutcome.COMPLETED] > 150
    assert world.checker.outcomes[RequestOutcome.FAILED] == world.checker.outcomes[RequestOutcome.ROUTER_LOST] == 0
    assert world.num_moved > 0


def into_the_first(choice: SubPoolChoice, demand: Demand, allowed: Collection[int]) -> list[int]:
    """The worst choice: every request waits in one sub-pool."""
    return sorted(allowed)


def test_requests_that_wait_in_one_subpool_are_served_by_all(
    redis_url: str, pool: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SubPoolChoice, "order_for", into_the_first)
    world = run_world(make_subpools(redis_url, pool, 1, requests=_burst(160), duration_s=20.0))
    assert world.num_moved > 20


def test_requests_that_do_not_move_to_an_idle_subpool_are_found(
    redis_url: str, pool: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def move_nothing(moves: Moves) -> int:
        return 0

    monkeypatch.setattr(SubPoolChoice, "order_for", into_the_first)
    monkeypatch.setattr(Moves, "move_waiting", move_nothing)
    with pytest.raises(SimulationFailed, match="waits beside sub-pool"):
        run_world(make_subpools(redis_url, pool, 1, requests=_burst(160), duration_s=20.0))


@pytest.mark.parametrize("kind", list(FaultKind), ids=lambda kind: kind.value)
def test_invariants_hold_under_one_kind_of_fault(redis_url: str, pool: str, kind: FaultKind) -> None:
    world = run_world(make_subpools(redis_url, pool, 2, faults=FaultRates.of(kind.value, 24.0)))
    assert world.num_faults[kind] > 0


@pytest.mark.parametrize("seed", range(4))
def test_invariants_hold_under_all_faults_at_once(redis_url: str, pool: str, seed: int) -> None:
    run_world(make_subpools(redis_url, pool, seed, faults=FaultRates.of("all", 8.0)))


def test_equal_seeds_give_equal_runs(redis_url: str, pool: str) -> None:
    def trace() -> list[tuple[str, int | None, int, str]]:
        world = run_world(make_subpools(redis_url, pool, 5, faults=FaultRates.of("all", 10.0)))
        return [
            (request_id, record.ended_us, record.num_tokens, str(record.outcome))
            for request_id, record in world.checker.records.items()
        ]

    # Choices depend on the names of sub-pools, so both runs have the same ones. A run deletes its keys at its end.
    assert trace() == trace()


@pytest.mark.parametrize("num_subpools", [1, NUM_SUBPOOLS])
def test_tenants_with_equal_weights_get_equal_service(redis_url: str, pool: str, num_subpools: int) -> None:
    """Four tenants keep all sub-pools busy. One sends most of the requests, and all of them first."""
    requests = sorted(_tenants_requests(), key=lambda one: one.arrival_us)
    requests = [replace(one, number=number, request_id=f"q{number}") for number, one in enumerate(requests)]
    world = make_world(
        redis_url,
        pool,
        1,
        num_subpools=num_subpools,
        num_executors=6,
        requests=[replace(one, prompt=prompt_of(one.number, 16)) for one in requests],
        duration_s=20.0,
        shape=replace(SHAPE, has_prefix_cache=False, cost=replace(SLOW, step_s=0.05, token_s=0.0)),
    )
    served: Counter[str] = Counter()
    try:
        world.run_window()
        for record in world.checker.records.values():
            if record.first_token_us is not None and record.first_token_us > world.begin_us + 4_000_000:
                served[record.request.tenant] += record.num_tokens
    finally:
        world.close()
    share = sum(served.values()) / 4
    assert len(served) == 4
    assert max(abs(tokens / share - 1) for tokens in served.values()) < 0.25, served


def _tenants_requests() -> list[SimRequest]:
    """A tenant that sends 900 requests at once, and three that send 300 each over the first seconds."""
    flood = [SimRequest(0, "", 1000 + number, (), 24, 24, "flood") for number in range(900)]
    others = [
        SimRequest(0, "", 500_000 + number * 10_000, (), 24, 24, f"calm{tenant}")
        for tenant in range(3)
        for number in range(300)
    ]
    return flood + others


def _burst(count: int) -> list[SimRequest]:
    """Requests that come at once: all queues are long, and one is empty before the others."""
    return [SimRequest(number, f"q{number}", 1000 + number, prompt_of(number, 24), 24, 24) for number in range(count)]
