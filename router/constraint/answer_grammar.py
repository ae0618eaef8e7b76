"""Grammars of whole answers in llguidance's Lark: reasoning, then tool calls in a model's format or a constraint.

The same table of formats drives the parser (`inflight.router.tools.parser`). Text is free until a call begins; from
there on the call names a tool and its arguments satisfy that tool's schema. That holds for reasoning, too, which a call
ends. Markers that are special tokens of the model are written by id, because no text matches them.

A limit of the reasoning is part of the grammar, so that it holds wherever the output is continued: the position in the
grammar is a function of the output's tokens. llguidance copies the position in such a grammar, but does not roll it
back, and its `validate_tokens` does not see the limit.
"""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from inflight.router.constraint.exclusive import with_any_of
from inflight.router.constraint.json_schema import SchemaError, SchemaPattern, canonical_schema, patterns_of
from inflight.router.constraint.json_text import JsonTextError, parse_json
from inflight.router.constraint.literals import Literals
from inflight.router.constraint.text_grammar import TextGrammarError, text_grammar
from inflight.router.tools.formats import (
    GEMMA_QUOTE,
    PLACEHOLDERS,
    AnswerFormat,
    ReasoningFormat,
    ToolFormat,
    answer_format,
    pieces,
)

ANY_OBJECT: dict[str, Any] = {"type": "object", "additionalProperties": True}
NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}
# Keywords by which arguments may have more members than `properties` lists. Without them a call has only these.
_OTHER_PROPERTIES = frozenset(
    {"additionalProperties", "patternProperties", "unevaluatedProperties", "$ref", "allOf", "anyOf", "oneOf"}
)
_ANNOTATIONS = frozenset({"title", "description", "default", "examples"})
NO_REASONING = ReasoningFormat("", "", "")
# Between reasoning and what follows it.
MAX_SPACE_AFTER_REASONING = 8
_ESCAPED = {character: "\\" + character for character in r"\.+*?()|[]{}^$/"} | {"\n": r"\n", "\t": r"\t", "\r": r"\r"}


class ToolSchemaError(Exception):
    """Parameters of tools that cannot be enforced. Each text names the tool."""

    def __init__(self, violations: list[str]) -> None:
        super().__init__("; ".join(violations))
        self.violations = violations


@dataclass(frozen=True, slots=True)
class ToolSchema:
    """A tool: its name and its parameters as the text of a JSON schema, empty for none. If it `is_strict`, parameters
    that cannot be enforced are refused; otherwise they become any object. `input` is a grammar of its one argument of
    this name."""

    name: str
    parameters: str = ""
    is_strict: bool = False
    input: str = ""


@dataclass(frozen=True, slots=True)
class AnswerRules:
    """The form of an answer. Without `tools` it is reasoning and then something else.

    `must_call`: nothing but calls follows the reasoning. `may_repeat`: there may be several calls. `token_ids` are the
    ids of the special tokens in markers. `most_reasoning` is the number of tokens after which the end of the reasoning
    is forced; None: no limit.
    """

    answer: AnswerFormat
    tools: tuple[ToolSchema, ...] = ()
    must_call: bool = False
    may_repeat: bool = True
    token_ids: Mapping[str, int] = field(default_factory=dict)
    most_reasoning: int | None = None

    def to_json(self) -> str:
        """Returns the rules as text, for a compiling process."""
        parts = [
            self.answer.to_json(),
            [[tool.name, tool.parameters, tool.is_strict, tool.input] for tool in self.tools],
            self.must_call,
            self.may_repeat,
            dict(self.token_ids),
            self.most_reasoning,
        ]
        return json.dumps(parts, separators=(",", ":"))

    @property
    def loose(self) -> tuple[str, ...]:
        """The names of the tools whose parameters need not be enforced."""
        return tuple(tool.name for tool in self.tools if tool.parameters and not tool.is_strict)

    def relaxed(self, names: Collection[str]) -> AnswerRules:
        """Returns the same with any object as the arguments of these tools."""
        any_object = json.dumps(ANY_OBJECT)
        tools = (ToolSchema(tool.name, any_object) if tool.name in names else tool for tool in self.tools)
        return replace(self, tools=tuple(tools))

    def alone(self, name: str) -> AnswerRules:
        """Returns the rules of an answer that calls only this tool, whose parameters must be enforced."""
        tools = (replace(tool, is_strict=True) for tool in self.tools if tool.name == name)
        return replace(self, tools=tuple(tools))


def tool_patterns(rules: AnswerRules) -> Iterator[tuple[str, SchemaPattern]]:
    """Yields the patterns in parameters that must be enforced, each after the beginning of a violation about it."""
    for tool in rules.tools:
        if tool.is_strict and tool.parameters:
            for pattern in patterns_of(parse_json(tool.parameters)):
                yield f"{tool.name}: parameters ", pattern


def answer_rules(text: str) -> AnswerRules:
    """Returns the rules that `to_json` wrote."""
    answer, tools, *others = json.loads(text)
    return AnswerRules(answer_format(answer), tuple(ToolSchema(*tool) for tool in tools), *others)


def input_grammars(rules: AnswerRules) -> dict[str, str]:
    """Returns the grammars of the texts that tools take, by the names that the grammar of the answer has for them.
    Raises `ToolSchemaError`."""
    grammars: dict[str, str] = {}
    violations = []
    for number, tool in enumerate(rules.tools):
        if tool.input:
            assert rules.answer.tools is not None
            try:
                grammars[f"input_{number}"] = text_grammar(tool.input, *_input_ending(rules))
            except TextGrammarError as error:
                violations.append(f"{tool.name}: the grammar of its input {error}")
    if violations:
        raise ToolSchemaError(violations)
    return grammars


def answer_lark(rules: AnswerRules, options: dict[str, object], body: str = "", ignored: set[str] | None = None) -> str:
    """Returns the grammar. `options` are llguidance's for JSON, `body` is a rule in place of tool calls; without both,
    text is free. Adds words of the tools' schemas that JSON Schema does not know to `ignored`. Raises
    `ToolSchemaError`."""
    return _Writer(rules, options, ignored).write(body)


class _Writer:
    def __init__(self, rules: AnswerRules, options: dict[str, object], ignored: set[str] | None) -> None:
        self._rules = rules
        self._options = options
        self._ignored = ignored
        self._lines: list[str] = []

    def write(self, body: str) -> str:
        content, interruption = self._marker(self._reasoning.content), ""
        if body:
            body = _join(content, body)
        elif self._rules.tools:
            after_begin = self._tools()
            body = "calls" if self._rules.must_call else "answer"
            if self._interrupting:
                interruption = f"interruption {after_begin}"
        else:
            markers = self._reasoning.markers if content else ()
            self._lines.append(f"FREE: {self._text_without(*markers)}{self._no_reasoning()}")
            body = _join(content, "FREE")
        if self._rules.answer.reasoning is None:
            return "\n".join([f"start: {body}", *self._lines])
        self._think()
        begin = self._marker(self._reasoning.begin)
        whole = f"think {body}" if self._rules.answer.in_reasoning else f"({begin} think)? {body}"
        if interruption:
            whole += f" | {interruption}" if self._rules.answer.in_reasoning else f" | {_join(begin, interruption)}"
        return "\n".join([f"start: {whole}", *self._lines])

    @property
    def _interrupting(self) -> str:
        """The beginning of a call that ends the reasoning wherever it comes; empty if none does."""
        rules = self._rules
        if not rules.tools or rules.answer.reasoning is None or self._reasoning.next_message or self._format.is_bare:
            return ""
        begin = self._format.begin
        return begin if rules.most_reasoning is None or self._token_in(begin) == 0 else ""

    @property
    def _reasoning(self) -> ReasoningFormat:
        return self._rules.answer.reasoning or NO_REASONING

    def _think(self) -> None:
        """Adds the rule `think`, of the reasoning after its beginning up to what follows."""
        reasoning, most, interrupting = self._reasoning, self._rules.most_reasoning, self._interrupting
        ends = tuple(filter(None, (reasoning.end, interrupting)))
        if most is None:
            self._lines += self._until("thought", reasoning.end, without=ends)
            if interrupting:
                self._lines += self._until("interruption", interrupting, without=ends)
        else:
            # At the limit `thinking` ends whatever its text is, so that only the token of a marker can follow.
            assert self._token_in(reasoning.end) == 0
            thinking = "thinking" if most else ""
            self._lines.append(f"thought: {_join(thinking, self._marker(reasoning.end))}")
            if interrupting:
                self._lines.append(f"interruption: {_join(thinking, self._marker(interrupting))}")
            if most:
                self._lines.append(f"thinking[max_tokens={most}]: THINKING")
                self._lines.append(f"THINKING: {self._text_without(*ends)}")
        if reasoning.next_message:
            self._lines.append(f"think: thought {self._marker(reasoning.next_message)}")
        else:
            self._lines.append("think: thought space")
            self._lines.append(f"space: /[ \\n\\r\\t]{{0,{MAX_SPACE_AFTER_REASONING}}}/")

    def _until(self, rule: str, marker: str, other_than: str = "", without: Collection[str] = ()) -> list[str]:
        """Returns the rules of text up to and including a marker, without other markers in it."""
        name, at = rule.upper(), self._token_in(marker)
        if at is None:
            excluded = "".join(f" & ~/(?s:.*{_regex(one)}.*)/" for one in without if one not in marker)
            return [f"{rule}[lazy]: {name}", f"{name}: /(?s:.*){_regex(marker)}/{excluded}{other_than}"]
        # The token ends the text, which has the beginning of the marker before it.
        text = self._text_without(*(without or (marker,)), end=marker[:at])
        return [f"{rule}: {name} {self._marker(marker[at:])}", f"{name}: {text}{other_than}"]

    def _text_without(self, *markers: str, end: str = "") -> str:
        """Returns an expression of text that has none of the markers, not even spelled by other tokens: the parser
        reads text. `end` is how the text ends."""
        texts = "|".join(map(_regex, markers))
        return f"/(?s:.*){_regex(end)}/" + (f" & ~/(?s:.*({texts}).*)/" if texts else "")

    def _no_reasoning(self) -> str:
        """Returns what keeps reasoning from being taken for text at the beginning."""
        begin = "" if self._rules.answer.in_reasoning else self._reasoning.begin
        return f" & ~/(?s:\\s*{_regex(begin)}.*)/" if begin else ""

    def _token_in(self, marker: str) -> int | None:
        """Returns where the first token in a marker begins that is written by id."""
        return min((marker.index(token) for token in self._rules.token_ids if token in marker), default=None)

    def _marker(self, marker: str) -> str:
        token_ids = self._rules.token_ids
        tokens = "|".join(map(re.escape, sorted(token_ids, key=len, reverse=True))) or "(?!)"
        parts = filter(None, re.split(f"({tokens})", marker))
        return _join(*(f"<[{token_ids[one]}]>" if one in token_ids else _literal(one) for one in parts))

    @property
    def _format(self) -> ToolFormat:
        assert self._rules.answer.tools is not None
        return self._rules.answer.tools

    def _tools(self) -> str:
        """Adds the rules `calls`, of calls alone, and `answer`, of text that may end in calls. Returns what follows the
        marker at the beginning of the calls."""
        tools, violations = self._format, []
        for number, tool in enumerate(self._rules.tools):
            try:
                self._lines += self._body(number, tool)
            except ToolSchemaError as error:
                violations += error.violations
        if violations:
            raise ToolSchemaError(violations)
        self._lines.append(f"body: {' | '.join(f'body_{i}' for i in range(len(self._rules.tools)))}")
        begin = "" if tools.is_bare else self._marker(tools.begin)
        if tools.layout == "list":
            more = ' (", " body)*' if self._rules.may_repeat else ""
            after_begin = _join(f'"[" body{more} "]"', self._end())
        elif tools.encloses_all:
            padding, separator = self._marker(tools.padding), self._marker(tools.separator)
            more = f" ({_join(separator, 'body')})*" if self._rules.may_repeat else ""
            after_begin = _join(padding, f"body{more}", padding, self._end())
        else:
            separator = self._marker(tools.separator)
            more = f" ({_join(separator, begin, 'body')})*" if self._rules.may_repeat else ""
            after_begin = f"body{more}"
        self._lines.append(f"calls: {_join(begin, after_begin)}")
        if not self._rules.must_call:
            self._free(after_begin)
        return after_begin

    def _free(self, after_begin: str) -> None:
        reasoning, other_than = self._reasoning, self._no_reasoning()
        if reasoning.content:
            # Each is a message of its own.
            preamble = f"{self._marker(reasoning.preamble)} spoken {self._marker(reasoning.next_message)}"
            self._lines += self._until("spoken", reasoning.end)
            self._lines += [
                f"answer: {self._marker(reasoning.content)} FREE | ({preamble})? calls",
                f"FREE: {self._text_without(*reasoning.markers, self._format.begin)}",
            ]
            return
        if self._format.is_bare:
            self._lines += ["answer: calls | FREE", f"FREE: /(?s:\\s*([^{{\\s].*)?)/{other_than}"]
            return
        self._lines.append(f"answer: FREE | trigger {after_begin}")
        self._lines.append(f"FREE: {self._text_without(self._format.begin)}{other_than}")
        self._lines += self._until("trigger", self._format.begin, other_than)

    def _end(self) -> str:
        return self._marker(self._format.end)

    def _body(self, number: int, tool: ToolSchema) -> Iterator[str]:
        """Yields the rules of a call after its beginning. Raises `ToolSchemaError`."""
        tools, rule = self._format, f"body_{number}"
        schema = _schema(tool, self._ignored)
        if tools.layout == "parameters":
            yield from self._parameters(rule, tool, schema, f"@input_{number}")
            return
        if tools.layout == "named":
            begin, end = self._around(tool.name)
            whole = _join(begin, f"args_{number}", end)
        else:
            head = f'{{"{tools.name_key}": {json.dumps(tool.name)}, "{tools.arguments_key}": '
            padding, end = (tools.padding, self._end()) if tools.layout == "object" else ("", "")
            whole = _join(_literal(padding + head), f"args_{number}", _literal("}" + padding), end)
        yield f"{rule}: {whole}"
        if tool.input:
            before, after = _literal('{"input": "'), _literal('"}')
            yield f"args_{number}: {before} @input_{number} {after}"
            return
        yield f"args_{number}: {_literal('{}') if schema == NO_PARAMETERS else self._json(schema)}"

    def _around(self, name: str) -> tuple[str, str]:
        """Returns what stands before and behind the arguments of a call, up to the markers around all calls."""
        before, after, end = self._format.call_parts
        padding = "" if self._format.encloses_all else self._format.padding
        outer = "" if self._format.encloses_all else self._end()
        return self._text_of(padding + before + name + after), _join(self._marker(end + padding), outer)

    def _text_of(self, text: str) -> str:
        """Returns a fixed text with placeholders."""
        parts = enumerate(pieces(text))
        return _join(*(f"/{PLACEHOLDERS[one]}/" if number % 2 else self._marker(one) for number, one in parts))

    def _json(self, schema: dict[str, Any]) -> str:
        return "%json " + json.dumps({**schema, "x-guidance": self._options}, ensure_ascii=False, separators=(",", ":"))

    def _parameters(self, rule: str, tool: ToolSchema, schema: dict[str, Any], text: str) -> Iterator[str]:
        """Yields the rules of a call with parameters. `text` is the grammar of its input."""
        begin, end = self._around(tool.name)
        if tool.input:
            yield f"{rule}: {_join(begin, self._input(text), end)}"
            return
        if self._format.values != "text":
            literals = Literals(self._format.values, rule, schema, self._marker, self._until, self._json)
            try:
                arguments = literals.parameters(self._format.parameter_parts[1], self._format.joiner)
            except SchemaError as error:
                texts = [f"{tool.name}: parameters {violation}" for violation in error.violations]
                raise ToolSchemaError(texts) from None
            yield f"{rule}: {_join(begin, arguments, end)}"
            yield from literals.lines
            return
        properties = schema.get("properties", {})
        required = schema.get("required", [])
        after_key = self._format.parameter_parts[1]
        quote = '"' if '"' in after_key else ""
        if any(re.search(f"[<>\n{quote}]|^$", name) for name in properties):
            wrong = '<, >, "' if quote else "<, >"
            text = f"{tool.name}: a parameter's name has {wrong} or a line end, which its format cannot write"
            raise ToolSchemaError([text])
        if schema == ANY_OBJECT:
            yield f"{rule}: {_join(begin, f'{rule}_any*', end)}"
            yield from self._any_parameter(rule, quote)
            return
        parts = []
        for number, (name, one) in enumerate(properties.items()):
            part = f"{rule}_p{number}"
            parts.append(part if name in required else f"{part}?")
            yield from self._parameter(part, name, one, schema.get("$defs"))
        yield f"{rule}: {_join(begin, *parts, end)}"

    def _input(self, text: str) -> str:
        """Returns the expression of a call's one parameter, whose grammar is `text`."""
        before_key, after_key, _ = self._format.parameter_parts
        ending, written = _input_ending(self._rules)
        if not ending:
            before, after = '"', '"'
        else:
            before, after = GEMMA_QUOTE if self._format.values == "gemma" else "", ending[len(written) :]
        head = before_key + "input" + after_key.replace("{is_text}", "true") + before
        return _join(self._marker(head), text, self._marker(after))

    def _any_parameter(self, rule: str, quote: str) -> Iterator[str]:
        """Yields the rules of a parameter with any name and value."""
        before_key, after_key, after_value = self._format.parameter_parts
        name = _join(self._marker(before_key), f"{rule.upper()}_NAME")
        texts = f"{self._text_of(after_key.replace('{is_text}', 'true'))} {rule}_text"
        if "{is_text}" in after_key:
            others = self._text_of(after_key.replace("{is_text}", "false"))
            texts = f"({texts} | {_join(others, f'{rule}_json', self._marker(after_value))})"
            yield f"{rule}_json: {self._json({})}"
        yield f"{rule}_any: {name} {texts}"
        yield f"{rule.upper()}_NAME: /[^<>{quote}\\n]+/"
        yield from self._parameter_text(rule)

    def _parameter(self, rule: str, name: str, schema: Any, defs: Any) -> Iterator[str]:
        before_key, after_key, after_value = self._format.parameter_parts
        is_text, end = _takes_text(schema), self._marker(after_value)
        values = (schema.get("enum") if isinstance(schema, dict) else None) or []
        is_choice = bool(values) and all(isinstance(value, str) and "\n" not in value for value in values)
        attribute = "true" if is_text or is_choice else "false"
        head = self._marker(before_key + name + after_key.replace("{is_text}", attribute))
        if is_text:
            yield f"{rule}: {head} {rule}_text"
            yield from self._parameter_text(rule)
        elif is_choice:
            yield f"{rule}: {head} ({' | '.join(map(_literal, values))}) {end}"
        else:
            whole = schema if isinstance(schema, dict) else {}
            yield f"{rule}: {head} {rule}_json {end}"
            yield f"{rule}_json: {self._json({**whole, '$defs': defs} if defs else whole)}"

    def _parameter_text(self, rule: str) -> list[str]:
        """Returns the rules of a parameter's text up to the first end tag, which is where the parser ends it."""
        end = self._format.parameter_parts[2]
        tag = _regex(end.strip())
        once = "" if self._token_in(end) is not None else f" & ~/(?s:.*{tag}.*{tag}.*)/"
        return self._until(f"{rule}_text", end, once, without=(end.strip(),))


def _input_ending(rules: AnswerRules) -> tuple[str, str]:
    """Returns what follows the input of a call, and how much of it the grammar of the input writes: what stands before
    the first token that is written by id. Both are empty if the input stands in a string with escapes."""
    tools = rules.answer.tools
    assert tools is not None
    if tools.layout != "parameters" or tools.values == "python":
        return "", ""
    ending = GEMMA_QUOTE if tools.values == "gemma" else tools.parameter_parts[2]
    first = min((ending.index(token) for token in rules.token_ids if token in ending), default=len(ending))
    return ending, ending[:first]


def _schema(tool: ToolSchema, ignored: set[str] | None) -> dict[str, Any]:
    """Returns the canonical schema of a tool's arguments. Raises `ToolSchemaError`."""
    if not tool.parameters:
        return NO_PARAMETERS
    try:
        schema = parse_json(tool.parameters)
    except JsonTextError as error:
        raise ToolSchemaError([f"{tool.name}: parameters: {error}"]) from None
    if not isinstance(schema, dict):
        raise ToolSchemaError([f"{tool.name}: parameters: must be a JSON schema, which is an object"])
    if schema.get("type", "object") != "object":
        raise ToolSchemaError([f"{tool.name}: parameters: must be a schema of an object"])
    own = {"type": "object"} if _OTHER_PROPERTIES & set(schema) else {"type": "object", "additionalProperties": False}
    try:
        return with_any_of(canonical_schema({**schema, **own}, ignored))
    except SchemaError as error:
        raise ToolSchemaError([f"{tool.name}: parameters {violation}" for violation in error.violations]) from None


def _takes_text(schema: Any) -> bool:
    """Returns whether a parameter is written as text: if it is one, or can be any value, which the parser reads from
    the text."""
    if not isinstance(schema, dict) or schema.get("enum") is not None:
        return False
    return schema.get("type") == "string" or set(schema) <= _ANNOTATIONS


def _literal(text: str) -> str:
    """Returns a string of Lark, which has JSON's escapes."""
    return json.dumps(text, ensure_ascii=False)


def _regex(text: str) -> str:
    """Returns a regular expression that matches a text, as it stands between slashes."""
    return "".join(_ESCAPED.get(character, character) for character in text)


def _join(*parts: str) -> str:
    return " ".join(part for part in parts if part)
