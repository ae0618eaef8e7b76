"""What a connection of an HTTP port may take: who goes beyond it is cut off, and others are served."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route, Router

from common.http_connection import HttpLimits
from common.http_port import HttpPort
from tests.http_pages import page

TIMEOUT_S = 20
AT_ONCE_S = 0.02
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class App:
    """Answers at `/` and streams without an end at `/stream`."""

    def __init__(self) -> None:
        self.has_ended = asyncio.Event()
        self.routes = Router(routes=[Route("/", self._answer, methods=["GET", "POST"]), Route("/stream", self._stream)])

    async def _answer(self, request: Request) -> Response:
        return PlainTextResponse("served")

    async def _stream(self, request: Request) -> Response:
        return StreamingResponse(self._parts())

    async def _parts(self) -> AsyncIterator[bytes]:
        try:
            while True:
                yield b"x" * 65_536
                await asyncio.sleep(0)
        finally:
            self.has_ended.set()


@asynccontextmanager
async def serving(limits: HttpLimits, app: App | None = None) -> AsyncIterator[str]:
    port = HttpPort((app or App()).routes, limits=limits)
    address = await port.start("127.0.0.1:0")
    try:
        async with asyncio.timeout(TIMEOUT_S):
            yield address
    finally:
        await port.stop()


@asynccontextmanager
async def connected(address: str) -> AsyncIterator[Streams]:
    host, _, number = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(number))
    try:
        yield reader, writer
    finally:
        writer.transport.abort()


async def rest(reader: asyncio.StreamReader) -> bytes:
    """What comes until the other side ends the connection."""
    try:
        return await reader.read()
    except ConnectionError:
        return b""


@pytest.mark.parametrize("said", [b"", b"GET / HTTP/1.1\r\nhost: x\r\n"], ids=["nothing", "half a head"])
async def test_connection_that_never_asks_is_closed(said: bytes) -> None:
    async with serving(HttpLimits(request_s=AT_ONCE_S)) as address, connected(address) as (reader, writer):
        writer.write(said)
        assert await rest(reader) == b""
        assert (await page(address, "/"))[1] == "served"


async def test_connection_that_goes_on_with_a_body_behind_its_answer_is_closed() -> None:
    async with serving(HttpLimits(request_s=AT_ONCE_S)) as address, connected(address) as (reader, writer):
        writer.write(b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 1000000000\r\n\r\n")
        assert await reader.readuntil(b"served")
        ending = asyncio.create_task(rest(reader))
        while not ending.done():
            writer.write(b"x")
            await asyncio.sleep(0.001)


async def test_connection_beyond_the_most_is_closed_and_the_next_is_served() -> None:
    async with serving(HttpLimits(max_connections=1)) as address:
        async with connected(address) as (_, first):
            first.write(b"GET ")
            async with connected(address) as (reader, _):
                assert await rest(reader) == b""
        reply = b""
        while not reply:  # until the server has seen that the first is gone
            async with connected(address) as (reader, writer):
                writer.write(b"GET / HTTP/1.0\r\n\r\n")
                reply = await rest(reader)
        assert reply.endswith(b"served")


async def test_client_that_reads_nothing_is_cut_off() -> None:
    app = App()
    async with serving(HttpLimits(write_s=AT_ONCE_S), app) as address, connected(address) as (reader, writer):
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        writer.write(b"GET /stream HTTP/1.1\r\nhost: x\r\n\r\n")
        await app.has_ended.wait()
        assert not reader.at_eof()


async def test_certificate_that_is_none_is_an_error_at_once(tmp_path: Path) -> None:
    nothing = tmp_path / "nothing.pem"
    nothing.write_text("nothing")
    with pytest.raises(OSError, match="PEM"):
        HttpPort(App().routes, cert_file=nothing, key_file=nothing)
