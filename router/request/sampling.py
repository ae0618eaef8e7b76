"""Sampling and stopping parameters: the check of their values, and the values that apply where a request or its model
sets none.

Pure. The ranges of `inflight.common.parameters` hold for requests and for the defaults that an executor reports.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from inflight.common.errors import FieldViolation
from inflight.common.parameters import NEUTRAL_SAMPLING, SAMPLING_NUMBERS
from inflight.common.protocol import (
    MAX_ALLOWED_TOKEN_IDS,
    MAX_BAD_WORD_IDS,
    MAX_BAD_WORD_SEQUENCES,
    MAX_BAD_WORDS,
    MAX_LOGIT_BIAS,
    MAX_LOGIT_BIASES,
    MAX_STOP_TOKEN_IDS,
)
from inflight.v1 import types_pb2

MAX_BAD_WORD_CHARACTERS = 1024
MAX_STOPS = 64
MAX_STOP_CHARACTERS = 1024

Violations = Iterator[FieldViolation]


# Values of a request replace those of its model; both fields together are the list of bad words.
_LISTS = (("logit_bias",), ("allowed_token_ids",), ("bad_words", "bad_word_ids"))
_DEFAULTS = types_pb2.SamplingParams(**NEUTRAL_SAMPLING)


def sampling_violations(sampling: types_pb2.SamplingParams, vocabulary_size: int) -> Violations:
    """Yields what is wrong with the parameters of a request, or with a model's defaults."""
    for parameter in SAMPLING_NUMBERS:
        value = getattr(sampling, parameter.name)
        if sampling.HasField(parameter.name) and not parameter.allows(value):
            shown = f"{value:g}" if isinstance(value, float) else f"{value}"
            yield FieldViolation(parameter.field, f"is {shown}; must be {parameter.rule}")
    yield from _bias_violations(sampling, vocabulary_size)
    yield from _allowed_id_violations(sampling, vocabulary_size)
    yield from _bad_word_violations(sampling)
    yield from _bad_word_id_violations(sampling, vocabulary_size)


def _bias_violations(sampling: types_pb2.SamplingParams, vocabulary_size: int) -> Violations:
    if len(sampling.logit_bias) > MAX_LOGIT_BIASES:
        yield _too_many("sampling.logit_bias", len(sampling.logit_bias), "ids", MAX_LOGIT_BIASES)
        return
    for token_id, bias in sorted(sampling.logit_bias.items()):
        field = f"sampling.logit_bias[{token_id}]"
        if token_id >= vocabulary_size:
            yield outside_violation(field, token_id, vocabulary_size)
        elif not abs(bias) <= MAX_LOGIT_BIAS:
            rule = f"at least -{MAX_LOGIT_BIAS:g} and at most {MAX_LOGIT_BIAS:g}"
            yield FieldViolation(field, f"is {bias:g}; must be {rule}")


def _allowed_id_violations(sampling: types_pb2.SamplingParams, vocabulary_size: int) -> Violations:
    ids = sampling.allowed_token_ids
    if len(ids) > MAX_ALLOWED_TOKEN_IDS:
        yield _too_many("sampling.allowed_token_ids", len(ids), "ids", MAX_ALLOWED_TOKEN_IDS)
        return
    outside = first_outside(ids, vocabulary_size)
    if outside is not None:
        yield outside_violation(f"sampling.allowed_token_ids[{outside}]", ids[outside], vocabulary_size)


def _bad_word_violations(sampling: types_pb2.SamplingParams) -> Violations:
    if len(sampling.bad_words) > MAX_BAD_WORDS:
        yield _too_many("sampling.bad_words", len(sampling.bad_words), "texts", MAX_BAD_WORDS)
        return
    for i, word in enumerate(sampling.bad_words):
        if not 1 <= len(word) <= MAX_BAD_WORD_CHARACTERS:
            text = f"has {len(word)} characters; must have 1 to {MAX_BAD_WORD_CHARACTERS}"
            yield FieldViolation(f"sampling.bad_words[{i}]", text)


def _bad_word_id_violations(sampling: types_pb2.SamplingParams, vocabulary_size: int) -> Violations:
    field, sequences = "sampling.bad_word_ids", sampling.bad_word_ids
    if len(sequences) > MAX_BAD_WORD_SEQUENCES:
        yield _too_many(field, len(sequences), "sequences", MAX_BAD_WORD_SEQUENCES)
        return
    num_ids = sum(len(sequence.ids) for sequence in sequences)
    if num_ids > MAX_BAD_WORD_IDS:
        yield _too_many(field, num_ids, "ids", MAX_BAD_WORD_IDS)
        return
    for i, sequence in enumerate(sequences):
        outside = first_outside(sequence.ids, vocabulary_size)
        if not sequence.ids:
            yield FieldViolation(f"{field}[{i}].ids", "is empty; a sequence needs at least one id")
        elif outside is not None:
            yield outside_violation(f"{field}[{i}].ids[{outside}]", sequence.ids[outside], vocabulary_size)


def _too_many(field: str, count: int, what: str, most: int) -> FieldViolation:
    return FieldViolation(field, f"has {count} {what}; at most {most} are allowed")


def stopping_violations(stopping: types_pb2.StoppingParams, vocabulary_size: int) -> Violations:
    """Yields what is wrong with the stopping parameters of a request."""
    if stopping.HasField("max_tokens"):
        if stopping.max_tokens == 0:
            yield FieldViolation("stopping.max_tokens", "is 0; must be at least 1")
        elif stopping.min_tokens > stopping.max_tokens:
            yield min_tokens_violation(stopping.min_tokens, stopping.max_tokens)
    if len(stopping.stop) > MAX_STOPS:
        yield FieldViolation("stopping.stop", f"has {len(stopping.stop)} texts; at most {MAX_STOPS} are allowed")
    for i, stop in enumerate(stopping.stop[:MAX_STOPS]):
        if not 1 <= len(stop) <= MAX_STOP_CHARACTERS:
            yield FieldViolation(
                f"stopping.stop[{i}]", f"has {len(stop)} characters; must have 1 to {MAX_STOP_CHARACTERS}"
            )
    if len(stopping.stop_token_ids) > MAX_STOP_TOKEN_IDS:
        yield FieldViolation(
            "stopping.stop_token_ids",
            f"has {len(stopping.stop_token_ids)} ids; at most {MAX_STOP_TOKEN_IDS} are allowed",
        )
    for i, token_id in enumerate(stopping.stop_token_ids[:MAX_STOP_TOKEN_IDS]):
        if token_id >= vocabulary_size:
            yield outside_violation(f"stopping.stop_token_ids[{i}]", token_id, vocabulary_size)


def min_tokens_violation(min_tokens: int, max_tokens: int) -> FieldViolation:
    """Makes the violation for more `min_tokens` than `max_tokens`."""
    return FieldViolation("stopping.min_tokens", f"is {min_tokens}; must be at most max_tokens, which is {max_tokens}")


def first_outside(ids: Sequence[int], vocabulary_size: int) -> int | None:
    """Returns the index of the first id that the model does not have."""
    if max(ids, default=0) < vocabulary_size:
        return None
    return next(i for i, token_id in enumerate(ids) if token_id >= vocabulary_size)


def outside_violation(field: str, token_id: int, vocabulary_size: int) -> FieldViolation:
    """Makes the violation for an id that the model does not have."""
    return FieldViolation(
        field,
        f"token id {token_id} is outside the model's vocabulary of {vocabulary_size} ids (0 to {vocabulary_size - 1})",
    )


def resolve_sampling(
    asked: types_pb2.SamplingParams, defaults: types_pb2.SamplingParams, choose_seed: Callable[[], int]
) -> types_pb2.SamplingParams:
    """Returns the request's values, else the model's generation config, else the protocol's defaults. Every value is
    set, as `Accepted` and `Submit` carry it. Calls `choose_seed` if the request brings no seed."""
    resolved = types_pb2.SamplingParams()
    resolved.CopyFrom(_DEFAULTS)
    resolved.MergeFrom(defaults)
    for fields in _LISTS:
        if any(getattr(asked, name) for name in fields):
            for name in fields:
                resolved.ClearField(name)
    resolved.MergeFrom(asked)
    resolved.seed = asked.seed if asked.HasField("seed") else choose_seed()
    resolved.typical_p = 1.0
    return resolved
