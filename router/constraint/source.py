"""Constraints of clients, and their canonical grammars.

`canonical` is a function of the constraint alone: equal constraints give equal text, on every router. It takes time in
proportion to the constraint's size, and runs in a compiling process (`router.constraint.worker`).
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass

from common.grammar import canonical_grammar
from common.protocol import MAX_GRAMMAR_BYTES
from router.constraint.exclusive import with_any_of
from router.constraint.json_schema import SchemaError, canonical_schema
from router.constraint.json_text import JsonTextError, parse_json

DEFAULT_MAX_WHITESPACE = 8
MAX_WHITESPACE = 64
MAX_CONSTRAINT_BYTES = 64 * 1024
MAX_REGEX_BYTES = 4096
MAX_CHOICES = 1000

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
    """A client's constraint. `kind` is its field of the protocol; `texts` has one text, the alternatives of a choice,
    or none for `json_object`."""

    kind: str
    texts: tuple[str, ...]
    max_whitespace: int = DEFAULT_MAX_WHITESPACE

    def to_json(self) -> str:
        """Returns the text that a compiling process gets, which is also the key of its result."""
        return json.dumps([self.kind, self.texts, self.max_whitespace], separators=(",", ":"))


def source_of(text: str) -> ConstraintSource:
    """Returns the source that `to_json` wrote."""
    kind, texts, max_whitespace = json.loads(text)
    return ConstraintSource(kind, tuple(texts), max_whitespace)


def canonical(source: ConstraintSource) -> str:
    """Returns the canonical grammar of a constraint. Raises `ConstraintError`."""
    try:
        grammar = _grammar(source)
        num_bytes = len(grammar.encode())
    except JsonTextError as error:
        raise ConstraintError([str(error)]) from None
    except SchemaError as error:
        raise ConstraintError(error.violations) from None
    except UnicodeEncodeError:
        raise ConstraintError(["has an unpaired surrogate, which no UTF-8 text has"]) from None
    if num_bytes > MAX_GRAMMAR_BYTES:
        raise ConstraintError([f"gives a grammar of {num_bytes} bytes; at most {MAX_GRAMMAR_BYTES} are allowed"])
    return grammar


def _grammar(source: ConstraintSource) -> str:
    match source.kind:
        case "json_object":
            return _json_grammar({"type": "object"}, source.max_whitespace)
        case "json_schema":
            return _json_grammar(with_any_of(canonical_schema(parse_json(source.texts[0]))), source.max_whitespace)
        case "choice":
            return canonical_grammar("lark_grammar", _choice(source.texts))
        case "regex":
            return canonical_grammar("lark_grammar", f"start: /{_lark_regex(source.texts[0])}/")
        case _:
            return canonical_grammar("lark_grammar", _lark(source.texts[0]))


def _json_grammar(schema: dict[str, object], max_whitespace: int) -> str:
    """Returns the grammar of a schema. llguidance bounds each run of whitespace by the pattern."""
    if max_whitespace:
        options: dict[str, object] = {"whitespace_pattern": rf"[ \n\r\t]{{1,{max_whitespace}}}"}
    else:
        options = {"whitespace_flexible": False}
    return canonical_grammar("json_schema", {**schema, "x-guidance": options})


def _choice(texts: tuple[str, ...]) -> str:
    """Returns a rule of literals. Lark's strings have JSON's escapes."""
    literals = (json.dumps(text, ensure_ascii=False) for text in dict.fromkeys(texts))
    return f"start: {' | '.join(literals)}"


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
