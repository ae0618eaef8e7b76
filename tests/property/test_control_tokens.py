"""No conversation makes a control token, and those that hold none are encoded as ever."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerBase

from inflight.router.text.tokenizer import TextModel
from inflight.v1 import inference_pb2
from tests.support.examples import examples
from tests.support.text import chat_models
from tests.support.text.chat_models import chat_model, control_ids, trusting_model

Message = dict[str, Any]


def texts_of(model: TextModel) -> st.SearchStrategy[str]:
    """Texts of control tokens, their parts, and what a template or a tokenizer may treat in a way of its own."""
    tokens = sorted(model.token_bytes(token_id).decode() for token_id in model.control_token_ids)
    parts = [token[begin:end] for token in tokens for begin in range(3) for end in (len(token) // 2, -1, None)]
    ends = [token[-size:] for token in tokens for size in (1, 2, 5)]
    others = [" ", "\n", "  ", "hello", "日本", "\ufffd", "\ue000", "\U00020000", "\0", '"', "\\", "'", "{", "</think>"]
    fragments = [*parts, *ends, *tokens, *(token.upper() for token in tokens), *others]
    return st.lists(st.sampled_from(fragments), max_size=4).map("".join)


def messages_of(model: TextModel) -> st.SearchStrategy[list[Message]]:
    text = texts_of(model)
    message = st.fixed_dictionaries(
        {"role": st.sampled_from(model.roles), "parts": st.lists(text, min_size=1, max_size=3), "name": text},
        optional={"call": st.tuples(text, text, text), "tool_call_id": text},
    )
    return st.lists(message, min_size=1, max_size=3)


def chat_of(messages: list[Message], texts: list[str], harmless: bool) -> inference_pb2.Chat:
    """The conversation; `harmless`: with an `x` in place of each of its texts."""

    def said(text: str) -> str:
        return "x" if harmless and text else text

    chat = inference_pb2.Chat()
    for described in messages:
        message = chat.messages.add(role=described["role"], name=said(described["name"]))
        message.tool_call_id = said(described.get("tool_call_id", ""))
        for text in described["parts"]:
            message.content.add(text=said(text))
        if "call" in described:
            name, key, value = described["call"]
            arguments = json.dumps({said(key): said(value)})
            message.tool_calls.add(id="c", name=f"f{said(name)}", arguments=arguments)
    for text in texts:
        chat.tools.add().update({"name": said(text), "properties": {f"p{said(text)}": {"type": "string"}}})
    return chat


def unknown_token(model: TextModel) -> list[str]:
    """Its text, which makes no difference to the ids that are compared."""
    return [] if model.unknown_token_id is None else [model.token_bytes(model.unknown_token_id).decode()]


@pytest.mark.parametrize("build", chat_models.BUILDERS)
def test_only_the_template_writes_control_tokens(build: Callable[[], PreTrainedTokenizerBase]) -> None:
    model, trusting = chat_model(build), trusting_model(build)

    @settings(max_examples=examples(60), deadline=None)
    @given(messages=messages_of(model), tools=st.lists(texts_of(model), max_size=2))
    def one(messages: list[Message], tools: list[str]) -> None:
        chat = chat_of(messages, tools, harmless=False)
        expected = control_ids(model, model.encode_chat(chat_of(messages, tools, harmless=True)))
        ids, as_before = model.encode_chat(chat), trusting.encode_chat(chat)
        assert control_ids(model, ids) == expected
        text = trusting.render_chat(chat)
        if control_ids(model, as_before) == expected and not any(token in text for token in unknown_token(model)):
            assert ids == as_before
        if build in chat_models.EXACT:
            assert model.decode(ids, skip_special_tokens=False) == text

    one()
