"""Streams of the asynchronous client that share calls of `GenerateMany`.

A call carries streams with the same metadata, and therefore of one caller. It opens with its first stream and ends with
its last. It has a limited number of streams at a time, and accepts no new ones after `MAX_AGE_S`, because gRPC balances
calls over routers, not streams. The blocking client makes a call for each stream, because its threads would have to
wait for the thread that reads a shared call.

If a stream is not read fast enough, the client asks the router to hold it. The router then collects the tokens of the
stream, and the other streams continue. With a router of an earlier version, which does not implement `GenerateMany`,
each stream has its own call.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import replace as copied
from typing import Any, Self

import grpc
import grpc.aio

from inflight.access import Metadata
from inflight.common.cancellation import task_is_cancelled
from inflight.common.rpc.options import TRACE_KEYS
from inflight.errors import InflightError, client_closed, from_rpc_error, from_status
from inflight.recovery import Call
from inflight.v1 import inference_pb2

# Most streams of a call at a time. With this many, one message per step costs little per token.
MAX_STREAMS = 32
# A call accepts no new streams after this time.
MAX_AGE_S = 60.0
# A larger request is sent in a separate call, because a message that a router does not accept would end the shared
# call.
MAX_REQUEST_BYTES = 1024 * 1024
# Numbers of unread events at which a stream is held, and at which it continues.
HOLD_EVENTS, GO_ON_EVENTS = 64, 16
# Time after an UNIMPLEMENTED before `GenerateMany` is tried again.
UNIMPLEMENTED_S = 60.0
# Details of the status that gRPC gives to a call if it could not send a message.
UNSENT_MESSAGE = "Internal error from Core"
# How often to check for the server's status, and the time between the checks.
STATUS_POLLS, STATUS_POLL_S = 1000, 0.001


class StreamFailed(grpc.RpcError):
    """Raised to the reader of a shared stream that ends with an error."""

    def __init__(self, error: InflightError) -> None:
        super().__init__(str(error))
        self.error = error


class Inbox:
    """The events that have arrived for one stream of a shared call. `replace` makes a separate call for the stream. It
    is used if the router does not implement shared calls."""

    def __init__(self, number: int, call: SharedCall, replace: Callable[[], Any]) -> None:
        self.number = number
        self.call = call
        self.replace = replace
        self.unread: deque[inference_pb2.StreamUpdate] = deque()
        self.is_held = False
        self.has_ended = False
        self.error: InflightError | None = None
        # The call that replaces the shared call.
        self.own_call: Any = None
        self.timer: asyncio.TimerHandle | None = None
        self._waiter: asyncio.Future[None] | None = None

    def put(self, update: inference_pb2.StreamUpdate) -> None:
        """Adds an event. Holds the stream if it has too many unread events."""
        self.unread.append(update)
        if len(self.unread) >= HOLD_EVENTS and not self.is_held:
            self.is_held = True
            self.call.send(inference_pb2.GenerateManyRequest(stream=self.number, hold=True))
        self._wake()

    def taken(self) -> None:
        """Lets a held stream continue once its reader has caught up."""
        if self.is_held and len(self.unread) <= GO_ON_EVENTS:
            self.is_held = False
            self.call.send(inference_pb2.GenerateManyRequest(stream=self.number, hold=False))

    def end(self, error: InflightError | None) -> None:
        """Ends the stream after its unread events."""
        if not self.has_ended:
            self.has_ended, self.error = True, error
            if self.timer is not None:
                self.timer.cancel()
            self._wake()

    def continue_alone(self) -> None:
        """Continues the stream with a separate call."""
        self.own_call = self.replace()
        self._wake()

    async def changed(self) -> None:
        """Waits for an event or the end."""
        self._waiter = asyncio.get_running_loop().create_future()
        await self._waiter

    def _wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)


class SharedStream:
    """A stream of a shared call, with the interface of gRPC's call objects that the reader uses."""

    def __init__(self, inbox: Inbox) -> None:
        self._inbox = inbox
        self._own_responses: AsyncIterator[Any] | None = None

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Any:
        inbox = self._inbox
        while not inbox.unread:
            if inbox.own_call is not None:
                self._own_responses = self._own_responses or aiter(inbox.own_call)
                return await anext(self._own_responses)
            if inbox.error is not None:
                raise StreamFailed(inbox.error)
            if inbox.has_ended:
                raise StopAsyncIteration
            await inbox.changed()
        update = inbox.unread.popleft()
        if inbox.is_held:
            inbox.taken()
        return update

    def cancel(self) -> None:
        """Cancels the stream on the server, and ends it here."""
        inbox = self._inbox
        if inbox.own_call is not None:
            inbox.own_call.cancel()
            return
        inbox.unread.clear()
        inbox.call.cancel(inbox)

    def __del__(self) -> None:
        # gRPC, too, cancels a call whose object is dropped.
        if self._inbox.own_call is None and not self._inbox.has_ended:
            self._inbox.call.drop(self._inbox)


class CallEnd:
    """The status with which the server ends a call.

    A message that is written while the call ends cannot be sent. `grpc.aio` then sets its own status INTERNAL for the
    call. This can happen before the server's status arrives, which then replaces it, or afterwards.
    """

    def __init__(self, call: Any) -> None:
        self._call = call
        self._first: InflightError | None = None
        call.add_done_callback(self._set_first)

    async def error(self, raised: InflightError) -> InflightError | None:
        """Returns the error of the server's status; None for OK. If that status is not known in time, returns `raised`,
        the error that the call has raised."""
        if not is_unsent_message(raised):
            return raised
        for _ in range(STATUS_POLLS):
            for error in (self._first, self._current()):
                if error is not None and not is_unsent_message(error):
                    return None if error.code is grpc.StatusCode.OK else error
            await asyncio.sleep(STATUS_POLL_S)
        return raised

    def _set_first(self, _: Any) -> None:
        self._first = self._current()

    def _current(self) -> InflightError:
        call = self._call
        code, details, trailing = map(result_at_once, (call.code(), call.details(), call.trailing_metadata()))
        return from_rpc_error(grpc.aio.AioRpcError(code, grpc.aio.Metadata(), trailing, details))


def is_unsent_message(error: InflightError) -> bool:
    """Returns whether the error is the one that gRPC sets for a message that it could not send."""
    return error.code is grpc.StatusCode.INTERNAL and error.description == UNSENT_MESSAGE


def result_at_once(coroutine: Coroutine[Any, Any, Any]) -> Any:
    """Runs a coroutine that does not wait, such as `code()` of a call that has ended, and returns its result."""
    try:
        coroutine.send(None)
    except StopIteration as end:
        return end.value
    raise RuntimeError("the coroutine waits")


class SharedCall:
    """One call of `GenerateMany` and its streams."""

    def __init__(self, calls: SharedCalls, stub: Any, metadata: Metadata) -> None:
        self._calls = calls
        self._loop = asyncio.get_running_loop()
        self._began_s = time.monotonic()
        self._inboxes: dict[int, Inbox] = {}
        self._num_started = 0
        self._messages: asyncio.Queue[inference_pb2.GenerateManyRequest | None] = asyncio.Queue()
        # The call has ended or is about to end, so it accepts no stream.
        self._is_closing = False
        self._call = stub.GenerateMany(self._outgoing(), metadata=metadata)
        self._end = CallEnd(self._call)
        self.reading = asyncio.create_task(self._read(), name="shared call")

    @property
    def has_room(self) -> bool:
        """Whether it accepts another stream."""
        is_young = time.monotonic() - self._began_s < MAX_AGE_S
        return not self._is_closing and is_young and len(self._inboxes) < MAX_STREAMS

    def start(self, call: Call, trace: dict[str, str], replace: Callable[[], Any]) -> SharedStream:
        """Starts a stream."""
        self._num_started += 1
        inbox = self._inboxes[self._num_started] = Inbox(self._num_started, self, replace)
        message = inference_pb2.GenerateManyRequest(stream=inbox.number, metadata=trace)
        if isinstance(call.request, inference_pb2.GenerateRequest):
            message.generate.CopyFrom(call.request)
        else:
            message.resume.CopyFrom(call.request)
        if call.timeout_s is not None:
            message.timeout.FromNanoseconds(round(call.timeout_s * 1e9))
            inbox.timer = self._loop.call_later(call.timeout_s, self._expire, inbox)
        self.send(message)
        return SharedStream(inbox)

    def send(self, message: inference_pb2.GenerateManyRequest) -> None:
        self._messages.put_nowait(message)

    def cancel(self, inbox: Inbox) -> None:
        """Cancels a stream. Events that still arrive for it are ignored."""
        if self._inboxes.pop(inbox.number, None) is not None:
            self.send(inference_pb2.GenerateManyRequest(stream=inbox.number, cancel=inference_pb2.CancelStream()))
            self._close_if_empty()
        inbox.end(client_cancelled())

    def drop(self, inbox: Inbox) -> None:
        """Cancels a stream that no longer has a reader. May be called in another thread, or after the loop has been
        closed."""
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self.cancel, inbox)

    async def _outgoing(self) -> AsyncIterator[inference_pb2.GenerateManyRequest]:
        while (message := await self._messages.get()) is not None:
            yield message

    async def _read(self) -> None:
        """Distributes the updates that arrive to the streams, until the call ends."""
        error: InflightError | None = None
        try:
            async for response in self._call:
                for update in response.updates:
                    self._receive(update)
        except grpc.aio.AioRpcError as failure:
            error = await self._end.error(from_rpc_error(failure))
        except asyncio.CancelledError:
            # gRPC raises it also if the channel is closed.
            self._end_all(client_closed())
            if task_is_cancelled():
                self._call.cancel()
                raise
            return
        if error is not None and error.code is grpc.StatusCode.UNIMPLEMENTED and not error.reason:
            self._calls.found_unimplemented()
            self._continue_alone()
        self._end_all(error or InflightError(grpc.StatusCode.UNAVAILABLE, "the call ended before its streams"))

    def _receive(self, update: inference_pb2.StreamUpdate) -> None:
        inbox = self._inboxes.get(update.stream)
        if inbox is None:
            return  # cancelled
        if update.HasField("event"):
            inbox.put(update)
        elif update.HasField("ended"):
            del self._inboxes[inbox.number]
            error = from_status(update.ended.status) if update.ended.status else None
            if error is not None and error.code is grpc.StatusCode.UNAVAILABLE:
                self._is_closing = True  # the next call may find another router
            inbox.end(error)
            self._close_if_empty()

    def _expire(self, inbox: Inbox) -> None:
        if not inbox.has_ended and inbox.own_call is None:
            inbox.end(InflightError(grpc.StatusCode.DEADLINE_EXCEEDED, "Deadline Exceeded"))
            self.cancel(inbox)

    def _close_if_empty(self) -> None:
        if not self._inboxes:
            self._is_closing = True
            self._messages.put_nowait(None)

    def _continue_alone(self) -> None:
        inboxes, self._inboxes = self._inboxes, {}
        self._is_closing = True
        for inbox in inboxes.values():
            try:
                inbox.continue_alone()
            except InflightError as error:  # the client was closed
                inbox.end(error)

    def _end_all(self, error: InflightError) -> None:
        self._is_closing = True
        inboxes, self._inboxes = self._inboxes, {}
        for inbox in inboxes.values():
            inbox.end(copied(error))


class SharedCalls:
    """The shared calls of one channel."""

    def __init__(self, stub: Any) -> None:
        self._stub = stub
        self._calls: dict[Metadata, list[SharedCall]] = {}
        self._reading: set[asyncio.Task[None]] = set()
        self._unimplemented_until_s: float | None = None

    def takes(self, call: Call) -> bool:
        """Returns whether the stream of this call may share a call."""
        is_known = self._unimplemented_until_s is None or time.monotonic() >= self._unimplemented_until_s
        return is_known and call.request.ByteSize() <= MAX_REQUEST_BYTES

    def start(self, call: Call, metadata: Metadata, start_alone: Callable[[Call], Any]) -> SharedStream:
        """Starts a stream on a shared call with the same metadata, apart from the trace context. `start_alone` makes a
        separate call."""
        trace = {key: value for key, value in metadata if key in TRACE_KEYS}
        of_call = tuple(one for one in metadata if one[0] not in TRACE_KEYS)
        began_s = time.monotonic()

        def replace() -> Any:
            if call.timeout_s is None:
                return start_alone(call)
            left_s = max(0.0, call.timeout_s - (time.monotonic() - began_s))
            return start_alone(Call(call.method, call.request, left_s))

        return self._with_room(of_call).start(call, trace, replace)

    def found_unimplemented(self) -> None:
        """Records that a router does not implement `GenerateMany`."""
        self._unimplemented_until_s = time.monotonic() + UNIMPLEMENTED_S

    async def ended(self) -> None:
        """Waits until all calls have ended, after their channel was closed."""
        await asyncio.gather(*self._reading, return_exceptions=True)

    def _with_room(self, metadata: Metadata) -> SharedCall:
        calls = [call for call in self._calls.get(metadata, ()) if call.has_room]
        if not calls:
            call = SharedCall(self, self._stub, metadata)
            calls = [call]
            self._reading.add(call.reading)
            call.reading.add_done_callback(self._reading.discard)
            call.reading.add_done_callback(lambda _: self._tidy(metadata))
        self._calls[metadata] = calls
        return calls[0]

    def _tidy(self, metadata: Metadata) -> None:
        calls = [call for call in self._calls.get(metadata, ()) if call.has_room]
        if calls:
            self._calls[metadata] = calls
        else:
            self._calls.pop(metadata, None)


def client_cancelled() -> InflightError:
    """Returns the error of a stream that its reader cancelled."""
    return InflightError(grpc.StatusCode.CANCELLED, "Locally cancelled by application!")
