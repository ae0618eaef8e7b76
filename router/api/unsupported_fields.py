"""Fields of the protocol whose function is not built yet.

A request that sets one to anything but its neutral value is refused; it is never served without the function. The
change that builds a function removes its line here.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from google.protobuf.message import Message

from common.errors import FieldViolation, Reason, RequestError, not_implemented
from inflight.v1 import inference_pb2, types_pb2


@dataclass(frozen=True, slots=True)
class UnbuiltField:
    """A field, its function, and the values that ask for nothing. An unset field asks for nothing either."""

    path: str
    function: str
    neutral: tuple[float, ...] = ()


UNBUILT_SAMPLING = (
    UnbuiltField("min_p", "min-p sampling is", (0.0,)),
    UnbuiltField("typical_p", "locally typical sampling is", (1.0,)),
    UnbuiltField("presence_penalty", "the presence penalty is", (0.0,)),
    UnbuiltField("frequency_penalty", "the frequency penalty is", (0.0,)),
    UnbuiltField("repetition_penalty", "the repetition penalty is", (1.0,)),
    UnbuiltField("logit_bias", "logit bias is"),
    UnbuiltField("allowed_token_ids", "a list of allowed token ids is"),
    UnbuiltField("bad_words", "a list of bad words is"),
)

UNBUILT = (
    *(UnbuiltField(f"sampling.{unbuilt.path}", unbuilt.function, unbuilt.neutral) for unbuilt in UNBUILT_SAMPLING),
    UnbuiltField("n", "more than one choice is", (1,)),
    UnbuiltField("best_of", "choosing the best of several is", (1,)),
    UnbuiltField("constraint.json_schema", "constrained output is"),
    UnbuiltField("constraint.regex", "constrained output is"),
    UnbuiltField("constraint.grammar", "constrained output is"),
    UnbuiltField("constraint.choice", "constrained output is"),
    UnbuiltField("output.prompt_logprobs", "reporting log probabilities of prompts is"),
    UnbuiltField("output.echo", "echoing the prompt is"),
    UnbuiltField("output.coalesce_ms", "holding tokens back to send fewer events is"),
    UnbuiltField("adapter_id", "serving LoRA adapters is"),
)


def refuse_unsupported(request: inference_pb2.GenerateRequest) -> None:
    """Raises `RequestError` naming every field that asks for an unsupported function."""
    violations = [
        violation
        for unbuilt in UNBUILT
        if _asks_for(request, unbuilt)
        for violation in not_implemented(unbuilt.path, unbuilt.function).violations
    ]
    if violations:
        raise _refusal(violations)


def unsupported_defaults(default_sampling: types_pb2.SamplingParams) -> Iterator[str]:
    """Yields the fields of a model's generation config that have no effect, for a warning at start."""
    for unbuilt in UNBUILT_SAMPLING:
        if _asks_for(default_sampling, unbuilt):
            yield unbuilt.path


def _refusal(violations: list[FieldViolation]) -> RequestError:
    text = "; ".join(f"{violation.field}: {violation.description}" for violation in violations)
    return RequestError(Reason.NOT_IMPLEMENTED, text, tuple(violations))


def _asks_for(message: Message, unbuilt: UnbuiltField) -> bool:
    parent_path, _, name = unbuilt.path.rpartition(".")
    parent: Any = attrgetter(parent_path)(message) if parent_path else message
    if parent.DESCRIPTOR.fields_by_name[name].has_presence:
        return parent.HasField(name) and getattr(parent, name) not in unbuilt.neutral
    value = getattr(parent, name)
    return bool(value) and value not in unbuilt.neutral
