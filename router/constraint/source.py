"""Constraints of clients, and their canonical grammars.

`canonical` is a function of the constraint alone: equal constraints give equal text, on every router. It takes time in
proportion to the constraint's size, and runs in a compiling process (`inflight.router.constraint.worker`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace

from inflight.common.grammar import canonical_grammars
from inflight.common.protocol import MAX_GRAMMAR_BYTES
from inflight.router.constraint.answer_grammar import (
    AnswerRules,
    ToolSchemaError,
    answer_lark,
    answer_rules,
    input_grammars,
    tool_patterns,
)
from inflight.router.constraint.exclusive import with_any_of
from inflight.router.constraint.json_schema import (
    SchemaError,
    SchemaPattern,
    canonical_schema,
    patterns_of,
)
from inflight.router.constraint.json_text import JsonTextError, parse_json

DEFAULT_MAX_WHITESPACE = 8
MAX_WHITESPACE = 64
MAX_CONSTRAINT_BYTES = 64 * 1024
MAX_REGEX_BYTES = 4096
MAX_CHOICE_TEXTS = 1000
# The kind of a constraint that the router makes of a request's tools.
TOOLS = "tools"

# Texts, regular expressions, comments and the rest of a grammar.
_LARK_PART = re.compile(r'"(?:[^"\\\n]|\\.)*+"|/(?:[^/\\\n]|\\.)++/|(?://|#)[^\n]*|.', re.DOTALL)
# A bracket directly after the opening one is a plain character.
_REGEX_PART = re.compile(r"\\.|\[\^?\]?|.", re.DOTALL)
_LARK_REFUSED = (
    (re.compile(r"%\s*json\b"), "%json, which is not supported; use json_schema"),
    (re.compile(r"%\s*lark\b"), "%lark, which is not supported"),
    (re.compile(r"%\s*llguidance\b"), "%llguidance, which is not supported"),
    (re.compile(r"\btemperature\s*="), "the attribute temperature, which is not supported"),
    (re.compile(r"\bmax_tokens\s*="), "the attribute max_tokens, which is not supported"),
    (re.compile(r"<\s*[\[|/A-Za-z]"), "a special token, which is not supported; write its text as a string"),
    (re.compile(r"@"), "a reference to another grammar, which is not supported"),
)


class ConstraintError(Exception):
    """A constraint that is not supported. Each text completes a sentence that begins with the constraint's field."""

    def __init__(self, violations: list[str]) -> None:
        super().__init__("; ".join(violations))
        self.violations = violations


@dataclass(frozen=True, slots=True)
class ConstraintSource:
    """A client's constraint. `kind` is its field of the protocol, or `tools`; `texts` has one text, the alternatives of
    a choice, or none for `json_object`. `reasoning` is the text of the rules of an answer that begins with reasoning,
    which the constraint follows."""

    kind: str
    texts: tuple[str, ...]
    max_whitespace: int = DEFAULT_MAX_WHITESPACE
    reasoning: str = ""

    def to_json(self) -> str:
        """Returns the text that a compiling process gets, which is also the key of its result."""
        return json.dumps([self.kind, self.texts, self.max_whitespace, self.reasoning], separators=(",", ":"))

    @property
    def tools(self) -> AnswerRules | None:
        """The rules of an answer that may call tools."""
        return answer_rules(self.texts[0]) if self.kind == TOOLS else None

    def of_tools(self, rules: AnswerRules) -> ConstraintSource:
        """Returns the same with other rules."""
        return replace(self, texts=(rules.to_json(),))


def source_of(text: str) -> ConstraintSource:
    """Returns the source that `to_json` wrote."""
    kind, texts, max_whitespace, reasoning = json.loads(text)
    return ConstraintSource(kind, tuple(texts), max_whitespace, reasoning)


def canonical(source: ConstraintSource, ignored: set[str] | None = None) -> str:
    """Returns the canonical grammar of a constraint. Adds words of its schemas that JSON Schema does not know to
    `ignored`. Raises `ConstraintError`."""
    try:
        own = dict([_grammar(source, ignored)])
        if source.reasoning:
            # A grammar that the constraint's grammar is a part of.
            whole = answer_lark(answer_rules(source.reasoning), {}, "@constrained")
            grammar = canonical_grammars({"lark_grammar": whole}, {"name": "constrained", **own})
        else:
            grammar = canonical_grammars(own, *_inputs(source))
        num_bytes = len(grammar.encode())
    except JsonTextError as error:
        raise ConstraintError([str(error)]) from None
    except (SchemaError, ToolSchemaError) as error:
        raise ConstraintError(error.violations) from None
    except UnicodeEncodeError:
        raise ConstraintError(["has an unpaired surrogate, which no UTF-8 text has"]) from None
    if num_bytes > MAX_GRAMMAR_BYTES:
        raise ConstraintError([f"gives a grammar of {num_bytes} bytes; at most {MAX_GRAMMAR_BYTES} are allowed"])
    return grammar


def patterns(source: ConstraintSource) -> Iterator[tuple[str, SchemaPattern]]:
    """Yields the patterns of a supported constraint, each after the beginning of a violation about it."""
    if source.kind == "json_schema":
        for pattern in patterns_of(parse_json(source.texts[0])):
            yield "", pattern
    elif source.kind == TOOLS:
        yield from tool_patterns(answer_rules(source.texts[0]))


def _grammar(source: ConstraintSource, ignored: set[str] | None) -> tuple[str, object]:
    """Returns the kind of a grammar and its content."""
    match source.kind:
        case "json_object":
            return "json_schema", _json_grammar({"type": "object"}, source.max_whitespace)
        case "json_schema":
            schema = with_any_of(canonical_schema(parse_json(source.texts[0]), ignored))
            return "json_schema", _json_grammar(schema, source.max_whitespace)
        case "choice":
            return "lark_grammar", _choice(source.texts)
        case "regex":
            return "lark_grammar", regex_grammar(source.texts[0])
        case "tools":
            rules, options = answer_rules(source.texts[0]), _json_options(source.max_whitespace)
            return "lark_grammar", answer_lark(rules, options, ignored=ignored)
        case _:
            return "lark_grammar", _lark(source.texts[0])


def _inputs(source: ConstraintSource) -> list[dict[str, str]]:
    """Returns the grammars of texts in calls, which the grammar of the answer refers to by name."""
    if source.tools is None:
        return []
    return [{"name": name, "lark_grammar": grammar} for name, grammar in input_grammars(source.tools).items()]


def _json_grammar(schema: dict[str, object], max_whitespace: int) -> dict[str, object]:
    return {**schema, "x-guidance": _json_options(max_whitespace)}


def _json_options(max_whitespace: int) -> dict[str, object]:
    """Returns llguidance's options for JSON. It bounds each run of whitespace by the pattern."""
    if max_whitespace:
        return {"whitespace_pattern": rf"[ \n\r\t]{{1,{max_whitespace}}}"}
    return {"whitespace_flexible": False}


def _choice(texts: tuple[str, ...]) -> str:
    """Returns a rule of literals. Lark's strings have JSON's escapes."""
    literals = (json.dumps(text, ensure_ascii=False) for text in dict.fromkeys(texts))
    return f"start: {' | '.join(literals)}"


def regex_grammar(regex: str) -> str:
    """Returns the grammar of the texts that a regular expression matches."""
    return f"start: /{_lark_regex(regex)}/"


def _lark_regex(regex: str) -> str:
    """Returns a regular expression as it stands between slashes. `\\d` means 0 to 9, as in most dialects, except within
    a negated class, which then excludes all digits."""
    escaped = {"/": r"\/", "\n": r"\n", "\\\n": r"\n"}
    parts: list[str] = []
    # Of the classes that are open: whether they are negated.
    classes: list[bool] = []
    for found in _REGEX_PART.finditer(regex):
        part = found[0]
        if part.startswith("["):
            classes.append(part.startswith("[^"))
        elif part == "]" and classes:
            classes.pop()
        elif part == r"\d" and not any(classes):
            part = "[0-9]"
        parts.append(escaped.get(part, part))
    return "".join(parts)


def _lark(text: str) -> str:
    """Returns a grammar of a client. Refuses what would not be enforced, or differs between models."""
    parts = (found[0] for found in _LARK_PART.finditer(text))
    code = "".join(part if len(part) == 1 else " " for part in parts)
    violations = [f"has {what}" for pattern, what in _LARK_REFUSED if pattern.search(code)]
    if violations:
        raise ConstraintError(violations)
    return text
