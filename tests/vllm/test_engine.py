"""`VllmEngine` over a fake vLLM: what it accepts, publishes and reports, step by step."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest

from inflight.executor.engine.output import EngineOutput, EngineStatus
from inflight.executor.scheduler.admission import Refusal
from inflight.executor.scheduler.limits import SchedulerLimits
from inflight.executor.scheduler.seat_view import SequencePhase
from inflight.executor.scheduler.sequence import MAX_YIELDING_ATTEMPTS, FinishReason, Processors, Sequence
from inflight.executor.scheduler.step_constraint import StepConstraint
from inflight.executor.vllm.engine import VllmEngine
from inflight.executor.vllm.parameters import REPLAYED_OUTPUT
from tests.support.scheduler.scheduling import LIMITS, STOP_ID, make_sequence
from tests.vllm.fake_backend import FakeBackend, greedy

WAIT_S = 60.0


class Bench:
    """An engine, its fake vLLM, and what it published."""

    def __init__(self, limits: SchedulerLimits = LIMITS) -> None:
        self.backend = FakeBackend()
        self.outputs: list[EngineOutput] = []
        self.num_deaths = 0
        self.engine = VllmEngine(self.backend, limits, self.outputs.append, self._die)
        self.engine.start()

    def _die(self) -> None:
        self.num_deaths += 1

    async def settle(self) -> None:
        """Returns when everything that is ready has run."""
        for _ in range(10):
            await asyncio.sleep(0)

    async def submit(self, *sequences: Sequence, time_left_ms: int | None = None) -> None:
        for sequence in sequences:
            self.engine.submit(sequence, time_left_ms)
        await self.settle()

    async def step(self, num_steps: int = 1) -> None:
        for _ in range(num_steps):
            self.backend.step()
            await self.settle()

    async def until(self, condition: Callable[[], object]) -> None:
        async with asyncio.timeout(WAIT_S):
            while not condition():
                await asyncio.sleep(0.001)

    @property
    def status(self) -> EngineStatus:
        status = self.outputs[-1].status
        assert status is not None
        return status

    @property
    def ends(self) -> list[tuple[str, FinishReason]]:
        return [(one.sequence.request_id, one.reason) for output in self.outputs for one in output.finished]


@pytest.fixture
async def bench() -> AsyncIterator[Bench]:
    running = Bench()
    await running.settle()
    yield running
    await running.engine.close()


async def test_each_step_publishes_the_tokens_of_all_sequences_at_once(bench: Bench) -> None:
    await bench.submit(make_sequence("a", [1, 2]), make_sequence("b", [3], max_tokens=2))
    assert [one.request_id for output in bench.outputs for one in output.accepted] == ["a", "b"]
    bench.outputs.clear()
    await bench.step(4)
    seen = [
        [(sequence.request_id, offset, token_id) for sequence, offset, token_id in output.tokens]
        for output in bench.outputs
    ]
    a, b = greedy([1, 2], 4), greedy([3], 2)
    assert seen == [
        [("a", 0, a[0]), ("b", 0, b[0])],
        [("a", 1, a[1]), ("b", 1, b[1])],
        [("a", 2, a[2])],
        [("a", 3, a[3])],
    ]
    assert [output.step for output in bench.outputs] == [1, 2, 3, 4]
    assert bench.ends == [("b", FinishReason.LENGTH), ("a", FinishReason.LENGTH)]
    assert [output.record and output.record.num_new_tokens for output in bench.outputs] == [2, 2, 1, 1]
    # What vLLM does not measure is not said to be 0.
    assert {output.record and output.record.part_s for output in bench.outputs} == {()}


async def test_sequence_boards_with_its_first_token_and_waits_until_then(bench: Bench) -> None:
    await bench.submit(*(make_sequence(name, [1, 2]) for name in "abc"))
    assert {one.phase for one in bench.status.held} == {SequencePhase.STANDBY}
    await bench.step()
    assert [one.request_id for one in bench.outputs[-1].boarded] == ["a", "b"]
    assert [one.phase for one in bench.status.held] == [None, None, SequencePhase.STANDBY]
    assert (bench.status.num_running, bench.status.num_waiting) == (2, 1)
    assert bench.status.constraint is StepConstraint.SEATS


async def test_tokens_and_seat_time_are_accounted_and_busy_time_is_unknown(bench: Bench) -> None:
    begun = make_sequence("begun", [5, 6, 7], prior_output=greedy([5, 6, 7], 2), max_tokens=4)
    await bench.submit(make_sequence("a", [1, 2], max_tokens=3), begun)
    await bench.step(3)
    totals = {one.account.priority: one.used for output in bench.outputs for one in output.usage}
    (used,) = totals.values()
    assert (used.output_tokens, used.computed_prompt_tokens, used.cached_prompt_tokens) == (3 + 2, 2, 0)
    assert used.seat_ns > 0
    assert used.busy_ns == used.block_ns == 0
    assert [event.sequence.used for output in bench.outputs for event in output.finished] == [None, None]


async def test_vllm_never_queues_more_than_the_standby(bench: Bench) -> None:
    most = LIMITS.max_num_sequences + LIMITS.num_standby_sequences
    await bench.submit(*(make_sequence(str(number), [1]) for number in range(most + 1)))
    assert len(bench.backend.requests) == most
    (rejected,) = [one for output in bench.outputs for one in output.rejected]
    assert (rejected[0].request_id, rejected[1]) == (str(most), Refusal.NO_CAPACITY)


async def test_standby_gets_seats_in_order_of_class(bench: Bench) -> None:
    await bench.submit(*(make_sequence(name, [1], max_tokens=2) for name in "ab"))
    await bench.step()
    await bench.submit(make_sequence("standard", [1]), make_sequence("interactive", [1], priority=1, max_tokens=1))
    assert [one.priority for one in bench.backend.requests] == [0, 0, 0, -1]
    await bench.step(2)
    boarded = [one.request_id for output in bench.outputs for one in output.boarded]
    assert boarded == ["a", "b", "interactive", "standard"]


async def test_newest_of_class_batch_gives_its_seat_to_another_class_at_once(bench: Bench) -> None:
    batch = [make_sequence(f"batch {number}", [1], max_tokens=9, priority=-1) for number in range(3)]
    await bench.submit(*batch)
    await bench.step()
    assert bench.ends == []
    await bench.submit(make_sequence("standard", [2]))
    assert bench.ends == [("batch 1", FinishReason.PREEMPTED)]
    await bench.step()
    assert [one.request_id for one in bench.outputs[-1].boarded] == ["standard"]
    assert [one.name for one in bench.backend.requests] == ["batch 0#1", "batch 2#1", "standard#1"]


async def test_class_batch_keeps_its_seat_if_it_was_placed_often_or_one_is_free(bench: Bench) -> None:
    await bench.submit(make_sequence("batch 0", [1], max_tokens=9, priority=-1))
    await bench.submit(make_sequence("standard", [2], max_tokens=9))
    often = make_sequence("batch 0", [1], max_tokens=9, priority=-1, attempt=MAX_YIELDING_ATTEMPTS + 1)
    await bench.submit(often)
    bench.outputs.clear()
    await bench.step()
    await bench.submit(make_sequence("interactive", [3], priority=1))
    assert bench.ends == []


async def test_reservations_never_exceed_the_blocks_of_vllm(bench: Bench) -> None:
    num_tokens = 20 * bench.backend.facts.block_size
    sequences = [make_sequence(name, [1], max_tokens=40) for name in "ab"]
    for sequence in sequences:
        sequence.num_reserved_blocks = num_tokens // bench.backend.facts.block_size
    await bench.submit(*sequences)
    assert [one.name for one in bench.backend.requests] == ["a#1"]
    assert bench.status.kv.reserved_blocks == 20


async def test_output_so_far_is_continued_at_its_offset(bench: Bench) -> None:
    prior = greedy([1, 2], 3)
    await bench.submit(make_sequence("a", [1, 2], prior_output=prior, max_tokens=6))
    await bench.step(3)
    tokens = [(offset, token_id) for output in bench.outputs for _, offset, token_id in output.tokens]
    assert tokens == list(enumerate(greedy([1, 2], 6)))[3:]
    assert bench.ends == [("a", FinishReason.LENGTH)]


async def test_output_so_far_that_is_generated_again_is_not_published(bench: Bench) -> None:
    prior = [7, 3, 5]
    sequence = make_sequence("a", [1, 2], prior_output=prior, max_tokens=6)
    sequence.processors = Processors(presence_penalty=1.0)
    await bench.submit(sequence)
    (request,) = bench.backend.requests
    assert request.token_ids == [1, 2]
    await bench.step(6)
    tokens = [(offset, token_id) for output in bench.outputs for _, offset, token_id in output.tokens]
    assert tokens == list(enumerate([*prior, *greedy([1, 2, *prior], 3)]))[3:]
    assert bench.ends == [("a", FinishReason.LENGTH)]


async def test_other_output_than_before_ends_a_sequence(bench: Bench) -> None:
    sequence = make_sequence("a", [1, 2], prior_output=[7, 3], max_tokens=6)
    sequence.processors = Processors(presence_penalty=1.0)
    await bench.submit(sequence)
    bench.backend.requests[0].parameters["extra_args"][REPLAYED_OUTPUT][1] = 4
    await bench.step(2)
    (event,) = bench.outputs[-1].finished
    assert (event.reason, "has not generated" in event.error) == (FinishReason.ERROR, True)
    assert not any(list(output.tokens) for output in bench.outputs)


async def test_stop_token_ends_a_sequence(bench: Bench) -> None:
    sequence = make_sequence("a", [1, 2], max_tokens=6)
    first = greedy([1, 2], 1)[0]
    sequence.stopping = type(sequence.stopping)(6, 0, frozenset({first, STOP_ID}))
    await bench.submit(sequence)
    await bench.step()
    (event,) = bench.outputs[-1].finished
    assert (event.reason, event.stop_token_id) == (FinishReason.STOP_TOKEN, first)


async def test_end_of_the_reservation_returns_a_sequence_to_its_router(bench: Bench) -> None:
    sequence = make_sequence("a", [1, 2], max_tokens=10)
    sequence.num_reserved_blocks = 1
    await bench.submit(sequence)
    await bench.step(2)
    assert bench.ends == [("a", FinishReason.PREEMPTED)]
    assert len(sequence.token_ids) == bench.backend.facts.block_size


@pytest.mark.parametrize("num_steps", [0, 2])
async def test_cancel_aborts_the_request_in_vllm(bench: Bench, num_steps: int) -> None:
    await bench.submit(make_sequence("a", [1, 2], max_tokens=20))
    await bench.step(num_steps)
    bench.engine.cancel("a", 2)
    await bench.settle()
    assert bench.ends == []
    bench.engine.cancel("a", 1)
    await bench.settle()
    assert bench.ends == [("a", FinishReason.CANCELLED)]
    assert bench.backend.requests == []
    assert (bench.status.used_blocks, bench.status.kv.reserved_blocks, bench.status.num_running) == (0, 0, 0)


async def test_deadline_ends_a_sequence_that_waits(bench: Bench) -> None:
    await bench.submit(make_sequence("a", [1, 2]), time_left_ms=1)
    await bench.until(lambda: bench.ends)
    assert bench.ends == [("a", FinishReason.DEADLINE)]
    assert bench.backend.requests == []


async def test_newer_attempt_ends_the_older_one_and_is_another_request(bench: Bench) -> None:
    await bench.submit(make_sequence("a", [1, 2]))
    await bench.submit(make_sequence("a", [1, 2], attempt=2), make_sequence("a", [1, 2], attempt=1))
    assert bench.ends == [("a", FinishReason.CANCELLED)]
    assert [one.name for one in bench.backend.requests] == ["a#2"]
    assert [refusal for output in bench.outputs for _, refusal in output.rejected] == [Refusal.STALE_ATTEMPT]


async def test_preemption_is_reported_as_overrun_until_vllm_resumes(bench: Bench) -> None:
    sequences = [make_sequence(name, [1, 2], max_tokens=20) for name in "ab"]
    await bench.submit(*sequences)
    await bench.step()
    before = bench.status.budget_blocks
    bench.backend.preempt("b#1")
    await bench.step()
    assert [one.request_id for one in bench.outputs[-1].preempted] == ["b"]
    assert bench.status.budget_blocks == before - sequences[1].num_reserved_blocks
    assert (bench.status.num_preempted, bench.status.num_preemptions) == (1, 1)
    assert bench.status.held[1].phase is SequencePhase.PREEMPTED
    bench.backend.resume("b#1")
    await bench.step()
    assert [one.request_id for one in bench.outputs[-1].boarded] == ["b"]
    assert bench.status.budget_blocks == before
    assert len(sequences[1].token_ids) == 4


async def test_cached_prefixes_that_nothing_uses_are_reported(bench: Bench) -> None:
    prompt = list(range(2 * bench.backend.facts.block_size))
    await bench.submit(make_sequence("a", prompt, max_tokens=1))
    await bench.step()
    assert (bench.status.cached_blocks, bench.status.used_blocks) == (2, 0)
    assert (bench.status.kv.evictable_blocks, bench.status.kv.published_blocks) == (2, 2)
    await bench.submit(make_sequence("b", prompt, max_tokens=8))
    await bench.step()
    assert (bench.status.cached_blocks, bench.status.used_blocks) == (0, 3)


async def test_drain_refuses_and_lets_the_others_go_on(bench: Bench) -> None:
    await bench.submit(make_sequence("a", [1, 2], max_tokens=2))
    bench.engine.drain()
    await bench.submit(make_sequence("b", [1]))
    assert bench.status.draining
    await bench.step(2)
    assert bench.ends == [("a", FinishReason.LENGTH)]
    assert [refusal for output in bench.outputs for _, refusal in output.rejected] == [Refusal.DRAINING]


async def test_death_of_vllm_ends_no_sequence(bench: Bench) -> None:
    await bench.submit(make_sequence("a", [1, 2]), make_sequence("b", [1]))
    await bench.step()
    bench.backend.die()
    await bench.settle()
    assert bench.num_deaths == 1
    assert bench.ends == []


async def test_request_that_vllm_refuses_ends_with_its_words(bench: Bench) -> None:
    sequence = make_sequence("a", [1, 2])
    sequence.sampling = type(sequence.sampling)(3.0, 0, 1.0, 0)
    await bench.submit(sequence)
    (event,) = bench.outputs[-1].finished
    assert event.reason is FinishReason.ERROR
    assert "temperature must be in [0, 2]" in event.error


async def test_log_probabilities_of_prompt_and_output_are_kept(bench: Bench) -> None:
    sequence = make_sequence("a", [1, 2, 3], max_tokens=2)
    sequence.num_top_logprobs, sequence.num_prompt_logprobs = 2, 1
    await bench.submit(sequence)
    await bench.step(2)
    assert sorted(sequence.logprobs) == [0, 1]
    assert len(sequence.prompt_logprobs) == 2
    (scored,) = [rows for output in bench.outputs for rows in output.scored]
    assert (scored.start, scored.end) == (0, 2)


async def test_sequences_are_listed_with_their_seats(bench: Bench) -> None:
    await bench.submit(*(make_sequence(name, [1, 2]) for name in "abc"))
    await bench.step()
    bench.engine.list_sequences()
    await bench.settle()
    listed = bench.outputs[-1].sequences or ()
    assert [(one.request_id, one.seat, one.phase) for one in listed] == [
        ("a", 0, SequencePhase.DECODE),
        ("b", 1, SequencePhase.DECODE),
        ("c", None, SequencePhase.STANDBY),
    ]
