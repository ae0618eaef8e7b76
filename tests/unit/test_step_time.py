"""The model of step durations, and the prefill budget that keeps running decodes from waiting."""

from __future__ import annotations

import random

import pytest

from executor.engine.prefill_budget import MARGIN, PrefillBudget
from executor.engine.step_time import FEWEST_STEPS, StepLoad, StepTime
from executor.scheduler.scheduler import Batching, SchedulerLimits
from executor.scheduler.sequence import PlanRow, Sampling, Sequence, StepPlan, Stopping
from executor.scheduler.step_constraint import PrefillDemand
from tests.modelled_device import Ride, step_seconds
from tests.paged_cases import make_sequence as paged_sequence

LIMITS = SchedulerLimits(
    max_num_sequences=32,
    num_standby_sequences=2,
    max_num_tokens=512,
    context_length=2048,
    enable_chunked_context=True,
    batching=Batching.INFLIGHT,
    enable_prefix_cache=False,
)


def random_load(numbers: random.Random, with_prefill: bool) -> StepLoad:
    num_decodes, chunk = numbers.randrange(1, 32), numbers.randrange(16, 480)
    context = num_decodes * numbers.randrange(50, 1500)
    if not with_prefill:
        return StepLoad(num_decodes, context)
    return StepLoad(num_decodes + chunk, context, chunk * numbers.randrange(0, 1500))


def learned(num_steps: int = 300, jitter: float = 0.03) -> StepTime:
    """What is learned from steps of all kinds."""
    numbers, step_time = random.Random(1), StepTime()
    for i in range(num_steps):
        load = random_load(numbers, i % 3 == 0)
        step_time.observe(load, step_seconds(load) * (1 + numbers.uniform(-jitter, jitter)))
    return step_time


def demand(num_behind: int = 1, num_decodes: int = 20, position: int = 500) -> PrefillDemand:
    return PrefillDemand(num_decodes, num_decodes * 400, num_behind, position)


class TestStepTime:
    def test_load_of_a_plan_counts_tokens_contexts_and_work(self) -> None:
        decode, chunk = paged_sequence([0] * 18, [1, 2]), paged_sequence([0] * 64, [3, 4, 5])
        rows = [PlanRow(decode, 17, 1, True), PlanRow(chunk, 16, 20, False)]

        assert StepLoad.of(StepPlan.of(rows)) == StepLoad(21, 18, 20 * 26.0)
        assert StepLoad.of(StepPlan.of(rows[:1])) == StepLoad(1, 18)

    def test_it_predicts_what_it_has_learned(self) -> None:
        step_time, numbers = learned(), random.Random(2)

        for i in range(50):
            load = random_load(numbers, i % 2 == 0)
            assert step_time.predict(load) == pytest.approx(step_seconds(load), rel=0.06)

    def test_chunk_takes_the_time_it_may(self) -> None:
        chunk = learned().fitting_chunk(0.030, 700)

        added = step_seconds(StepLoad(int(chunk), 0, chunk * (700 + chunk / 2))) - step_seconds(StepLoad(0, 0))
        assert added == pytest.approx(0.030, rel=0.1)

    def test_many_decodes_do_not_make_it_forget_prompts(self) -> None:
        step_time, numbers = learned(), random.Random(3)
        for _ in range(5000):
            load = random_load(numbers, False)
            step_time.observe(load, step_seconds(load))

        load = StepLoad(220, 8000, 200 * 600.0)
        assert step_time.predict(load) == pytest.approx(step_seconds(load), rel=0.1)

    def test_it_follows_a_device_that_becomes_slower(self) -> None:
        step_time, numbers = learned(), random.Random(4)
        for i in range(2000):
            load = random_load(numbers, i % 3 == 0)
            step_time.observe(load, 2 * step_seconds(load))

        load = StepLoad(120, 8000, 100 * 600.0)
        assert step_time.predict(load) == pytest.approx(2 * step_seconds(load), rel=0.1)

    def test_nothing_is_negative_when_the_device_is_faster_with_more(self) -> None:
        step_time = StepTime()
        for num_tokens in range(1, 200):
            step_time.observe(StepLoad(num_tokens, 0), 1 / num_tokens)

        assert step_time.predict(StepLoad(10_000, 10_000, 1e6)) >= step_time.predict(StepLoad(1, 0)) > 0

    def test_one_stall_hardly_counts(self) -> None:
        step_time = learned()
        step_time.observe(StepLoad(20, 8000), 5.0)

        assert step_time.predict(StepLoad(20, 8000)) == pytest.approx(step_seconds(StepLoad(20, 8000)), rel=0.1)

    def test_before_the_first_step_it_expects_nothing_and_fits_everything(self) -> None:
        assert StepTime().predict(StepLoad(5, 5)) == 0
        assert StepTime().fitting_chunk(0.01, 0) == float("inf")


class TestPace:
    def test_no_prompt_is_held_up_when_no_sequence_decodes(self) -> None:
        assert PrefillBudget(learned(), 0.0, 16).max_prefill_tokens(demand(num_decodes=0)) is None

    def test_nothing_is_limited_before_steps_with_prefill_were_seen(self) -> None:
        step_time = StepTime()
        for _ in range(FEWEST_STEPS - 1):
            step_time.observe(StepLoad(100, 0, 100.0), 0.02)
        assert PrefillBudget(step_time, 0.0, 16).max_prefill_tokens(demand()) is None

    def test_step_with_prefill_takes_at_most_twice_that_of_the_decodes(self) -> None:
        chunk = PrefillBudget(learned(), 0.0, 16).max_prefill_tokens(demand())

        assert chunk is not None
        alone_s = step_seconds(StepLoad(20, 8000))
        together_s = step_seconds(StepLoad(20 + chunk, 8000, chunk * (500 + chunk / 2)))
        assert 2 * MARGIN * 0.95 * alone_s < together_s < 2 * alone_s

    def test_limit_in_milliseconds_is_kept(self) -> None:
        chunk = PrefillBudget(learned(), 60.0, 16).max_prefill_tokens(demand())

        assert chunk is not None
        assert step_seconds(StepLoad(20 + chunk, 8000, chunk * (500 + chunk / 2))) == pytest.approx(0.06, rel=0.06)

    def test_prompts_go_on_when_the_decodes_alone_take_too_long(self) -> None:
        assert PrefillBudget(learned(), 1.0, 16).max_prefill_tokens(demand()) == 16

    def test_many_who_wait_for_a_first_token_count_more_than_few_who_decode(self) -> None:
        pace = PrefillBudget(learned(), 0.0, 16)
        few, many = (pace.max_prefill_tokens(demand(num_behind=n, num_decodes=4)) for n in (4, 5))
        assert few is not None
        assert many is None


def sequence(name: str, num_prompt: int, max_tokens: int) -> Sequence:
    return Sequence(
        request_id=name,
        attempt=1,
        token_ids=[3] * num_prompt,
        num_prompt_tokens=num_prompt,
        sampling=Sampling(0.0, 0, 1.0, 0),
        stopping=Stopping(max_tokens, 0, frozenset()),
        num_reserved_blocks=128,
        cache_salt=None,
    )


def ride_with_long_prompts(max_inter_token_ms: float) -> tuple[float, float, float]:
    """24 sequences decode while 1,500-token prompts arrive; returns p50 and p99 between the tokens of the 24, and the
    longest time to a first token of the others, in seconds."""
    ride = Ride(LIMITS, max_inter_token_ms)
    steady = [sequence(f"steady-{i}", 60, 1000) for i in range(24)]
    for each in steady:
        ride.submit(each)
    ride.run_until(2.0)
    waits = []
    for i in range(6):
        arrived_s, late = ride.device.now_s, sequence(f"late-{i}", 1500, 20)
        ride.submit(late)
        ride.run_until(arrived_s + 1.5)
        waits.append(ride.token_times[late][0] - arrived_s)
    gaps = sorted(
        after - before
        for each in steady
        for before, after in zip(ride.token_times[each], ride.token_times[each][1:], strict=False)
        if before > 2.0
    )
    return gaps[len(gaps) // 2], gaps[len(gaps) * 99 // 100], max(waits)


def test_long_prompts_do_not_hold_up_those_in_the_middle_of_an_answer() -> None:
    p50, p99, longest_wait = ride_with_long_prompts(0.0)

    assert p99 <= 2 * p50
    # Alone on the device, in steps of 512 tokens, the prompt takes a third of a second.
    assert longest_wait < 1.0


def test_without_a_pace_long_prompts_hold_them_up() -> None:
    p50, p99, _ = ride_with_long_prompts(1e9)

    assert p99 > 4 * p50
