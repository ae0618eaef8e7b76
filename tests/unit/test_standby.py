"""Number of sequences that wait beyond the seats."""

from __future__ import annotations

from dataclasses import replace

import pytest

from inflight.executor.engine.standby import StandbyDepth
from inflight.executor.scheduler.limits import Batching, SchedulerLimits
from inflight.executor.scheduler.scheduler import Scheduler
from inflight.executor.scheduler.sequence import MAX_YIELDING_ATTEMPTS, FinishReason
from tests.support.scheduler.scheduling import LIMITS, STOP_ID, ends_of, make_scheduler, make_sequence, retire, rows_of


def ride(standby: StandbyDepth, *, ends_per_s: float, refill_s: float, duration_s: float, since_s: float = 0.0) -> None:
    """Sequences end regularly, and each place is refilled this much later."""
    for i in range(int(duration_s * ends_per_s)):
        standby.ended(1, since_s + i / ends_per_s)
        standby.refilled(since_s + i / ends_per_s + refill_s)


def test_depth_is_the_most_until_something_was_measured() -> None:
    standby = StandbyDepth(8)
    standby.ended(1, 0.0)

    assert standby.depth == 8


def test_depth_is_the_rate_of_ends_times_the_time_until_a_place_is_refilled() -> None:
    standby = StandbyDepth(8)
    ride(standby, ends_per_s=100, refill_s=0.025, duration_s=60)

    assert standby.depth == 3


def test_depth_does_not_exceed_the_setting() -> None:
    standby = StandbyDepth(2)
    ride(standby, ends_per_s=100, refill_s=0.5, duration_s=60)

    assert standby.depth == 2


def test_without_ends_no_sequence_stands_by() -> None:
    standby = StandbyDepth(8)
    ride(standby, ends_per_s=100, refill_s=0.025, duration_s=60)
    standby.ended(0, 200.0)

    assert standby.depth == 0


def test_place_that_was_long_not_needed_says_nothing_of_the_time_to_refill() -> None:
    standby = StandbyDepth(8)
    ride(standby, ends_per_s=10, refill_s=0.05, duration_s=60)
    standby.ended(1, 60.0)
    standby.refilled(3000.0)
    ride(standby, ends_per_s=10, refill_s=0.05, duration_s=60, since_s=3000.0)

    assert standby.depth == 1


def test_seat_freed_by_an_unforeseen_end_is_taken_at_the_very_next_step() -> None:
    # Given full seats, one in line, and a step in flight beyond the one that ends a sequence
    scheduler = make_scheduler(replace(LIMITS, max_num_sequences=2))
    for request_id in "abc":
        assert scheduler.offer(make_sequence(request_id, [1, 2, 3])) is None
    first = scheduler.schedule()
    scheduler.schedule()

    # When every token is a stop token
    ended = ends_of(retire(scheduler, first, STOP_ID))

    # Then the next plan has the one in line, whose blocks were reserved all along
    assert ("a", FinishReason.STOP_TOKEN) in ended
    assert rows_of(scheduler.schedule()) == [("c", 0, 3, True)]


def giving_way(scheduler: Scheduler) -> list[str]:
    return [sequence.request_id for sequence in scheduler.giving_way()]


def full_of_batch(limits: SchedulerLimits, attempt: int = 1) -> Scheduler:
    """Both seats and a standby place are taken by class batch."""
    scheduler = make_scheduler(replace(limits, max_num_sequences=2, num_standby_sequences=3))
    for number in range(3):
        scheduler.offer(make_sequence(f"batch {number}", [1], max_tokens=9, priority=-1, attempt=attempt))
    retire(scheduler, scheduler.schedule())
    return scheduler


def test_newest_sequences_of_class_batch_give_way_to_as_many_others_as_wait() -> None:
    scheduler = full_of_batch(LIMITS)
    assert giving_way(scheduler) == []
    scheduler.offer(make_sequence("standard", [2], priority=0))
    assert giving_way(scheduler) == ["batch 1"]
    scheduler.offer(make_sequence("interactive", [3], priority=1))
    assert giving_way(scheduler) == ["batch 1", "batch 0"]

    for one in scheduler.giving_way():
        scheduler.cancel(one.request_id, one.attempt, FinishReason.PREEMPTED)
    assert giving_way(scheduler) == []
    assert {row.sequence.request_id for row in scheduler.schedule().rows} == {"standard", "interactive"}


def test_sequence_in_flight_gives_way_once() -> None:
    scheduler = full_of_batch(LIMITS)
    plan = scheduler.schedule()
    scheduler.offer(make_sequence("interactive", [3], priority=1))
    (victim,) = scheduler.giving_way()
    assert scheduler.cancel(victim.request_id, victim.attempt, FinishReason.PREEMPTED) is None
    assert giving_way(scheduler) == []
    assert ends_of(retire(scheduler, plan)) == [("batch 1", FinishReason.PREEMPTED)]


def test_free_seat_is_taken_before_any_gives_way() -> None:
    scheduler = make_scheduler(replace(LIMITS, max_num_sequences=2))
    scheduler.offer(make_sequence("batch", [1], max_tokens=9, priority=-1))
    retire(scheduler, scheduler.schedule())
    scheduler.offer(make_sequence("interactive", [3], priority=1))
    assert giving_way(scheduler) == []


@pytest.mark.parametrize(
    ("limits", "attempt"), [(replace(LIMITS, batching=Batching.STATIC), 1), (LIMITS, MAX_YIELDING_ATTEMPTS + 1)]
)
def test_static_batch_and_who_was_placed_often_keep_their_seats(limits: SchedulerLimits, attempt: int) -> None:
    scheduler = full_of_batch(limits, attempt)
    assert scheduler.num_running == 2
    scheduler.offer(make_sequence("interactive", [3], priority=1))
    assert giving_way(scheduler) == []
