"""The same keyed request from several calls within milliseconds: one call gets everything, the others end at once."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import random
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import grpc
import grpc.aio
import openai
import pytest

from inflight.v1 import inference_pb2, types_pb2
from tests.integration.test_requests import rest
from tests.support.examples import examples
from tests.support.stack.cluster import Brake, Cluster, ExecutorShape, run_cluster, token_request
from tests.support.stack.gateways import run_gateway

MAX_SPREAD_S = 0.025
CALL_TIMEOUT_S = 60.0
# How long after the last OK of its group a displaced call may still be open. The machine may stand still for seconds;
# a call that is left behind waits for CALL_TIMEOUT_S.
AT_ONCE_S = 30.0
SHAPE = ExecutorShape(num_blocks=256, max_num_sequences=8)


@dataclass(frozen=True, slots=True)
class Group:
    """Calls of one request: the router of each, and its start in seconds after that of the group."""

    key: str
    num_choices: int
    best_of: int
    num_tokens: int
    calls: tuple[tuple[int, float], ...]
    # Calls whose client leaves after so many events.
    leavers: Mapping[int, int] = field(default_factory=dict)
    is_detached: bool = False

    @property
    def kind(self) -> tuple[int, int, int]:
        """What the output depends on."""
        return self.num_choices, self.best_of, self.num_tokens

    @property
    def request(self) -> inference_pb2.GenerateRequest:
        request = token_request([1, 2, 3], self.num_tokens, n=self.num_choices, idempotency_key=self.key)
        request.sampling.CopyFrom(types_pb2.SamplingParams(temperature=1.0, seed=7))
        if self.best_of > self.num_choices:
            request.best_of = self.best_of
        if self.is_detached:
            request.detach = True
        return request


@dataclass(slots=True)
class Call:
    """One call as its client saw it. `code` None: the client has left, or waited in vain."""

    router: int
    began_s: float
    code: grpc.StatusCode | None = None
    details: str = ""
    is_left: bool = False
    ended_s: float = 0.0
    ids: dict[int, list[int]] = field(default_factory=dict)
    finished: Counter[int] = field(default_factory=Counter)
    num_done: int = 0
    num_events: int = 0
    problem: str = ""

    def take(self, event: inference_pb2.StreamEvent) -> None:
        self.num_events += 1
        match event.WhichOneof("event"):
            case "delta":
                known = self.ids.setdefault(event.delta.choice, [])
                if event.delta.offset != len(known):
                    self.problem = f"offset {event.delta.offset} after {len(known)} tokens"
                known.extend(event.delta.token_ids)
            case "finished":
                self.finished[event.finished.choice] += 1
            case "done":
                self.num_done += 1


Output = dict[int, list[int]]


async def send(cluster: Cluster, group: Group) -> list[Call]:
    """Sends the calls of a group and reads each to its end."""
    request, began_s = group.request, time.monotonic()

    async def one(number: int, router: int, delay_s: float) -> Call:
        await asyncio.sleep(delay_s)
        call = Call(router, time.monotonic() - began_s)
        stream = cluster.routers[router].stub.Generate(request, timeout=CALL_TIMEOUT_S)
        leaves_after = group.leavers.get(number)
        try:
            async for response in stream:
                call.take(response.event)
                if call.num_events == leaves_after:
                    call.is_left = True
                    stream.cancel()
                    break
            else:
                call.code = grpc.StatusCode.OK
        except grpc.aio.AioRpcError as error:
            call.code, call.details = error.code(), error.details() or ""
        call.ended_s = time.monotonic() - began_s
        return call

    calls = (one(number, *place) for number, place in enumerate(group.calls))
    return list(await asyncio.gather(*calls))


def problems_of(group: Group, calls: Sequence[Call], expected: Output) -> list[str]:
    """Says what is wrong with the answers to a group."""
    problems: list[str] = []
    ends = [call.ended_s for call in calls if call.code is grpc.StatusCode.OK]
    if not ends and not any(call.is_left or call.code is grpc.StatusCode.UNAVAILABLE for call in calls):
        problems.append("no call got the answer")
    for number, call in enumerate(calls):
        if found := _problem_of(call, expected):
            problems.append(f"call {number} on router {call.router}, begun at {call.began_s * 1e3:.1f} ms: {found}")
        elif ends and call.ended_s > max(*ends, call.began_s, 0) + AT_ONCE_S:
            problems.append(f"call {number} was told {call.ended_s - max(ends):.1f} s after the answer")
    return problems


def _problem_of(call: Call, expected: Output) -> str:
    is_beginning = all(ids == expected[choice][: len(ids)] for choice, ids in call.ids.items())
    if call.problem or not is_beginning:
        return f"{call.problem or 'wrong tokens'} ({call.code})"
    if call.is_left:
        return ""
    if call.code is grpc.StatusCode.OK:
        counts = {choice: (len(call.ids.get(choice, [])), len(ids)) for choice, ids in expected.items()}
        if call.ids != expected:
            return f"OK with tokens {counts}"
        if call.num_done != 1 or call.finished != Counter(expected.keys()):
            return f"OK with ends {dict(call.finished)}, {call.num_done} done"
        return ""
    if call.code is grpc.StatusCode.ABORTED or (call.code is grpc.StatusCode.UNAVAILABLE and not call.num_events):
        return ""
    return f"{call.code} {call.details}"


def drawn(rng: random.Random, key: str, num_routers: int, sizes: Sequence[int], most_choices: int = 3) -> Group:
    """Draws a group. In a fifth of them some clients leave."""
    num_calls = rng.choice(sizes)
    spread_s = rng.choice((0.0, 0.002, 0.008, MAX_SPREAD_S))
    calls = tuple((rng.randrange(num_routers), rng.uniform(0, spread_s)) for _ in range(num_calls))
    num_choices = rng.randint(1, most_choices)
    best_of = min(num_choices + 1, 3) if rng.random() < 0.2 else 0
    leavers = {n: rng.randint(1, 4) for n in range(num_calls) if rng.random() < 0.3} if rng.random() < 0.2 else {}
    return Group(key, num_choices, best_of, rng.choice((1, 5, 20, 40)), calls, leavers, rng.random() < 0.2)


async def expected_of(cluster: Cluster, group: Group) -> Output:
    """Returns what a single call of the request brings, under a key of its own."""
    (call,) = await send(cluster, dataclasses.replace(group, key=f"alone-{group.key}", calls=((0, 0.0),), leavers={}))
    assert call.code is grpc.StatusCode.OK, call
    return call.ids


async def pace(brake: Brake, pause_s: float) -> None:
    """Lets the device make a step every `pause_s` seconds."""
    brake.hold()
    try:
        while True:
            if brake.is_waited_for.is_set():
                brake.permit(1)
            await asyncio.sleep(pause_s)
    finally:
        brake.release()


@pytest.mark.parametrize("num_routers", [1, 2])
async def test_calls_that_begin_together_get_the_whole_answer_once(
    redis_url: str, pool: str, caplog: pytest.LogCaptureFixture, num_routers: int
) -> None:
    rng = random.Random(7)
    groups = [drawn(rng, f"{pool}-{number}", num_routers, (2, 3, 4, 8)) for number in range(examples(40))]
    # A crowd, in which a router loses the request and gets it back again and again.
    groups += [
        Group(f"{pool}-crowd-{n}", n, 0, 20, tuple((i % num_routers, i / 4000) for i in range(60))) for n in (1, 3)
    ]
    known: dict[tuple[int, int, int], Output] = {}
    problems: list[str] = []
    async with run_cluster(redis_url, pool, routers=num_routers, shape=SHAPE) as cluster:
        pacing = asyncio.create_task(pace(cluster.executors[0].brake, 0.002))
        for group in groups:
            if group.kind not in known:
                known[group.kind] = await expected_of(cluster, group)
            problems += problems_of(group, await send(cluster, group), known[group.kind])
        pacing.cancel()
        links_lost = "is lost" in caplog.text
        metric = "inflight_incomplete_streams_total"
        incomplete = [router.registry.get_sample_value(metric, {"model": pool}) for router in cluster.routers]
    assert problems == []
    assert not links_lost
    assert set(incomplete) == {0.0}


@pytest.mark.parametrize("num_routers", [1, 2])
@pytest.mark.parametrize("n", [1, 3])
async def test_displaced_calls_end_before_the_request_does(redis_url: str, pool: str, num_routers: int, n: int) -> None:
    """The device stands still, so no call can get the answer while the others are told."""
    group = Group("k", n, 0, 20, tuple((i % num_routers, i * 0.002) for i in range(8)))
    async with run_cluster(redis_url, pool, routers=num_routers, shape=SHAPE) as cluster:
        expected = await expected_of(cluster, group)
        brake = cluster.executors[0].brake
        brake.hold()
        calls = [cluster.routers[router].stub.Generate(group.request) for router, _ in group.calls]
        ends = {asyncio.ensure_future(read(call)) for call in calls}
        while len(ends) > 1:
            told, ends = await asyncio.wait(ends, timeout=60, return_when=asyncio.FIRST_COMPLETED)
            assert told, f"{len(ends)} calls wait"
            assert {end.result().code for end in told} == {grpc.StatusCode.ABORTED}
            brake.permit(1)  # the executor hears of takeovers between steps
        brake.release()
        (last,) = ends
        assert ((await last).code, (await last).ids) == (grpc.StatusCode.OK, expected)


async def read(stream: Any) -> Call:
    call = Call(0, 0.0)
    try:
        for event in await rest(stream):
            call.take(event)
        call.code = grpc.StatusCode.OK
    except grpc.aio.AioRpcError as error:
        call.code = error.code()
    return call


@pytest.mark.parametrize("is_streamed", [True, False])
async def test_calls_with_one_key_at_the_gateways_get_the_whole_answer_or_are_told(
    redis_url: str, pool: str, is_streamed: bool
) -> None:
    rng = random.Random(5)
    async with run_cluster(redis_url, pool, routers=2, shape=SHAPE) as cluster, contextlib.AsyncExitStack() as stack:
        gateways = [await stack.enter_async_context(run_gateway(router.address)) for router in cluster.routers]
        clients = [await stack.enter_async_context(gateway.openai()) for gateway in gateways]
        pacing = asyncio.create_task(pace(cluster.executors[0].brake, 0.002))
        for number in range(8):
            n, best_of = rng.choice(((1, None), (2, None), (3, None), (1, 2)))
            body = {"model": pool, "prompt": [1, 2, 3], "max_tokens": 20, "n": n, "best_of": best_of, "seed": 3}
            if is_streamed and best_of is not None:
                continue  # OpenAI has no stream of the best
            alone = await complete(clients[0], 0.0, body, is_streamed=False, key=None)
            key = f"{pool}-{is_streamed}-{number}"
            calls = [
                complete(rng.choice(clients), rng.uniform(0, 0.025), body, is_streamed=is_streamed, key=key)
                for _ in range(rng.choice((2, 4, 8)))
            ]
            answers = await asyncio.gather(*calls)
            assert set(answers) <= {alone, None}
            assert alone in answers
        pacing.cancel()


async def complete(
    client: openai.AsyncOpenAI, pause_s: float, body: Mapping[str, Any], *, is_streamed: bool, key: str | None
) -> tuple[str, ...] | None:
    """Returns the text of each choice; None: another call reads the request."""
    await asyncio.sleep(pause_s)
    given = {**body, "extra_headers": {} if key is None else {"Idempotency-Key": key}}
    try:
        if not is_streamed:
            answer = await client.completions.create(**given)
            return tuple(choice.text for choice in answer.choices)
        texts = [""] * body["n"]
        ends = 0
        async for chunk in await client.completions.create(**given, stream=True):
            for choice in chunk.choices:
                texts[choice.index] += choice.text
                ends += choice.finish_reason is not None
    except openai.APIError as error:
        if error.code != "taken_over":
            raise
        return None
    assert ends == body["n"]
    return tuple(texts)
