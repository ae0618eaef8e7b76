"""Problem 2: a sequence is preempted again and again, and its work is recomputed each time."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from inflight.executor.scheduler.limits import Overcommit, SchedulerPolicy
from inflight.executor.scheduler.scheduler import Scheduler
from inflight.executor.scheduler.sequence import Sequence
from tests.support.scheduler.scheduling import BLOCK_SIZE, LIMITS, make_scheduler, make_sequence, retire

LIMITS_OF_CROWD = replace(
    LIMITS,
    max_num_sequences=6,
    num_standby_sequences=6,
    max_num_tokens=64,
    policy=SchedulerPolicy.MAX_UTILIZATION,
    # Even with nothing kept free on purpose
    overcommit=Overcommit(watermark=0.0, margin=0.0, max_steps_away=10_000),
)


def crowd(num_sequences: int, num_blocks: int = 30, seed: int = 0) -> tuple[Scheduler, list[Sequence]]:
    """Sequences that have little reserved and grow to 4 to 12 blocks each."""
    scheduler, sequences = make_scheduler(LIMITS_OF_CROWD, num_blocks), []
    numbers = random.Random(seed)
    for i in range(num_sequences):
        sequence = make_sequence(f"r{i}", range(i, i + 6), max_tokens=numbers.randint(10, 42), salt=None)
        sequence.num_reserved_blocks = 2
        assert scheduler.offer(sequence) is None
        sequences.append(sequence)
    return scheduler, sequences


@pytest.mark.parametrize("seed", range(8))
def test_no_sequence_comes_back_only_to_give_way_again(seed: int) -> None:
    """Between a comeback and the next preemption everyone who runs can go on by a block of tokens."""
    scheduler, _ = crowd(6, num_blocks=20, seed=seed)
    steps_since: int | None = None
    while not scheduler.is_idle:
        plan = scheduler.schedule()
        if plan.preempted:
            assert steps_since is None or steps_since >= BLOCK_SIZE
        if any(sequence.num_preemptions for sequence in plan.boarded):
            steps_since = 0
        retire(scheduler, plan)
        if steps_since is not None:
            steps_since += 1
    assert scheduler.num_preemptions > 0


@pytest.mark.parametrize("seed", range(8))
def test_preemptions_are_few_however_crowded_the_pool(seed: int) -> None:
    scheduler, sequences = crowd(6, num_blocks=20, seed=seed)
    while not scheduler.is_idle:
        retire(scheduler, scheduler.schedule())

    assert all(sequence.num_output_tokens == sequence.stopping.max_tokens for sequence in sequences)
    assert 0 < scheduler.num_preemptions <= 2 * len(sequences)


@pytest.mark.parametrize("seed", range(8))
def test_no_new_sequence_boards_while_a_preempted_one_waits(seed: int) -> None:
    """Starts with two that wait for a seat, where another has given up its seat and blocks."""
    scheduler, _ = crowd(8, num_blocks=20, seed=seed)
    num_tempted = 0
    while not scheduler.is_idle:
        is_away, waits = scheduler.num_preempted > 0, scheduler.num_waiting > 0
        plan = scheduler.schedule()
        is_away |= bool(plan.preempted)
        num_tempted += is_away and waits
        if scheduler.num_preempted:
            assert all(sequence.num_preemptions for sequence in plan.boarded)
        retire(scheduler, plan)
    assert num_tempted > 0
