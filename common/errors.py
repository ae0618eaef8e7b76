"""Errors that clients receive, and their gRPC status.

This module has one exception, `RequestError`, and the table from reasons to status codes. It never logs or sends: the
gRPC edge (`inflight.common.rpc.status`) turns an error into a status with details.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

import grpc

# The metadata in which a status carries its details.
DETAILS_KEY = "grpc-status-details-bin"


class Reason(Enum):
    """Why a request was refused or ended. The name goes into `google.rpc.ErrorInfo.reason`."""

    INVALID_FIELD = "INVALID_FIELD"
    NOT_IMPLEMENTED = "NOT_IMPLEMENTED"
    UNKNOWN_MODEL = "UNKNOWN_MODEL"
    UNKNOWN_ADAPTER = "UNKNOWN_ADAPTER"
    UNKNOWN_REQUEST = "UNKNOWN_REQUEST"
    DUPLICATE_REQUEST_ID = "DUPLICATE_REQUEST_ID"
    NEVER_FITS = "NEVER_FITS"
    NO_EXECUTOR = "NO_EXECUTOR"
    STORE_UNAVAILABLE = "STORE_UNAVAILABLE"
    DRAINING = "DRAINING"
    QUEUE_FULL = "QUEUE_FULL"
    RATE_LIMITED = "RATE_LIMITED"
    DEADLINE_UNMEETABLE = "DEADLINE_UNMEETABLE"
    DEADLINE_PASSED = "DEADLINE_PASSED"
    CANCELLED = "CANCELLED"
    UNKNOWN_TENANT = "UNKNOWN_TENANT"
    UNAUTHENTICATED = "UNAUTHENTICATED"
    NOT_ALLOWED = "NOT_ALLOWED"
    OUTPUT_LOST = "OUTPUT_LOST"
    TAKEN_OVER = "TAKEN_OVER"
    STALLED = "STALLED"
    IDEMPOTENCY_MISMATCH = "IDEMPOTENCY_MISMATCH"
    EXECUTOR_LOST = "EXECUTOR_LOST"
    ATTEMPTS_EXHAUSTED = "ATTEMPTS_EXHAUSTED"
    STALE_GENERATION = "STALE_GENERATION"
    INTERNAL = "INTERNAL"


STATUS_OF_REASON: dict[Reason, grpc.StatusCode] = {
    Reason.INVALID_FIELD: grpc.StatusCode.INVALID_ARGUMENT,
    Reason.NOT_IMPLEMENTED: grpc.StatusCode.UNIMPLEMENTED,
    Reason.UNKNOWN_MODEL: grpc.StatusCode.NOT_FOUND,
    Reason.UNKNOWN_ADAPTER: grpc.StatusCode.NOT_FOUND,
    Reason.UNKNOWN_REQUEST: grpc.StatusCode.NOT_FOUND,
    Reason.DUPLICATE_REQUEST_ID: grpc.StatusCode.ALREADY_EXISTS,
    Reason.NEVER_FITS: grpc.StatusCode.FAILED_PRECONDITION,
    Reason.NO_EXECUTOR: grpc.StatusCode.UNAVAILABLE,
    Reason.STORE_UNAVAILABLE: grpc.StatusCode.UNAVAILABLE,
    Reason.DRAINING: grpc.StatusCode.UNAVAILABLE,
    Reason.QUEUE_FULL: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Reason.RATE_LIMITED: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Reason.DEADLINE_UNMEETABLE: grpc.StatusCode.RESOURCE_EXHAUSTED,
    Reason.DEADLINE_PASSED: grpc.StatusCode.DEADLINE_EXCEEDED,
    Reason.CANCELLED: grpc.StatusCode.CANCELLED,
    Reason.UNKNOWN_TENANT: grpc.StatusCode.PERMISSION_DENIED,
    Reason.UNAUTHENTICATED: grpc.StatusCode.UNAUTHENTICATED,
    Reason.NOT_ALLOWED: grpc.StatusCode.PERMISSION_DENIED,
    Reason.OUTPUT_LOST: grpc.StatusCode.DATA_LOSS,
    Reason.TAKEN_OVER: grpc.StatusCode.ABORTED,
    Reason.STALLED: grpc.StatusCode.ABORTED,
    Reason.IDEMPOTENCY_MISMATCH: grpc.StatusCode.ALREADY_EXISTS,
    Reason.EXECUTOR_LOST: grpc.StatusCode.UNAVAILABLE,
    Reason.ATTEMPTS_EXHAUSTED: grpc.StatusCode.INTERNAL,
    Reason.STALE_GENERATION: grpc.StatusCode.FAILED_PRECONDITION,
    Reason.INTERNAL: grpc.StatusCode.INTERNAL,
}


@dataclass(frozen=True, slots=True)
class FieldViolation:
    """One invalid field: its path in the request (`sampling.temperature`) and what is wrong with it."""

    field: str
    description: str


@dataclass(slots=True)
class RequestError(Exception):
    """A refusal with everything that its gRPC status needs.

    `violations` becomes `BadRequest`, `retry_after_ms` `RetryInfo`, `quota` (the subject that is exhausted)
    `QuotaFailure`, `context` the metadata of `ErrorInfo`. `cause` is only logged.
    """

    reason: Reason
    description: str
    violations: tuple[FieldViolation, ...] = ()
    retry_after_ms: int | None = None
    quota: str | None = None
    context: dict[str, str] = field(default_factory=dict)
    cause: str = ""

    def __str__(self) -> str:
        return f"{self.description} ({self.cause})" if self.cause else self.description

    @property
    def code(self) -> grpc.StatusCode:
        """The gRPC status code."""
        return STATUS_OF_REASON[self.reason]


def invalid(*violations: FieldViolation) -> RequestError:
    """Makes the error for invalid fields; its text names every one."""
    text = "; ".join(f"{v.field}: {v.description}" for v in violations)
    return RequestError(Reason.INVALID_FIELD, text, violations)


def not_implemented(field_path: str, what: str) -> RequestError:
    """Makes the error for a field whose function is not implemented."""
    violation = FieldViolation(field_path, f"{what} not implemented yet")
    return RequestError(Reason.NOT_IMPLEMENTED, f"{violation.field}: {violation.description}", (violation,))
