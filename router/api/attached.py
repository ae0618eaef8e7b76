"""Checks of a request that an executor returns to a router that attaches to it.

The executor got the request from another router, so it is valid if the executor returns it unchanged. A router must not
rely on that: it submits the request again if the executor is lost. The rules are those of requests from clients.
"""

from __future__ import annotations

from collections.abc import Iterator

from inflight.common.errors import FieldViolation
from inflight.common.grammar import grammar_hash
from inflight.common.parameters import MAX_DEADLINE_S, MAX_STREAM_INTERVAL
from inflight.common.protocol import (
    ADAPTER_HASH,
    MAX_CHOICES,
    MAX_DRAFTS,
    MAX_FRAME_INTERVAL,
    MAX_GRAMMAR_BYTES,
    MAX_INTER_TOKEN_TARGET_MS,
    MAX_TOP_LOGPROBS,
)
from inflight.router.request.executor_context import FrameError, context_of
from inflight.router.request.submit import ModelLimits
from inflight.router.request.validation import (
    MAX_NAME_CHARACTERS,
    first_outside,
    outside_violation,
    sampling_violations,
    seconds_of,
    stopping_violations,
)
from inflight.router.telemetry.events import CLASS_NAMES
from inflight.router.tools.formats import FormatError, answer_format
from inflight.v1 import executor_pb2, resume_pb2, types_pb2

# A deadline that is further away counts as none.
MAX_GRPC_DEADLINE_S = 30 * 24 * 3600.0
MAX_DIGEST_BYTES = 64
OPERATIONS = frozenset({"", "chat", "text_completion", "embeddings"})

Violations = Iterator[FieldViolation]


def checked_context(attached: executor_pb2.SequenceAttached, limits: ModelLimits) -> resume_pb2.RouterContext:
    """Returns the context of a returned request. Raises `FrameError`, which names the field, if no router can have
    submitted the request."""
    context = context_of(attached)
    for violations in (_submit_violations(attached.submit, limits), _context_violations(context, limits)):
        wrong = next(violations, None)
        if wrong is not None:
            raise FrameError(f"{wrong.field} of {attached.request_id} {wrong.description}")
    return context


def _submit_violations(submit: executor_pb2.Submit, limits: ModelLimits) -> Violations:
    outside = first_outside(submit.prompt_ids, limits.vocabulary_size)
    if not submit.prompt_ids:
        yield FieldViolation("submit.prompt_ids", "is empty")
    elif outside is not None:
        token_id = submit.prompt_ids[outside]
        yield outside_violation(f"submit.prompt_ids[{outside}]", token_id, limits.vocabulary_size)
    least = 0 if submit.HasField("pooled") else 1
    if not least <= submit.stopping.max_tokens <= limits.context_length - len(submit.prompt_ids):
        text = f"is {submit.stopping.max_tokens} after {len(submit.prompt_ids)} prompt tokens"
        yield FieldViolation("submit.stopping.max_tokens", f"{text}; the context is {limits.context_length} tokens")
    for wrong in sampling_violations(submit.sampling, limits.vocabulary_size):
        yield FieldViolation(f"submit.{wrong.field}", wrong.description)
    for wrong in () if submit.HasField("pooled") else stopping_violations(submit.stopping, limits.vocabulary_size):
        yield FieldViolation(f"submit.{wrong.field}", wrong.description)
    if submit.priority not in CLASS_NAMES:
        yield FieldViolation("submit.priority", f"is {submit.priority}")
    if submit.adapter_hash and not ADAPTER_HASH.fullmatch(submit.adapter_hash):
        yield FieldViolation("submit.adapter_hash", f"is {submit.adapter_hash[:100]!r}")
    if submit.HasField("constraint") and (
        len(submit.constraint.grammar) > MAX_GRAMMAR_BYTES
        or submit.constraint.hash != grammar_hash(submit.constraint.grammar)
    ):
        yield FieldViolation("submit.constraint", "is not a grammar with its hash")
    for field, most in _MOST.items():
        if getattr(submit, field) > most:
            yield FieldViolation(f"submit.{field}", f"is {getattr(submit, field)}; the most is {most}")


_MOST = {
    "deadline_ms": int(MAX_GRPC_DEADLINE_S * 1000),
    "num_top_logprobs": MAX_TOP_LOGPROBS,
    "num_prompt_logprobs": MAX_TOP_LOGPROBS,
    "inter_token_target_ms": MAX_INTER_TOKEN_TARGET_MS,
    "max_drafts": MAX_DRAFTS,
    "stream_interval": MAX_FRAME_INTERVAL,
}


def _context_violations(context: resume_pb2.RouterContext, limits: ModelLimits) -> Violations:
    for wrong in stopping_violations(types_pb2.StoppingParams(stop=context.stop), limits.vocabulary_size):
        yield FieldViolation(wrong.field.replace("stopping", "router_context"), wrong.description)
    if context.answer_format:
        try:
            answer_format(context.answer_format)
        except FormatError as error:
            yield FieldViolation("router_context.answer_format", str(error))
    if context.operation not in OPERATIONS:
        yield FieldViolation("router_context.operation", f"is {context.operation[:100]!r}")
    if context.HasField("resume_ttl") and not 0 <= seconds_of(context.resume_ttl) <= MAX_DEADLINE_S:
        yield FieldViolation("router_context.resume_ttl", f"is {seconds_of(context.resume_ttl):g} s")
    if not context.num_sent_choices <= max(1, context.num_choices) <= MAX_CHOICES:
        text = f"is {context.num_choices}, of which {context.num_sent_choices} are sent"
        yield FieldViolation("router_context.num_choices", text)
    if context.stream_interval > MAX_STREAM_INTERVAL:
        yield FieldViolation("router_context.stream_interval", f"is {context.stream_interval}")
    if len(context.digest) > MAX_DIGEST_BYTES:
        yield FieldViolation("router_context.digest", f"has {len(context.digest)} bytes")
    for field in ("model", "adapter_id"):
        if len(getattr(context, field)) > MAX_NAME_CHARACTERS:
            yield FieldViolation(f"router_context.{field}", f"has {len(getattr(context, field))} characters")
