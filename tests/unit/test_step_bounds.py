"""The constraint that kept each step from holding more."""

from __future__ import annotations

from dataclasses import replace

import pytest

from inflight.executor.scheduler.limits import SchedulerLimits
from inflight.executor.scheduler.scheduler import Batching, SchedulerPolicy
from inflight.executor.scheduler.step_constraint import PrefillAllowance, StepBounds, StepConstraint
from tests.support.scheduler.scheduling import LIMITS, make_scheduler, make_sequence, step


@pytest.mark.parametrize(
    ("limits", "prompts", "max_prefill_tokens", "constraint"),
    [
        (LIMITS, [2], None, StepConstraint.NO_WORK),
        (LIMITS, [2, 2], None, StepConstraint.SEATS),
        (LIMITS, [2, 2, 2], None, StepConstraint.SEATS),
        (LIMITS, [20], None, StepConstraint.TOKENS),
        (LIMITS, [8, 2], None, StepConstraint.TOKENS),
        (LIMITS, [8, 2], 4, StepConstraint.PACE),
        (LIMITS, [8], 4, StepConstraint.PACE),
        (LIMITS, [8], 8, StepConstraint.NO_WORK),
    ],
)
def test_first_step_is_bound_by(
    limits: SchedulerLimits, prompts: list[int], max_prefill_tokens: int | None, constraint: StepConstraint
) -> None:
    scheduler = make_scheduler(limits)
    for i, length in enumerate(prompts):
        scheduler.offer(make_sequence(str(i), range(length), salt=None))

    scheduler.schedule(None if max_prefill_tokens is None else PrefillAllowance(max_prefill_tokens))

    assert scheduler.bounds.newest is constraint


def test_full_step_is_bound_by_seats_though_nothing_stands_by() -> None:
    # Given every seat taken in the step before; what waits is in the routers' queue, which the scheduler does not see
    scheduler = make_scheduler(LIMITS)
    for i in range(LIMITS.max_num_sequences):
        scheduler.offer(make_sequence(str(i), [i]))
    step(scheduler)

    scheduler.schedule()

    assert scheduler.bounds.newest is StepConstraint.SEATS


def test_static_batch_bounds_who_waits() -> None:
    scheduler = make_scheduler(replace(LIMITS, batching=Batching.STATIC))
    scheduler.offer(make_sequence("a", [1]))
    step(scheduler)
    scheduler.offer(make_sequence("b", [1]))
    step(scheduler)

    assert scheduler.bounds.num_steps == ((StepConstraint.NO_WORK, 1), (StepConstraint.STATIC_BATCH, 1))


def test_missing_blocks_bound_who_waits() -> None:
    limits = replace(LIMITS, policy=SchedulerPolicy.MAX_UTILIZATION, max_num_sequences=3)
    scheduler = make_scheduler(limits, num_blocks=6)
    for request_id in "ab":
        sequence = make_sequence(request_id, range(8), salt=None)
        sequence.num_reserved_blocks = 3
        assert scheduler.offer(sequence) is None
    for _ in range(2):
        step(scheduler)

    assert scheduler.bounds.num_steps == ((StepConstraint.BLOCKS, 1), (StepConstraint.TOKENS, 1))


def test_plan_without_rows_is_no_step() -> None:
    scheduler = make_scheduler()
    scheduler.schedule()

    assert scheduler.bounds.newest is None
    assert StepBounds().num_steps == ()
