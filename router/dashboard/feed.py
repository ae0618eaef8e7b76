"""Feeds of the dashboard: the newest statistics that each watcher may see.

Watchers with the same permissions share one feed, so each message is encoded as JSON once. A feed holds one message: a
slow reader gets the newest and misses those in between. A feed takes at most a small share of the router's time: the
longer a message takes to make, the fewer there are.

A feed starts with its first watcher and ends with its last, with `Feeds.close`, or with its source.

A message can have thousands of sequences. Protobuf's mapping to JSON in Python takes 33 µs for each, the one here less
than 3; a test compares the results.
"""

from __future__ import annotations

import asyncio
import json
import logging
import time
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any, Protocol

from google.protobuf.json_format import MessageToDict

from inflight.common.errors import RequestError
from inflight.router.auth.caller import Caller
from inflight.v1 import inference_pb2, stats_pb2

log = logging.getLogger(__name__)

INTERVAL_MS = 200
# Share of one core for making messages.
SHARE = 0.05
MAX_WATCHERS = 32
PHASES = {number: name for name, number in stats_pb2.SequencePhase.items()}


class StatisticsStream(Protocol):
    """The source of messages."""

    def watch(
        self, request: inference_pb2.GetStatsRequest, caller: Caller
    ) -> AsyncGenerator[inference_pb2.GetStatsResponse, None]:
        """Yields messages that `caller` may see. Raises `RequestError`."""
        ...


class Feed:
    """The newest message, for watchers with the same permissions."""

    def __init__(self, messages: AsyncGenerator[inference_pb2.GetStatsResponse, None]) -> None:
        self.num_watchers = 0
        # The source's error, if it ended with one.
        self.error: RequestError | None = None
        self._messages = messages
        self._newest = b""
        self._number = 0
        self._changed = asyncio.Event()
        self._reading = asyncio.create_task(self._read(), name="board feed")
        self._reading.add_done_callback(lambda reading: self._wake())

    @property
    def has_ended(self) -> bool:
        """Whether the feed has ended."""
        return self._reading.done() or self._reading.cancelling() > 0

    async def after(self, number: int) -> tuple[int, bytes] | None:
        """Waits for a message newer than that number (0: any). Returns it with its number; None at the end."""
        while self._number <= number and not self.has_ended:
            await self._changed.wait()
        return None if self.has_ended else (self._number, self._newest)

    def end(self) -> None:
        """Ends the feed."""
        self._reading.cancel()
        self._wake()

    async def _read(self) -> None:
        try:
            async with aclosing(self._messages):
                async for message in self._messages:
                    # In a thread: the event loop forwards tokens.
                    self._newest, took_s = await asyncio.to_thread(_timed_line, message)
                    self._number += 1
                    self._wake()
                    await asyncio.sleep(max(0.0, took_s / SHARE - INTERVAL_MS / 1000))
        except RequestError as error:
            self.error = error
        except Exception:
            log.exception("the dashboard's statistics failed")

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()


class Feeds:
    """All feeds with watchers, by caller."""

    def __init__(self, statistics: StatisticsStream, max_watchers: int = MAX_WATCHERS) -> None:
        self._statistics = statistics
        self._max_watchers = max_watchers
        self._feeds: dict[Caller, Feed] = {}
        self._closed = False

    def join(self, caller: Caller) -> Feed | None:
        """Returns the caller's feed, which it must leave at the end; None at the limit of watchers or while the router
        stops."""
        if self._closed or self.num_watchers >= self._max_watchers:
            return None
        feed = self._feeds.get(caller)
        if feed is None or feed.has_ended:
            feed = self._feeds[caller] = Feed(self._statistics.watch(_request(), caller))
        feed.num_watchers += 1
        return feed

    def leave(self, caller: Caller, feed: Feed) -> None:
        """Removes a watcher; the last one ends its feed."""
        feed.num_watchers -= 1
        if feed.num_watchers == 0:
            feed.end()
            if self._feeds.get(caller) is feed:
                del self._feeds[caller]

    def close(self) -> None:
        """Ends every feed and refuses new watchers."""
        self._closed = True
        for feed in self._feeds.values():
            feed.end()

    @property
    def num_watchers(self) -> int:
        """The callers that watch now."""
        return sum(feed.num_watchers for feed in self._feeds.values())


def _request() -> inference_pb2.GetStatsRequest:
    return inference_pb2.GetStatsRequest(interval_ms=INTERVAL_MS, want_iterations=True, want_sequences=True)


def _timed_line(message: inference_pb2.GetStatsResponse) -> tuple[bytes, float]:
    """Returns a message's line, and the CPU time that it took, seconds."""
    began_s = time.thread_time()
    line = line_of(message)
    return line, time.thread_time() - began_s


def line_of(message: inference_pb2.GetStatsResponse) -> bytes:
    """Returns one line of JSON with its newline. Removes the sequences from `message`."""
    sequences = [[_sequence(one) for one in executor.sequences] for executor in message.executors]
    for executor in message.executors:
        executor.ClearField("sequences")
    content = MessageToDict(message)
    for executor, held in zip(content.get("executors", ()), sequences, strict=True):
        if held:
            executor["sequences"] = held
    return json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode() + b"\n"


def _sequence(one: stats_pb2.SequenceStats) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "requestId": one.request_id,
        "choiceIndex": one.choice_index,
        "tenant": one.tenant,
        "phase": PHASES.get(one.phase, one.phase) if one.phase else 0,
        "promptTokens": one.prompt_tokens,
        "computedTokens": one.computed_tokens,
        "outputTokens": one.output_tokens,
        "numBlocks": one.num_blocks,
        "reservedBlocks": one.reserved_blocks,
    }
    present = {name: value for name, value in fields.items() if value}
    if one.HasField("seat"):
        present["seat"] = one.seat
    return present
