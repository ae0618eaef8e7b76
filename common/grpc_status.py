"""The gRPC edge of errors: `RequestError` to a status with details, for every handler of a server.

`ErrorInterceptor` wraps all handlers of a server, so that services raise `RequestError` and know nothing of statuses.
Whatever else escapes a handler is logged with its traceback and answered with INTERNAL and no detail of ours. Bytes
that do not parse as the request's type (invalid UTF-8 in a string field, say) are INVALID_ARGUMENT.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any, NoReturn

import grpc
import grpc.aio
from google.protobuf import any_pb2, duration_pb2, message
from google.rpc import code_pb2, error_details_pb2, status_pb2

from common.errors import FieldViolation, Reason, RequestError, invalid

log = logging.getLogger(__name__)

DETAILS_KEY = "grpc-status-details-bin"
ERROR_DOMAIN = "inflight"

# Status and details travel in HTTP/2 headers, of which the peer takes 8 KiB by default; more costs it the whole answer.
# The text goes there percent-encoded, at most thrice its size, the details in base64.
MAX_STATUS_TEXT_BYTES = 1024
MAX_VIOLATIONS_BYTES = 2048
MAX_FIELD_BYTES = 256
MAX_DESCRIPTION_BYTES = 512


@dataclass(frozen=True, slots=True)
class _Malformed:
    """Stands for a request that did not parse."""

    reason: str


def to_rpc_status(error: RequestError) -> status_pb2.Status:
    """The `google.rpc.Status` of an error, with the details that apply."""
    text = _cut(error.description, MAX_STATUS_TEXT_BYTES)
    status = status_pb2.Status(code=code_pb2.Code.Value(error.code.name), message=text)
    info = error_details_pb2.ErrorInfo(reason=error.reason.value, domain=ERROR_DOMAIN, metadata=error.context)
    _pack(status, info)
    if error.violations:
        _pack(status, _bad_request(error.violations))
    if error.retry_after_ms is not None:
        delay = duration_pb2.Duration()
        delay.FromMilliseconds(error.retry_after_ms)
        _pack(status, error_details_pb2.RetryInfo(retry_delay=delay))
    if error.quota is not None:
        quota = error_details_pb2.QuotaFailure()
        quota.violations.add(subject=error.quota, description=text)
        _pack(status, quota)
    return status


def _bad_request(violations: tuple[FieldViolation, ...]) -> error_details_pb2.BadRequest:
    """As many of the violations as there is room for, from the first on."""
    bad_request = error_details_pb2.BadRequest()
    for violation in violations:
        field, description = _cut(violation.field, MAX_FIELD_BYTES), _cut(violation.description, MAX_DESCRIPTION_BYTES)
        bad_request.field_violations.add(field=field, description=description)
        if bad_request.ByteSize() > MAX_VIOLATIONS_BYTES:
            del bad_request.field_violations[-1]
            break
    return bad_request


def _cut(text: str, max_bytes: int) -> str:
    """The beginning of a text that takes no more bytes in UTF-8."""
    return text.encode(errors="replace")[:max_bytes].decode(errors="ignore")


def _pack(status: status_pb2.Status, detail: message.Message) -> None:
    packed = any_pb2.Any()
    packed.Pack(detail)
    status.details.append(packed)


async def abort(context: grpc.aio.ServicerContext[Any, Any], error: RequestError) -> NoReturn:
    """Ends the RPC with the error's status, or as a cancelled one where nobody is left who could be told."""
    status = to_rpc_status(error)
    try:
        await context.abort(error.code, status.message, ((DETAILS_KEY, status.SerializeToString()),))
    except grpc.aio.InternalError as gone:
        raise asyncio.CancelledError from gone
    raise AssertionError("abort returned")


CheckPeer = Callable[[grpc.aio.ServicerContext[Any, Any]], None]
"""Raises `RequestError` where who called may not."""


class ErrorInterceptor(grpc.aio.ServerInterceptor):
    """Turns what handlers raise into statuses; see the module's text. `check_peer` is called before every one."""

    def __init__(self, check_peer: CheckPeer | None = None) -> None:
        self._check_peer = check_peer or _admit_all

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        assert not handler.request_streaming or handler.response_streaming, "no service of ours has such a method"
        check_peer, parse = self._check_peer, _lenient(handler.request_deserializer)
        if handler.unary_unary:
            return grpc.unary_unary_rpc_method_handler(
                _guard_unary(handler.unary_unary, check_peer), parse, handler.response_serializer
            )
        if handler.unary_stream:
            return grpc.unary_stream_rpc_method_handler(
                _guard_stream(handler.unary_stream, check_peer), parse, handler.response_serializer
            )
        return grpc.stream_stream_rpc_method_handler(
            _guard_stream(handler.stream_stream, check_peer), handler.request_deserializer, handler.response_serializer
        )


def _admit_all(context: grpc.aio.ServicerContext[Any, Any]) -> None:
    """Whoever can connect may call."""


def _lenient(deserialize: Callable[[bytes], Any]) -> Callable[[bytes], Any]:
    def parse(serialized: bytes) -> Any:
        try:
            return deserialize(serialized)
        except message.DecodeError as error:
            return _Malformed(str(error))

    return parse


async def _answer(context: grpc.aio.ServicerContext[Any, Any], error: Exception) -> NoReturn:
    if isinstance(error, RequestError):
        await abort(context, error)
    if isinstance(error, message.DecodeError):  # of a later message of a stream
        await abort(context, _malformed())
    if isinstance(error, grpc.aio.AbortError):
        raise error
    if isinstance(error, grpc.aio.InternalError):  # of a write: the connection is gone
        raise asyncio.CancelledError from error
    log.exception("a handler failed", exc_info=error)
    await abort(context, RequestError(Reason.INTERNAL, "internal error"))


def _malformed() -> RequestError:
    return invalid(FieldViolation("request", "not a well-formed message; strings must be UTF-8"))


def _check(request: Any) -> None:
    if isinstance(request, _Malformed):
        raise _malformed()


def _guard_unary(behavior: Callable[..., Awaitable[Any]], check_peer: CheckPeer) -> Callable[..., Awaitable[Any]]:
    async def guarded(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        try:
            check_peer(context)
            _check(request)
            return await behavior(request, context)
        except Exception as error:
            await _answer(context, error)

    return guarded


def _guard_stream(behavior: Callable[..., Any], check_peer: CheckPeer) -> Callable[..., Any]:
    """A streaming handler is an async generator or a coroutine that writes to its context; it stays what it is."""
    if not inspect.isasyncgenfunction(behavior):
        return _guard_unary(behavior, check_peer)

    async def guarded(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[Any]:
        try:
            check_peer(context)
            _check(request)
            async for response in behavior(request, context):
                yield response
        except Exception as error:
            await _answer(context, error)

    return guarded
