"""Grammars of answers: what they accept is what the parser reads, in every format."""

from __future__ import annotations

import functools
import json
from dataclasses import replace

import llguidance
import pytest

from inflight.router.constraint.answer_grammar import AnswerRules, ToolSchema, answer_rules
from inflight.router.constraint.source import TOOLS, ConstraintError, ConstraintSource
from inflight.router.constraint.worker import Compiler
from inflight.router.text.tokenizer import TextModel
from inflight.router.tools.formats import CHANNELS, FORMATS, THINK, AnswerFormat, ToolFormat
from tests.support.text import chat_models
from tests.unit.test_tool_parser import BY_NAME, read, whole_answer, written

SCHEMA = '{"type":"object","properties":{"city":{"type":"string"},"n":{"type":"integer"}},"required":["city"]}'
TOOL = ToolSchema("weather.get", SCHEMA)
OTHERS = (TOOL, ToolSchema("now"))
GOOD = [("weather.get", '{"city": "Ulm", "n": 3}'), ("now", "{}")]
COMPILER = Compiler()


@functools.lru_cache(maxsize=1)  # a test asks about several texts with each
def matcher_of(source: str) -> llguidance.LLMatcher:
    return llguidance.LLMatcher(llguidance.LLTokenizer("byte"), COMPILER.compile(source), log_level=0)


def accepts(rules: AnswerRules | ConstraintSource, text: str) -> bool:
    source = rules if isinstance(rules, ConstraintSource) else ConstraintSource(TOOLS, (rules.to_json(),))
    matcher = matcher_of(source.to_json()).deep_copy()
    return bool(matcher.consume_tokens(list(text.encode()))) and bool(matcher.is_accepting())


@pytest.mark.parametrize(
    ("start", "must_call"),
    [("", True), ("<think>\nhm <tool no</think>\n\n", False), ("hm <tool no</think>\n\n", True)],
)
@pytest.mark.parametrize("tools", FORMATS, ids=lambda one: one.name)
def test_only_valid_calls_follow_the_reasoning(tools: ToolFormat, start: str, must_call: bool) -> None:
    in_reasoning = start.startswith("hm")
    answer = AnswerFormat(tools, THINK if start else None, in_reasoning, {"weather.get": ("city",)})
    rules = AnswerRules(answer, OTHERS, must_call)
    for calls in (GOOD[:1], GOOD):
        text = start + written(tools, calls)
        assert accepts(rules, text)
        reasoning, content, parsed = read(answer, [text])
        assert (bool(reasoning), content) == (bool(start), "")
        assert [(name, json.loads(arguments)) for name, arguments in parsed] == [(n, json.loads(a)) for n, a in calls]
    assert accepts(rules, start + "Sunny, I think.") is not must_call
    assert not accepts(rules, start + written(tools, [("absent", "{}")]))
    assert not accepts(rules, start + written(tools, [("weather.get", '{"n": 3}')]))
    assert not accepts(rules, start + written(tools, [("now", '{"n": 3}')]))


@pytest.mark.parametrize("tools", [one for one in FORMATS if not one.is_bare], ids=lambda one: one.name)
def test_text_may_come_before_calls_unless_these_are_required(tools: ToolFormat) -> None:
    text = "Let me see.\n" + written(tools, GOOD)
    assert accepts(AnswerRules(AnswerFormat(tools), OTHERS), text)
    assert not accepts(AnswerRules(AnswerFormat(tools), OTHERS, must_call=True), text)


@pytest.mark.parametrize("tools", FORMATS, ids=lambda one: one.name)
def test_without_repeats_there_is_one_call(tools: ToolFormat) -> None:
    for must_call in (True, False):
        rules = AnswerRules(AnswerFormat(tools), OTHERS, must_call, may_repeat=False)
        assert accepts(rules, written(tools, GOOD[:1]))
        assert not accepts(rules, written(tools, GOOD))


def test_markers_that_are_special_tokens_are_written_by_id() -> None:
    rules = AnswerRules(AnswerFormat(BY_NAME["mistral"], THINK), OTHERS, token_ids={"[TOOL_CALLS]": 9, "</think>": 70})
    grammar = COMPILER.compile(ConstraintSource(TOOLS, (rules.to_json(),)).to_json())
    assert "<[9]>" in grammar
    assert "<[70]>" in grammar
    assert '"[TOOL_CALLS]' not in json.loads(grammar)["grammars"][0]["lark_grammar"]


def test_parameters_that_cannot_be_enforced_are_refused_and_any_object_if_relaxed() -> None:
    unsupported = '{"type": "object", "properties": {"x": {"type": "array", "uniqueItems": true}}}'
    answer = AnswerFormat(BY_NAME["hermes"])
    rules = AnswerRules(answer, (ToolSchema("f", unsupported), replace(TOOL, is_strict=True)), must_call=True)
    with pytest.raises(ConstraintError, match=r"f: parameters .*uniqueItems"):
        accepts(rules, "")
    assert rules.loose == ("f",)
    relaxed = rules.relaxed(rules.loose)
    assert accepts(relaxed, written(BY_NAME["hermes"], [("f", '{"y": 1}')]))
    assert not accepts(relaxed, written(BY_NAME["hermes"], [("weather.get", '{"y": 1}')]))


def test_call_has_only_listed_parameters_unless_the_schema_allows_others() -> None:
    hermes = BY_NAME["hermes"]
    for more, extra in (("", False), (', "additionalProperties": true', True)):
        tool = ToolSchema("f", f'{{"properties": {{"a": {{"type": "integer"}}}}{more}}}')
        rules = AnswerRules(AnswerFormat(hermes), (tool,), must_call=True)
        assert accepts(rules, written(hermes, [("f", '{"a": 1}')]))
        assert accepts(rules, written(hermes, [("f", '{"b": 1}')])) is extra


def test_references_lead_to_the_definitions_of_the_own_tool() -> None:
    def tool(name: str, kind: str) -> ToolSchema:
        schema = {
            "type": "object",
            "properties": {"x": {"$ref": "#/$defs/X"}},
            "required": ["x"],
            "$defs": {"X": {"type": kind}},
        }
        return ToolSchema(name, json.dumps(schema))

    for tools in FORMATS:
        rules = AnswerRules(AnswerFormat(tools), (tool("a", "integer"), tool("b", "boolean")), must_call=True)
        assert accepts(rules, written(tools, [("a", '{"x": 1}'), ("b", '{"x": true}')]))
        assert not accepts(rules, written(tools, [("b", '{"x": 1}')]))


@pytest.mark.parametrize(
    ("kind", "text", "good", "bad"),
    [
        ("json_schema", '{"type": "integer"}', "12", "x"),
        ("regex", "a+", "aa", "b"),
        ("grammar", 'start: "x" "y"', "xy", "x"),
        ("choice", "yes", "yes", "no"),
    ],
)
def test_constraint_begins_after_the_reasoning(kind: str, text: str, good: str, bad: str) -> None:
    for in_reasoning, start in ((True, "so</think>\n\n"), (False, "<think>so</think>\n\n")):
        rules = AnswerRules(AnswerFormat(None, THINK, in_reasoning)).to_json()
        source = ConstraintSource(kind, (text,), reasoning=rules)
        assert accepts(source, start + good)
        assert not accepts(source, start + bad)
        assert accepts(source, good) is not in_reasoning


def test_rules_survive_being_sent() -> None:
    rules = AnswerRules(AnswerFormat(FORMATS[0], THINK, True), OTHERS, True, False, {"x": 3}).to_json()
    assert answer_rules(rules).to_json() == answer_rules(answer_rules(rules).to_json()).to_json()


def harmony_model() -> TextModel:
    """A model whose template writes messages in channels."""
    return chat_models.chat_model(chat_models.gpt_oss)


def walked(model: TextModel, rules: AnswerRules | ConstraintSource, text: str) -> str | None:
    """The text if a grammar accepts its tokens, else what it allows next to their accepted beginning, which is one
    token or two; None if these are more."""
    source = rules if isinstance(rules, ConstraintSource) else ConstraintSource(TOOLS, (rules.to_json(),))
    grammar = COMPILER.compile(source.to_json())
    matcher = llguidance.LLMatcher(chat_models.guided(model), grammar, log_level=0)
    token_ids = model.encode(text)
    for number, token_id in enumerate(token_ids):
        mask = int.from_bytes(matcher.compute_bitmask(), "little")
        # The position in a grammar is a function of the tokens so far.
        again = llguidance.LLMatcher(chat_models.guided(model), grammar, log_level=0)
        assert again.consume_tokens(token_ids[:number])
        assert int.from_bytes(again.compute_bitmask(), "little") == mask
        if not mask >> token_id & 1:
            allowed = [other for other in range(model.vocabulary_size) if mask >> other & 1]
            return " ".join(model.token_names(allowed)) if len(allowed) <= 2 else None
        assert matcher.consume_token(token_id)
    return text if matcher.is_accepting() else None


def test_answers_in_channels_are_accepted_and_read() -> None:
    model, harmony = harmony_model(), BY_NAME["harmony"]
    answer = AnswerFormat(harmony, CHANNELS)
    for must_call in (True, False):
        rules = AnswerRules(answer, OTHERS, must_call, token_ids=model.marker_ids)
        for reasoning in ("", "So < it is."):
            for content in ("", "Let me see."):
                for calls in ([], GOOD[:1], GOOD):
                    text = whole_answer(harmony, reasoning, content, calls)
                    is_allowed = bool(calls) and not content if must_call else bool(content or calls)
                    if content or calls:
                        assert (walked(model, rules, text) == text) is is_allowed, text
                    assert read(answer, [text]) == (reasoning, content, calls)
            bad = whole_answer(harmony, reasoning, "", [("weather.get", '{"n": 3}')])
            assert walked(model, rules, bad) != bad
    source = ConstraintSource("choice", ("yes",), reasoning=AnswerRules(answer, token_ids=model.marker_ids).to_json())
    for reasoning in ("", "So."):
        for content in ("yes", "no"):
            text = whole_answer(harmony, reasoning, content, [])
            assert (walked(model, source, text) == text) is (content == "yes")


@pytest.mark.parametrize("in_reasoning", [True, False])
@pytest.mark.parametrize("budget", [0, 1, 5])
def test_end_of_reasoning_is_the_only_token_after_its_budget(budget: int, in_reasoning: bool) -> None:
    model = chat_models.chat_model(chat_models.qwen_3)
    assert "</think>" in model.marker_ids
    answer = AnswerFormat(None, THINK, in_reasoning)
    rules = AnswerRules(answer, token_ids=model.marker_ids, most_reasoning=budget)
    begin = "" if in_reasoning else "<think>"
    for constraint in (rules, ConstraintSource("regex", ("[a-z]+",), reasoning=rules.to_json())):
        fitting = f"{begin}{'x' * budget}</think>yes"
        assert walked(model, constraint, fitting) == fitting
        assert walked(model, constraint, f"{begin}{'x' * (budget + 1)}") == "</think>"
        if budget:
            assert walked(model, constraint, f"{begin}</think>yes") == f"{begin}</think>yes"
    half = f"{begin}{'x' * (budget - 1)}ü" if budget else begin
    assert walked(model, rules, f"{half}ü") == "</think>"
    if not in_reasoning:
        assert walked(model, rules, "No <thin here.") == "No <thin here."
        assert walked(model, rules, " <think>x") in (None, "</think>")


def test_budget_holds_before_calls_and_in_channels() -> None:
    for build, tools in ((chat_models.qwen_3, BY_NAME["hermes"]), (chat_models.gpt_oss, BY_NAME["harmony"])):
        model = chat_models.chat_model(build)
        reasoning = CHANNELS if tools.name == "harmony" else THINK
        rules = AnswerRules(AnswerFormat(tools, reasoning), OTHERS, True, True, model.marker_ids, 4)
        text = whole_answer(tools, "xxxx", "", GOOD[:1]).replace("<think>\n", "<think>")
        assert walked(model, rules, text) == text
        # A call may end the reasoning, too, unless every part of an answer is a message of its own.
        following = reasoning.end if tools.name == "harmony" else f"{reasoning.end} {tools.begin}"
        assert walked(model, rules, text.replace("xxxx", "xxxxx")) == following


@pytest.mark.parametrize("schema", [{"type": "string", "maxLength": 3}, {"description": "any value"}])
def test_text_of_a_parameter_ends_at_the_first_end_tag(schema: dict[str, str]) -> None:
    """Where the parser ends it. A parameter without a type is written as text, too."""
    parameters = json.dumps({"type": "object", "properties": {"a": schema}})
    rules = AnswerRules(AnswerFormat(BY_NAME["qwen3_coder"]), (ToolSchema("f", parameters),), must_call=True)
    for text, is_accepted in (("my_data", True), ("<b>\n\n12", True), ("", True), ("a</parameter>b", False)):
        assert accepts(rules, written(BY_NAME["qwen3_coder"], [("f", json.dumps({"a": text}))])) is is_accepted


def test_pattern_of_a_strict_tool_that_does_not_compile_is_refused_with_tool_and_place() -> None:
    parameters = json.dumps({"type": "object", "properties": {"city": {"type": "string", "pattern": "("}}})
    rules = AnswerRules(AnswerFormat(BY_NAME["hermes"]), (ToolSchema("f", parameters, True),))
    source = ConstraintSource(TOOLS, (rules.to_json(),))
    with pytest.raises(ConstraintError) as caught:
        COMPILER.compile(source.to_json())
    text = 'f: parameters has the pattern "(" at "/properties/city", which does not compile: unclosed group'
    assert caught.value.violations == [text]


# As Codex describes its patches, shortened.
PATCH_GRAMMAR = r"""
start: begin_patch hunk+ end_patch
begin_patch: "*** Begin Patch" LF
end_patch: "*** End Patch" LF?

hunk: add_hunk | update_hunk
add_hunk: "*** Add File: " filename LF add_line+
update_hunk: "*** Update File: " filename LF change+
filename: /(.+)/
add_line: "+" /(.*)/ LF -> line
change: ("@@" | "@@ " /(.+)/) LF | ("+" | "-" | " ") /(.*)/ LF
%import common.LF
"""
INPUT = '{"type":"object","properties":{"input":{"type":"string"}},"required":["input"]}'
PATCH = '*** Begin Patch\n*** Update File: ä.txt\n@@\n-a "b" \\ c\n+\td\n*** End Patch'


@pytest.mark.parametrize("end", ["", "\n"])
@pytest.mark.parametrize("tools", FORMATS, ids=lambda one: one.name)
def test_input_of_a_tool_satisfies_its_grammar_in_every_format(tools: ToolFormat, end: str) -> None:
    answer = AnswerFormat(tools, texts={"patch": ("input",)})
    rules = AnswerRules(answer, (ToolSchema("patch", INPUT, True, PATCH_GRAMMAR), TOOL), must_call=True)

    def call(text: str) -> str:
        return written(tools, [("patch", json.dumps({"input": text}, ensure_ascii=False)), GOOD[0]])

    assert accepts(rules, call(PATCH + end))
    ((name, arguments), other) = read(answer, [call(PATCH + end)])[2]
    assert (name, json.loads(arguments)["input"].rstrip("\n"), other[0]) == ("patch", PATCH, "weather.get")
    for wrong in ("*** Begin Patch\n*** End Patch", PATCH + "\nx", PATCH.replace("@@\n", "@@\nx\n"), ""):
        assert not accepts(rules, call(wrong))


@pytest.mark.parametrize(
    ("grammar", "good", "bad"),
    [
        (r"start: /[^\d\s]{2}(?i:x|\")+\\/", ['ä"X"x\\', "\\.x\\"], ["a1x\\", "ab\\"]),
        ('start: (A "\\n")~2\nA: /(?s:.)/ & ~"b"', ["a\n\\\n", '"\n\n\n'], ["a\nb\n", "a\n"]),
        ('start: "say"i WORD["\\t"]\n%import common.WORD\n%ignore /[ \\n]+/', ["SAY\n\n hi\t \n", "say x"], ["sy x"]),
        (
            "start: PRAGMA /\\r?\\n/ SOURCE | SOURCE\nPRAGMA: /\\/\\/ @exec:[^\\r\\n]*/\nSOURCE: /[\\s\\S]+/",
            ['// @exec: 1\nf("\\n")', "\x01\x1f\x7f\u2028"],
            [""],
        ),
        ('start: "a".."c" (SP "0".."9"){2,3} // a comment\n# another\nSP: " "', ["b 1 2", "c 1 2 3"], ["d 1 2", "b 1"]),
        ('start: e\n?e: INT | "(" e "+" e ")" -> sum\n%import common (INT, WS)', ["(1+(2+3))"], ["(1+", "1 + 2"]),
        (r"start: /\p{Lu}\P{Lu}[[:digit:]--[5]]./", ['Ä"1\t', "A\n2."], ["Aa5.", "A11\n"]),
    ],
)
@pytest.mark.parametrize("name", ["hermes", "qwen3_coder"])
def test_grammars_of_texts_keep_their_meaning_in_calls(
    name: str, grammar: str, good: list[str], bad: list[str]
) -> None:
    rules = AnswerRules(AnswerFormat(BY_NAME[name]), (ToolSchema("f", INPUT, True, grammar),), must_call=True)
    for text in (*good, *bad):
        arguments = json.dumps({"input": text}, ensure_ascii=False)
        assert accepts(rules, written(BY_NAME[name], [("f", arguments)])) is (text in good), text


def test_text_before_an_end_tag_does_not_have_it() -> None:
    tools = BY_NAME["qwen3_coder"]
    rules = AnswerRules(AnswerFormat(tools), (ToolSchema("f", INPUT, True, "start: C+\nC: /(?s:.)/"),), must_call=True)
    assert accepts(rules, written(tools, [("f", '{"input": "<b></parameter"}')]))
    assert not accepts(rules, written(tools, [("f", '{"input": "<b></parameter>x"}')]))


@pytest.mark.parametrize(
    ("grammar", "reason"),
    [
        (
            'start: e\ne: "\\n" | "(" e ")"',
            "has the rule e, which refers to itself, and characters that are special in JSON",
        ),
        ("start: <[5]>", "has < in the rule start"),
        ("start: @x", "has @ in the rule start"),
        ("start: %json {}", "has %json in the rule start"),
        ("start[max_tokens=3]: /a/", r'has the definition "start \[ max_tokens ="'),
        ('a: "x"', "has no rule start"),
        ("start: b", "refers to b, which it does not define"),
        ("start: /a(?=b)/", "look-around"),
        ("start: /[a/", "has a class in a regular expression that does not end"),
        ('start: "\\q"', "which is not one of JSON"),
        ("%import python.NAME\nstart: NAME", "has %import python . NAME"),
        ("%import common.ABSENT\nstart: ABSENT", "imports common.ABSENT"),
        ("start: /(?x) a/", r"has the flags \(\?x\)"),
        ("start: /[z-a]/", "which is no regular expression here"),
    ],
)
def test_grammars_of_texts_that_cannot_be_enforced_are_refused(grammar: str, reason: str) -> None:
    rules = AnswerRules(AnswerFormat(BY_NAME["hermes"]), (ToolSchema("f", INPUT, True, grammar),), must_call=True)
    with pytest.raises(ConstraintError, match=reason):
        accepts(rules, "")
