"""The gateway's pure parts: conversion of bodies to requests, refusals, event ids, error statuses."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import grpc
import pytest
from hypothesis import given
from hypothesis import strategies as st

from inflight.common.errors import Reason
from inflight.common.settings import SettingError
from inflight.errors import FieldError, InflightError
from inflight.events import FinishReason
from inflight.gateway.answers import OwnForm
from inflight.gateway.bodies import (
    MAX_BODY_NESTING,
    MAX_PROMPT_VALUES,
    MAX_VALUES,
    UNSUPPORTED_IN_CHAT,
    UNSUPPORTED_IN_COMPLETIONS,
    parse_chat,
    parse_completion,
)
from inflight.gateway.conversion import (
    MAX_VARIABLES_NESTING,
    UNSTREAMED_INTERVAL,
    ApiRequest,
    Defaults,
    convert_chat,
    convert_completion,
)
from inflight.gateway.errors import _OF_REASON, ApiError, from_end, from_router
from inflight.gateway.event_ids import AnswerId, Place, event_id, read_event_id
from inflight.gateway.exchange import route_of
from inflight.gateway.main import open_certificates, warn_of_unknown_names
from inflight.gateway.settings import GatewaySettings
from inflight.v1 import inference_pb2, types_pb2

DEFAULTS = Defaults(max_choices=16)
HI = [{"role": "user", "content": "hi"}]


def chat(key: str = "", defaults: Defaults = DEFAULTS, **fields: Any) -> ApiRequest:
    body = {"model": "m", "messages": HI, **fields}
    return convert_chat(parse_chat(json.dumps(body).encode()), defaults, key)


def completion(key: str = "", **fields: Any) -> ApiRequest:
    body = {"model": "m", "prompt": "hi", **fields}
    return convert_completion(parse_completion(json.dumps(body).encode()), DEFAULTS, key)


def test_parameters_become_the_routers_fields() -> None:
    api_request = chat(
        temperature=0.5, top_p=0.9, top_k=-1, seed=-1, stop="x", max_completion_tokens=7, min_tokens=2, ignore_eos=True,
        stop_token_ids=[3], frequency_penalty=1, logit_bias={"5": -100}, user="u", metadata={"a": "b"},
        prompt_cache_key="s", priority=1, chat_template_kwargs={"thinking": False}, truncate_prompt_tokens=9,
        presence_penalty=-1, repetition_penalty=1.5, min_p=0.25, no_repeat_ngram_size=3, bad_words=["no"],
        allowed_token_ids=[5, 6],
    )  # fmt: skip
    expected = inference_pb2.GenerateRequest(
        model="m",
        sampling=types_pb2.SamplingParams(
            temperature=0.5,
            top_p=0.9,
            top_k=0,
            seed=2**64 - 1,
            frequency_penalty=1,
            logit_bias={5: -100},
            presence_penalty=-1,
            repetition_penalty=1.5,
            min_p=0.25,
            no_repeat_ngram_size=3,
            bad_words=["no"],
            allowed_token_ids=[5, 6],
        ),
        stopping=types_pb2.StoppingParams(max_tokens=7, min_tokens=2, stop=["x"], stop_token_ids=[3], ignore_eos=True),
        priority=types_pb2.PRIORITY_CLASS_BATCH,
        session_id="s",
        truncate_prompt_tokens=9,
        metadata={"user": "u", "a": "b"},
        output=inference_pb2.OutputOptions(stream_interval=UNSTREAMED_INTERVAL, parts=True),
    )
    message = inference_pb2.ChatMessage(role="user", content=[inference_pb2.ContentPart(text="hi")])
    expected.chat.messages.append(message)
    expected.chat.template_kwargs.update({"thinking": False})
    assert api_request.requests == (expected,)
    assert (api_request.is_stream, api_request.renamed) == (False, {"max_tokens": "max_completion_tokens"})


def test_what_is_left_out_is_left_to_the_model() -> None:
    (request,) = chat().requests
    assert not request.HasField("sampling") or request.sampling == types_pb2.SamplingParams()
    assert not request.stopping.HasField("max_tokens")
    assert request.priority == types_pb2.PRIORITY_CLASS_UNSPECIFIED
    # but OpenAI's completions are short by default
    assert completion().requests[0].stopping.max_tokens == 16


SCHEMA = {"type": "object", "properties": {"b": {"type": "string"}, "a": {"type": "null"}}}
SCHEMA_TEXT = json.dumps(SCHEMA)


@pytest.mark.parametrize(
    ("fields", "constraint"),
    [
        ({"response_format": {"type": "json_object"}}, {"json_object": True}),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA}}},
         {"json_schema": SCHEMA_TEXT}),
        ({"response_format": {"type": "json_schema",
                              "json_schema": {"name": "x", "schema": SCHEMA, "strict": False, "description": "d"}}},
         {"json_schema": SCHEMA_TEXT}),
        ({"structured_outputs": {"json": SCHEMA}}, {"json_schema": SCHEMA_TEXT}),
        ({"structured_outputs": {"json": SCHEMA_TEXT, "disable_any_whitespace": True}},
         {"json_schema": SCHEMA_TEXT, "max_whitespace": 0}),
        ({"structured_outputs": {"json_object": True, "disable_fallback": True}}, {"json_object": True}),
        ({"structured_outputs": {"regex": "a+"}}, {"regex": "a+"}),
        ({"structured_outputs": {"choice": ["a", "b"]}}, {"choice": {"choices": ["a", "b"]}}),
        ({"structured_outputs": {"grammar": "start: A"}}, {"grammar": "start: A"}),
        ({"guided_json": SCHEMA}, {"json_schema": SCHEMA_TEXT}),
        ({"guided_json": SCHEMA_TEXT}, {"json_schema": SCHEMA_TEXT}),
        ({"guided_regex": "a+"}, {"regex": "a+"}),
        ({"guided_choice": ["a", "b"]}, {"choice": {"choices": ["a", "b"]}}),
        ({"guided_choice": []}, {"choice": {}}),  # the router refuses it
        ({"guided_grammar": "start: A"}, {"grammar": "start: A"}),
    ],
)  # fmt: skip
def test_forms_of_the_output_are_constraints(fields: dict[str, Any], constraint: dict[str, Any]) -> None:
    for api_request in (chat(**fields), completion(**fields)):
        assert api_request.requests[0].constraint == types_pb2.Constraint(**constraint)
    assert not chat(response_format={"type": "text"}).requests[0].HasField("constraint")


@pytest.mark.parametrize(
    ("fields", "field", "param"),
    [
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {}}}},
         "constraint.json_schema", "response_format.json_schema.schema"),
        ({"structured_outputs": {"choice": ["a"]}}, "constraint.choice.choices", "structured_outputs.choice"),
        ({"guided_regex": "("}, "constraint.regex", "guided_regex"),
    ],
)  # fmt: skip
def test_refused_form_is_named_as_the_client_named_it(fields: dict[str, Any], field: str, param: str) -> None:
    error = InflightError(
        grpc.StatusCode.INVALID_ARGUMENT, "…", reason="INVALID_FIELD", fields=(FieldError(field, "bad"),)
    )
    refusal = from_router(error, "messages", chat(**fields).renamed)
    assert (refusal.status, refusal.param, refusal.text) == (400, param, f"{param}: bad")


@pytest.mark.parametrize(
    ("field", "description", "text"),
    [
        ("chat.functions[1].name", "is empty", "tools[1].function.name: is empty"),
        ("chat.functions", "has 513 functions", "tools: has 513 functions"),
        (
            "tool_choice.names[0]",
            "is 'chat.functions', which is not among the names in chat.functions",
            "tool_choice: is 'chat.functions', which is not among the names in tools",
        ),
        (
            "constraint",
            "is given together with functions that the model may call; set tool_choice.mode to MODE_NONE",
            'guided_regex: is given together with functions that the model may call; set tool_choice to "none"',
        ),
        (
            "tool_choice.mode",
            "is MODE_REQUIRED, but chat.functions is empty",
            "tool_choice: is MODE_REQUIRED, but tools is empty",
        ),
        (
            "chat",
            "the model has no chat template; send text or token_ids",
            "messages: the model has no chat template; use /v1/completions",
        ),
        (
            "chat.messages[1].tool_calls[0].name",
            "is empty",
            "messages[1].tool_calls[0].function.name: is empty",
        ),
        ("chat.template_kwargs.messages", "is reserved", "chat_template_kwargs.messages: is reserved"),
        ("chat.functions[0].name", 'is "a\\" chat.functions"', 'tools[0].function.name: is "a\\" chat.functions"'),
    ],
)
def test_errors_of_the_router_have_the_paths_of_this_api(field: str, description: str, text: str) -> None:
    wrong = InflightError(grpc.StatusCode.INVALID_ARGUMENT, "…", "INVALID_FIELD", (FieldError(field, description),))
    told = from_router(wrong, "messages", chat(guided_regex="a").renamed)
    assert (told.text, told.param) == (text, text.partition(": ")[0])


def test_errors_use_the_words_of_this_api() -> None:
    with pytest.raises(ApiError, match=r"^response_format: must be an object$"):
        chat(response_format="json")
    with pytest.raises(ApiError, match=r"^model: must have at least 1 character$"):
        chat(model="")


TOOL = {"type": "function", "function": {"name": "f"}}
MODES = "'none', 'auto' or 'required', or an object"


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"stop": 5}, "stop: must be a string or a list of strings"),
        ({"stop": ["a", 5]}, "stop[1]: must be a string"),
        ({"priority": "soon"}, "priority: must be 'interactive', 'standard' or 'batch', or an integer"),
        ({"priority": 2**40}, "priority: must be less than or equal to 2147483647"),
        ({"guided_json": 5}, "guided_json: must be a string, an object, or true or false"),
        ({"tools": [TOOL], "tool_choice": "f"}, f"tool_choice: must be {MODES}"),
        ({"tools": [TOOL], "tool_choice": 5}, f"tool_choice: must be {MODES}"),
        ({"messages": [{"role": "user", "content": 5}]}, "messages[0].content: must be a string or a list of objects"),
        ({"messages": [{"role": "user", "content": [{"type": "text"}]}]}, "messages[0].content[0].text: is required"),
    ],
)
def test_error_of_a_parameter_with_alternatives_names_all_of_them(fields: dict[str, Any], text: str) -> None:
    with pytest.raises(ApiError) as refused:
        chat(**fields)
    assert (refused.value.status, refused.value.text, refused.value.param) == (400, text, text.partition(": ")[0])


@pytest.mark.parametrize(
    ("choice", "text"),
    [
        ({}, "tool_choice.type: is required"),
        ({"type": "custom"}, "tool_choice.type: must be 'function' or 'allowed_tools'"),
        ({"type": "function"}, "tool_choice.function: is required"),
        ({"type": "function", "function": {"name": 5}}, "tool_choice.function.name: must be a string"),
        ({**TOOL, "name": "f"}, "tool_choice.name: is not a known parameter"),
        ({"type": "allowed_tools"}, "tool_choice.allowed_tools: is required"),
        (
            {"type": "allowed_tools", "allowed_tools": {"mode": "none", "tools": [TOOL]}},
            "tool_choice.allowed_tools.mode: must be 'auto' or 'required'",
        ),
    ],
)
def test_error_within_an_alternative_is_that_of_the_type_that_is_named(choice: dict[str, Any], text: str) -> None:
    with pytest.raises(ApiError) as refused:
        chat(tools=[TOOL], tool_choice=choice)
    assert (refused.value.text, refused.value.param) == (text, text.partition(": ")[0])


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"response_format": {"type": "json"}}, ".type: must be 'text', 'json_object' or 'json_schema'"),
        ({"response_format": {"type": "json_schema"}}, ".json_schema: is required with the type json_schema"),
        (
            {"response_format": {"type": "text", "json_schema": {"name": "a", "schema": {}}}},
            ".json_schema: is allowed only with the type json_schema",
        ),
        (
            {"structured_outputs": {"whitespace_pattern": "x"}},
            ".whitespace_pattern: is not supported; whitespace is at most 8 characters, or none with "
            "disable_any_whitespace",
        ),
        ({"metadata": {"str": 5}}, ".str: must be a string"),
        ({"metadata": {str(number): "" for number in range(17)}}, ": must have at most 16 items"),
    ],
)
def test_error_about_two_fields_together_names_the_wrong_one(fields: dict[str, Any], text: str) -> None:
    with pytest.raises(ApiError) as refused:
        chat(**fields)
    whole = next(iter(fields)) + text
    assert (refused.value.text, refused.value.param) == (whole, whole.partition(": ")[0])


def test_messages_keep_roles_parts_and_calls() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    answered = {"role": "assistant", "content": None, "tool_calls": [call], "refusal": None, "annotations": []}
    messages = [
        {"role": "developer", "content": parts}, answered, {"role": "tool", "content": "4", "tool_call_id": "1"},
    ]  # fmt: skip
    developer, assistant, tool = chat(messages=messages).requests[0].chat.messages
    assert (developer.role, [part.text for part in developer.content]) == ("system", ["a\nb"])
    assert (assistant.tool_calls[0].name, len(assistant.content)) == ("f", 0)
    assert tool.tool_call_id == "1"


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [("a", ["a"]), (["a", "b"], ["a", "b"]), ([1, 2], [[1, 2]]), ([[1, 2], [3]], [[1, 2], [3]])],
)
def test_prompts_may_be_texts_and_token_ids(prompt: Any, prompts: list[Any]) -> None:
    api_request = completion(prompt=prompt)
    assert [request.text or list(request.token_ids.ids) for request in api_request.requests] == prompts


def test_allowed_token_ids_may_be_a_large_part_of_the_vocabulary() -> None:
    (request,) = completion(allowed_token_ids=list(range(65_536))).requests
    assert list(request.sampling.allowed_token_ids) == list(range(65_536))


def test_choices_of_a_prompt_differ_by_their_seed_and_every_choice_by_its_key() -> None:
    api_request = completion(key="k", prompt=["a", "b"], n=2, seed=2**63 - 1)
    assert [(request.text, request.n) for request in api_request.requests] == [("a", 2), ("b", 2)]
    assert [request.sampling.seed for request in api_request.requests] == [2**63 - 1] * 2
    assert [request.idempotency_key for request in api_request.requests] == ["k", "k:1"]
    assert not any(request.sampling.HasField("seed") for request in completion(n=2).requests)


def test_best_of_is_the_routers_and_excludes_a_stream() -> None:
    (request,) = completion(n=2, best_of=5).requests
    assert (request.n, request.best_of) == (2, 5)
    assert completion(best_of=1).requests == completion().requests
    assert completion(n=2, best_of=2, stream=True).requests[0].best_of == 0
    wrong: tuple[dict[str, Any], ...] = ({"n": 3, "best_of": 2}, {"best_of": 2, "stream": True}, {"best_of": 0})
    for fields in wrong:
        with pytest.raises(ApiError) as refused:
            completion(**fields)
        assert (refused.value.status, refused.value.param) == (400, "best_of")


def test_priorities_by_name_number_and_tier() -> None:
    def of(**fields: Any) -> types_pb2.PriorityClass:
        return chat(**fields).requests[0].priority

    assert of(priority="interactive") == of(priority=-3) == of(service_tier="priority")
    assert of(priority="batch") == of(priority=3) == of(service_tier="flex") == types_pb2.PRIORITY_CLASS_BATCH
    assert of(priority=0) == of(service_tier="auto") == types_pb2.PRIORITY_CLASS_UNSPECIFIED
    batch = Defaults(max_choices=1, priority="batch")
    assert chat(defaults=batch).requests[0].priority == types_pb2.PRIORITY_CLASS_BATCH


def test_a_stream_goes_on_without_its_client_only_where_that_is_asked_for() -> None:
    assert not chat(stream=True).requests[0].HasField("resume_ttl")
    assert chat(stream=True, resume_ttl_s=2.5).requests[0].resume_ttl.ToMilliseconds() == 2500
    lasting = Defaults(max_choices=1, resume_ttl_s=4.0)
    assert chat(defaults=lasting, stream=True).requests[0].resume_ttl.seconds == 4
    assert not chat(defaults=lasting, stream=True, resume_ttl_s=0).requests[0].HasField("resume_ttl")
    assert not chat(defaults=lasting).requests[0].HasField("resume_ttl")
    assert chat(stream=True).requests[0].want_queue_events
    assert not chat().requests[0].want_queue_events


def test_inter_token_target_is_passed_on() -> None:
    assert chat(inter_token_target_ms=40).requests[0].inter_token_target_ms == 40
    assert not chat().requests[0].HasField("inter_token_target_ms")


def test_limit_of_drafts_is_passed_on_and_zero_is_a_limit() -> None:
    assert chat(max_drafts=0).requests[0].HasField("max_drafts")
    assert chat(max_drafts=3).requests[0].max_drafts == 3
    assert not chat().requests[0].HasField("max_drafts")
    assert chat(exact_resume=True).requests[0].exact_resume


def test_tokens_per_event_are_those_asked_for_and_more_where_nothing_is_streamed() -> None:
    assert chat(stream=True, stream_interval=8).requests[0].output.stream_interval == 8
    assert not chat(stream=True).requests[0].output.HasField("stream_interval")
    assert chat().requests[0].output.stream_interval == UNSTREAMED_INTERVAL > 1


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"foo": 1}, "foo"),
        ({"stream_interval": 8}, "stream_interval"),
        ({"stream": True, "stream_interval": 0}, "stream_interval"),
        ({"stream": True, "stream_interval": 1025}, "stream_interval"),
        ({"inter_token_target_ms": 0}, "inter_token_target_ms"),
        ({"inter_token_target_ms": 60_001}, "inter_token_target_ms"),
        ({"max_drafts": -1}, "max_drafts"),
        ({"max_drafts": 65}, "max_drafts"),
        ({"tools": [{"type": "function"}]}, "tools[0].function"),
        ({"tools": [{"type": "custom", "custom": {"name": "f"}}]}, "tools[0].type"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"messages": [{"role": "tool", "content": "1", "tool_call_id": "c"}]}, "messages[0].tool_call_id"),
        ({"response_format": {"type": "xml"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema"),
        ({"response_format": {"type": "json_object", "json_schema": {"name": "a", "schema": {}}}},
         "response_format.json_schema"),
        ({"response_format": {"type": "json_schema", "json_schema": {"name": "a"}}},
         "response_format.json_schema.schema"),
        ({"structured_outputs": {}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs"),
        ({"structured_outputs": {"regex": "a", "whitespace_pattern": " "}}, "structured_outputs.whitespace_pattern"),
        ({"structured_outputs": {"structural_tag": "{}"}}, "structured_outputs.structural_tag"),
        ({"structured_outputs": {"json": 3}}, "structured_outputs.json"),
        ({"guided_json": {}, "guided_regex": "a"}, "guided_regex"),
        ({"response_format": {"type": "json_object"}, "guided_choice": ["a"]}, "guided_choice"),
        ({"guided_whitespace_pattern": " "}, "guided_whitespace_pattern"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
         "messages[0].content[0].type"),
        ({"messages": [{"role": "king", "content": "x"}]}, "messages[0].role"),
        ({"messages": "hi"}, "messages"),
        ({"stop": ["a", 1]}, "stop[1]"),
        ({"temperature": "warm"}, "temperature"),
        ({"max_tokens": 1.5}, "max_tokens"),
        ({"max_tokens": -1}, "max_tokens"),
        ({"max_tokens": 1, "max_completion_tokens": 2}, "max_completion_tokens"),
        ({"n": 17}, "n"),
        ({"n": 0}, "n"),
        ({"seed": 2**64}, "seed"),
        ({"logit_bias": {"x": 1}}, "logit_bias"),
        ({"bad_words": "x"}, "bad_words"),
        ({"bad_words": ["x", 1]}, "bad_words[1]"),
        ({"allowed_token_ids": [1, -1]}, "allowed_token_ids[1]"),
        ({"allowed_token_ids": [1] * 65_537}, "allowed_token_ids"),
        ({"allowed_token_ids": [[1]]}, "allowed_token_ids[0]"),
        ({"no_repeat_ngram_size": -1}, "no_repeat_ngram_size"),
        ({"logit_bias": {"0" * 11 + "9" * 11: 1}}, "logit_bias"),
        ({"logit_bias": {"0" * 5000: 1}}, "logit_bias"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"stream": True, "stream_options": {"include_obfuscation": True}}, "stream_options.include_obfuscation"),
        ({"resume_ttl_s": 5}, "resume_ttl_s"),
        ({"chat_template_kwargs": {"x": 10**400}}, "chat_template_kwargs"),
        ({"model": None}, "model"),
    ],
)  # fmt: skip
def test_what_cannot_be_done_is_refused_by_name(fields: dict[str, Any], param: str) -> None:
    with pytest.raises(ApiError) as refused:
        chat(**fields)
    assert (refused.value.status, refused.value.param) == (400, param)
    assert refused.value.text.startswith(param.partition("_options")[0])


@pytest.mark.parametrize("prompt", [[], [[]], ["a", 1], [[1], "a"], [-1], [2**32], [True], 5, None, [[1], []]])
def test_prompts_that_are_none_are_refused(prompt: Any) -> None:
    with pytest.raises(ApiError, match="prompt") as refused:
        completion(prompt=prompt)
    assert refused.value.status == 400


@pytest.mark.parametrize("fields", [{"suffix": "x"}, {"skip_special_tokens": False}, {"use_beam_search": True}])
def test_unsupported_parameters_of_completions_are_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ApiError) as refused:
        completion(**fields)
    assert (refused.value.param, refused.value.code) == (next(iter(fields)), "unsupported_parameter")


def test_unsupported_parameters_are_taken_where_they_ask_for_nothing() -> None:
    for values in zip(*(((name, None), *((name, value) for value in neutral))[:2] for name, neutral in
                        UNSUPPORTED_IN_CHAT.items() if neutral), strict=True):  # fmt: skip
        chat(**dict(values))
    for name, neutral in UNSUPPORTED_IN_COMPLETIONS.items():
        for value in (None, *neutral):
            completion(**{name: value})


def test_event_ids_say_where_the_client_is() -> None:
    places = [
        Place("key-1", "t_1-", 5, 17), Place("a.b:c", "t2", 0, 0, has_finished=True), Place("d", "t3", 2, 9, False, 4),
        Place("e", "t4", 0, 0, False, 0, 7),
    ]  # fmt: skip
    answer = AnswerId("chatcmpl-12", 1700000000)
    text = event_id(answer, places)
    assert "\n" not in text
    assert read_event_id(text) == (answer, places)
    assert not event_id(answer, [*places, Place()])
    assert not event_id(answer, places * 5)


GROUPS = ("r,t,-1,0,", "r,t,0,0,x", "r,t,0,0,,", "r,t,0,0,f,-1")


@pytest.mark.parametrize(
    "text", ["", "5", "1~a~b", "1~a~5~", "2~a~5~r,t,0,0,", *(f"1~a~5~{group}" for group in GROUPS)]
)
def test_what_is_no_event_id_is_refused(text: str) -> None:
    with pytest.raises(ApiError) as refused:
        read_event_id(text)
    assert (refused.value.status, refused.value.param) == (400, "Last-Event-ID")


def test_every_reason_has_a_status_and_retries_only_where_they_help() -> None:
    assert set(_OF_REASON) == set(Reason)
    error = InflightError(grpc.StatusCode.RESOURCE_EXHAUSTED, "slow down", "RATE_LIMITED", retry_after_s=1.2)
    limited = from_router(error, "prompt")
    assert limited.headers() == {"retry-after": "2", "retry-after-ms": "1200"}
    shut_out = from_router(InflightError(grpc.StatusCode.RESOURCE_EXHAUSTED, "no", "RATE_LIMITED"), "prompt")
    assert shut_out.headers() == {"x-should-retry": "false"}
    poison = from_router(InflightError(grpc.StatusCode.INTERNAL, "died", "ATTEMPTS_EXHAUSTED"), "prompt")
    assert (poison.status, poison.may_retry) == (500, False)
    unreachable = from_router(InflightError(grpc.StatusCode.UNAVAILABLE, "10.1.2.3: connection refused"), "prompt")
    assert (unreachable.status, unreachable.text) == (503, "the router could not be reached")
    resolving = "errors resolving router-7:50051: [field:hostname lookup error:Domain name not found]"
    unknown = from_router(InflightError(grpc.StatusCode.UNAVAILABLE, resolving), "prompt")
    text = "the router could not be reached: its host name cannot be resolved"
    assert (unknown.status, unknown.text) == (503, text)
    assert from_end(FinishReason.DEADLINE).status == 504


@pytest.mark.parametrize(
    ("field", "param"),
    [
        ("sampling.temperature", "temperature"),
        ("stopping.max_tokens", "max_completion_tokens"),
        ("stopping.stop[2]", "stop[2]"),
        ("chat.messages[1].role", "messages[1].role"),
        ("chat", "messages"),
        ("model", "model"),
        ("session_id", "prompt_cache_key"),
        ("offsets[0]", "Last-Event-ID"),
    ],
)
def test_the_routers_fields_get_openais_names(field: str, param: str) -> None:
    wrong = InflightError(grpc.StatusCode.INVALID_ARGUMENT, "", "INVALID_FIELD", (FieldError(field, "is wrong"),))
    told = from_router(wrong, "messages", {"max_tokens": "max_completion_tokens"})
    assert (told.status, told.param, told.text) == (400, param, f"{param}: is wrong")


def test_routes_are_counted_under_names_that_clients_cannot_choose() -> None:
    assert [route_of(path) for path in ("/v1/models", "/v1/models/a/b", "/x", "/v1/x")] == [
        "/v1/models", "/v1/models/{id}", "other", "other",
    ]  # fmt: skip


NAMES = st.sampled_from(
    (
        *("model", "messages", "prompt", "n", "stop", "stream", "stream_options", "temperature", "seed", "logit_bias"),
        *("role", "content", "type", "text", "max_tokens", "metadata", "user", "priority", "chat_template_kwargs"),
    )
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.sampled_from(["user", "text", "m"]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(NAMES | st.text(), inner, max_size=5),
    max_leaves=12,
)


def told(parse: Callable[[bytes], Any], convert: Callable[[Any, Defaults, str], ApiRequest], raw: bytes) -> int:
    """What a body gets: the status, or 200 where it is a request that can be sent."""
    try:
        for request in convert(parse(raw), DEFAULTS, "").requests:
            assert inference_pb2.GenerateRequest.FromString(request.SerializeToString()) == request
    except ApiError as error:
        json.dumps(error.body())
        return error.status
    return 200


@given(st.dictionaries(NAMES, VALUES) | VALUES)
def test_any_json_is_a_request_or_refused_in_words(body: Any) -> None:
    for sound in ({}, {"model": "m", "messages": HI, "prompt": "hi"}):
        raw = json.dumps({**body, **sound} if isinstance(body, dict) else body).encode()
        assert told(parse_chat, convert_chat, raw) in (200, 400)
        assert told(parse_completion, convert_completion, raw) in (200, 400)


def test_what_nests_too_deep_is_refused() -> None:
    nested: Any = 1
    for _ in range(150):
        nested = {"a": nested}
    with pytest.raises(ApiError, match=r"chat_template_kwargs.* is nested more than 30 levels deep"):
        chat(chat_template_kwargs={"x": nested})
    with pytest.raises(ApiError, match="the body is nested more than 200 levels deep"):
        parse_chat(b"[" * 10_000)


def test_what_nests_as_deep_as_is_allowed_is_taken() -> None:
    levels = MAX_BODY_NESTING - 4  # of the body, the list of tools, the tool and its function
    schema = json.loads('{"not":' * levels + "1" + "}" * levels)
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    (request,) = chat(tools=tools).requests
    assert json.loads(request.chat.functions[0].parameters) == schema
    variables: Any = 1
    for _ in range(MAX_VARIABLES_NESTING):
        variables = {"a": variables}
    (request,) = chat(chat_template_kwargs=variables).requests
    assert type(request).FromString(request.SerializeToString()) == request


@pytest.mark.parametrize(
    "fields",
    [
        {"messages": [1] * MAX_VALUES},
        {"messages": [{"role": "user", "content": [{}] * MAX_VALUES}]},
        {"stop": [1] * MAX_VALUES},
        {"chat_template_kwargs": {"a": [[1] * (MAX_VALUES // 2)] * 3}},
        {f"a{i}": 1 for i in range(MAX_VALUES)},
    ],
    ids=["messages", "parts", "stop", "nested", "unknown"],
)
def test_body_of_more_values_than_can_be_read_in_a_moment_is_refused(fields: dict[str, Any]) -> None:
    with pytest.raises(ApiError) as refused:
        chat(**fields)
    assert (refused.value.status, refused.value.code) == (400, "request_too_large")


@pytest.mark.parametrize(
    "body",
    [b"[" + b"{}," * 1_000_000, b'{"a":[' + b'"",' * 1_000_000, b"[" * 1_000_000, b'{"prompt":[[1],' + b"{}," * 10**6],
    ids=["objects", "texts", "depth", "prompts"],
)
def test_body_of_too_many_values_is_refused_before_it_is_parsed(body: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inflight.gateway.bodies.from_json", lambda *_, **__: pytest.fail("it was parsed"))
    with pytest.raises(ApiError) as refused:
        parse_completion(body)
    assert (refused.value.status, refused.value.code) == (400, "request_too_large")


def test_prompts_of_too_many_token_ids_are_refused() -> None:
    with pytest.raises(ApiError, match=f"at most {MAX_PROMPT_VALUES} are allowed"):
        completion(prompt=[[1] * (MAX_PROMPT_VALUES // 2)] * 3)


def test_text_with_many_commas_is_no_list() -> None:
    assert completion(prompt='{"[,\\"' * MAX_VALUES).requests[0].text.startswith('{"[,')


def test_token_ids_of_prompts_are_not_counted_as_values() -> None:
    ids = [1] * (MAX_VALUES + 1)
    assert len(completion(prompt=[ids, ids]).requests) == 2


@given(st.binary())
def test_any_bytes_are_refused_in_words(raw: bytes) -> None:
    with pytest.raises(ApiError) as refused:
        parse_chat(raw)
    assert refused.value.status == 400


async def test_router_whose_name_cannot_be_resolved_is_logged_with_its_setting(
    caplog: pytest.LogCaptureFixture,
) -> None:
    await warn_of_unknown_names(("no..host:50051", "dns:///no..hosts:50051"))
    assert [record.levelname for record in caplog.records] == ["WARNING", "WARNING"]
    assert "--routers (INFLIGHT_ROUTERS): the host name of 'no..host:50051' cannot be resolved" in caplog.text
    assert "'dns:///no..hosts:50051'" in caplog.text
    caplog.clear()
    await warn_of_unknown_names(("localhost:50051", "127.0.0.1:1", "[::1]:1", "unix:/run/router", "ipv4:127.0.0.1:1"))
    assert not caplog.records


def test_certificate_that_cannot_be_used_is_a_wrong_setting(tmp_path: Path) -> None:
    nothing = tmp_path / "nothing.pem"
    nothing.write_text("nothing")
    with pytest.raises(SettingError, match="tls_cert_file"):
        open_certificates(GatewaySettings(tls_cert_file=nothing, tls_key_file=nothing))


@pytest.mark.parametrize(
    ("raw", "text"),
    [
        (b"\xef\xbb\xbf{}", "the body begins with a byte order mark; send it without"),
        ("{}".encode("utf-16"), "the body begins with a byte order mark of UTF-16 or UTF-32; it must be UTF-8"),
        ("{}".encode("utf-32-be"), None),
        (b'{"a": "\xff"}', "the body is not UTF-8: byte 7 is 0xff"),
        (b'{"a": "x\\ud83c"}', "the body has the unpaired surrogate \\ud83c, which is half a character"),
        (b'{"a": "\\uD83C\\u0041"}', "the body has the unpaired surrogate \\uD83C, which is half a character"),
        (b'{"a": "\\\\ud83c\\udc00"}', "the body has the unpaired surrogate \\udc00, which is half a character"),
        (b'{"a": "\\ud83c\\udf89 \\ud83c\\ud83c\\udf89"}', "the body has the unpaired surrogate \\ud83c"),
        (b'{"a": "\xed\xa0\x80"}', "the body has the unpaired surrogate \\ud800, which is half a character"),
        (b'{"a": "\\ud83c\\udf89" ', "the body is not JSON: "),
        (b'{"a": "\\u12"}', "the body is not JSON: "),
    ],
)  # fmt: skip
def test_error_of_a_body_names_what_is_wrong_with_its_characters(raw: bytes, text: str | None) -> None:
    with pytest.raises(ApiError) as refused:
        parse_chat(raw)
    assert (refused.value.status, refused.value.code) == (400, "invalid_json")
    assert text is None or refused.value.text.startswith(text)


def test_integers_may_be_written_with_a_fraction_of_zero() -> None:
    request = chat(
        max_tokens=4.0, n=2.0, top_k=-1.0, seed=5.0, stop_token_ids=[7.0], priority=1.0, top_logprobs=2.0, logprobs=True
    )
    (made,) = request.requests
    assert (made.stopping.max_tokens, made.n, made.sampling.seed) == (4, 2, 5)
    assert (list(made.stopping.stop_token_ids), made.output.top_logprobs) == ([7], 2)
    for prompt in ([1.0, 2], [[1, 2.0]]):
        (made,) = completion(prompt=prompt, best_of=1.0, logprobs=0.0).requests
        assert list(made.token_ids.ids) == [1, 2]
    for wrong in (4.5, "4.0", True):
        with pytest.raises(ApiError, match="max_tokens: must be an integer"):
            chat(max_tokens=wrong)
    with pytest.raises(ApiError, match="max_tokens"):
        chat(max_tokens=1e30)


def test_top_p_of_zero_is_the_likeliest_token_alone() -> None:
    for top_k in (None, 40, -1):
        (made,) = chat(top_p=0, temperature=1.5, top_k=top_k).requests
        assert (made.sampling.HasField("top_p"), made.sampling.top_k) == (False, 1)
    (made,) = chat(top_p=0.1).requests
    assert made.sampling.top_p == pytest.approx(0.1)
    assert not made.sampling.HasField("top_k")


def test_event_is_one_line_for_every_client() -> None:
    text = "a\u2028b\u2029c\x85d\x0b\x0c\x1c\x1d\x1e\r\n"
    event = OwnForm().event({"text": text}, "").decode()
    assert event.endswith("\n\n")
    (line,) = event[:-2].splitlines()
    assert json.loads(line.removeprefix("data: ")) == {"text": text}
