"""The effect of costly requests on the streams of others: the time to their refusal, and the longest pause meanwhile.

    python -m inflight.bench.costly_requests [--rounds 5]

A local stack with SmolLM2 serves one stream and health checks, one after the other, while requests of 4 MB are sent
that cost a client little to make. A pause is the time between two events of the stream, or a health
check's round trip; the first row has both without any such request.
"""

from __future__ import annotations

import argparse
import asyncio
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2, health_pb2_grpc

from inflight.bench.report.table import UNKNOWN, Table
from inflight.local.options import StackOptions
from inflight.local.stack import LocalStack
from inflight.v1 import inference_pb2, inference_pb2_grpc, types_pb2

NUM_BYTES = 4 * 1024 * 1024 - 4096
SERVICE = "/inflight.v1.InferenceService/"
QUIET_S = 2.0


@dataclass(frozen=True, slots=True)
class Costly:
    """A request as it travels."""

    name: str
    rpc: str
    request: bytes


@dataclass(slots=True)
class Longest:
    """The longest pauses seen, in seconds."""

    of_stream: float = 0.0
    of_health: float = 0.0


def costly_requests() -> list[Costly]:
    """What is sent. The numbers of fields are those of inference.proto."""
    chat, user = 6, _field(1, _field(1, b"user"))
    digits = b"1" * NUM_BYTES
    return [
        Costly("empty messages", "Generate", _field(chat, b"\x0a\x00" * (NUM_BYTES // 2))),
        Costly("empty content parts", "Generate", _field(chat, _field(1, b"\x12\x00" * (NUM_BYTES // 2)))),
        Costly("empty tools", "Generate", _field(chat, user + b"\x12\x00" * (NUM_BYTES // 2))),
        Costly("empty stop strings", "Generate", _field(3, b"a") + _field(8, b"\x1a\x00" * (NUM_BYTES // 2))),
        Costly("digits", "Generate", _field(3, digits)),
        Costly("digits to tokenize", "Tokenize", _field(2, digits)),
        Costly("letters", "Generate", _field(3, b"letters " * (NUM_BYTES // 8))),
    ]


def _field(number: int, content: bytes) -> bytes:
    """Returns a field that holds bytes, text or a message."""
    return bytes([number << 3 | 2]) + _varint(len(content)) + content


def _varint(value: int) -> bytes:
    encoded = bytearray()
    while value > 127:
        encoded.append(value & 127 | 128)
        value >>= 7
    return bytes([*encoded, value])


async def refused_within_s(channel: grpc.aio.Channel, costly: Costly) -> float:
    """Seconds from sending a request to its refusal."""
    multicallable: Any = channel.unary_stream if costly.rpc == "Generate" else channel.unary_unary
    call = multicallable(SERVICE + costly.rpc)(costly.request)
    began = time.perf_counter()
    code = await call.code()
    if code is grpc.StatusCode.OK:
        raise SystemExit(f"{costly.name}: was not refused")
    return time.perf_counter() - began


@asynccontextmanager
async def watched(address: str) -> AsyncIterator[Longest]:
    """Watches a stream and health checks on a separate connection while the block runs."""
    longest = Longest()
    async with grpc.aio.insecure_channel(address) as channel:
        tasks = [asyncio.create_task(_stream(channel, longest)), asyncio.create_task(_health(channel, longest))]
        await asyncio.sleep(0.5)
        longest.of_stream = longest.of_health = 0.0
        try:
            yield longest
        finally:
            for one in tasks:
                one.cancel()


async def _stream(channel: grpc.aio.Channel, longest: Longest) -> None:
    stub = inference_pb2_grpc.InferenceServiceStub(channel)
    while True:
        request = inference_pb2.GenerateRequest(
            text="Once upon a time", stopping=types_pb2.StoppingParams(max_tokens=4000, ignore_eos=True)
        )
        before: float | None = None
        async for _ in stub.Generate(request):
            now = time.perf_counter()
            longest.of_stream, before = max(longest.of_stream, now - (before or now)), now


async def _health(channel: grpc.aio.Channel, longest: Longest) -> None:
    stub = health_pb2_grpc.HealthStub(channel)
    while True:
        began = time.perf_counter()
        await stub.Check(health_pb2.HealthCheckRequest())
        longest.of_health = max(longest.of_health, time.perf_counter() - began)
        await asyncio.sleep(0.002)


async def _measure(rounds: int) -> Table:
    with tempfile.TemporaryDirectory() as folder:
        async with LocalStack(StackOptions(run_dir=Path(folder))) as stack:
            async with watched(stack.address) as longest:
                await asyncio.sleep(QUIET_S)
            rows = [["(none)", UNKNOWN, _ms(longest.of_stream), _ms(longest.of_health)]]
            for costly in costly_requests():
                took: list[float] = []
                async with watched(stack.address) as longest, grpc.aio.insecure_channel(stack.address) as channel:
                    for _ in range(rounds):
                        took.append(await refused_within_s(channel, costly))
                        await asyncio.sleep(0.2)
                rows.append([costly.name, _ms(max(took)), _ms(longest.of_stream), _ms(longest.of_health)])
    return Table(["request of 4 MB", "refused after, ms", "pause of the stream, ms", "health check, ms"], rows)


def _ms(seconds: float) -> str:
    return f"{seconds * 1000:.1f}"


def main(argv: Sequence[str] | None = None) -> None:
    """Prints a row for each kind of request."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5, help="how often each is sent")
    print(asyncio.run(_measure(parser.parse_args(argv).rounds)).text())


if __name__ == "__main__":
    main()
