"""Feeds of executors' steps. All watchers of an executor share one `WatchSteps` call. Without watchers there is none.

A feed belongs to one start (generation) of an executor. An executor that does not implement the call sends nothing. If
a feed breaks or its options change, the call is made again from the newest step that arrived, so that no watcher misses
a step.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import grpc
import grpc.aio

from inflight.common.cancellation import task_is_cancelled
from inflight.router.executors.link import ExecutorLink
from inflight.v1 import executor_pb2, stats_pb2

log = logging.getLogger(__name__)

MAX_ITERATIONS = 1000
# More sequences than any executor holds. A longer list is truncated.
MAX_SEQUENCES = 16_384
REOPEN_S = 1.0


@dataclass(frozen=True, slots=True)
class Wants:
    """The options of a watcher: its interval in milliseconds, and whether it needs the list of sequences."""

    interval_ms: int
    sequences: bool


@dataclass(slots=True, eq=False)
class Reader:
    """A watcher of a feed, with the newest steps that it has not taken, at most `MAX_ITERATIONS`."""

    wants: Wants
    iterations: deque[stats_pb2.IterationStats] = field(default_factory=lambda: deque(maxlen=MAX_ITERATIONS))

    def take(self) -> list[stats_pb2.IterationStats]:
        """Returns the steps since the last call."""
        taken = list(self.iterations)
        self.iterations.clear()
        return taken


class StepFeed:
    """The feed of one start of an executor."""

    def __init__(self, link: ExecutorLink) -> None:
        self._link = link
        self.generation = link.description.generation
        self.sequences: Sequence[stats_pb2.SequenceStats] = ()
        # Set once the feed has content, or will never have any.
        self.has_begun = asyncio.Event()
        self._readers: set[Reader] = set()
        self._newest_iter: int | None = None
        self._asked: Wants | None = None
        self._reading: asyncio.Task[None] | None = None

    @property
    def is_open(self) -> bool:
        """Whether the feed has a watcher."""
        return bool(self._readers)

    def join(self, wants: Wants) -> Reader:
        """Adds a watcher."""
        reader = Reader(wants)
        self._readers.add(reader)
        self._ask()
        return reader

    def leave(self, reader: Reader) -> None:
        """Removes a watcher. The call ends when the last watcher leaves."""
        self._readers.discard(reader)
        self._ask()

    def _ask(self) -> None:
        """Makes a new call if the combined options of all watchers differ from those of the open call."""
        wanted = self._wanted()
        if wanted == self._asked:
            return
        self._asked = wanted
        if self._reading is not None:
            self._reading.cancel()
            self._reading = None
        if wanted is not None:
            self._reading = asyncio.create_task(self._read(wanted), name=f"steps of {self._link.executor_id}")
            self._reading.add_done_callback(_ended)

    def _wanted(self) -> Wants | None:
        if not self._readers:
            return None
        wants = [reader.wants for reader in self._readers]
        return Wants(min(one.interval_ms for one in wants), any(one.sequences for one in wants))

    async def _read(self, wants: Wants) -> None:
        """Reads until cancelled, or until the executor turns out not to implement the call."""
        try:
            while True:
                if not await self._read_once(wants):
                    return
                await asyncio.sleep(REOPEN_S)
        finally:
            self.has_begun.set()

    async def _read_once(self, wants: Wants) -> bool:
        """Reads until the stream ends. Returns whether to open it again."""
        if not self._link.is_up:
            return True
        request = executor_pb2.WatchStepsRequest(
            interval_ms=wants.interval_ms, want_sequences=wants.sequences, after_iter=self._newest_iter
        )
        assert self._link.stub is not None, "a link that is up has a stub"
        call = self._link.stub.WatchSteps(request)
        try:
            async for response in call:
                self._receive(response)
        except grpc.aio.AioRpcError as error:
            log.debug("steps of executor %s: %s %s", self._link.executor_id, error.code().name, error.details())
            return error.code() is not grpc.StatusCode.UNIMPLEMENTED
        except asyncio.CancelledError:
            # gRPC also raises it if the link's channel is closed.
            if task_is_cancelled():
                raise
        finally:
            call.cancel()
        return True

    def _receive(self, response: executor_pb2.WatchStepsResponse) -> None:
        if response.generation != self.generation:
            return  # another start of the executor, which has its own feed
        self.sequences = response.sequences[:MAX_SEQUENCES]
        for iteration in response.iterations:
            if self._newest_iter is None or iteration.iter > self._newest_iter:
                self._newest_iter = iteration.iter
                for reader in self._readers:
                    reader.iterations.append(iteration)
        self.has_begun.set()


def _ended(reading: asyncio.Task[None]) -> None:
    if not reading.cancelled() and reading.exception() is not None:
        log.error("%s ended", reading.get_name(), exc_info=reading.exception())


class StepFeeds:
    """The feeds of all executors that are watched."""

    def __init__(self) -> None:
        self._feeds: dict[ExecutorLink, StepFeed] = {}

    def feed(self, link: ExecutorLink) -> StepFeed:
        """Returns the feed of a link that is up, for the executor's latest start."""
        feed = self._feeds.get(link)
        if feed is None or feed.generation != link.description.generation:
            feed = self._feeds[link] = StepFeed(link)
        return feed

    def tidy(self) -> None:
        """Drops the feeds without watchers."""
        self._feeds = {link: feed for link, feed in self._feeds.items() if feed.is_open}


class Subscription:
    """The feeds that one watcher has joined. Must be closed."""

    def __init__(self, feeds: StepFeeds, wants: Wants) -> None:
        self._feeds = feeds
        self._wants = wants
        self._joined: dict[ExecutorLink, tuple[StepFeed, Reader]] = {}

    def follow(self, links: Sequence[ExecutorLink]) -> None:
        """Joins the feeds of these links and leaves all others."""
        current = {link: self._feeds.feed(link) for link in links}
        for link, (feed, reader) in list(self._joined.items()):
            if current.get(link) is not feed:
                feed.leave(reader)
                del self._joined[link]
        for link, feed in current.items():
            if link not in self._joined:
                self._joined[link] = (feed, feed.join(self._wants))
        self._feeds.tidy()

    async def begun(self, timeout_s: float) -> None:
        """Waits until all joined feeds have content, for at most `timeout_s` seconds."""
        waits = [asyncio.ensure_future(feed.has_begun.wait()) for feed, _ in self._joined.values()]
        try:
            if waits:
                await asyncio.wait(waits, timeout=timeout_s)
        finally:
            for wait in waits:
                wait.cancel()

    def of(self, link: ExecutorLink) -> tuple[list[stats_pb2.IterationStats], Sequence[stats_pb2.SequenceStats]]:
        """Returns the steps of an executor since the last call of this method, and the sequences that it holds."""
        if link not in self._joined:
            return [], ()
        feed, reader = self._joined[link]
        return reader.take(), feed.sequences

    def close(self) -> None:
        """Leaves all feeds."""
        self.follow(())
