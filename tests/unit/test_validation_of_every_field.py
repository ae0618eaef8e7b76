"""Coverage of request fields: each is refused as not built, or changes the meaning of the request."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator
from typing import Any, cast

import pytest
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message
from opentelemetry.trace import NoOpTracer

from inflight.common.errors import Reason, RequestError
from inflight.router.api.constraining import Compiled, Constraining
from inflight.router.api.prepare import RequestPreparation
from inflight.router.api.tokenizing import Tokenizing
from inflight.router.constraint.source import ConstraintSource
from inflight.router.request.validation import UNBUILT
from inflight.router.settings import RouterSettings
from inflight.router.text.tokenizer import TextModel
from inflight.v1 import executor_pb2, inference_pb2, resume_pb2, types_pb2
from tests.support.ledger.scripted_store import ScriptedRouter, place, placement
from tests.unit.test_tool_support import templated

# Taken as a whole, not field by field.
WHOLE = {"google.protobuf.Duration", "google.protobuf.Struct"}

SUPPORTED = frozenset(
    {
        "request_id",
        "model",
        "text",
        "text_bytes",
        "token_ids.ids",
        "chat.messages.role",
        "chat.messages.content.text",
        "chat.messages.name",
        "chat.messages.tool_calls.id",
        "chat.messages.tool_calls.name",
        "chat.messages.tool_calls.arguments",
        "chat.messages.tool_call_id",
        "chat.messages.reasoning",
        "chat.functions.name",
        "chat.functions.description",
        "chat.functions.parameters",
        "chat.functions.strict",
        "chat.functions.input_regex",
        "chat.functions.input_grammar",
        "chat.reasoning_effort",
        "chat.thinking_token_budget",
        "tool_choice.mode",
        "tool_choice.names",
        "tool_choice.parallel",
        "output.parts",
        "chat.tools",
        "chat.template_kwargs",
        "sampling.temperature",
        "sampling.top_k",
        "sampling.top_p",
        "sampling.seed",
        "sampling.min_p",
        "sampling.presence_penalty",
        "sampling.frequency_penalty",
        "sampling.repetition_penalty",
        "sampling.logit_bias",
        "sampling.allowed_token_ids",
        "sampling.bad_words",
        "sampling.bad_word_ids.ids",
        "sampling.no_repeat_ngram_size",
        "output.stream_interval",
        "stopping.max_tokens",
        "stopping.min_tokens",
        "stopping.stop",
        "stopping.stop_token_ids",
        "stopping.include_stop",
        "stopping.ignore_eos",
        "constraint.json_schema",
        "constraint.json_object",
        "constraint.regex",
        "constraint.grammar",
        "constraint.choice",
        "constraint.max_whitespace",
        "output.text",
        "output.resources",
        "output.token_ids",
        "output.logprobs",
        "output.top_logprobs",
        "output.prompt_logprobs",
        "output.top_prompt_logprobs",
        "output.echo",
        "priority",
        "inter_token_target_ms",
        "max_drafts",
        "exact_resume",
        "adapter_id",
        "tenant",
        "deadlines.first_token",
        "deadlines.total",
        "session_id",
        "cache.salt",
        "cache.bypass",
        "want_queue_events",
        "truncate_prompt_tokens",
        "metadata",
        "idempotency_key",
        "detach",
        "resume_ttl",
        "prior_output.output_ids",
        "prior_output.text_bytes",
        "n",
        "best_of",
    }
)
# Values of fields for which the sample of their type does not do.
SAMPLES: dict[str, Any] = {
    "chat.messages.role": "system",
    "chat.messages.tool_calls.arguments": '{"x": 1}',
    "chat.functions.name": "g",
    "chat.functions.parameters": '{"type": "object"}',
    "tool_choice.mode": inference_pb2.ToolChoice.MODE_REQUIRED,
    "tool_choice.names": "f",
    "tool_choice.parallel": False,
    "output.text": False,
    "best_of": 2,
    "n": 2,
    "sampling.top_p": 0.5,
    "sampling.typical_p": 0.5,
    "priority": types_pb2.PRIORITY_CLASS_BATCH,
}


def leaf_paths(descriptor: Any, prefix: str = "") -> Iterator[str]:
    """Every field that carries a value, by its path."""
    for field in descriptor.fields:
        path = prefix + field.name
        inner = field.message_type
        if inner is None or inner.GetOptions().map_entry or inner.full_name in WHOLE:
            yield path
        elif inner.full_name == "inflight.v1.ChoiceList":
            yield path  # refused by the field that holds it
        else:
            yield from leaf_paths(inner, path + ".")


PATHS = sorted(leaf_paths(inference_pb2.GenerateRequest.DESCRIPTOR))


def sample_of(field: Any) -> Any:
    """A value that asks for something."""
    match field.cpp_type:
        case FieldDescriptor.CPPTYPE_STRING:
            return b"x" if field.type == FieldDescriptor.TYPE_BYTES else "x"
        case FieldDescriptor.CPPTYPE_BOOL:
            return True
        case FieldDescriptor.CPPTYPE_FLOAT | FieldDescriptor.CPPTYPE_DOUBLE:
            return 0.25
        case _:
            return 3


def set_path(message: Message, path: str, full_path: str) -> None:
    """Sets one field, through the first element of repeated messages."""
    name, _, rest = path.partition(".")
    field = message.DESCRIPTOR.fields_by_name[name]
    value = getattr(message, name)
    if rest:
        inner = value if not field.is_repeated else value[0] if value else value.add()
        set_path(inner, rest, full_path)
    elif field.message_type is not None:
        set_message(field, value)
    elif field.is_repeated:
        value.append(SAMPLES.get(full_path, sample_of(field)))
    else:
        setattr(message, name, SAMPLES.get(full_path, sample_of(field)))


def set_message(field: Any, value: Any) -> None:
    """Gives a map or a message that is taken as a whole a value."""
    if field.message_type.GetOptions().map_entry:
        key, inner = (sample_of(field.message_type.fields_by_name[name]) for name in ("key", "value"))
        value[key] = inner
    elif field.message_type.full_name == "google.protobuf.Duration":
        value.seconds = 5
    elif field.message_type.full_name == "inflight.v1.ChoiceList":
        value.choices.append("x")
    else:
        (value.add() if field.is_repeated else value).update({"x": 1})


def request_for(path: str) -> inference_pb2.GenerateRequest:
    """The smallest sound request beside which one field of this path makes sense."""
    request = inference_pb2.GenerateRequest()
    if path.startswith(("chat.", "tool_choice.", "output.parts")):
        message = request.chat.messages.add(role="user")
        if ".tool_calls" in path:
            message.tool_calls.add(name="f")
        if path.startswith(("chat.functions", "tool_choice.")):
            request.chat.functions.extend(inference_pb2.Function(name=name) for name in ("f", "h"))
        if path.startswith("chat.functions.input"):
            request.chat.functions[
                0
            ].parameters = '{"properties": {"input": {"type": "string"}}, "required": ["input"]}'
        request.output.parts = path == "chat.thinking_token_budget"
    elif path not in ("text_bytes", "token_ids.ids"):
        request.text = "hello"
    if path == "constraint.max_whitespace":
        request.constraint.json_object = True
    return request


class Uncompiled:
    """Takes every constraint, and returns its text in place of a grammar."""

    async def compiled(self, source: ConstraintSource, tenant: str) -> Compiled:
        return Compiled(source.to_json())


@functools.cache
def text_model() -> TextModel:
    """A model whose prompt has everything that its template gets, and that can call functions and reason."""
    return templated(
        "{# <tool_call> <think> </think> #}{{ messages | tojson }}{{ tools | tojson }}{{ x }}{{ reasoning_effort }}"
    )


async def meaning(request: inference_pb2.GenerateRequest) -> tuple[object, ...]:
    """All that the rest of the router sees of a request: what its executor is told, and what the service reads."""
    router = ScriptedRouter("m")
    link = router.link("e0", "m", num_adapter_slots=1)
    link.report = executor_pb2.Report(adapters=[executor_pb2.AdapterStatus(name="x", hash="a" * 64)])
    pool = dataclasses.replace(router.pools.by_name["m"], text=text_model())
    pool.dispatcher._description = executor_pb2.DescribeResponse(
        block_size=16, context_length=1000, vocabulary_size=text_model().vocabulary_size, eos_token_ids=[2]
    )
    preparation = RequestPreparation(
        RouterSettings(),
        router.admission,
        router.tokens,
        Tokenizing(),
        cast(Constraining, Uncompiled()),
        NoOpTracer(),
    )
    stream, *others = await preparation.prepare(request, pool, 0.0, None)
    assert stream.delivery is not None
    submit = place(stream, placement())
    context = resume_pb2.RouterContext.FromString(submit.router_context)
    context.ClearField("arrived_unix_ms")
    if not (request.request_id or request.idempotency_key):
        submit.ClearField("request_id")
        context.ClearField("request_id")
    if not (request.sampling.HasField("seed") or request.idempotency_key):
        submit.sampling.ClearField("seed")
    submit.ClearField("router_context")
    deadlines = stream.delivery.first_token_deadline, stream.delivery.deadline
    prior = request.prior_output
    read_by_service = request.session_id, request.want_queue_events, dict(request.metadata), prior.text_bytes
    return (str(submit), str(context), deadlines, len(others), *read_by_service)


def test_every_field_is_listed_once() -> None:
    assert SUPPORTED | set(UNBUILT) == set(PATHS)
    assert SUPPORTED.isdisjoint(UNBUILT)


@pytest.mark.parametrize("path", PATHS)
async def test_field_is_refused_or_changes_what_the_request_means(path: str) -> None:
    request = request_for(path)
    set_path(request, path, path)
    if path in SUPPORTED:
        before = request_for(path)
        if before.WhichOneof("prompt") is None:
            before.text = "hello"
        assert await meaning(request) != await meaning(before)
        return
    with pytest.raises(RequestError) as caught:
        await meaning(request)
    assert caught.value.reason is Reason.NOT_IMPLEMENTED
    assert [violation.field for violation in caught.value.violations] == [path]
