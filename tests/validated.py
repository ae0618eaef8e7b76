"""A small model, and what requests of it mean."""

from __future__ import annotations

from typing import Any

from inflight.v1 import inference_pb2, types_pb2
from router.api.validation import validate_generate
from router.request.spec import GenerateSpec, ModelLimits

SEED = 4711


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


def validated(limits: ModelLimits | None = None, **fields: Any) -> GenerateSpec:
    """The meaning of a request with these fields, prompt "hi" unless given."""
    if not {"text", "text_bytes", "token_ids", "chat"} & fields.keys():
        fields["text"] = "hi"
    return validate_generate(inference_pb2.GenerateRequest(**fields), limits or limits_of(), lambda: SEED)
