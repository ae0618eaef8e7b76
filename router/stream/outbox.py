"""The outgoing side of a GenerateMany call. It sends the updates of all streams of the call in shared messages.

`StreamWriter` accepts the events of one stream. `Outbox` sends the updates of all streams. While a message is being
written, updates collect for the next message. Each stream has at most a few events in the outbox. Further tokens
collect in the `RequestStream`, as they do behind a write of a call with one stream. Invariants: updates of a stream are
sent in order; a held stream delays no other stream.
"""

from __future__ import annotations

import asyncio
from collections import deque

from google.rpc import status_pb2

from inflight.common.errors import RequestError
from inflight.router.stream.relay import OnWritten, TimedWriter, stalled
from inflight.v1 import inference_pb2

# A message ends with the update that reaches this size. Far below the largest message that a client accepts.
MAX_MESSAGE_BYTES = 1024 * 1024
# A task that writes an event waits if this many events of its stream have not been sent. Fewer, such as the last events
# of a request, are written without a wait.
MAX_UNSENT = 4

# Tags of `GenerateManyResponse.updates` and the fields of `StreamUpdate`.
UPDATE_TAG, STREAM_TAG, EVENT_TAG, ENDED_TAG = b"\x0a", b"\x08", b"\x12", b"\x1a"


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
