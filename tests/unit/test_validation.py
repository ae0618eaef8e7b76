"""Valid and invalid requests, and the errors of the latter."""

from __future__ import annotations

import math
from typing import Any

import pytest

from inflight.common.errors import Reason, RequestError
from inflight.common.parameters import MAX_DEADLINE_S
from inflight.router.api.tokenizing import shown_chat
from inflight.router.request.submit import ModelLimits, resolve_sampling, router_context
from inflight.router.request.validation import validate_generate
from inflight.v1 import inference_pb2, resume_pb2, types_pb2
from tests.support.text.validated import ALL_SAMPLING, SEED, limits_of, requested, validated


def refused_fields(limits: ModelLimits | None = None, **fields: Any) -> list[str]:
    """The fields that a request is refused for."""
    with pytest.raises(RequestError) as caught:
        validated(limits, **fields)
    assert caught.value.reason is Reason.INVALID_FIELD
    for violation in caught.value.violations:
        assert f"{violation.field}: {violation.description}" in str(caught.value)
    return [violation.field for violation in caught.value.violations]


def resolved(**changes: Any) -> types_pb2.SamplingParams:
    """The protocol's defaults with these changes."""
    defaults: dict[str, Any] = {"temperature": 1, "top_k": 0, "top_p": 1, "min_p": 0, "typical_p": 1, "seed": SEED}
    penalties = {"presence_penalty": 0, "frequency_penalty": 0, "repetition_penalty": 1, "no_repeat_ngram_size": 0}
    return types_pb2.SamplingParams(**(defaults | penalties | changes))


def context_of(**fields: Any) -> resume_pb2.RouterContext:
    """What routers must know of a request with these fields."""
    return router_context(requested(**fields), 0.0)


def user(text: str) -> dict[str, Any]:
    """A chat message."""
    return {"role": "user", "content": [{"text": text}]}


def test_bare_request_gets_every_default() -> None:
    submit, context = validated(), context_of()
    assert submit.sampling == resolved()
    assert submit.stopping == types_pb2.StoppingParams(min_tokens=0)
    assert submit.priority == types_pb2.PRIORITY_CLASS_STANDARD
    assert (context.tenant, context.model, len(context.request_id)) == ("default", "", 32)
    assert (context.wants_text, context.wants_token_ids, list(context.stop)) == (True, False, [])


def test_unset_sampling_follows_the_models_generation_config() -> None:
    limits = limits_of(default_sampling=types_pb2.SamplingParams(temperature=0.25, top_k=40, top_p=0.5))
    assert validated(limits).sampling == resolved(temperature=0.25, top_k=40, top_p=0.5)
    asked = validated(limits, sampling={"temperature": 0, "top_k": 0, "seed": 0}).sampling
    assert asked == resolved(temperature=0, top_p=0.5, seed=0)


def test_every_default_of_the_generation_config_applies_until_a_request_replaces_it() -> None:
    sequences = [types_pb2.TokenSequence(ids=[7, 8])]
    defaults = types_pb2.SamplingParams(
        min_p=0.25, repetition_penalty=1.5, no_repeat_ngram_size=3, bad_word_ids=sequences
    )
    limits = limits_of(default_sampling=defaults)
    expected = resolved(min_p=0.25, repetition_penalty=1.5, no_repeat_ngram_size=3, bad_word_ids=sequences)
    assert validated(limits).sampling == expected
    asked = validated(
        limits, sampling={"min_p": 0, "repetition_penalty": 1, "no_repeat_ngram_size": 0, "bad_words": ["x"]}
    ).sampling
    assert asked == resolved(bad_words=["x"])
    (only,) = validated(limits, sampling={"bad_word_ids": [{"ids": [5]}]}).sampling.bad_word_ids
    assert only.ids == [5]


def test_all_sampling_parameters_reach_the_executor() -> None:
    assert {field.name for field, _ in ALL_SAMPLING.ListFields()} == {
        field.name for field in ALL_SAMPLING.DESCRIPTOR.fields
    }
    assert validated(sampling=ALL_SAMPLING).sampling == ALL_SAMPLING


def test_resolved_sampling_names_every_value_on_the_wire() -> None:
    sent = validated(sampling={"seed": 2**64 - 1}).sampling
    unset = {f.name for f in sent.DESCRIPTOR.fields if f.has_presence and not sent.HasField(f.name)}
    assert unset == set()
    assert (sent.seed, sent.temperature, sent.repetition_penalty) == (2**64 - 1, 1.0, 1.0)


def test_seed_is_drawn_unless_a_key_or_the_request_determines_it() -> None:
    seeds = [resolve_sampling(types_pb2.SamplingParams(), types_pb2.SamplingParams(seed=1), lambda: SEED).seed]
    seeds += [validated(sampling={"seed": 0}, idempotency_key="k").sampling.seed]
    assert seeds == [SEED, 0]


def test_everything_given_is_carried() -> None:
    fields: dict[str, Any] = {
        "request_id": "a-Z0.9_:x",
        "model": "smollm2",
        "tenant": "acme",
        "stopping": {
            "max_tokens": 7,
            "min_tokens": 7,
            "stop": ["\n", "END"],
            "stop_token_ids": [999],
            "include_stop": True,
            "ignore_eos": True,
        },
        "output": {"text": False, "token_ids": True},
        "priority": types_pb2.PRIORITY_CLASS_BATCH,
        "cache": {"salt": "s", "bypass": True},
    }
    submit, context = validated(**fields), context_of(**fields)
    assert (context.request_id, context.model, context.tenant) == ("a-Z0.9_:x", "smollm2", "acme")
    assert (list(context.stop), context.include_stop) == (["\n", "END"], True)
    assert (context.wants_text, context.wants_token_ids) == (False, True)
    stopping = types_pb2.StoppingParams(max_tokens=7, min_tokens=7, stop_token_ids=[999], ignore_eos=True)
    assert (submit.request_id, submit.stopping) == ("acme/a-Z0.9_:x", stopping)
    assert submit.priority == types_pb2.PRIORITY_CLASS_BATCH
    assert (submit.cache_salt, submit.cache_bypass) == (b"acme\0s", True)


@pytest.mark.parametrize(
    "prompt", [{"text_bytes": "é🦙".encode()}, {"token_ids": {"ids": [5, 6]}}, {"chat": {"messages": [user("hi")]}}]
)
def test_prompt_of_every_kind_is_taken(prompt: dict[str, Any]) -> None:
    validated(**prompt)


def test_request_without_a_prompt_is_refused() -> None:
    with pytest.raises(RequestError, match="prompt: is empty; exactly one of text, text_bytes, token_ids, chat"):
        validate_generate(inference_pb2.GenerateRequest(), limits_of())


@pytest.mark.parametrize(
    ("prompt", "field"),
    [
        ({"text": ""}, "text"),
        ({"text_bytes": b""}, "text_bytes"),
        ({"token_ids": {}}, "token_ids.ids"),
        ({"chat": {}}, "chat.messages"),
        ({"chat": {"messages": [user("hi"), {"content": [{"text": "hi"}]}]}}, "chat.messages[1].role"),
        ({"chat": {"messages": [{"role": "user", "content": [{"text": "a"}, {}]}]}}, "chat.messages[0].content[1]"),
        ({"chat": {"messages": [user("hi")], "tools": [{}]}}, "chat.tools[0]"),
        ({"chat": {"messages": [{"role": "assistant", "tool_calls": [{}]}]}}, "chat.messages[0].tool_calls[0].name"),
    ],
)
def test_empty_or_broken_prompt_is_refused(prompt: dict[str, Any], field: str) -> None:
    assert refused_fields(**prompt) == [field]


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"tool_choice": {"names": ["g"]}}, "tool_choice.names[0]"),
        ({"tool_choice": {"mode": "MODE_NONE", "names": ["f"]}}, "tool_choice.names"),
        ({"tool_choice": {"mode": 9}}, "tool_choice.mode"),
        ({"constraint": {"json_object": True}}, "constraint"),
        ({"output": {"parts": True, "echo": True}}, "output.parts"),
        ({"output": {"parts": True, "text": False}}, "output.parts"),
    ],
)
def test_unusable_choice_of_functions_is_refused(fields: dict[str, Any], field: str) -> None:
    chat = {"messages": [user("hi")], "functions": [{"name": "f"}]}
    assert refused_fields(chat=chat, **fields) == [field]


def test_choice_without_functions_and_parts_without_a_chat_are_refused() -> None:
    assert refused_fields(tool_choice={"mode": "MODE_REQUIRED"}) == ["tool_choice.mode"]
    assert refused_fields(output={"parts": True}) == ["output.parts"]


def test_functions_that_the_model_may_not_call_are_not_shown() -> None:
    chat = {"messages": [user("hi")], "functions": [{"name": "f"}, {"name": "g", "strict": True}]}
    hidden: dict[str, Any] = {"chat": chat, "tool_choice": {"mode": "MODE_NONE"}}
    validated(**hidden, constraint={"json_object": True})
    assert not shown_chat(requested(**hidden)).functions
    one = {"mode": "MODE_REQUIRED", "names": ["g"], "parallel": False}
    assert len(shown_chat(requested(chat=chat, tool_choice=one)).functions) == 2, (
        "the prompt of all choices is the same"
    )


def test_template_variable_that_is_no_number_is_refused() -> None:
    chat = inference_pb2.Chat(messages=[inference_pb2.ChatMessage(**user("hi"))])
    chat.template_kwargs.update({"deep": {"list": [1, math.nan]}})
    assert refused_fields(chat=chat) == ["chat.template_kwargs.deep.list[1]"]


def test_bytes_that_are_not_utf8_are_refused_with_their_place() -> None:
    with pytest.raises(RequestError, match=r"text_bytes: is not UTF-8: invalid start byte at byte 2"):
        validated(text_bytes=b"ok\xff")


def test_conversation_for_a_model_without_template_is_refused() -> None:
    assert refused_fields(limits_of(has_chat_template=False), chat={"messages": [user("hi")]}) == ["chat"]


@pytest.mark.parametrize(
    ("prompt", "field"),
    [
        ({"text": "x" * 10_000_000}, "text"),
        ({"text": "é" * 2_500_000}, "text"),
        ({"text_bytes": b"x" * 10_000_000}, "text_bytes"),
        ({"token_ids": {"ids": [1] * 5_000_000}}, "token_ids.ids"),
        ({"chat": {"messages": [user("x" * 10_000_000)]}}, "chat"),
    ],
)
def test_prompt_beyond_the_byte_limit_is_refused(prompt: dict[str, Any], field: str) -> None:
    assert refused_fields(**prompt) == [field]


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"sampling": {"temperature": -0.1}}, "sampling.temperature"),
        ({"sampling": {"temperature": math.nan}}, "sampling.temperature"),
        ({"sampling": {"temperature": math.inf}}, "sampling.temperature"),
        ({"sampling": {"top_k": -1}}, "sampling.top_k"),
        ({"sampling": {"top_p": 0.0}}, "sampling.top_p"),
        ({"sampling": {"top_p": 1.01}}, "sampling.top_p"),
        ({"sampling": {"top_p": math.nan}}, "sampling.top_p"),
        ({"sampling": {"min_p": math.nan}}, "sampling.min_p"),
        ({"sampling": {"min_p": -0.1}}, "sampling.min_p"),
        ({"sampling": {"min_p": 1.5}}, "sampling.min_p"),
        ({"sampling": {"presence_penalty": 2.5}}, "sampling.presence_penalty"),
        ({"sampling": {"presence_penalty": math.nan}}, "sampling.presence_penalty"),
        ({"sampling": {"frequency_penalty": -2.5}}, "sampling.frequency_penalty"),
        ({"sampling": {"frequency_penalty": math.inf}}, "sampling.frequency_penalty"),
        ({"sampling": {"repetition_penalty": 0}}, "sampling.repetition_penalty"),
        ({"sampling": {"repetition_penalty": -1}}, "sampling.repetition_penalty"),
        ({"sampling": {"repetition_penalty": math.inf}}, "sampling.repetition_penalty"),
        ({"sampling": {"logit_bias": {1000: 1}}}, "sampling.logit_bias[1000]"),
        ({"sampling": {"logit_bias": {5: 101}}}, "sampling.logit_bias[5]"),
        ({"sampling": {"logit_bias": {5: -math.inf}}}, "sampling.logit_bias[5]"),
        ({"sampling": {"logit_bias": {5: math.nan}}}, "sampling.logit_bias[5]"),
        ({"sampling": {"logit_bias": dict.fromkeys(range(1025), 1)}}, "sampling.logit_bias"),
        ({"sampling": {"allowed_token_ids": [999, 1000]}}, "sampling.allowed_token_ids[1]"),
        ({"sampling": {"allowed_token_ids": [1] * 65_537}}, "sampling.allowed_token_ids"),
        ({"sampling": {"bad_words": ["x"] * 129}}, "sampling.bad_words"),
        ({"sampling": {"bad_words": ["x"] * 1000}}, "sampling.bad_words"),
        ({"sampling": {"bad_words": ["x", ""]}}, "sampling.bad_words[1]"),
        ({"sampling": {"bad_words": ["x" * 1025]}}, "sampling.bad_words[0]"),
        ({"sampling": {"bad_word_ids": [{"ids": [1]}, {}]}}, "sampling.bad_word_ids[1].ids"),
        ({"sampling": {"bad_word_ids": [{"ids": [1, 1000]}]}}, "sampling.bad_word_ids[0].ids[1]"),
        ({"sampling": {"bad_word_ids": [{"ids": [1]}] * 257}}, "sampling.bad_word_ids"),
        ({"sampling": {"bad_word_ids": [{"ids": [1] * 513}] * 2}}, "sampling.bad_word_ids"),
        ({"stopping": {"max_tokens": 0}}, "stopping.max_tokens"),
        ({"stopping": {"max_tokens": 4, "min_tokens": 5}}, "stopping.min_tokens"),
        ({"stopping": {"stop": ["x"] * 65}}, "stopping.stop"),
        ({"stopping": {"stop": [str(i) for i in range(10_000)]}}, "stopping.stop"),
        ({"stopping": {"stop": ["x", ""]}}, "stopping.stop[1]"),
        ({"stopping": {"stop": ["x" * 1025]}}, "stopping.stop[0]"),
        ({"stopping": {"stop_token_ids": [1] * 257}}, "stopping.stop_token_ids"),
        ({"stopping": {"stop_token_ids": [1, 1000]}}, "stopping.stop_token_ids[1]"),
        ({"constraint": {}}, "constraint"),
        ({"constraint": {"json_object": False}}, "constraint.json_object"),
        ({"constraint": {"json_schema": ""}}, "constraint.json_schema"),
        ({"constraint": {"json_schema": "x" * 10_000_000}}, "constraint.json_schema"),
        ({"constraint": {"grammar": "x" * 65_537}}, "constraint.grammar"),
        ({"constraint": {"regex": "é" * 2049}}, "constraint.regex"),
        ({"constraint": {"choice": {}}}, "constraint.choice.choices"),
        ({"constraint": {"choice": {"choices": ["x"] * 1001}}}, "constraint.choice.choices"),
        ({"constraint": {"choice": {"choices": ["x" * 40_000] * 2}}}, "constraint.choice.choices"),
        ({"constraint": {"choice": {"choices": ["x", ""]}}}, "constraint.choice.choices"),
        ({"constraint": {"json_object": True, "max_whitespace": 65}}, "constraint.max_whitespace"),
        ({"constraint": {"regex": "x", "max_whitespace": 1}}, "constraint.max_whitespace"),
        ({"request_id": "no spaces"}, "request_id"),
        ({"request_id": "line\n"}, "request_id"),
        ({"request_id": "é"}, "request_id"),
        ({"request_id": "x" * 129}, "request_id"),
        ({"model": "x" * 257}, "model"),
        ({"tenant": "x" * 257}, "tenant"),
        ({"tenant": "a\0b"}, "tenant"),
        ({"cache": {"salt": "x" * 257}}, "cache.salt"),
        ({"priority": 99}, "priority"),
        ({"deadlines": {"total": {}}}, "deadlines.total"),
        ({"deadlines": {"total": {"seconds": MAX_DEADLINE_S, "nanos": 1000}}}, "deadlines.total"),
        ({"deadlines": {"first_token": {"nanos": -1}}}, "deadlines.first_token"),
        ({"metadata": {str(i): "x" for i in range(65)}}, "metadata"),
        ({"metadata": {"": "x"}}, "metadata"),
        ({"metadata": {"k" * 65: "x"}}, "metadata"),
        ({"metadata": {"k": "x" * 1025}}, "metadata[k]"),
    ],
)
def test_value_out_of_range_is_refused(fields: dict[str, Any], field: str) -> None:
    assert refused_fields(**fields) == [field]


@pytest.mark.parametrize(
    "fields",
    [
        {"sampling": {"temperature": 0, "top_k": 0, "top_p": 1}},
        {"sampling": {"temperature": 100, "top_k": 2**31 - 1, "top_p": 1e-6}},
        {"sampling": {"min_p": 1, "presence_penalty": -2, "frequency_penalty": 2, "repetition_penalty": 1e-6}},
        {"sampling": {"logit_bias": dict.fromkeys(range(1000), -100) | {0: 100}}},
        {"sampling": {"allowed_token_ids": [999] * 65_536, "no_repeat_ngram_size": 2**32 - 1}},
        {"sampling": {"bad_words": ["x" * 1024] * 128, "bad_word_ids": [{"ids": [0, 1, 2, 999]}] * 256}},
        {"stopping": {"max_tokens": 1, "min_tokens": 1}},
        {"stopping": {"stop": ["x" * 1024] * 64, "stop_token_ids": [999] * 256}},
        {"request_id": "x" * 128},
        {"constraint": {"json_schema": "x" * 65_536, "max_whitespace": 64}},
        {"constraint": {"choice": {"choices": ["x" * 65] * 1000}}},
        {"deadlines": {"first_token": {"nanos": 1}, "total": {"seconds": MAX_DEADLINE_S}}},
        {"metadata": {"k" * 64: "x" * 1024} | {str(i): "" for i in range(63)}},
    ],
)
def test_value_at_the_edge_of_its_range_is_taken(fields: dict[str, Any]) -> None:
    validated(**fields)


def test_everything_wrong_is_told_at_once() -> None:
    fields = refused_fields(
        text="", request_id=" ", sampling={"temperature": -1, "top_p": 2}, stopping={"max_tokens": 0, "stop": [""]}
    )
    assert fields == [
        "request_id",
        "text",
        "sampling.temperature",
        "sampling.top_p",
        "stopping.max_tokens",
        "stopping.stop[0]",
    ]


@pytest.mark.parametrize(
    "fields",
    [
        {"sampling": {"min_p": 0, "typical_p": 1, "presence_penalty": 0, "frequency_penalty": 0}},
        {"sampling": {"repetition_penalty": 1, "no_repeat_ngram_size": 0}},
        {"n": 1, "best_of": 1},
        {"n": 0, "best_of": 0},
        {"prior_output": {}},
        {"output": {"coalesce_ms": 0}},
    ],
)
def test_value_that_asks_for_nothing_is_taken(fields: dict[str, Any]) -> None:
    assert validated(**fields, request_id="r") == validated(request_id="r")
    contexts = [context_of(**each, request_id="r") for each in (fields, {})]
    for context in contexts:
        context.ClearField("arrived_unix_ms")
    assert contexts[0] == contexts[1]


@pytest.mark.parametrize(
    ("fields", "field"),
    [
        ({"sampling": {"typical_p": 0.5}}, "sampling.typical_p"),
        ({"sampling": {"typical_p": math.nan}}, "sampling.typical_p"),
    ],
)
def test_function_that_is_not_built_is_refused(fields: dict[str, Any], field: str) -> None:
    with pytest.raises(RequestError, match="not implemented yet") as caught:
        validated(**fields)
    assert caught.value.reason is Reason.NOT_IMPLEMENTED
    assert [violation.field for violation in caught.value.violations] == [field]


def test_all_functions_that_are_not_built_are_named() -> None:
    with pytest.raises(RequestError) as caught:
        validated(output={"coalesce_ms": 5}, sampling={"typical_p": 0.5})
    assert [violation.field for violation in caught.value.violations] == ["sampling.typical_p", "output.coalesce_ms"]


@pytest.mark.parametrize(
    ("fields", "generated", "sent"),
    [({}, 0, 0), ({"n": 3}, 3, 3), ({"best_of": 3}, 3, 1), ({"n": 2, "best_of": 5}, 5, 2), ({"n": 128}, 128, 128)],
)
def test_choices_to_generate_and_to_send(fields: dict[str, Any], generated: int, sent: int) -> None:
    validated(**fields)
    context = context_of(**fields)
    assert (context.num_choices, context.num_sent_choices) == (generated, sent)


@pytest.mark.parametrize(
    ("fields", "wrong"),
    [
        ({"n": 129}, ["n"]),
        ({"n": 1000}, ["n"]),
        ({"best_of": 1000}, ["best_of"]),
        ({"n": 3, "best_of": 2}, ["best_of"]),
        ({"n": 2, "prior_output": {"output_ids": [1]}}, ["prior_output"]),
    ],
)
def test_choices_are_bounded(fields: dict[str, Any], wrong: list[str]) -> None:
    assert refused_fields(**fields) == wrong


@pytest.mark.parametrize("interval", [0, 1025, 2**32 - 1])
def test_interval_out_of_range_is_refused_with_what_is_allowed(interval: int) -> None:
    with pytest.raises(RequestError) as refused:
        validated(output={"stream_interval": interval})
    (violation,) = refused.value.violations
    assert violation.field == "output.stream_interval"
    assert violation.description == f"is {interval}; must be 1 to 1024"


@pytest.mark.parametrize("target_ms", [0, 60_001])
def test_inter_token_target_out_of_range_is_refused_with_what_is_allowed(target_ms: int) -> None:
    with pytest.raises(RequestError) as refused:
        validated(inter_token_target_ms=target_ms)
    (violation,) = refused.value.violations
    assert violation.field == "inter_token_target_ms"
    assert violation.description == f"is {target_ms}; must be 1 to 60000"


def test_inter_token_target_is_that_of_the_class_unless_another_is_asked_for() -> None:
    assert not validated().HasField("inter_token_target_ms")
    assert [validated(inter_token_target_ms=ms).inter_token_target_ms for ms in (1, 60_000)] == [1, 60_000]


def test_interval_is_one_token_unless_another_is_asked_for() -> None:
    assert context_of().stream_interval == 1
    assert context_of(output={"stream_interval": 1024}).stream_interval == 1024
