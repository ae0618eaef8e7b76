"""Text and conversations to token ids."""

from __future__ import annotations

import inspect
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
from transformers import PreTrainedTokenizerBase
from transformers.utils.chat_template_utils import render_jinja_template

from inflight.common.errors import Reason, RequestError
from inflight.router.text.chat_checks import RESERVED_VARIABLES
from inflight.router.text.tokenizer import TextModel
from inflight.v1 import inference_pb2
from tests.support.text import text_models
from tests.support.text.text_models import smollm2, text_model

SHOW_ALL = "{{ messages | tojson }}{{ tools | tojson }}{{ depth }}"


def chat_of(*pairs: tuple[str, str]) -> inference_pb2.Chat:
    """A conversation of (role, text)."""
    return inference_pb2.Chat(
        messages=[
            inference_pb2.ChatMessage(role=role, content=[inference_pb2.ContentPart(text=text)]) for role, text in pairs
        ]
    )


@contextmanager
def model_with_template(template: str | None) -> Iterator[TextModel]:
    """The llama-like model with a chat template."""
    tokenizer = text_models.llama_like()
    tokenizer.chat_template = template
    try:
        yield TextModel(tokenizer)
    finally:
        tokenizer.chat_template = None


def test_prompt_is_encoded_as_transformers_does() -> None:
    tokenizer = text_models.llama_like()
    text = "hello world\n🦙"
    assert TextModel(tokenizer).encode(text) == tokenizer.encode(text)
    assert TextModel(tokenizer).encode(text)[0] == tokenizer.bos_token_id
    without = TextModel(tokenizer).encode(text, add_special_tokens=False)
    assert without == tokenizer.encode(text)[1:]


@pytest.mark.parametrize("build", [text_models.smollm2, text_models.byte_level, text_models.llama_like])
def test_bytes_of_tokens_are_those_of_their_text(build: Callable[[], PreTrainedTokenizerBase]) -> None:
    model = text_model(build)
    ids = model.encode("hello 日本 🦙", add_special_tokens=False)
    assert b"".join(map(model.token_bytes, ids)).decode().strip() == "hello 日本 🦙"
    assert len(ids) > len({"hello", "日本", "🦙"}), "a character takes several tokens"
    assert {model.token_bytes(token_id) for token_id in model.special_token_ids} != {b""}
    assert model.token_bytes(10**6) == b""


def test_bytes_of_tokens_without_a_table_are_what_decode_says() -> None:
    model = text_model(text_models.wordpiece)
    assert [model.token_bytes(token_id) for token_id in model.encode("hello the")] == [b"hello", b"the"]
    assert model.token_bytes(10**6) == b""


def test_prompt_is_never_truncated_or_padded() -> None:
    tokenizer = text_models.gemma_like()
    tokenizer.backend_tokenizer.enable_truncation(max_length=4)
    tokenizer.backend_tokenizer.enable_padding(length=16)
    model = TextModel(tokenizer)
    assert tokenizer.backend_tokenizer.truncation is None, "a first call in a thread would change the tokenizer"
    assert len(model.encode("a")) < 16
    assert len(model.encode("a" * 50)) > 4


def test_threads_encode_the_same_at_once() -> None:
    model = text_model(text_models.smollm2)
    texts = [f"thread {i} says 🦙 " * 200 for i in range(16)]
    with ThreadPoolExecutor(max_workers=8) as threads:
        assert list(threads.map(model.encode, texts)) == [model.encode(text) for text in texts]


def test_conversation_is_encoded_as_transformers_does() -> None:
    tokenizer = text_models.smollm2()
    expected = tokenizer.apply_chat_template(
        [{"role": "user", "content": "What is the capital of France?"}], add_generation_prompt=True, return_dict=False
    )
    chat = chat_of(("user", "What is the capital of France?"))
    assert text_model(text_models.smollm2).encode_chat(chat) == expected


def test_conversation_may_end_before_the_beginning_of_the_answer() -> None:
    model, chat = text_model(text_models.smollm2), chat_of(("user", "What is the capital of France?"))
    open_ids, closed_ids = model.encode_chat(chat), model.encode_chat(chat, add_generation_prompt=False)
    assert open_ids[: len(closed_ids)] == closed_ids
    assert model.decode(open_ids[len(closed_ids) :], skip_special_tokens=False) == "<|im_start|>assistant\n"
    assert model.token_names(model.encode("Hello world")) == ["Hello", "Ġworld"]


def test_template_that_writes_special_tokens_gets_no_second_ones() -> None:
    with model_with_template("{{ bos_token }}{{ messages[0].content }}") as model:
        ids = model.encode_chat(chat_of(("user", "hello")))
    assert ids.count(1) == 1
    assert ids[0] == 1


def test_parts_of_a_message_are_joined() -> None:
    chat = inference_pb2.Chat()
    message = chat.messages.add(role="user")
    message.content.add(text="one,")
    message.content.add(text=" two")
    with model_with_template("{{ messages[0].content }}") as model:
        assert model.render_chat(chat) == "one, two"


def test_template_sees_every_field_of_a_message() -> None:
    chat = inference_pb2.Chat()
    call = chat.messages.add(role="assistant", name="bot").tool_calls.add(id="c1", name="add", arguments='{"x": 1}')
    chat.messages.add(role="tool", tool_call_id=call.id).content.add(text="2")
    with model_with_template(SHOW_ALL) as model:
        rendered = model.render_chat(chat)
    function = '{"name": "add", "arguments": {"x": 1}}'
    assert rendered == (
        '[{"role": "assistant", "content": "", "name": "bot", '
        f'"tool_calls": [{{"type": "function", "function": {function}, "id": "c1"}}]}}, '
        '{"role": "tool", "content": "2", "tool_call_id": "c1"}]null'
    )


@pytest.mark.parametrize(
    ("arguments", "shown"),
    [
        ("", "{}"),
        ('{"a": 1.0, "b": [null]}', '{"a": 1.0, "b": [null]}'),
        ('{"city": "Par', "{}"),
        ("not JSON", "{}"),
        ("null", "{}"),
        ("[1]", "{}"),
        ('"text"', "{}"),
        ("7", "{}"),
        ('{"a": NaN}', "{}"),
        ('{"a": -Infinity}', "{}"),
        ('{"a": "\\ud800"}', "{}"),
        ("[" * 9_000, "{}"),
        ('{"a": 1e999}', '{"a": 1.7976931348623157e+308}'),
        ('{"a": 1' + "0" * 5000 + "}", '{"a": 1.7976931348623157e+308}'),
        ('{"a": 1180591620717411303424}', '{"a": 1180591620717411303424}'),
    ],
)
def test_arguments_that_are_no_json_object_are_an_empty_one(arguments: str, shown: str) -> None:
    chat = inference_pb2.Chat()
    chat.messages.add(role="assistant").tool_calls.add(id="c1", name="add", arguments=arguments)
    with model_with_template("{{ messages[0].tool_calls[0].function.arguments | tojson }}") as model:
        assert model.render_chat(chat) == shown


def test_template_sees_tools_and_variables_with_whole_numbers() -> None:
    chat = chat_of(("user", "hi"))
    chat.tools.add().update({"name": "add", "limits": [1, 2.5, None, True, {"deep": 3}]})
    chat.template_kwargs.update({"depth": 7})
    with model_with_template(SHOW_ALL) as model:
        rendered = model.render_chat(chat)
    assert '"limits": [1, 2.5, null, true, {"deep": 3}]' in rendered
    assert rendered.endswith("}]7")


@pytest.mark.parametrize(
    "template", ["{{ raise_exception('roles must alternate') }}", "{{ 1 / 0 }}", "{{ nothing.at.all }}", "{% if %}"]
)
def test_complaint_of_the_template_names_the_conversation(template: str) -> None:
    with model_with_template(template) as model, pytest.raises(RequestError) as caught:
        model.encode_chat(chat_of(("user", "hi")))
    assert caught.value.reason is Reason.INVALID_FIELD
    assert [violation.field for violation in caught.value.violations] == ["chat"]


def test_model_without_a_template_refuses_conversations() -> None:
    with model_with_template(None) as model, pytest.raises(RequestError, match="chat: the model has no chat template"):
        model.encode_chat(chat_of(("user", "hi")))
    assert not model.has_chat_template
    assert text_model(text_models.smollm2).has_chat_template


@pytest.mark.parametrize("name", ["chat_template", "tokenize", "messages", "add_generation_prompt", "tools"])
def test_client_cannot_replace_the_template_or_how_it_is_run(name: str) -> None:
    chat = chat_of(("user", "hi"))
    chat.template_kwargs.update({name: "{{ 'mine' }}"})
    with pytest.raises(RequestError) as caught:
        text_model(text_models.smollm2).encode_chat(chat)
    assert [violation.field for violation in caught.value.violations] == [f"chat.template_kwargs.{name}"]


def test_every_parameter_of_the_template_call_is_reserved() -> None:
    names = {
        *inspect.signature(PreTrainedTokenizerBase.apply_chat_template).parameters,
        *inspect.signature(render_jinja_template).parameters,
    }
    # Documents are a variable that templates for retrieval read; the client may set it.
    assert names - {"documents", "kwargs"} <= RESERVED_VARIABLES


def test_vocabulary_and_special_ids_are_the_tokenizers() -> None:
    model = text_model(text_models.smollm2)
    assert model.vocabulary_size == 49152
    assert {0, 1, 2} <= model.special_token_ids
    assert all(model.decode([token_id]) == "" for token_id in model.special_token_ids)


@pytest.mark.parametrize("kind", ["text", "chat"])
def test_tokenizing_a_long_text_lets_other_threads_run(kind: str) -> None:
    model, text = text_model(smollm2), "0123456789 and so on\n" * 5_000
    chat = inference_pb2.Chat()
    chat.messages.add(role="user").content.add(text=text)
    work = threading.Thread(
        target=(lambda: model.encode(text)) if kind == "text" else (lambda: model.encode_chat(chat))
    )
    work.start()
    num_turns = 0
    while work.is_alive():
        num_turns += 1
    # It takes a tenth of a second. With the interpreter lock held throughout there would be none or a few.
    assert num_turns > 1000
