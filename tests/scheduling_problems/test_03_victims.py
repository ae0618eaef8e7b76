"""Problem 3: the latest request is preempted and loses its work, although another would cost less."""

from __future__ import annotations

from dataclasses import replace

import pytest

from inflight.executor.scheduler.limits import Overcommit, SchedulerPolicy
from inflight.executor.scheduler.scheduler import Scheduler
from inflight.executor.scheduler.sequence import Sequence
from tests.scheduling_problems.test_02_ping_pong import crowd
from tests.support.scheduler.scheduling import LIMITS, make_scheduler, make_sequence, retire

TIGHT = replace(
    LIMITS,
    max_num_sequences=3,
    max_num_tokens=64,
    policy=SchedulerPolicy.MAX_UTILIZATION,
    overcommit=Overcommit(watermark=0.0, margin=0.0),
)


def offered(scheduler: Scheduler, request_id: str, num_prompt: int, salt: bytes | None = None) -> Sequence:
    """A sequence with its prompt and a token reserved, and 24 tokens to come."""
    first = sum(map(ord, request_id))
    sequence = make_sequence(request_id, range(first, first + num_prompt), max_tokens=24, salt=salt)
    sequence.num_reserved_blocks = num_prompt // 4 + 1
    assert scheduler.offer(sequence) is None
    return sequence


def run_until_preempted(scheduler: Scheduler) -> Sequence:
    """The first who gives up its seat."""
    while True:
        plan = scheduler.schedule()
        retire(scheduler, plan)
        if plan.preempted:
            return plan.preempted[0]


def test_victim_is_whose_return_costs_least_not_who_came_last() -> None:
    scheduler = make_scheduler(TIGHT, num_blocks=14)
    short = offered(scheduler, "short", 4)
    offered(scheduler, "long", 28)

    assert run_until_preempted(scheduler) is short


def test_victim_is_whose_prompt_stays_in_the_cache() -> None:
    """Of a prompt that others hold, too, nothing is lost; a short one that is in no cache is lost whole."""
    scheduler = make_scheduler(TIGHT, num_blocks=16)
    offered(scheduler, "alone", 12)
    first = offered(scheduler, "shared", 16, salt=b"")
    second = make_sequence("too", first.token_ids, max_tokens=24)
    second.num_reserved_blocks = 5
    while scheduler.num_waiting or not first.num_output_tokens:
        retire(scheduler, scheduler.schedule())
    assert scheduler.offer(second) is None
    victim = run_until_preempted(scheduler)

    assert victim is second
    while scheduler.num_preempted:
        retire(scheduler, scheduler.schedule())
    assert scheduler.num_recomputed_tokens < len(second.token_ids) - 16 + 4


def test_hardly_anything_is_computed_again_where_there_is_host_memory() -> None:
    scheduler = make_scheduler(replace(TIGHT, num_host_blocks=32), num_blocks=14)
    offered(scheduler, "short", 4)
    offered(scheduler, "long", 20)
    while not scheduler.is_idle:
        retire(scheduler, scheduler.schedule())

    assert scheduler.num_preemptions > 0
    assert scheduler.num_recomputed_tokens == 0


@pytest.mark.parametrize("seed", range(8))
def test_no_sequence_is_the_victim_twice_in_a_row_while_there_is_another(seed: int) -> None:
    scheduler, _ = crowd(6, num_blocks=20, seed=seed)
    victims: list[Sequence] = []
    while not scheduler.is_idle:
        candidates = [sequence for sequence in scheduler.held() if sequence.seat is not None]
        plan = scheduler.schedule()
        for victim in plan.preempted:
            others = [sequence for sequence in candidates if sequence is not victim]
            assert not others or not victims or victims[-1] is not victim
            victims.append(victim)
            candidates = others
        retire(scheduler, plan)
    assert len(victims) > 1
