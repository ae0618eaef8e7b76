"""One GenerateMany call: many streams of a caller, each started, cancelled and held by messages of the call.

Each stream runs in a task of its own, as Generate or Resume would, and its end is an update like its events. When the
call ends early, the tasks of all streams are cancelled, as gRPC cancels the task of a call. An invalid message ends its
stream and no other.

`StreamWriter` accepts the events of one stream. `Outbox` sends the updates of all streams in shared messages. While a
message is being written, updates collect for the next message. Each stream has at most a few events in the outbox.
Further tokens collect in the `RequestStream`, as they do behind a write of a call with one stream. Invariants: updates
of a stream are sent in order; a held stream delays no other stream.
"""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass

from google.rpc import code_pb2, status_pb2

from inflight.common.errors import FieldViolation, Reason, RequestError, invalid
from inflight.common.rpc.options import TRACE_KEYS
from inflight.common.rpc.status import Unparsed, to_rpc_status
from inflight.router.auth.caller import Metadata
from inflight.router.stream.relay import EventWriter, OnWritten, TimedWriter, stalled
from inflight.v1 import inference_pb2

log = logging.getLogger(__name__)

Message = inference_pb2.GenerateManyRequest
Serve = Callable[[Message, EventWriter], Awaitable[None]]
"""Serves a stream from the message that starts it to its end. Raises `RequestError`, or `TimeoutError` at its
deadline."""

# A client that sends messages and reads no updates is not read either, beyond so many updates.
MAX_WAITING = 1000
# The most bytes of a number.
MAX_VARINT_BYTES = 10

CANCELLED = status_pb2.Status(code=code_pb2.CANCELLED, message="the client cancelled the stream")

# A message ends with the update that reaches this size. Far below the largest message that a client accepts.
MAX_MESSAGE_BYTES = 1024 * 1024
# A task that writes an event waits if this many events of its stream have not been sent. Fewer, such as the last events
# of a request, are written without a wait.
MAX_UNSENT = 4

# Tags of `GenerateManyResponse.updates` and the fields of `StreamUpdate`. A message of the client begins with the same
# number of its stream.
UPDATE_TAG, STREAM_TAG, EVENT_TAG, ENDED_TAG = b"\x0a", b"\x08", b"\x12", b"\x1a"


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


def stream_metadata(of_call: Metadata, message: Message) -> Metadata:
    """Returns the metadata of a stream: that of its call, with the stream's own trace context if it has one."""
    if not message.metadata:
        return of_call
    return (*(one for one in of_call if one[0] not in TRACE_KEYS), *message.metadata.items())


def shortest(remaining_s: float | None, message: Message) -> float | None:
    """Returns the time left until the deadline of a stream, given that of its call; None: it has none."""
    if not message.HasField("timeout"):
        return remaining_s
    timeout_s = max(0.0, message.timeout.seconds + message.timeout.nanos / 1e9)
    return timeout_s if remaining_s is None else min(timeout_s, remaining_s)


def check_metadata(message: Message) -> None:
    """Raises `RequestError` if a stream has metadata other than trace context."""
    others = sorted(message.metadata.keys() - TRACE_KEYS)
    if others:
        text = f"{others[0][:100]!r} is not allowed; only {' and '.join(sorted(TRACE_KEYS))}, others with the call"
        raise invalid(FieldViolation("metadata", text))


def _number_in(serialized: bytes) -> int | None:
    """Returns the stream of a message that cannot be parsed; None unless it is the first field."""
    if not serialized or serialized[0] != STREAM_TAG[0]:
        return None
    number = 0
    for position, byte in enumerate(serialized[1 : 1 + MAX_VARINT_BYTES]):
        number |= (byte & 0x7F) << (7 * position)
        if byte < 0x80:
            return number if number < 2**64 else None
    return None


def varint(number: int) -> bytes:
    """Returns the protobuf varint encoding of a number."""
    if number < 0x80:
        return bytes((number,))
    return bytes((number & 0x7F | 0x80,)) + varint(number >> 7)


def update_of(stream: bytes, tag: bytes, content: bytes) -> bytes:
    """Returns an encoded entry of `GenerateManyResponse.updates`. `stream` is the encoded number of the stream;
    `content` is already serialized, because message objects around it would copy it several times."""
    length = varint(len(content))
    size = varint(len(stream) + len(tag) + len(length) + len(content))
    return b"".join((UPDATE_TAG, size, stream, tag, length, content))


def stream_field(number: int) -> bytes:
    """Returns the encoded number of a stream."""
    return STREAM_TAG + varint(number)


def ended_update(number: int, status: status_pb2.Status | None) -> bytes:
    """Returns the last update of a stream. `status` None: the stream is complete."""
    ended = inference_pb2.StreamEnded(status=b"" if status is None else status.SerializeToString())
    return update_of(stream_field(number), ENDED_TAG, ended.SerializeToString())


class Outbox:
    """Sends the updates of a call. After an error of `write`, or after `close`, it drops updates. `failed` then has the
    error if it is a `RequestError`."""

    def __init__(self, write: TimedWriter[bytes]) -> None:
        self._write = write
        self._waiting: deque[tuple[bytes, OnWritten | None]] = deque()
        # The `on_end` callbacks of the updates in the message that is being written.
        self._leaving: list[OnWritten] = []
        self._is_scheduled = False
        self._is_writing = False
        self._is_closed = False
        self._is_empty = asyncio.Event()
        self._is_empty.set()
        self.failed: asyncio.Future[RequestError] = asyncio.get_running_loop().create_future()

    @property
    def num_waiting(self) -> int:
        """The number of updates that are in no message yet."""
        return len(self._waiting)

    async def emptied(self) -> None:
        """Waits until all updates have been sent or dropped after an error."""
        await self._is_empty.wait()

    def add(self, update: bytes, on_end: OnWritten | None = None) -> None:
        """Adds an update. `on_end` is called once the update has been sent, with None or with the error."""
        if self._is_closed:
            return
        self._waiting.append((update, on_end))
        self._is_empty.clear()
        self._schedule()

    def close(self) -> None:
        """Drops all updates. Their `on_end` is not called."""
        self._is_closed = True
        self._waiting.clear()
        self._leaving.clear()
        self._write.close()

    def _schedule(self) -> None:
        """Sends after the callbacks and tasks that are ready now, so that all streams of one step share a message."""
        if not (self._is_scheduled or self._is_writing):
            self._is_scheduled = True
            asyncio.get_running_loop().call_soon(self._send)

    def _send(self) -> None:
        self._is_scheduled = False
        updates: list[bytes] = []
        num_bytes = 0
        while self._waiting and num_bytes < MAX_MESSAGE_BYTES:
            update, on_end = self._waiting.popleft()
            updates.append(update)
            num_bytes += len(update)
            if on_end is not None:
                self._leaving.append(on_end)
        if updates:
            self._is_writing = True
            self._write.begin(b"".join(updates), self._sent)

    def _sent(self, error: BaseException | None) -> None:
        self._is_writing = False
        told, self._leaving = self._leaving, []
        if error is not None:
            told += [on_end for _, on_end in self._waiting if on_end is not None]
            self._waiting.clear()
            self._is_closed = True
            # Any other error means that the connection has broken, and gRPC cancels the call.
            if isinstance(error, RequestError):
                self.failed.set_result(error)
        for on_end in told:
            on_end(error)
        if self._waiting:
            self._schedule()
        else:
            self._is_empty.set()


class StreamWriter:
    """The `EventWriter` of one stream of a call. While the client holds the stream, its events stay here. If it is held
    for `timeout_s`, the write fails with `RequestError` STALLED."""

    needs_task = False

    def __init__(self, outbox: Outbox, number: int, timeout_s: float) -> None:
        self._outbox = outbox
        self._stream = stream_field(number)
        self._timeout_s = timeout_s
        self._is_held = False
        self._kept: list[tuple[bytes, OnWritten]] = []
        self._timer: asyncio.TimerHandle | None = None
        self._on_end: OnWritten | None = None
        # The number of events that tasks have written and that have not been sent.
        self._num_unsent = 0
        self._has_sent_all = asyncio.Event()
        self._failure: BaseException | None = None

    async def __call__(self, event: inference_pb2.StreamEvent) -> None:
        self._num_unsent += 1
        self._has_sent_all.clear()
        self._put(event, self._count_sent)
        if self._is_held or self._num_unsent >= MAX_UNSENT:
            await self._has_sent_all.wait()
        if self._failure is not None:
            raise self._failure

    def begin(self, event: inference_pb2.StreamEvent, on_end: OnWritten) -> None:
        assert self._on_end is None, "one write at a time"
        self._on_end = on_end
        self._put(event, self._end_begun)

    def close(self) -> None:
        self._on_end = None
        self._kept.clear()
        self._stop_timer()

    def hold(self, is_held: bool) -> None:
        """Holds events back from now on or, with False, sends the held events and all later ones."""
        self._is_held = is_held
        if not is_held:
            self._stop_timer()
            kept, self._kept = self._kept, []
            for update, on_end in kept:
                self._outbox.add(update, on_end)

    def _put(self, event: inference_pb2.StreamEvent, on_end: OnWritten) -> None:
        update = update_of(self._stream, EVENT_TAG, event.SerializeToString())
        if not self._is_held:
            self._outbox.add(update, on_end)
            return
        self._kept.append((update, on_end))
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(self._timeout_s, self._stall)

    def _stall(self) -> None:
        self._timer = None
        kept, self._kept = self._kept, []
        for _, on_end in kept:
            on_end(stalled(self._timeout_s))

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _end_begun(self, error: BaseException | None) -> None:
        on_end, self._on_end = self._on_end, None
        if on_end is not None:
            on_end(error)

    def _count_sent(self, error: BaseException | None) -> None:
        self._num_unsent -= 1
        self._failure = self._failure or error
        if not self._num_unsent:
            self._has_sent_all.set()
