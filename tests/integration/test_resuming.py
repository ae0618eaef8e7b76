"""Streams that outlive their router: resumed, taken over, repeated and carried on by the client, exactly once."""

from __future__ import annotations

import asyncio
from typing import Any

import grpc
import grpc.aio
import pytest
from inflight.v1 import inference_pb2, types_pb2

from router.settings import RouterSettings
from tests.cluster import Cluster, ExecutorShape, RunningRouter, run_cluster, token_request
from tests.integration.test_requests import collect, expected_ids, ids_of, rest

PROMPT = [1, 2, 3]
NUM_TOKENS = 20


class Client:
    """Reads one stream and checks that every token and every character comes once."""

    def __init__(self) -> None:
        self.ids: list[int] = []
        self.text = ""
        self.events: list[inference_pb2.StreamEvent] = []
        self.request_id = ""
        self.token = ""

    def take(self, event: inference_pb2.StreamEvent) -> None:
        self.events.append(event)
        if event.HasField("accepted"):
            self.request_id, self.token = event.accepted.request_id, event.accepted.resume_token
        if event.HasField("delta"):
            assert event.delta.offset == len(self.ids)
            self.ids.extend(event.delta.token_ids)
            self.text += event.delta.text

    async def read_tokens(self, call: Any, num_tokens: int) -> None:
        while len(self.ids) < num_tokens:
            self.take((await call.read()).event)

    async def read_rest(self, call: Any) -> None:
        for event in await rest(call):
            self.take(event)

    def resume(self, router: RunningRouter, **fields: Any) -> Any:
        return router.stub.Resume(
            inference_pb2.ResumeRequest(
                request_id=self.request_id,
                resume_token=self.token,
                offsets=[len(self.ids)],
                **{"text_bytes": [len(self.text.encode())], **fields},
            )
        )

    def check_whole(self, prompt_ids: list[int], num_tokens: int, salt: bytes = b"default\0") -> None:
        assert self.ids == expected_ids(prompt_ids, num_tokens, salt)
        assert self.text == "".join(f"t{token}" for token in self.ids)
        assert self.events[-2].finished.reason == types_pb2.FINISH_REASON_LENGTH
        usage = self.events[-1].done.usage
        assert (usage.prompt_tokens, usage.output_tokens) == (len(prompt_ids), num_tokens)


def request_of(**fields: Any) -> inference_pb2.GenerateRequest:
    return token_request(PROMPT, NUM_TOKENS, **fields)


async def begun(cluster: Cluster, num_tokens: int, router: int = 0, **fields: Any) -> tuple[Client, Any]:
    """A request that has brought so many tokens, and stands still."""
    client, brake = Client(), cluster.executors[0].brake
    brake.hold()
    call = cluster.routers[router].stub.Generate(request_of(**fields))
    brake.permit(num_tokens + 1)
    await client.read_tokens(call, num_tokens)
    return client, call


async def status_of(call: Any) -> grpc.aio.AioRpcError:
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await rest(call)
    return caught.value


async def test_stream_of_a_dead_router_goes_on_at_another_from_the_next_offset(redis_url: str, pool: str) -> None:
    async with run_cluster(redis_url, pool, routers=2) as cluster:
        client, call = await begun(cluster, 5)
        await cluster.routers[0].kill()
        assert (await status_of(call)).code() in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.CANCELLED)
        resumed = client.resume(cluster.routers[1])
        first = (await resumed.read()).event
        assert first.accepted == client.events[0].accepted
        cluster.executors[0].brake.release()
        await client.read_rest(resumed)
    client.check_whole(PROMPT, NUM_TOKENS)
