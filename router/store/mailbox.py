"""A router's mailbox: the stream in which other routers' calls leave what it must know of its requests.

One reader per router, on a connection of its own. It resumes behind the last entry that it delivered, so an entry is
delivered once while the reader lives, across reconnects too. Where the stream has begun again behind that entry it
starts over: Redis names entries by its own clock, which may have been set back while there was no mailbox.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from typing import Any

from redis.asyncio import Redis

from common.errors import RequestError
from router.store.codec import parse_event
from router.store.connection import answered
from router.store.settings import StoreSettings
from router.store.types import StoreEvent

START = "0-0"
MAX_ENTRIES = 256


class Mailbox:
    """Reads one mailbox from its beginning."""

    def __init__(self, redis: Redis, key: str, settings: StoreSettings) -> None:
        self._redis = redis
        self._key = key
        self._settings = settings
        self._cursor = START

    async def run(self, on_event: Callable[[StoreEvent], None], on_failure: Callable[[str], None]) -> None:
        """Delivers events as they come, until cancelled; waits out Redis' absence, whose cause `on_failure` is told."""
        num_failures, events = 0, list[StoreEvent]()
        while True:
            try:
                if not events:
                    await self.rewind_if_reset()
                events = await self.read(self._settings.mailbox_block_ms)
            except RequestError as error:
                num_failures, events = num_failures + 1, []
                on_failure(f"mailbox: {error.cause}")
                await asyncio.sleep(self._backoff_s(num_failures))
                continue
            num_failures = 0
            for event in events:
                on_event(event)

    async def read(self, block_ms: int | None = None) -> list[StoreEvent]:
        """What has come since the last read; where that is nothing, waits up to `block_ms` for the first."""
        call = self._redis.xread({self._key: self._cursor}, count=MAX_ENTRIES, block=block_ms)
        streams: Any = await answered(call, self._settings)
        entries = [entry for _, entries in streams for entry in entries]
        if entries:
            self._cursor = entries[-1][0]
        return [parse_event(fields) for _, fields in entries]

    async def rewind_if_reset(self) -> None:
        """Starts over where the stream is not the one that was read before: Redis lost it, or runs behind its time."""
        newest: Any = await answered(self._redis.xrevrange(self._key, count=1), self._settings)
        if not newest or _order(newest[0][0]) < _order(self._cursor):
            self._cursor = START

    def _backoff_s(self, num_failures: int) -> float:
        doubled_ms = self._settings.min_backoff_ms << min(num_failures, 16)
        return random.uniform(0.5, 1.0) * min(doubled_ms, self._settings.max_backoff_ms) / 1000


def _order(entry_id: str) -> tuple[int, int]:
    milliseconds, _, count = entry_id.partition("-")
    return int(milliseconds), int(count)
