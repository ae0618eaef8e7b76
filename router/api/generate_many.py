"""One GenerateMany call: many streams of a caller, each started, cancelled and held by messages of the call.

Each stream runs in a task of its own, as Generate or Resume would, and its end is an update like its events. When the
call ends early, the tasks of all streams are cancelled, as gRPC cancels the task of a call. An invalid message ends its
stream and no other.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass

from google.rpc import code_pb2, status_pb2

from inflight.common.errors import FieldViolation, Reason, RequestError, invalid
from inflight.common.rpc.status import Unparsed, to_rpc_status
from inflight.router.stream.outbox import Outbox, StreamWriter, ended_update
from inflight.router.stream.relay import EventWriter, TimedWriter
from inflight.v1 import inference_pb2

log = logging.getLogger(__name__)

Message = inference_pb2.GenerateManyRequest
Serve = Callable[[Message, EventWriter], Awaitable[None]]
"""Serves a stream from the message that starts it to its end. Raises `RequestError`, or `TimeoutError` at its
deadline."""

TRACE_KEYS = frozenset({"traceparent", "tracestate"})
# A client that sends messages and reads no updates is not read either, beyond so many updates.
MAX_WAITING = 1000
# Of a number in a message's first field: its tag, and the most bytes that it has.
STREAM_TAG, MAX_VARINT_BYTES = 0x08, 10


class StreamLimit:
    """The streams of the GenerateMany calls of each connection, and the most that there may be."""

    def __init__(self, most: int) -> None:
        self._most = most
        self._num_of: dict[str, int] = {}

    def take(self, peer: str) -> None:
        """Counts a stream. Raises `RequestError` for one too many."""
        num_streams = self._num_of.get(peer, 0)
        if num_streams >= self._most:
            text = f"the connection has max_streams_per_connection ({self._most}) streams"
            raise RequestError(Reason.RATE_LIMITED, text, retry_after_ms=1000, quota="max_streams_per_connection")
        self._num_of[peer] = num_streams + 1

    def give_back(self, peer: str) -> None:
        """Counts a stream that has ended."""
        self._num_of[peer] -= 1
        if not self._num_of[peer]:
            del self._num_of[peer]


@dataclass(slots=True)
class RunningStream:
    """A stream of the call. `error` is what it is ended with if a message of the client was invalid."""

    task: asyncio.Task[None]
    writer: StreamWriter
    error: RequestError | None = None


class ManyCall:
    """The streams of one call. `peer` is the client's connection."""

    def __init__(
        self, serve: Serve, write: TimedWriter[bytes], write_timeout_s: float, limit: StreamLimit, peer: str
    ) -> None:
        self._serve = serve
        self._outbox = Outbox(write)
        self._write_timeout_s = write_timeout_s
        self._limit = limit
        self._peer = peer
        self._streams: dict[int, RunningStream] = {}
        self._has_no_stream = asyncio.Event()
        self._has_no_stream.set()

    async def run(self, messages: AsyncIterator[Message | Unparsed]) -> None:
        """Serves until the client has sent its last message and all streams have ended. Raises `RequestError`."""
        try:
            async with asyncio.TaskGroup() as tasks:
                failing = tasks.create_task(self._fail())
                try:
                    async for message in messages:
                        self._take(message, tasks)
                        if self._outbox.num_waiting > MAX_WAITING:
                            await self._outbox.emptied()
                    await self._has_no_stream.wait()
                    await self._outbox.emptied()
                    failing.cancel()
                except BaseException:
                    self._outbox.close()
                    raise
        except BaseExceptionGroup as group:
            raise group.exceptions[0] from None

    async def _fail(self) -> None:
        """Ends the call when the client does not read it."""
        raise await self._outbox.failed

    def _take(self, message: Message | Unparsed, tasks: asyncio.TaskGroup) -> None:
        if isinstance(message, Unparsed):
            number = _number_in(message.serialized)
            if number is None:
                raise message.error
            self._refuse(number, message.error)
            return
        number, running = message.stream, self._streams.get(message.stream)
        match message.WhichOneof("action"):
            case "cancel":
                if running is not None:
                    running.task.cancel()
            case "hold":
                if running is not None:
                    running.writer.hold(message.hold)
            case None:
                self._refuse(number, invalid(FieldViolation("action", "none is set, or one that is not known")))
            case _ if running is not None:
                self._refuse(number, invalid(FieldViolation("stream", f"{number} is in use; it ends with this error")))
            case _:
                self._start(message, tasks)

    def _refuse(self, number: int, error: RequestError) -> None:
        running = self._streams.get(number)
        if running is None:
            self._outbox.add(ended_update(number, to_rpc_status(error)))
        else:
            running.error = error
            running.task.cancel()

    def _start(self, message: Message, tasks: asyncio.TaskGroup) -> None:
        try:
            check_metadata(message)
            self._limit.take(self._peer)
        except RequestError as error:
            self._refuse(message.stream, error)
            return
        writer = StreamWriter(self._outbox, message.stream, self._write_timeout_s)
        task = tasks.create_task(self._run(message, writer), name=f"stream {message.stream}")
        self._streams[message.stream] = RunningStream(task, writer)
        self._has_no_stream.clear()
        # Not at the end of `_run`, which a task that is cancelled at once never begins.
        task.add_done_callback(lambda _: self._end(message.stream, CANCELLED))

    async def _run(self, message: Message, writer: StreamWriter) -> None:
        """Serves a stream and sends how it ended."""
        try:
            await self._serve(message, writer)
            status = None
        except RequestError as error:
            status = to_rpc_status(error)
        except TimeoutError:
            status = status_pb2.Status(code=code_pb2.DEADLINE_EXCEEDED, message="the deadline of the stream has passed")
        except Exception:
            log.exception("a stream failed")
            status = to_rpc_status(RequestError(Reason.INTERNAL, "internal error"))
        self._end(message.stream, status)

    def _end(self, number: int, status: status_pb2.Status | None) -> None:
        """Sends the last update of a stream, once."""
        running = self._streams.pop(number, None)
        if running is None:
            return
        running.writer.close()
        self._limit.give_back(self._peer)
        self._outbox.add(ended_update(number, status if running.error is None else to_rpc_status(running.error)))
        if not self._streams:
            self._has_no_stream.set()


CANCELLED = status_pb2.Status(code=code_pb2.CANCELLED, message="the client cancelled the stream")


def check_metadata(message: Message) -> None:
    """Raises `RequestError` if a stream has metadata other than trace context."""
    others = sorted(message.metadata.keys() - TRACE_KEYS)
    if others:
        text = f"{others[0][:100]!r} is not allowed; only {' and '.join(sorted(TRACE_KEYS))}, others with the call"
        raise invalid(FieldViolation("metadata", text))


def _number_in(serialized: bytes) -> int | None:
    """Returns the stream of a message that cannot be parsed; None unless it is the first field."""
    if not serialized or serialized[0] != STREAM_TAG:
        return None
    number = 0
    for position, byte in enumerate(serialized[1 : 1 + MAX_VARINT_BYTES]):
        number |= (byte & 0x7F) << (7 * position)
        if byte < 0x80:
            return number if number < 2**64 else None
    return None
