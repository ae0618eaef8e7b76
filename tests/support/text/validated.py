"""A small model, and what executors are told of its requests."""

from __future__ import annotations

from typing import Any

from inflight.router.request.submit import ModelLimits, new_submit, router_context
from inflight.router.request.validation import validate_generate
from inflight.v1 import executor_pb2, inference_pb2, types_pb2

SEED = 4711
# A value that has an effect for every parameter that may have one.
ALL_SAMPLING = types_pb2.SamplingParams(
    temperature=0.5,
    top_k=4,
    top_p=0.5,
    min_p=0.25,
    typical_p=1.0,
    presence_penalty=-0.5,
    frequency_penalty=0.5,
    repetition_penalty=1.25,
    seed=7,
    logit_bias={1: 2.0, 3: -100.0},
    allowed_token_ids=[0, 1, 2, 3],
    bad_words=["t1 t2", "t4"],
    no_repeat_ngram_size=3,
    bad_word_ids=[types_pb2.TokenSequence(ids=[2, 2])],
)


def limits_of(**changes: Any) -> ModelLimits:
    """A small model."""
    values: dict[str, Any] = {
        "context_length": 100,
        "vocabulary_size": 1000,
        "eos_token_ids": frozenset({2, 3}),
        "default_sampling": types_pb2.SamplingParams(),
        "has_chat_template": True,
    }
    return ModelLimits(**(values | changes))


def requested(**fields: Any) -> inference_pb2.GenerateRequest:
    """A request with these fields, prompt "hi" unless given."""
    if not {"text", "text_bytes", "token_ids", "chat"} & fields.keys():
        fields["text"] = "hi"
    return inference_pb2.GenerateRequest(**fields)


def validated(limits: ModelLimits | None = None, **fields: Any) -> executor_pb2.Submit:
    """What an executor is told of a valid request with these fields, before its prompt is tokenized. The seed that is
    drawn for a request without one is replaced by `SEED`."""
    request, limits = requested(**fields), limits or limits_of()
    validate_generate(request, limits)
    submit = new_submit(request, router_context(request, 0.0), limits)
    if not request.sampling.HasField("seed"):
        submit.sampling.seed = SEED
    return submit
