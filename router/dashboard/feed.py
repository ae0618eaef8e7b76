"""What the board's watchers are told: the statistics as they may see them, newest first and nothing else.

Watchers who may see the same share one feed, so a message is made into JSON once however many look on. A feed holds one
message: who reads slowly gets the newest when it is ready for it, and what it missed is gone. A feed takes at most a
small share of the router's time: the longer a message takes to make, the fewer there are.

Feeds start with their first watcher and end with their last, with `Feeds.close`, or when the source ends.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Protocol

from common.errors import RequestError
from inflight.v1 import inference_pb2
from router.auth.caller import Caller
from router.dashboard.as_json import line_of

log = logging.getLogger(__name__)

INTERVAL_MS = 200
# Of the time of one core, what making messages may take.
SHARE = 0.05
MAX_WATCHERS = 32


class Statistics(Protocol):
    """Where the messages come from."""

    def watch(
        self, request: inference_pb2.GetStatsRequest, caller: Caller
    ) -> AsyncGenerator[inference_pb2.GetStatsResponse, None]:
        """Messages again and again, as `caller` may see them. Raises `RequestError`."""
        ...


class Feed:
    """The newest message, for watchers who may see the same."""

    def __init__(self, messages: AsyncGenerator[inference_pb2.GetStatsResponse, None]) -> None:
        self.num_watchers = 0
        # Why there is no more, where the source says so.
        self.error: RequestError | None = None
        self._messages = messages
        self._newest = b""
        self._number = 0
        self._changed = asyncio.Event()
        self._reading = asyncio.create_task(self._read(), name="board feed")
        self._reading.add_done_callback(lambda reading: self._wake())

    @property
    def has_ended(self) -> bool:
        """Whether there is no more."""
        return self._reading.done() or self._reading.cancelling() > 0

    async def after(self, number: int) -> tuple[int, bytes] | None:
        """The newest message, where newer than the one of that number (0: any), and its number. None: no more."""
        while self._number <= number and not self.has_ended:
            await self._changed.wait()
        return None if self.has_ended else (self._number, self._newest)

    def end(self) -> None:
        """Tells its watchers that there is no more."""
        self._reading.cancel()
        self._wake()

    async def _read(self) -> None:
        try:
            async with aclosing(self._messages):
                async for message in self._messages:
                    # Beside the loop, which has tokens to forward.
                    self._newest, took_s = await asyncio.to_thread(_timed_line, message)
                    self._number += 1
                    self._wake()
                    await asyncio.sleep(max(0.0, took_s / SHARE - INTERVAL_MS / 1000))
        except RequestError as error:
            self.error = error
        except Exception:
            log.exception("the board's statistics failed")

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


class Feeds:
    """Every feed that is watched, by caller."""

    def __init__(self, statistics: Statistics, max_watchers: int = MAX_WATCHERS) -> None:
        self._statistics = statistics
        self._max_watchers = max_watchers
        self._feeds: dict[Caller, Feed] = {}
        self._closed = False

    def join(self, caller: Caller) -> Feed | None:
        """The caller's feed, to be left again; None where there are watchers enough or the router is stopping."""
        if self._closed or self.num_watchers >= self._max_watchers:
            return None
        feed = self._feeds.get(caller)
        if feed is None or feed.has_ended:
            feed = self._feeds[caller] = Feed(self._statistics.watch(_request(), caller))
        feed.num_watchers += 1
        return feed

    def leave(self, caller: Caller, feed: Feed) -> None:
        """A watcher is gone; its feed ends with the last."""
        feed.num_watchers -= 1
        if feed.num_watchers == 0:
            feed.end()
            if self._feeds.get(caller) is feed:
                del self._feeds[caller]

    def close(self) -> None:
        """Ends every feed and takes no more watchers."""
        self._closed = True
        for feed in self._feeds.values():
            feed.end()

    @property
    def num_watchers(self) -> int:
        """Who watches now."""
        return sum(feed.num_watchers for feed in self._feeds.values())


def _request() -> inference_pb2.GetStatsRequest:
    return inference_pb2.GetStatsRequest(interval_ms=INTERVAL_MS, want_iterations=True, want_sequences=True)


def _timed_line(message: inference_pb2.GetStatsResponse) -> tuple[bytes, float]:
    """A message's line, and the time of a core that it took."""
    began_s = time.thread_time()
    line = line_of(message)
    return line, time.thread_time() - began_s
