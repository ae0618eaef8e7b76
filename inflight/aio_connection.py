"""The part of the asynchronous client for which gRPC's asynchronous and blocking APIs differ: opening, closing and
waiting.

`sync_connection` is the counterpart for the blocking client. The rest of the blocking client is generated from the
asynchronous client by `make sync-client`.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import nullcontext, suppress
from typing import Any

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2_grpc

from common.cancellation import task_is_cancelled
from inflight.access import Access, Metadata
from inflight.aio_many import SharedCalls, StreamFailed
from inflight.errors import InflightError, client_closed, from_rpc_error
from inflight.recovery import Call
from inflight.v1 import inference_pb2_grpc

# The exceptions of a call that fails. gRPC raises `CancelledError` if its channel is closed or the call is cancelled.
CALL_FAILURES = (grpc.RpcError, asyncio.CancelledError)


def error_of(failure: BaseException) -> InflightError:
    """Returns the error for one of `CALL_FAILURES`. If the task itself is cancelled, raises `CancelledError` again."""
    if isinstance(failure, StreamFailed):
        return failure.error
    if isinstance(failure, grpc.RpcError):
        return from_rpc_error(failure)
    if task_is_cancelled():
        raise failure
    return client_closed()


class AsyncConnection:
    """The channel of a client. The first call, also the first after `close`, opens it in the running event loop."""

    def __init__(self, access: Access) -> None:
        self._access = access
        self._channel: grpc.aio.Channel | None = None
        self.opened: Any = None  # the stub, while the channel is open
        # Whether streams share calls. Applies when the channel is opened next.
        self.share_calls = False
        # The shared calls; None if the channel is closed or calls are not shared.
        self.shared: SharedCalls | None = None
        self._loop: asyncio.AbstractEventLoop | None = None

    async def close(self) -> None:
        """Cancels the calls and closes the channel."""
        channel, self._channel, self.opened = self._channel, None, None
        shared, self.shared = self.shared, None
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
        if self.opened is None:
            self._loop = loop
            target, options, credentials = self._access.target, self._access.options, self._access.credentials
            self._channel = (
                grpc.aio.insecure_channel(target, options)
                if credentials is None
                else grpc.aio.secure_channel(target, credentials, options)
            )
            self.opened = inference_pb2_grpc.InferenceServiceStub(self._channel)
            self.shared = SharedCalls(self.opened) if self.share_calls else None
        if self._loop is not loop:
            raise RuntimeError("this client is open in another event loop: close it there, or make one for each loop")
        return self.opened

    def health_stub(self) -> Any:
        """Returns the stub of gRPC's health service."""
        self.stub()
        return health_pb2_grpc.HealthStub(self._channel)

    def metadata(self, of_call: Mapping[str, str] | None = None) -> Metadata:
        """Returns the metadata of a call that is made now."""
        return (*self._access.metadata(), *(of_call or {}).items())


class AsyncStreamCalls:
    """The calls of one stream. All of them use the channel that was open when the stream began."""

    def __init__(self, connection: AsyncConnection, of_call: Mapping[str, str] | None = None) -> None:
        self._connection = connection
        self._metadata = of_call
        self._stub = connection.stub()

    def check_open(self) -> None:
        """Raises `InflightError` if the channel was closed."""
        if self._connection.opened is not self._stub:
            raise client_closed()

    def start(self, call: Call) -> Any:
        """Makes a call, or starts a stream on a shared call. Raises like `check_open`."""
        self.check_open()
        metadata, shared = self._connection.metadata(self._metadata), self._connection.shared
        if shared is not None and shared.takes(call):
            return shared.start(call, metadata, lambda alone: self._start_alone(alone, metadata))
        return self._start_alone(call, metadata)

    def _start_alone(self, call: Call, metadata: Metadata) -> Any:
        self.check_open()
        return getattr(self._stub, call.method)(call.request, timeout=call.timeout_s, metadata=metadata)


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
