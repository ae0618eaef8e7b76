"""Sequences whose router's stream broke: orphans, take-over by another router, and records of ended sequences."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator

import pytest

from inflight.executor.engine.engine import Engine
from inflight.executor.scheduler.sequence import FinishReason
from inflight.executor.serving.placements import RetentionPolicy
from inflight.v1 import executor_pb2, types_pb2
from tests.integration.test_requests import expected_ids
from tests.support.stack.cluster import ExecutorShape, RunningExecutor, start_executor
from tests.support.stack.router_stream import WAIT_S, RouterStream, make_submit, router_stream

LENGTH = 40


@pytest.fixture
async def executor() -> AsyncIterator[RunningExecutor]:
    running = await start_executor("executor", "model", ExecutorShape(num_standby_sequences=4))
    yield running
    await running.stop()


async def tokens_of(router: RouterStream, executor: RunningExecutor, request_id: str, count: int) -> None:
    """Lets the device go on until a router has at least so many tokens of a request, and not to its end."""
    executor.brake.permit(count + 2)
    await router.until(lambda: router.of(request_id) and len(router.of(request_id)[-1].tokens) >= count)


async def test_stream_goes_on_with_another_router_without_gap_or_repeat(executor: RunningExecutor) -> None:
    # Given a sequence whose router has had 5 tokens when it dies
    executor.brake.hold()
    submit = make_submit("a", [1, 2], LENGTH)
    submit.deadline_ms = 100_000
    async with router_stream(executor.address) as first:
        first.send(submits=[submit])
        await tokens_of(first, executor, "a", 5)
    # When another wants it from token 3 on
    async with router_stream(executor.address) as second:
        second.attach("a", 1, 3)
        await second.until(lambda: second.attached)
        executor.brake.release()
        await second.until(lambda: second.of("a")[0].end)
    # Then it gets what it needs to know, and every token from there
    (attached,) = second.attached
    assert attached.started
    assert 0 < attached.submit.deadline_ms < 100_000
    attached.submit.deadline_ms = 100_000
    assert attached.submit == submit
    (slot,) = second.of("a")
    assert slot.tokens[0][0] == 3
    assert slot.token_ids == expected_ids([1, 2], LENGTH)[3:]
    assert slot.end is not None
    assert slot.end.reason == types_pb2.FINISH_REASON_LENGTH


async def test_orphan_goes_on_to_its_end_and_is_remembered(executor: RunningExecutor) -> None:
    executor.brake.hold()
    submit = make_submit("a", [1, 2], LENGTH)
    submit.prior_output_ids.extend(expected_ids([1, 2], 4))
    async with router_stream(executor.address) as first:
        first.send(submits=[submit])
        await first.until(lambda: first.of("a"))
    async with router_stream(executor.address) as second:
        executor.brake.release()
        await second.until(lambda: not second.reports[-1].held)
        second.attach("a", 1, 0)
        second.attach("a", 1, 38)
        await second.until(lambda: len(second.of("a")) == 2 and second.of("a")[1].end)
    # Prior output is output like any, and not part of the submit any more.
    assert not second.attached[0].submit.prior_output_ids
    assert second.attached[0].submit.router_context == b"context of a"
    whole, rest = second.of("a")
    assert whole.token_ids == expected_ids([1, 2], LENGTH)
    assert rest.tokens == whole.tokens[38:]
    assert whole.end is not None
    assert rest.end is not None
    assert whole.end.reason == rest.end.reason == types_pb2.FINISH_REASON_LENGTH


async def test_live_reader_is_told_that_another_reads_and_gets_nothing_further(executor: RunningExecutor) -> None:
    executor.brake.hold()
    async with router_stream(executor.address) as first, router_stream(executor.address) as second:
        first.send(submits=[make_submit("a", [1], LENGTH), make_submit("b", [3], LENGTH)])
        await tokens_of(first, executor, "a", 4)
        second.attach("a", 1, 0)
        await first.until(lambda: first.of("a")[0].is_detached)
        executor.brake.release()
        await second.until(lambda: second.of("a") and second.of("a")[0].end)
        await first.until(lambda: first.of("b")[0].end)
    assert second.of("a")[0].token_ids == expected_ids([1], LENGTH)
    (detached,) = first.of("a")
    assert detached.end is None
    assert detached.token_ids == expected_ids([1], len(detached.tokens))
    assert len(detached.tokens) < LENGTH
    assert first.of("b")[0].token_ids == expected_ids([3], LENGTH)


async def test_router_that_attaches_to_what_it_reads_gets_a_new_slot(executor: RunningExecutor) -> None:
    executor.brake.hold()
    async with router_stream(executor.address) as router:
        router.send(submits=[make_submit("a", [1], LENGTH)])
        await tokens_of(router, executor, "a", 4)
        router.attach("a", 1, 2)
        await router.until(lambda: len(router.of("a")) == 2)
        executor.brake.release()
        await router.until(lambda: router.of("a")[1].end)
    before, after = router.of("a")
    assert before.is_detached
    assert after.tokens[0][0] == 2
    assert after.token_ids == expected_ids([1], LENGTH)[2:]


async def test_attach_to_what_the_engine_has_not_answered_waits_for_the_answer(executor: RunningExecutor) -> None:
    # Given an engine in the middle of a step, and a submit that waits for its end
    executor.brake.hold()
    async with router_stream(executor.address) as first, router_stream(executor.address) as second:
        first.send(submits=[make_submit("busy", [1], LENGTH)])
        assert await asyncio.to_thread(executor.brake.is_waited_for.wait, WAIT_S)
        first.send(submits=[make_submit("a", [2], LENGTH)])
        await first.until(lambda: len(first.reports[-1].held) == 2)
        assert not first.of("a")
        # When another router attaches
        second.attach("a", 1, 0)
        second.attach("a", 2, 0)
        await second.until(lambda: second.rejected)
        assert not second.attached
        executor.brake.release()
        await second.until(lambda: second.of("a") and second.of("a")[0].end)
        await first.until(lambda: first.of("a") and first.of("a")[0].is_detached)
    assert not second.attached[0].started
    assert second.of("a")[0].is_started
    assert second.of("a")[0].token_ids == expected_ids([2], LENGTH)


@pytest.mark.parametrize(("request_id", "attempt"), [("a", 1), ("a", 3), ("b", 2)])
async def test_placement_that_is_not_here_is_not_held(executor: RunningExecutor, request_id: str, attempt: int) -> None:
    executor.brake.hold()
    async with router_stream(executor.address) as router:
        router.send(submits=[make_submit("a", [1], LENGTH, attempt=2)])
        router.attach(request_id, attempt, 0)
        await router.until(lambda: router.rejected)
    (rejected,) = router.rejected
    assert (rejected.request_id, rejected.attempt) == (request_id, attempt)
    assert rejected.reason == executor_pb2.REJECT_REASON_NOT_HELD


@pytest.mark.parametrize(("protocol_version", "orphan_grace_s"), [(2, 0.0), (2, 0.01), (1, 3600.0)])
async def test_orphan_is_cancelled_when_its_time_is_over_or_no_client_can_resume_it(
    protocol_version: int, orphan_grace_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    cancelled = asyncio.Event()
    cancel = Engine.cancel

    def cancel_and_tell(engine: Engine, request_id: str, attempt: int, reason: FinishReason) -> None:
        cancel(engine, request_id, attempt, reason)
        cancelled.set()

    monkeypatch.setattr(Engine, "cancel", cancel_and_tell)
    retention = RetentionPolicy(orphan_grace_s=orphan_grace_s)
    executor = await start_executor("executor", "model", ExecutorShape(), retention=retention)
    executor.brake.hold()
    try:
        async with router_stream(executor.address, protocol_version=protocol_version) as first:
            first.send(submits=[make_submit("a", [1], LENGTH)])
            await tokens_of(first, executor, "a", 4)
        async with asyncio.timeout(WAIT_S):
            await cancelled.wait()
        # Then the engine hears of it between two steps.
        async with router_stream(executor.address) as second:
            executor.brake.permit(2)
            await second.until(lambda: not second.reports[-1].held)
            second.attach("a", 1, 0)
            await second.until(lambda: second.of("a") and second.of("a")[0].end)
        end = second.of("a")[0].end
        assert end is not None
        assert end.reason == types_pb2.FINISH_REASON_CANCELLED
    finally:
        await executor.stop()


async def test_newer_attempt_ends_an_orphan_and_is_the_one_to_attach_to(executor: RunningExecutor) -> None:
    executor.brake.hold()
    async with router_stream(executor.address) as first:
        first.send(submits=[make_submit("a", [1], LENGTH)])
        await tokens_of(first, executor, "a", 4)
    async with router_stream(executor.address) as second, router_stream(executor.address) as third:
        submit = make_submit("a", [1], LENGTH, attempt=2)
        submit.prior_output_ids.extend(expected_ids([1], 4))
        second.send(submits=[submit])
        executor.brake.release()
        await second.until(lambda: second.of("a", 2) and second.of("a", 2)[0].end)
        third.attach("a", 1, 0)
        third.attach("a", 2, 0)
        await third.until(lambda: third.rejected and third.of("a", 2) and third.of("a", 2)[0].end)
    assert second.of("a", 2)[0].token_ids == expected_ids([1], LENGTH)[4:]
    assert third.rejected[0].attempt == 1
    assert third.of("a", 2)[0].token_ids == expected_ids([1], LENGTH)


async def test_attempt_that_is_known_is_not_taken_again(executor: RunningExecutor) -> None:
    async with router_stream(executor.address) as router:
        router.send(submits=[make_submit("a", [1], 4), make_submit("a", [1], 4)])
        await router.until(lambda: router.of("a") and router.of("a")[0].end)
        router.send(submits=[make_submit("a", [1], 4)])
        await router.until(lambda: len(router.rejected) == 2)
    stale = executor_pb2.REJECT_REASON_STALE_ATTEMPT
    assert [rejected.reason for rejected in router.rejected] == [stale, stale]


async def test_what_is_not_kept_is_not_held() -> None:
    forgetful = await start_executor("executor", "model", ExecutorShape(), retention=RetentionPolicy(retain_ended_s=0))
    try:
        async with router_stream(forgetful.address) as router:
            router.send(submits=[make_submit("a", [1], 4)])
            await router.until(lambda: router.of("a") and router.of("a")[0].end)
            router.attach("a", 1, 0)
            await router.until(lambda: router.rejected)
        assert router.rejected[0].reason == executor_pb2.REJECT_REASON_NOT_HELD
    finally:
        await forgetful.stop()


async def test_old_router_whose_sequence_is_taken_hears_of_an_end_that_it_knows(executor: RunningExecutor) -> None:
    executor.brake.hold()
    async with (
        router_stream(executor.address, protocol_version=1) as first,
        router_stream(executor.address) as second,
    ):
        first.send(submits=[make_submit("a", [1], LENGTH)])
        await tokens_of(first, executor, "a", 4)
        second.attach("a", 1, 4)
        await first.until(lambda: first.of("a")[0].end)
        executor.brake.release()
        await second.until(lambda: second.of("a") and second.of("a")[0].end)
        first.attach("a", 1, 0)
        await first.until(lambda: first.rejected)
    end = first.of("a")[0].end
    assert end is not None
    assert end.reason == types_pb2.FINISH_REASON_CANCELLED
    assert first.rejected[0].reason == executor_pb2.REJECT_REASON_UNSUPPORTED
    assert not first.attached
    assert second.of("a")[0].token_ids == expected_ids([1], LENGTH)[4:]
