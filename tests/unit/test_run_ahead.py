"""The scheduler while a step is in flight. Invariants under any schedule are in tests/property."""

from __future__ import annotations

from dataclasses import replace

from inflight.executor.scheduler.scheduler import Scheduler
from inflight.executor.scheduler.sequence import FinishEvent, FinishReason, StepPlan
from inflight.executor.scheduler.step_constraint import PrefillAllowance
from tests.support.scheduler.scheduling import LIMITS, STOP_ID, make_scheduler, make_sequence, retire, rows_of


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

    def test_what_a_cancelled_sequence_still_computes_is_not_published(self) -> None:
        scheduler = make_scheduler()
        scheduler.offer(make_sequence("a", range(16)))
        plans = two_plans(scheduler)
        scheduler.cancel("a", 1, FinishReason.CANCELLED)
        for plan in plans:
            retire(scheduler, plan)

        assert (scheduler.pool.num_used, scheduler.pool.num_cached) == (0, 0)


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
