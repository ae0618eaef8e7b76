"""Time bounds in virtual time: each fault by itself where there is room, and a pool with a line at all times.

The bounds are those of docs/design/time-bounds.md; `inflight.bench.simulation.bounds` states them and checks them in
every simulation.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace

import pytest

from inflight.bench.simulation.device import TWO_CORES
from inflight.bench.simulation.sim_executor import ExecutorShape
from inflight.bench.timeline.faults import FaultKind, SpacedFaults
from inflight.bench.timeline.timeline import US_PER_S
from inflight.bench.timeline.traffic import SimRequest, poisson_us, prompt_of
from tests.simulation.worlds import make_world, run_world

COST = replace(TWO_CORES, step_s=0.040)
SHAPE = ExecutorShape(num_blocks=256, num_seats=16, max_num_tokens=512, context_length=256, cost=COST)
DURATION_S = 36.0
# The time until the next token of a stream that nothing interrupts, by its formula for this shape.
NEXT_TOKEN_S = 1.4


def long_answers(seed: int, rate_per_s: float, duration_s: float) -> Iterator[SimRequest]:
    """Requests of a few seconds; the clients of a fifth leave before the end."""
    rng = random.Random(f"{seed}/long answers")
    for number, arrival_us in enumerate(poisson_us(rate_per_s, rng)):
        if arrival_us > duration_s * US_PER_S:
            return
        gone_us = rng.randrange(5 * US_PER_S) if rng.random() < 0.2 else None
        prompt = prompt_of(number, rng.randrange(10, 50))
        output = rng.randrange(80, 200)
        yield SimRequest(number, f"q{number}", arrival_us, prompt, output, 200, gone_after_us=gone_us)


WITH_DURATIONS = (FaultKind.ROUTER_HANG, FaultKind.EXECUTOR_HANG, FaultKind.STORE_AWAY)


@pytest.mark.parametrize(
    ("kind", "duration_s"),
    [*((kind, 12.0) for kind in FaultKind), *((kind, 1.0) for kind in WITH_DURATIONS)],
    ids=lambda value: value.value if isinstance(value, FaultKind) else f"{value:g}",
)
def test_every_bound_is_kept_where_there_is_room(redis_url: str, pool: str, kind: FaultKind, duration_s: float) -> None:
    """Three executors, of which two would do at 3 requests a second, and one fault after the other."""
    faults, requests = SpacedFaults(kind, 18.0, duration_s), long_answers(1, 3.0, DURATION_S)
    world = run_world(
        make_world(
            redis_url, pool, 1, shape=SHAPE, faults=faults, duration_s=DURATION_S, requests=requests, look_s=0.1,
            has_room=True,
        )
    )  # fmt: skip
    assert world.num_faults[kind] >= 2
    assert world.bounds.next_token_us() <= NEXT_TOKEN_S * US_PER_S


def test_bounds_are_kept_if_all_requests_wait(redis_url: str, pool: str) -> None:
    """Looked at between any two reports."""
    requests = long_answers(1, 12.0, 10.0)
    run_world(
        make_world(redis_url, pool, 1, shape=SHAPE, requests=requests, duration_s=10, num_executors=2, look_s=0.02)
    )
