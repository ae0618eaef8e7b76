"""Inference requests of Triton's clients as GenerateRequests: every name, and no option ignored."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inflight.common.errors import FieldViolation, Reason, RequestError, invalid
from inflight.kserve import grpc_service_pb2
from inflight.router.kserve.models import INPUTS, OUTPUTS, model_config, model_metadata
from inflight.router.kserve.options import OPTIONS, Kind
from inflight.router.kserve.responses import Responder
from inflight.router.kserve.tensors import BYTES, Tensor, decode_inputs, encode_elements
from inflight.router.kserve.translation import Inference, in_client_words, translate
from inflight.v1 import inference_pb2, types_pb2
from tests.unit.test_kserve_tensors import tensors

# As UTF-8 it is a list and a text: the bytes of ≛ are a bracket and a quote.
HIDDEN_NESTING = ('["\u225b",' + "[" * 2_000).encode("utf-16-le")
PROMPT = Tensor("text_input", BYTES, (1,), (b"hello",))
VALUES: dict[Kind, Any] = {Kind.BOOL: True, Kind.INT: 1, Kind.FLOAT: 0.5, Kind.TEXTS: b"x", Kind.INTS: 1}


def inference_request(
    *inputs: Tensor, outputs: tuple[str, ...] = (), parameters: dict[str, Any] | None = None, **fields: Any
) -> grpc_service_pb2.ModelInferRequest:
    request = grpc_service_pb2.ModelInferRequest(**fields)
    for tensor in inputs:
        request.inputs.add(name=tensor.name, datatype=tensor.datatype, shape=tensor.shape)
        request.raw_input_contents.append(encode_elements(tensor.datatype, tensor.elements))
    for name in outputs:
        request.outputs.add(name=name)
    for key, value in (parameters or {}).items():
        kinds = {bool: "bool_param", int: "int64_param", float: "double_param", str: "string_param"}
        setattr(request.parameters[key], kinds[type(value)], value)
    return request


def one(name: str, datatype: str, *elements: Any) -> Tensor:
    return Tensor(name, datatype, (len(elements),), elements)


def vllm(**values: Any) -> Tensor:
    return one("sampling_parameters", BYTES, json.dumps(values).encode())


def translated(*inputs: Tensor, **fields: Any) -> Inference:
    return translate(inference_request(PROMPT, *inputs, **fields))


def generated(*inputs: Tensor, **fields: Any) -> inference_pb2.GenerateRequest:
    return translated(*inputs, **fields).generate


def refusal(*inputs: Tensor, **fields: Any) -> str:
    with pytest.raises(RequestError) as error:
        translate(inference_request(*inputs, **fields))
    return error.value.description


def translated_or_refused(request: grpc_service_pb2.ModelInferRequest) -> Inference | RequestError:
    try:
        return translate(request)
    except RequestError as error:
        return error


def test_tensors_of_tensorrt_llm() -> None:
    request = generated(
        Tensor("max_tokens", "INT32", (1, 1), (20,)),
        one("min_length", "UINT32", 2),
        one("runtime_top_k", "INT32", 40),
        one("top_p", "FP32", 0.5),
        one("temperature", "FP32", 0.25),
        one("random_seed", "UINT64", 2**63),
        one("stop_words", BYTES, b"\n", b"", b"END"),
        one("end_id", "INT32", 2),
        one("pad_id", "INT32", 2),
        one("beam_width", "INT32", 1),
        one("len_penalty", "FP32", 1.0),
        one("bad_words", BYTES, b""),
        one("max_drafts", "INT32", 0),
        model_name="m",
        id="7",
    )
    expected = inference_pb2.GenerateRequest(
        model="m",
        text_bytes=b"hello",
        sampling=types_pb2.SamplingParams(temperature=0.25, top_k=40, top_p=0.5, seed=2**63),
        stopping=types_pb2.StoppingParams(
            max_tokens=20, min_tokens=2, stop=["\n", "END"], stop_token_ids=[2], ignore_eos=True
        ),
        output=inference_pb2.OutputOptions(text=True),
        metadata={"triton_request_id": "7"},
        max_drafts=0,
    )
    assert request == expected


def test_parameters_of_vllm_as_json_and_as_request_parameters_even_as_text() -> None:
    expected = generated(vllm(temperature=0.25, top_k=-1, max_tokens=9, stop="END", ignore_eos=True, seed=None))
    assert expected.sampling.top_k == 0
    assert expected.stopping == types_pb2.StoppingParams(max_tokens=9, stop=["END"], ignore_eos=True)
    parameters = {"temperature": "0.25", "top_k": "-1", "max_tokens": 9, "stop": "END", "ignore_eos": True}
    assert generated(parameters=parameters) == expected
    # vLLM's own sample sends both.
    assert generated(vllm(**parameters), parameters=parameters) == expected


def test_prompt_of_ids_is_cut_to_its_length_and_answered_with_ids() -> None:
    ids = Tensor("input_ids", "INT32", (1, 4), (5, 6, 7, 0))
    inference = translate(
        inference_request(ids, one("input_lengths", "INT32", 3), one("request_output_len", "INT32", 2))
    )
    assert list(inference.generate.token_ids.ids) == [5, 6, 7]
    assert inference.generate.output.token_ids
    assert inference.wanted.outputs == {"text_output", "output_ids", "sequence_length"}


def test_end_id_stands_in_the_place_of_the_models_own() -> None:
    assert generated(one("end_id", "INT32", -1)).stopping == types_pb2.StoppingParams(ignore_eos=True)


def test_priority_and_timeout_are_class_and_deadline() -> None:
    request = generated(parameters={"priority": 3, "timeout": 1_500_000})
    assert request.priority == types_pb2.PRIORITY_CLASS_BATCH
    assert request.deadlines.total.ToMilliseconds() == 1500


def test_answer_is_what_outputs_and_flags_ask_for() -> None:
    assert translated(one("return_finish_reason", "BOOL", True)).wanted.outputs == {"text_output", "finish_reason"}
    asked = translated(outputs=("output_ids",)).wanted
    assert asked.outputs == {"output_ids"}
    assert not translated(outputs=("output_ids",)).generate.output.text


def test_log_probabilities_are_computed_where_a_tensor_of_the_answer_has_them() -> None:
    tensorrt_llm = translated(one("return_log_probs", "BOOL", True))
    assert tensorrt_llm.wanted.outputs == {"text_output", "output_log_probs", "cum_log_probs"}
    assert tensorrt_llm.generate.output.logprobs
    by_vllm = translated(one("return_logprobs", "BOOL", True), vllm(logprobs=3))
    assert by_vllm.wanted.outputs == {"text_output", "logprobs"}
    assert (by_vllm.generate.output.logprobs, by_vllm.generate.output.top_logprobs) == (True, 3)
    assert generated(one("return_cumulative_logprob", "BOOL", True)).output.logprobs
    assert generated(outputs=("cum_log_probs",)).output.logprobs
    assert not generated().output.logprobs


@pytest.mark.parametrize(
    ("inputs", "fields", "text"),
    [
        ((), {}, "inputs[text_input]: has 0 texts; a request has one prompt"),
        ((one("text_input", BYTES, b"a", b"b"),), {}, "inputs[text_input]: has 2 texts"),
        ((PROMPT, one("input_ids", "INT32", 1)), {}, "inputs[input_ids]: is set together with text_input"),
        ((one("input_ids", "INT32", -1),), {}, "inputs[input_ids]: is out of range"),
        ((one("input_ids", "INT32", 1), one("input_lengths", "INT32", 2)), {}, "is 2, and input_ids has 1 ids"),
        ((PROMPT, one("input_lengths", "INT32", 2)), {}, "inputs[input_lengths]: needs input_ids"),
        ((PROMPT, one("lora_task_id", "UINT64", 1)), {}, "inputs[lora_task_id]: there is no such tensor"),
        ((PROMPT, one("max_tokens", "INT32", -5)), {}, "inputs[max_tokens]: is out of range"),
        ((PROMPT, one("max_tokens", "FP32", 1.5)), {}, "inputs[max_tokens]: must be a whole number"),
        ((PROMPT, one("max_tokens", BYTES, b"1")), {}, "inputs[max_tokens]: is of type BYTES"),
        ((PROMPT, one("max_tokens", "INT32", 1, 2)), {}, "inputs[max_tokens]: has 2 elements"),
        ((PROMPT, one("stream", "INT32", 1)), {}, "inputs[stream]: must be true or false"),
        ((PROMPT, one("stop_words", BYTES, b"\xff")), {}, "inputs[stop_words]: is not UTF-8"),
        ((PROMPT, one("beam_width", "INT32", 2)), {}, "inputs[beam_width]: beam search is not implemented"),
        ((PROMPT, vllm(logprobs=-1)), {}, "inputs[sampling_parameters].logprobs: is out of range"),
        ((PROMPT, vllm(prompt_logprobs=3)), {}, "inputs[sampling_parameters].prompt_logprobs: there is no such"),
        ((PROMPT, vllm(temperature=[])), {}, "inputs[sampling_parameters].temperature: must be a number"),
        ((PROMPT, vllm(skip_special_tokens=False)), {}, "text with special tokens is not implemented"),
        ((PROMPT, one("sampling_parameters", BYTES, b"[" * 5_000)), {}, "is nested more than 100 levels deep"),
        (
            (PROMPT, one("sampling_parameters", BYTES, HIDDEN_NESTING)),
            {},
            "is no JSON",
        ),
        ((PROMPT, one("sampling_parameters", BYTES, b"[" * 100_000)), {}, "has too many values; at most 10000"),
        ((PROMPT, one("sampling_parameters", BYTES, b"[]")), {}, "must be a JSON object"),
        ((PROMPT, one("sampling_parameters", BYTES, b" " * 2**21)), {}, "has 2097152 bytes"),
        (
            (PROMPT, vllm(max_tokens=3), one("max_tokens", "INT32", 4)),
            {},
            "inputs[max_tokens]: contradicts inputs[sampling_parameters].max_tokens",
        ),
        ((PROMPT,), {"parameters": {"stream": True}}, "parameters[stream]: there is no such parameter"),
        ((PROMPT,), {"parameters": {"priority": 4}}, "parameters[priority]: must be 0, or 1"),
        ((PROMPT,), {"parameters": {"timeout": -1}}, "parameters[timeout]: must be a whole number"),
        ((PROMPT,), {"parameters": {"sequence_id": 1}}, "parameters[sequence_id]: sequences of requests"),
        ((PROMPT,), {"outputs": ("context_logits",)}, "outputs[context_logits]: there is no such tensor"),
        ((PROMPT,), {"model_version": "2"}, "model_version: is '2'"),
        ((PROMPT,), {"id": "x" * 300}, "id: has 300 characters"),
        (
            (PROMPT, one("stream", "BOOL", True), one("exclude_input_in_output", "BOOL", False)),
            {},
            "inputs[exclude_input_in_output]: must be true for a streamed request",
        ),
    ],
)
def test_refusal_names_what_the_client_sent(inputs: tuple[Tensor, ...], fields: dict[str, Any], text: str) -> None:
    assert text in refusal(*inputs, **fields)


@pytest.mark.parametrize("name", [name for option in OPTIONS for name in option.names])
def test_every_name_is_read(name: str) -> None:
    """It changes what is asked for, or is refused by its name, or its own value says that there is nothing to do."""
    option = next(option for option in OPTIONS if name in option.names)
    value = b"json" if name == "guided_decoding_guide_type" else VALUES[option.kind]
    sent = [one(name, option.datatype, value)]
    if option.names[0] == "input_lengths":
        sent.append(one("input_ids", "INT32", 1, 2))
    elif option.names[0] not in ("text_input", "input_ids"):
        sent.append(PROMPT)
    if option.names[0] == "guided_decoding_guide":
        sent.append(one("guided_decoding_guide_type", BYTES, b"regex"))
    without_effect = {"pad_id", "beam_width", "length_penalty", "early_stopping", "skip_special_tokens"}
    without_effect.add("exclude_input_in_output")
    inference = translated_or_refused(inference_request(*sent))
    if isinstance(inference, RequestError):
        assert inference.reason is Reason.NOT_IMPLEMENTED
        assert inference.description.startswith(f"inputs[{name}]: ")
        return
    plain = translate(inference_request(PROMPT))
    is_same = (inference.generate, inference.wanted) == (plain.generate, plain.wanted)
    assert is_same is (option.names[0] in without_effect)


@given(st.lists(st.sampled_from(INPUTS), max_size=5, unique_by=lambda kind: kind.name), st.data())
def test_any_values_are_translated_or_refused(kinds: list[Any], drawn: st.DataObject) -> None:
    """Nothing else is raised, and a refusal says which value is meant."""
    inputs = [drawn.draw(tensors(kind.name, (kind.datatype, "INT64", "FP64", BYTES))) for kind in kinds]
    inference = translated_or_refused(inference_request(*inputs))
    assert isinstance(inference, Inference) or inference.violations


def test_refusal_of_a_field_is_told_in_the_clients_words() -> None:
    inference = translated(one("runtime_top_p", "FP32", 2.0), vllm(max_tokens=0))
    error = invalid(
        FieldViolation("sampling.top_p", "is 2; must be at most 1"),
        FieldViolation("stopping.max_tokens", "is 0; must be at least 1"),
        FieldViolation("text_bytes", "has 9 bytes"),
    )
    told = in_client_words(error, inference.client_names)
    assert told.description == (
        "inputs[runtime_top_p]: is 2; must be at most 1; "
        "inputs[sampling_parameters].max_tokens: is 0; must be at least 1; inputs[text_input]: has 9 bytes"
    )
    assert [violation.field for violation in told.violations] == [
        "inputs[runtime_top_p]",
        "inputs[sampling_parameters].max_tokens",
        "inputs[text_input]",
    ]


async def responses_of(inference: Inference, *events: inference_pb2.StreamEvent) -> list[dict[str, Any]]:
    sent: list[dict[str, Any]] = []

    async def send(response: grpc_service_pb2.ModelInferResponse) -> None:
        request = grpc_service_pb2.ModelInferRequest(raw_input_contents=response.raw_output_contents)
        for output in response.outputs:
            request.inputs.add(name=output.name, datatype=output.datatype, shape=output.shape)
        tensors_of = {name: list(tensor.elements) for name, tensor in decode_inputs(request).items()}
        sent.append({**tensors_of, "final": response.parameters["triton_final_response"].bool_param})

    responder = Responder(inference.wanted, send)
    for event in events:
        await responder.write(event)
    return sent


EVENTS = (
    inference_pb2.StreamEvent(accepted=inference_pb2.Accepted(prompt_tokens=3)),
    inference_pb2.StreamEvent(delta=inference_pb2.Delta(num_tokens=2, text="ab", token_ids=[1, 2])),
    inference_pb2.StreamEvent(delta=inference_pb2.Delta(num_tokens=1, text="c", token_ids=[3])),
    inference_pb2.StreamEvent(finished=inference_pb2.Finished(reason=types_pb2.FINISH_REASON_STOP_STRING)),
    inference_pb2.StreamEvent(done=inference_pb2.Done()),
)


async def test_streamed_answer_comes_in_pieces_and_ends_with_a_final_response() -> None:
    stream = one("stream", "BOOL", True)
    plain = await responses_of(translated(stream), *EVENTS)
    assert plain == [
        {"text_output": [b"ab"], "final": False},
        {"text_output": [b"c"], "final": False},
        {"text_output": [b""], "final": True},
    ]
    ends_empty = translated(stream, parameters={"triton_enable_empty_final_response": True})
    assert (await responses_of(ends_empty, *EVENTS))[-1] == {"final": True}
    flags = [one(f"return_{name}", "BOOL", True) for name in ("finish_reason", "num_output_tokens", "num_input_tokens")]
    told = await responses_of(translated(stream, *flags), *EVENTS)
    assert [response["finish_reason"] for response in told] == [[b"None"], [b"None"], [b"stop"]]
    assert [response["num_output_tokens"] for response in told] == [[2], [1], [0]]
    assert told[0]["num_input_tokens"] == [3]


@pytest.mark.parametrize(("is_unfinished", "reason"), [(False, b"stop"), (True, b"length")])
async def test_form_that_a_stop_cuts_is_reported_as_incomplete(is_unfinished: bool, reason: bytes) -> None:
    stopped = inference_pb2.Finished(reason=types_pb2.FINISH_REASON_STOP_STRING, constraint_unfinished=is_unfinished)
    events = (*EVENTS[:3], inference_pb2.StreamEvent(finished=stopped), EVENTS[4])
    (told,) = await responses_of(translated(one("return_finish_reason", "BOOL", True)), *events)
    assert told["finish_reason"] == [reason]


async def test_whole_answer_is_one_response_with_the_prompt_where_it_is_wanted() -> None:
    inference = translated(one("exclude_input_in_output", "BOOL", False))
    assert await responses_of(inference, *EVENTS) == [{"text_output": [b"helloabc"], "final": True}]
    by_ids = translate(inference_request(one("input_ids", "INT32", 1)))
    assert await responses_of(by_ids, *EVENTS) == [
        {"text_output": [b"abc"], "output_ids": [1, 2, 3], "sequence_length": [3], "final": True}
    ]


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_each_choice_has_a_row(is_streamed: bool) -> None:
    flags = [one(f"return_{name}", "BOOL", True) for name in ("finish_reason", "log_probs")]
    asked = [one("input_ids", "INT32", 1), one("num_return_sequences", "INT32", 2), one("stream", "BOOL", is_streamed)]
    inference = translate(inference_request(*asked, *flags))
    assert inference.generate.n == 2
    second = inference_pb2.Delta(choice=1, num_tokens=1, text="x", token_ids=[9], logprobs=[LOGPROBS[0]])
    finished = inference_pb2.Finished(choice=1, reason=types_pb2.FINISH_REASON_LENGTH)
    accepted, *rest, done = EVENTS
    news = [inference_pb2.StreamEvent(delta=second), *rest, inference_pb2.StreamEvent(finished=finished)]
    responses = await responses_of(inference, accepted, *news, done)
    texts = [b"".join(parts) for parts in zip(*(response["text_output"] for response in responses), strict=True)]
    assert (texts, responses[-1]["finish_reason"]) == ([b"abc", b"x"], [b"stop", b"length"])
    if not is_streamed:
        assert responses[0]["output_ids"] == [1, 2, 3, 9, 0, 0]
        assert (responses[0]["sequence_length"], responses[0]["cum_log_probs"]) == ([3, 1], [0, -0.5])
    else:
        assert [response["sequence_length"] for response in responses] == [[0, 1], [2, 0], [1, 0], [0, 0]]


def test_metadata_and_configuration_list_every_tensor() -> None:
    metadata, config = model_metadata("m"), model_config("m", {"context_length": "9"}).config
    assert [tensor.name for tensor in metadata.inputs] == [tensor.name for tensor in config.input]
    assert {tensor.name for tensor in metadata.inputs} == {kind.name for kind in INPUTS}
    assert len(metadata.outputs) == len(config.output) == len(OUTPUTS)
    assert config.model_transaction_policy.decoupled
    assert config.parameters["context_length"].string_value == "9"


def known(*values: tuple[int, bytes, float]) -> types_pb2.PositionLogprobs:
    """What the router says of a position: the token produced, then the likeliest ones."""
    chosen, *top = [types_pb2.TokenLogprob(token_id=i, text_bytes=text, logprob=logprob) for i, text, logprob in values]
    return types_pb2.PositionLogprobs(chosen=chosen, top=top)


LOGPROBS = (
    known((1, b"a", -0.5), (1, b"a", -0.5), (7, b"\xf0\x9f", -1.0)),
    known((2, b"b", -2.0), (9, b"i", -0.25), (8, b"h", -math.inf)),
    types_pb2.PositionLogprobs(),
)


@pytest.mark.parametrize("is_streamed", [False, True])
async def test_log_probabilities_are_tensors_as_both_backends_have_them(is_streamed: bool) -> None:
    flags = [one(f"return_{name}", "BOOL", True) for name in ("log_probs", "logprobs", "cumulative_logprob")]
    accepted, _, _, *ending = EVENTS
    deltas = [inference_pb2.Delta(num_tokens=1, logprobs=[values]) for values in LOGPROBS[:2]]
    news = [inference_pb2.StreamEvent(delta=delta) for delta in deltas]
    inference = translated(one("stream", "BOOL", is_streamed), *flags)
    responses = await responses_of(inference, accepted, *news, *ending)
    told = [one for response in responses for one in response["output_log_probs"]]
    assert told == [-0.5, -2.0]
    cumulative = [[-0.5], [-2.5], [-2.5]] if is_streamed else [[-2.5]]
    assert [response["cum_log_probs"] for response in responses] == cumulative
    assert [response["cumulative_logprob"] for response in responses] == cumulative
    by_position = [one for response in responses for one in json.loads(response["logprobs"][0])]
    assert by_position == [
        {
            "1": {"logprob": -0.5, "rank": 1, "decoded_token": "a"},
            "7": {"logprob": -1.0, "rank": 2, "decoded_token": "\ufffd"},
        },
        {
            "9": {"logprob": -0.25, "rank": 1, "decoded_token": "i"},
            "8": {"logprob": -9999.0, "rank": 2, "decoded_token": "h"},
            "2": {"logprob": -2.0, "rank": None, "decoded_token": "b"},
        },
    ]


async def test_log_probabilities_that_are_not_known_any_more_are_no_numbers() -> None:
    flags = [one(f"return_{name}", "BOOL", True) for name in ("log_probs", "logprobs")]
    delta = inference_pb2.Delta(num_tokens=2, logprobs=[LOGPROBS[0], LOGPROBS[2]])
    events = (EVENTS[0], inference_pb2.StreamEvent(delta=delta), *EVENTS[-2:])
    (response,) = await responses_of(translated(*flags), *events)
    first, second = response["output_log_probs"]
    assert first == -0.5
    assert math.isnan(second)
    assert math.isnan(response["cum_log_probs"][0])
    assert json.loads(response["logprobs"][0])[1] is None


@pytest.mark.parametrize(
    ("kind", "guide", "constraint"),
    [
        ("json", "", types_pb2.Constraint(json_object=True)),
        ("json_schema", '{"type": "null"}', types_pb2.Constraint(json_schema='{"type": "null"}')),
        ("regex", "a+", types_pb2.Constraint(regex="a+")),
        ("lark_grammar", "start: A", types_pb2.Constraint(grammar="start: A")),
    ],
)
def test_guides_of_tensorrt_llm_are_constraints(kind: str, guide: str, constraint: types_pb2.Constraint) -> None:
    type_tensor = one("guided_decoding_guide_type", BYTES, kind.encode())
    assert generated(type_tensor, one("guided_decoding_guide", BYTES, guide.encode())).constraint == constraint
    as_json = vllm(guided_decoding_guide_type=kind, **({"guided_decoding_guide": guide} if guide else {}))
    assert generated(as_json).constraint == constraint
    empty = one("guided_decoding_guide_type", BYTES, b""), one("guided_decoding_guide", BYTES, b"")
    assert not generated(*empty).HasField("constraint")


@pytest.mark.parametrize(
    ("kind", "guide", "named"),
    [
        (b"ebnf_grammar", b"root ::= a", "guided_decoding_guide_type"),
        (b"", b"a", "guided_decoding_guide_type"),
        (b"regex", b"", "guided_decoding_guide"),
        (b"json", b"{}", "guided_decoding_guide"),
        (b"regex", b"\xff", "guided_decoding_guide"),
    ],
)
def test_guide_that_is_none_of_ours_is_refused_by_name(kind: bytes, guide: bytes, named: str) -> None:
    tensors = one("guided_decoding_guide_type", BYTES, kind), one("guided_decoding_guide", BYTES, guide)
    assert refusal(PROMPT, *tensors).startswith(f"inputs[{named}]: ")


def test_refused_schema_is_told_as_the_guide() -> None:
    names = translated(
        one("guided_decoding_guide_type", BYTES, b"json_schema"), one("guided_decoding_guide", BYTES, b"{}")
    ).client_names
    error = in_client_words(invalid(FieldViolation("constraint.json_schema", "is not JSON")), names)
    assert error.description == "inputs[guided_decoding_guide]: is not JSON"
