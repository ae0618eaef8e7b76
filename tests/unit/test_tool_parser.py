"""The incremental parser of tool calls and reasoning: formats, cuts, broken answers."""

from __future__ import annotations

import codecs
import json
import random
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest

from inflight.router.text.tokenizer import TextModel
from inflight.router.tools.formats import (
    CHANNELS,
    FORMATS,
    REASONING,
    THINK,
    AnswerFormat,
    ReasoningFormat,
    ToolFormat,
    answer_format,
)
from inflight.router.tools.parser import AnswerParser, Arguments, CallBegins, CallEnds, Content, Part, Reasoning
from tests.support.text import chat_models

BY_NAME = {one.name: one for one in FORMATS}
Calls = Sequence[tuple[str, str]]


def written(tools: ToolFormat, calls: Calls) -> str:
    """Calls as a model writes them."""
    if tools.name in TEXTS:
        text, separator, begin, end = TEXTS[tools.name]
        return begin + separator.join(text(name, arguments) for name, arguments in calls) + end
    match tools.layout:
        case "object":
            texts = [
                f'{"" if tools.is_bare else tools.begin}{tools.padding}{{"{tools.name_key}": {json.dumps(name)}, '
                f'"{tools.arguments_key}": {arguments}}}{tools.padding}{tools.end}'
                for name, arguments in calls
            ]
            return tools.separator.join(texts)
        case "list":
            items = [f'{{"name": {json.dumps(name)}, "arguments": {arguments}}}' for name, arguments in calls]
            return f"{tools.begin}[{', '.join(items)}]{tools.end}"
        case _:
            return tools.separator.join(
                f"{tools.begin}{name}{tools.middle}{arguments}{tools.end}" for name, arguments in calls
            )


def _tagged(before_key: str, after_key: str, after_value: str, arguments: str) -> str:
    return "".join(
        before_key
        + key
        + after_key.replace("TYPE", "true" if isinstance(value, str) else "false")
        + (value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))
        + after_value
        for key, value in json.loads(arguments).items()
    )


def _gemma(value: Any) -> str:
    match value:
        case str():
            return f'<|"|>{value}<|"|>'
        case dict():
            return f"{{{','.join(f'{key}:{_gemma(one)}' for key, one in sorted(value.items()))}}}"
        case list():
            return f"[{','.join(map(_gemma, value))}]"
        case _:
            return json.dumps(value)


def _python(value: Any) -> str:
    match value:
        case str():
            return json.dumps(value, ensure_ascii=False)
        case dict():
            return f"{{{', '.join(f'{json.dumps(key)}: {_python(one)}' for key, one in value.items())}}}"
        case list():
            return f"[{', '.join(map(_python, value))}]"
        case _:
            return repr(value)


def _qwen(name: str, arguments: str) -> str:
    parameters = _tagged("<parameter=", ">\n", "\n</parameter>\n", arguments)
    return f"<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>"


def _glm45(name: str, arguments: str) -> str:
    parameters = _tagged("<arg_key>", "</arg_key>\n<arg_value>", "</arg_value>\n", arguments)
    return f"<tool_call>{name}\n{parameters}</tool_call>"


def _glm47(name: str, arguments: str) -> str:
    return f"<tool_call>{name}{_tagged('<arg_key>', '</arg_key><arg_value>', '</arg_value>', arguments)}</tool_call>"


def _minimax(name: str, arguments: str) -> str:
    parameters = _tagged('<parameter name="', '">', "</parameter>\n", arguments)
    return f'<invoke name="{name}">\n{parameters}</invoke>'


def _dsml(name: str, arguments: str) -> str:
    parameters = _tagged('<｜DSML｜parameter name="', '" string="TYPE">', "</｜DSML｜parameter>\n", arguments)
    return f'<｜DSML｜invoke name="{name}">\n{parameters}</｜DSML｜invoke>'


def _deepseek_v3(name: str, arguments: str) -> str:
    return f"<｜tool▁call▁begin｜>function<｜tool▁sep｜>{name}\n```json\n{arguments}\n```<｜tool▁call▁end｜>"


def _deepseek_v31(name: str, arguments: str) -> str:
    return f"<｜tool▁call▁begin｜>{name}<｜tool▁sep｜>{arguments}<｜tool▁call▁end｜>"


def _kimi(name: str, arguments: str) -> str:
    return f"<|tool_call_begin|>functions.{name}:0<|tool_call_argument_begin|>{arguments}<|tool_call_end|>"


def _gemma4(name: str, arguments: str) -> str:
    return f"<|tool_call>call:{name}{_gemma(json.loads(arguments))}<tool_call|>"


def _mistral_call_id(name: str, arguments: str) -> str:
    return f"[TOOL_CALLS]{name}[CALL_ID]a1B2c3D4e[ARGS]{arguments}"


def _lfm2(name: str, arguments: str) -> str:
    return f"{name}({', '.join(f'{key}={_python(one)}' for key, one in json.loads(arguments).items())})"


# Of formats whose calls are written here, independent of the table: a call, and what stands between calls and around
# all of them.
TEXTS: dict[str, tuple[Callable[[str, str], str], str, str, str]] = {
    "qwen3_coder": (_qwen, "\n", "", ""),
    "glm45": (_glm45, "\n", "", ""),
    "glm47": (_glm47, "", "", ""),
    "minimax_m2": (_minimax, "\n", "<minimax:tool_call>\n", "\n</minimax:tool_call>"),
    "deepseek_v32": (_dsml, "\n", "<｜DSML｜function_calls>\n", "\n</｜DSML｜function_calls>"),
    "deepseek_v4": (_dsml, "\n", "<｜DSML｜tool_calls>\n", "\n</｜DSML｜tool_calls>"),
    "deepseek_v3": (_deepseek_v3, "\n", "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    "deepseek_v31": (_deepseek_v31, "", "<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),
    "kimi_k2": (_kimi, "", "<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),
    "gemma4": (_gemma4, "", "", ""),
    "mistral_call_id": (_mistral_call_id, "", "", ""),
    "lfm2": (_lfm2, ", ", "<|tool_call_start|>[", "]<|tool_call_end|>"),
}


def reasoning_of(tools: ToolFormat) -> ReasoningFormat:
    """How models that write calls in a format write reasoning."""
    reasoning = {"harmony": "<|end|>", "gemma4": "<channel|>", "mistral_args": "[/THINK]"}
    return next(one for one in (*REASONING, THINK) if one.end == reasoning.get(tools.name, "</think>"))


def whole_answer(tools: ToolFormat, reasoning: str, content: str, calls: Calls) -> str:
    """An answer as a model writes it."""
    called = written(tools, calls) if calls else ""
    if tools.name != "harmony":
        begin, end = reasoning_of(tools).begin, reasoning_of(tools).end
        return (f"{begin}\n{reasoning}{end}\n\n" if reasoning else "") + content + called
    messages = [f"<|channel|>analysis<|message|>{reasoning}"] if reasoning else []
    if content or not calls:
        messages.append(f"<|channel|>{'commentary' if calls else 'final'}<|message|>{content}")
    return "<|end|><|start|>assistant".join([*messages, called] if calls else messages)


def read(answer: AnswerFormat, pieces: Sequence[str]) -> tuple[str, str, list[tuple[str, str]]]:
    """Returns reasoning, content and calls, and checks the order of the parts."""
    parser = AnswerParser(answer)
    parts = [part for piece in pieces for part in parser.feed(piece)] + parser.finish()
    return added_up(parts)


def added_up(parts: Sequence[Part]) -> tuple[str, str, list[tuple[str, str]]]:
    reasoning, content = "", ""
    calls: list[tuple[str, str]] = []
    is_open = False
    for part in parts:
        match part:
            case Reasoning(text):
                reasoning += text
            case Content(text):
                assert not is_open
                content += text
            case CallBegins(index, name):
                assert not is_open
                assert index == len(calls)
                calls.append((name, ""))
                is_open = True
            case Arguments(index, text):
                assert is_open
                assert index == len(calls) - 1
                calls[-1] = (calls[-1][0], calls[-1][1] + text)
            case CallEnds(index):
                assert is_open
                assert index == len(calls) - 1
                is_open = False
    return reasoning, content, calls


ARGUMENTS = (
    "{}",
    '{"city": "Zürich \\"x\\" \\\\ {[", "days": 3}',
    '{"text": "line\\nline", "list": [1, {"a": "]}"}], "on": true, "none": null}',
    '{"emoji": "🚌 \\ud83d\\ude8c", "x": "</tool_call>"}',
    '{"q": "a < b", "deep": {"a": {"b": {"c": []}}}, "f": -1.5e3}',
)


def random_answers(number: int, seed: int) -> Iterator[tuple[AnswerFormat, str, str, str, list[tuple[str, str]]]]:
    """Answers in every format, with what they mean: format, text, reasoning, content, calls."""
    chance = random.Random(seed)
    for i in range(number):
        tools = FORMATS[i % len(FORMATS)]
        calls = [(f"tool_{chance.randrange(9)}", chance.choice(ARGUMENTS)) for _ in range(chance.randrange(4))]
        reasoning = chance.choice(("", "", "I think < it </thin is ünsure"))
        content = chance.choice(("", "Let me look: ", "a <tool is not [TOOL a call\n"))
        if tools.is_bare and calls:
            content = ""
        texts = {name: tuple(k for k, v in json.loads(args).items() if isinstance(v, str)) for name, args in calls}
        answer = AnswerFormat(tools, reasoning_of(tools), texts=texts)
        yield answer, whole_answer(tools, reasoning, content, calls), reasoning, content, calls


def test_in_single_bytes_or_tokens_an_answer_has_the_same_calls() -> None:
    model = chat_models.chat_model(chat_models.smollm2)
    for answer, text, reasoning, content, calls in random_answers(200, seed=1):
        whole = read(answer, [text])
        assert whole[:2] == (reasoning, content), text
        if answer.tools is not None and answer.tools.layout == "parameters":
            # Fragments are made of tags, so their spelling is the parser's.
            assert [(name, json.loads(args)) for name, args in whole[2]] == [(n, json.loads(a)) for n, a in calls]
        else:
            assert whole[2] == calls, text
        assert read(answer, decoded([bytes([byte]) for byte in text.encode()])) == whole
        assert read(answer, list(pieces_of(model, text))) == whole


@pytest.mark.slow
def test_cut_in_two_at_any_byte_or_token_an_answer_has_the_same_calls() -> None:
    model = chat_models.chat_model(chat_models.smollm2)
    for answer, text, *_ in random_answers(200, seed=1):
        whole, raw, tokens = read(answer, [text]), text.encode(), list(pieces_of(model, text))
        for cut in range(1, len(raw)):
            assert read(answer, decoded([raw[:cut], raw[cut:]])) == whole
        for cut in range(1, len(tokens)):
            assert read(answer, ["".join(tokens[:cut]), "".join(tokens[cut:])]) == whole


def decoded(pieces: Sequence[bytes]) -> list[str]:
    """The pieces as an incremental decoder returns them, which holds back half a character."""
    decoder = codecs.getincrementaldecoder("utf-8")()
    return [decoder.decode(piece) for piece in pieces]


def pieces_of(model: TextModel, text: str) -> Iterator[str]:
    """The text that each token of it completes."""
    detokenizer = model.detokenizer()
    return (detokenizer.push([token_id]) for token_id in model.encode(text))


def test_parts_of_a_text_do_not_depend_on_how_it_was_cut() -> None:
    """So that a resumed stream can drop exactly what its client has."""
    for answer, text, *_ in random_answers(25, seed=2):
        one_by_one = AnswerParser(answer)
        said: list[Part] = []
        for size, character in enumerate(text, start=1):
            said += one_by_one.feed(character)
            if size % 7 == 0:
                assert spelled(said) == spelled(AnswerParser(answer).feed(text[:size])), text[:size]


def spelled(parts: Sequence[Part]) -> str:
    """The parts as one text, in which neighbours of one kind are one."""
    out, last = "", None
    for part in parts:
        kind = type(part)
        if kind is not last or kind in (CallBegins, CallEnds):
            out += f"\0{kind.__name__}:"
        out += part.name if isinstance(part, CallBegins) else "" if isinstance(part, CallEnds) else part.text
        last = kind
    return out


@pytest.mark.parametrize("tools", FORMATS, ids=lambda one: one.name)
def test_call_without_parameters_has_an_empty_object(tools: ToolFormat) -> None:
    assert read(AnswerFormat(tools), [written(tools, [("now", "{}")])]) == ("", "", [("now", "{}")])


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>\n{"name": "now"}\n</tool_call>',
        '<tool_call>{"arguments": {}, "name": "now"}</tool_call>',
        '<tool_call>\n{"id": [1, {"a": "}"}], "name": "now"}\n',
    ],
)
def test_other_members_and_orders_are_read(text: str) -> None:
    for pieces in ([text], list(text)):
        assert read(AnswerFormat(BY_NAME["hermes"]), pieces) == ("", "", [("now", "{}")])


@pytest.mark.parametrize(
    "text",
    [
        "<tool_call>no</tool_call>",
        '<tool_call>{"x": 1}</tool_call>',
        "<tool_c",
        " \n",
    ],
)
def test_text_that_is_no_call_is_content(text: str) -> None:
    for pieces in ([text], list(text)):
        assert read(AnswerFormat(BY_NAME["hermes"]), pieces) == ("", text, [])


@pytest.mark.parametrize(
    ("tools", "text"),
    [
        ("hermes", "<tool_call>"),
        ("hermes", '<tool_call>\n{"na'),
        ("hermes", '<tool_call>\n{"name": "get_wea'),
        ("qwen3_coder", "<tool_call>\n<function=get_wea"),
        ("mistral", '[TOOL_CALLS][{"name": "get'),
        ("mistral_args", "[TOOL_CALLS]get"),
        ("llama3_json", '<|python_tag|>{"name": "get'),
        ("glm45", "<tool_call>get_wea"),
        ("glm47", "<tool_call>get_weather<arg_k"),
        ("minimax_m2", '<minimax:tool_call>\n<invoke name="get'),
        ("deepseek_v31", "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get"),
        ("deepseek_v32", '<｜DSML｜function_calls>\n<｜DSML｜invoke name="get'),
        ("kimi_k2", "<|tool_calls_section_begin|><|tool_call_begin|>functions.get:0<|tool_call_arg"),
        ("gemma4", "<|tool_call>call:get"),
        ("mistral_call_id", "[TOOL_CALLS]get[CALL_ID]a1B2"),
        ("lfm2", "<|tool_call_start|>[get"),
        ("harmony", "<|channel|>commentary to=functions.get"),
        ("harmony", "<|channel|>comm"),
        ("harmony", "<|channel|>analysis<|mess"),
    ],
)
def test_call_that_is_cut_off_before_its_name_is_left_out(tools: str, text: str) -> None:
    for pieces in ([text], list(text)):
        assert read(AnswerFormat(BY_NAME[tools], reasoning_of(BY_NAME[tools])), pieces) == ("", "", [])


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("<|channel|>final<|message|> a <|b\n", ("", " a <|b\n")),
        ("<|channel|>final<|message|>Yes.<|return|>", ("", "Yes.")),
        ("<|channel|>analysis<|message|>hm<|end|><|start|>assistant<|channel|>final<|message|>Yes.", ("hm", "Yes.")),
        ("<|channel|>analysis<|message|>a<|end|><|start|>assistant<|channel|>analysis<|message|>b", ("ab", "")),
        ("<|channel|>commentary<|message|>a<|end|><|start|>assistant<|channel|>final<|message|>b<|end|>", ("", "ab")),
        ("<|channel|>final<|message|>a<|end|><|start|>assis", ("", "a")),
        ("no channel", ("", "no channel")),
    ],
)
def test_messages_in_channels_are_read_without_their_markers(text: str, expected: tuple[str, str]) -> None:
    for answer in (AnswerFormat(BY_NAME["harmony"], CHANNELS), AnswerFormat(None, CHANNELS)):
        for pieces in ([text], list(text)):
            assert read(answer, pieces) == (*expected, [])


def test_too_long_name_is_content_however_it_is_cut() -> None:
    for size in (250, 255, 256, 257, 300):
        for tools in FORMATS:
            text = written(tools, [("n" * size, '{"a": 1}')])
            assert read(AnswerFormat(tools), [text]) == read(AnswerFormat(tools), list(text))


def test_reasoning_opened_by_the_prompt_ends_at_its_tag() -> None:
    answer = AnswerFormat(BY_NAME["hermes"], THINK, in_reasoning=True)
    text = 'hm <tool_call> no\n</think>\n\nYes.<tool_call>{"name": "f", "arguments": {"a": 1}}</tool_call>\n'
    assert read(answer, list(text)) == ("hm <tool_call> no\n", "Yes.", [("f", '{"a": 1}')])
    assert read(answer, ["never ", "ends"]) == ("never ends", "", [])
    assert read(answer, ["ends in </thin"]) == ("ends in </thin", "", [])


def test_call_that_is_cut_off_before_its_arguments_has_none() -> None:
    """Arguments `{}` would pass for those of a complete call."""
    for text in (
        '<tool_call>{"name": "f"',
        '<tool_call>{"name": "f", "argum',
        '<tool_call>{"name": "f", "arguments": ',
    ):
        assert read(AnswerFormat(BY_NAME["hermes"]), list(text)) == ("", "", [("f", "")])


@pytest.mark.parametrize("tools", FORMATS, ids=lambda one: one.name)
def test_answer_is_unfinished_from_the_marker_of_a_call_to_its_end(tools: ToolFormat) -> None:
    text = written(tools, [("f", '{"a": "x"}')])
    begin = 1 if tools.is_bare else len(tools.begin)
    end = len(text) - len(TEXTS[tools.name][3] if tools.name in TEXTS else "") - 1
    if tools.layout != "parameters" or tools.name in ("qwen3_coder", "gemma4"):
        # Their end marker may be missing.
        end = max(text.rindex(mark) for mark in ("}", "</function>") if mark in text)
    for size in range(begin, end + 1):
        parser = AnswerParser(AnswerFormat(tools))
        parser.feed(text[:size])
        assert parser.is_unfinished, text[:size]
    for more in ("", "\n"):
        parser = AnswerParser(AnswerFormat(tools))
        parser.feed(text + more)
        assert not parser.is_unfinished


def test_answer_that_must_call_is_unfinished_before_its_first_call() -> None:
    text = written(BY_NAME["hermes"], [("f", "{}")])
    for must_call in (False, True):
        parser = AnswerParser(AnswerFormat(BY_NAME["hermes"], must_call=must_call))
        assert parser.is_unfinished == must_call
        parser.feed(text[:5])
        assert parser.is_unfinished == must_call
        parser.feed(text[5:])
        assert not parser.is_unfinished


def test_free_content_is_never_unfinished_and_content_with_a_form_always() -> None:
    for text in ("", "text", "<tool_c", "<think>hm", "<think>hm</think>\n{"):
        for is_constrained in (False, True):
            parser = AnswerParser(AnswerFormat(BY_NAME["hermes"], THINK, is_constrained=is_constrained))
            parser.feed(text)
            assert parser.is_unfinished == is_constrained


def test_bare_object_that_is_no_call_is_content() -> None:
    answer = AnswerFormat(BY_NAME["llama3_json"])
    for text in ('{"answer": 42}', "{x}", 'Say {"name": "f", "parameters": {}}'):
        assert read(answer, list(text)) == ("", text, [])
    marked = '<|python_tag|>{"name": "f", "parameters": {"a": 1}}; {"name": "g", "parameters": {}}'
    assert read(answer, list(marked)) == ("", "", [("f", '{"a": 1}'), ("g", "{}")])


def test_format_survives_being_stored() -> None:
    for tools in FORMATS:
        answer = AnswerFormat(tools, reasoning_of(tools), True, {"f": ("a", "b")}, must_call=True, is_constrained=True)
        assert answer_format(answer.to_json()) == answer
        text = written(tools, [("f", '{"a": "x"}')]) + reasoning_of(tools).end + written(tools, [("f", '{"a": "x"}')])
        assert read(answer_format(answer.to_json()), [text]) == read(answer, [text])


@pytest.mark.parametrize(
    ("tools", "begin", "more"),
    [
        ("hermes", "", " "),
        ("hermes", "<tool_call>", " "),
        ("hermes", "", "<tool_cal"),
        ("hermes", '<tool_call>{"x": ', "["),
        ("hermes", '<tool_call>{"x": "', "\\\\"),
        ("hermes", '<tool_call>{"arguments": ["', "a"),
        ("hermes", '<tool_call>{"name": "f", "arguments": ', "["),
        ("qwen3_coder", "<tool_call><function=f><parameter=a>", "1"),
        ("glm45", "<tool_call>f", " "),
        ("glm45", "<tool_call>f<arg_key>a</arg_key>", " "),
        ("kimi_k2", "<|tool_calls_section_begin|>", " "),
        ("gemma4", "<|tool_call>call:f{a:", "["),
        ("gemma4", '<|tool_call>call:f{a:<|"|>', "<|"),
        ("gemma4", "<|tool_call>call:f{a:", "1"),
        ("lfm2", '<|tool_call_start|>[f(a="', "\\\\"),
        ("lfm2", "<|tool_call_start|>[f(", " "),
        ("mistral", "[TOOL_CALLS][", '{"name":"f","arguments":{}},'),
        ("hermes", "<think>", "</thin"),
        ("harmony", "<|channel|>final<|message|>", "<|end|><|start|>assistant"),
        ("harmony", "<|channel|>final<|message|>", "<|channel|>comm"),
    ],
)
def test_long_text_that_is_never_complete_is_what_it_is_at_once(tools: str, begin: str, more: str) -> None:
    """A text that is never complete ends the test in time, and is what it is at once."""
    text = begin + more * (40_000 // len(more))
    answer = AnswerFormat(BY_NAME[tools], reasoning_of(BY_NAME[tools]))
    parser = AnswerParser(answer)
    parts = [part for start in range(0, len(text), 4) for part in parser.feed(text[start : start + 4])]
    assert added_up(parts + parser.finish()) == read(answer, [text])


def test_fragments_of_arguments_are_whole_characters_also_where_the_output_breaks_off() -> None:
    model, tools = chat_models.chat_model(chat_models.smollm2), BY_NAME["hermes"]
    text = written(tools, [("f", '{"a": "ü🚌ü"}')])
    token_ids = model.encode(text)
    assert any(not model.detokenizer().push([token_id]) for token_id in token_ids), "no token is half a character"
    for num_tokens in range(len(token_ids)):
        detokenizer, parser = model.detokenizer(), AnswerParser(AnswerFormat(tools))
        parts = [part for token_id in token_ids[:num_tokens] for part in parser.feed(detokenizer.push([token_id]))]
        fragments = [part.text for part in parts if isinstance(part, Arguments)]
        assert "\ufffd" not in "".join(fragments)
        assert text.find("".join(fragments)) >= 0
        (_, content, calls) = added_up(parts + parser.feed(detokenizer.flush()) + parser.finish())
        assert tools.begin.startswith(content)
        assert all(text.find(arguments.removesuffix("\ufffd")) >= 0 for _, arguments in calls)
