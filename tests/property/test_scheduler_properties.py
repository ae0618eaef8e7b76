"""Invariants of the scheduler under any sequence of offers, cancels, superseding attempts and failures."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inflight.executor.scheduler.blocks import BlockPool
from inflight.executor.scheduler.scheduler import Scheduler, SchedulerLimits
from inflight.executor.scheduler.sequence import FinishReason, Sequence, StepPlan, StepResult
from inflight.executor.scheduler.step_constraint import PrefillAllowance, PrefillCost, StepCost
from tests.property.scheduler_machine import SchedulerMachine
from tests.property.scheduler_model import (
    STATES,
    WINDOWS,
    limits_strategy,
    sequence_strategy,
    with_states,
    with_window,
)
from tests.support.device.fake_device import FakeDevice, solo_output
from tests.support.examples import examples
from tests.support.scheduler.drafting import CHEAP, PROPOSERS, eager

TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(max_examples=examples(150), stateful_step_count=40, deadline=None)


# What prompts may take of each step, by tokens and by time.
ALLOWANCES = st.none() | st.builds(
    PrefillAllowance,
    st.integers(1, 6),
    st.sampled_from((0.0, 5.0, 40.0)),
    st.just(PrefillCost(1.0, 0.1, 0.3)),
    st.sampled_from((0.0, 1.0)),
)


@pytest.mark.parametrize("overlap", [False, True])
@settings(max_examples=examples(60), deadline=None)
@given(
    limits=limits_strategy(),
    num_extra_blocks=st.integers(0, 30),
    allowance=ALLOWANCES,
    drafts=st.none() | st.sampled_from(sorted(PROPOSERS)),
    window_tokens=WINDOWS,
    states=STATES,
    step_cost=st.none()
    | st.builds(StepCost, st.floats(0, 40), st.builds(PrefillCost, st.floats(0, 10), st.floats(0, 1), st.floats(0, 1))),
    choice=st.data(),
)
def test_every_request_gets_its_solo_output_however_small_the_pool_and_the_chunks(
    overlap: bool,
    limits: SchedulerLimits,
    num_extra_blocks: int,
    allowance: PrefillAllowance | None,
    drafts: str | None,
    window_tokens: int | None,
    states: tuple[int, int, int] | None,
    step_cost: StepCost | None,
    choice: st.DataObject,
) -> None:
    """Requests come back with a new attempt until they are taken, as routers do."""
    # Given a crowd, and a pool that just holds the largest of it.
    block_size = choice.draw(st.integers(1, 4))
    limits = with_states(with_window(limits, window_tokens, block_size), states, block_size)
    crowd = [
        choice.draw(sequence_strategy(block_size, f"r{i}", 1, limits.is_overcommitted))
        for i in range(choice.draw(st.integers(1, 12 if not limits.is_overcommitted else 20)))
    ]
    waiting = [s for s in crowd if _is_valid(s, limits, block_size)]
    expected = {
        s.request_id: solo_output(_again(s, 1), limits.context_length) for s in waiting if s.cache_salt is not None
    }
    longest = max([1, *(_most_tokens(s, limits) for s in waiting)])
    if limits.is_overcommitted:
        num_extra_blocks //= 4
    most_reserved = max([1, *(s.num_reserved_blocks for s in waiting)])
    pool = BlockPool(max(math.ceil(longest / block_size), most_reserved) + num_extra_blocks, block_size)
    scheduler = Scheduler(limits, pool, eager(PROPOSERS[drafts], choice.draw(st.integers(0, 8))) if drafts else None)
    device = FakeDevice(pool, scheduler.windows, window_tokens or 0)

    # When it is offered until everyone has been taken, and run until everyone has ended.
    ends: dict[str, tuple[list[int], FinishReason]] = {}
    most_steps = 8 * sum(s.num_prompt_tokens + s.stopping.max_tokens for s in waiting)
    launched: list[StepPlan] = []
    while waiting or not scheduler.is_idle:
        refused = [s for s in waiting if scheduler.offer(s) is not None]
        waiting = [_again(s, s.attempt + 1) for s in refused]
        plan = scheduler.schedule(None if allowance is None else replace(allowance), CHEAP, None, step_cost)
        scheduler.check()
        finished = list(scheduler.take_finished())
        launched += [plan] if plan.rows else []
        assert launched or scheduler.is_idle, "sequences are held, and nothing is done"
        if len(launched) > (1 if overlap and plan.rows else 0):
            finished += scheduler.update(StepResult(launched[0], device.run(launched.pop(0)))).finished
        for event in finished:
            sequence = event.sequence
            if event.reason is FinishReason.PREEMPTED:
                # Handed back: its output so far counts as output where it runs next.
                waiting.append(_again(sequence, sequence.attempt + 1, _least_blocks(sequence, block_size)))
            else:
                ends[sequence.request_id] = (sequence.token_ids[sequence.num_prompt_tokens :], event.reason)
        most_steps -= 1
        assert most_steps >= 0

    # Then each got what it would have got alone.
    assert {request_id: ends[request_id] for request_id in expected} == expected
    scheduler.check_when_idle()


def _again(sequence: Sequence, attempt: int, least_blocks: int = 0) -> Sequence:
    return Sequence(
        request_id=sequence.request_id,
        attempt=attempt,
        token_ids=list(sequence.token_ids),
        num_prompt_tokens=sequence.num_prompt_tokens,
        sampling=sequence.sampling,
        stopping=sequence.stopping,
        num_reserved_blocks=max(sequence.num_reserved_blocks, least_blocks),
        cache_salt=sequence.cache_salt,
        max_drafts=sequence.max_drafts,
        priority=sequence.priority,
    )


def _least_blocks(sequence: Sequence, block_size: int) -> int:
    return math.ceil((sequence.num_tokens + 1) / block_size)


def _most_tokens(sequence: Sequence, limits: SchedulerLimits) -> int:
    return min(sequence.num_prompt_tokens + sequence.stopping.max_tokens, limits.context_length)


def _is_valid(sequence: Sequence, limits: SchedulerLimits, block_size: int) -> bool:
    most_tokens = _most_tokens(sequence, limits)
    return sequence.num_tokens < most_tokens and sequence.num_reserved_blocks * block_size > sequence.num_tokens
