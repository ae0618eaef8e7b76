"""gRPC edge of errors: it turns a `RequestError` into a status with details, for every handler of a server.

`ErrorInterceptor` wraps all handlers of a server, so that services raise `RequestError` and need no gRPC statuses. Any
other exception of a handler is logged with its traceback and answered with INTERNAL without details. Bytes that do not
parse as the request's type (invalid UTF-8 in a string field, say) are INVALID_ARGUMENT, and so is a message with more
fields than `WireLimits` allow, which is not parsed. A caller without access is refused before its message is received.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

import grpc
import grpc.aio
from google.protobuf import any_pb2, duration_pb2, message
from google.rpc import code_pb2, error_details_pb2, status_pb2

from inflight.common.errors import DETAILS_KEY, FieldViolation, Reason, RequestError, invalid
from inflight.common.rpc.wire_counts import DEFAULT_LIMITS, WireCounts, WireLimits

log = logging.getLogger(__name__)

ERROR_DOMAIN = "inflight"

Parse = Callable[[bytes], Any]
Behavior = TypeVar("Behavior", bound=Callable[..., Any])

TAKES_UNPARSED = "takes_unparsed"


@dataclass(frozen=True, slots=True)
class Unparsed:
    """A message of a stream that could not be parsed, and why."""

    serialized: bytes
    error: RequestError


def takes_unparsed(behavior: Behavior) -> Behavior:
    """Marks a handler of streams that gets `Unparsed` for a message that cannot be parsed. Any other call ends then."""
    setattr(behavior, TAKES_UNPARSED, True)
    return behavior


# Status and details are sent in HTTP/2 headers, of which the peer accepts 8 KiB by default; with more the whole answer
# is lost. The text is percent-encoded there, at most thrice its size, the details are in base64.
MAX_STATUS_TEXT_BYTES = 1024
MAX_VIOLATIONS_BYTES = 2048
MAX_FIELD_BYTES = 256
MAX_DESCRIPTION_BYTES = 512


def to_rpc_status(error: RequestError) -> status_pb2.Status:
    """Returns the `google.rpc.Status` of an error, with the details that apply."""
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
    """Returns the first violations, as many as fit."""
    bad_request = error_details_pb2.BadRequest()
    for violation in violations:
        field, description = _cut(violation.field, MAX_FIELD_BYTES), _cut(violation.description, MAX_DESCRIPTION_BYTES)
        bad_request.field_violations.add(field=field, description=description)
        if bad_request.ByteSize() > MAX_VIOLATIONS_BYTES:
            del bad_request.field_violations[-1]
            break
    return bad_request


def _cut(text: str, max_bytes: int) -> str:
    """Returns the longest beginning of a text with at most `max_bytes` in UTF-8."""
    return text.encode(errors="replace")[:max_bytes].decode(errors="ignore")


def _pack(status: status_pb2.Status, detail: message.Message) -> None:
    packed = any_pb2.Any()
    packed.Pack(detail)
    status.details.append(packed)


async def abort(context: grpc.aio.ServicerContext[Any, Any], error: RequestError) -> NoReturn:
    """Ends the RPC with the error's status, or as a cancelled one if the connection is gone."""
    status = to_rpc_status(error)
    try:
        await context.abort(error.code, status.message, ((DETAILS_KEY, status.SerializeToString()),))
    except grpc.aio.InternalError as gone:
        raise asyncio.CancelledError from gone
    raise AssertionError("abort returned")


CheckPeer = Callable[[grpc.aio.ServicerContext[Any, Any]], None]
"""Raises `RequestError` if the sender of the call has no access."""


CheckCaller = Callable[[str, Sequence[tuple[str, Any]]], None]
"""Raises `RequestError` if a call of this method, with this metadata, is not allowed."""


class ErrorInterceptor(grpc.aio.ServerInterceptor):
    """Turns exceptions of handlers into statuses, as the module's docstring describes.

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
        assert not handler.request_streaming or handler.response_streaming, (
            "no service of this project has such a method"
        )
        if self._check_caller is not None:
            try:
                self._check_caller(handler_call_details.method, _metadata(handler_call_details))
            except RequestError as error:
                return _refusal(error)
        check_peer, parse = self._check_peer, self._parser(handler_call_details.method, handler.request_deserializer)
        # A unary request is parsed where its errors can be answered: gRPC has no status for those of a deserializer.
        if handler.unary_unary:
            return grpc.unary_unary_rpc_method_handler(
                _guard_unary(handler.unary_unary, check_peer, parse), None, handler.response_serializer
            )
        if handler.unary_stream:
            return grpc.unary_stream_rpc_method_handler(
                _guard_stream(handler.unary_stream, check_peer, parse), None, _unless_bytes(handler.response_serializer)
            )
        if hasattr(handler.stream_stream, TAKES_UNPARSED):
            parse = _parsed_or_not(parse)
        return grpc.stream_stream_rpc_method_handler(
            _guard_stream(handler.stream_stream, check_peer, _unchanged),
            parse,
            _unless_bytes(handler.response_serializer),
        )

    def _parser(self, method: str, deserialize: Parse) -> Parse:
        """Returns the parser of a method's requests, which raises `RequestError` or `DecodeError`."""
        parser = self._parsers.get(method)
        if parser is None:
            parser = self._parsers[method] = _checked(deserialize, self._wire_limits)
        return parser


def _unless_bytes(serialize: Callable[[Any], bytes]) -> Callable[[Any], bytes]:
    """Returns a serializer that leaves a response as it is if the handler has serialized it."""

    def serialized(response: Any) -> bytes:
        return response if type(response) is bytes else serialize(response)

    return serialized


def _checked(deserialize: Parse, limits: WireLimits) -> Parse:
    # `FromString` of a message class, which knows the type.
    counts = WireCounts(deserialize.__self__.DESCRIPTOR, limits)  # type: ignore[attr-defined]

    def parse(serialized: bytes) -> Any:
        counts.check(serialized)
        return deserialize(serialized)

    return parse


def _parsed_or_not(parse: Parse) -> Parse:
    def parsed(serialized: bytes) -> Any:
        try:
            return parse(serialized)
        except RequestError as error:
            return Unparsed(serialized, error)
        except message.DecodeError:
            return Unparsed(serialized, _malformed())

    return parsed


def _metadata(details: grpc.HandlerCallDetails) -> Sequence[tuple[str, Any]]:
    return tuple(details.invocation_metadata or ())


def _refusal(error: RequestError) -> Any:
    """Returns a handler that answers any call with an error. A handler of streams receives requests only when it reads
    them."""

    async def refuse(requests: Any, context: grpc.aio.ServicerContext[Any, Any]) -> None:
        await abort(context, error)

    return grpc.stream_stream_rpc_method_handler(refuse)


def _unchanged(request: Any) -> Any:
    return request


def _admit_all(context: grpc.aio.ServicerContext[Any, Any]) -> None:
    """Accepts every peer that can connect."""


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
    """Wraps a streaming handler, which is an async generator or a coroutine that writes to its context, as the same
    kind."""
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
