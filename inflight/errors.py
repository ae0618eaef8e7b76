"""The error of a call, decoded from the status that the server sent. Shared by both clients."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import grpc
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2

from inflight.common.errors import DETAILS_KEY, Reason


@dataclass(frozen=True, slots=True)
class FieldError:
    """An invalid field of the request: its path, such as `sampling.temperature`, and why it is invalid."""

    field: str
    description: str


@dataclass(slots=True, eq=False)
class InflightError(Exception):
    """The error of a call that the server refused or that failed, or whose connection broke.

    `reason` is a value of `inflight.common.errors.Reason`. It is empty for an error that did not come from an inflight
    server, such as a broken connection. `retry_after_s` is set if the server says that a retry may succeed after this
    time.
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
        """Advice for the caller; may be empty."""
        description = self.description.lower()
        if self.code is grpc.StatusCode.UNAUTHENTICATED:
            return "set api_key or token of the client, INFLIGHT_API_KEY or --api-key-file on the command line"
        if self.code is grpc.StatusCode.UNAVAILABLE and not self.reason:
            if "certificate_verify_failed" in description or "hostname verification" in description:
                return "the router's certificate is not trusted or has another name: check ca_file and server_name"
            if "wrong_version_number" in description or "handshake failed" in description:
                return "the router may not use TLS: check tls and ca_file"
            if target := unresolved_target(self):
                return f"the host name of {target!r} cannot be resolved: check the router's address"
            if "http1.x server" in description:
                return "an HTTP server answers there, perhaps a gateway: give the address of a router"
            if "failing" in description and "socket closed" in description:  # the connection attempt failed at once
                return "the router may require TLS: check tls and ca_file"
        if self.code is grpc.StatusCode.DEADLINE_EXCEEDED and description == "deadline exceeded":  # gRPC's own text
            return "the timeout of the call has passed"
        if self.reason == Reason.TAKEN_OVER.value:
            return "another client has resumed the request, which has one reader"
        return ""


# The beginning of gRPC's message for a name that it cannot resolve, and the texts of its two resolvers for a name that
# does not exist. Other failures, such as a DNS server that does not answer, may be temporary.
_RESOLVING = re.compile(r"errors resolving (?P<target>\S+): ")
_UNKNOWN_NAME = (
    *("domain name not found", "misformatted domain name", "failed to parse port"),
    "name or service not known",
)


def unresolved_target(error: InflightError) -> str | None:
    """Returns the address whose host name could not be resolved; None if the error has another cause."""
    is_of_grpc = error.code is grpc.StatusCode.UNAVAILABLE and not error.reason
    found = _RESOLVING.match(error.description) if is_of_grpc else None
    return None if found is None else found["target"]


def names_no_host(error: InflightError) -> bool:
    """Returns whether the address is wrong: it is malformed, or its host name does not exist."""
    description = error.description.lower()
    return unresolved_target(error) is not None and any(text in description for text in _UNKNOWN_NAME)


# gRPC asks DNS again after 1 s, then after 1.6 times as long each time, up to 2 minutes, and has no setting for that.
# After this time a client opens another channel, which asks at once.
RESOLVE_AGAIN_S = 5.0


def client_closed() -> InflightError:
    """Returns the error of a stream whose client was closed."""
    return InflightError(grpc.StatusCode.CANCELLED, "the client was closed")


def from_rpc_error(error: grpc.RpcError) -> InflightError:
    """Returns the error for a gRPC error, with its status details."""
    result = InflightError(error.code(), error.details() or error.code().name)
    metadata: Any = error.trailing_metadata() or ()
    for key, value in metadata:
        if key == DETAILS_KEY and isinstance(value, bytes):
            _read_details(value, result)
    return result


_CODES = {code.value[0]: code for code in grpc.StatusCode}


def from_status(serialized: bytes) -> InflightError:
    """Returns the error for the status of a `GenerateMany` stream, a serialized `google.rpc.Status`."""
    status = status_pb2.Status.FromString(serialized)
    code = _CODES.get(status.code, grpc.StatusCode.UNKNOWN)
    result = InflightError(code, status.message or code.name)
    _read_details(serialized, result)
    return result


def _read_details(serialized: bytes, error: InflightError) -> None:
    try:
        status = status_pb2.Status.FromString(serialized)
    except DecodeError:
        return  # not from an inflight server
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
