"""Translation of an inference request into a GenerateRequest, and the form of the answer. Pure.

Values are checked where every request's are, by `inflight.router.request.validation`; a refusal that comes back from
there names fields of a GenerateRequest, and `in_client_words` puts the client's own names in their place.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

from google.protobuf.message import Message

from inflight.common.errors import FieldViolation, RequestError, not_implemented
from inflight.common.protocol import MAX_CHOICES
from inflight.kserve import grpc_service_pb2
from inflight.router.kserve.options import OPTION_OF, OPTIONS, Given, Kind, parameter_values, read_options, wrong
from inflight.router.kserve.tensors import MAX_TENSORS, decode_inputs
from inflight.v1 import inference_pb2, types_pb2

MAX_ID_CHARACTERS = 256
VERSION = "1"
# Where a request's `id` goes in a GenerateRequest's metadata.
ID_KEY = "triton_request_id"

EMPTY_FINAL_RESPONSE = "triton_enable_empty_final_response"

# Triton's levels: 1 is the highest, 0 the model's default.
PRIORITIES = (
    types_pb2.PRIORITY_CLASS_UNSPECIFIED,
    types_pb2.PRIORITY_CLASS_INTERACTIVE,
    types_pb2.PRIORITY_CLASS_STANDARD,
    types_pb2.PRIORITY_CLASS_BATCH,
)

# What asks for nothing where it is false, and cannot be had where it is true.
UNBUILT_FLAGS: Mapping[str, str] = {
    "return_context_logits": "returning logits is",
    "return_generation_logits": "returning logits is",
    "return_perf_metrics": "returning measurements of a request is",
    "return_stop_reason": "returning what matched is",
    "use_beam_search": "beam search is",
}

TEXT_OUTPUT, OUTPUT_IDS, SEQUENCE_LENGTH = "text_output", "output_ids", "sequence_length"
FINISH_REASON, NUM_INPUT_TOKENS, NUM_OUTPUT_TOKENS = "finish_reason", "num_input_tokens", "num_output_tokens"
# TensorRT-LLM's log probabilities, and vLLM's.
OUTPUT_LOG_PROBS, CUM_LOG_PROBS = "output_log_probs", "cum_log_probs"
LOGPROBS, CUMULATIVE_LOGPROB = "logprobs", "cumulative_logprob"
OUTPUTS_OF_LOGPROBS = (OUTPUT_LOG_PROBS, CUM_LOG_PROBS, LOGPROBS, CUMULATIVE_LOGPROB)
OUTPUTS = (
    *(TEXT_OUTPUT, OUTPUT_IDS, SEQUENCE_LENGTH, FINISH_REASON, NUM_INPUT_TOKENS, NUM_OUTPUT_TOKENS),
    *OUTPUTS_OF_LOGPROBS,
)

# What a flag adds to the answer.
RETURNED: Mapping[str, tuple[str, ...]] = {
    "return_finish_reason": (FINISH_REASON,),
    "return_num_input_tokens": (NUM_INPUT_TOKENS,),
    "return_num_output_tokens": (NUM_OUTPUT_TOKENS,),
    "return_log_probs": (OUTPUT_LOG_PROBS, CUM_LOG_PROBS),
    "return_logprobs": (LOGPROBS,),
    "return_cumulative_logprob": (CUMULATIVE_LOGPROB,),
}

# TensorRT-LLM's types of guides, and ours for llguidance's dialect of Lark. Its `ebnf_grammar` is of another dialect.
GUIDE_FIELDS: Mapping[str, str] = {
    "json": "json_object",
    "json_schema": "json_schema",
    "regex": "regex",
    "lark_grammar": "grammar",
}

# Fields of a GenerateRequest that no option alone stands for, and what the client calls them.
OWN_NAMES: Mapping[str, str] = {
    "text_bytes": "inputs[text_input]",
    "token_ids.ids": "inputs[input_ids]",
    "prompt": "inputs[text_input]",
    "model": "model_name",
    "adapter_id": "model_name",
    "priority": "parameters[priority]",
    "deadlines.total": "parameters[timeout]",
    "metadata": "id",
}


@dataclass(frozen=True, slots=True)
class Wanted:
    """How a request is answered: as it goes on or at its end, with which tensors, for how many choices, and with the
    prompt before them."""

    model_name: str
    request_id: str
    is_streamed: bool
    outputs: frozenset[str]
    prompt: bytes
    may_end_empty: bool
    num_choices: int = 1


@dataclass(frozen=True, slots=True)
class Inference:
    """One request: what is generated, how it is answered, and what its client gave."""

    generate: inference_pb2.GenerateRequest
    wanted: Wanted
    given: Given

    @property
    def client_names(self) -> Mapping[str, str]:
        """What the client calls the fields of `generate`."""
        called = self.given.name_of
        names = {option.field: called(option.names[0]) for option in OPTIONS if option.field}
        others = ("stopping.stop", "stop_words"), ("sampling.bad_words", "bad_words"), ("sampling.top_k", "top_k")
        guides = {f"constraint.{field}": called("guided_decoding_guide") for field in GUIDE_FIELDS.values()}
        return {**names, **{field: called(own) for field, own in others}, **guides, **OWN_NAMES}


def translate(request: grpc_service_pb2.ModelInferRequest) -> Inference:
    """Raises `RequestError` that names the tensor or parameter which is wrong."""
    check_version("model_version", request.model_version)
    if len(request.id) > MAX_ID_CHARACTERS:
        raise wrong("id", f"has {len(request.id)} characters; at most {MAX_ID_CHARACTERS} are allowed")
    tensors, parameters = decode_inputs(request), parameter_values(request)
    generate = inference_pb2.GenerateRequest(model=request.model_name)
    if request.id:
        generate.metadata[ID_KEY] = request.id
    may_end_empty = _read_protocol_parameters(parameters, generate)
    given = read_options(tensors, parameters)
    _refuse_unbuilt(given)
    _set_prompt(given, generate)
    _set_fields(given, generate)
    _set_others(given, generate)
    _set_constraint(given, generate)
    is_streamed = given.flag("stream")
    wanted = Wanted(
        model_name=request.model_name,
        request_id=request.id,
        is_streamed=is_streamed,
        outputs=_outputs(request, given),
        prompt=_told_prompt(given, is_streamed),
        may_end_empty=may_end_empty,
        num_choices=max(1, min(generate.n, MAX_CHOICES)),
    )
    generate.output.text = TEXT_OUTPUT in wanted.outputs
    generate.output.token_ids = OUTPUT_IDS in wanted.outputs
    generate.output.logprobs = not wanted.outputs.isdisjoint(OUTPUTS_OF_LOGPROBS)
    return Inference(generate, wanted, given)


def check_version(called: str, version: str) -> None:
    """Raises `RequestError` for a version that no model has."""
    if version not in ("", VERSION):
        raise wrong(called, f"is {version[:20]!r}; the only version is {VERSION}")


def in_client_words(error: RequestError, client_names: Mapping[str, str]) -> RequestError:
    """The same refusal, but that it names what the client sent instead of fields of a GenerateRequest."""
    renamed = tuple(FieldViolation(_renamed(v.field, client_names), v.description) for v in error.violations)
    # Every part of the text begins with the field that it is about.
    parts = error.description.split("; ")
    for old, new in zip(error.violations, renamed, strict=True):
        parts = [
            f"{new.field}:{part.removeprefix(f'{old.field}:')}" if part.startswith(f"{old.field}:") else part
            for part in parts
        ]
    return dataclasses.replace(error, description="; ".join(parts), violations=renamed)


def _renamed(path: str, client_names: Mapping[str, str]) -> str:
    for field, name in client_names.items():
        if path == field or path.startswith(f"{field}["):
            return name + path.removeprefix(field)
    return path


def _read_protocol_parameters(parameters: dict[str, Any], generate: inference_pb2.GenerateRequest) -> bool:
    """Takes out of `parameters` those of the protocol; returns whether a final response may be an empty one."""
    priority, timeout_us = parameters.pop("priority", 0), parameters.pop("timeout", 0)
    if isinstance(priority, bool) or not isinstance(priority, int) or not 0 <= priority < len(PRIORITIES):
        raise wrong("parameters[priority]", "must be 0, or 1 (interactive), 2 (standard) or 3 (batch)")
    generate.priority = PRIORITIES[priority]
    if isinstance(timeout_us, bool) or not isinstance(timeout_us, int) or timeout_us < 0:
        raise wrong("parameters[timeout]", "must be a whole number of microseconds, at least 0")
    if timeout_us:
        generate.deadlines.total.FromMicroseconds(min(timeout_us, 2**53))
    may_end_empty = parameters.pop(EMPTY_FINAL_RESPONSE, False)
    if not isinstance(may_end_empty, bool):
        raise wrong(f"parameters[{EMPTY_FINAL_RESPONSE}]", "must be true or false")
    for name in ("sequence_id", "sequence_start", "sequence_end"):
        if name in parameters:
            raise wrong(f"parameters[{name}]", "sequences of requests are not supported")
    return may_end_empty


def _refuse_unbuilt(given: Given) -> None:
    for name, function in UNBUILT_FLAGS.items():
        if given.flag(name):
            raise not_implemented(given.name_of(name), function)
    if given.integer("beam_width") not in (None, 1):
        raise not_implemented(given.name_of("beam_width"), "beam search is")
    if not given.flag("skip_special_tokens", default=True):
        raise not_implemented(given.name_of("skip_special_tokens"), "text with special tokens is")


def _set_prompt(given: Given, generate: inference_pb2.GenerateRequest) -> None:
    texts, ids, length = given.texts("text_input"), given.integers("input_ids"), given.integer("input_lengths")
    if "input_ids" not in given.values:
        if len(texts) != 1:
            raise wrong("inputs[text_input]", f"has {len(texts)} texts; a request has one prompt")
        if length is not None:
            raise wrong(given.name_of("input_lengths"), "needs input_ids, which is not set")
        generate.text_bytes = texts[0]
        return
    if "text_input" in given.values:
        raise wrong("inputs[input_ids]", "is set together with text_input; a request has one of them")
    if length is not None and not 0 < length <= len(ids):
        raise wrong(given.name_of("input_lengths"), f"is {length}, and input_ids has {len(ids)} ids")
    _assign(generate.token_ids, "ids", ids[:length], given.name_of("input_ids"))


def _set_fields(given: Given, generate: inference_pb2.GenerateRequest) -> None:
    """The options whose values a GenerateRequest takes as they are."""
    for own in given.values:
        option = OPTION_OF[own]
        if not option.field:
            continue
        path, _, name = option.field.rpartition(".")
        parent = attrgetter(path)(generate) if path else generate
        value = given.integers(own) if option.kind is Kind.INTS else given.values[own]
        _assign(parent, name, value, given.name_of(own))


def _set_others(given: Given, generate: inference_pb2.GenerateRequest) -> None:
    """The options whose values mean something else in a GenerateRequest."""
    # Clients of TensorRT-LLM send empty words for none.
    stops = [_utf8(one, given.name_of("stop_words")) for one in given.texts("stop_words") if one]
    generate.stopping.stop.extend(stops)
    bad_words = [_utf8(one, given.name_of("bad_words")) for one in given.texts("bad_words") if one]
    generate.sampling.bad_words.extend(bad_words)
    top_k = given.integer("top_k")
    if top_k is not None:
        # vLLM keeps all tokens with -1.
        _assign(generate.sampling, "top_k", 0 if top_k == -1 else top_k, given.name_of("top_k"))
    end_id = given.integer("end_id")
    if end_id is not None:
        # It stands in the place of the model's own; -1 is none at all.
        generate.stopping.ignore_eos = True
        if end_id != -1:
            stop_ids = [*generate.stopping.stop_token_ids, end_id]
            _assign(generate.stopping, "stop_token_ids", tuple(stop_ids), given.name_of("end_id"))


def _set_constraint(given: Given, generate: inference_pb2.GenerateRequest) -> None:
    """TensorRT-LLM's guided decoding. Its clients send empty texts for none."""
    type_name, guide_name = given.name_of("guided_decoding_guide_type"), given.name_of("guided_decoding_guide")
    types = [_utf8(one, type_name) for one in given.texts("guided_decoding_guide_type") if one]
    guides = [_utf8(one, guide_name) for one in given.texts("guided_decoding_guide") if one]
    if not types and not guides:
        return
    if len(types) != 1 or types[0] not in GUIDE_FIELDS:
        raise wrong(type_name, f"must be one of {', '.join(GUIDE_FIELDS)}")
    kind = GUIDE_FIELDS[types[0]]
    if kind == "json_object":
        if guides:
            raise wrong(guide_name, "must be empty with the type json; a schema has the type json_schema")
        generate.constraint.json_object = True
        return
    if len(guides) != 1:
        raise wrong(guide_name, f"has {len(guides)} texts; the type {types[0]} needs one")
    setattr(generate.constraint, kind, guides[0])


def _assign(message: Message, name: str, value: object, called: str) -> None:
    """Sets a field. Raises `RequestError` where the field cannot hold the value."""
    try:
        if isinstance(value, tuple):
            del getattr(message, name)[:]
            getattr(message, name).extend(value)
        else:
            setattr(message, name, value)
    except (TypeError, ValueError) as error:
        raise wrong(called, "is out of range") from error


def _utf8(text: bytes, called: str) -> str:
    try:
        return text.decode()
    except UnicodeDecodeError as error:
        raise wrong(called, f"is not UTF-8: {error.reason} at byte {error.start}") from error


def _outputs(request: grpc_service_pb2.ModelInferRequest, given: Given) -> frozenset[str]:
    """The tensors of the answer: those that `outputs` names, and those that flags ask for."""
    if len(request.outputs) > MAX_TENSORS:
        raise wrong("outputs", f"has {len(request.outputs)} tensors; at most {MAX_TENSORS} are allowed")
    asked = {name for flag, names in RETURNED.items() if given.flag(flag) for name in names}
    for output in request.outputs:
        called = f"outputs[{output.name[:100]}]"
        if output.name not in OUTPUTS:
            raise wrong(called, f"there is no such tensor; known: {', '.join(OUTPUTS)}")
        if output.parameters:
            raise wrong(called, "has parameters; these and shared memory are not supported")
        asked.add(output.name)
    if request.outputs:
        return frozenset(asked)
    # TensorRT-LLM's model of ids answers with ids.
    by_ids = (OUTPUT_IDS, SEQUENCE_LENGTH) if "input_ids" in given.values else ()
    return frozenset({TEXT_OUTPUT, *by_ids, *asked})


def _told_prompt(given: Given, is_streamed: bool) -> bytes:
    """What the text begins with: the prompt, where it is not excluded."""
    if given.flag("exclude_input_in_output", default=True):
        return b""
    called = given.name_of("exclude_input_in_output")
    if is_streamed:
        raise wrong(called, "must be true for a streamed request")
    if "text_input" not in given.values:
        raise wrong(called, "must be true for a prompt of input_ids")
    return given.texts("text_input")[0]
