"""Forty JSON schemas with a question for each: every supported keyword, and answers of a few dozen tokens. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

Schema = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Question:
    """A question and the schema of its answer."""

    text: str
    schema: Schema


def closed(*, optional: tuple[str, ...] = (), **properties: Any) -> Schema:
    """An object of these properties and no others."""
    required = [name for name in properties if name not in optional]
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


def short(length: int = 10, **more: Any) -> Schema:
    return {"type": "string", "maxLength": length, **more}


def whole(least: int, most: int) -> Schema:
    return {"type": "integer", "minimum": least, "maximum": most}


TREE = {
    "$defs": {"tree": closed(optional=("branches",), leaf=whole(0, 9), branches={"$ref": "#/$defs/branches"})}
    | {"branches": {"type": "array", "items": {"$ref": "#/$defs/tree"}, "maxItems": 1}},
    "$ref": "#/$defs/tree",
}
NESTED_LIST = {"type": "array", "items": {"anyOf": [whole(0, 99), {"$ref": "#"}]}, "maxItems": 2}
EXPRESSION = {
    "$defs": {
        "term": {"anyOf": [whole(0, 9), {"$ref": "#/$defs/sum"}]},
        "sum": closed(op={"enum": ["+", "-"]}, left=whole(0, 9), right={"$ref": "#/$defs/term"}),
    },
    "$ref": "#/$defs/sum",
}
SHAPE = {
    "oneOf": [
        closed(kind={"const": "circle"}, radius={"type": "number", "minimum": 0, "maximum": 10}),
        closed(kind={"const": "square"}, side=whole(1, 10)),
    ]
}
POINT = {"$defs": {"place": closed(x=whole(-90, 90), y=whole(-180, 180))}}
IPS = {"anyOf": [{"type": "string", "format": "ipv4"}, {"type": "string", "format": "ipv6"}]}

_OBJECTS: tuple[tuple[str, Schema], ...] = (
    ("Describe Paris.", closed(name=short(), is_capital={"type": "boolean"})),
    ("Who are you?", closed(optional=("nickname",), name=short(), nickname=short(6), age=whole(0, 120))),
    ("Rate this film.", closed(stars=whole(1, 5), comment=short(24))),
    ("Where is the bus?", {**POINT, **closed(here=closed(at={"$ref": "#/$defs/place"}), on={"type": "null"})}),
    ("Route a parcel.", {**POINT, **closed(start={"$ref": "#/$defs/place"}, end={"$ref": "#/$defs/place"})}),
    ("Set some flags.", {"type": "object", "additionalProperties": {"type": "boolean"}, "maxProperties": 2}),
    ("Count the fruit.", {"type": "object", "patternProperties": {"^[a-z]{1,5}$": whole(0, 9)}}
     | {"additionalProperties": False, "maxProperties": 3}),
    ("Give one option.", {"type": "object", "properties": {"fast": {"type": "boolean"}, "level": whole(0, 3)}}
     | {"additionalProperties": False, "minProperties": 1}),
    ("Say whether it is open.", {"type": "object", "properties": {"open": {"type": "boolean"}}}
     | {"required": ["open"], "additionalProperties": whole(0, 9), "maxProperties": 3}),
    ("Order a pizza.", closed(size={"enum": ["S", "M", "L"]}, toppings={"type": "array", "items": short(8)}
     | {"maxItems": 2})),
    ("Book a seat.", closed(optional=("window",), row=whole(1, 40), seat={"enum": [*"ABC"]}, window={"const": True})),
    ("Say it with both.", {"allOf": [closed(a=whole(0, 50)), {"properties": {"a": {"minimum": 25}}}]}),
)  # fmt: skip
_ARRAYS: tuple[tuple[str, Schema], ...] = (
    ("List some numbers.", {"type": "array", "items": whole(-100, 100), "minItems": 2, "maxItems": 5}),
    ("Name colours.", {"type": "array", "items": {"enum": ["red", "green", "blue"]}, "minItems": 1, "maxItems": 4}),
    ("Give a pair.", {"type": "array", "prefixItems": [short(6), {"type": "boolean"}], "items": False, "minItems": 2}),
    ("Give a row.", {"type": "array", "prefixItems": [whole(0, 9)], "items": {"type": "null"}, "maxItems": 4}),
    ("List people.", {"type": "array", "items": closed(name=short(6), age=whole(0, 99)), "minItems": 1, "maxItems": 2}),
    ("Make a matrix.", {"type": "array", "items": {"type": "array", "items": whole(0, 9), "minItems": 2, "maxItems": 2}}
     | {"minItems": 2, "maxItems": 2}),
    ("Give addresses.", {"type": "array", "items": IPS, "minItems": 1, "maxItems": 2}),
    ("Draw an old list.", {"$schema": "http://json-schema.org/draft-07/schema#", "type": "array"}
     | {"items": [{"type": "boolean"}, whole(0, 5)], "additionalItems": False}),
)  # fmt: skip
_SCALARS: tuple[tuple[str, Schema], ...] = (
    ("Write a short word.", {"type": "string", "minLength": 2, "maxLength": 12}),
    ("Write a code.", {"type": "string", "pattern": "^[A-Z]{2,4}-[0-9]{1,3}$"}),
    ("Which server?", closed(host={"type": "string", "format": "hostname", "maxLength": 20}, port=whole(1, 65535))),
    ("When?", {"type": "string", "format": "date"}),
    ("When exactly?", closed(at={"type": "string", "format": "date-time", "maxLength": 40})),
    ("What time is it?", {"type": "string", "format": "time", "maxLength": 24}),
    ("How long?", {"type": "string", "format": "duration", "maxLength": 24}),
    ("Which id?", {"type": "string", "format": "uuid"}),
    ("Write to me.", closed(email={"type": "string", "format": "email", "maxLength": 24})),
    ("Link to it.", {"type": "string", "format": "uri", "maxLength": 30}),
    ("How likely?", {"type": "number", "minimum": 0, "maximum": 1}),
    ("How cold?", {"type": "number", "exclusiveMinimum": -40, "exclusiveMaximum": 0}),
    ("How many dozens?", {"type": "integer", "minimum": 0, "maximum": 600, "multipleOf": 12}),
    ("A number, if any?", {"type": ["integer", "null"], "minimum": -5, "maximum": 1000}),
    ("Choose.", {"enum": ["true", True, 1, "one", [1, 2], {"a": None}]}),
)
_ALTERNATIVES: tuple[tuple[str, Schema], ...] = (
    ("Number or word?", {"anyOf": [whole(0, 3), short(4)]}),
    ("Draw a shape.", SHAPE),
    ("Grow a tree.", TREE),
    ("Nest lists.", NESTED_LIST),
    ("Write a sum.", EXPRESSION),
)

QUESTIONS = tuple(Question(text, schema) for text, schema in (*_OBJECTS, *_ARRAYS, *_SCALARS, *_ALTERNATIVES))
