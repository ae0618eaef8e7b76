"""Tokens depend on the prompt, the output so far, the parameters and the seed, and on nothing else.

Random requests over all features of the logits stage give the same tokens alone, among others, preempted every few
tokens, and with executors that are killed. The model is small and computed in float32.
"""

from __future__ import annotations

import asyncio
import os
import random
import signal
import sys
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from inflight.local.options import StackOptions
from inflight.local.stack import LocalStack
from inflight.local.state import read_state
from inflight.v1 import inference_pb2, inference_pb2_grpc, types_pb2
from tests.support.stack.executors_linked import wait_for_executors

OnToken = Callable[[str], None]
"""Called with the id of the executor for each delta."""

NUM_REQUESTS = 72
NUM_OPEN = 24
BATCH = 32
# The executor that is preempted has so many seats and waits so long before each step: a request that takes all seats
# passes the ledger in a few steps.
FEW_SEATS = 8
STEP_MS = 20
# Token ids of the tiny model: 256 bytes and the end.
NUM_IDS = 256
COMMON = ("--dtype", "float32", "--num-threads", "1", "--max-num-tokens", "128")
FEW_BLOCKS = (
    *("--max-num-sequences", str(FEW_SEATS)),
    *("--batch-scheduler-policy", "max_utilization"),
    *("--max-tokens-in-paged-kv-cache", "640"),
)
PACED = (sys.executable, "-P", "-m", "inflight.bench.fleet.paced", str(STEP_MS))
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
    num_preemptions: int = field(default=0, compare=False)


def random_request(rng: random.Random) -> inference_pb2.GenerateRequest:
    request = inference_pb2.GenerateRequest(
        text=rng.choice(PROMPTS) * rng.randint(1, 3),
        sampling=random_sampling(rng),
        stopping=types_pb2.StoppingParams(
            max_tokens=rng.randint(4, 60),
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


@dataclass(slots=True)
class Rush:
    """Sends requests of a higher class that take all seats, each after a token per seat since the one before."""

    num_seats: int
    num_tokens: int = 0
    num_sent: int = 0
    due: asyncio.Event = field(default_factory=asyncio.Event)

    def on_token(self, executor_id: str) -> None:
        self.num_tokens += 1
        if self.num_tokens >= self.num_seats:
            self.due.set()

    async def run(self, address: str) -> None:
        """Sends until it is cancelled."""
        request = inference_pb2.GenerateRequest(
            text="a",
            n=self.num_seats,
            stopping=types_pb2.StoppingParams(max_tokens=1),
            priority=types_pb2.PRIORITY_CLASS_INTERACTIVE,
        )
        async with grpc.aio.insecure_channel(address) as channel:
            stub: Any = inference_pb2_grpc.InferenceServiceStub(channel)
            while True:
                await self.due.wait()
                async for _ in stub.Generate(request):
                    pass
                self.num_sent += 1
                self.num_tokens = 0
                self.due.clear()


async def answer(address: str, request: inference_pb2.GenerateRequest, on_token: OnToken | None = None) -> Answer:
    """Reads a request to its end. Offsets must have no gap and no repetition."""
    ids: list[int] = []
    end, executor_id, num_preemptions = "", "", 0
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
                    if on_token is not None:
                        on_token(executor_id)
                elif event.WhichOneof("event") == "notice":
                    num_preemptions += event.notice.kind == inference_pb2.Notice.KIND_PAUSED
                elif event.WhichOneof("event") == "finished":
                    end = types_pb2.FinishReason.Name(event.finished.reason)
        except grpc.aio.AioRpcError as error:
            end = f"{error.code().name}: {error.details()}"
    return Answer(tuple(ids), end, num_preemptions)


async def answers(
    address: str, requests: Sequence[inference_pb2.GenerateRequest], num_at_once: int, on_token: OnToken | None = None
) -> list[Answer]:
    room = asyncio.Semaphore(num_at_once)

    async def one(request: inference_pb2.GenerateRequest) -> Answer:
        async with room:
            return await answer(address, request, on_token)

    return await asyncio.gather(*(one(request) for request in requests))


def differences(answers: list[Answer], expected: list[Answer]) -> dict[int, tuple[Answer, Answer]]:
    """The answers that differ, by index."""
    assert len(answers) == len(expected)
    return {k: pair for k, pair in enumerate(zip(answers, expected, strict=True)) if pair[0] != pair[1]}


async def started(stacks: AsyncExitStack, options: StackOptions) -> str:
    """Starts a stack, and returns its address when all its executors take work."""
    address = (await stacks.enter_async_context(LocalStack(options))).address
    await wait_for_executors(address, options.executors)
    return address


@pytest.mark.timeout(600)
async def test_random_requests_get_the_same_tokens_in_every_circumstance(tiny_model: Path, tmp_path: Path) -> None:
    rng = random.Random(14)
    requests = [random_request(rng) for _ in range(NUM_REQUESTS)]
    async with AsyncExitStack() as stacks:

        async def start(name: str, *args: str, **options: Any) -> str:
            arguments: dict[str, Any] = {
                "model": str(tiny_model),
                "executor_args": (*COMMON, *args),
                "run_dir": tmp_path / name,
            }
            return await started(stacks, StackOptions(**arguments, **options))

        # Given the tokens of each request alone
        roomy = await start("roomy", "--max-num-sequences", str(BATCH))
        alone = await answers(roomy, requests, 1)
        assert sum(len(one.token_ids) > 0 for one in alone) > 0.9 * NUM_REQUESTS
        # Then 32 at once get the same
        assert differences(await answers(roomy, requests, BATCH), alone) == {}
        # And those that are preempted every few tokens
        small = await start("small", *FEW_BLOCKS, router_args=("--preempt-for-priority",), program=PACED)
        rush = Rush(FEW_SEATS)
        rushing = asyncio.create_task(rush.run(small))
        preempted = await answers(small, requests, BATCH, rush.on_token)
        rushing.cancel()
        await asyncio.wait([rushing])
        assert differences(preempted, alone) == {}
        assert sum(one.num_preemptions for one in preempted) >= NUM_REQUESTS / 2
        # And those whose executors are killed, one after the other
        # More attempts than executors die: a request may be placed on one that is dying and then on the next that dies.
        patient = ("--max-attempts", "3")
        failing = await start("failing", "--max-num-sequences", str(BATCH // 2), executors=3, router_args=patient)
        one_third = NUM_REQUESTS // 3
        kills = (Kill(tmp_path / "failing"), Kill(tmp_path / "failing"), None)
        for third, kill in enumerate(kills):
            some = slice(third * one_third, (third + 1) * one_third)
            answered = await answers(failing, requests[some], BATCH, kill.on_token if kill else None)
            assert differences(answered, alone[some]) == {}
        assert len({kill.killed for kill in kills if kill}) == 2


def open_request(rng: random.Random) -> inference_pb2.GenerateRequest:
    """A random request without max_tokens; it ends by itself or with the context."""
    request = random_request(rng)
    request.stopping.ClearField("max_tokens")
    if rng.random() < 0.6:
        # Its output needs several reservations.
        request.ClearField("constraint")
        request.stopping.min_tokens = rng.randint(30, 120)
    request.stopping.stop_token_ids[:] = rng.sample(range(NUM_IDS), 20)
    return request


@pytest.mark.timeout(600)
async def test_requests_that_reserve_a_part_at_a_time_get_the_same_tokens(tiny_model: Path, tmp_path: Path) -> None:
    rng = random.Random(15)
    requests = [open_request(rng) for _ in range(NUM_OPEN)]
    part = ("--default-reservation-tokens", "8")
    # Little more than one whole context of 1024 tokens
    few_blocks = ("--max-tokens-in-paged-kv-cache", "1280", "--max-num-sequences", str(BATCH))
    async with AsyncExitStack() as stacks:

        async def start(name: str, *args: str, **options: Any) -> str:
            run_dir = tmp_path / name
            arguments: dict[str, Any] = {"model": str(tiny_model), "executor_args": (*COMMON, *args)}
            return await started(stacks, StackOptions(run_dir=run_dir, **arguments, **options))

        # Given the tokens of each request alone, with a reservation of the whole context
        whole = ("--default-reservation-tokens", "1024")
        alone = await answers(await start("whole", *few_blocks, router_args=whole), requests, 1)
        assert sum(len(one.token_ids) > 40 for one in alone) > NUM_OPEN / 4
        # Then they get the same in parts, alone and 32 at once
        parts = await start("parts", *few_blocks, router_args=part)
        assert differences(await answers(parts, requests[::4], 1), alone[::4]) == {}
        assert differences(await answers(parts, requests, BATCH), alone) == {}
        # And when the executor that runs them is killed
        failing = await start("failing", *few_blocks, executors=2, router_args=(*part, "--max-attempts", "3"))
        kill = Kill(tmp_path / "failing")
        assert differences(await answers(failing, requests, BATCH, kill.on_token), alone) == {}
        assert kill.killed
