"""Formats of the models that agents use: recognized and rendered by their templates, bound by grammars, and read."""

from __future__ import annotations

import functools
import json
import random
from collections.abc import Iterator, Sequence
from typing import Any

import jsonschema
import llguidance
import pytest

from inflight.router.constraint.answer_grammar import AnswerRules, ToolSchema
from inflight.router.constraint.source import TOOLS, ConstraintSource
from inflight.router.constraint.worker import Compiler
from inflight.router.text.tokenizer import TextModel
from inflight.router.tools.formats import FORMATS, THINK, AnswerFormat, ToolFormat
from inflight.router.tools.parser import AnswerParser, Arguments
from inflight.v1 import inference_pb2
from tests.support.text import chat_models
from tests.unit.test_answer_grammar import accepts
from tests.unit.test_tool_parser import BY_NAME, TEXTS, Calls, added_up, read, reasoning_of, whole_answer, written

COMPILER = Compiler()
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {
        "count": {"type": "integer", "minimum": 1, "maximum": 99},
        "kind": {"type": "string", "enum": ["new", "old"]},
        "options": {
            "type": "object",
            "properties": {
                "deep": {"type": "array", "items": {"$ref": "#/$defs/Pair"}},
                "on": {"type": "boolean"},
                "rate": {"type": ["number", "null"]},
            },
            "required": ["on"],
            "additionalProperties": False,
        },
        "text": {"type": "string"},
    },
    "required": ["text"],
    "additionalProperties": False,
    "$defs": {
        "Pair": {
            "type": "object",
            "properties": {"a": {"type": "string"}, "b": {"anyOf": [{"type": "integer"}, {"type": "null"}]}},
            "required": ["a"],
            "additionalProperties": False,
        }
    },
}
TOOL = ToolSchema("write.file", json.dumps(SCHEMA))
OTHERS = (TOOL, ToolSchema("now"))
TEXTS_OF = {"write.file": ("kind", "text")}
# Texts with what delimits calls, values and messages in some format, but not in the one that they are used with.
HOSTILE = (
    "",
    "plain",
    "line\nline\n\n  indented\n",
    'quotes " \' ` \\ \\n \\" and {[(,:)]}',
    "Zürich 🚌 ｜ 名前\t\u2028",
    "<b>bold</b> & </div> <function=x> <parameter=y> </tool <tool_call x",
    "a=1, b=[2], call:f{x:1}, [f(x=1)], ```json\n{}\n```",
    "<think>no</think>",
    "true",
    "12",
)


def answers() -> Iterator[tuple[str, Calls]]:
    """Contents and calls: text only, one call, several, nested objects, hostile texts, no arguments."""
    yield "Just text, 2 < 3.", []
    yield "", [("now", "{}")]
    yield "", [("now", "{}"), ("write.file", '{"text": "after an empty call"}'), ("now", "{}")]
    nested = {"count": 7, "kind": "old", "options": {"deep": [{"a": "x]}", "b": 1}, {"a": "", "b": None}], "on": True}}
    yield "Let me see.\n", [("write.file", json.dumps({**nested, "text": "t"}, ensure_ascii=False))]
    yield "", [("write.file", '{"options": {"deep": [], "on": false, "rate": -1.5}, "text": "x"}')]
    for text in HOSTILE:
        yield "", [("write.file", json.dumps({"text": text}, ensure_ascii=False))] * 2


def format_of(tools: ToolFormat, *, reasons: bool = True) -> AnswerFormat:
    return AnswerFormat(tools, reasoning_of(tools) if reasons else None, texts=TEXTS_OF)


def values_of(calls: Calls) -> list[tuple[str, Any]]:
    return [(name, json.loads(arguments)) for name, arguments in calls]


def texts_of(tools: ToolFormat) -> Iterator[tuple[str, str, str, Calls]]:
    """Answers in a format, with their reasoning, content and calls."""
    for content, calls in answers():
        if not (tools.is_bare and content and calls):  # its calls begin the answer
            for reasoning in ("", "I think < so, </thin"):
                yield whole_answer(tools, reasoning, content, calls), reasoning, content, calls


@pytest.mark.parametrize("tools", FORMATS, ids=lambda one: one.name)
def test_answers_are_read_without_loss_whole_and_in_pieces(tools: ToolFormat) -> None:
    chance = random.Random(tools.name)
    for text, reasoning, content, calls in texts_of(tools):
        whole = read(format_of(tools), [text])
        assert whole[:2] == (reasoning, content), text
        assert values_of(whole[2]) == values_of(calls), text
        assert read(format_of(tools), list(text)) == whole
        for cut in chance.sample(range(len(text)), 8):
            assert read(format_of(tools), [text[:cut], text[cut:]]) == whole, (text[:cut], text[cut:])


@pytest.mark.slow
@pytest.mark.parametrize("tools", FORMATS, ids=lambda one: one.name)
def test_answers_are_read_without_loss_at_every_cut(tools: ToolFormat) -> None:
    for text, *_ in texts_of(tools):
        whole = read(format_of(tools), [text])
        for cut in range(1, len(text)):
            assert read(format_of(tools), [text[:cut], text[cut:]]) == whole, (text[:cut], text[cut:])


@pytest.mark.parametrize("tools", [one for one in FORMATS if one.name != "harmony"], ids=lambda one: one.name)
def test_what_is_read_is_accepted_in_every_mode(tools: ToolFormat) -> None:
    """Those of harmony, whose markers must be tokens, are in tests/unit/test_answer_grammar.py."""
    auto, required, named = (
        compiled(AnswerRules(format_of(tools), OTHERS)),
        compiled(AnswerRules(format_of(tools), OTHERS, must_call=True)),
        compiled(AnswerRules(format_of(tools), OTHERS[:1], must_call=True, may_repeat=False)),
    )
    for text, _, content, calls in texts_of(tools):
        calls_only = bool(calls) and not content
        assert matches(auto, text), text
        assert matches(required, text) is calls_only, text
        assert matches(named, text) is (calls_only and [name for name, _ in calls] == ["write.file"]), text


def compiled(rules: AnswerRules) -> str:
    return COMPILER.compile(ConstraintSource(TOOLS, (rules.to_json(),)).to_json())


@functools.lru_cache(maxsize=3)  # a test asks about several texts with each
def matcher_of(grammar: str) -> llguidance.LLMatcher:
    return llguidance.LLMatcher(llguidance.LLTokenizer("byte"), grammar, log_level=0)


def matches(grammar: str, text: str) -> bool:
    matcher = matcher_of(grammar).deep_copy()
    return bool(matcher.consume_tokens(list(text.encode()))) and bool(matcher.is_accepting())


@pytest.mark.parametrize("tools", FORMATS, ids=lambda one: one.name)
def test_arguments_that_the_schema_excludes_are_not_accepted(tools: ToolFormat) -> None:
    grammar = compiled(AnswerRules(format_of(tools, reasons=False), OTHERS, must_call=True))
    for wrong in (
        {},
        {"text": "x", "count": 100},
        {"text": "x", "count": "7"},
        {"text": "x", "kind": "odd"},
        {"text": "x", "other": 1},
        {"text": "x", "options": {"rate": 1}},
        {"text": "x", "options": {"on": 1}},
        {"text": "x", "options": {"on": True, "deep": [{"b": 1}]}},
    ):
        assert not matches(grammar, written(tools, [("write.file", json.dumps(wrong))])), wrong


@pytest.mark.parametrize("tools", FORMATS, ids=lambda one: one.name)
def test_what_a_grammar_completes_is_read_as_valid_arguments(tools: ToolFormat) -> None:
    """Any output that a grammar allows has calls whose arguments satisfy their schemas."""
    rules = AnswerRules(format_of(tools, reasons=False), OTHERS, must_call=True, may_repeat=False)
    grammar = compiled(rules)
    chance = random.Random(tools.name)
    full = written(tools, [("write.file", list(answers())[3][1][0][1])])
    for _ in range(8):
        text = completed(grammar, full[: chance.randrange(len(full))], tools, chance)
        _, content, calls = read(rules.answer, [text])
        assert content == "", text
        assert calls, text
        for name, arguments in calls:
            jsonschema.validate(json.loads(arguments), SCHEMA if name == "write.file" else {"maxProperties": 0})


def completed(grammar: str, text: str, tools: ToolFormat, chance: random.Random) -> str:
    """A beginning of an answer and random characters that the grammar allows, which tend to end what is open."""
    closers = [one.encode() for one in (tools.parameter_parts[2], '<|"|>', '"', "]", "}", *tools.markers) if one]
    matcher = llguidance.LLMatcher(llguidance.LLTokenizer("byte"), grammar, log_level=0)
    raw = text.encode()
    assert matcher.consume_tokens(list(raw))
    for _ in range(2_000):
        if matcher.is_accepting():
            return raw.decode()
        mask = int.from_bytes(matcher.compute_bitmask(), "little")
        allowed = [code for code in (10, *range(32, 127)) if mask >> code & 1]
        overlaps = [
            (size, closer[size])
            for closer in closers
            for size in range(len(closer))
            if raw.endswith(closer[:size]) and mask >> closer[size] & 1
        ]
        longest = max((size for size, _ in overlaps), default=0)
        ending = sorted({code for size, code in overlaps if size == longest})
        # Within a character of several bytes only its next byte is allowed.
        code = chance.choice(ending if ending and (not allowed or chance.random() < 0.95) else allowed)
        assert matcher.consume_token(code)
        raw += bytes([code])
    raise AssertionError(f"no end after {raw!r}")


# Templates ------------------------------------------------------------------------------------------------------------

# The marks around messages, tools, calls and results of the templates that the checkpoints ship, and which tokens are
# special there, in as few lines as they need.
Checkpoint = tuple[list[str], list[str], str]
QWEN_3_5: Checkpoint = (
    [],
    ["<tool_call>", "</tool_call>", "<think>", "</think>"],
    "{% if tools %}{{ tools | tojson }} <tool_call>\n<function=f>\n<parameter=p>\nv\n</parameter>{% endif %}"
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}"
    "{% if m.reasoning_content %}{{ '<think>\n' + m.reasoning_content + '\n</think>\n\n' }}{% endif %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ '<tool_call>\n<function=' + c.function.name + '>\n' }}"
    "{% for k, v in c.function.arguments | items %}{{ '<parameter=' + k + '>\n' }}"
    "{{ v if v is string else v | tojson }}{{ '\n</parameter>\n' }}{% endfor %}</function>\n</tool_call>{% endfor %}"
    "<|im_end|>{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n<think>\n' }}{% endif %}",
)
_GLM = ["<think>", "</think>", "<tool_call>", "</tool_call>", "<arg_key>", "</arg_key>", "<arg_value>", "</arg_value>"]


def _glm(line: str) -> Checkpoint:
    return (
        ["<|user|>", "<|assistant|>", "<|observation|>", "<|system|>"],
        _GLM,
        "{% if tools %}<|system|>{{ tools | tojson }} <tool_call>{name}" + line + "<arg_key>{key}</arg_key>" + line + ""
        "<arg_value>{value}</arg_value>" + line + "</tool_call>{% endif %}{% for m in messages %}"
        "{% if m.role == 'tool' %}<|observation|><tool_response>{{ m.content }}</tool_response>{% else %}"
        "{{ '<|' + m.role + '|>' }}{% if m.role == 'assistant' %}<think>{{ m.reasoning_content }}</think>{% endif %}"
        "{{ m.content }}{% for c in m.tool_calls or [] %}{{ '<tool_call>' + c.function.name }}" + line + ""
        "{% for k, v in c.function.arguments.items() %}<arg_key>{{ k }}</arg_key>" + line + "<arg_value>"
        "{{ v | tojson if v is not string else v }}</arg_value>" + line + "{% endfor %}</tool_call>{% endfor %}"
        "{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}",
    )


KIMI = [f"<|{name}|>" for name in ("im_middle", "im_user", "im_assistant", "im_system")] + [
    "<|tool_calls_section_begin|>",
    "<|tool_calls_section_end|>",
    "<|tool_call_begin|>",
    "<|tool_call_argument_begin|>",
    "<|tool_call_end|>",
]
KIMI_K2: Checkpoint = (
    KIMI,
    ["<think>", "</think>"],
    "{% if tools %}<|im_system|>tool_declare<|im_middle|>{{ tools | tojson }}<|im_end|>{% endif %}"
    "{% for m in messages %}{% set role = m.role if m.role in ['user', 'assistant'] else 'system' %}"
    "{{ '<|im_' + role + '|>' + m.role + '<|im_middle|>' }}"
    "{% if m.role == 'assistant' %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{% if m.role == 'tool' %}## Return of {{ m.tool_call_id }}\n{% endif %}{{ m.content }}"
    "{% if m.tool_calls %}<|tool_calls_section_begin|>{% for c in m.tool_calls %}<|tool_call_begin|>{{ c.id }}"
    "<|tool_call_argument_begin|>{{ c.function.arguments | tojson }}<|tool_call_end|>{% endfor %}"
    "<|tool_calls_section_end|>{% endif %}<|im_end|>{% endfor %}"
    "{% if add_generation_prompt %}<|im_assistant|>assistant<|im_middle|>{% endif %}",
)
DEEPSEEK = [f"<｜{name}｜>" for name in ("User", "Assistant", "tool▁calls▁begin", "tool▁calls▁end")] + [
    f"<｜tool▁{name}｜>" for name in ("call▁begin", "call▁end", "sep", "output▁begin", "output▁end")
]
# It takes arguments as text only, and shows no tools.
DEEPSEEK_V3_1: Checkpoint = (
    DEEPSEEK,
    ["<think>", "</think>"],
    "{% for m in messages %}{% if m.role == 'system' %}{{ m.content }}{% elif m.role == 'user' %}"
    "{{ '<｜User｜>' + m.content + '<｜Assistant｜>' }}{% elif m.role == 'tool' %}"
    "{{ '<｜tool▁output▁begin｜>' + m.content + '<｜tool▁output▁end｜>' }}{% else %}</think>{{ m.content }}"
    "{% if m.tool_calls %}<｜tool▁calls▁begin｜>{% for c in m.tool_calls %}"
    "{{ '<｜tool▁call▁begin｜>' + c.function.name + '<｜tool▁sep｜>' + c.function.arguments + '<｜tool▁call▁end｜>' }}"
    "{% endfor %}<｜tool▁calls▁end｜>{% endif %}<|im_end|>{% endif %}{% endfor %}",
)


def _dsml(block: str) -> Checkpoint:
    return (
        ["<｜User｜>", "<｜Assistant｜>", "｜DSML｜"],
        ["<think>", "</think>"],
        "{% set dsml = '｜DSML｜' %}{% if tools %}{{ tools | tojson }} <{{ dsml }}" + block + ">{% endif %}"
        "{% for m in messages %}{% if m.role == 'user' %}{{ '<｜User｜>' + m.content }}<｜Assistant｜>"
        "{% elif m.role == 'tool' %}<result>{{ m.content }}</result>{% else %}{{ m.reasoning_content }}</think>"
        "{{ m.content }}{% if m.tool_calls %}\n\n<{{ dsml }}" + block + ">\n{% for c in m.tool_calls %}"
        '<{{ dsml }}invoke name="{{ c.function.name }}">\n{% for k, v in c.function.arguments.items() %}'
        "<{{ dsml }}parameter name=\"{{ k }}\" string=\"{{ 'true' if v is string else 'false' }}\">"
        "{{ v if v is string else v | tojson }}</{{ dsml }}parameter>\n{% endfor %}</{{ dsml }}invoke>\n{% endfor %}"
        "</{{ dsml }}" + block + ">{% endif %}<|im_end|>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<think>{% endif %}",
    )


MINIMAX_M2: Checkpoint = (
    ["]~b]"],
    ["<think>", "</think>", "<minimax:tool_call>", "</minimax:tool_call>"],
    '{% if tools %}{{ tools | tojson }} <minimax:tool_call>\n<invoke name="f">{% endif %}{% for m in messages %}'
    "{{ ']~b]' + m.role + '\n' }}{% if m.reasoning_content %}<think>{{ m.reasoning_content }}</think>{% endif %}"
    "{{ m.content }}{% if m.tool_calls %}\n<minimax:tool_call>\n{% for c in m.tool_calls %}"
    '<invoke name="{{ c.function.name }}">\n{% for k, v in c.function.arguments | items %}<parameter name="{{ k }}">'
    "{{ v if v is string else v | tojson }}</parameter>\n{% endfor %}</invoke>\n{% endfor %}</minimax:tool_call>"
    "{% endif %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}{{ ']~b]ai\n<think>\n' }}{% endif %}",
)
GEMMA_4: Checkpoint = (
    ["<|turn>", "<turn|>", "<|channel>", "<channel|>", "<|tool_call>", "<tool_call|>", '<|"|>', "<|tool_response>"],
    [],
    "{% macro value(v) %}{% if v is string %}{{ '<|\"|>' + v + '<|\"|>' }}{% elif v is mapping %}{{ '{' }}"
    "{% for k, one in v | dictsort %}{{ ',' if not loop.first }}{{ k }}:{{ value(one) }}{% endfor %}{{ '}' }}"
    "{% elif v is sequence %}[{% for one in v %}{{ ',' if not loop.first }}{{ value(one) }}{% endfor %}]"
    "{% else %}{{ v | tojson }}{% endif %}{% endmacro %}"
    "{% if tools %}{% for t in tools %}<|turn>system\n{{ t.function.name }}<turn|>{% endfor %}{% endif %}"
    "{% for m in messages %}{{ '<|turn>' + m.role + '\n' }}{% if m.reasoning_content %}"
    "{{ '<|channel>thought\n' + m.reasoning_content + '\n<channel|>' }}{% endif %}"
    "{% for c in m.tool_calls or [] %}{{ '<|tool_call>call:' + c.function.name }}{{ value(c.function.arguments) }}"
    "<tool_call|>{% endfor %}{{ m.content }}<turn|>{% endfor %}{% if add_generation_prompt %}<|turn>model\n{% endif %}",
)
LFM_2_5: Checkpoint = (
    ["<|tool_call_start|>", "<|tool_call_end|>"],
    ["<think>", "</think>"],
    "{% if tools %}{{ 'List of tools: ' + (tools | tojson) }}{% endif %}{% for message in messages %}"
    "{{ '<|im_start|>' + message.role }}\n{% if message.thinking %}<think>{{ message.thinking }}</think>{% endif %}"
    "{{ message.content }}<|im_end|>{% endfor %}",
)
MINISTRAL_3: Checkpoint = (
    ["[TOOL_CALLS]", "[ARGS]", "[THINK]", "[/THINK]", "[INST]", "[/INST]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]"],
    [],
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}{% if m.role == 'user' %}"
    "{{ '[INST]' + m.content + '[/INST]' }}{% elif m.role == 'tool' %}"
    "{{ '[TOOL_RESULTS]' + m.content + '[/TOOL_RESULTS]' }}{% else %}{{ m.content }}"
    "{% for c in m.tool_calls or [] %}{{ '[TOOL_CALLS]' + c.function.name + '[ARGS]' }}"
    "{{ c.function.arguments | tojson }}{% endfor %}<|im_end|>{% endif %}{% endfor %}{# [THINK] [/THINK] #}",
)
MISTRAL_3_2: Checkpoint = (
    [*MINISTRAL_3[0], "[CALL_ID]"],
    [],
    MINISTRAL_3[2].replace("+ '[ARGS]'", "+ '[CALL_ID]' + c.id + '[ARGS]'"),
)
CHECKPOINTS = {
    "qwen3_coder": QWEN_3_5,
    "glm45": _glm("\n"),
    "glm47": _glm(""),
    "minimax_m2": MINIMAX_M2,
    "deepseek_v31": DEEPSEEK_V3_1,
    "deepseek_v32": _dsml("function_calls"),
    "deepseek_v4": _dsml("tool_calls"),
    "kimi_k2": KIMI_K2,
    "gemma4": GEMMA_4,
    "lfm2": LFM_2_5,
    "mistral_args": MINISTRAL_3,
    "mistral_call_id": MISTRAL_3_2,
}


@functools.cache
def model_of(name: str) -> TextModel:
    """A model whose tokenizer and template are like those of the checkpoints that use a format."""
    special, added, template = CHECKPOINTS[name]
    tokenizer = chat_models.byte_level(["<|im_start|>", "<|im_end|>", *special], added)
    tokenizer.chat_template = template
    return TextModel(tokenizer)


def asked(calls: Calls, results: Sequence[str] = ()) -> inference_pb2.Chat:
    chat = inference_pb2.Chat()
    chat.messages.add(role="user").content.add(text="question")
    if calls:
        turn = chat.messages.add(role="assistant", reasoning="I need it.")
        for number, (name, arguments) in enumerate(calls):
            turn.tool_calls.add(id=f"call{number:05}", name=name, arguments=arguments)
    for number, result in enumerate(results):
        chat.messages.add(role="tool", tool_call_id=f"call{number:05}").content.add(text=result)
    chat.functions.add(name="write.file", parameters=TOOL.parameters)
    chat.functions.add(name="now")
    return chat


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_format_is_recognized_and_earlier_calls_are_rendered_as_the_model_writes_them(name: str) -> None:
    model = model_of(name)
    assert model.support.tools == BY_NAME[name]
    assert model.support.in_template is (name != "deepseek_v31")
    reasoning = {"gemma4": "<channel|>", "mistral_args": "[/THINK]", "mistral_call_id": "[/THINK]"}
    assert model.support.reasoning is not None
    assert model.support.reasoning.end == reasoning.get(name, "</think>")
    calls = [("write.file", '{"options": {"on": true}, "text": "a\\n<b>"}'), ("now", "{}")]
    prompt = model.render_chat(asked(calls, ["done", "noon"]))
    shown = read(AnswerFormat(BY_NAME[name], texts=TEXTS_OF), [prompt[prompt.rindex("question") :]])
    assert values_of(shown[2]) == values_of(calls), prompt
    assert prompt.index("done") < prompt.index("noon")
    assert "write.file" in model.render_chat(asked([]))


def test_calls_and_results_have_the_ids_that_the_model_knows() -> None:
    calls = [("write.file", '{"text": "x"}'), ("now", "{}")]
    prompt = model_of("kimi_k2").render_chat(asked(calls, ["done", "noon"]))
    assert "<|tool_call_begin|>functions.write.file:0<|tool_call_argument_begin|>" in prompt
    assert "<|tool_call_begin|>functions.now:1<|tool_call_argument_begin|>" in prompt
    assert "## Return of functions.write.file:0\ndone" in prompt
    assert "## Return of functions.now:1\nnoon" in prompt


def test_reasoning_is_given_under_the_key_of_the_template() -> None:
    assert "<think>I need it.</think>" in model_of("lfm2").render_chat(asked([("now", "{}")], ["noon"]))


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_grammars_take_the_tokens_of_the_model(name: str) -> None:
    model, tools = model_of(name), BY_NAME[name]
    answer = AnswerFormat(tools, model.support.reasoning, texts=TEXTS_OF)
    for must_call in (True, False):
        rules = AnswerRules(answer, OTHERS, must_call, token_ids=model.marker_ids)
        grammar = compiled(rules)
        for content, calls in answers():
            if any(tag in arguments for tag in model.marker_ids for _, arguments in calls):
                continue  # texts cannot have tokens of the format
            for reasoning in ("", "So < it is."):
                text = answer_text(answer, reasoning, content, calls)
                is_right = (bool(calls) and not content) or not must_call
                assert takes(model, grammar, text) is is_right, text
                detokenizer = model.detokenizer(shows_markers=True)
                shown = detokenizer.push(model.encode(text)) + detokenizer.flush()
                assert values_of(read(answer, [shown])[2]) == values_of(calls)
        wrong = written(tools, [("write.file", '{"text": 1}')])
        is_any_text = tools.layout == "parameters" and tools.values == "text" and "{is_text}" not in tools.parameter
        assert takes(model, grammar, wrong) is is_any_text


def answer_text(answer: AnswerFormat, reasoning: str, content: str, calls: Calls) -> str:
    assert answer.reasoning is not None
    assert answer.tools is not None
    thought = f"{answer.reasoning.begin}\n{reasoning}{answer.reasoning.end}\n\n" if reasoning else ""
    return thought + content + (written(answer.tools, calls) if calls else "")


def takes(model: TextModel, grammar: str, text: str) -> bool:
    matcher = llguidance.LLMatcher(chat_models.guided(model), grammar, log_level=0)
    return bool(matcher.consume_tokens(model.encode(text))) and bool(matcher.is_accepting())


# Failures of other parsers, by the reports about them ----------------------------------------------------------------


def streamed(tools: str, pieces: Sequence[str], **fields: Any) -> tuple[str, str, list[tuple[str, str]]]:
    """What an answer in pieces is read as, which is what it is read as whole and in characters."""
    answer = AnswerFormat(BY_NAME[tools], **fields)
    whole = read(answer, ["".join(pieces)])
    assert read(answer, pieces) == whole
    assert read(answer, list("".join(pieces))) == whole
    return whole


def test_arguments_in_deltas_of_several_tokens_are_not_lost() -> None:
    """vllm#10395, #10589, #31501: the hermes parser looked for a delta's text in the arguments."""
    arguments = '{"city": "San Francisco", "state": "CA", "unit": "celsius"}'
    text = f'<tool_call>\n{{"name": "w", "arguments": {arguments}}}\n</tool_call>'
    for size in range(2, 40):
        pieces = [text[at : at + size] for at in range(0, len(text), size)]
        assert streamed("hermes", pieces)[2] == [("w", arguments)]


def test_text_arguments_are_streamed_while_they_are_written() -> None:
    """vllm#30439, #50604: nothing was sent until the arguments were complete, for minutes."""
    for tools in FORMATS:
        text = written(tools, [("write.file", json.dumps({"text": "word " * 500}))])
        parser = AnswerParser(AnswerFormat(tools, texts=TEXTS_OF))
        said = 0
        for at, character in enumerate(text):
            said += sum(len(part.text) for part in parser.feed(character) if isinstance(part, Arguments))
            seen = text[: at + 1].count("word ") * len("word ")
            assert said >= seen - 32, (tools.name, at)


def test_call_within_the_reasoning_is_a_call() -> None:
    """vllm#39056, club-3090#145: Qwen3.5 forgets the end of its reasoning, and the call was taken for reasoning."""
    call = "<tool_call>\n<function=Finish>\n<parameter=answer>\n204\n</parameter>\n</function>\n</tool_call>"
    tool = ToolSchema("Finish", '{"properties": {"answer": {"type": "string"}}, "required": ["answer"]}')
    fields: dict[str, Any] = {"reasoning": THINK, "texts": {"Finish": ("answer",)}}
    for end in ("", "\n</think>", "\n</think>\n\n"):
        expected = ("It is 204.\n", "", [("Finish", '{"answer": "204"}')])
        assert streamed("qwen3_coder", ["<think>It is 204.\n", call, end], **fields) == expected
        assert streamed("qwen3_coder", ["It is 204.\n", call, end], in_reasoning=True, **fields) == expected
    for in_reasoning, begin in ((True, ""), (False, "<think>\n")):
        for must_call in (True, False):
            rules = AnswerRules(AnswerFormat(BY_NAME["qwen3_coder"], THINK, in_reasoning), (tool,), must_call)
            assert accepts(rules, f"{begin}It is 204.\n{call}")
            assert accepts(rules, f"{begin}It is 204.\n</think>\n\n{call}")
            assert not accepts(rules, f"{begin}It is 204.\n{call.replace('answer', 'other')}")
            assert not accepts(rules, f"{begin}I write <tool_call> here.\n</think>\n\n{call}")


def test_every_format_ends_reasoning_with_a_call() -> None:
    """The same for Kimi K2, GLM, DeepSeek, MiniMax and Gemma 4."""
    for name in CHECKPOINTS:
        model, tools = model_of(name), BY_NAME[name]
        reasoning = model.support.reasoning
        assert reasoning is not None
        answer = AnswerFormat(tools, reasoning, texts=TEXTS_OF)
        calls = [("write.file", '{"text": "x"}'), ("now", "{}")]
        text = f"{reasoning.begin}\nI call it. {written(tools, calls)}"
        assert read(answer, list(text))[:2] == ("I call it. ", "")
        assert values_of(read(answer, [text])[2]) == values_of(calls)
        rules = AnswerRules(answer, OTHERS, token_ids=model.marker_ids)
        assert takes(model, compiled(rules), text)


def test_inline_call_without_arguments_is_read_in_a_stream() -> None:
    """vllm#44326: GLM-4.7's calls without arguments were dropped when streamed, also behind reasoning."""
    text = "<think>hm</think><tool_call>get_current_time</tool_call>"
    for tools in ("glm47", "glm45"):
        assert streamed(tools, [text], reasoning=THINK) == ("hm", "", [("get_current_time", "{}")])
        assert streamed(tools, ["hm</think>", text[17:]], reasoning=THINK, in_reasoning=True)[2]


def test_named_function_has_arguments_and_no_markup() -> None:
    """vllm#44906, #50477: with a named tool the raw markup became the arguments, or the choice was ignored."""
    for name in CHECKPOINTS:
        model, tools = model_of(name), BY_NAME[name]
        rules = AnswerRules(
            AnswerFormat(tools, texts=TEXTS_OF), (TOOL,), must_call=True, may_repeat=False, token_ids=model.marker_ids
        )
        grammar = compiled(rules)
        text = written(tools, [("write.file", '{"text": "Boston"}')])
        assert takes(model, grammar, text)
        assert values_of(read(rules.answer, list(text))[2]) == [("write.file", {"text": "Boston"})]
        for wrong in ("Boston", '{"text": "Boston"}', written(tools, [("now", "{}")])):
            assert not takes(model, grammar, wrong)


def test_arguments_after_a_call_without_any_are_not_lost() -> None:
    """vllm#47901."""
    for tools in FORMATS:
        calls = [("now", "{}"), ("write.file", '{"text": "x"}'), ("now", "{}"), ("write.file", '{"text": "y"}')]
        _, content, read_calls = streamed(tools.name, [written(tools, calls)], texts=TEXTS_OF)
        assert (content, values_of(read_calls)) == ("", values_of(calls))


def test_whole_answer_in_one_delta_has_all_its_calls() -> None:
    """vllm#47907, #48294, #55082, #54701."""
    for tools in FORMATS:
        calls = [("write.file", json.dumps({"text": str(number)})) for number in range(5)]
        parser = AnswerParser(AnswerFormat(tools, texts=TEXTS_OF))
        parts = parser.feed(written(tools, calls))
        assert values_of(added_up(parts)[2]) == values_of(calls)


def test_text_that_only_looks_like_a_call_is_sent_at_the_end() -> None:
    """vllm#41240, #47137: text that was held back was dropped."""
    for tools in FORMATS:
        if not tools.is_bare:
            assert streamed(tools.name, ["2 ", tools.begin[:1]]) == ("", f"2 {tools.begin[:1]}", [])
            assert streamed(tools.name, ["2 ", tools.begin[:5], " 3"]) == ("", f"2 {tools.begin[:5]} 3", [])


def test_text_after_a_call_or_an_empty_block_is_content() -> None:
    """vllm#56263, #46091."""
    for tools in FORMATS:
        if tools.name == "harmony":
            continue  # a call ends its answer
        text = written(tools, [("now", "{}")])
        assert streamed(tools.name, [text, "\nDone."]) == ("", "Done.", [("now", "{}")])
        if tools.encloses_all:
            _, begin, end = TEXTS[tools.name][1:]
            assert streamed(tools.name, [begin, end, "Done."]) == ("", "Done.", [])


def test_type_of_a_value_is_what_its_attribute_or_schema_says() -> None:
    """vllm#41240: numbers came as texts, and texts that look like numbers as numbers."""
    for name in ("deepseek_v32", "deepseek_v4", "qwen3_coder", "glm45", "glm47", "minimax_m2"):
        values = {"text": "204", "count": 7, "options": {"on": True}}
        text = written(BY_NAME[name], [("write.file", json.dumps(values))])
        assert values_of(streamed(name, [text], texts=TEXTS_OF)[2]) == [("write.file", values)]
