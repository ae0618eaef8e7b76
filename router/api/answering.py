"""The form of an answer, which follows from a request, its model and its prompt: its parts, and what constrains it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from inflight.router.constraint.answer_grammar import AnswerRules, ToolSchema
from inflight.router.constraint.json_text import read_json
from inflight.router.constraint.source import DEFAULT_MAX_WHITESPACE, TOOLS, ConstraintSource, regex_grammar
from inflight.router.text.tokenizer import TextModel
from inflight.router.tools.formats import AnswerFormat
from inflight.v1 import inference_pb2, types_pb2

# As most models write JSON in calls: a space behind a colon or a comma.
MAX_WHITESPACE_IN_ARGUMENTS = 1


def answer_format_of(
    request: inference_pb2.GenerateRequest, text: TextModel, prompt_ids: Sequence[int]
) -> AnswerFormat:
    """Returns how the answer to a prompt is divided into reasoning, content and calls."""
    functions = _functions(request)
    if not functions and not request.output.parts:
        return AnswerFormat()
    tools = text.support.tools if functions else None
    texts = {}
    if tools is not None and tools.layout == "parameters":
        texts = {one.name: text_parameters(one.parameters) for one in functions}
    return AnswerFormat(
        tools,
        text.support.reasoning,
        text.opens_reasoning(prompt_ids),
        texts,
        must_call=_must_call(request),
        is_constrained=request.HasField("constraint"),
    )


def text_parameters(parameters: str) -> tuple[str, ...]:
    """Returns the parameters of a schema that are text."""
    properties = read_json(parameters).get("properties") if parameters else None
    if not isinstance(properties, dict):
        return ()
    return tuple(
        name for name, schema in properties.items() if isinstance(schema, dict) and schema.get("type") == "string"
    )


def answer_constraint_of(
    request: inference_pb2.GenerateRequest, text: TextModel, answer: AnswerFormat, default_budget: int | None = None
) -> ConstraintSource | None:
    """Returns what constrains the answer: the functions that it may call, or the request's constraint, which begins
    after the reasoning, or only the length of the reasoning. `default_budget` is that of requests without one."""
    constraint = constraint_source(request.constraint) if request.HasField("constraint") else None
    functions, choice = _functions(request), request.tool_choice
    most_reasoning = _most_reasoning(request, text, answer, default_budget)
    if not functions and most_reasoning is None and (constraint is None or answer.reasoning is None):
        return constraint
    rules = AnswerRules(
        # What only the parser needs would make equal grammars unequal.
        dataclasses.replace(answer, texts={}, must_call=False, is_constrained=False),
        functions,
        must_call=_must_call(request),
        may_repeat=bool(functions) and (choice.parallel if choice.HasField("parallel") else True),
        token_ids=text.marker_ids,
        most_reasoning=most_reasoning,
    )
    if functions or constraint is None:
        return ConstraintSource(TOOLS, (rules.to_json(),), MAX_WHITESPACE_IN_ARGUMENTS)
    return dataclasses.replace(constraint, reasoning=rules.to_json())


def constraint_source(constraint: types_pb2.Constraint) -> ConstraintSource:
    """Returns a valid constraint as plain values."""
    kind = constraint.WhichOneof("kind")
    if kind == "json_object":
        texts: tuple[str, ...] = ()
    elif kind == "choice":
        texts = tuple(constraint.choice.choices)
    else:
        texts = (getattr(constraint, kind),)
    given = constraint.HasField("max_whitespace")
    return ConstraintSource(kind, texts, constraint.max_whitespace if given else DEFAULT_MAX_WHITESPACE)


def _functions(request: inference_pb2.GenerateRequest) -> tuple[ToolSchema, ...]:
    """Returns the functions that the answer may call."""
    if request.tool_choice.mode == inference_pb2.ToolChoice.MODE_NONE:
        return ()
    names = request.tool_choice.names
    return tuple(
        ToolSchema(function.name, function.parameters, function.strict or bool(_input(function)), _input(function))
        for function in request.chat.functions
        if not names or function.name in names
    )


def _input(function: inference_pb2.Function) -> str:
    """Returns the grammar of a function's argument `input`; empty for none."""
    return regex_grammar(function.input_regex) if function.HasField("input_regex") else function.input_grammar


def _must_call(request: inference_pb2.GenerateRequest) -> bool:
    return request.tool_choice.mode == inference_pb2.ToolChoice.MODE_REQUIRED


def _most_reasoning(
    request: inference_pb2.GenerateRequest, text: TextModel, answer: AnswerFormat, default_budget: int | None
) -> int | None:
    """Returns the tokens of reasoning after which its end is forced; None for no limit."""
    if answer.reasoning is None or not text.can_end_reasoning or not request.HasField("chat"):
        return None
    chat = request.chat
    budget = chat.thinking_token_budget if chat.HasField("thinking_token_budget") else default_budget
    return budget if budget is not None and budget >= 0 else None
