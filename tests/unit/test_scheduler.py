"""The scheduler, one behaviour at a time. Invariants under any schedule are in tests/property."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from inflight.executor.scheduler.queues import MAX_PASSED_BY
from inflight.executor.scheduler.scheduler import Batching, Scheduler
from inflight.executor.scheduler.sequence import (
    FinishEvent,
    FinishReason,
    NewTokens,
    Sequence,
    StepOutcome,
    StepResult,
    TokenLogprobs,
)
from tests.support.scheduler.scheduling import (
    LIMITS,
    STOP_ID,
    ends_of,
    make_scheduler,
    make_sequence,
    retire,
    rows_of,
    run_until_idle,
    step,
)


class TestStep:
    def test_prompt_is_computed_and_then_decoded_token_by_token(self) -> None:
        scheduler = make_scheduler()
        scheduler.offer(make_sequence("a", [1, 2, 3]))

        plan = scheduler.schedule()
        assert rows_of(plan) == [("a", 0, 3, True)]
        retire(scheduler, plan)
        assert rows_of(scheduler.schedule()) == [("a", 3, 1, True)]

    def test_long_prompt_is_computed_in_chunks_and_only_the_last_samples(self) -> None:
        scheduler = make_scheduler()
        sequence = make_sequence("a", range(19))
        scheduler.offer(sequence)

        seen = []
        for _ in range(4):
            plan = scheduler.schedule()
            seen.extend(rows_of(plan))
            retire(scheduler, plan)

        assert seen == [("a", 0, 8, False), ("a", 8, 8, False), ("a", 16, 3, True), ("a", 19, 1, True)]

    def test_decodes_go_before_prefills_in_progress_and_those_before_boarding(self) -> None:
        scheduler = make_scheduler(replace(LIMITS, max_num_sequences=3))
        for request_id, length in (("a", 2), ("b", 16), ("c", 12)):
            scheduler.offer(make_sequence(request_id, range(length), salt=None))
        step(scheduler)

        plan = scheduler.schedule()
        assert rows_of(plan) == [("a", 2, 1, True), ("b", 6, 7, False)]
        retire(scheduler, plan)
        plan = scheduler.schedule()
        assert rows_of(plan) == [("a", 3, 1, True), ("b", 13, 3, True), ("c", 0, 4, False)]

    def test_planning_two_steps_ahead_is_a_bug(self) -> None:
        scheduler = make_scheduler()
        scheduler.offer(make_sequence("a", [1]))
        scheduler.schedule()
        scheduler.schedule()

        with pytest.raises(RuntimeError, match="two plans"):
            scheduler.schedule()

    def test_retiring_another_plan_is_a_bug(self) -> None:
        scheduler = make_scheduler()
        scheduler.offer(make_sequence("a", [1]))
        plan = scheduler.schedule()

        with pytest.raises(RuntimeError, match="oldest plan in flight"):
            retire(scheduler, replace(plan))


class TestWithoutChunks:
    limits = replace(LIMITS, enable_chunked_context=False)

    def test_long_prompt_and_decodes_take_turns(self) -> None:
        scheduler = make_scheduler(replace(self.limits, max_num_sequences=4))
        scheduler.offer(make_sequence("a", [1], salt=None, max_tokens=8))
        step(scheduler)
        for request_id in "bc":
            scheduler.offer(make_sequence(request_id, range(20), salt=None, max_tokens=8))

        seen = []
        for _ in range(4):
            plan = scheduler.schedule()
            seen.append([row.sequence.request_id for row in plan.rows])
            retire(scheduler, plan)

        # Step 1 boards b; it does not fit beside a.
        assert seen == [["a"], ["b"], ["a", "b"], ["c"]]

    def test_prompt_that_does_not_fit_the_rest_of_the_step_waits_for_the_next_and_is_not_overtaken(self) -> None:
        scheduler = make_scheduler(replace(self.limits, max_num_sequences=3))
        for request_id, length in (("a", 5), ("b", 6), ("c", 1)):
            scheduler.offer(make_sequence(request_id, range(length), salt=None))

        plan = scheduler.schedule()
        assert rows_of(plan) == [("a", 0, 5, True)]
        retire(scheduler, plan)
        assert rows_of(scheduler.schedule()) == [("a", 5, 1, True), ("b", 0, 6, True), ("c", 0, 1, True)]


class TestStatic:
    limits = replace(LIMITS, batching=Batching.STATIC)

    def test_no_sequence_boards_until_all_have_left(self) -> None:
        scheduler = make_scheduler(self.limits)
        scheduler.offer(make_sequence("a", [1], max_tokens=3))
        scheduler.offer(make_sequence("b", [1], max_tokens=1))
        scheduler.offer(make_sequence("c", [1], max_tokens=1))

        boarded = []
        for _ in range(4):
            plan = scheduler.schedule()
            boarded.append([sequence.request_id for sequence in plan.boarded])
            retire(scheduler, plan)

        assert boarded == [["a", "b"], [], [], ["c"]]


class TestEnds:
    def test_stop_token_before_min_tokens_does_not_end(self) -> None:
        scheduler = make_scheduler()
        scheduler.offer(make_sequence("a", [1], min_tokens=2))

        assert [ends_of(step(scheduler, STOP_ID)) for _ in range(3)] == [[], [], [("a", FinishReason.STOP_TOKEN)]]


class TestTransactions:
    """What goes wrong with one sequence, or with a step, ends those it concerns and nothing else."""

    def test_failed_step_ends_who_boarded_it_without_a_row(self) -> None:
        scheduler = make_scheduler(replace(LIMITS, batching=Batching.STATIC))
        scheduler.offer(make_sequence("a", range(8)))
        scheduler.offer(make_sequence("b", range(20, 28)))
        plan = scheduler.schedule()
        assert [len(plan.rows), len(plan.boarded)] == [1, 2]

        assert ends_of(scheduler.fail(plan, "lost")) == [("a", FinishReason.ERROR), ("b", FinishReason.ERROR)]
        scheduler.check_when_idle()
        assert scheduler.is_idle

    @pytest.mark.parametrize(("num_prompt_tokens", "num_missing"), [(4, 1), (6, 2)], ids=["decode", "prompt"])
    def test_sequence_whose_blocks_are_not_there_ends_alone(self, num_prompt_tokens: int, num_missing: int) -> None:
        # Given a pool that lacks blocks which were promised
        scheduler = make_scheduler(num_blocks=4)
        scheduler.offer(make_sequence("a", [1], max_tokens=3))
        step(scheduler)
        missing = scheduler.pool.allocate(2) or []
        scheduler.offer(make_sequence("b", range(10, 10 + num_prompt_tokens), max_tokens=2))

        ended: list[FinishEvent] = []
        while not scheduler.is_idle:
            plan = scheduler.schedule()
            ended += scheduler.take_finished()
            ended += retire(scheduler, plan).finished if plan.rows else ()

        assert [(event.sequence.request_id, event.reason, event.error) for event in ended] == [
            ("b", FinishReason.ERROR, f"{num_missing} of the KV blocks reserved for it are not available"),
            ("a", FinishReason.LENGTH, ""),
        ]
        scheduler.pool.check([missing])

    def test_sequence_whose_blocks_cannot_be_published_ends_alone(self) -> None:
        scheduler = make_scheduler()
        broken, other = make_sequence("a", range(4)), make_sequence("b", range(10, 14))
        scheduler.offer(broken)
        scheduler.offer(other)
        plan = scheduler.schedule()
        scheduler.pool.publish(broken.block_table[0], b"another name")

        outcome = retire(scheduler, plan)

        assert [(event.sequence.request_id, event.error) for event in outcome.finished] == [
            ("a", "block 1 is published twice")
        ]
        assert outcome.tokens.sequences == [other]
        assert ends_of(StepOutcome(NewTokens(), tuple(run_until_idle(scheduler)))) == [("b", FinishReason.LENGTH)]
        scheduler.check_when_idle()


class TestInvalidLogits:
    """A row with no number to choose from."""

    def test_ends_its_sequence_with_an_error_and_no_other(self) -> None:
        scheduler = make_scheduler()
        scheduler.offer(make_sequence("a", range(4)))
        scheduler.offer(make_sequence("b", range(10, 14)))
        plan = scheduler.schedule()

        outcome = scheduler.update(StepResult(plan, (None, 5)))

        assert ends_of(outcome) == [("a", FinishReason.ERROR)]
        assert outcome.finished[0].error == "the model returned no usable logits (NaN or -inf only)"
        assert [token[1:] for token in outcome.tokens] == [(0, 5)]
        assert scheduler.num_invalid_logits == 1
        assert [event.sequence.request_id for event in run_until_idle(scheduler)] == ["b"]
        scheduler.check_when_idle()

    def test_leaves_no_blocks_for_others_to_find(self) -> None:
        # Given a prompt whose first chunk was published before its logits were seen
        scheduler = make_scheduler()
        scheduler.offer(make_sequence("a", range(12)))
        step(scheduler)
        assert scheduler.pool.num_published == 2

        scheduler.update(StepResult(scheduler.schedule(), (None,)))

        assert scheduler.pool.num_published == 0
        scheduler.check_when_idle()

    def test_brings_no_log_probabilities(self) -> None:
        scheduler = make_scheduler()
        sequence = make_sequence("a", range(4))
        scheduler.offer(sequence)
        values = TokenLogprobs(-math.inf, (), ())

        scheduler.update(StepResult(scheduler.schedule(), (None,), {0: values}))

        assert sequence.logprobs == {}


class TestResume:
    def test_prior_output_is_computed_like_a_prompt_and_offsets_go_on_behind_it(self) -> None:
        scheduler = make_scheduler()
        scheduler.offer(make_sequence("a", [1, 2], prior_output=[7, 8, 9], max_tokens=5))

        plan = scheduler.schedule()
        assert rows_of(plan) == [("a", 0, 5, True)]
        assert plan.rows[0].output_index == 3
        assert [token[1:] for token in retire(scheduler, plan, 4).tokens] == [(3, 4)]
        assert ends_of(step(scheduler)) == [("a", FinishReason.LENGTH)]


class TestTurns:
    def test_more_important_boards_ahead_of_who_came_earlier(self) -> None:
        scheduler = make_scheduler(replace(LIMITS, num_standby_sequences=4))
        for request_id, priority in (("a", 0), ("b", 0), ("batch", -1), ("c", 0), ("urgent", 1)):
            scheduler.offer(make_sequence(request_id, [1], priority=priority))

        boarded = [sequence.request_id for _ in range(12) for sequence in _boarding(scheduler)]

        assert boarded == ["urgent", "a", "b", "c", "batch"]

    def test_less_important_is_passed_only_so_often(self) -> None:
        scheduler = make_scheduler(replace(LIMITS, max_num_sequences=1, num_standby_sequences=3))
        scheduler.offer(make_sequence("seated", [1], max_tokens=1))
        step(scheduler)
        scheduler.offer(make_sequence("patient", [1], max_tokens=1))
        boarded: list[str] = []
        for number in range(2 * MAX_PASSED_BY):
            scheduler.offer(make_sequence(f"urgent{number}", [1], max_tokens=1, priority=1))
            boarded += [sequence.request_id for sequence in _boarding(scheduler)]

        # Who comes so much later has an equal turn, and the earlier goes first.
        assert boarded.index("patient") == MAX_PASSED_BY - 1


def _boarding(scheduler: Scheduler) -> tuple[Sequence, ...]:
    plan = scheduler.schedule()
    if plan.sequences:
        retire(scheduler, plan)
    return plan.boarded


class TestFigures:
    def test_they_count_seats_standby_and_tokens_to_compute(self) -> None:
        scheduler = make_scheduler()
        for request_id, length in (("a", 2), ("b", 10), ("c", 5)):
            scheduler.offer(make_sequence(request_id, range(length), salt=None))
        step(scheduler)

        assert (scheduler.num_running, scheduler.num_waiting, scheduler.num_held) == (2, 1, 3)
        assert [sequence.request_id for sequence in scheduler.held()] == ["a", "b", "c"]
        # a decodes, b has computed 6 of 10, c none of 5.
        assert scheduler.waiting_prefill_tokens == 4 + 5
        assert scheduler.budget_blocks == 32
        assert not scheduler.is_idle
        assert not scheduler.is_draining

    def test_conservation_check_finds_a_leak_when_idle(self) -> None:
        scheduler = make_scheduler()
        scheduler.pool.allocate(1)

        with pytest.raises(AssertionError, match="tables against references"):
            scheduler.check_when_idle()


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"max_num_sequences": 0}, "max_num_sequences must be at least 1"),
        ({"num_standby_sequences": -1}, "num_standby_sequences must be at least 0"),
        ({"max_num_tokens": 1}, "max_num_tokens must be at least max_num_sequences"),
    ],
)
def test_impossible_limits_are_refused(change: dict[str, int], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        replace(LIMITS, **change)  # type: ignore[arg-type]
