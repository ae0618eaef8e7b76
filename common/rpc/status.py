"""The gRPC edge of errors: `RequestError` to a status with details, for every handler of a server.

`ErrorInterceptor` wraps all handlers of a server, so that services raise `RequestError` and know nothing of statuses.
Whatever else escapes a handler is logged with its traceback and answered with INTERNAL and no detail of ours. Bytes
that do not parse as the request's type (invalid UTF-8 in a string field, say) are INVALID_ARGUMENT, and so is a message
with more fields than `WireLimits` allow, which is not parsed. A caller that is not let in is told so before its message
is received.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, NoReturn

import grpc
import grpc.aio
from google.protobuf import any_pb2, duration_pb2, message
from google.rpc import code_pb2, error_details_pb2, status_pb2

from common.errors import DETAILS_KEY, FieldViolation, Reason, RequestError, invalid
from common.rpc.wire_counts import DEFAULT_LIMITS, WireCounts, WireLimits

log = logging.getLogger(__name__)

ERROR_DOMAIN = "inflight"

Parse = Callable[[bytes], Any]

# Status and details travel in HTTP/2 headers, of which the peer takes 8 KiB by default; more costs it the whole answer.
# The text goes there percent-encoded, at most thrice its size, the details in base64.
MAX_STATUS_TEXT_BYTES = 1024
MAX_VIOLATIONS_BYTES = 2048
MAX_FIELD_BYTES = 256
MAX_DESCRIPTION_BYTES = 512


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


CheckCaller = Callable[[str, Sequence[tuple[str, Any]]], None]
"""Raises `RequestError` where a call of this method, with this metadata, may not be made."""


class ErrorInterceptor(grpc.aio.ServerInterceptor):
    """Turns what handlers raise into statuses; see the module's text.

    `check_caller` is called before the request is received, `check_peer` before every handler.
    """

    def __init__(
        self,
        check_peer: CheckPeer | None = None,
        check_caller: CheckCaller | None = None,
        wire_limits: WireLimits = DEFAULT_LIMITS,
    ) -> None:
        self._check_peer = check_peer or _admit_all
        self._check_caller = check_caller
        self._wire_limits = wire_limits
        self._parsers: dict[str, Parse] = {}

    async def intercept_service(
        self,
        continuation: Callable[[grpc.HandlerCallDetails], Awaitable[Any]],
        handler_call_details: grpc.HandlerCallDetails,
    ) -> Any:
        handler = await continuation(handler_call_details)
        if handler is None:
            return None
        assert not handler.request_streaming or handler.response_streaming, "no service of ours has such a method"
        if self._check_caller is not None:
            try:
                self._check_caller(handler_call_details.method, _metadata(handler_call_details))
            except RequestError as error:
                return _refusal(error)
        check_peer, parse = self._check_peer, self._parser(handler_call_details.method, handler.request_deserializer)
        # A unary request is parsed where its errors can be answered: gRPC knows no status for those of a deserializer.
        if handler.unary_unary:
            return grpc.unary_unary_rpc_method_handler(
                _guard_unary(handler.unary_unary, check_peer, parse), None, handler.response_serializer
            )
        if handler.unary_stream:
            return grpc.unary_stream_rpc_method_handler(
                _guard_stream(handler.unary_stream, check_peer, parse), None, handler.response_serializer
            )
        return grpc.stream_stream_rpc_method_handler(
            _guard_stream(handler.stream_stream, check_peer, _as_it_is), parse, handler.response_serializer
        )

    def _parser(self, method: str, deserialize: Parse) -> Parse:
        """Parses the requests of a method; raises `RequestError` or `DecodeError`."""
        parser = self._parsers.get(method)
        if parser is None:
            parser = self._parsers[method] = _checked(deserialize, self._wire_limits)
        return parser


def _checked(deserialize: Parse, limits: WireLimits) -> Parse:
    # `FromString` of a message class, which knows the type.
    counts = WireCounts(deserialize.__self__.DESCRIPTOR, limits)  # type: ignore[attr-defined]

    def parse(serialized: bytes) -> Any:
        counts.check(serialized)
        return deserialize(serialized)

    return parse


def _metadata(details: grpc.HandlerCallDetails) -> Sequence[tuple[str, Any]]:
    return tuple(details.invocation_metadata or ())


def _refusal(error: RequestError) -> Any:
    """A handler that answers any call with an error. Where requests are a stream gRPC receives none unless asked to."""

    async def refuse(requests: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        await abort(context, error)

    return grpc.stream_stream_rpc_method_handler(refuse)


def _as_it_is(request: Any) -> Any:
    return request


def _admit_all(context: grpc.aio.ServicerContext[Any, Any]) -> None:
    """Every peer that can connect may call."""


async def _answer(context: grpc.aio.ServicerContext[Any, Any], error: Exception) -> NoReturn:
    if isinstance(error, RequestError):
        await abort(context, error)
    if isinstance(error, message.DecodeError):
        await abort(context, _malformed())
    if isinstance(error, grpc.aio.AbortError):
        raise error
    if isinstance(error, grpc.aio.InternalError):  # of a write: the connection is gone
        raise asyncio.CancelledError from error
    log.exception("a handler failed", exc_info=error)
    await abort(context, RequestError(Reason.INTERNAL, "internal error"))


def _malformed() -> RequestError:
    return invalid(FieldViolation("request", "not a well-formed message; strings must be UTF-8"))


def _guard_unary(
    behavior: Callable[..., Awaitable[Any]], check_peer: CheckPeer, parse: Parse
) -> Callable[..., Awaitable[Any]]:
    async def guarded(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> Any:
        try:
            check_peer(context)
            return await behavior(parse(request), context)
        except Exception as error:
            await _answer(context, error)

    return guarded


def _guard_stream(behavior: Callable[..., Any], check_peer: CheckPeer, parse: Parse) -> Callable[..., Any]:
    """A streaming handler is an async generator or a coroutine that writes to its context; it stays what it is."""
    if not inspect.isasyncgenfunction(behavior):
        return _guard_unary(behavior, check_peer, parse)

    async def guarded(request: Any, context: grpc.aio.ServicerContext[Any, Any]) -> AsyncIterator[Any]:
        try:
            check_peer(context)
            async for response in behavior(parse(request), context):
                yield response
        except Exception as error:
            await _answer(context, error)

    return guarded
