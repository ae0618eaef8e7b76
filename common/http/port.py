"""HTTP port of a process: it starts and stops a Starlette application for metrics, pages or the OpenAI-compatible API.

It runs uvicorn in the process's own event loop and leaves signals to the process, whose drain decides when it stops.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import functools
import select
import socket
import ssl
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import uvicorn
from starlette.types import ASGIApp

from inflight.common.http.connection import HttpConnection, HttpLimits, OpenConnections
from inflight.common.machine import max_client_connections
from inflight.common.rpc.server import bind

# Connections that the event loop has not accepted yet wait in the kernel.
BACKLOG = 1024
DEFAULT_LIMITS = HttpLimits()
DATE_INTERVAL_S = 1.0
# Errors of `accept` that pass when something is closed. The connection stays in the kernel's queue.
OUT_OF_RESOURCES = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)


class _Listener(socket.socket):
    """A listening socket for asyncio that makes room when file descriptors run out.

    `make_room` closes an idle connection and returns whether there was one; then asyncio accepts again in its next
    turn. Without one asyncio logs the error and accepts again after a second. But it first goes on with its loop over
    the whole backlog (Python 3.11 to 3.14), with a traceback and a timer for each: the second call ends that loop.
    """

    def __init__(self, bound: socket.socket, make_room: Callable[[], bool]) -> None:
        super().__init__(bound.family, bound.type, bound.proto, fileno=bound.detach())
        self._make_room = make_room
        self._has_failed = False

    def accept(self) -> tuple[socket.socket, Any]:
        if self._has_failed:
            self._has_failed = False
            raise BlockingIOError
        try:
            return super().accept()
        except OSError as error:
            if error.errno not in OUT_OF_RESOURCES:
                raise
            # Linux looks for a free descriptor before it looks for a connection.
            if not self._has_waiting() or self._make_room():
                raise BlockingIOError from error
            self._has_failed = True
            raise

    def _has_waiting(self) -> bool:
        waiting = select.poll()
        waiting.register(self, select.POLLIN)
        return bool(waiting.poll(0))


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self._stopping = asyncio.Event()

    def stop(self) -> None:
        """Lets `serve` end."""
        self._stopping.set()

    async def main_loop(self) -> None:
        """Waits for `stop`, and keeps the header `date` right. uvicorn's own looks ten times a second."""
        while not self._stopping.is_set():
            await self.on_tick(0)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(DATE_INTERVAL_S):
                    await self._stopping.wait()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Handles no signals: the process has its own way to stop."""
        yield


class HttpPort:
    """Serves `app` over HTTP/1.1. After `stop` it cannot be started again.

    Call `drain` before `stop` if clients keep their connections. Streams that still run `grace_s` seconds after `stop`
    are cut off. With `tls` it serves only HTTPS.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        grace_s: int = 1,
        limits: HttpLimits = DEFAULT_LIMITS,
        tls: ssl.SSLContext | None = None,
    ) -> None:
        limits = replace(limits, max_connections=min(limits.max_connections, max_client_connections()))
        self._connections = OpenConnections(limits)
        config = uvicorn.Config(
            app,
            loop="none",
            http=functools.partial(HttpConnection, limits, self._connections),  # type: ignore[arg-type]  # it is called, no more
            ws="none",
            lifespan="off",
            log_config=None,
            access_log=False,
            server_header=False,
            timeout_graceful_shutdown=grace_s,
            backlog=BACKLOG,
        )
        # Loaded here, because that sets `ssl`. uvicorn itself takes only paths, whose files it reads once.
        config.load()
        config.ssl = tls
        self._server = _Server(config)
        self._serving: asyncio.Task[None] | None = None

    async def start(self, listen: str) -> str:
        """Listens on `host:port` (port 0 takes a free one) and returns the address with its port.

        Raises:
            ListenError: the port is in use, or the address is not this machine's.
        """
        port = _Listener(bind(listen), self._connections.close_idle)
        address = f"{listen.rpartition(':')[0]}:{port.getsockname()[1]}"
        # The port listens from here on, so that a client that connects before the event loop runs is not refused.
        port.listen(BACKLOG)
        self._serving = asyncio.create_task(self._server.serve(sockets=[port]), name=f"http {address}")
        return address

    async def drain(self, timeout_s: float) -> int:
        """Closes idle connections at once, and every other one after its next response, which has `Connection: close`.

        New connections are accepted, for one request each: its scope's state has `OPENED_IN_DRAIN`. Returns when the
        connections are closed that were open, or after `timeout_s` seconds; then with the number that still is.
        """
        # Requests that have arrived at idle connections are read first: the loop polls, then calls the readers.
        for _ in range(2):
            await asyncio.sleep(0)
        return await self._connections.drain(timeout_s)

    async def stop(self) -> None:
        """Accepts no more connections, lets calls end within the grace period, and returns when all are closed."""
        self._server.stop()
        if self._serving is not None:
            await self._serving
