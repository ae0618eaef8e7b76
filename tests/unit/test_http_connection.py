"""Limits of connections to an HTTP port: one that exceeds them is cut off, and others are served."""

from __future__ import annotations

import asyncio
import errno
import os
import resource
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager, contextmanager, suppress
from typing import Any

import pytest
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response, StreamingResponse
from starlette.routing import Route, Router

from inflight.common.http.connection import OPENED_IN_DRAIN, HttpLimits, address_of
from inflight.common.http.port import HttpPort
from tests.support.stack.http_pages import page

TIMEOUT_S = 60
AT_ONCE_S = 0.02
# A limit that one connection of a test exceeds and another keeps: longer than a busy machine delays a request.
SOON_S = 0.5
NUM_SILENT = 1100
Streams = tuple[asyncio.StreamReader, asyncio.StreamWriter]


class App:
    """Answers at `/`, at `/late` when `may_answer` is set, and streams without an end at `/stream`."""

    def __init__(self) -> None:
        self.has_ended = asyncio.Event()
        self.is_asked = asyncio.Event()
        self.may_answer = asyncio.Event()
        self.routes = Router(
            routes=[
                Route("/", self._answer, methods=["GET", "POST"]),
                Route("/late", self._answer_late),
                Route("/parts", self._answer_in_parts),
                Route("/stream", self._stream),
            ]
        )

    async def _answer(self, request: Request) -> Response:
        is_new = request.scope["state"].get(OPENED_IN_DRAIN, False)
        return PlainTextResponse("served" + " on a new connection" * is_new)

    async def _answer_late(self, request: Request) -> Response:
        self.is_asked.set()
        await self.may_answer.wait()
        return PlainTextResponse("served late")

    async def _answer_in_parts(self, request: Request) -> Response:
        async def parts() -> AsyncIterator[bytes]:
            yield b"begun"
            await self.may_answer.wait()
            yield b"ended"

        return StreamingResponse(parts())

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
async def serving_port(limits: HttpLimits, app: App) -> AsyncIterator[tuple[HttpPort, str]]:
    port = HttpPort(app.routes, limits=limits)
    address = await port.start("127.0.0.1:0")
    try:
        async with asyncio.timeout(TIMEOUT_S):
            yield port, address
    finally:
        await port.stop()


@asynccontextmanager
async def serving(limits: HttpLimits, app: App | None = None) -> AsyncIterator[str]:
    async with serving_port(limits, app or App()) as (_, address):
        yield address


@asynccontextmanager
async def connected(address: str, from_host: str = "127.0.0.1", said: bytes = b"") -> AsyncIterator[Streams]:
    """A connection. What is said is there when the server takes it, so it is not late."""
    host, _, number = address.rpartition(":")
    if said:
        client = socket.create_connection((host, int(number)), source_address=(from_host, 0))
        client.sendall(said)
        reader, writer = await asyncio.open_connection(sock=client)
    else:
        reader, writer = await asyncio.open_connection(host, int(number), local_addr=(from_host, 0))
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
    async with serving(HttpLimits(request_s=SOON_S)) as address, connected(address, said=said) as (reader, _):
        assert await rest(reader) == b""
        async with connected(address, said=b"GET / HTTP/1.0\r\n\r\n") as (asking, _):
            assert (await rest(asking)).endswith(b"served")


async def test_connection_is_kept_after_a_response_for_the_idle_time_alone() -> None:
    limits = HttpLimits(idle_s=TIMEOUT_S, request_s=SOON_S)
    async with serving(limits) as address, connected(address) as (reader, writer), connected(address) as (silent, _):
        for _ in range(2):
            writer.write(request())
            assert await reader.readuntil(b"served")
            assert await rest(silent) == b""
    async with (
        serving(HttpLimits(idle_s=AT_ONCE_S, request_s=TIMEOUT_S)) as address,
        connected(address) as (reader, writer),
    ):
        writer.write(request())
        assert (await rest(reader)).endswith(b"served")


async def test_connection_that_goes_on_with_a_body_behind_its_answer_is_closed() -> None:
    head = b"POST / HTTP/1.1\r\nhost: x\r\ncontent-length: 1000000000\r\n\r\n"
    async with serving(HttpLimits(request_s=SOON_S)) as address, connected(address, said=head) as (reader, writer):
        assert await reader.readuntil(b"served")
        ending = asyncio.create_task(rest(reader))
        while not ending.done():
            writer.write(b"x")
            await asyncio.sleep(0.001)


@pytest.fixture
def _many_files() -> Iterator[None]:
    """Both ends of each connection are files of this process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = 2 * NUM_SILENT + 500
    if hard != resource.RLIM_INFINITY and hard < wanted:
        pytest.skip(f"needs {wanted} open files, {hard} are allowed")
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, wanted), hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@pytest.mark.usefixtures("_many_files")
async def test_connections_that_say_nothing_keep_no_scraper_out() -> None:
    async with serving(HttpLimits()) as address, AsyncExitStack() as silent:
        for _ in range(NUM_SILENT):
            await silent.enter_async_context(connected(address))
        assert (await page(address, "/"))[1] == "served"


@pytest.fixture
def _few_files() -> Iterator[None]:
    """This process may open some more files than it has."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with open(os.devnull) as newest:
        resource.setrlimit(resource.RLIMIT_NOFILE, (newest.fileno() + 200, hard))
    yield
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


@contextmanager
def no_file_left() -> Iterator[None]:
    with ExitStack() as opened:
        with suppress(OSError):
            while True:
                opened.callback(os.close, os.open(os.devnull, os.O_RDONLY))
        yield


def waiting_to_be_accepted(address: str) -> socket.socket:
    """A client whose connection and request wait in the kernel."""
    host, _, number = address.rpartition(":")
    client = socket.create_connection((host, int(number)))
    client.sendall(b"GET / HTTP/1.0\r\n\r\n")
    return client


def count_errors() -> list[dict[str, Any]]:
    errors: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context))
    return errors


@pytest.mark.usefixtures("_few_files")
async def test_without_file_descriptors_an_idle_connection_makes_room_for_another() -> None:
    errors = count_errors()
    async with serving(HttpLimits()) as address, connected(address) as (streaming, first), connected(address) as idle:
        first.write(b"GET /stream HTTP/1.1\r\nhost: x\r\n\r\n")
        assert await streaming.readuntil(b"x" * 100)
        idle[1].write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        assert await idle[0].readuntil(b"served")
        late = waiting_to_be_accepted(address)
        with no_file_left():
            late_reader, late_writer = await asyncio.open_connection(sock=late)
            assert (await rest(late_reader)).endswith(b"served")
            assert await streaming.readuntil(b"x" * 100)
            assert idle[0].at_eof()
        late_writer.close()
    assert not errors


@pytest.mark.usefixtures("_few_files")
async def test_without_file_descriptors_and_idle_connections_accepting_pauses() -> None:
    errors = count_errors()
    async with serving(HttpLimits()) as address, connected(address) as (streaming, first):
        first.write(b"GET /stream HTTP/1.1\r\nhost: x\r\n\r\n")
        assert await streaming.readuntil(b"x" * 100)
        late = waiting_to_be_accepted(address)
        with no_file_left():
            late_reader, late_writer = await asyncio.open_connection(sock=late)
            for _ in range(100):
                assert await streaming.readuntil(b"x" * 100)
        assert (await rest(late_reader)).endswith(b"served")
        late_writer.close()
    assert len(errors) == 1
    assert errors[0]["exception"].errno == errno.EMFILE


async def test_connection_that_waits_makes_room_for_another() -> None:
    async with serving(HttpLimits(max_connections=1)) as address, connected(address) as (first_reader, first):
        first.write(b"GET ")
        async with connected(address) as (reader, writer):
            assert await rest(first_reader) == b""
            writer.write(b"GET / HTTP/1.0\r\n\r\n")
            assert (await rest(reader)).endswith(b"served")


async def test_connection_that_is_answered_makes_no_room() -> None:
    async with serving(HttpLimits(max_connections=1)) as address, connected(address) as (streaming, first):
        first.write(b"GET /stream HTTP/1.1\r\nhost: x\r\n\r\n")
        assert await streaming.readuntil(b"x" * 100)
        async with connected(address) as (reader, _):
            assert await rest(reader) == b""
        assert await streaming.readuntil(b"x" * 100)


async def test_one_that_was_served_goes_after_those_that_never_asked() -> None:
    async with serving(HttpLimits(max_per_address=2)) as address, connected(address) as (scraper, scrapes):
        scrapes.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        assert await scraper.readuntil(b"served")
        async with connected(address) as (silent, _), connected(address):
            assert await rest(silent) == b""
            scrapes.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
            assert await scraper.readuntil(b"served")


@pytest.mark.parametrize("limits", [HttpLimits(max_per_address=2), HttpLimits(max_connections=3)])
async def test_address_with_many_connections_takes_none_of_anothers(limits: HttpLimits) -> None:
    async with serving(limits) as address, connected(address, "127.0.0.2") as (others, asks), AsyncExitStack() as many:
        readers = [(await many.enter_async_context(connected(address)))[0] for _ in range(4)]
        assert [await rest(reader) for reader in readers[:2]] == [b"", b""]
        asks.write(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        assert await others.readuntil(b"served")


@pytest.mark.parametrize(
    ("client", "counted"),
    [
        (("192.0.2.7", 1), "192.0.2.7"),
        (("::ffff:192.0.2.7", 1), "192.0.2.7"),
        (("2001:db8:1:2:3:4:5:6", 1), "2001:db8:1:2::/64"),
        (None, ""),
        (("/run/socket", 0), ""),
    ],
)
def test_connections_are_counted_by_address_or_site(client: tuple[str, int] | None, counted: str) -> None:
    assert address_of(client) == counted


async def test_client_that_reads_nothing_is_cut_off() -> None:
    app = App()
    async with serving(HttpLimits(write_s=AT_ONCE_S), app) as address, connected(address) as (reader, writer):
        writer.transport.pause_reading()  # type: ignore[attr-defined]
        writer.write(b"GET /stream HTTP/1.1\r\nhost: x\r\n\r\n")
        await app.has_ended.wait()
        assert not reader.at_eof()


def request(path: str = "/") -> bytes:
    return f"GET {path} HTTP/1.1\r\nhost: x\r\n\r\n".encode()


async def test_drain_closes_idle_connections_at_once() -> None:
    async with serving_port(HttpLimits(), App()) as (port, address), connected(address) as (reader, writer):
        writer.write(request())
        assert await reader.readuntil(b"served")
        assert await port.drain(TIMEOUT_S) == 0
        assert await rest(reader) == b""


async def test_drain_serves_a_request_that_has_arrived_at_an_idle_connection() -> None:
    async with serving_port(HttpLimits(), App()) as (port, address), connected(address) as (reader, writer):
        writer.write(request())
        assert await reader.readuntil(b"served")
        writer.write(request())  # written to the socket at once; the port has not read it
        assert await port.drain(TIMEOUT_S) == 0
        response = await rest(reader)
        assert response.endswith(b"served")
        assert b"connection: close\r\n" in response


@pytest.mark.parametrize("begun", [b"", request()[:20]], ids=["nothing", "half a head"])
async def test_drain_waits_for_the_first_request_of_an_open_connection(begun: bytes) -> None:
    async with serving_port(HttpLimits(), App()) as (port, address), connected(address, said=begun) as (reader, writer):
        async with connected(address) as (other, asks):
            # The port has accepted the first one, too.
            asks.write(request())
            assert await other.readuntil(b"served")
        draining = asyncio.create_task(port.drain(TIMEOUT_S))
        await asyncio.sleep(0)
        writer.write(request()[len(begun) :])
        response = await rest(reader)
        assert response.endswith(b"served")
        assert b"connection: close\r\n" in response
        assert await draining == 0


@pytest.mark.parametrize("said", [b"", request()[:20]], ids=["nothing", "half a head"])
async def test_drain_ends_although_a_connection_never_asks(said: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inflight.common.http.connection.DRAIN_REQUEST_S", AT_ONCE_S)
    async with serving_port(HttpLimits(), App()) as (port, address), connected(address) as (reader, writer):
        writer.write(request() + said)
        assert await reader.readuntil(b"served")
        async with connected(address) as (silent, _):
            assert await port.drain(TIMEOUT_S) == 0
            assert await rest(silent) == b""
        assert await rest(reader) == b""


async def test_last_response_of_a_drain_announces_that_the_connection_is_closed() -> None:
    app = App()
    async with serving_port(HttpLimits(), app) as (port, address), connected(address) as (reader, writer):
        # Given a connection that was closed before
        async with connected(address) as (closed, asks):
            asks.write(request().replace(b"\r\n\r\n", b"\r\nconnection: close\r\n\r\n"))
            assert (await rest(closed)).endswith(b"served")
        writer.write(request("/late"))
        await app.is_asked.wait()
        draining = asyncio.create_task(port.drain(TIMEOUT_S))
        async with connected(address) as (new, asks):
            asks.write(request())
            response = await rest(new)
            assert response.endswith(b"served on a new connection")
            assert b"connection: close\r\n" in response
        assert not draining.done()
        app.may_answer.set()
        response = await rest(reader)
        assert response.endswith(b"served late")
        assert b"connection: close\r\n" in response
        assert await draining == 0


async def test_stream_that_began_before_a_drain_ends_and_then_its_connection() -> None:
    app = App()
    async with serving_port(HttpLimits(), app) as (port, address), connected(address) as (reader, writer):
        writer.write(request("/parts"))
        assert await reader.readuntil(b"begun")
        draining = asyncio.create_task(port.drain(TIMEOUT_S))
        await asyncio.sleep(0)
        app.may_answer.set()
        assert b"ended" in await rest(reader)
        assert await draining == 0


async def test_drain_that_takes_too_long_counts_the_connections_in_use() -> None:
    app = App()
    async with serving_port(HttpLimits(), app) as (port, address), connected(address) as (reader, writer):
        writer.write(request("/late"))
        await app.is_asked.wait()
        assert await port.drain(AT_ONCE_S) == 1
        app.may_answer.set()
        assert (await rest(reader)).endswith(b"served late")
