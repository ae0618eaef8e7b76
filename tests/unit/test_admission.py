"""The admission gate: which sequences and attempts it accepts, and how a sequence is ended from outside."""

from __future__ import annotations

from dataclasses import replace

import pytest

from inflight.executor.scheduler.admission import AttemptLog
from inflight.executor.scheduler.scheduler import Refusal
from inflight.executor.scheduler.sequence import FinishEvent, FinishReason, NewTokens, StepOutcome
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


def test_attempt_is_stale_when_it_or_a_newer_one_was_seen() -> None:
    log = AttemptLog(10)
    log.see("a", 3)

    assert [log.is_stale("a", attempt) for attempt in (2, 3, 4)] == [True, True, False]
    assert not log.is_stale("b", 1)


def test_least_recently_seen_request_is_forgotten_first() -> None:
    log = AttemptLog(2)
    log.see("a", 1)
    log.see("b", 1)
    log.see("a", 2)
    log.see("c", 1)

    assert log.is_stale("a", 2)
    assert log.is_stale("c", 1)
    assert not log.is_stale("b", 1)


class TestGate:
    def test_sum_of_reservations_stays_within_the_pool(self) -> None:
        scheduler = make_scheduler(num_blocks=5)

        assert scheduler.offer(make_sequence("a", range(8), max_tokens=4)) is None
        assert scheduler.offer(make_sequence("b", range(8), max_tokens=4)) is Refusal.NO_CAPACITY
        assert scheduler.offer(make_sequence("c", range(4), max_tokens=4)) is None

    def test_seats_and_standby_bound_who_is_held(self) -> None:
        scheduler = make_scheduler()

        answers = [scheduler.offer(make_sequence(str(i), [1])) for i in range(5)]

        assert answers == [None] * 4 + [Refusal.NO_CAPACITY]

    def test_end_makes_room(self) -> None:
        scheduler = make_scheduler(num_blocks=2)
        scheduler.offer(make_sequence("a", [1], max_tokens=1))
        scheduler.offer(make_sequence("b", [1], max_tokens=1))
        assert scheduler.offer(make_sequence("c", [1], max_tokens=1)) is Refusal.NO_CAPACITY
        step(scheduler)

        assert scheduler.offer(make_sequence("c", [1], attempt=2, max_tokens=1)) is None

    def test_reservation_without_the_next_token_is_invalid(self) -> None:
        sequence = make_sequence("a", range(8), max_tokens=5)
        sequence.num_reserved_blocks = 2

        assert make_scheduler().offer(sequence) is Refusal.INVALID

    def test_sequence_that_has_used_its_reservation_ends_as_preempted(self) -> None:
        scheduler = make_scheduler()
        sequence = make_sequence("a", range(6), max_tokens=10)
        sequence.num_reserved_blocks = 2

        assert scheduler.offer(sequence) is None
        ends = run_until_idle(scheduler)

        assert [(end.reason, end.sequence.num_output_tokens) for end in ends] == [(FinishReason.PREEMPTED, 2)]
        again = make_sequence("a", range(6), attempt=2, prior_output=[1, 1], max_tokens=10)
        again.num_reserved_blocks = 4
        assert scheduler.offer(again) is None
        assert [end.reason for end in run_until_idle(scheduler)] == [FinishReason.LENGTH]

    def test_stop_token_that_fills_the_reservation_ends_the_request(self) -> None:
        scheduler = make_scheduler()
        sequence = make_sequence("a", range(7), max_tokens=10)
        sequence.num_reserved_blocks = 2
        scheduler.offer(sequence)

        assert [end.reason for end in step(scheduler, STOP_ID).finished] == [FinishReason.STOP_TOKEN]

    def test_reservation_need_not_reach_beyond_the_context(self) -> None:
        sequence = make_sequence("a", range(4), max_tokens=100)
        sequence.num_reserved_blocks = 2

        assert make_scheduler(replace(LIMITS, context_length=8)).offer(sequence) is None

    @pytest.mark.parametrize("length", [0, 8, 9])
    def test_prompt_that_is_empty_or_fills_the_context_is_invalid(self, length: int) -> None:
        scheduler = make_scheduler(replace(LIMITS, context_length=8))

        assert scheduler.offer(make_sequence("a", range(length))) is Refusal.INVALID

    def test_draining_refuses_offers_and_finishes_what_is_held(self) -> None:
        scheduler = make_scheduler()
        for request_id in "abc":
            scheduler.offer(make_sequence(request_id, [1]))
        scheduler.drain()

        assert scheduler.is_draining
        assert scheduler.offer(make_sequence("d", [1])) is Refusal.DRAINING
        assert scheduler.offer(make_sequence("d", [1])) is Refusal.STALE_ATTEMPT
        assert len(run_until_idle(scheduler)) == 3


class TestAttempts:
    @pytest.mark.parametrize("attempt", [2, 3])
    def test_attempt_that_is_held_or_older_is_stale(self, attempt: int) -> None:
        scheduler = make_scheduler()
        scheduler.offer(make_sequence("a", [1], attempt=3))

        assert scheduler.offer(make_sequence("a", [1], attempt=attempt)) is Refusal.STALE_ATTEMPT
        assert scheduler.num_held == 1

    def test_attempt_that_has_ended_is_stale(self) -> None:
        scheduler = make_scheduler()
        scheduler.offer(make_sequence("a", [1], max_tokens=1))
        step(scheduler)

        assert scheduler.offer(make_sequence("a", [1])) is Refusal.STALE_ATTEMPT

    def test_attempt_that_was_refused_is_stale(self) -> None:
        scheduler = make_scheduler(num_blocks=1)
        scheduler.offer(make_sequence("a", [1], max_tokens=1))
        assert scheduler.offer(make_sequence("b", [1])) is Refusal.NO_CAPACITY
        step(scheduler)

        assert scheduler.offer(make_sequence("b", [1])) is Refusal.STALE_ATTEMPT

    def test_newer_attempt_takes_the_place_of_one_that_is_not_in_flight(self) -> None:
        # Given a pool that holds one attempt only.
        scheduler = make_scheduler(num_blocks=2)
        older = make_sequence("a", [1])
        scheduler.offer(older)
        step(scheduler)

        newer = make_sequence("a", [1], attempt=2)
        assert scheduler.offer(newer) is None

        assert scheduler.take_finished() == (FinishEvent(older, FinishReason.CANCELLED),)
        assert list(scheduler.held()) == [newer]
        assert scheduler.take_finished() == ()

    def test_superseded_attempt_in_flight_ends_with_its_step(self) -> None:
        scheduler = make_scheduler(num_blocks=2)
        older, newer = make_sequence("a", [1]), make_sequence("a", [1], attempt=2)
        scheduler.offer(older)
        plan = scheduler.schedule()

        assert scheduler.offer(newer) is None
        assert scheduler.take_finished() == ()

        assert retire(scheduler, plan) == StepOutcome(NewTokens(), (FinishEvent(older, FinishReason.CANCELLED),))
        assert [sequence.attempt for sequence in scheduler.schedule().boarded] == [2]
        assert scheduler.offer(make_sequence("b", [1])) is Refusal.NO_CAPACITY

    def test_newer_attempt_ends_the_older_even_when_it_is_refused(self) -> None:
        scheduler = make_scheduler()
        scheduler.offer(make_sequence("a", [1]))
        scheduler.offer(make_sequence("b", [1]))
        scheduler.drain()

        assert scheduler.offer(make_sequence("a", [1], attempt=2)) is Refusal.DRAINING
        assert ends_of(step(scheduler)) == [("a", FinishReason.CANCELLED)]


class TestCancel:
    def test_waiting_sequence_ends_at_once(self) -> None:
        scheduler = make_scheduler()
        sequence = make_sequence("a", [1])
        scheduler.offer(sequence)

        event = scheduler.cancel("a", 1, FinishReason.DEADLINE)

        assert event == FinishEvent(sequence, FinishReason.DEADLINE)
        assert scheduler.is_idle
        assert scheduler.schedule().rows == ()

    def test_sequence_on_a_seat_ends_at_once_between_steps(self) -> None:
        scheduler = make_scheduler()
        scheduler.offer(make_sequence("a", range(20)))
        step(scheduler)

        assert scheduler.cancel("a", 1, FinishReason.CANCELLED) is not None
        assert scheduler.pool.num_used == 0

    def test_sequence_in_flight_ends_with_its_step_and_without_a_token(self) -> None:
        scheduler = make_scheduler()
        cancelled, other = make_sequence("a", [1]), make_sequence("b", [1])
        scheduler.offer(cancelled)
        scheduler.offer(other)
        plan = scheduler.schedule()

        assert scheduler.cancel("a", 1, FinishReason.CANCELLED) is None
        assert list(scheduler.held()) == [other, cancelled]
        outcome = retire(scheduler, plan)

        assert outcome.tokens.sequences == [other]
        assert outcome.finished == (FinishEvent(cancelled, FinishReason.CANCELLED),)
        assert cancelled.num_output_tokens == 0

    def test_cancelled_in_flight_keeps_its_reason_when_the_step_fails(self) -> None:
        scheduler = make_scheduler()
        scheduler.offer(make_sequence("a", [1]))
        plan = scheduler.schedule()
        scheduler.cancel("a", 1, FinishReason.DEADLINE)

        assert ends_of(scheduler.fail(plan, "device lost")) == [("a", FinishReason.DEADLINE)]

    def test_second_cancel_changes_nothing(self) -> None:
        scheduler = make_scheduler()
        scheduler.offer(make_sequence("a", [1]))
        plan = scheduler.schedule()
        scheduler.cancel("a", 1, FinishReason.DEADLINE)

        assert scheduler.cancel("a", 1, FinishReason.CANCELLED) is None
        assert ends_of(retire(scheduler, plan)) == [("a", FinishReason.DEADLINE)]
        assert scheduler.cancel("a", 1, FinishReason.CANCELLED) is None

    def test_other_attempt_and_unknown_request_are_left_alone(self) -> None:
        scheduler = make_scheduler()
        scheduler.offer(make_sequence("a", [1], attempt=2))

        for request_id, attempt in (("a", 1), ("a", 3), ("b", 2)):
            assert scheduler.cancel(request_id, attempt, FinishReason.CANCELLED) is None
        assert scheduler.num_held == 1

    def test_cancel_in_flight_makes_room_for_the_next_offer_at_once(self) -> None:
        scheduler = make_scheduler(num_blocks=2)
        scheduler.offer(make_sequence("a", [1]))
        plan = scheduler.schedule()
        scheduler.cancel("a", 1, FinishReason.CANCELLED)

        assert scheduler.offer(make_sequence("b", [1])) is None
        retire(scheduler, plan)
        assert rows_of(scheduler.schedule()) == [("b", 0, 1, True)]
