"""The admission gate: which sequences and attempts it accepts, and how a sequence is ended from outside."""

from __future__ import annotations

from inflight.executor.scheduler.admission import AttemptLog
from inflight.executor.scheduler.scheduler import Refusal
from inflight.executor.scheduler.sequence import FinishEvent, FinishReason
from tests.support.scheduler.scheduling import (
    make_scheduler,
    make_sequence,
    retire,
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
    def test_attempt_that_has_ended_is_stale(self) -> None:
        scheduler = make_scheduler()
        scheduler.offer(make_sequence("a", [1], max_tokens=1))
        step(scheduler)

        assert scheduler.offer(make_sequence("a", [1])) is Refusal.STALE_ATTEMPT


class TestCancel:
    def test_waiting_sequence_ends_at_once(self) -> None:
        scheduler = make_scheduler()
        sequence = make_sequence("a", [1])
        scheduler.offer(sequence)

        event = scheduler.cancel("a", 1, FinishReason.DEADLINE)

        assert event == FinishEvent(sequence, FinishReason.DEADLINE)
        assert scheduler.is_idle
        assert scheduler.schedule().rows == ()

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
