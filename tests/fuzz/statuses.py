"""The status of an error with its reason, and whether docs/statuses.md promises it."""

from __future__ import annotations

import grpc
import grpc.aio
from google.rpc import error_details_pb2, status_pb2

from inflight.common.errors import DETAILS_KEY
from tools.reference.statuses import COMMON, NO_REASON, Statuses


def status_of(error: grpc.aio.AioRpcError) -> tuple[str, str]:
    """The status of an error with the reason in its details."""
    for key, value in error.trailing_metadata() or ():
        if key == DETAILS_KEY:
            assert isinstance(value, bytes)
            for detail in status_pb2.Status.FromString(value).details:
                reason = error_details_pb2.ErrorInfo()
                if detail.Unpack(reason):
                    return error.code().name, reason.reason
    return error.code().name, NO_REASON


def check_documented(rpc: str, error: grpc.aio.AioRpcError, statuses: Statuses) -> None:
    """Checks that the RPC may end with this error and that it is no bug."""
    status = status_of(error)
    assert status in statuses[COMMON] | statuses[rpc], f"{rpc}: {status} {error.details()}"
    assert status[0] not in ("INTERNAL", "UNKNOWN"), f"{rpc}: {status} {error.details()}"
