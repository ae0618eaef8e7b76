"""A router's client of Redis in virtual time: what `inflight.router.ledger` uses of redis-py's client, over the
simulation's one connection.

A dead router's calls fail at once and reach no Redis.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from typing import Any

from inflight.bench.redis.wire import command
from inflight.bench.simulation.store_link import StoreLink
from inflight.bench.timeline.timeline import Action, Process
from inflight.bench.timeline.virtual_loop import VirtualLoop

Entries = list[tuple[str, dict[str, str]]]


class VirtualRedis:
    """The client of one start of a router, whose mailbox is `mailbox`."""

    def __init__(self, link: StoreLink, process: Process, loop: VirtualLoop, mailbox: str) -> None:
        self._link = link
        self._process = process
        self._loop = loop
        self._mailbox = mailbox
        self._has_mail = asyncio.Event()
        link.listen(mailbox, lambda: process.run(self._has_mail.set))

    async def aclose(self) -> None:
        """Stops waiting for mail."""
        self._link.unlisten(self._mailbox)

    async def execute_command(self, *args: Any, keys: Sequence[str]) -> Any:
        """Calls a script by its function."""
        return await self._call(args[1], *args)

    async def xread(self, streams: Mapping[str, str], count: int, block: int) -> list[tuple[str, Entries]]:
        """Reads the mailbox. If it has nothing new, waits up to `block` milliseconds."""
        self._has_mail.clear()
        found = await self._xread(streams, count)
        if not found:
            try:
                async with asyncio.timeout(block / 1000):
                    await self._has_mail.wait()
            except TimeoutError:
                return []
            found = await self._xread(streams, count)
        return found

    async def xrevrange(self, name: str, max: str = "+", min: str = "-", *, count: int) -> Entries:
        """Reads the newest entries."""
        return _entries(await self._call("", "XREVRANGE", name, max, min, "COUNT", count))

    async def _xread(self, streams: Mapping[str, str], count: int) -> list[tuple[str, Entries]]:
        found = await self._call("", "XREAD", "COUNT", count, "STREAMS", *streams, *streams.values())
        return [(found[0], _entries(found[1]))] if found else []

    async def _call(self, kind: str, *words: str | int | float | bytes) -> Any:
        if not self._process.is_alive:
            raise ConnectionError("the router is dead")
        reply: asyncio.Future[Any] = self._loop.create_future()

        def then(set_outcome: Action, outcome: Any) -> None:
            if not reply.done():
                set_outcome(outcome)

        self._link.send(
            kind,
            command(*words),
            lambda raw: self._process.run(then, reply.set_result, raw),
            lambda: self._process.run(then, reply.set_exception, TimeoutError("Redis is away")),
        )
        return await reply


def _entries(found: list[Any]) -> Entries:
    return [(entry_id, dict(zip(fields[::2], fields[1::2], strict=True))) for entry_id, fields in found]
