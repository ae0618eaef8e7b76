"""Tokens depend on the prompt, the output so far, the parameters and the seed, and on nothing else.

Random requests over all features of the logits stage give the same tokens alone, among others, and with executors that
are killed. The model is small and computed in float32. tests/unit/test_overlap_exactness.py preempts sequences.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from inflight.local.options import StackOptions
from inflight.local.stack import LocalStack
from inflight.local.state import read_state
from inflight.v1 import inference_pb2, inference_pb2_grpc, types_pb2

NUM_REQUESTS = 200
BATCH = 32
# Token ids of the tiny model: 256 bytes and the end.
NUM_IDS = 256
COMMON = ("--dtype", "float32", "--num-threads", "1", "--max-num-tokens", "128")
SCHEMAS = (
    '{"type": "object", "properties": {"name": {"type": "string", "maxLength": 8}, "age": {"type": "integer"}}, '
    '"required": ["name", "age"], "additionalProperties": false}',
    '{"type": "array", "items": {"enum": ["red", "green", "blue"]}, "minItems": 1, "maxItems": 3}',
)
PROMPTS = ("The city bus stops at every corner.", "0123 0123 0123", "Once upon a time", "aaaa bbbb aaaa", "{}")


@dataclass(frozen=True, slots=True)
class Answer:
    """What a client gets: its tokens in order, and why they end: a finish reason or an error."""

    token_ids: tuple[int, ...]
    end: str


def random_request(rng: random.Random) -> inference_pb2.GenerateRequest:
    request = inference_pb2.GenerateRequest(
        text=rng.choice(PROMPTS) * rng.randint(1, 3),
        sampling=random_sampling(rng),
        stopping=types_pb2.StoppingParams(
            max_tokens=rng.randint(4, 40),
            min_tokens=rng.choice((0, 0, 3)),
            stop_token_ids=rng.sample(range(NUM_IDS), rng.choice((0, 0, 4))),
        ),
        output=inference_pb2.OutputOptions(token_ids=True, logprobs=rng.random() < 0.2),
    )
    kind = rng.choice(("", "", "", "json_schema", "json_object", "regex", "choice", "grammar"))
    if kind == "json_schema":
        request.constraint.json_schema = rng.choice(SCHEMAS)
    elif kind == "json_object":
        request.constraint.json_object = True
    elif kind == "regex":
        request.constraint.regex = rng.choice((r"[a-c]{3,9}", r"\d+-\d+", "(yes|no)!*"))
    elif kind == "choice":
        request.constraint.choice.choices.extend(("left", "right", "straight on"))
    elif kind == "grammar":
        request.constraint.grammar = 'start: item ("," item)*\nitem: /[a-z]{1,4}/'
    return request


def random_sampling(rng: random.Random) -> types_pb2.SamplingParams:
    """Each feature in about half of the requests, so that every pair of them occurs."""

    def maybe(*values: Any, neutral: Any) -> Any:
        return rng.choice(values) if rng.random() < 0.5 else neutral

    sampling = types_pb2.SamplingParams(
        temperature=rng.choice((0.0, 0.7, 1.0, 1.5)),
        top_k=maybe(3, 20, neutral=0),
        top_p=maybe(0.5, 0.9, neutral=1.0),
        min_p=maybe(0.02, 0.2, neutral=0.0),
        presence_penalty=maybe(-0.5, 0.7, 2.0, neutral=0.0),
        frequency_penalty=maybe(-0.5, 0.3, 1.5, neutral=0.0),
        repetition_penalty=maybe(0.8, 1.1, 1.5, neutral=1.0),
        no_repeat_ngram_size=maybe(1, 2, 3, neutral=0),
        seed=rng.getrandbits(64),
        bad_words=maybe(["a"], ["the", "bus"], neutral=[]),
    )
    for token_id in rng.sample(range(NUM_IDS), maybe(5, neutral=0)):
        sampling.logit_bias[token_id] = rng.uniform(-8, 8)
    for _ in range(maybe(3, neutral=0)):
        sampling.bad_word_ids.add(ids=[rng.randrange(NUM_IDS) for _ in range(rng.randint(1, 2))])
    if rng.random() < 0.1:
        sampling.allowed_token_ids.extend(rng.sample(range(NUM_IDS), 120))
    return sampling


@dataclass(slots=True)
class Kill:
    """Kills the executor that produces the first token that a client gets."""

    run_dir: Path
    killed: str = ""

    def on_token(self, executor_id: str) -> None:
        if self.killed:
            return
        state = read_state(self.run_dir)
        assert state is not None
        (pid,) = (process.pid for process in state.processes if process.name == executor_id)
        os.kill(pid, signal.SIGKILL)
        self.killed = executor_id


async def answer(address: str, request: inference_pb2.GenerateRequest, kill: Kill | None = None) -> Answer:
    """Reads a request to its end. Offsets must have no gap and no repetition."""
    ids: list[int] = []
    end, executor_id = "", ""
    async with grpc.aio.insecure_channel(address) as channel:
        stub: Any = inference_pb2_grpc.InferenceServiceStub(channel)
        try:
            async for response in stub.Generate(request):
                event = response.event
                if event.WhichOneof("event") == "started":
                    executor_id = event.started.executor_id
                elif event.WhichOneof("event") == "delta":
                    assert event.delta.offset == len(ids)
                    ids.extend(event.delta.token_ids)
                    if kill is not None:
                        kill.on_token(executor_id)
                elif event.WhichOneof("event") == "finished":
                    end = types_pb2.FinishReason.Name(event.finished.reason)
        except grpc.aio.AioRpcError as error:
            end = f"{error.code().name}: {error.details()}"
    return Answer(tuple(ids), end)


async def answers(
    address: str, requests: Sequence[inference_pb2.GenerateRequest], num_at_once: int, kill: Kill | None = None
) -> list[Answer]:
    room = asyncio.Semaphore(num_at_once)

    async def one(request: inference_pb2.GenerateRequest) -> Answer:
        async with room:
            return await answer(address, request, kill)

    return await asyncio.gather(*(one(request) for request in requests))


def differences(answers: list[Answer], expected: list[Answer]) -> dict[int, tuple[Answer, Answer]]:
    """The answers that differ, by index."""
    assert len(answers) == len(expected)
    return {k: pair for k, pair in enumerate(zip(answers, expected, strict=True)) if pair[0] != pair[1]}


@pytest.mark.timeout(600)
async def test_random_requests_get_the_same_tokens_alone_in_a_batch_and_after_failures(
    tiny_model: Path, tmp_path: Path
) -> None:
    rng = random.Random(14)
    requests = [random_request(rng) for _ in range(NUM_REQUESTS)]
    async with AsyncExitStack() as stacks:

        async def start(name: str, *args: str, executors: int = 1) -> str:
            options = StackOptions(
                executors=executors,
                model=str(tiny_model),
                executor_args=(*COMMON, *args),
                # More than executors die. A request may be placed on one that is dying and then on the next that dies.
                router_args=("--max-attempts", "3"),
                run_dir=tmp_path / name,
            )
            return (await stacks.enter_async_context(LocalStack(options))).address

        # Given the tokens of each request alone
        roomy = await start("roomy", "--max-num-sequences", str(BATCH))
        alone = await answers(roomy, requests, 1)
        assert sum(len(one.token_ids) > 0 for one in alone) > 0.9 * NUM_REQUESTS
        # Then 32 at once get the same
        assert differences(await answers(roomy, requests, BATCH), alone) == {}
        # And those whose executors are killed, one after the other
        failing = await start("failing", "--max-num-sequences", str(BATCH // 2), executors=3)
        one_third = NUM_REQUESTS // 3
        kills = (Kill(tmp_path / "failing"), Kill(tmp_path / "failing"), None)
        for third, kill in enumerate(kills):
            some = slice(third * one_third, (third + 1) * one_third)
            assert differences(await answers(failing, requests[some], BATCH, kill), alone[some]) == {}
        assert len({kill.killed for kill in kills if kill}) == 2
