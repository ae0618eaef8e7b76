"""What the router finds out about tools and reasoning of a model, and the prompts that it makes of tools."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from inflight.common.errors import RequestError
from inflight.common.settings import SettingError
from inflight.router.main import tool_settings
from inflight.router.settings import RouterSettings
from inflight.router.text.tokenizer import TextModel
from inflight.router.tools.formats import AnswerFormat, FormatError, answer_format, read_formats, with_added
from inflight.router.tools.parser import AnswerParser, Arguments
from inflight.router.tools.support import ToolSettings
from inflight.v1 import inference_pb2
from tests.support.text import chat_models
from tests.support.text.chat_models import chat_model

HERMES = (
    "{% if tools %}<tools>{{ tools | tojson }}</tools> Use <tool_call>.{% endif %}"
    "{% for message in messages %}{{ '<|im_start|>' + message.role + message.content }}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% if enable_thinking is defined and not enable_thinking %}"
    "<think>\n\n</think>\n{% elif reasoning_effort == 'high' %}<think>\n{% endif %}{% endif %}"
)
PARAMETERS = '{"type": "object", "properties": {"b": {"type": "integer"}, "a": {"type": "string"}}}'


def templated(template: str, **settings: Any) -> TextModel:
    tokenizer = chat_models.copied(chat_models.qwen_3())
    tokenizer.chat_template = template
    return TextModel(tokenizer, tools=ToolSettings(**settings))


def asked(text: str = "hi", **fields: Any) -> inference_pb2.Chat:
    chat = inference_pb2.Chat(**fields)
    chat.messages.add(role="user").content.add(text=text)
    chat.functions.add(name="f.g", description="Does it.", parameters=PARAMETERS)
    return chat


def refusal(model: TextModel, chat: inference_pb2.Chat) -> tuple[str, str]:
    with pytest.raises(RequestError) as caught:
        model.encode_chat(chat)
    (violation,) = caught.value.violations
    return violation.field, violation.description


def test_template_with_tools_gets_them_in_the_order_of_the_client() -> None:
    model = templated(HERMES)
    assert model.support.in_template
    assert model.support.tools is not None
    assert model.support.tools.name == "hermes"
    assert str(model.support) == (
        "tool calls in the format hermes, tools shown by its chat template; reasoning ends with </think>"
    )
    prompt = model.render_chat(asked())
    assert '"name": "f.g"' in prompt
    assert prompt.index('"b"') < prompt.index('"a"')


def test_template_without_tools_gets_a_system_message() -> None:
    model = chat_model(chat_models.smollm2)
    assert not model.support.in_template
    prompt = model.render_chat(asked())
    assert prompt.startswith("<|im_start|>system\nYou may call functions")
    assert '{"type": "function", "function": {"name": "f.g"' in prompt
    assert '<tool_call>\n{"name": "NAME", "arguments": {"ARGUMENT": "VALUE"}}\n</tool_call>' in prompt
    # behind the client's own
    chat = asked()
    chat.messages.insert(
        0, inference_pb2.ChatMessage(role="system", content=[inference_pb2.ContentPart(text="Be kind.")])
    )
    assert "<|im_start|>system\nBe kind.\n\nYou may call" in model.render_chat(chat)


def test_calls_and_results_are_text_for_a_template_without_tools() -> None:
    chat = asked()
    turn = chat.messages.add(role="assistant")
    turn.tool_calls.add(id="c", name="f.g", arguments='{"b": 1}')
    chat.messages.add(role="tool", tool_call_id="c").content.add(text="42")
    prompt = chat_model(chat_models.smollm2).render_chat(chat)
    call = '<tool_call>\n{"name": "f.g", "arguments": {"b": 1}}\n</tool_call>'
    assert f"<|im_start|>assistant\n{call}<|im_end|>" in prompt
    assert "<|im_start|>user\n<tool_response>\n42\n</tool_response><|im_end|>" in prompt


def test_model_without_tools_or_of_an_unknown_format_refuses_them() -> None:
    tokenizer = chat_models.smollm2()
    silent = TextModel(tokenizer, tools=ToolSettings(writes_prompt=False))
    assert str(silent.support) == "no tool calls; no reasoning"
    field, text = refusal(silent, asked())
    assert field == "chat.functions"
    assert "no tools" in text
    field, text = refusal(chat_model(chat_models.mistral), asked())
    assert field == "chat.functions"
    assert "in which format" in text
    chosen = TextModel(chat_models.mistral(), tools=ToolSettings(chosen="mistral"))
    assert chosen.support.in_template
    assert chosen.encode_chat(asked())


def test_markers_that_are_special_tokens_are_in_the_text_of_parsed_answers() -> None:
    tokenizer = chat_models.copied(chat_models.qwen_3())
    tokenizer.add_special_tokens({"additional_special_tokens": ["[TOOL_CALLS]"]})
    tokenizer.chat_template = HERMES.replace("<tool_call>", "[TOOL_CALLS]")
    model = TextModel(tokenizer)
    assert model.support.tools is not None
    assert model.support.tools.name == "mistral"
    ids = tokenizer("a[TOOL_CALLS]b<|im_end|>", add_special_tokens=False)["input_ids"]
    markers = ("[TOOL_CALLS]", "<think>", "</think>")
    assert model.marker_ids == {marker: tokenizer.convert_tokens_to_ids(marker) for marker in markers}
    assert model.detokenizer().push(ids) == "ab"
    assert model.detokenizer(shows_markers=True).push(ids) == "a[TOOL_CALLS]b"


def test_reasoning_that_the_prompt_opens_is_noticed() -> None:
    model = templated(HERMES)
    assert model.support.reasoning is not None
    assert not model.opens_reasoning(model.encode_chat(asked()))
    assert model.opens_reasoning(model.encode_chat(asked(reasoning_effort="high")))
    assert not model.opens_reasoning(model.encode_chat(asked(reasoning_effort="none")))
    assert model.render_chat(asked(reasoning_effort="none")).endswith("<think>\n\n</think>\n")
    assert not model.opens_reasoning(model.encode_chat(asked(text="<think>")))


def test_effort_and_budget_of_reasoning_have_no_effect_on_models_that_do_not_reason() -> None:
    smollm2 = chat_model(chat_models.smollm2)
    plain = smollm2.encode_chat(asked())
    for hint in ({"reasoning_effort": "none"}, {"reasoning_effort": "low"}, {"thinking_token_budget": 9}):
        assert smollm2.encode_chat(asked(**hint)) == plain


@pytest.mark.parametrize(
    ("functions", "field"),
    [
        ([{"name": ""}], "chat.functions[0].name"),
        ([{"name": 'a"b'}], "chat.functions[0].name"),
        ([{"name": "a\nb"}], "chat.functions[0].name"),
        ([{"name": "a" * 129}], "chat.functions[0].name"),
        ([{"name": "a"}, {"name": "a"}], "chat.functions[1].name"),
        ([{"name": "a", "parameters": "{"}], "chat.functions[0].parameters"),
        ([{"name": "a", "parameters": "[]"}], "chat.functions[0].parameters"),
        ([{"name": "a", "input_grammar": ""}], "chat.functions[0].input_grammar"),
        ([{"name": "a", "input_regex": "x" * 40_000}], "chat.functions[0].input_regex"),
        ([{"name": "a", "input_regex": "x"}], "chat.functions[0].parameters"),
        ([{"name": "a", "parameters": '{"type": "string"}'}], "chat.functions[0].parameters"),
        ([{"name": "a", "parameters": '{"a": ' * 500 + "1" + "}" * 500}], "chat.functions[0].parameters"),
        ([{"name": "a", "parameters": '{"x": [' + "0," * 10_000 + "0]}"}], "chat.functions"),
        ([{"name": f"a{i}"} for i in range(513)], "chat.functions"),
    ],
)
def test_wrong_functions_are_refused_by_name(functions: list[dict[str, Any]], field: str) -> None:
    chat = asked()
    del chat.functions[:]
    chat.functions.extend(inference_pb2.Function(**one) for one in functions)
    assert refusal(chat_model(chat_models.smollm2), chat)[0] == field


FUNCTIONARY = """
[formats.functionary]
layout = "named"
begin = "<function="
middle = ">"
end = "</function>"
detect = ["<function="]
"""


SEED_OSS = """
[formats.seed_oss]
layout = "parameters"
begin = "<seed:tool_call>"
end = "</seed:tool_call>"
padding = "\\n"
call = "<function={name}>\\n{parameters}</function>"
parameter = "<parameter={key}>{value}</parameter>\\n"
detect = ["<seed:tool_call>"]
"""


def test_format_of_a_file_has_tags_of_its_own(tmp_path: Path) -> None:
    path = tmp_path / "formats.toml"
    path.write_text(SEED_OSS)
    (seed_oss,) = read_formats(path)
    text = "<seed:tool_call>\n<function=f>\n<parameter=a>\n1</parameter>\n</function>\n</seed:tool_call>"
    answer = AnswerFormat(seed_oss, texts={"f": ("a",)})
    parser = AnswerParser(answer)
    parts = [*parser.feed(text), *parser.finish()]
    assert "".join(part.text for part in parts if isinstance(part, Arguments)) == '{"a": "\\n1"}'
    assert answer_format(answer.to_json()) == answer


def test_formats_of_a_file_are_detected_first(tmp_path: Path) -> None:
    path = tmp_path / "formats.toml"
    path.write_text(FUNCTIONARY)
    settings = tool_settings(RouterSettings(tool_formats_file=path))
    model = templated(HERMES.replace("<tool_call>", "<function=x>"), formats=settings.formats)
    assert model.support.tools is not None
    assert model.support.tools.name == "functionary"


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("x", "is not TOML"),
        ("", "must have tables"),
        ("[formats]\na = 1", r"formats\.a: must be a table"),
        ("[formats.a]\nlayout = 'odd'\nbegin = 'x'", r"formats\.a\.layout"),
        ("[formats.a]\nlayout = 'object'\nbegin = ''", r"formats\.a\.begin"),
        ("[formats.a]\nlayout = 'named'\nbegin = 'x'", r"formats\.a\.middle"),
        ("[formats.a]\nlayout = 'object'\nbegin = 3", r"formats\.a\.begin"),
        ("[formats.a]\nlayout = 'object'\nbegin = 'x'\ncolour = 'red'", "has colour"),
        ("[formats.a]\nlayout = 'list'\nbegin = 'x'\nis_bare = true", r"formats\.a\.is_bare"),
        ("[formats.a]\nlayout = 'list'\nbegin = 'x'\nend = 'y'\nencloses_all = true", r"formats\.a\.encloses_all"),
        ("[formats.a]\nlayout = 'named'\nbegin = 'x'\ncall = '{arguments}{name}'", r"formats\.a\.call: must have"),
        ("[formats.a]\nlayout = 'parameters'\nbegin = 'x'\nend = 'y'\nparameter = '{key}{value}'", "text between them"),
        ("[formats.a]\nlayout = 'parameters'\nbegin = 'x'\nend = 'y'\nvalues = 'odd'", r"formats\.a\.values"),
        ("[formats.a]\nlayout = 'parameters'\nbegin = 'x'\nend = 'y'\nvalues = 'gemma'", r"formats\.a\.joiner"),
        ("[formats.a]\nlayout = 'object'\nbegin = 'x'\ncall_id = '{odd}'", r"formats\.a\.call_id"),
    ],
)
def test_wrong_formats_are_refused_with_the_reason(tmp_path: Path, text: str, complaint: str) -> None:
    path = tmp_path / "formats.toml"
    path.write_text(text)
    with pytest.raises(FormatError, match=complaint):
        read_formats(path)
    with pytest.raises(SettingError, match="--tool-formats-file"):
        tool_settings(RouterSettings(tool_formats_file=path))


def test_format_must_be_in_the_table(tmp_path: Path) -> None:
    with pytest.raises(SettingError, match=r"--tool-call-format .*'odd'; must be one of auto, .*hermes"):
        tool_settings(RouterSettings(tool_call_format="odd"))
    assert tool_settings(RouterSettings(tool_call_format="mistral")).chosen == "mistral"
    assert set(with_added(())) == set(tool_settings(RouterSettings()).formats)
    with pytest.raises(FormatError, match="cannot read"):
        read_formats(tmp_path / "absent")


def test_model_with_channels_gets_its_reasoning_tools_and_effort() -> None:
    model = chat_model(chat_models.gpt_oss)
    assert str(model.support) == (
        "tool calls in the format harmony, tools shown by its chat template; reasoning ends with <|end|>"
    )
    assert model.can_end_reasoning
    chat = asked(reasoning_effort="high")
    turn = chat.messages.add(role="assistant", reasoning="I call it.")
    turn.tool_calls.add(id="c", name="f.g", arguments='{"b": 1}')
    chat.messages.add(role="tool", tool_call_id="c").content.add(text="42")
    prompt = model.render_chat(chat)
    assert prompt.startswith("<|start|>system<|message|>Reasoning: high<|end|>")
    assert "<|start|>assistant<|channel|>analysis<|message|>I call it.<|end|><|start|>assistant to=" in prompt
    assert prompt.endswith("<|start|>assistant")
    assert not model.opens_reasoning(model.encode_chat(chat))
    ids = model.encode("<|channel|>final<|message|>Yes.<|return|>")
    detokenizer = model.detokenizer(shows_markers=True)
    assert detokenizer.push(ids) + detokenizer.flush() == "<|channel|>final<|message|>Yes.<|return|>"


def test_budget_of_reasoning_needs_an_end_that_is_a_token() -> None:
    copied = chat_models.copied(chat_models.phi())
    copied.chat_template += "{# </think> #}"
    chat = inference_pb2.Chat(thinking_token_budget=9)
    chat.messages.add(role="user").content.add(text="hi")
    field, description = refusal(TextModel(copied), chat)
    assert field == "chat.thinking_token_budget"
    assert "</think>, the end of the model's reasoning, is not one token" in description
    chat.thinking_token_budget = -2
    field, description = refusal(chat_model(chat_models.qwen_3), chat)
    assert (field, "-1 for no limit" in description) == ("chat.thinking_token_budget", True)
