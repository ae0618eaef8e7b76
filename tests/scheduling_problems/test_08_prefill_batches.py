"""Problem 8: so many prompts share a step that the first waits until the last is computed."""

from __future__ import annotations

from dataclasses import replace

from inflight.executor.engine.step_time import StepLoad
from inflight.executor.scheduler.sequence import Sequence
from tests.scheduling_problems.test_07_long_prompts import LIMITS, arrive
from tests.support.device.modelled_device import Ride, step_seconds

NUM_PROMPTS, NUM_TOKENS = 24, 256
SEATS = replace(LIMITS, max_num_sequences=NUM_PROMPTS, context_length=1024)


def first_tokens(ride: Ride, sequences: list[Sequence]) -> list[float]:
    """When each had its first token."""
    while not all(ride.token_times[sequence] for sequence in sequences):
        ride.engine.step()
    return [ride.token_times[sequence][0] for sequence in sequences]


def test_first_of_a_crowd_does_not_wait_for_the_last() -> None:
    ride = Ride(SEATS, jitter=0.0)
    times = first_tokens(ride, [arrive(ride, f"r{i}", NUM_TOKENS, 40) for i in range(NUM_PROMPTS)])

    assert times == sorted(times)
    # Half of a crowd has had its first token when half of the time is over, give or take two steps, and a third one
    # because the first two are small while the cost of prompts is unknown
    a_step_s = step_seconds(StepLoad(512, 0, 512 * 256.0))
    assert times[NUM_PROMPTS // 2] < times[-1] / 2 + 3 * a_step_s
    # And the first as if it had come with one other; it is read a step late
    assert times[0] < 3 * a_step_s


def test_step_takes_no_more_prompts_than_its_budget_and_none_boards_for_nothing() -> None:
    ride = Ride(SEATS, jitter=0.0)
    for i in range(NUM_PROMPTS):
        arrive(ride, f"r{i}", NUM_TOKENS, 40)
    took = []
    for _ in range(6):
        began_s = ride.device.now_s
        ride.engine.step()
        took.append(ride.device.now_s - began_s)

    assert max(took) <= step_seconds(StepLoad(512, 0, 512 * 512.0)) + 0.02
    assert ride.engine._scheduler.num_waiting > 0
