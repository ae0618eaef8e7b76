"""Complaint 2: a sequence comes back only to be thrown out again, over and over, and the computing is for nothing."""

from __future__ import annotations

from dataclasses import replace

import pytest

from executor.limits import Overcommit, SchedulerPolicy
from executor.scheduler import Scheduler
from executor.sequence import Sequence
from tests.scheduling import BLOCK_SIZE, LIMITS, make_scheduler, make_sequence, retire

LIMITS_OF_CROWD = replace(
    LIMITS,
    max_num_sequences=6,
    num_standby_sequences=6,
    max_num_tokens=64,
    policy=SchedulerPolicy.MAX_UTILIZATION,
    # Even with nothing kept free on purpose
    overcommit=Overcommit(watermark=0.0, margin=0.0, max_steps_away=10_000),
)


def crowd(num_sequences: int, num_blocks: int = 30) -> tuple[Scheduler, list[Sequence]]:
    """Sequences that have little reserved and grow to 11 blocks each."""
    scheduler, sequences = make_scheduler(LIMITS_OF_CROWD, num_blocks), []
    for i in range(num_sequences):
        sequence = make_sequence(f"r{i}", range(i, i + 6), max_tokens=36, salt=None)
        sequence.num_reserved_blocks = 2
        assert scheduler.offer(sequence) is None
        sequences.append(sequence)
    return scheduler, sequences


def test_nobody_comes_back_only_to_give_way_again() -> None:
    """Between a comeback and the next preemption everyone who runs goes on by a block of tokens, or somebody ends."""
    scheduler, _ = crowd(6)
    tokens_since: int | None = None
    num_preemptions = 0
    while not scheduler.is_idle:
        num_running = scheduler.num_running
        plan = scheduler.schedule()
        if plan.preempted:
            num_preemptions += len(plan.preempted)
            assert tokens_since is None or tokens_since >= BLOCK_SIZE * (num_running - 1)
        if any(sequence.num_preemptions for sequence in plan.boarded):
            tokens_since = 0
        outcome = retire(scheduler, plan)
        if outcome.finished:
            tokens_since = None
        elif tokens_since is not None:
            tokens_since += len(outcome.tokens)
    assert num_preemptions > 0


@pytest.mark.parametrize("num_sequences", [4, 6])
def test_preemptions_are_few_however_crowded_the_pool(num_sequences: int) -> None:
    scheduler, sequences = crowd(num_sequences)
    while not scheduler.is_idle:
        retire(scheduler, scheduler.schedule())

    assert all(sequence.num_output_tokens == 36 for sequence in sequences)
    assert 0 < scheduler.num_preemptions <= 2 * num_sequences


def test_nobody_new_boards_while_somebody_waits_to_come_back() -> None:
    scheduler, _ = crowd(6)
    while not scheduler.num_preempted:
        retire(scheduler, scheduler.schedule())
    newcomer = make_sequence("new", [1], max_tokens=2, salt=None)
    assert scheduler.offer(newcomer) is not None  # the gate knows what is overrun, and routers are told
    assert scheduler.budget_blocks <= 6 * 2  # no more than what is promised already
    while scheduler.num_preempted:
        plan = scheduler.schedule()
        assert all(sequence.num_preemptions for sequence in plan.boarded)
        retire(scheduler, plan)
