"""Grammars of answers: what they accept is what the parser reads, in every format."""

from __future__ import annotations

import json

import llguidance
import pytest

from router.constraint.answer_grammar import AnswerRules, ToolSchema, answer_rules
from router.constraint.source import TOOLS, ConstraintError, ConstraintSource
from router.constraint.worker import Compiler
from router.tools.formats import FORMATS, THINK, AnswerFormat, ToolFormat
from tests.unit.test_tool_parser import BY_NAME, read, written

SCHEMA = '{"type":"object","properties":{"city":{"type":"string"},"n":{"type":"integer"}},"required":["city"]}'
TOOL = ToolSchema("weather.get", SCHEMA)
OTHERS = (TOOL, ToolSchema("now"))
GOOD = [("weather.get", '{"city": "Ulm", "n": 3}'), ("now", "{}")]
COMPILER = Compiler()


def accepts(rules: AnswerRules | ConstraintSource, text: str) -> bool:
    source = rules if isinstance(rules, ConstraintSource) else ConstraintSource(TOOLS, (rules.to_json(),))
    grammar = COMPILER.compile(source.to_json())
    matcher = llguidance.LLMatcher(llguidance.LLTokenizer("byte"), grammar, log_level=0)
    return bool(matcher.consume_tokens(list(text.encode()))) and bool(matcher.is_accepting())


@pytest.mark.parametrize("must_call", [True, False])
@pytest.mark.parametrize("start", ["", "<think>\nhm <tool_call> no</think>\n\n", "hm <tool_call> no</think>\n\n"])
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
    assert "TOOL_CALLS" not in grammar


def test_parameters_that_cannot_be_enforced_are_any_object_or_refused() -> None:
    unsupported = '{"type": "object", "properties": {"x": {"type": "array", "uniqueItems": true}}}'
    answer = AnswerFormat(BY_NAME["hermes"])
    rules = AnswerRules(answer, (ToolSchema("f", unsupported), TOOL), must_call=True)
    assert accepts(rules, written(BY_NAME["hermes"], [("f", '{"y": 1}')]))
    assert not accepts(rules, written(BY_NAME["hermes"], [("weather.get", '{"y": 1}')]))
    simplified = rules.simplified
    assert simplified is not None
    assert accepts(simplified, written(BY_NAME["hermes"], [("weather.get", '{"y": 1}')]))
    assert simplified.simplified is None
    with pytest.raises(ConstraintError, match=r"f: parameters .*uniqueItems"):
        accepts(AnswerRules(answer, (ToolSchema("f", unsupported, is_strict=True), TOOL)), "")


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
