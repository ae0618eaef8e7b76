"""Access to a request that a caller names, and the position from which the caller wants its output.

A caller proves its access by the resume token that only its client got, or as an operator. Any other caller gets the
answer for an unknown request.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from inflight.common.errors import FieldViolation, invalid
from inflight.common.protocol import MAX_CHOICES
from inflight.router.auth.caller import Caller, effective_tenant, sees_model
from inflight.router.auth.resume_token import ResumeTokens
from inflight.router.dispatch.pools import ModelPool, ModelPools
from inflight.router.request.delivery import ReadPosition
from inflight.router.request.errors import beyond_output, unknown_request
from inflight.router.request.ids import choice_ids, ledger_id
from inflight.router.stream.request_stream import RequestStream
from inflight.v1 import inference_pb2


def resumed_positions(request: inference_pb2.ResumeRequest, num_choices: int) -> tuple[ReadPosition, ...]:
    """Returns how far the client of a resumed request has read each of the first choices, at least one. The request
    generates `num_choices`."""
    for field, values in (("offsets", request.offsets), ("text_bytes", request.text_bytes)):
        if len(values) > num_choices:
            has = "one choice" if num_choices == 1 else f"{num_choices} choices"
            raise invalid(FieldViolation(field, f"has {len(values)} values; the request has {has}"))
    positions = []
    for choice in range(max(1, len(request.offsets), len(request.text_bytes))):
        offset = request.offsets[choice] if choice < len(request.offsets) else 0
        text_bytes = request.text_bytes[choice] if choice < len(request.text_bytes) else None
        positions.append(ReadPosition(offset, text_bytes, is_started=bool(offset or text_bytes)))
    return tuple(positions)


def check_positions(positions: Sequence[ReadPosition], streams: Sequence[RequestStream]) -> None:
    """Raises `RequestError` if a client claims to have read more than there is. For output that is still on its way
    from an executor, and for choices that are numbered by rank, this is only known at the end."""
    for choice, (position, stream) in enumerate(zip(positions, streams, strict=False)):
        assert stream.delivery is not None
        is_known = not (stream.was_adopted or stream.delivery.picks_best)
        most = len(stream.output_ids) if is_known else stream.delivery.accepted.max_tokens
        if position.offset > most:
            raise beyond_output(position.offset, most, choice)


Named = inference_pb2.CancelRequest | inference_pb2.GetRequestRequest


@dataclass(frozen=True, slots=True)
class ResumeGrant:
    """Access to a request: the ledger's ids of its choices, and the models that may serve it. Without `is_exact` the
    choices are all that it can have, and it has those before the first that is unknown."""

    choices: tuple[str, ...]
    pools: tuple[ModelPool, ...]
    is_exact: bool


class ResumeAuthorizer:
    """Grants access by resume tokens, and to operators."""

    def __init__(self, pools: ModelPools, tokens: ResumeTokens) -> None:
        self._pools = pools
        self._tokens = tokens

    def grant(self, request: Named, caller: Caller) -> ResumeGrant:
        """Returns what a caller may do with a request that it names. Raises `RequestError`."""
        _check_id(request.request_id)
        if request.model and not sees_model(caller, request.model):
            raise unknown_request()
        pools = self._pools.find_all(request.model, caller.models) if request.model else None
        if not request.resume_token and caller.is_operator:
            pools = pools or self._pools.find_all("", caller.models)
            named_id = ledger_id(effective_tenant(caller, request.tenant), request.request_id)
            return ResumeGrant(choice_ids(named_id, MAX_CHOICES), pools, is_exact=False)
        grant = self.grant_by_token(request.request_id, request.resume_token, caller)
        if pools is not None and grant.pools[0] not in pools:
            raise unknown_request()
        return grant

    def grant_by_token(self, request_id: str, token: str, caller: Caller) -> ResumeGrant:
        """Like `grant`, for access that requires the token."""
        _check_id(request_id)
        subject = self._tokens.read(token, request_id)
        is_own = subject is not None and (caller.is_operator or caller.tenant in (None, subject.tenant))
        pool = self._pools.by_name.get(subject.pool) if subject is not None and is_own else None
        if subject is None or pool is None:
            raise unknown_request()
        return ResumeGrant(
            choice_ids(ledger_id(subject.tenant, request_id), subject.num_choices), (pool,), is_exact=True
        )


def _check_id(request_id: str) -> None:
    if not request_id:
        raise invalid(FieldViolation("request_id", "must not be empty"))
