"""BFCL's correct calls: every format's grammar accepts them, and its parser reads them."""

from __future__ import annotations

import json
import os

import pytest

from inflight.router.constraint.answer_grammar import AnswerRules, ToolSchema
from inflight.router.tools.formats import FORMATS, AnswerFormat, ToolFormat
from tests.bfcl.cases import CATEGORIES, Case, NotFetchedError, fetched_cases
from tests.unit.test_answer_grammar import accepts
from tests.unit.test_tool_parser import read, written

pytestmark = pytest.mark.slow

# Of each category one case in so many, a different one for each format. `make bfcl` sets the variable to take all.
STEP = 1 if os.environ.get("BFCL_ALL") else 7
# Their correct calls do not satisfy their own schemas.
CONTRADICTORY = {"simple_python_307", "parallel_152"}


def usable(category: str) -> list[Case]:
    """The cases whose correct calls satisfy their schemas."""
    try:
        cases = fetched_cases(category)
    except NotFetchedError as error:
        pytest.skip(f"BFCL cannot be fetched: {error}")
    valid = [case for case in cases if all(case.is_valid(*call) for call in case.calls)]
    assert {case.name for case in cases} - {case.name for case in valid} <= CONTRADICTORY
    return valid


def rules_of(case: Case, tools: ToolFormat) -> AnswerRules:
    texts = {
        name: tuple(key for key, one in schema["properties"].items() if one.get("type") == "string")
        for name, schema in case.functions.items()
    }
    schemas = tuple(ToolSchema(name, json.dumps(schema)) for name, schema in case.functions.items())
    return AnswerRules(AnswerFormat(tools, texts=texts), schemas, must_call=True)


@pytest.mark.parametrize("category", CATEGORIES)
@pytest.mark.parametrize("tools", FORMATS, ids=lambda one: one.name)
def test_correct_calls_are_accepted_and_read_in_every_format(tools: ToolFormat, category: str) -> None:
    cases = usable(category)
    for case in cases[FORMATS.index(tools) % STEP :: STEP]:
        calls = [(name, json.dumps(arguments, ensure_ascii=False)) for name, arguments in case.calls]
        text = written(tools, calls)
        rules = rules_of(case, tools)
        assert accepts(rules, text), (case.name, text)
        reasoning, content, parsed = read(rules.answer, [text])
        assert (reasoning, content) == ("", "")
        assert [(name, json.loads(arguments)) for name, arguments in parsed] == case.calls
        assert read(rules.answer, list(text))[2] == parsed
