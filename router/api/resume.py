"""Access to a request that a caller names, and the position from which the caller wants its output.

A caller proves its access by the resume token that only its client got, or as an operator. Every invalid claim gets the
answer for an unknown request.
"""

from __future__ import annotations

from common.errors import FieldViolation, invalid
from inflight.v1 import inference_pb2
from router.auth.caller import Caller, effective_tenant, sees_model
from router.auth.resume_token import ResumeTokens
from router.dispatch.pools import ModelBackend, ModelRegistry
from router.request.errors import beyond_output, unknown_request
from router.request.ids import ledger_id
from router.request.spec import ReadPosition
from router.stream.request_stream import RequestStream


def resumed_place(request: inference_pb2.ResumeRequest) -> ReadPosition:
    """Returns how far the client of a resumed request has read."""
    for field, values in (("offsets", request.offsets), ("text_bytes", request.text_bytes)):
        if len(values) > 1:
            raise invalid(FieldViolation(field, f"has {len(values)} values; the request has one choice"))
    offset = request.offsets[0] if request.offsets else 0
    text_bytes = request.text_bytes[0] if request.text_bytes else None
    return ReadPosition(offset, text_bytes, is_started=bool(offset or text_bytes))


def check_place(place: ReadPosition, stream: RequestStream) -> None:
    """Raises `RequestError` if a client claims to have read more than there is. For output that is still on its way
    from an executor this is only known at its end."""
    assert stream.reading is not None
    most = stream.reading.accepted.max_tokens if stream.was_adopted else len(stream.output_ids)
    if place.offset > most:
        raise beyond_output(place.offset, most)


Named = inference_pb2.CancelRequest | inference_pb2.GetRequestRequest


class ResumeAuthorizer:
    """Checks callers' claims against resume tokens."""

    def __init__(self, pools: ModelRegistry, tokens: ResumeTokens) -> None:
        self._pools = pools
        self._tokens = tokens

    def claim(self, request: Named, caller: Caller) -> tuple[str, tuple[ModelBackend, ...]]:
        """Returns the ledger's id of the request, and the models that may serve it. Raises `RequestError`."""
        _check_id(request.request_id)
        if request.model and not sees_model(caller, request.model):
            raise unknown_request()
        pools = self._pools.find_all(request.model, caller.models) if request.model else None
        if not request.resume_token and caller.is_operator:
            pools = pools or self._pools.find_all("", caller.models)
            return ledger_id(effective_tenant(caller, request.tenant), request.request_id), pools
        named_id, pool = self.claim_by_token(request.request_id, request.resume_token, caller)
        if pools is not None and pool not in pools:
            raise unknown_request()
        return named_id, (pool,)

    def claim_by_token(self, request_id: str, token: str, caller: Caller) -> tuple[str, ModelBackend]:
        """Like `claim`, for access that requires the token."""
        _check_id(request_id)
        subject = self._tokens.read(token, request_id)
        is_own = subject is not None and (caller.is_operator or caller.tenant in (None, subject.tenant))
        pool = self._pools.by_name.get(subject.pool) if subject is not None and is_own else None
        if subject is None or pool is None:
            raise unknown_request()
        return ledger_id(subject.tenant, request_id), pool


def _check_id(request_id: str) -> None:
    if not request_id:
        raise invalid(FieldViolation("request_id", "must not be empty"))
