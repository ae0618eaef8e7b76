"""Conversion of a router's `Submit` to a `Sequence`. The executor validates every value that could affect the batch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from itertools import chain
from typing import Any, Literal

import numpy as np

from inflight.common.grammar import grammar_violation
from inflight.common.parameters import NEUTRAL_SAMPLING, SAMPLING_NUMBERS
from inflight.common.protocol import (
    ADAPTER_HASH,
    MAX_ALLOWED_TOKEN_IDS,
    MAX_BAD_WORD_IDS,
    MAX_BAD_WORD_SEQUENCES,
    MAX_DRAFTS,
    MAX_FRAME_INTERVAL,
    MAX_INTER_TOKEN_TARGET_MS,
    MAX_LOGIT_BIAS,
    MAX_LOGIT_BIASES,
    MAX_STOP_TOKEN_IDS,
    MAX_TOP_LOGPROBS,
)
from inflight.executor.pooling.pooled import PooledOutput, Pooling, PoolingKind
from inflight.executor.scheduler.limits import InterTokenTargets
from inflight.executor.scheduler.sequence import Constraint, Processors, Sampling, Sequence, Stopping
from inflight.v1 import executor_pb2, types_pb2

# The larger is served first. An unknown class counts as standard.
PRIORITIES: dict[int, int] = {
    types_pb2.PRIORITY_CLASS_INTERACTIVE: 1,
    types_pb2.PRIORITY_CLASS_STANDARD: 0,
    types_pb2.PRIORITY_CLASS_BATCH: -1,
}

# A tenant's name, a slash and the client's own id, with a margin.
MAX_REQUEST_ID_CHARACTERS = 512

# Below it a row is greedy, as in vLLM: divided by less, logits leave the range of float32, and backends would differ.
# Rounded as the protocol's values are.
MIN_TEMPERATURE = float(np.float32(1e-5))


@dataclass(frozen=True, slots=True)
class SubmissionLimits:
    """Limits of the model and of drafts, and the targets of sequences that bring none.

    `pooling` is how the model makes embeddings or scores; None: it makes none. `unsupported` returns what the engine
    cannot do for a sequence, in words; empty if it can do all.
    """

    context_length: int
    vocabulary_size: int
    eos_token_ids: frozenset[int]
    inter_token_targets: InterTokenTargets = field(default_factory=InterTokenTargets)
    max_drafts: int = 0
    num_adapter_slots: int = 0
    pooling: Pooling | None = None
    unsupported: Callable[[Sequence], str] = lambda sequence: ""


class SubmissionError(Exception):
    """A submit that is invalid or that this executor does not support."""

    def __init__(self, reason: executor_pb2.RejectReason, text: str) -> None:
        super().__init__(text)
        self.reason = reason


def sequence_from_submit(submit: executor_pb2.Submit, limits: SubmissionLimits) -> Sequence:
    """Builds the sequence; raises `SubmissionError`.

    A temperature near 0 becomes greedy here. The placement keeps the submitted value, and so does a resume.
    """
    if not 0 < len(submit.request_id) <= MAX_REQUEST_ID_CHARACTERS or not submit.request_id.isprintable():
        raise _invalid(f"request_id must be 1 to {MAX_REQUEST_ID_CHARACTERS} printable characters")
    _refuse_unsupported(submit)
    num_ids = len(submit.prompt_ids) + len(submit.prior_output_ids)
    if num_ids > limits.context_length:
        raise _invalid(f"{num_ids} tokens do not fit the context of {limits.context_length} tokens")
    token_ids = [*submit.prompt_ids, *submit.prior_output_ids]
    if not submit.prompt_ids:
        raise _invalid("prompt_ids is empty")
    if max(token_ids) >= limits.vocabulary_size:
        raise _invalid(f"a token id is not below {limits.vocabulary_size}")
    max_tokens = submit.stopping.max_tokens
    pooled = _pooled(submit, limits.pooling)
    if pooled is None and not len(submit.prior_output_ids) < max_tokens <= limits.context_length - len(
        submit.prompt_ids
    ):
        raise _invalid(f"max_tokens {max_tokens} does not fit the context of {limits.context_length} tokens")
    if submit.stream_interval > MAX_FRAME_INTERVAL:
        raise _invalid(f"stream_interval must be at most {MAX_FRAME_INTERVAL}")
    stop_token_ids = frozenset(submit.stopping.stop_token_ids)
    # A constrained sequence ends at its grammar's end, even if eos is ignored.
    if submit.HasField("constraint") or not submit.stopping.ignore_eos:
        stop_token_ids |= limits.eos_token_ids
    if len(submit.stopping.stop_token_ids) > MAX_STOP_TOKEN_IDS:
        raise _invalid(f"at most {MAX_STOP_TOKEN_IDS} stop token ids are allowed")
    if max(submit.stopping.stop_token_ids, default=0) >= limits.vocabulary_size:
        raise _invalid(f"a stop token id is not below {limits.vocabulary_size}")
    priority = PRIORITIES.get(submit.priority, 0)
    numbers = _numbers(submit.sampling)
    sequence = Sequence(
        request_id=submit.request_id,
        attempt=submit.attempt,
        token_ids=token_ids,
        num_prompt_tokens=len(submit.prompt_ids),
        sampling=Sampling(seed=submit.sampling.seed, **_fields_of(Sampling, numbers)),
        stopping=Stopping(max_tokens, submit.stopping.min_tokens, stop_token_ids),
        num_reserved_blocks=submit.reserved_blocks,
        cache_salt=None if submit.cache_bypass else submit.cache_salt,
        priority=priority,
        inter_token_target_ms=_inter_token_target_ms(submit, limits.inter_token_targets.of(priority)),
        num_top_logprobs=_num_likeliest(submit, "num_top_logprobs"),
        num_prompt_logprobs=_num_likeliest(submit, "num_prompt_logprobs"),
        processors=_processors(submit.sampling, numbers, limits.vocabulary_size),
        constraint=_constraint(submit, limits.eos_token_ids),
        max_drafts=_max_drafts(submit, limits.max_drafts),
        adapter_hash=_adapter_hash(submit.adapter_hash, limits.num_adapter_slots),
        pooled=pooled,
        tenant=_account_name(submit, "tenant"),
        adapter_name=_account_name(submit, "adapter_name"),
        exact_resume=submit.exact_resume,
    )
    if text := limits.unsupported(sequence):
        raise SubmissionError(executor_pb2.REJECT_REASON_UNSUPPORTED, text)
    return sequence


def _pooled(submit: executor_pb2.Submit, pooling: Pooling | None) -> PooledOutput | None:
    if not submit.HasField("pooled"):
        if pooling is not None and pooling.is_only:
            raise SubmissionError(executor_pb2.REJECT_REASON_UNSUPPORTED, "this model does not generate")
        return None
    if pooling is None:
        raise SubmissionError(executor_pb2.REJECT_REASON_UNSUPPORTED, "pooled: this executor makes no embeddings")
    others = [name for name in ("constraint", "num_top_logprobs", "num_prompt_logprobs") if submit.HasField(name)]
    if others or submit.prior_output_ids or submit.stopping.max_tokens:
        raise _invalid("pooled: a sequence that yields no token has no output")
    dimensions = submit.pooled.dimensions
    if dimensions > pooling.size or (dimensions and pooling.kind is PoolingKind.SCORE):
        raise _invalid(f"pooled.dimensions must be at most {pooling.size}, and 0 for a score")
    return PooledOutput(pooling, dimensions)


def _adapter_hash(digits: str, num_slots: int) -> bytes:
    if not digits:
        return b""
    if not ADAPTER_HASH.fullmatch(digits):
        raise _invalid("adapter_hash must have 64 lower-case hexadecimal digits")
    if not num_slots:
        text = "adapter_hash: this executor serves no adapters"
        raise SubmissionError(executor_pb2.REJECT_REASON_UNSUPPORTED, text)
    return bytes.fromhex(digits)


def _account_name(submit: executor_pb2.Submit, field: Literal["tenant", "adapter_name"]) -> str:
    name: str = getattr(submit, field)
    if len(name) > MAX_REQUEST_ID_CHARACTERS or (name and not name.isprintable()):
        raise _invalid(f"{field} must have at most {MAX_REQUEST_ID_CHARACTERS} printable characters")
    return name


def _max_drafts(submit: executor_pb2.Submit, most: int) -> int:
    if submit.max_drafts > MAX_DRAFTS:
        raise _invalid(f"max_drafts must be at most {MAX_DRAFTS}")
    return min(submit.max_drafts, most) if submit.HasField("max_drafts") else most


def _constraint(submit: executor_pb2.Submit, eos_token_ids: frozenset[int]) -> Constraint | None:
    if not submit.HasField("constraint"):
        return None
    grammar, key = submit.constraint.grammar, submit.constraint.hash
    if (violation := grammar_violation(grammar, key)) is not None:
        raise _invalid(f"constraint: {violation}")
    return Constraint(grammar, key, eos_token_ids, ignores_eos=submit.stopping.ignore_eos)


def _inter_token_target_ms(submit: executor_pb2.Submit, default_ms: float | None) -> float | None:
    if not submit.HasField("inter_token_target_ms"):
        return default_ms
    if not 1 <= submit.inter_token_target_ms <= MAX_INTER_TOKEN_TARGET_MS:
        raise _invalid(f"inter_token_target_ms must be in [1, {MAX_INTER_TOKEN_TARGET_MS}]")
    return submit.inter_token_target_ms


def _num_likeliest(
    submit: executor_pb2.Submit, field: Literal["num_top_logprobs", "num_prompt_logprobs"]
) -> int | None:
    if not submit.HasField(field):
        return None
    count: int = getattr(submit, field)
    if count > MAX_TOP_LOGPROBS:
        raise _invalid(f"{field} must be at most {MAX_TOP_LOGPROBS}")
    return count


def _numbers(sampling: types_pb2.SamplingParams) -> dict[str, Any]:
    """Returns the checked numbers, neutral where a number is not set."""
    numbers = {
        name: getattr(sampling, name) if sampling.HasField(name) else neutral
        for name, neutral in NEUTRAL_SAMPLING.items()
    }
    for parameter in SAMPLING_NUMBERS:
        if not parameter.allows(numbers[parameter.name]):
            raise _invalid(f"{parameter.field} must be {parameter.rule}")
    if numbers["temperature"] < MIN_TEMPERATURE:
        numbers["temperature"] = 0.0
    return numbers


def _fields_of(kind: type[Sampling] | type[Processors], numbers: Mapping[str, Any]) -> dict[str, Any]:
    return {one.name: numbers[one.name] for one in fields(kind) if one.name in numbers}


def _processors(sampling: types_pb2.SamplingParams, numbers: Mapping[str, Any], vocabulary_size: int) -> Processors:
    if not all(-MAX_LOGIT_BIAS <= value <= MAX_LOGIT_BIAS for value in sampling.logit_bias.values()):
        raise _invalid(f"sampling.logit_bias must be in [{-MAX_LOGIT_BIAS:g}, {MAX_LOGIT_BIAS:g}]")
    words = tuple(tuple(word.ids) for word in sampling.bad_word_ids)
    if len(words) > MAX_BAD_WORD_SEQUENCES or not all(words) or sum(map(len, words)) > MAX_BAD_WORD_IDS:
        raise _invalid("sampling.bad_word_ids has an empty sequence or too many ids")
    if len(sampling.logit_bias) > MAX_LOGIT_BIASES or len(sampling.allowed_token_ids) > MAX_ALLOWED_TOKEN_IDS:
        raise _invalid("sampling.logit_bias or sampling.allowed_token_ids has too many ids")
    if max(chain(sampling.logit_bias, sampling.allowed_token_ids, *words), default=0) >= vocabulary_size:
        raise _invalid(f"a token id of the sampling parameters is not below {vocabulary_size}")
    return Processors(
        bias=tuple(sampling.logit_bias.items()),
        allowed_ids=frozenset(sampling.allowed_token_ids),
        bad_words=words,
        **_fields_of(Processors, numbers),
    )


def _refuse_unsupported(submit: executor_pb2.Submit) -> None:
    if submit.num_choices > 1:
        raise _unsupported("num_choices above 1")
    # Never built. Routers send the value that changes nothing.
    if submit.sampling.HasField("typical_p") and submit.sampling.typical_p != 1:
        raise _unsupported("sampling.typical_p")


def _invalid(text: str) -> SubmissionError:
    return SubmissionError(executor_pb2.REJECT_REASON_INVALID, text)


def _unsupported(field: str) -> SubmissionError:
    return SubmissionError(executor_pb2.REJECT_REASON_UNSUPPORTED, f"{field}: not implemented yet")
