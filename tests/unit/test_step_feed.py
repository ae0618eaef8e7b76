"""The feed of steps for watchers: records, seats, and their stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

import pytest

from inflight.common.errors import RequestError
from inflight.executor.engine.output import EngineOutput
from inflight.executor.scheduler.seat_view import SequencePhase, SequenceSnapshot
from inflight.executor.scheduler.sequence import FinishReason, StepPlan
from inflight.executor.scheduler.step_record import NO_TIMES, KvCounts, LoopPart, PlanCounts, StepRecord
from inflight.executor.serving.step_feed import StepHistory, StepWatch
from inflight.v1 import executor_pb2
from tests.support.scheduler.scheduling import make_scheduler, make_sequence, retire, step

DESCRIPTION = executor_pb2.DescribeResponse(generation=7, total_blocks=32, block_size=4, max_num_sequences=2)


def record(number: int) -> StepRecord:
    kv = KvCounts(20, 8, 4, 6, 10, 0, 40, 10)
    return StepRecord(
        number, float(number), (0.0,) * len(LoopPart), NO_TIMES, PlanCounts.of(StepPlan.of(())), 3, 1, 2, 0, kv
    )


def standing(request_id: str) -> SequenceSnapshot:
    return SequenceSnapshot(request_id, SequencePhase.DECODE, 0, 3, 4, 2, 1, 2)


def test_history_gives_what_is_behind_a_step_in_order_and_forgets_the_oldest() -> None:
    history = StepHistory(num_kept=3)
    assert (history.newest_step, history.after(0)) == (0, [])

    for number in range(1, 6):
        history.add(record(number))

    assert [one.step for one in history.after(3)] == [4, 5]
    assert [one.step for one in history.after(0)] == [3, 4, 5]
    assert history.after(5) == []


# Seats.


def seats_of(scheduler_standings: tuple[SequenceSnapshot, ...]) -> dict[str, int | None]:
    return {one.request_id: one.seat for one in scheduler_standings}


def test_a_seat_is_kept_from_boarding_to_leaving_and_then_given_to_the_next() -> None:
    scheduler = make_scheduler()
    for name in ("a", "b", "c"):
        assert scheduler.offer(make_sequence(name, [1], max_tokens=20)) is None
    step(scheduler)
    assert seats_of(scheduler.seating.snapshot()) == {"a": 0, "b": 1, "c": None}

    scheduler.cancel("a", 1, FinishReason.CANCELLED)
    step(scheduler)

    assert seats_of(scheduler.seating.snapshot()) == {"c": 0, "b": 1}
    assert [one.request_id for one in scheduler.seating.snapshot()] == ["c", "b"]


def test_who_has_its_last_token_in_flight_gives_its_number_to_whom_boards() -> None:
    scheduler = make_scheduler()
    for name, max_tokens in (("a", 2), ("b", 20), ("c", 20)):
        assert scheduler.offer(make_sequence(name, [1], max_tokens=max_tokens)) is None
    step(scheduler)
    assert seats_of(scheduler.seating.snapshot()) == {"a": 0, "b": 1, "c": None}

    last_of_a = scheduler.schedule()
    with_c = scheduler.schedule()

    assert with_c.boarded
    assert seats_of(scheduler.seating.snapshot()) == {"c": 0, "b": 1, "a": None}
    retire(scheduler, last_of_a)
    retire(scheduler, with_c)


def test_a_sequence_stands_where_the_scheduler_has_it() -> None:
    scheduler = make_scheduler()
    for name, prompt in (("long", range(12)), ("next", range(20, 30)), ("waits", [1])):
        assert scheduler.offer(make_sequence(name, prompt)) is None
    step(scheduler)
    first, *others = scheduler.seating.snapshot()

    # 8 tokens a step.
    assert (first.request_id, first.phase, first.prompt_tokens, first.computed_tokens) == (
        "long",
        SequencePhase.PREFILL,
        12,
        8,
    )
    assert (first.num_blocks, first.reserved_blocks, first.output_tokens) == (2, 4, 0)
    assert [(one.phase, one.seat, one.num_blocks) for one in others] == [(SequencePhase.STANDBY, None, 0)] * 2
    step(scheduler)
    assert scheduler.seating.snapshot()[0].phase is SequencePhase.DECODE


def test_blocks_are_free_held_or_evictable_and_what_was_found_in_the_cache_is_counted() -> None:
    scheduler = make_scheduler()
    for name in ("first", "second"):
        assert scheduler.offer(make_sequence(name, range(9))) is None
        while not scheduler.is_idle:
            step(scheduler)
            kv = scheduler.kv_counts()
            assert kv.free_blocks + kv.used_blocks + kv.evictable_blocks == scheduler.pool.num_blocks
    assert (kv.query_tokens, kv.hit_tokens) == (18, 8)
    assert (kv.used_blocks, kv.reserved_blocks) == (0, 0)
    assert kv.published_blocks == kv.evictable_blocks > 0


# The stream.


class Loop:
    """Stands for the engine."""

    def __init__(self) -> None:
        self.num_asked = 0
        self.has_work = True
        self.watch = StepWatch(DESCRIPTION, self.ask, lambda: self.has_work)

    def ask(self) -> None:
        self.num_asked += 1

    def retire(self, number: int) -> None:
        self.watch.take(EngineOutput(number, record=record(number)))

    def answer(self, *names: str) -> None:
        self.watch.take(EngineOutput(0, sequences=tuple(standing(name) for name in names)))

    def watching(self, *, want_sequences: bool = False) -> aclosing[AsyncGenerator[executor_pb2.WatchStepsResponse]]:
        request = executor_pb2.WatchStepsRequest(interval_ms=50, want_sequences=want_sequences)
        return aclosing(self.watch.watch(request))


async def test_a_watcher_gets_every_step_once() -> None:
    loop = Loop()
    loop.retire(1)
    async with loop.watching() as responses:
        assert not (await anext(responses)).iterations
        for number in (2, 3):
            loop.retire(number)
        second = await anext(responses)
        loop.retire(4)
        third = await anext(responses)
    assert [one.iter for one in second.iterations] == [2, 3]
    assert [one.iter for one in third.iterations] == [4]
    assert second.generation == 7
    assert loop.num_asked == 0


@pytest.mark.parametrize(("after_iter", "first"), [(0, [1, 2, 3]), (2, [3]), (9, [])])
async def test_a_watcher_that_comes_back_goes_on_where_it_was(after_iter: int, first: list[int]) -> None:
    loop = Loop()
    for number in (1, 2, 3):
        loop.retire(number)
    request = executor_pb2.WatchStepsRequest(interval_ms=50, after_iter=after_iter)
    async with aclosing(loop.watch.watch(request)) as responses:
        assert [one.iter for one in (await anext(responses)).iterations] == first
        loop.retire(4)
        assert [one.iter for one in (await anext(responses)).iterations] == [4]


async def test_held_sequences_are_asked_once_for_all_watchers_and_not_without_one() -> None:
    loop = Loop()
    async with loop.watching(want_sequences=True) as one, loop.watching(want_sequences=True) as other:
        asked = asyncio.gather(anext(one), anext(other))
        while not loop.num_asked:
            await asyncio.sleep(0)
        loop.answer("r")
        for response in await asked:
            assert [sequence.request_id for sequence in response.sequences] == ["r"]
        assert loop.num_asked == 1
        loop.has_work = False
        assert not (await anext(one)).sequences
        assert loop.num_asked == 1


async def test_a_loop_that_does_not_answer_holds_no_watcher_up() -> None:
    loop = Loop()
    async with loop.watching(want_sequences=True) as responses:
        assert not (await anext(responses)).sequences
        loop.answer("late")
        first = asyncio.ensure_future(anext(responses))
        while loop.num_asked < 2:
            await asyncio.sleep(0.001)
        loop.answer("r")
        assert [one.request_id for one in (await first).sequences] == ["r"]


async def test_a_stream_ends_when_the_executor_closes_and_is_gone_when_the_watcher_is() -> None:
    loop = Loop()
    async with loop.watching() as responses:
        await anext(responses)
        assert loop.watch.num_watchers == 1
        loop.watch.close()
        assert [response async for response in responses] == []
    assert loop.watch.num_watchers == 0


async def test_too_short_an_interval_is_refused() -> None:
    with pytest.raises(RequestError, match="interval_ms: must be at least 50"):
        await anext(Loop().watch.watch(executor_pb2.WatchStepsRequest(interval_ms=49)))
