"""The benchmark of overload: how requests end at a `vllm serve` that is a stand-in, and what the table says of them."""

from __future__ import annotations

import argparse
import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from inflight.bench.overload.main import FLOODING, load, row
from inflight.bench.overload.sides import End, Ending, Patience, ServeSide
from inflight.bench.targets.model import LocalModel
from inflight.bench.workloads.plan import PlannedRequest

REQUEST = PlannedRequest(prompt_ids=(1, 2), output_tokens=3, arrival_s=0.0)
PATIENT, HASTY = Patience(60.0, 30.0), Patience(0.01, 0.005)


def event(num_tokens: int) -> bytes:
    return b'data: {"usage": {"completion_tokens": %d}}\n\n' % num_tokens


@asynccontextmanager
async def answering(*parts: bytes, holds: bool = False) -> AsyncIterator[Callable[[Patience], ServeSide]]:
    """A server that answers a request with these parts, and keeps the connection open if it `holds` it."""

    answered = asyncio.Event()

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = await reader.readuntil(b"\r\n\r\n")
        assert head.startswith(b"POST /v1/completions HTTP/1.0\r\n")
        for part in parts:
            writer.write(part)
        if holds:
            await reader.read()
        writer.close()
        await writer.wait_closed()
        answered.set()

    server = await asyncio.start_server(answer, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()
    async with server:
        yield lambda patience: ServeSide(f"{host}:{port}", 0, patience)
        await answered.wait()


OK = b"HTTP/1.1 200 OK\r\n\r\n"


@pytest.mark.parametrize(
    ("parts", "holds", "patience", "end", "num_tokens"),
    [
        ((OK, event(1), event(3), b"data: [DONE]\n\n"), False, PATIENT, End.COMPLETED, 3),
        ((OK, event(1), event(2)), False, PATIENT, End.LATE, 2),
        ((OK, event(1)), True, HASTY, End.LATE, None),
        ((OK, b'data: {"error": {"code": 503}}\n\n'), False, PATIENT, End.REFUSED, 0),
        ((OK, b'data: {"error": {"code": 500}}\n\n'), False, PATIENT, End.FAILED, 0),
        ((b"HTTP/1.1 503 Service Unavailable\r\n\r\n{}",), False, PATIENT, End.REFUSED, 0),
        ((b"HTTP/1.1 400 Bad Request\r\n\r\n{}",), False, PATIENT, End.FAILED, 0),
    ],
)
async def test_end_of_a_request_to_vllm_serve_is_told_by_its_status_and_tokens(
    parts: tuple[bytes, ...], holds: bool, patience: Patience, end: End, num_tokens: int | None
) -> None:
    async with answering(*parts, holds=holds) as side:
        ending = await side(patience).send(REQUEST, FLOODING)
    assert ending.end is end
    assert num_tokens in (None, ending.num_tokens)
    assert (ending.first_token_s is None) == (ending.num_tokens == 0)


def test_row_counts_all_requests_and_the_first_tokens_of_light_tenants() -> None:
    endings = [
        Ending(FLOODING, End.COMPLETED, 10, 9.0, 9.5),
        Ending(FLOODING, End.REFUSED, 0, None, 0.1),
        Ending("light-0", End.COMPLETED, 10, 0.25, 1.0),
        Ending("light-1", End.LATE, 2, 0.5, 20.0),
    ]
    assert row("side", endings, 10.0) == ["side", "4", "2", "0.20", "2.0", "1", "1", "0", "50", "250", "500"]


def test_load_is_the_same_for_both_and_mostly_of_the_flooding_tenant() -> None:
    model = LocalModel("m", Path("m"), None, vocabulary_size=1000)
    options = argparse.Namespace(seconds=100.0, seed=3, light=4)
    requests = load(model, 2.0, options, 0)
    assert requests == load(model, 2.0, options, 0)
    assert len(requests) == 200
    assert sum(tenant == FLOODING for tenant, _ in requests) == 180
    assert {tenant for tenant, _ in requests} == {FLOODING, *(f"light-{index}" for index in range(4))}
    assert requests != load(model, 2.0, options, 1)
