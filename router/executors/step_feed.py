"""What executors' steps do: one `WatchSteps` call to an executor for all who look on, and none while nobody does.

A feed belongs to one start of an executor. An executor that knows no such call brings nothing. A feed that breaks is
opened again behind the last step that came, and so it is when what is wanted changes: nobody misses a step by that.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field

import grpc
import grpc.aio

from common.cancellation import task_is_cancelled
from inflight.v1 import executor_pb2, stats_pb2
from router.executors.link import ExecutorLink

log = logging.getLogger(__name__)

MAX_ITERATIONS = 1000
# More than any executor holds; a list that is longer is cut.
MAX_SEQUENCES = 16_384
REOPEN_S = 1.0


@dataclass(frozen=True, slots=True)
class Wants:
    """What somebody who looks on wants to know, and how often."""

    interval_ms: int
    sequences: bool


@dataclass(slots=True, eq=False)
class Reader:
    """One who looks on: the newest of the steps that it has not taken yet."""

    wants: Wants
    iterations: deque[stats_pb2.IterationStats] = field(default_factory=lambda: deque(maxlen=MAX_ITERATIONS))

    def take(self) -> list[stats_pb2.IterationStats]:
        """The steps since the last call."""
        taken = list(self.iterations)
        self.iterations.clear()
        return taken


class StepFeed:
    """The feed of one start of an executor."""

    def __init__(self, link: ExecutorLink) -> None:
        self._link = link
        self.generation = link.description.generation
        self.sequences: Sequence[stats_pb2.SequenceStats] = ()
        # Whether there is something to tell, or there will never be.
        self.has_begun = asyncio.Event()
        self._readers: set[Reader] = set()
        self._newest_iter: int | None = None
        self._asked: Wants | None = None
        self._reading: asyncio.Task[None] | None = None

    @property
    def is_open(self) -> bool:
        """Whether anybody looks on."""
        return bool(self._readers)

    def join(self, wants: Wants) -> Reader:
        """Somebody looks on, from now on."""
        reader = Reader(wants)
        self._readers.add(reader)
        self._ask()
        return reader

    def leave(self, reader: Reader) -> None:
        """Somebody does not any more. With the last of them the call ends."""
        self._readers.discard(reader)
        self._ask()

    def _ask(self) -> None:
        """Asks for what all of them together want, if that is not what is asked for already."""
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
        """Reads until cancelled, or until it is plain that nothing comes."""
        try:
            while True:
                if not await self._read_once(wants):
                    return
                await asyncio.sleep(REOPEN_S)
        finally:
            self.has_begun.set()

    async def _read_once(self, wants: Wants) -> bool:
        """Reads until the stream ends. Whether there is a point in asking again."""
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
            # gRPC raises it also where the link's channel was closed.
            if task_is_cancelled():
                raise
        finally:
            call.cancel()
        return True

    def _receive(self, response: executor_pb2.WatchStepsResponse) -> None:
        if response.generation != self.generation:
            return  # of another start; its own feed tells of it
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
    """The feeds that somebody looks at."""

    def __init__(self) -> None:
        self._feeds: dict[ExecutorLink, StepFeed] = {}

    def feed(self, link: ExecutorLink) -> StepFeed:
        """The feed of a link that is up, as its executor has started last."""
        feed = self._feeds.get(link)
        if feed is None or feed.generation != link.description.generation:
            feed = self._feeds[link] = StepFeed(link)
        return feed

    def tidy(self) -> None:
        """Forgets those that nobody looks at."""
        self._feeds = {link: feed for link, feed in self._feeds.items() if feed.is_open}


class Subscription:
    """What one watcher has joined: the feeds of the links that there are. Close it in the end."""

    def __init__(self, feeds: StepFeeds, wants: Wants) -> None:
        self._feeds = feeds
        self._wants = wants
        self._joined: dict[ExecutorLink, tuple[StepFeed, Reader]] = {}

    def follow(self, links: Sequence[ExecutorLink]) -> None:
        """Joins the feeds of these links, and leaves all others."""
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
        """Waits until all of them have told something, at most so long."""
        waits = [asyncio.ensure_future(feed.has_begun.wait()) for feed, _ in self._joined.values()]
        try:
            if waits:
                await asyncio.wait(waits, timeout=timeout_s)
        finally:
            for wait in waits:
                wait.cancel()

    def of(self, link: ExecutorLink) -> tuple[list[stats_pb2.IterationStats], Sequence[stats_pb2.SequenceStats]]:
        """The steps of an executor since the last call, and who it holds."""
        if link not in self._joined:
            return [], ()
        feed, reader = self._joined[link]
        return reader.take(), feed.sequences

    def close(self) -> None:
        """Leaves all."""
        self.follow(())
