"""The part of the blocking client for which gRPC's asynchronous and blocking APIs differ.

`aio_connection` is the counterpart for the asynchronous client. Several threads may use the objects of this module.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping
from typing import Any

import grpc
from grpc_health.v1 import health_pb2_grpc

from inflight.access import Access, Metadata
from inflight.errors import RESOLVE_AGAIN_S, InflightError, client_closed, from_rpc_error, unresolved_target
from inflight.recovery import Call
from inflight.v1 import inference_pb2_grpc

CALL_FAILURES = (grpc.RpcError,)


class Connection:
    """The channel of a client, open until `close`.

    A channel that cannot resolve the routers' name is replaced by another one after `RESOLVE_AGAIN_S`.
    """

    def __init__(self, access: Access) -> None:
        self._access = access
        self._is_closed = False
        self._lock = threading.Lock()  # of the channel's replacement
        self._open()

    def _open(self) -> None:
        target, options, credentials = self._access.target, self._access.options, self._access.credentials
        self._channel = (
            grpc.insecure_channel(target, options)
            if credentials is None
            else grpc.secure_channel(target, credentials, options)
        )
        self._stub: Any = inference_pb2_grpc.InferenceServiceStub(self._channel)
        self._opened_at = time.monotonic()

    def close(self) -> None:
        """Cancels the calls and closes the channel."""
        with self._lock:
            self._is_closed = True
            self._channel.close()

    def stub(self) -> Any:
        """Returns the stub of `InferenceService`. Raises `InflightError` after `close`."""
        if self._is_closed:
            raise client_closed()
        return self._stub

    def health_stub(self) -> Any:
        """Returns the stub of gRPC's health service. Raises like `stub`."""
        self.stub()
        return health_pb2_grpc.HealthStub(self._channel)

    def metadata(self, of_call: Mapping[str, str] | None = None) -> Metadata:
        """Returns the metadata of a call that is made now."""
        return (*self._access.metadata(), *(of_call or {}).items())

    def error_of(self, failure: grpc.RpcError) -> InflightError:
        """Returns the error for one of `CALL_FAILURES`."""
        error = from_rpc_error(failure)
        if unresolved_target(error):
            with self._lock:
                # The old channel has no connection. gRPC closes it when its last call has failed.
                if not self._is_closed and time.monotonic() - self._opened_at >= RESOLVE_AGAIN_S:
                    self._open()
        return error


class StreamCalls:
    """The calls of one stream."""

    def __init__(self, connection: Connection, of_call: Mapping[str, str] | None = None) -> None:
        self._connection = connection
        self._metadata = of_call
        self.check_open()

    def check_open(self) -> None:
        """Raises `InflightError` if the channel was closed."""
        self._connection.stub()

    def start(self, call: Call) -> Any:
        """Makes a call. Raises like `check_open`."""
        method = getattr(self._connection.stub(), call.method)
        return method(call.request, timeout=call.timeout_s, metadata=self._connection.metadata(self._metadata))

    def error_of(self, failure: grpc.RpcError) -> InflightError:
        """Returns the error for one of `CALL_FAILURES`, as `Connection.error_of`."""
        return self._connection.error_of(failure)


class CancelFlag:
    """A flag that is set once a thread has cancelled the stream. `lock` is held from the check of the flag to the call
    after it."""

    def __init__(self) -> None:
        self._event = threading.Event()
        self.lock = threading.Lock()

    def is_set(self) -> bool:
        """Returns whether the stream was cancelled."""
        return self._event.is_set()

    def set(self) -> None:
        """Marks the stream as cancelled and wakes waiting threads."""
        self._event.set()

    def wait(self, timeout_s: float) -> bool:
        """Waits for at most `timeout_s` seconds. Returns whether the stream is cancelled then."""
        return self._event.wait(timeout_s)
