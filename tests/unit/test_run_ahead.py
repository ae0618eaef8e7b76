"""The scheduler while a step is in flight. Invariants under any schedule are in tests/property."""

from __future__ import annotations

from dataclasses import replace

import pytest

from inflight.executor.scheduler.scheduler import Batching, Scheduler
from inflight.executor.scheduler.sequence import FinishEvent, FinishReason, StepOutcome, StepPlan
from inflight.executor.scheduler.step_constraint import PrefillAllowance
from tests.support.scheduler.scheduling import LIMITS, STOP_ID, ends_of, make_scheduler, make_sequence, retire, rows_of


def two_plans(scheduler: Scheduler) -> tuple[StepPlan, StepPlan]:
    """The next two steps, planned one after the other."""
    return scheduler.schedule(), scheduler.schedule()


class TestPlanningAhead:
    def test_next_step_goes_on_behind_the_token_that_is_not_known_yet(self) -> None:
        scheduler = make_scheduler()
        scheduler.offer(make_sequence("a", [1, 2, 3]))

        first, second = two_plans(scheduler)

        assert rows_of(first) == [("a", 0, 3, True)]
        assert rows_of(second) == [("a", 3, 1, True)]
        assert (first.carries, second.carries) == ([False], [True])
        assert [row.output_index for row in (*first.rows, *second.rows)] == [0, 1]

    def test_token_that_is_known_is_not_carried(self) -> None:
        scheduler = make_scheduler()
        scheduler.offer(make_sequence("a", [1, 2, 3]))
        retire(scheduler, scheduler.schedule())

        assert scheduler.schedule().carries == [False]

    def test_chunks_of_a_prompt_follow_each_other(self) -> None:
        scheduler = make_scheduler()
        scheduler.offer(make_sequence("a", range(11)))

        first, second = two_plans(scheduler)

        assert rows_of(first) + rows_of(second) == [("a", 0, 8, False), ("a", 8, 3, True)]
        assert second.carries == [False]

    @pytest.mark.parametrize(("max_tokens", "context_length"), [(1, 64), (50, 4)])
    def test_known_last_token_is_not_followed_by_another_step(self, max_tokens: int, context_length: int) -> None:
        scheduler = make_scheduler(replace(LIMITS, context_length=context_length))
        scheduler.offer(make_sequence("a", [1, 2, 3], max_tokens=max_tokens))

        first, second = two_plans(scheduler)

        assert second.rows == ()
        assert ends_of(retire(scheduler, first)) == [("a", FinishReason.LENGTH)]
        assert scheduler.is_idle

    def test_seat_of_who_has_its_last_token_in_flight_is_taken_at_the_next_step(self) -> None:
        scheduler = make_scheduler(replace(LIMITS, max_num_sequences=1))
        scheduler.offer(make_sequence("a", [1], max_tokens=1))
        scheduler.offer(make_sequence("b", [1], max_tokens=1))

        first, second = two_plans(scheduler)

        assert rows_of(first) + rows_of(second) == [("a", 0, 1, True), ("b", 0, 1, True)]
        assert first.sequences[0].seat != second.sequences[0].seat
        assert scheduler.num_running == 1

    def test_static_batch_boards_when_everyone_has_the_last_token_in_flight(self) -> None:
        scheduler = make_scheduler(replace(LIMITS, batching=Batching.STATIC))
        for request_id in "abc":
            scheduler.offer(make_sequence(request_id, [1], max_tokens=1))

        assert [rows_of(plan) for plan in two_plans(scheduler)] == [
            [("a", 0, 1, True), ("b", 0, 1, True)],
            [("c", 0, 1, True)],
        ]

    def test_prefill_budget_bounds_what_prompts_take_beside_the_decodes(self) -> None:
        scheduler = make_scheduler(replace(LIMITS, max_num_sequences=3))
        scheduler.offer(make_sequence("a", [1], salt=None))
        scheduler.schedule()
        for request_id in "bc":
            scheduler.offer(make_sequence(request_id, range(5), salt=None))

        plan = scheduler.schedule(PrefillAllowance(4))

        assert rows_of(plan) == [("a", 1, 1, True), ("b", 0, 4, False)]
        assert [sequence.request_id for sequence in plan.boarded] == ["b"]


class TestUnforeseenEnds:
    def test_stop_token_ends_at_once_and_the_row_computed_in_vain_yields_nothing(self) -> None:
        scheduler = make_scheduler()
        sequence = make_sequence("a", [1])
        scheduler.offer(sequence)
        first, second = two_plans(scheduler)

        outcome = retire(scheduler, first, STOP_ID)

        assert outcome.finished == (FinishEvent(sequence, FinishReason.STOP_TOKEN, STOP_ID),)
        assert list(scheduler.held()) == []
        assert scheduler.pool.num_used == 1, "its block is written by the step in flight"
        assert scheduler.schedule().rows == ()
        assert [*retire(scheduler, second).tokens] == []
        assert sequence.token_ids == [1, STOP_ID]
        assert scheduler.is_idle
        scheduler.check_when_idle()

    def test_no_sequence_boards_on_blocks_that_a_leaving_one_holds(self) -> None:
        # Given a pool that one sequence fills; it holds two of the three blocks when it stops.
        scheduler = make_scheduler(num_blocks=3)
        scheduler.offer(make_sequence("a", range(6), max_tokens=6))
        first, second = two_plans(scheduler)
        retire(scheduler, first, STOP_ID)
        assert scheduler.offer(make_sequence("b", range(6), max_tokens=6)) is None

        assert scheduler.schedule().rows == ()
        retire(scheduler, second)

        assert rows_of(scheduler.schedule()) == [("b", 4, 2, True)]

    def test_someone_else_boards_beside_who_is_leaving_when_there_are_blocks(self) -> None:
        scheduler = make_scheduler(replace(LIMITS, max_num_sequences=1))
        scheduler.offer(make_sequence("a", [1]))
        first, _ = two_plans(scheduler)
        retire(scheduler, first, STOP_ID)
        scheduler.offer(make_sequence("b", [1]))

        plan = scheduler.schedule()

        assert rows_of(plan) == [("b", 0, 1, True)]
        scheduler.check()

    def test_cancelled_in_two_steps_ends_with_the_second_and_brings_no_token(self) -> None:
        scheduler = make_scheduler()
        sequence = make_sequence("a", [1])
        scheduler.offer(sequence)
        first, second = two_plans(scheduler)
        assert scheduler.cancel("a", 1, FinishReason.CANCELLED) is None

        outcomes = [retire(scheduler, plan) for plan in (first, second)]

        assert [len(outcome.tokens) for outcome in outcomes] == [0, 0]
        assert [ends_of(outcome) for outcome in outcomes] == [[], [("a", FinishReason.CANCELLED)]]
        assert sequence.token_ids == [1]
        scheduler.check_when_idle()

    def test_what_a_cancelled_sequence_still_computes_is_not_published(self) -> None:
        scheduler = make_scheduler()
        scheduler.offer(make_sequence("a", range(16)))
        plans = two_plans(scheduler)
        scheduler.cancel("a", 1, FinishReason.CANCELLED)
        for plan in plans:
            retire(scheduler, plan)

        assert (scheduler.pool.num_used, scheduler.pool.num_cached) == (0, 0)

    def test_newer_attempt_boards_while_the_older_is_in_flight(self) -> None:
        scheduler = make_scheduler()
        older, newer = make_sequence("a", [1]), make_sequence("a", [1], attempt=2)
        scheduler.offer(older)
        first = scheduler.schedule()
        assert scheduler.offer(newer) is None

        second = scheduler.schedule()

        assert second.sequences == [newer]
        assert retire(scheduler, first).finished == (FinishEvent(older, FinishReason.CANCELLED),)
        assert retire(scheduler, second).tokens.sequences == [newer]


class TestFailedSteps:
    def test_failure_ends_who_was_in_the_step_also_when_the_next_one_is_in_flight(self) -> None:
        # Given "a" in both steps and "b" only in the second
        scheduler = make_scheduler()
        first_in, second_in = make_sequence("a", range(8)), make_sequence("b", range(4))
        scheduler.offer(first_in)
        first = scheduler.schedule()
        scheduler.offer(second_in)
        second = scheduler.schedule()

        outcome = scheduler.fail(first, "lost")

        assert outcome.finished == (FinishEvent(first_in, FinishReason.ERROR, error="lost"),)
        outcome = retire(scheduler, second)
        assert (outcome.tokens.sequences, outcome.finished) == ([second_in], ())
        assert scheduler.pool.num_used == len(second_in.block_table)
        scheduler.check()

    def test_both_steps_may_fail(self) -> None:
        scheduler = make_scheduler()
        scheduler.offer(make_sequence("a", [1]))
        plans = two_plans(scheduler)

        outcomes: list[StepOutcome] = [scheduler.fail(plan, "lost") for plan in plans]

        assert [ends_of(outcome) for outcome in outcomes] == [[("a", FinishReason.ERROR)], []]
        assert scheduler.is_idle
        scheduler.check_when_idle()
