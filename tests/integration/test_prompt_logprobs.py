"""Log probabilities of prompts at the client: each position once, in order and before the output, whatever fails."""

from __future__ import annotations

from typing import Any

import grpc
import grpc.aio
import pytest

from inflight import AsyncClient
from inflight.executor.serving.router_session import Session
from inflight.v1 import inference_pb2, types_pb2
from tests.integration.test_logprobs import expected as expected_logprobs
from tests.integration.test_logprobs import logprobs_of
from tests.integration.test_requests import collect, expected_ids, ids_of, rest
from tests.integration.test_resuming import Client
from tests.support.device.fake_device import VOCABULARY_SIZE
from tests.support.stack.cluster import Cluster, run_cluster, token_request

PROMPT = [(3 * i + i // 7) % VOCABULARY_SIZE for i in range(40)]
NUM_TOKENS = 8


def request_of(num_top: int = 0, *, prompt: list[int] = PROMPT, **fields: Any) -> inference_pb2.GenerateRequest:
    request = token_request(prompt, NUM_TOKENS, **fields)
    request.output.prompt_logprobs = True
    request.output.top_prompt_logprobs = num_top
    return request


def expected(prompt: list[int], num_top: int) -> list[types_pb2.PositionLogprobs]:
    """Nothing for the first token, then what the device reports."""
    return [types_pb2.PositionLogprobs(), *expected_logprobs(prompt[1:], num_top)]


def check_prompt(events: list[inference_pb2.StreamEvent], prompt: list[int], num_top: int) -> None:
    """Checks that the prompt came whole, each position once, before the output."""
    kinds = [event.WhichOneof("event") for event in events]
    prompts = [event.prompt for event in events if event.HasField("prompt")]
    assert "prompt" not in kinds[kinds.index("delta") :]
    assert [token_id for one in prompts for token_id in one.token_ids] == prompt
    assert [values for one in prompts for values in one.logprobs] == expected(prompt, num_top)
    offsets = [0]
    for one in prompts:
        assert one.offset == offsets[-1]
        offsets.append(one.offset + len(one.token_ids))
    assert prompts[0].first_text_bytes == f"t{prompt[0]}".encode()


@pytest.mark.parametrize("prompt", [PROMPT, [2], [2, 4]])
async def test_every_position_of_the_prompt_comes_once_before_the_output(
    redis_url: str, pool: str, prompt: list[int]
) -> None:
    async with run_cluster(redis_url, pool) as cluster:
        for num_top in (3, 0):  # the second time the prompt is in the prefix cache
            events = await collect(cluster.routers[0], request_of(num_top, prompt=prompt))
            check_prompt(events, prompt, num_top)
            assert ids_of(events) == expected_ids(prompt, NUM_TOKENS)
            assert events[-1].done.usage.cached_tokens == 0
        without = await collect(cluster.routers[0], token_request(prompt, NUM_TOKENS))
    assert not any(event.HasField("prompt") for event in without)
    assert without[-1].done.usage.cached_tokens == (len(prompt) - 1) // 4 * 4, "a scored prompt is in the prefix cache"


async def test_output_has_log_probabilities_too(redis_url: str, pool: str) -> None:
    request = request_of(1)
    request.output.top_logprobs = 2
    async with run_cluster(redis_url, pool) as cluster:
        events = await collect(cluster.routers[0], request)
    check_prompt(events, PROMPT, 1)
    ids = expected_ids(PROMPT, NUM_TOKENS)
    assert [values.chosen.token_id for values in logprobs_of(events)] == ids
    assert [len(values.top) for values in logprobs_of(events)] == [2] * NUM_TOKENS
    assert [values.chosen.rank for values in logprobs_of(events)] == [1] * NUM_TOKENS


async def test_echo_begins_the_text_with_the_prompt(redis_url: str, pool: str) -> None:
    prompt_text = "".join(f"t{token_id}" for token_id in PROMPT)
    output = "".join(f"t{token_id}" for token_id in expected_ids(PROMPT, NUM_TOKENS))
    request = token_request(PROMPT, NUM_TOKENS)
    request.output.echo = True
    request.stopping.stop.append(prompt_text[:6])  # which the prompt has, and the output does not
    async with run_cluster(redis_url, pool) as cluster:
        events = await collect(cluster.routers[0], request)
    assert "".join(event.delta.text for event in events) == prompt_text + output
    assert next(event.delta.offset for event in events if event.HasField("delta")) == 0
    assert sum(event.delta.num_tokens for event in events) == NUM_TOKENS


@pytest.mark.parametrize(
    ("field", "value"), [("top_prompt_logprobs", 21), ("echo", True)], ids=["too many", "without text"]
)
async def test_invalid_options_are_refused(redis_url: str, pool: str, field: str, value: Any) -> None:
    request = token_request(PROMPT, NUM_TOKENS)
    request.output.text = False
    setattr(request.output, field, value)
    async with run_cluster(redis_url, pool) as cluster:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await collect(cluster.routers[0], request)
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert f"output.{field}" in (caught.value.details() or "")


async def read_prompt(call: Any, client: Client, num_tokens: int) -> None:
    """Reads until so many tokens of the prompt have come."""
    while sum(len(event.prompt.token_ids) for event in client.events) < num_tokens:
        client.take((await call.read()).event)


def running(cluster: Cluster) -> Any:
    return next(executor for executor in cluster.executors if executor.scheduler.num_running)


@pytest.mark.parametrize("num_steps", [1, 2, 4])
async def test_request_that_moves_to_another_executor_repeats_no_position(
    redis_url: str, pool: str, num_steps: int
) -> None:
    """In the middle of the prompt, or in the output."""
    async with run_cluster(redis_url, pool, executors=2) as cluster:
        for executor in cluster.executors:
            executor.brake.hold()
        client, call = Client(), cluster.routers[0].stub.Generate(request_of(2))
        for executor in cluster.executors:
            executor.brake.permit(num_steps)
        await read_prompt(call, client, min(16 * num_steps, len(PROMPT)))
        await running(cluster).stop()
        for executor in cluster.executors:
            executor.brake.release()
        await client.read_rest(call)
    client.check_whole(PROMPT, NUM_TOKENS)
    check_prompt(client.events, PROMPT, 2)


async def test_stream_that_is_resumed_before_the_output_begins_with_the_prompt(redis_url: str, pool: str) -> None:
    async with run_cluster(redis_url, pool, routers=2) as cluster:
        executor = cluster.executors[0]
        executor.brake.hold()
        first, call = Client(), cluster.routers[0].stub.Generate(request_of(1))
        executor.brake.permit(2)
        await read_prompt(call, first, 17)
        await cluster.routers[0].kill()
        resumed = first.resume(cluster.routers[1])
        again = Client()
        again.take((await resumed.read()).event)
        executor.brake.release()
        await again.read_rest(resumed)
    again.check_whole(PROMPT, NUM_TOKENS)
    check_prompt(again.events, PROMPT, 1)


@pytest.mark.parametrize("num_read", [0, 3])
async def test_request_that_has_ended_is_read_again_at_another_router(redis_url: str, pool: str, num_read: int) -> None:
    async with run_cluster(redis_url, pool, routers=2) as cluster:
        whole = Client()
        for event in await collect(cluster.routers[0], request_of(2, resume_ttl={"seconds": 60})):
            whole.take(event)
        place = {"offsets": [num_read], "text_bytes": [2 * num_read]}
        events = await rest(whole.resume(cluster.routers[1], **place))
    ids = [token_id for event in events for token_id in event.delta.token_ids]
    assert ids == expected_ids(PROMPT, NUM_TOKENS)[num_read:]
    if num_read:
        assert not any(event.HasField("prompt") for event in events), "a client with output has the prompt"
    else:
        check_prompt(events, PROMPT, 2)


async def test_python_client_has_the_prompt_in_its_result(redis_url: str, pool: str) -> None:
    async with run_cluster(redis_url, pool) as cluster, AsyncClient(cluster.routers[0].address) as client:
        result = await client.complete(token_ids=PROMPT, max_tokens=2, temperature=0, top_prompt_logprobs=1, echo=True)
    assert result.prompt_token_ids == tuple(PROMPT)
    assert result.prompt_logprobs[0] is None
    scores = [one for one in result.prompt_logprobs if one is not None]
    assert [(one.chosen.token_id, one.chosen.logprob) for one in scores] == [(i, -i / 8) for i in PROMPT[1:]]
    assert all(one.chosen.rank == 1 and one.top[0] == one.chosen for one in scores)
    assert result.text.startswith("".join(f"t{token_id}" for token_id in PROMPT))


async def test_executor_that_reports_nothing_fails_the_request_clearly(
    redis_url: str, pool: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one of an earlier version, which does not know the field."""
    monkeypatch.setattr(Session, "score", lambda *_: None)
    async with run_cluster(redis_url, pool) as cluster:
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await collect(cluster.routers[0], request_of(1))
        others = await collect(cluster.routers[0], token_request(PROMPT, NUM_TOKENS))
    assert caught.value.code() is grpc.StatusCode.INTERNAL
    assert "log probabilities of the prompt" in (caught.value.details() or "")
    assert ids_of(others) == expected_ids(PROMPT, NUM_TOKENS)


@pytest.mark.parametrize("best_of", [0, 4])
async def test_choices_share_the_scores_of_their_prompt(redis_url: str, pool: str, best_of: int) -> None:
    request = request_of(1, n=3, best_of=best_of)
    request.output.echo = True
    async with run_cluster(redis_url, pool) as cluster:
        events = await collect(cluster.routers[0], request)
    prompts = [event.prompt for event in events if event.HasField("prompt")]
    assert [token_id for one in prompts for token_id in one.token_ids] == PROMPT
    assert [values for one in prompts for values in one.logprobs] == expected(PROMPT, 1)
    for choice in range(3):
        text = "".join(event.delta.text for event in events if event.HasField("delta") and event.delta.choice == choice)
        assert text == "".join(f"t{token_id}" for token_id in [*PROMPT, *expected_ids(PROMPT, NUM_TOKENS)])
