"""Proof that the alternatives of a `oneOf` exclude each other, so that it says the same as `anyOf`.

The compiler has no `oneOf` except where it can prove this itself, and it does not look through references. Pydantic's
unions with a discriminator are of this kind. What is not proved here is left to the compiler, which refuses it.
"""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass, field
from typing import Any

from inflight.router.constraint.json_schema import SCHEMA_LISTS, SCHEMA_MAPS, Schema, pointed_at

ALL_TYPES = frozenset({"null", "boolean", "integer", "number", "string", "array", "object"})
# References and `allOf` that are followed for one alternative.
MAX_PARTS = 32
# The proof compares every two alternatives.
MAX_ALTERNATIVES = 64


@dataclass(slots=True)
class Facts:
    """What every value of a schema satisfies. `values` and `property_values` are texts of JSON; None: any."""

    types: frozenset[str] = ALL_TYPES
    values: frozenset[str] | None = None
    required: frozenset[str] = frozenset()
    property_values: dict[str, frozenset[str]] = field(default_factory=dict)

    def excludes(self, other: Facts) -> bool:
        """Returns whether no value satisfies both."""
        if not self.types & other.types:
            return True
        if self.values is not None and other.values is not None and not self.values & other.values:
            return True
        if self.types & other.types != {"object"}:
            return False
        required = self.required | other.required
        return any(
            name in required and not values & other.property_values[name]
            for name, values in self.property_values.items()
            if name in other.property_values
        )


def with_any_of(schema: dict[str, Any]) -> dict[str, Any]:
    """Returns a canonical schema in which every `oneOf` of exclusive alternatives is an `anyOf`."""
    rewritten = _rewritten(schema, schema)
    assert isinstance(rewritten, dict)
    return rewritten


def _rewritten(schema: Schema, root: dict[str, Any]) -> Schema:
    if isinstance(schema, bool):
        return schema
    rewritten: dict[str, Any] = {}
    for keyword, value in schema.items():
        if keyword in SCHEMA_LISTS:
            rewritten[keyword] = [_rewritten(part, root) for part in value]
        elif keyword in SCHEMA_MAPS:
            rewritten[keyword] = {name: _rewritten(part, root) for name, part in value.items()}
        elif keyword in {"items", "additionalProperties"}:
            rewritten[keyword] = _rewritten(value, root)
        else:
            rewritten[keyword] = value
    if "oneOf" in rewritten and "anyOf" not in rewritten and _are_exclusive(schema["oneOf"], root):
        return {"anyOf" if keyword == "oneOf" else keyword: value for keyword, value in rewritten.items()}
    return rewritten


def _are_exclusive(alternatives: list[Schema], root: dict[str, Any]) -> bool:
    if len(alternatives) > MAX_ALTERNATIVES:
        return False
    facts = [_facts(alternative, root) for alternative in alternatives]
    return all(one.excludes(other) for one, other in itertools.combinations(facts, 2))


def _facts(schema: Schema, root: dict[str, Any]) -> Facts:
    facts = Facts()
    for part in _parts(schema, root):
        facts.types &= _types(part)
        facts.values = _both(facts.values, _values(part))
        facts.required |= frozenset(part.get("required", ()))
        for name, value in part.get("properties", {}).items():
            for inner in _parts(value, root):
                values = _both(facts.property_values.get(name), _values(inner))
                if values is not None:
                    facts.property_values[name] = values
    return facts


def _both(one: frozenset[str] | None, other: frozenset[str] | None) -> frozenset[str] | None:
    if one is None or other is None:
        return other if one is None else one
    return one & other


def _parts(schema: Schema, root: dict[str, Any]) -> list[dict[str, Any]]:
    """Returns schemas that every value of `schema` satisfies: itself, what it refers to, and its `allOf`."""
    parts: list[dict[str, Any]] = []
    pending = [schema]
    while pending and len(parts) < MAX_PARTS:
        part = pending.pop()
        if isinstance(part, bool):
            continue
        parts.append(part)
        pending.extend(part.get("allOf", ()))
        if "$ref" in part:
            pending.append(pointed_at(part["$ref"], root))
    return parts


def _types(schema: dict[str, Any]) -> frozenset[str]:
    named = schema.get("type", ALL_TYPES)
    names = frozenset([named] if isinstance(named, str) else named)
    return names | {"integer"} if "number" in names else names


def _values(schema: dict[str, Any]) -> frozenset[str] | None:
    if "const" in schema:
        return frozenset({_text(schema["const"])})
    return frozenset(_text(value) for value in schema["enum"]) if "enum" in schema else None


def _text(value: Any) -> str:
    return json.dumps(value, sort_keys=True)
