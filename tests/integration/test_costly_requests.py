"""Requests that are cheap to send and costly to read: each is refused before the work is done, and the loop of the
router goes on meanwhile."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc
import grpc.aio
import pytest

from tests.cluster import run_cluster
from tests.fuzz.messages import nested
from tests.fuzz.served import SERVICE
from tests.fuzz.statuses import status_of
from tests.fuzz.test_client_api import templated_tokenizer

NUM_EMPTY = 2 * 1024 * 1024
INVALID = ("INVALID_ARGUMENT", "INVALID_FIELD")

# Bytes of requests: 4 MB of empty entries of a field. Numbers of fields are those of inference.proto.
EMPTY_MESSAGES = nested(6, b"\x0a\x00" * NUM_EMPTY)
USER = nested(1, nested(1, b"user"))
COSTLY = {
    "messages": EMPTY_MESSAGES,
    "content parts": nested(6, nested(1, nested(1, b"user") + b"\x12\x00" * NUM_EMPTY)),
    "tool calls": nested(6, nested(1, nested(1, b"user") + b"\x22\x00" * NUM_EMPTY)),
    "tools": nested(6, USER + b"\x12\x00" * NUM_EMPTY),
    "values of template_kwargs": nested(
        6, USER + nested(3, nested(1, nested(1, b"a") + nested(2, nested(6, b"\x0a\x00" * NUM_EMPTY))))
    ),
    "stop strings": nested(3, b"t1") + nested(8, b"\x1a\x00" * NUM_EMPTY),
    "fields that are not known": nested(3, b"t1") + b"\xc0\x3e\x01" * NUM_EMPTY,
}
# A bound that holds on a busy machine. Before there were limits it took from one second to ten.
GENEROUS_S = 0.5


@dataclass(slots=True)
class LongestPause:
    """The longest time between two turns of the event loop."""

    seconds: float = 0.0


@asynccontextmanager
async def pauses() -> AsyncIterator[LongestPause]:
    """Watches the loop for as long as the block runs."""
    longest = LongestPause()

    async def watch() -> None:
        before = time.thread_time()
        while True:
            await asyncio.sleep(0)
            now = time.thread_time()
            longest.seconds, before = max(longest.seconds, now - before), now

    watching = asyncio.create_task(watch())
    try:
        yield longest
    finally:
        watching.cancel()


async def send(channel: grpc.aio.Channel, rpc: str, request: bytes, metadata: Any = ()) -> None:
    call: Any = channel.unary_stream if rpc == "Generate" else channel.unary_unary
    sent = call(SERVICE + rpc)(request, metadata=metadata)
    if rpc == "Generate":
        await sent.read()
    else:
        await sent


@pytest.mark.parametrize("name", COSTLY)
async def test_four_megabytes_of_empty_fields_are_refused_while_the_loop_goes_on(
    redis_url: str, pool: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tests.cluster.tiny_tokenizer", templated_tokenizer)
    async with (
        run_cluster(redis_url, pool) as cluster,
        grpc.aio.insecure_channel(cluster.routers[0].address) as channel,
    ):
        async with pauses() as longest:
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await send(channel, "Generate", COSTLY[name])
        assert status_of(error.value) == INVALID
        assert longest.seconds < GENEROUS_S
