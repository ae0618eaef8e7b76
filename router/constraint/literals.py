"""Grammars of arguments in another notation than JSON, for the formats of calls that have one. Pure.

Lists, objects, names and alternatives follow a canonical schema, as do numbers. In the notation `gemma` only the type
and `enum` of a text do, because its texts have no escapes; their end is that of the parser.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from inflight.router.constraint.json_schema import Schema, SchemaError, pointed_at
from inflight.router.tools.formats import GEMMA_QUOTE, Values

# Keywords that say the same of every value beside them, or nothing.
_WITHOUT_EFFECT = frozenset({"$defs", "definitions"})
_OF_TYPE = {
    "object": frozenset({"properties", "required", "additionalProperties"}),
    "array": frozenset({"items", "prefixItems", "minItems", "maxItems"}),
    "string": frozenset({"minLength", "maxLength", "pattern", "format"}),
    "number": frozenset({"minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf"}),
}
_OF_TYPE |= {"integer": _OF_TYPE["number"], "boolean": frozenset(), "null": frozenset()}
_NAME = r"[A-Za-z_][A-Za-z0-9_]*"
# Of a key of Gemma's notation that needs no quotes.
_PLAIN_KEY = re.compile(r"[^\s:,{}\[\]<>\"|]+")


class Literals:
    """The rules of one tool's arguments. `marker` returns the expression of a fixed text, `until` the rules of a text
    up to and including a marker, `json_rule` the expression of a JSON value."""

    def __init__(
        self,
        notation: Values,
        rule: str,
        root: dict[str, Any],
        marker: Callable[[str], str],
        until: Callable[[str, str], list[str]],
        json_rule: Callable[[dict[str, Any]], str],
    ) -> None:
        self._is_gemma = notation == "gemma"
        self._rule = rule
        self._root = root
        self._marker = marker
        self._until = until
        self._json_rule = json_rule
        self._joiner, self._colon = (",", ":") if self._is_gemma else (", ", ": ")
        self.lines: list[str] = []
        # Rules that several values share, by what they are of.
        self._shared: dict[str, str] = {}

    def parameters(self, after_key: str, joiner: str) -> str:
        """Returns the expression of all parameters of the tool, and adds its rules. Raises `SchemaError`."""
        other = set(self._root) - _OF_TYPE["object"] - _WITHOUT_EFFECT - {"type"}
        if other:
            raise SchemaError([f"has {', '.join(sorted(other))}, which the format of the model's calls has not"])

        def key(name: str) -> str:
            if not self._is_gemma and not re.fullmatch(_NAME, name):
                raise SchemaError([f"has the parameter {json.dumps(name)}, which the model's calls cannot name"])
            return self._key(name, after_key) if self._is_gemma else self._marker(name + after_key)

        any_key = f"/{_NAME}/ {self._marker(after_key)}"
        return self._members(self._root, key, any_key, joiner)

    def _new(self, expression: str) -> str:
        """Adds a rule and returns its name."""
        name = f"{self._rule}_v{len(self.lines)}"
        self.lines.append(f"{name}: {expression}")
        return name

    def _once(self, key: str, expression: Callable[[], str]) -> str:
        """Returns the name of a rule that is added once, and may refer to itself."""
        if key not in self._shared:
            place = len(self.lines)
            self.lines.append("")
            self._shared[key] = f"{self._rule}_v{place}"
            self.lines[place] = f"{self._shared[key]}: {expression()}"
        return self._shared[key]

    def _value(self, schema: Schema) -> str:
        """Returns the expression of a value."""
        if isinstance(schema, bool) or not set(schema) - _WITHOUT_EFFECT:
            if schema is False:
                raise SchemaError(["has a schema without values"])
            return self._any()
        keywords = set(schema) - _WITHOUT_EFFECT
        if "enum" in schema or "const" in schema:
            values = schema["enum"] if "enum" in schema else [schema["const"]]
            if not values:
                raise SchemaError(["has a schema without values"])
            return f"({' | '.join(map(self._fixed, values))})"
        for keyword in ("anyOf", "allOf", "$ref"):
            if keywords == {keyword}:
                return self._combined(keyword, schema[keyword])
        types = schema.get("type") or [one for one in ("object", "array") if keywords & _OF_TYPE[one]]
        types = [types] if isinstance(types, str) else types
        others = keywords - {"type"}.union(*(_OF_TYPE[one] for one in types))
        if others or not types:
            named = ", ".join(sorted(others or keywords))
            raise SchemaError([f"has {named}, which cannot be enforced in the model's format of calls"])
        return f"({' | '.join(self._typed(one, schema) for one in types)})"

    def _combined(self, keyword: str, value: Any) -> str:
        if keyword == "$ref":
            return self._once(value, lambda: self._value(pointed_at(value, self._root)))
        if keyword == "allOf" and len(value) != 1:
            raise SchemaError(["has allOf, which cannot be enforced in the model's format of calls"])
        return f"({' | '.join(map(self._value, value))})"

    def _typed(self, kind: str, schema: dict[str, Any]) -> str:
        match kind:
            case "object":
                any_key = f"{self._text()} {self._marker(self._colon)}"
                if self._is_gemma:
                    any_key = f"/{_NAME}/ {self._marker(self._colon)}"
                inside = self._members(schema, lambda name: self._key(name, self._colon), any_key, self._joiner)
                return self._new(f'"{{" {inside} "}}"')
            case "array":
                return self._array(schema)
            case "string" if self._is_gemma:
                return self._text()
            case "string" | "integer" | "number":
                own = {name: value for name, value in schema.items() if name in _OF_TYPE[kind]}
                return self._new(self._json_rule({"type": kind, **own}))
            case "boolean":
                return f"({self._name(True)} | {self._name(False)})"
            case _:
                return self._name(None)

    def _array(self, schema: dict[str, Any]) -> str:
        first: Sequence[Schema] = schema.get("prefixItems", ())
        least, most = schema.get("minItems", 0), schema.get("maxItems")
        if first:
            if schema.get("items") is not False or least < len(first):
                raise SchemaError(["has prefixItems, which cannot be enforced in the model's format of calls"])
            return f'"[" {f" {self._marker(self._joiner)} ".join(map(self._value, first))} "]"'
        if most == 0:
            return '"[]"'
        item = self._value(schema.get("items", True))
        bounds = f"{{{max(least - 1, 0)},{'' if most is None else most - 1}}}"
        items = f"{item} ({self._marker(self._joiner)} {item}){bounds}"
        return self._new(f'"[" {items if least else f"({items})?"} "]"')

    def _members(self, schema: Mapping[str, Any], key: Callable[[str], str], any_key: str, joiner_text: str) -> str:
        """Returns the expression of an object's members: the listed ones in their order, then others if any."""
        properties, required = schema.get("properties", {}), schema.get("required", ())
        # An object without any keyword takes all members, as in JSON.
        others: Schema = schema.get("additionalProperties", True)
        joiner = self._marker(joiner_text)
        names = sorted(properties, key=str.lower) if self._is_gemma else list(properties)
        names += [name for name in required if name not in properties]
        if others is False:
            after, alone = '""', '""'
        else:
            member = self._new(f"{any_key} {self._value(others)}")
            after, alone = f"({joiner} {member})*", f"({member} ({joiner} {member})*)?"
        # `after` is what may follow a member, `alone` what may stand without one before it.
        for name in reversed(names):
            member = self._new(f"{key(name)} {self._value(properties.get(name, others))}")
            if name in required:
                after, alone = self._new(f"{joiner} {member} {after}"), self._new(f"{member} {after}")
            else:
                after, alone = self._new(f"({joiner} {member})? {after}"), self._new(f"{member} {after} | {alone}")
        return alone

    def _key(self, name: str, colon: str) -> str:
        if not self._is_gemma:
            return self._marker(json.dumps(name, ensure_ascii=False) + colon)
        written = name if _PLAIN_KEY.fullmatch(name) else f"{GEMMA_QUOTE}{name}{GEMMA_QUOTE}"
        return self._marker(written + colon)

    def _text(self) -> str:
        if not self._is_gemma:
            return self._once("text", lambda: self._json_rule({"type": "string"}))
        if "text" not in self._shared:
            self._shared["text"] = f"{self._rule}_text"
            self.lines += self._until(self._shared["text"], GEMMA_QUOTE)
        return f"{self._marker(GEMMA_QUOTE)} {self._shared['text']}"

    def _any(self) -> str:
        def expression() -> str:
            kinds = ("object", "array", "string", "number", "boolean", "null")
            return " | ".join(self._typed(kind, {}) for kind in kinds)

        return self._once("any", expression)

    def _fixed(self, value: Any) -> str:
        return self._marker(self._written(value))

    def _name(self, value: bool | None) -> str:
        # LFM2.5 writes objects as JSON within its notation, which is otherwise Python's.
        return self._fixed(value) if self._is_gemma else f'("{value!r}" | "{json.dumps(value)}")'

    def _written(self, value: Any) -> str:
        match value:
            case str():
                if not self._is_gemma:
                    return json.dumps(value, ensure_ascii=False)
                if GEMMA_QUOTE in value:
                    raise SchemaError([f"has a value with {GEMMA_QUOTE}, which the model's calls cannot write"])
                return f"{GEMMA_QUOTE}{value}{GEMMA_QUOTE}"
            case dict():
                members = sorted(value, key=str.lower) if self._is_gemma else value
                texts = (
                    (name if self._is_gemma else json.dumps(name, ensure_ascii=False))
                    + self._colon
                    + self._written(value[name])
                    for name in members
                )
                return f"{{{self._joiner.join(texts)}}}"
            case list():
                return f"[{self._joiner.join(map(self._written, value))}]"
            case True | False | None:
                return json.dumps(value) if self._is_gemma else repr(value)
            case _:
                return json.dumps(value)
