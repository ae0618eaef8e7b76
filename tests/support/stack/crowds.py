"""Crowds: groups of calls of one keyed request that begin within milliseconds, over one router or several.

A group is right if each call that ended OK brought every token of every choice once, every other call was told
TAKEN_OVER after a correct beginning, at least one call ended OK, and no call was left behind. A call whose client
leaves may end the request; the next call then starts it again. A machine that stands still for seconds may refuse a
call before it is accepted (UNAVAILABLE).

`python -m tests.support.stack.crowds --groups 10000` sends many of them, over routers and executors in one process.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import logging
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import grpc.aio

from inflight.local.redis_server import PrivateRedis
from inflight.v1 import inference_pb2, types_pb2
from tests.support.stack.cluster import Brake, Cluster, ExecutorShape, run_cluster, token_request

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


async def _run(options: argparse.Namespace) -> int:
    with tempfile.TemporaryDirectory() as folder, PrivateRedis.start(Path(folder) / "redis.log") as redis:
        sizes = {"routers": options.routers, "executors": options.executors}
        async with run_cluster(redis.url, "m", shape=SHAPE, **sizes) as cluster:
            pacing = [asyncio.create_task(pace(one.brake, options.step_ms / 1e3)) for one in cluster.executors]
            num_wrong = await _send_all(cluster, options)
            for one in pacing:
                one.cancel()
    return num_wrong > 0


async def _send_all(cluster: Cluster, options: argparse.Namespace) -> int:
    rng = random.Random(options.seed)
    known: dict[tuple[int, int, int], Output] = {}
    counts: Counter[str] = Counter()
    num_wrong = 0
    for number in range(options.groups):
        group = drawn(rng, f"{options.seed}-{number}", options.routers, options.sizes, options.choices)
        if group.kind not in known:
            known[group.kind] = await expected_of(cluster, group)
        calls = await send(cluster, group)
        counts.update("left" if call.code is None else call.code.name for call in calls)
        if found := problems_of(group, calls, known[group.kind]):
            num_wrong += 1
            print(f"group {number}, {group.kind}, {len(calls)} calls:", *found[:6], sep="\n  ", flush=True)
        if number % 500 == 499:
            print(f"{number + 1} groups, {num_wrong} wrong; {dict(counts)}", flush=True)
    print(f"crowds: groups={options.groups} wrong={num_wrong} calls={counts.total()} {dict(counts)}")
    return num_wrong


def main() -> int:
    """Sends groups and returns 1 if one was wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.support.stack.crowds", description=__doc__)
    parser.add_argument("--groups", type=int, default=200)
    parser.add_argument("--routers", type=int, default=2)
    parser.add_argument("--executors", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--choices", type=int, default=3)
    parser.add_argument("--step-ms", type=float, default=2.0)
    parser.add_argument("--sizes", type=lambda text: [int(one) for one in text.split(",")], default=[2, 4, 8, 60])
    options = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    return asyncio.run(_run(options))


if __name__ == "__main__":
    sys.exit(main())
