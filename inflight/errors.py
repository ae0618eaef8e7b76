"""What a call can fail with: one exception, read from the status that the server sent.

Owns `InflightError` and how a gRPC error becomes one. Works on the errors of both gRPC APIs, which share their methods.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2

from common.errors import Reason
from common.rpc.status import DETAILS_KEY


@dataclass(frozen=True, slots=True)
class FieldError:
    """One field of the request that is wrong: its path (`sampling.temperature`) and what is wrong with it."""

    field: str
    description: str


@dataclass(slots=True, eq=False)
class InflightError(Exception):
    """A call that the server refused or that broke on the way.

    `reason` is one of `common.errors.Reason` as text, empty where the error did not come from our server (a broken
    connection, say). `retry_after_s` is set where the server says that trying again may help.
    """

    code: grpc.StatusCode
    description: str
    reason: str = ""
    fields: tuple[FieldError, ...] = ()
    retry_after_s: float | None = None
    quota: str | None = None
    context: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        retry = "" if self.retry_after_s is None else f" (try again in {self.retry_after_s:.1f} s)"
        hint = self.hint
        return f"{self.code.name}: {self.description}{retry}" + (f"; {hint}" if hint else "")

    @property
    def hint(self) -> str:
        """What the caller can do about it; empty where the description says all that is known."""
        description = self.description.lower()
        if self.code is grpc.StatusCode.UNAUTHENTICATED:
            return "set api_key or token of the client, INFLIGHT_API_KEY or --api-key-file on the command line"
        if self.code is grpc.StatusCode.UNAVAILABLE and not self.reason:
            if "certificate_verify_failed" in description or "hostname verification" in description:
                return "the router's certificate is not trusted or bears another name: see ca_file and server_name"
            if "wrong_version_number" in description or "handshake failed" in description:
                return "perhaps the router speaks no TLS: see tls and ca_file"
            if "failing" in description and "socket closed" in description:  # at once, when connecting
                return "perhaps the router speaks TLS: see tls and ca_file"
        if self.reason == Reason.TAKEN_OVER.value:
            return "a request has one reader, and another has resumed it"
        return ""


def client_closed() -> InflightError:
    """What ends a stream whose client was closed."""
    return InflightError(grpc.StatusCode.CANCELLED, "the client was closed")


def from_rpc_error(error: grpc.RpcError) -> InflightError:
    """The typed form of a gRPC error, with what its status details say."""
    result = InflightError(error.code(), error.details() or error.code().name)
    metadata: Any = error.trailing_metadata() or ()
    for key, value in metadata:
        if key == DETAILS_KEY and isinstance(value, bytes):
            _read_details(value, result)
    return result


def _read_details(serialized: bytes, error: InflightError) -> None:
    try:
        status = status_pb2.Status.FromString(serialized)
    except DecodeError:
        return  # a proxy's, not ours: the code and the text stand
    info = error_details_pb2.ErrorInfo()
    bad_request = error_details_pb2.BadRequest()
    retry = error_details_pb2.RetryInfo()
    quota = error_details_pb2.QuotaFailure()
    for detail in status.details:
        if detail.Unpack(info):
            error.reason = info.reason
            error.context = dict(info.metadata)
        elif detail.Unpack(bad_request):
            error.fields = tuple(FieldError(v.field, v.description) for v in bad_request.field_violations)
        elif detail.Unpack(retry):
            error.retry_after_s = retry.retry_delay.ToNanoseconds() / 1e9
        elif detail.Unpack(quota) and quota.violations:
            error.quota = quota.violations[0].subject
