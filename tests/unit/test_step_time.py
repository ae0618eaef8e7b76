"""The model of step durations, and the prefill budget that keeps running decodes from waiting."""

from __future__ import annotations

import random
from itertools import pairwise

import pytest

from inflight.executor.engine.prefill_budget import FIRST_TOKENS, LONGEST_STEP_S, MARGIN, MeanWait, PrefillBudget
from inflight.executor.engine.step_time import FEWEST_STEPS, LARGEST_SURPRISE, UNKNOWN_TOKEN_S, StepLoad, StepTime
from inflight.executor.scheduler.sequence import PlanRow, Sampling, Sequence, StepPlan, Stopping
from inflight.executor.scheduler.step_constraint import DecodeLoad
from tests.support.device.modelled_device import Ride, step_seconds
from tests.support.device.paged_cases import make_sequence as paged_sequence
from tests.support.scheduler.scheduling import make_limits

LIMITS = make_limits(
    max_num_sequences=32, num_standby_sequences=2, max_num_tokens=512, context_length=2048, enable_prefix_cache=False
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


def decodes(num_decodes: int, target_ms: float | None) -> DecodeLoad:
    return DecodeLoad(num_decodes, num_decodes * 400, target_ms)


def budget(max_inter_token_ms: float = 0.0) -> PrefillBudget:
    """A budget that has learned the steps."""
    result = PrefillBudget(max_inter_token_ms)
    result.step_time = learned()
    return result


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
        chunk = learned().prefill_cost().fitting(10_000, 700, 0.030)

        added = step_seconds(StepLoad(chunk, 0, chunk * (700 + chunk / 2))) - step_seconds(StepLoad(0, 0))
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

    @pytest.mark.parametrize("prefill_work", [0.0, 5000.0])
    def test_tokens_are_expected_to_take_long_until_steps_of_their_kind_were_observed(
        self, prefill_work: float
    ) -> None:
        step_time, load = StepTime(), StepLoad(100, 400, prefill_work)
        for _ in range(FEWEST_STEPS):
            assert step_time.expect(load) == 100 * UNKNOWN_TOKEN_S
            step_time.observe(load, 40.0)
        assert step_time.expect(load) == step_time.predict(load) == pytest.approx(40.0, rel=0.01)

    def test_before_the_first_step_it_predicts_nothing_and_fits_everything(self) -> None:
        assert StepTime().predict(StepLoad(5, 5)) == 0
        assert StepTime().prefill_cost().fitting(10_000, 0, 0.01) == 10_000


class TestPrefillBudget:
    @pytest.mark.parametrize("load", [decodes(0, 10.0), decodes(20, None)])
    def test_chunk_without_a_target_takes_as_long_as_the_longest_step(self, load: DecodeLoad) -> None:
        chunk = budget().allowance(load, 16).fitting(100_000, 500)
        work = chunk * (500 + chunk / 2)
        together_s = step_seconds(StepLoad(load.num_decodes + chunk, load.context, work))
        assert MARGIN * 0.9 * LONGEST_STEP_S < together_s < LONGEST_STEP_S

    @pytest.mark.parametrize("load", [decodes(20, None), decodes(0, 10.0)])
    @pytest.mark.parametrize(("token_s", "num_tokens"), [(0.001, 4750), (1.0, FIRST_TOKENS)])
    def test_prompts_without_a_target_get_few_tokens_only_before_the_first_step(
        self, load: DecodeLoad, token_s: float, num_tokens: int
    ) -> None:
        fresh = PrefillBudget()
        assert fresh.allowance(load, 16).fitting(10_000, 500) == FIRST_TOKENS
        fresh.step_time.observe(StepLoad(100, 0, 100.0), 100 * token_s)
        assert fresh.allowance(load, 16).fitting(10_000, 500) == num_tokens

    def test_prompts_get_few_tokens_beside_decodes_while_their_cost_is_unknown(self) -> None:
        fresh = PrefillBudget()
        for _ in range(FEWEST_STEPS):
            allowance = fresh.allowance(decodes(20, 10.0), 16)
            assert allowance.fitting(10_000, 500) == FIRST_TOKENS
            allowance.take(FIRST_TOKENS - 1, 500)
            assert allowance.fitting(10_000, 0) == 1
            fresh.step_time.observe(StepLoad(100, 0, 100.0), 0.02)
        allowance = fresh.allowance(decodes(20, 10.0), 16)
        assert allowance.fitting(10_000, 500) < FIRST_TOKENS, "limited by the target from here on"

    def test_block_of_tokens_is_larger_than_the_first_few_tokens(self) -> None:
        allowance = PrefillBudget().allowance(decodes(20, 10.0), 2 * FIRST_TOKENS)
        assert allowance.fitting(10_000, 0) == 2 * FIRST_TOKENS

    @pytest.mark.parametrize(
        ("max_inter_token_ms", "target_ms", "longest_ms"), [(0.0, 60.0, 60.0), (60.0, None, 60.0), (60.0, 90.0, 60.0)]
    )
    def test_step_is_as_long_as_the_target_allows(
        self, max_inter_token_ms: float, target_ms: float | None, longest_ms: float
    ) -> None:
        allowance = budget(max_inter_token_ms).allowance(decodes(20, target_ms), 16)

        chunk = allowance.fitting(10_000, 500)
        together_s = step_seconds(StepLoad(20 + chunk, 8000, chunk * (500 + chunk / 2)))
        assert MARGIN * 0.95 * longest_ms < together_s * 1000 < longest_ms

    def test_prompts_get_a_third_of_the_time_when_the_decodes_are_late(self) -> None:
        allowance = budget().allowance(decodes(20, 1.0), 16)

        chunk = allowance.fitting(10_000, 0)
        alone_s, together_s = (step_seconds(StepLoad(20 + n, 8000, n * n / 2)) for n in (0, chunk))
        assert together_s - alone_s == pytest.approx(together_s / 3, rel=0.1)

    def test_prompts_get_a_block_of_tokens_in_any_case(self) -> None:
        allowance = budget().allowance(decodes(20, 1.0), 16)

        assert allowance.fitting(10_000, 10**6) == 16
        allowance.take(10, 10**6)
        assert allowance.fitting(10_000, 10**6) == 6
        allowance.take(6, 10**6)
        assert allowance.fitting(10_000, 10**6) == 0


class TestWaits:
    def test_step_that_was_not_planned_ahead_costs_what_the_device_waits_longer(self) -> None:
        one, found = sequence("a", 3, 50), PrefillBudget()
        ahead, behind = (StepPlan.of([PlanRow(one, 4, 1, True, carries)]) for carries in (True, False))
        prompt = StepPlan.of([PlanRow(one, 0, 3, True)])
        for _ in range(100):
            found.observe_wait(ahead, 0.001)
            found.observe_wait(behind, 0.004)
            found.observe_wait(prompt, 5.0)
        terms = found.draft_terms(DecodeLoad(1, 5, None))
        assert (terms.host_s, terms.wait_s) == pytest.approx((0.001, 0.003), rel=0.01)
        assert terms.with_waits(1, 2)(1) == pytest.approx(0.001)
        assert terms.with_waits(1, 2)(2) == pytest.approx(0.007, rel=0.01)

    def test_single_long_wait_counts_little(self) -> None:
        mean = MeanWait()
        for seconds in (*[0.001] * 50, 60.0):
            mean.observe(seconds)
        assert mean.seconds < 0.0012


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


def ride_with_long_prompts(target_ms: float | None) -> tuple[float, float, float]:
    """24 sequences decode while 1,500-token prompts arrive; returns p50 and p99 between the tokens of the 24, and the
    longest time to a first token of the others, in seconds."""
    ride = Ride(LIMITS)
    steady = [sequence(f"steady-{i}", 60, 1000) for i in range(24)]
    for each in steady:
        each.inter_token_target_ms = target_ms
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


def test_first_burst_on_an_executor_does_not_hold_up_its_own_first_sequences() -> None:
    # Given an executor that has run no step, so that it knows no cost
    ride = Ride(LIMITS)
    # When more prompts come at once than a step holds: the first sequences decode while the others are computed
    burst = [sequence(f"burst-{i}", 100, 40) for i in range(30)]
    for each in burst:
        each.inter_token_target_ms = 60.0
        ride.submit(each)
    times = [ride.token_times[each] for each in burst]
    while any(len(own) < 40 for own in times):
        ride.engine.step()

    # Then no step takes longer than their target
    assert max(after - before for own in times for before, after in pairwise(own)) <= 0.060


@pytest.mark.parametrize("target_ms", [30.0, 60.0])
def test_long_prompts_do_not_hold_up_those_in_the_middle_of_an_answer(target_ms: float) -> None:
    _, p99, longest_wait = ride_with_long_prompts(target_ms)

    assert p99 <= target_ms / 1000
    # Alone on the device, in steps of 512 tokens, the prompt takes a third of a second.
    assert longest_wait < 1.2


def test_no_step_of_a_slow_device_takes_long_or_longer_than_the_watchdog_allows() -> None:
    # Given a device that needs 20 s for a step of 512 tokens, and longer with a long context
    ride = Ride(LIMITS)
    ride.device.slowness = 220.0
    prompts = [sequence(f"long-{i}", 1500, 8) for i in range(4)]
    for prompt in prompts:
        ride.submit(prompt)
    while any(len(ride.token_times[prompt]) < 8 for prompt in prompts):
        num_launched = len(ride.device.durations_s)
        ride.engine.step()
        # Then each step takes less than the watchdog allows it
        for duration_s in ride.device.durations_s[num_launched:]:
            assert duration_s < max(5.0, LARGEST_SURPRISE * ride.engine.expected_step_s)
    assert max(ride.device.durations_s) < 2 * LONGEST_STEP_S


def test_larger_target_brings_first_tokens_sooner() -> None:
    waits = [ride_with_long_prompts(target_ms)[2] for target_ms in (30.0, 60.0, None)]

    assert waits[0] > 1.5 * waits[1] > 1.5 * waits[2]


def test_without_a_target_long_prompts_hold_them_up() -> None:
    p50, p99, _ = ride_with_long_prompts(None)

    assert p99 > 4 * p50
