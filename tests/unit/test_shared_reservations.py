"""Reservations of sequences that share blocks: a shared block is needed once, so more sequences fit."""

from __future__ import annotations

from dataclasses import replace

import pytest

from inflight.executor.scheduler.limits import Overcommit, SchedulerLimits, SchedulerPolicy
from inflight.executor.scheduler.scheduler import Refusal, Scheduler
from inflight.executor.scheduler.sequence import FinishReason, Sequence
from inflight.router.ledger.types import Demand, Placement, Queued
from tests.support.ledger.store_pool import StorePool
from tests.support.scheduler.scheduling import LIMITS, make_scheduler, make_sequence, run_until_idle, step

# Six blocks of 4 tokens.
BEGINNING = range(100, 124)
SEATS = replace(LIMITS, max_num_sequences=8, max_num_tokens=64)
OVERCOMMITTED = replace(SEATS, policy=SchedulerPolicy.MAX_UTILIZATION, overcommit=Overcommit(watermark=0.0, margin=0.0))


def sharing(name: str, salt: bytes | None = b"", max_tokens: int = 3) -> Sequence:
    return make_sequence(name, [*BEGINNING, ord(name)], max_tokens=max_tokens, salt=salt)


def board(scheduler: Scheduler, names: str, salt: bytes | None = b"") -> list[Refusal | None]:
    """Offers a sequence at a time, and computes its prompt."""
    answers = []
    for name in names:
        answers.append(scheduler.offer(sharing(name, salt, max_tokens=12)))
        step(scheduler)
    return answers


@pytest.mark.parametrize("limits", [SEATS, OVERCOMMITTED], ids=lambda limits: limits.policy.name)
def test_shared_blocks_count_once(limits: SchedulerLimits) -> None:
    scheduler = make_scheduler(limits, num_blocks=28)

    # Each reserves 10 blocks, so that two would fit without sharing.
    answers = board(scheduler, "abcd")

    assert answers == [None] * 4
    assert scheduler.num_running == 4
    assert scheduler.num_saved_blocks == 18
    assert [end.reason for end in run_until_idle(scheduler)] == [FinishReason.LENGTH] * 4
    assert scheduler.num_preemptions == 0
    assert scheduler.num_saved_blocks == 0


def test_sequences_without_a_salt_save_nothing() -> None:
    scheduler = make_scheduler(SEATS, num_blocks=22)

    assert board(scheduler, "ab", salt=None) == [None, None]

    assert scheduler.num_saved_blocks == 0
    assert scheduler.offer(sharing("c")) is Refusal.NO_CAPACITY


def test_sequence_accepted_for_blocks_that_are_not_saved_any_more_waits_for_them() -> None:
    scheduler = make_scheduler(SEATS, num_blocks=22)
    board(scheduler, "ab")
    scheduler.cancel("b", 1, FinishReason.CANCELLED)
    assert scheduler.num_saved_blocks == 0

    # The ledger still counts with the 6 blocks that sharing saved.
    others = [make_sequence(name, [ord(name)] * 24, max_tokens=4) for name in "cd"]
    assert [scheduler.offer(one) for one in others] == [None, None]
    step(scheduler)

    assert (scheduler.num_running, scheduler.num_waiting) == (2, 1)
    assert len(run_until_idle(scheduler)) == 3


def test_saved_blocks_that_were_offered_are_forgotten_after_a_while() -> None:
    scheduler = make_scheduler(replace(SEATS, context_length=4096), num_blocks=400)
    scheduler.offer(make_sequence("long", [1], max_tokens=1400))
    board(scheduler, "ab")
    for name in "ab":
        scheduler.cancel(name, 1, FinishReason.CANCELLED)
    for _ in range(1000):
        step(scheduler)

    assert scheduler.offer(make_sequence("other", [2], max_tokens=199)) is Refusal.NO_CAPACITY


def test_reservation_larger_than_the_pool_is_refused() -> None:
    scheduler = make_scheduler(SEATS, num_blocks=22)
    board(scheduler, "ab")
    sequence = make_sequence("large", [1])
    sequence.num_reserved_blocks = 23
    scheduler.cancel("a", 1, FinishReason.CANCELLED)
    scheduler.cancel("b", 1, FinishReason.CANCELLED)

    assert scheduler.offer(sequence) is Refusal.NO_CAPACITY


async def test_ledger_reserves_the_saved_blocks_too(store_pool: StorePool) -> None:
    a = store_pool.router("a")
    report = store_pool.next_report("x", blocks=10)
    await a.store.report(report)
    await a.place("first", 8)
    assert await a.store.submit(Demand("second", 2, 8)) == Queued(0)

    await a.store.report(replace(report, seq=report.seq + 1, saved_blocks=6))

    assert await a.told() == [Placement("second", 1, "x", 1)]
