"""Problem 7: the prefill of a long prompt stalls the streams of all other requests."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import pytest

from inflight.executor.scheduler.sequence import Sequence
from tests.support.device.modelled_device import Ride
from tests.support.scheduler.scheduling import make_limits, make_sequence
from tests.support.stack.cluster import ExecutorShape, run_cluster, token_request

TARGET_MS = 40.0
LIMITS = make_limits(
    max_num_sequences=32, num_standby_sequences=4, max_num_tokens=512, context_length=16_384, enable_prefix_cache=False
)


def long_sequence(name: str, num_prompt: int, max_tokens: int) -> Sequence:
    """A sequence for the modelled device."""
    sequence = make_sequence(name, [1] * num_prompt, max_tokens=max_tokens, salt=None)
    sequence.num_reserved_blocks = -(-(num_prompt + max_tokens) // 16)
    return sequence


def arrive(ride: Ride, name: str, num_prompt: int, max_tokens: int, target_ms: float | None = None) -> Sequence:
    """A sequence that comes now."""
    sequence = long_sequence(name, num_prompt, max_tokens)
    sequence.inter_token_target_ms = target_ms
    ride.submit(sequence)
    return sequence


def test_no_answer_stands_still_while_a_long_prompt_is_computed() -> None:
    # Given answers under way, on an executor that has learned what prompts take
    ride = Ride(LIMITS)
    answers = [arrive(ride, f"answer {i}", 60, 4000, TARGET_MS) for i in range(20)]
    for i in range(4):
        arrive(ride, f"earlier {i}", 1000, 1)
    ride.run_until(3.0)

    # When a prompt of 8,000 tokens comes, which takes seconds
    long = arrive(ride, "long", 8000, 4)
    began_s = ride.device.now_s
    while not ride.token_times[long]:
        ride.engine.step()

    # Then no token of theirs is later than its target
    ended_s = ride.device.now_s
    assert ended_s - began_s < 15.0
    for answer in answers:
        times = [time for time in ride.token_times[answer] if time < ended_s]
        gaps = [(after - before, after) for before, after in itertools.pairwise(times)]
        assert max(gap for gap, at in gaps if at > began_s) < TARGET_MS / 1000


def test_long_prompt_leaves_the_others_their_tokens_in_every_step() -> None:
    """Whatever the device: who decodes is in each step, and what prompts get is what is left."""
    ride = Ride(replace(LIMITS, max_num_sequences=8))
    answers = [arrive(ride, f"answer {i}", 16, 400) for i in range(6)]
    for _ in range(4):
        ride.engine.step()
    long = arrive(ride, "long", 4000, 4)
    while not ride.token_times[long]:
        before = [len(ride.token_times[answer]) for answer in answers]
        ride.engine.step()
        assert [len(ride.token_times[answer]) for answer in answers] == [count + 1 for count in before]


@pytest.mark.parametrize(
    ("fields", "target_ms"),
    [({}, 100.0), ({"priority": "PRIORITY_CLASS_BATCH"}, None), ({"inter_token_target_ms": 40}, 40.0)],
)
async def test_executor_knows_the_target_of_a_request(
    redis_url: str, pool: str, fields: dict[str, Any], target_ms: float | None
) -> None:
    async with run_cluster(redis_url, pool, shape=ExecutorShape(max_num_sequences=1)) as cluster:
        router, executor = cluster.routers[0], cluster.executors[0]
        executor.brake.hold()
        call = router.stub.Generate(token_request([1, 2], 40, **fields))
        assert (await call.read()).event.HasField("accepted")
        assert [sequence.inter_token_target_ms for sequence in executor.scheduler.held()] == [target_ms]
        executor.brake.release()
        call.cancel()
