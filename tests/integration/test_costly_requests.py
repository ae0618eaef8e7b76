"""Requests that are cheap to send and costly to read: each is refused before the work is done, and the loop of the
router goes on meanwhile."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from inflight.common.rpc.wire_counts import WireCounts
from inflight.router.api.tokenizing import MAX_CONTEXTS
from inflight.router.request.validation import MAX_DETOKENIZED_IDS
from inflight.router.settings import RouterSettings
from inflight.router.text.tokenizer import TextModel
from inflight.v1 import inference_pb2
from tests.fuzz.messages import nested
from tests.fuzz.served import SERVICE
from tests.fuzz.statuses import status_of
from tests.fuzz.test_client_api import templated_tokenizer
from tests.integration.test_authorization import locked_cluster, shown
from tests.integration.test_requests import collect, expected_ids, ids_of
from tests.support.device.fake_device import VOCABULARY_SIZE
from tests.support.stack.cluster import CONTEXT_LENGTH, run_cluster, token_request

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
    monkeypatch.setattr("tests.support.stack.cluster.tiny_tokenizer", templated_tokenizer)
    async with (
        run_cluster(redis_url, pool) as cluster,
        grpc.aio.insecure_channel(cluster.routers[0].address) as channel,
    ):
        async with pauses() as longest:
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await send(channel, "Generate", COSTLY[name])
        assert status_of(error.value) == INVALID
        assert longest.seconds < GENEROUS_S


async def test_unknown_caller_is_refused_before_its_request_is_received(
    redis_url: str, pool: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checked: list[int] = []
    check = WireCounts.check

    def counting(self: WireCounts, serialized: bytes) -> None:
        checked.append(len(serialized))
        check(self, serialized)

    async with (
        locked_cluster(redis_url, pool, tmp_path) as cluster,
        grpc.aio.insecure_channel(cluster.routers[0].address) as channel,
    ):
        monkeypatch.setattr(WireCounts, "check", counting)
        for rpc in ("Generate", "Tokenize", "Resume"):
            with pytest.raises(grpc.aio.AioRpcError) as error:
                await send(channel, rpc, EMPTY_MESSAGES)
            assert status_of(error.value) == ("UNAUTHENTICATED", "UNAUTHENTICATED")
        assert checked == []
        with pytest.raises(grpc.aio.AioRpcError) as error:
            await send(channel, "Generate", EMPTY_MESSAGES, shown("all"))
        assert status_of(error.value) == INVALID
        assert checked == [len(EMPTY_MESSAGES)]


def digits_tokenizer() -> PreTrainedTokenizerFast:
    """A token for each of the digits 0 to 4, and a template that puts messages side by side."""
    tokenizer = Tokenizer(models.BPE(vocab={str(digit): digit for digit in range(VOCABULARY_SIZE)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    fast = PreTrainedTokenizerFast(tokenizer_object=tokenizer)
    fast.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    return fast


@pytest.fixture
def tokenized(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The lengths of the texts that routers of this test tokenize; their model knows digits."""
    lengths: list[int] = []
    encode = TextModel.encode

    def counting(self: TextModel, text: str, **options: Any) -> list[int]:
        if text:  # a model encodes none when it is made
            lengths.append(len(text))
        return encode(self, text, **options)

    monkeypatch.setattr("tests.support.stack.cluster.tiny_tokenizer", digits_tokenizer)
    monkeypatch.setattr(TextModel, "encode", counting)
    return lengths


def text_request(num_digits: int, **fields: Any) -> inference_pb2.GenerateRequest:
    request = token_request([], 2, **fields)
    request.text = "1" * num_digits
    return request


def chat_of(num_digits: int) -> inference_pb2.Chat:
    chat = inference_pb2.Chat()
    chat.messages.add(role="user").content.add(text="1" * num_digits)
    return chat


async def refused(call: Awaitable[Any]) -> tuple[str, str]:
    with pytest.raises(grpc.aio.AioRpcError) as error:
        await call
    return status_of(error.value)


async def test_text_that_cannot_fit_is_refused_before_it_is_tokenized(
    redis_url: str, pool: str, tokenized: list[int]
) -> None:
    too_long = 4 * 1024 * 1024 - 100
    async with run_cluster(redis_url, pool) as cluster:
        router = cluster.routers[0]
        chat = token_request([], 2)
        chat.chat.CopyFrom(chat_of(too_long))
        for request in (text_request(too_long), chat, text_request(CONTEXT_LENGTH + 10)):
            assert await refused(collect(router, request)) == INVALID
        truncated = text_request(too_long, truncate_prompt_tokens=4)
        assert await refused(collect(router, truncated)) == INVALID
        for tokenize in (
            inference_pb2.TokenizeRequest(text="1" * too_long),
            inference_pb2.TokenizeRequest(chat=chat_of(too_long)),
        ):
            assert await refused(router.stub.Tokenize(tokenize)) == INVALID
        assert tokenized == []
        # What may be truncated, or is only tokenized, may be longer than the context
        longer = text_request(MAX_CONTEXTS * CONTEXT_LENGTH, truncate_prompt_tokens=4)
        assert ids_of(await collect(router, longer)) == expected_ids([1] * 4, 2)
        answer = await router.stub.Tokenize(inference_pb2.TokenizeRequest(text="1" * MAX_CONTEXTS * CONTEXT_LENGTH))
        assert len(answer.token_ids) == MAX_CONTEXTS * CONTEXT_LENGTH
        assert tokenized == [MAX_CONTEXTS * CONTEXT_LENGTH] * 2


RATES = """
[tenants.default]
[tenants.few]
requests_per_s = 0.001
request_burst = 2
[tenants.short]
tokens_per_s = 0.001
token_burst = 40
"""


async def test_tenant_whose_rate_is_used_up_has_nothing_tokenized(
    redis_url: str, pool: str, tokenized: list[int], tmp_path: Path
) -> None:
    (tmp_path / "admission").write_text(RATES)
    settings = RouterSettings(no_executor_grace_s=60.0, admission_file=tmp_path / "admission")
    limited = ("RESOURCE_EXHAUSTED", "RATE_LIMITED")
    async with run_cluster(redis_url, pool, settings=settings) as cluster:
        router = cluster.routers[0]
        for number in range(2):
            await collect(router, text_request(3, tenant="few", idempotency_key=str(number)))
        tokenized.clear()
        assert await refused(collect(router, text_request(3, tenant="few"))) == limited
        chat = token_request([], 2, tenant="few")
        chat.chat.CopyFrom(chat_of(3))
        assert await refused(collect(router, chat)) == limited
        assert tokenized == []
        # A repeat is not a new request
        await collect(router, text_request(3, tenant="few", idempotency_key="1"))
        # A rate of tokens refuses by what the text has at least
        await collect(router, text_request(20, tenant="short"))
        tokenized.clear()
        assert await refused(collect(router, text_request(30, tenant="short"))) == limited
        assert tokenized == []
        assert ids_of(await collect(router, text_request(3))) == expected_ids([1] * 3, 2)


async def test_tokenizing_alone_counts_as_a_request(
    redis_url: str, pool: str, tokenized: list[int], tmp_path: Path
) -> None:
    (tmp_path / "admission").write_text("[tenants.default]\nrequests_per_s = 0.001\nrequest_burst = 2\n")
    settings = RouterSettings(no_executor_grace_s=60.0, admission_file=tmp_path / "admission")
    limited = ("RESOURCE_EXHAUSTED", "RATE_LIMITED")
    async with run_cluster(redis_url, pool, settings=settings) as cluster:
        stub = cluster.routers[0].stub
        await stub.Tokenize(inference_pb2.TokenizeRequest(text="1"))
        await stub.Detokenize(inference_pb2.DetokenizeRequest(token_ids=[1]))
        assert await refused(stub.Tokenize(inference_pb2.TokenizeRequest(text="1"))) == limited
        assert await refused(stub.Detokenize(inference_pb2.DetokenizeRequest(token_ids=[1]))) == limited
        assert tokenized == [1]


async def test_too_many_ids_to_detokenize_are_refused_before_they_are_read(redis_url: str, pool: str) -> None:
    async with run_cluster(redis_url, pool) as cluster:
        many = inference_pb2.DetokenizeRequest(token_ids=[1] * (MAX_DETOKENIZED_IDS + 1))
        assert await refused(cluster.routers[0].stub.Detokenize(many)) == INVALID
        most = inference_pb2.DetokenizeRequest(token_ids=[1] * MAX_DETOKENIZED_IDS)
        assert (await cluster.routers[0].stub.Detokenize(most)).text == "t1" * MAX_DETOKENIZED_IDS
