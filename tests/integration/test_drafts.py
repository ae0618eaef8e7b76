"""Requests whose executors draft, through real gRPC, real Redis and the real scheduler: frames with several tokens of a
sequence."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import grpc
import grpc.aio
import pytest

from inflight.executor.speculation.counts import NO_DRAFT_COUNTS
from inflight.executor.speculation.proposer import NgramProposer, Proposer
from inflight.v1 import inference_pb2, types_pb2
from tests.integration.test_requests import DEFAULT_SALT, collect, expected_ids, ids_of, rest
from tests.support.scheduler.drafting import half_right, right, wrong
from tests.support.stack.cluster import ExecutorShape, run_cluster, start_executor, token_request

RIGHT = partial(right, DEFAULT_SALT)
SHAPE = ExecutorShape(make_proposer=RIGHT)


@pytest.mark.parametrize("make_proposer", [RIGHT, wrong, half_right, NgramProposer])
async def test_output_is_that_without_drafts(redis_url: str, pool: str, make_proposer: Callable[[], Proposer]) -> None:
    async with run_cluster(redis_url, pool, shape=ExecutorShape(make_proposer=make_proposer)) as cluster:
        events = await collect(cluster.routers[0], token_request([1, 2, 1, 2], 40))
        counts = cluster.executors[0].scheduler.draft_counts
        num_steps = cluster.executors[0].engine.num_steps
    assert ids_of(events) == expected_ids([1, 2, 1, 2], 40)
    assert events[-1].done.usage.output_tokens == 40
    assert counts.num_verified > 0
    if make_proposer is RIGHT:
        # The prompt's step, then drafts of all tokens but the last of each step.
        assert num_steps < 10
        assert counts.num_accepted == counts.num_verified


async def test_request_without_drafts_gets_none(redis_url: str, pool: str) -> None:
    async with run_cluster(redis_url, pool, shape=SHAPE) as cluster:
        events = await collect(cluster.routers[0], token_request([1, 2], 20, max_drafts=0))
        counts = cluster.executors[0].scheduler.draft_counts
    assert ids_of(events) == expected_ids([1, 2], 20)
    assert counts == NO_DRAFT_COUNTS


async def test_request_for_too_many_drafts_is_refused(redis_url: str, pool: str) -> None:
    async with run_cluster(redis_url, pool, shape=SHAPE) as cluster:
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await collect(cluster.routers[0], token_request([1, 2], 20, max_drafts=65))
    assert error.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert "max_drafts" in (error.value.details() or "")


@pytest.mark.parametrize("first", range(0, 30, 3))
async def test_stop_string_within_the_tokens_of_a_frame_ends_the_text_before_it(
    redis_url: str, pool: str, first: int
) -> None:
    text = "".join(f"t{token}" for token in expected_ids([1, 2, 3], 40))
    stop = text[first : first + 9]
    request = token_request([1, 2, 3], 40)
    request.stopping.stop.append(stop)
    async with run_cluster(redis_url, pool, shape=SHAPE) as cluster:
        events = await collect(cluster.routers[0], request)
    assert "".join(event.delta.text for event in events) == text[: text.index(stop)]
    assert events[-2].finished.stop == stop


async def test_log_probabilities_come_with_each_token_of_a_frame(redis_url: str, pool: str) -> None:
    request = token_request([1, 2, 3], 30)
    request.output.logprobs = True
    async with run_cluster(redis_url, pool, shape=SHAPE) as cluster:
        events = await collect(cluster.routers[0], request)
    chosen = [one.chosen.token_id for event in events for one in event.delta.logprobs]
    assert chosen == ids_of(events) == expected_ids([1, 2, 3], 30)


async def test_lost_executor_hands_on_a_request_with_drafts_from_the_next_offset(redis_url: str, pool: str) -> None:
    async with run_cluster(redis_url, pool, shape=ExecutorShape(make_proposer=half_right)) as cluster:
        router, dying = cluster.routers[0], cluster.executors[0]
        dying.brake.hold()
        call = router.stub.Generate(token_request([1, 2], 40))
        dying.brake.permit(4)
        events: list[inference_pb2.StreamEvent] = []
        while sum(event.delta.num_tokens for event in events) < 3:
            events.append((await call.read()).event)
        port = int(dying.address.rpartition(":")[2])
        await dying.stop()
        # The successor drafts otherwise.
        successor = await start_executor("executor-0", pool, SHAPE, generation=2, port=port)
        events += await rest(call)
        counts = successor.scheduler.draft_counts
        await successor.stop()
    assert ids_of(events) == expected_ids([1, 2], 40)
    assert events[-1].done.timing.migrations == 1
    assert events[-2].finished.reason == types_pb2.FINISH_REASON_LENGTH
    assert counts.num_accepted > 0
