"""The form of a request's answer: what its parser reads, and what its grammar allows."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence

from router.constraint.answer_grammar import AnswerRules
from router.constraint.source import TOOLS, ConstraintSource
from router.request.spec import GenerateSpec
from router.text.tokenizer import TextModel
from router.tools.formats import AnswerFormat

# As most models write JSON in calls: a space behind a colon or a comma.
MAX_WHITESPACE_IN_ARGUMENTS = 1


def answer_format_of(spec: GenerateSpec, text: TextModel, prompt_ids: Sequence[int]) -> AnswerFormat:
    """Returns how the answer to a prompt is divided into reasoning, content and calls."""
    if spec.tools is None and not spec.output.parts:
        return AnswerFormat()
    tools = None if spec.tools is None else text.support.tools
    texts = {}
    if spec.tools is not None and tools is not None and tools.layout == "parameters":
        texts = {one.name: text_parameters(one.parameters) for one in spec.tools.functions}
    return AnswerFormat(tools, text.support.reasoning, text.opens_reasoning(prompt_ids), texts)


def text_parameters(parameters: str) -> tuple[str, ...]:
    """Returns the parameters of a schema that are text."""
    properties = json.loads(parameters).get("properties") if parameters else None
    if not isinstance(properties, dict):
        return ()
    return tuple(
        name for name, schema in properties.items() if isinstance(schema, dict) and schema.get("type") == "string"
    )


def answer_constraint(spec: GenerateSpec, text: TextModel, answer: AnswerFormat) -> ConstraintSource | None:
    """Returns what constrains the answer: the tools that it may call, or the request's constraint, which begins after
    the reasoning."""
    if spec.tools is not None:
        return ConstraintSource(TOOLS, (_rules(spec, text, answer).to_json(),), MAX_WHITESPACE_IN_ARGUMENTS)
    if spec.constraint is None or answer.reasoning is None:
        return spec.constraint
    return dataclasses.replace(spec.constraint, reasoning=_rules(spec, text, answer).to_json())


def _rules(spec: GenerateSpec, text: TextModel, answer: AnswerFormat) -> AnswerRules:
    tools = spec.tools
    functions = () if tools is None else tools.functions
    must_call, may_repeat = (False, False) if tools is None else (tools.must_call, tools.may_repeat)
    # What only the parser needs would make equal grammars unequal.
    return AnswerRules(dataclasses.replace(answer, texts={}), functions, must_call, may_repeat, text.marker_ids)
