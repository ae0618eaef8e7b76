"""Inter-token targets: how long a step may be beside decodes that have one, and that prompts go on all the same."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from inflight.executor.engine.prefill_budget import LEAST_SHARE, MARGIN, PrefillBudget
from inflight.executor.engine.step_time import StepLoad
from inflight.executor.scheduler.blocks import BlockPool
from inflight.executor.scheduler.scheduler import Scheduler
from inflight.executor.scheduler.sequence import FinishReason, Sequence, StepPlan
from inflight.executor.scheduler.step_constraint import PrefillCost
from tests.support.device.modelled_device import BLOCK_SIZE, Ride, step_seconds
from tests.support.examples import examples
from tests.support.scheduler.scheduling import make_limits, make_sequence, retire

LIMITS = make_limits(
    max_num_sequences=8, num_standby_sequences=100, max_num_tokens=512, context_length=8192, enable_prefix_cache=False
)
TARGETS_MS = st.sampled_from((None, 1.0, 15.0, 25.0, 60.0, 400.0))
# Prompt tokens, output tokens and target.
ARRIVALS = st.lists(
    st.lists(st.tuples(st.integers(1, 1500), st.integers(1, 30), TARGETS_MS), max_size=3), min_size=1, max_size=12
)


def sequence(name: str, num_prompt: int, max_tokens: int, target_ms: float | None) -> Sequence:
    result = make_sequence(name, [1] * num_prompt, max_tokens=max_tokens, salt=None)
    result.num_reserved_blocks = -(-(num_prompt + max_tokens) // BLOCK_SIZE)
    result.inter_token_target_ms = target_ms
    return result


@functools.cache
def informed_budget() -> PrefillBudget:
    """A budget that knows the modelled device. It is not changed."""
    budget = PrefillBudget()
    for i in range(60):
        for load in (StepLoad(1 + i % 8, 300 * (i % 5)), StepLoad(60 + 7 * i, 300 * (i % 5), 40.0 * i * (60 + i))):
            budget.step_time.observe(load, step_seconds(load))
    return budget


def plans(arrivals: list[list[tuple[int, int, float | None]]]) -> Iterator[tuple[Scheduler, StepPlan, float | None]]:
    """Yields the plan of each step, and the smallest target of the sequences that decode in it."""
    scheduler, budget = Scheduler(LIMITS, BlockPool(5000, BLOCK_SIZE)), informed_budget()
    queue, num_offered = list(arrivals), 0
    while queue or not scheduler.is_idle:
        for num_prompt, max_tokens, target_ms in queue.pop(0) if queue else ():
            num_offered += 1
            assert scheduler.offer(sequence(f"r{num_offered}", num_prompt, max_tokens, target_ms)) is None
        plan = scheduler.schedule(budget.allowance(scheduler.decode_load(), BLOCK_SIZE))
        decodes = plan.sequences[: plan.num_decodes]
        targets_ms = [s.inter_token_target_ms for s in decodes if s.inter_token_target_ms is not None]
        yield scheduler, plan, min(targets_ms, default=None)
        if plan.rows:
            retire(scheduler, plan)


def predicted_s(plan: StepPlan) -> tuple[float, float]:
    """Returns what the budget expects of the step, and of its decodes alone."""
    step_time = informed_budget().step_time
    num_decodes = plan.num_decodes
    context = sum(plan.starts[:num_decodes]) + num_decodes
    return step_time.predict(StepLoad.of(plan)), step_time.predict(StepLoad(num_decodes, context))


@settings(max_examples=examples(60), deadline=None)
@given(arrivals=ARRIVALS)
def test_predicted_step_keeps_the_smallest_target_of_its_decodes_unless_prompts_get_their_least(
    arrivals: list[list[tuple[int, int, float | None]]],
) -> None:
    for _, plan, target_ms in plans(arrivals):
        num_prefill = plan.num_tokens - plan.num_decodes
        if target_ms is None or num_prefill <= BLOCK_SIZE:
            continue
        step_s, decode_s = predicted_s(plan)
        assert step_s <= max(MARGIN * target_ms / 1000, (1 + LEAST_SHARE) * decode_s) + 1e-9


@settings(max_examples=examples(60), deadline=None)
@given(arrivals=ARRIVALS)
def test_prompts_get_as_much_as_the_target_allows_and_a_block_in_any_case(
    arrivals: list[list[tuple[int, int, float | None]]],
) -> None:
    """No step with a prompt left over could take a token more, and each takes a block of tokens at least. So a prompt
    of n tokens that is first in line is computed after n / BLOCK_SIZE steps, rounded up, whatever the targets."""
    cost = informed_budget().step_time.prefill_cost()
    for scheduler, plan, target_ms in plans(arrivals):
        left = [s for s in scheduler.held() if s.seat is not None and s.num_computed < s.num_prompt_tokens]
        num_prefill = plan.num_tokens - plan.num_decodes
        if not left or plan.num_tokens == LIMITS.max_num_tokens:
            continue
        assert num_prefill >= BLOCK_SIZE
        assert target_ms is not None
        step_s, decode_s = predicted_s(plan)
        longest_s = max(MARGIN * target_ms / 1000, (1 + LEAST_SHARE) * decode_s)
        cut = max(s.num_computed for s in left)
        # A longer chunk also moves its middle, and a chunk of one token costs what a decode does.
        assert step_s + cost.of(2, cut) + cost.work_s * LIMITS.max_num_tokens + cost.context_s * cut > longest_s


@settings(max_examples=examples(200), deadline=None)
@given(
    num_tokens=st.integers(1, 5000),
    position=st.integers(0, 100_000),
    microseconds=st.integers(0, 10**6),
    cost=st.builds(
        PrefillCost, *[st.sampled_from(values) for values in ((0, 1e-5, 1e-3), (0, 1e-9, 1e-7), (0, 1e-8, 1e-6))]
    ),
)
def test_fitting_tokens_take_the_time_and_one_more_would_not(
    num_tokens: int, position: int, microseconds: int, cost: PrefillCost
) -> None:
    seconds = microseconds / 1e6
    num_fitting = cost.fitting(num_tokens, position, seconds)

    assert 0 <= num_fitting <= num_tokens
    assert num_fitting == 0 or cost.of(num_fitting, position) <= seconds
    if 1 < num_fitting + 1 < num_tokens:
        # Rounding may lose a token.
        assert cost.of(num_fitting + 2, position) > seconds


def tokens_beside(*targets_ms: float | None) -> int:
    """Prompt tokens in a step beside decodes with these targets."""
    scheduler, budget = Scheduler(LIMITS, BlockPool(5000, BLOCK_SIZE)), informed_budget()
    for i, target_ms in enumerate(targets_ms):
        scheduler.offer(sequence(f"d{i}", 1, 100, target_ms))
    if targets_ms:
        retire(scheduler, scheduler.schedule())
    scheduler.offer(sequence("prompt", 4000, 1, 1.0))
    plan = scheduler.schedule(budget.allowance(scheduler.decode_load(), BLOCK_SIZE))
    return plan.num_tokens - plan.num_decodes


def test_smallest_target_of_the_decodes_counts_and_that_of_the_prompt_does_not() -> None:
    assert tokens_beside() == tokens_beside(None) + 1 == tokens_beside(None, None) + 2 == LIMITS.max_num_tokens
    assert tokens_beside(None, 50.0) == tokens_beside(50.0, 60.0) == tokens_beside(60.0, 50.0)
    assert tokens_beside(30.0) < tokens_beside(50.0) < tokens_beside(60.0)


def test_target_of_a_decode_counts_only_while_it_decodes() -> None:
    scheduler = Scheduler(LIMITS, BlockPool(5000, BLOCK_SIZE))
    strict, cancelled = sequence("strict", 1, 3, 20.0), sequence("cancelled", 1, 100, 10.0)
    for each in (strict, cancelled, sequence("lax", 1, 100, 90.0)):
        scheduler.offer(each)
    assert scheduler.decode_load().target_ms is None
    retire(scheduler, scheduler.schedule())
    assert scheduler.decode_load().target_ms == 10.0

    scheduler.cancel("cancelled", 1, FinishReason.CANCELLED)
    assert scheduler.decode_load().target_ms == 20.0

    while strict.num_output_tokens < 3:
        retire(scheduler, scheduler.schedule())
    assert scheduler.decode_load().target_ms == 90.0


def test_a_prompt_is_computed_although_the_decodes_are_late_and_takes_three_times_as_long_at_most() -> None:
    # Given decodes that no step can serve in time, on an executor that has learned what prompts take
    ride = Ride(replace(LIMITS, max_num_sequences=32), jitter=0.0)
    for i in range(4):
        ride.submit(sequence(f"earlier {i}", 1000, 2, None))
    for i in range(24):
        ride.submit(sequence(f"late {i}", 60, 4000, 1.0))
    ride.run_until(3.0)

    # When a prompt comes
    prompt, began_s = sequence("prompt", 4000, 1, None), ride.device.now_s
    ride.submit(prompt)
    while not ride.token_times[prompt]:
        ride.engine.step()

    # Then its own work takes a third of the time: it gets half as much time as the decodes
    work_s = PrefillCost(150e-6, 0.1e-6).of(4000, 0)
    assert 2 * work_s < ride.device.now_s - began_s < 1.1 * work_s * (1 + 1 / LEAST_SHARE)
