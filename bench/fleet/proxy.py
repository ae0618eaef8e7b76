"""A TCP proxy that stands for the network between two processes, and fails as networks do.

Cut: connections break at once and new ones are refused. Black hole: bytes and new connections wait without an error;
what waited arrives when the network is whole again, as TCP would send it again. Delay: bytes arrive late.
"""

from __future__ import annotations

import asyncio
from contextlib import suppress
from enum import Enum

CHUNK_BYTES = 64 * 1024


class Weather(Enum):
    """How the network behaves."""

    FAIR = "fair"
    CUT = "cut"
    BLACK_HOLE = "black hole"
    DELAY = "delay"


class Proxy:
    """Listens on `address` and passes on to `target`, each `host:port`."""

    def __init__(self, name: str, address: str, target: str) -> None:
        self.name = name
        self.address = address
        self._target = target
        self._weather = Weather.FAIR
        self._delay_s = 0.0
        self._is_passable = asyncio.Event()
        self._is_passable.set()
        self._connections: dict[asyncio.Task[None], list[asyncio.StreamWriter]] = {}
        self._server: asyncio.Server | None = None

    async def start(self) -> None:
        host, _, port = self.address.rpartition(":")
        self._server = await asyncio.start_server(self._connected, host, int(port))

    async def stop(self) -> None:
        """Breaks what is open and listens no more."""
        if self._server is not None:
            self._server.close()
        self._break_connections()
        await asyncio.gather(*self._connections, return_exceptions=True)

    def set_weather(self, weather: Weather, delay_s: float = 0.0) -> None:
        """From now on the network behaves like this."""
        self._weather = weather
        self._delay_s = delay_s if weather is Weather.DELAY else 0.0
        if weather is Weather.BLACK_HOLE:
            self._is_passable.clear()
        else:
            self._is_passable.set()
        if weather is Weather.CUT:
            self._break_connections()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = asyncio.current_task()
        assert connection is not None
        self._connections[connection] = [writer]
        try:
            await self._carry(reader, writer, self._connections[connection])
        except OSError:
            pass  # either end went away: the other is told by the end of its connection
        finally:
            for open_writer in self._connections.pop(connection):
                open_writer.transport.abort()

    async def _carry(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, writers: list[asyncio.StreamWriter]
    ) -> None:
        if self._weather is Weather.CUT:
            return
        await self._is_passable.wait()
        host, _, port = self._target.rpartition(":")
        onward_reader, onward_writer = await asyncio.open_connection(host, int(port))
        writers.append(onward_writer)
        ways = [
            asyncio.create_task(self._pump(reader, onward_writer)),
            asyncio.create_task(self._pump(onward_reader, writer)),
        ]
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while chunk := await reader.read(CHUNK_BYTES):
            await self._is_passable.wait()
            if self._delay_s:
                await asyncio.sleep(self._delay_s)
            writer.write(chunk)
            await writer.drain()

    def _break_connections(self) -> None:
        for writers in self._connections.values():
            for writer in writers:
                with suppress(OSError):
                    writer.transport.abort()
