"""The part of the asynchronous client for which gRPC's asynchronous and blocking APIs differ: opening, closing and
waiting.

`sync_connection` is the counterpart for the blocking client. The rest of the blocking client is generated from the
asynchronous client by `make sync-client`.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping
from contextlib import nullcontext, suppress
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2_grpc

from inflight.access import Access, Metadata
from inflight.aio_many import SharedCalls, StreamFailed
from inflight.common.cancellation import task_is_cancelled
from inflight.errors import RESOLVE_AGAIN_S, InflightError, client_closed, from_rpc_error, unresolved_target
from inflight.recovery import Call
from inflight.v1 import inference_pb2_grpc

# The exceptions of a call that fails. gRPC raises `CancelledError` if its channel is closed or the call is cancelled.
CALL_FAILURES = (grpc.RpcError, asyncio.CancelledError)


class AsyncConnection:
    """The channel of a client. The first call, also the first after `close`, opens it in the running event loop.

    A channel that cannot resolve the routers' name is replaced by another one after `RESOLVE_AGAIN_S`.
    """

    def __init__(self, access: Access) -> None:
        self._access = access
        self._channel: grpc.aio.Channel | None = None
        self._stub: Any = None  # None if the channel is closed
        self._opened_at = 0.0
        self.num_closed = 0  # how many times `close` was called
        # Whether streams share calls. Applies when the channel is opened next.
        self.share_calls = False
        # The shared calls; None if the channel is closed or calls are not shared.
        self.shared: SharedCalls | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def close(self) -> None:
        """Cancels the calls and closes the channel."""
        channel, shared = self._channel, self.shared
        self._forget_channel()
        self.num_closed += 1
        if channel is not None:
            await channel.close(None)
        if shared is not None:
            await shared.ended()

    def stub(self) -> Any:
        """Returns the stub of `InferenceService`.

        Raises:
            RuntimeError: there is no running event loop, or the channel was opened in another one.
        """
        loop = _running_loop()
        if self._stub is None:
            self._loop, self._opened_at = loop, time.monotonic()
            target, options, credentials = self._access.target, self._access.options, self._access.credentials
            self._channel = (
                grpc.aio.insecure_channel(target, options)
                if credentials is None
                else grpc.aio.secure_channel(target, credentials, options)
            )
            self._stub = inference_pb2_grpc.InferenceServiceStub(self._channel)
            self.shared = SharedCalls(self._stub) if self.share_calls else None
        if self._loop is not loop:
            raise RuntimeError("this client is open in another event loop: close it there, or make one for each loop")
        return self._stub

    def health_stub(self) -> Any:
        """Returns the stub of gRPC's health service."""
        self.stub()
        return health_pb2_grpc.HealthStub(self._channel)

    def metadata(self, of_call: Mapping[str, str] | None = None) -> Metadata:
        """Returns the metadata of a call that is made now."""
        return (*self._access.metadata(), *(of_call or {}).items())

    def error_of(self, failure: BaseException) -> InflightError:
        """Returns the error for one of `CALL_FAILURES`. Raises `CancelledError` again if the task is cancelled."""
        if isinstance(failure, StreamFailed):
            error = failure.error
        elif isinstance(failure, grpc.RpcError):
            error = from_rpc_error(failure)
        elif task_is_cancelled():
            raise failure
        else:
            return client_closed()
        if unresolved_target(error) and time.monotonic() - self._opened_at >= RESOLVE_AGAIN_S:
            # It has no connection. gRPC closes it when its last call has failed.
            self._forget_channel()
        return error

    def _forget_channel(self) -> None:
        self._channel = self._stub = self.shared = None


class AsyncStreamCalls:
    """The calls of one stream, until the client is closed."""

    def __init__(self, connection: AsyncConnection, of_call: Mapping[str, str] | None = None) -> None:
        self._connection = connection
        self._metadata = of_call
        self._num_closed = connection.num_closed

    def check_open(self) -> None:
        """Raises `InflightError` if the client was closed after the stream began."""
        if self._connection.num_closed != self._num_closed:
            raise client_closed()

    def start(self, call: Call) -> Any:
        """Makes a call, or starts a stream on a shared call. Raises like `check_open`."""
        self.check_open()
        self._connection.stub()  # opens the channel
        metadata, shared = self._connection.metadata(self._metadata), self._connection.shared
        if shared is not None and shared.takes(call):
            return shared.start(call, metadata, lambda alone: self._start_alone(alone, metadata))
        return self._start_alone(call, metadata)

    def _start_alone(self, call: Call, metadata: Metadata) -> Any:
        self.check_open()
        method = getattr(self._connection.stub(), call.method)
        return method(call.request, timeout=call.timeout_s, metadata=metadata)

    def error_of(self, failure: BaseException) -> InflightError:
        """Returns the error for one of `CALL_FAILURES`, as `AsyncConnection.error_of`."""
        return self._connection.error_of(failure)


class AsyncCancelFlag:
    """A flag that is set once the reader has cancelled its stream. `lock` is held from the check of the flag to the
    call after it."""

    def __init__(self) -> None:
        self._event = asyncio.Event()
        self.lock = nullcontext()

    def is_set(self) -> bool:
        """Returns whether the stream was cancelled."""
        return self._event.is_set()

    def set(self) -> None:
        """Marks the stream as cancelled and wakes waiting tasks."""
        self._event.set()

    async def wait(self, timeout_s: float) -> bool:
        """Waits for at most `timeout_s` seconds. Returns whether the stream is cancelled then."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._event.wait()
        return self._event.is_set()


def _running_loop() -> asyncio.AbstractEventLoop:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:
        raise RuntimeError("AsyncClient needs a running event loop; without one use Client") from None
