"""Waiting for a prefix that another sequence is computing."""

from __future__ import annotations

from dataclasses import replace

from inflight.executor.scheduler.scheduler import Scheduler
from inflight.executor.scheduler.sequence import FinishReason, StepPlan
from inflight.executor.scheduler.step_constraint import PrefillAllowance, StepConstraint
from tests.support.scheduler.scheduling import LIMITS, make_scheduler, make_sequence, retire, rows_of

ROOMY = replace(LIMITS, max_num_sequences=4, max_num_tokens=12)
LONG = list(range(1, 21))


def boarded(plan: StepPlan) -> list[str]:
    """Who boarded."""
    return [sequence.request_id for sequence in plan.boarded]


def with_common_prefix(
    limits_change: dict[str, int] | None = None, salts: tuple[bytes, bytes] = (b"t", b"t")
) -> Scheduler:
    """Two sequences with a long prefix in common, and one that has nothing to do with them."""
    scheduler = make_scheduler(replace(ROOMY, **(limits_change or {})))  # type: ignore[arg-type]
    scheduler.offer(make_sequence("first", [*LONG, 30], salt=salts[0]))
    scheduler.schedule(PrefillAllowance(8))
    scheduler.offer(make_sequence("second", [*LONG, 40], salt=salts[1]))
    scheduler.offer(make_sequence("other", [50, 51], salt=salts[0]))
    return scheduler


def test_second_sequence_waits_is_passed_and_then_finds_the_blocks() -> None:
    scheduler = with_common_prefix({"max_num_tokens": 64})
    plans = [scheduler._plans[0], scheduler.schedule()]
    assert boarded(plans[1]) == ["other"]
    for plan in plans:
        retire(scheduler, plan)

    plan = scheduler.schedule()

    assert boarded(plan) == ["second"]
    assert rows_of(plan)[-1] == ("second", 20, 1, True)


def test_waiting_for_a_prefix_is_what_bound_the_step() -> None:
    scheduler = with_common_prefix({"max_num_tokens": 64})
    scheduler.schedule()

    assert scheduler.bounds.newest is StepConstraint.TWIN


def test_other_salt_never_matches() -> None:
    scheduler = with_common_prefix({"max_num_tokens": 64}, (b"one", b"another"))

    assert boarded(scheduler.schedule()) == ["second", "other"]


def test_wait_is_bounded() -> None:
    scheduler = with_common_prefix({"max_num_tokens": 64, "max_prefix_wait_steps": 1})
    plans = [scheduler._plans[0], scheduler.schedule()]
    assert boarded(plans[1]) == ["other"]
    retire(scheduler, plans[0])

    # The first one's last blocks are still in flight.
    assert boarded(scheduler.schedule()) == ["second"]


def test_second_sequence_boards_when_the_first_one_is_cancelled() -> None:
    scheduler = with_common_prefix({"max_num_tokens": 64})
    assert boarded(scheduler.schedule()) == ["other"]
    scheduler.cancel("first", 1, FinishReason.CANCELLED)
    retire(scheduler, scheduler._plans[0])

    assert boarded(scheduler.schedule()) == ["second"]


def test_short_common_prefix_is_not_worth_a_step() -> None:
    scheduler = make_scheduler(replace(ROOMY, max_num_tokens=64))
    scheduler.offer(make_sequence("first", [1, 2, 3, 4, 5, 6]))
    scheduler.offer(make_sequence("second", [1, 2, 3, 4, 7, 8]))

    assert boarded(scheduler.schedule()) == ["first", "second"]


def test_no_sequence_waits_where_waiting_is_off() -> None:
    assert boarded(with_common_prefix({"max_num_tokens": 64, "max_prefix_wait_steps": 0}).schedule()) == [
        "second",
        "other",
    ]
