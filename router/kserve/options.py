"""Options of Triton's clients, by the names of TensorRT-LLM's and vLLM's backends.

A value comes as a tensor, as a parameter of the request, or within `sampling_parameters`, vLLM's JSON. It is the same
option in each place, and may not come with two values. An unknown name is refused, never ignored. Pure.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any, cast

from inflight.common.errors import FieldViolation, RequestError, invalid
from inflight.common.parameters import SAMPLING_NUMBERS, Parameter
from inflight.common.parameters import Kind as ParameterKind
from inflight.common.rpc.json_counts import MAX_NESTING, has_more_values, nests_deeper
from inflight.kserve import grpc_service_pb2
from inflight.router.kserve.tensors import BYTES, Tensor

SAMPLING_PARAMETERS = "sampling_parameters"
MAX_JSON_BYTES = 2**20
# Of that JSON, and of the parameters of a request: more than there are names, and room for lists of ids and words.
MAX_JSON_VALUES = 10_000
MAX_PARAMETERS = 256

Value = bool | int | float | tuple[int, ...] | tuple[bytes, ...]


class Kind(Enum):
    """The type of a value."""

    BOOL = auto()
    INT = auto()
    FLOAT = auto()
    TEXTS = auto()
    INTS = auto()


@dataclass(frozen=True, slots=True)
class Option:
    """An option. The first name is the main one, the others are aliases. `is_sampling`: also accepted as a parameter.

    `field` is that of a GenerateRequest, where the value goes there as it is. `datatype` and `dims` are as the model's
    metadata tells them.
    """

    names: tuple[str, ...]
    kind: Kind
    datatype: str
    dims: int = 1
    is_sampling: bool = False
    field: str = ""


def _sampling(kind: Kind, datatype: str, path: str, *names: str, dims: int = 1) -> Option:
    return Option(names, kind, datatype, dims, is_sampling=True, field=path)


# More names of sampling parameters.
_ALIASES = {
    "temperature": ("sampling_param_temperature",),
    "top_p": ("runtime_top_p", "sampling_param_top_p"),
    "top_k": ("runtime_top_k", "sampling_param_top_k"),
    "presence_penalty": ("sampling_param_presence_penalty",),
    "frequency_penalty": ("sampling_param_frequency_penalty",),
}
# Those whose values mean something else in a GenerateRequest.
_TRANSLATED = frozenset({"top_k"})


def _of_parameter(parameter: Parameter) -> Option:
    names = (parameter.name, *_ALIASES.get(parameter.name, ()))
    path = "" if parameter.name in _TRANSLATED else parameter.field
    is_number = parameter.kind is ParameterKind.FLOAT
    return _sampling(Kind.FLOAT if is_number else Kind.INT, "FP32" if is_number else "INT32", path, *names)


OPTIONS = (
    Option(("text_input",), Kind.TEXTS, BYTES),
    Option(("input_ids",), Kind.INTS, "INT32", dims=-1),
    Option(("input_lengths",), Kind.INT, "INT32"),
    Option(("stream", "streaming"), Kind.BOOL, "BOOL"),
    Option(("exclude_input_in_output", "sampling_param_exclude_input_from_output"), Kind.BOOL, "BOOL"),
    Option(("return_finish_reason",), Kind.BOOL, "BOOL"),
    Option(("return_num_input_tokens",), Kind.BOOL, "BOOL"),
    Option(("return_num_output_tokens",), Kind.BOOL, "BOOL"),
    _sampling(
        *(Kind.INT, "INT32", "stopping.max_tokens"), "max_tokens", "request_output_len", "sampling_param_max_tokens"
    ),
    _sampling(Kind.INT, "INT32", "stopping.min_tokens", "min_tokens", "min_length"),
    _sampling(Kind.TEXTS, BYTES, "", "stop_words", "sampling_param_stop", "stop", dims=-1),
    _sampling(Kind.INTS, "INT32", "stopping.stop_token_ids", "stop_token_ids", dims=-1),
    _sampling(Kind.INT, "INT32", "", "end_id"),
    _sampling(Kind.INT, "INT32", "", "pad_id"),
    _sampling(Kind.BOOL, "BOOL", "stopping.ignore_eos", "ignore_eos"),
    _sampling(Kind.BOOL, "BOOL", "stopping.include_stop", "include_stop_str_in_output"),
    *map(_of_parameter, SAMPLING_NUMBERS),
    _sampling(Kind.INT, "UINT64", "sampling.seed", "seed", "random_seed", "sampling_param_seed"),
    _sampling(Kind.TEXTS, BYTES, "", "bad_words", dims=-1),
    _sampling(Kind.INTS, "INT32", "sampling.allowed_token_ids", "allowed_token_ids", dims=-1),
    _sampling(Kind.TEXTS, BYTES, "", "guided_decoding_guide_type"),
    _sampling(Kind.TEXTS, BYTES, "", "guided_decoding_guide"),
    _sampling(Kind.INT, "INT32", "output.stream_interval", "stream_interval"),
    _sampling(Kind.INT, "INT32", "inter_token_target_ms", "inter_token_target_ms"),
    _sampling(Kind.INT, "INT32", "max_drafts", "max_drafts"),
    _sampling(Kind.INT, "INT32", "truncate_prompt_tokens", "truncate_prompt_tokens"),
    _sampling(Kind.INT, "INT32", "n", "num_return_sequences", "n"),
    _sampling(Kind.INT, "INT32", "best_of", "best_of", "sampling_param_best_of"),
    _sampling(Kind.INT, "INT32", "", "beam_width"),
    _sampling(Kind.FLOAT, "FP32", "", "length_penalty", "len_penalty"),
    _sampling(Kind.BOOL, "BOOL", "", "early_stopping"),
    _sampling(Kind.BOOL, "BOOL", "", "skip_special_tokens"),
    _sampling(Kind.BOOL, "BOOL", "", "use_beam_search"),
    _sampling(Kind.INT, "INT32", "output.top_logprobs", "logprobs"),
    Option(("return_log_probs",), Kind.BOOL, "BOOL"),
    Option(("return_logprobs",), Kind.BOOL, "BOOL"),
    Option(("return_cumulative_logprob",), Kind.BOOL, "BOOL"),
    # What would have to be answered with logits or measurements.
    Option(("return_context_logits",), Kind.BOOL, "BOOL"),
    Option(("return_generation_logits",), Kind.BOOL, "BOOL"),
    Option(("return_perf_metrics", "sampling_param_return_perf_metrics"), Kind.BOOL, "BOOL"),
    Option(("return_stop_reason",), Kind.BOOL, "BOOL"),
)
OPTION_OF: Mapping[str, Option] = {name: option for option in OPTIONS for name in option.names}


@dataclass(slots=True)
class Given:
    """The values that a request brings, by the option's own name, and the names that the client used."""

    values: dict[str, Value] = field(default_factory=dict)
    called: dict[str, str] = field(default_factory=dict)

    def flag(self, name: str, default: bool = False) -> bool:
        """The value of an option that is true or false."""
        return bool(self.values.get(name, default))

    def integer(self, name: str) -> int | None:
        """The value of an option that is a whole number."""
        value = self.values.get(name)
        return value if isinstance(value, int) else None

    def texts(self, name: str) -> tuple[bytes, ...]:
        """The value of an option that is a list of texts; none where it is not given."""
        value = self.values.get(name)
        return tuple(one for one in value if isinstance(one, bytes)) if isinstance(value, tuple) else ()

    def integers(self, name: str) -> tuple[int, ...]:
        """The value of an option that is a list of whole numbers; none where it is not given."""
        value = self.values.get(name)
        # There can be a million of them, and all are of one kind.
        is_integers = isinstance(value, tuple) and bool(value) and isinstance(value[0], int)
        return cast("tuple[int, ...]", value) if is_integers else ()

    def name_of(self, name: str) -> str:
        """What the client calls an option."""
        return self.called.get(name, f"inputs[{name}]")

    def add(self, option: Option, value: Value, called: str) -> None:
        """Raises `RequestError` where the option has another value already."""
        own = option.names[0]
        if own in self.values and self.values[own] != value:
            raise wrong(called, f"contradicts {self.called[own]}")
        self.values.setdefault(own, value)
        self.called.setdefault(own, called)


def read_options(tensors: Mapping[str, Tensor], parameters: Mapping[str, Any]) -> Given:
    """The options of a request. `parameters` are those that mean nothing to the protocol itself. Raises
    `RequestError`."""
    given = Given()
    for name, tensor in tensors.items():
        called = f"inputs[{name[:100]}]"
        if name == SAMPLING_PARAMETERS:
            for key, value in _parsed(tensor, called):
                _add_loose(given, key, value, f"{called}.{key[:100]}")
            continue
        option = OPTION_OF.get(name)
        if option is None:
            raise wrong(called, "there is no such tensor; the model's metadata lists those that there are")
        given.add(option, _of_tensor(option.kind, tensor, called), called)
    for key, value in sorted(parameters.items()):
        _add_loose(given, key, value, f"parameters[{key[:100]}]")
    return given


def parameter_values(request: grpc_service_pb2.ModelInferRequest) -> dict[str, Any]:
    """The parameters of a request as plain values. Raises `RequestError` for one without a value."""
    if len(request.parameters) > MAX_PARAMETERS:
        raise wrong("parameters", f"has {len(request.parameters)} entries; at most {MAX_PARAMETERS} are allowed")
    values: dict[str, Any] = {}
    for name, parameter in request.parameters.items():
        choice = parameter.WhichOneof("parameter_choice")
        if choice is None:
            raise wrong(f"parameters[{name[:100]}]", "has no value")
        values[name] = getattr(parameter, choice)
    return values


def wrong(called: str, text: str) -> RequestError:
    """The refusal of one value, by the name that the client used."""
    return invalid(FieldViolation(called, text))


def _parsed(tensor: Tensor, called: str) -> Iterator[tuple[str, Any]]:
    """The keys and values of vLLM's JSON. Its null says that a value is not given."""
    (text,) = _texts(tensor, called) or (b"{}",)
    if len(text) > MAX_JSON_BYTES:
        raise wrong(called, f"has {len(text)} bytes; at most {MAX_JSON_BYTES} are allowed")
    if has_more_values(text, MAX_JSON_VALUES):
        raise wrong(called, f"has too many values; at most {MAX_JSON_VALUES} are allowed")
    if nests_deeper(text):
        raise wrong(called, f"is nested more than {MAX_NESTING} levels deep")
    try:
        parsed = json.loads(text.decode())
    except ValueError as error:
        raise wrong(called, "is no JSON") from error
    if not isinstance(parsed, dict):
        raise wrong(called, "must be a JSON object")
    return ((key, value) for key, value in parsed.items() if value is not None)


def _add_loose(given: Given, key: str, value: Any, called: str) -> None:
    """Adds a value that is not a tensor."""
    option = OPTION_OF.get(key)
    if option is None or not option.is_sampling:
        raise wrong(called, "there is no such parameter")
    given.add(option, _of_anything(option.kind, value, called), called)


def _texts(tensor: Tensor, called: str) -> tuple[bytes, ...]:
    texts = tuple(one for one in tensor.elements if isinstance(one, bytes))
    if tensor.datatype != BYTES or len(texts) > 1:
        raise wrong(called, "must be one element of type BYTES")
    return texts


def _of_tensor(kind: Kind, tensor: Tensor, called: str) -> Value:
    """A tensor's value: one element, or all of them where there can be several."""
    if (kind is Kind.TEXTS) is not (tensor.datatype == BYTES):
        raise wrong(called, f"is of type {tensor.datatype}; must be {'BYTES' if kind is Kind.TEXTS else 'of numbers'}")
    if kind is Kind.INTS and "INT" in tensor.datatype:
        # There can be a million of them, each an integer as its datatype says.
        return cast("tuple[int, ...]", tensor.elements)
    if kind in (Kind.TEXTS, Kind.INTS):
        return _of_anything(kind, list(tensor.elements), called)
    if len(tensor.elements) != 1:
        raise wrong(called, f"has {len(tensor.elements)} elements; must have one, because a request has one prompt")
    return _of_anything(kind, tensor.elements[0], called)


def _of_anything(kind: Kind, value: Any, called: str) -> Value:
    match kind:
        case Kind.TEXTS:
            return tuple(_text(one, called) for one in _listed(value))
        case Kind.INTS:
            return tuple(_integer(one, called) for one in _listed(value))
        case Kind.BOOL:
            return _truth(value, called)
        case Kind.INT:
            return _integer(value, called)
        case Kind.FLOAT:
            return _number(value, called)


def _listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _text(value: Any, called: str) -> bytes:
    if isinstance(value, bytes):
        return value
    if not isinstance(value, str):
        raise wrong(called, "must be text")
    # JSON can hold half of a surrogate pair, which is no text.
    return value.encode(errors="replace")


def _truth(value: Any, called: str) -> bool:
    if isinstance(value, str) and value.lower() in ("true", "false"):
        return value.lower() == "true"
    if not isinstance(value, bool):
        raise wrong(called, "must be true or false")
    return value


def _integer(value: Any, called: str) -> int:
    """vLLM's clients write numbers as text, too."""
    if not isinstance(value, bool):
        try:
            number = int(value)
            if isinstance(value, str) or number == value:
                return number
        except (TypeError, ValueError, OverflowError) as error:
            raise wrong(called, "must be a whole number") from error
    raise wrong(called, "must be a whole number")


def _number(value: Any, called: str) -> float:
    if not isinstance(value, bool):
        try:
            return float(value)
        except (TypeError, ValueError, OverflowError) as error:
            raise wrong(called, "must be a number") from error
    raise wrong(called, "must be a number")
