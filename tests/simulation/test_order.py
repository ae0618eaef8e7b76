"""Order under load: no starvation, preemption by class where it is on, no start after a deadline, limits of tenants."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from inflight.bench.simulation.device import SLOW
from inflight.bench.simulation.invariants import RequestOutcome
from inflight.bench.simulation.sim_router import RouterShape
from inflight.bench.timeline.faults import FaultRates
from inflight.bench.timeline.population import limits_of
from inflight.bench.timeline.timeline import US_PER_S
from inflight.bench.timeline.traffic import SimRequest, prompt_of
from inflight.router.ledger.settings import LedgerSettings
from tests.simulation.worlds import SHAPE, make_world, run_world


def request(
    number: int, arrival_s: float, *, priority_class: int, tenant: str = "crowd", prompt: int = 20
) -> SimRequest:
    return SimRequest(
        number,
        f"q{number}",
        round(arrival_s * US_PER_S),
        prompt_of(number, prompt),
        20,
        24,
        tenant,
        priority_class=priority_class,
    )


def crowd(duration_s: float, per_s: int = 12) -> list[SimRequest]:
    """More of the first class than can be served, and one of the last class early on."""
    first = [request(number, number / per_s, priority_class=1) for number in range(round(duration_s * per_s))]
    last = request(10_000, 3.01, priority_class=3, tenant="patient")
    return sorted([*first, last], key=lambda one: one.arrival_us)


def routers(**settings: object) -> RouterShape:
    return RouterShape(store=replace(LedgerSettings(max_queue_requests=10_000), **settings))  # type: ignore[arg-type]


@pytest.mark.parametrize(("age_ms", "starves"), [(2_000, False), (600_000, True)])
def test_last_class_waits_a_bounded_time_because_requests_age(
    redis_url: str, pool: str, age_ms: int, starves: bool
) -> None:
    shape = routers(age_ms=age_ms)
    world = run_world(make_world(redis_url, pool, 1, requests=crowd(20), duration_s=20, router=shape))
    # Two promotions, and then its tenant's turn.
    assert (world.checker.longest_wait_us[3] > 8 * US_PER_S) is starves


@pytest.mark.parametrize("seed", range(3))
def test_invariants_hold_where_higher_classes_take_seats(redis_url: str, pool: str, seed: int) -> None:
    shape = routers(age_ms=4_000, preempt_for_priority=True)
    run_world(make_world(redis_url, pool, seed, router=shape, rate_per_s=14, faults=FaultRates.of("all", 4.0)))


def test_first_class_takes_blocks_of_the_last_and_where_that_is_on_of_all_lower_ones(redis_url: str, pool: str) -> None:
    waits = {}
    for lower_class, is_on in ((2, False), (2, True), (3, False)):
        lower = [request(number, 0.005 * number, priority_class=lower_class, prompt=150) for number in range(24)]
        urgent = request(100, 1.5, priority_class=1, tenant="urgent", prompt=150)
        shape, name = routers(preempt_for_priority=is_on), f"{pool}-{lower_class}-{is_on}"
        world = make_world(redis_url, name, 1, requests=[*lower, urgent], duration_s=10, router=shape)
        run_world(world)
        assert world.checker.outcomes == {RequestOutcome.COMPLETED: 25}
        waits[lower_class, is_on] = world.checker.longest_wait_us[1]
    assert max(waits[2, True], waits[3, False]) < waits[2, False] / 2


def test_no_request_is_begun_after_its_deadline(redis_url: str, pool: str) -> None:
    requests = [replace(one, first_token_deadline_ms=3_000) for one in crowd(15)]
    world = run_world(make_world(redis_url, pool, 1, requests=requests, duration_s=15))
    boarded = [one for one in world.checker.records.values() if one.boarded_us is not None]
    # Placed in time; the way to the executor and its standby come on top.
    assert all(one.placed_us is not None and one.placed_us - one.arrived_us <= 3_001_000 for one in boarded)
    assert world.checker.outcomes[RequestOutcome.REFUSED] > 20
    assert world.checker.outcomes[RequestOutcome.COMPLETED] > 30


def test_tenants_with_equal_weights_get_equal_service(redis_url: str, pool: str) -> None:
    """Four tenants keep all executors busy. One sends most of the requests, and all of them first."""
    requests = sorted(_tenants_requests(), key=lambda one: one.arrival_us)
    world = make_world(
        redis_url,
        pool,
        1,
        num_executors=6,
        requests=[
            replace(one, number=number, request_id=f"q{number}", prompt=prompt_of(number, 16))
            for number, one in enumerate(requests)
        ],
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


def test_limits_of_a_tenant_hold(redis_url: str, pool: str) -> None:
    for tenant in (4, 6):
        requests = _of_one_tenant(tenant)
        world = make_world(redis_url, f"{pool}-{tenant}", 1, requests=requests, num_executors=6, duration_s=5)
        run_world(world)


def _of_one_tenant(number: int) -> list[SimRequest]:
    tenant, limits = f"tenant{number:03}", limits_of(number)
    return [
        SimRequest(index, f"q{index}", 20_000 * index, prompt_of(index, 20), 20, 24, tenant, limits)
        for index in range(40)
    ]
