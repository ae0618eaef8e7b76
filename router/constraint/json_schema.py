"""Canonical JSON schemas: only what llguidance enforces, in draft 2020-12.

The compiler refuses some keywords and silently ignores others. Here a keyword of JSON Schema is supported, an
annotation, which is dropped, or refused by name. Keywords and formats that JSON Schema does not know are annotations,
as its specification says, and are reported. Every value of a canonical schema satisfies the client's schema. It has no
annotations, so equal constraints have equal texts. References lead only to schemas that were checked.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

from inflight.router.constraint.ecma_pattern import PatternError, rust_pattern
from inflight.router.constraint.json_text import shortened

Schema = dict[str, Any] | bool

# By the address without its scheme: both are in use.
DIALECTS = {
    "json-schema.org/draft/2020-12/schema": 2020,
    "json-schema.org/draft/2019-09/schema": 2019,
    "json-schema.org/draft-07/schema": 7,
    "json-schema.org/draft-06/schema": 6,
    "json-schema.org/draft-04/schema": 4,
}
NEWEST = 2020
# In these, `items` may be a list.
LAST_WITH_ITEM_LISTS = 2019
# In these, keywords beside `$ref` have no effect.
LAST_WITH_LONE_REFERENCES = 7
# In these, `exclusiveMinimum` and `exclusiveMaximum` are booleans that change `minimum` and `maximum`.
LAST_WITH_EXCLUSIVE_FLAGS = 4

TYPES = frozenset({"null", "boolean", "integer", "number", "string", "array", "object"})
FORMATS = frozenset({"date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "uri", "uuid"})
# The compiler's own forms of these accept the 30th of February, leap seconds at any time of day, and names of any
# length. Leap seconds are left out here, and hyphens in a row within a name: validators differ about both.
_DAY = (
    r"(?:[1-9]\d{3}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12]\d|3[01])|(?:0[469]|11)-(?:0[1-9]|[12]\d|30)|"
    r"02-(?:0[1-9]|1\d|2[0-8]))|(?:[1-9]\d(?:0[48]|[2468][048]|[13579][26])|(?:[2468][048]|[13579][26])00)-02-29)"
)
_TIME = r"(?:[01]\d|2[0-3]):[0-5]\d:[0-5]\d(?:\.\d{1,9})?(?:[Zz]|[+-](?:[01]\d|2[0-3]):[0-5]\d)"
_LABEL = r"[A-Za-z0-9]+(?:-[A-Za-z0-9]+)*"
_HOST = rf"{_LABEL}(?:\.{_LABEL})*"
UUID = "^[0-9A-Fa-f]{8}(?:-[0-9A-Fa-f]{4}){3}-[0-9A-Fa-f]{12}$"
_LABEL_LENGTHS = r"[^.@]{1,63}(?:\.[^.@]{1,63})*"
_ATOM = r"[A-Za-z0-9!#$%&'*+/=?^_`{|}~\-]+"
# A text has the format if it matches all patterns.
PATTERNS_OF_FORMAT = {
    "date": (f"^{_DAY}$",),
    "time": (f"^{_TIME}$",),
    "date-time": (f"^{_DAY}[Tt]{_TIME}$",),
    "hostname": (f"^{_HOST}$", f"^{_LABEL_LENGTHS}$", "^[^@]{1,253}$"),
    "email": (
        rf"^{_ATOM}(?:\.{_ATOM})*@{_HOST}$",
        rf"^[^@]{{1,64}}@{_LABEL_LENGTHS}$",
        r"^[^@]{1,64}@[^@]{1,189}$",
    ),
}
# Patterns of zod 4 with look-around, which the compiler has not. The formats beside them say more.
PATTERNS_WITHIN_FORMAT = {
    "hostname": r"^(?=.{1,253}\.?$)[a-zA-Z0-9](?:[a-zA-Z0-9-]{0,61}[a-zA-Z0-9])?"
    r"(?:\.[a-zA-Z0-9](?:[-0-9a-zA-Z]{0,61}[0-9a-zA-Z])?)*\.?$",
    "duration": r"^P(?:(\d+W)|(?!.*W)(?=\d|T\d)(\d+Y)?(\d+M)?(\d+D)?(T(?=\d)(\d+H)?(\d+M)?(\d+([.,]\d+)?S)?)?)$",
}
ANNOTATIONS = frozenset(
    {
        *("$anchor", "$comment", "$dynamicAnchor", "$recursiveAnchor", "$schema", "$vocabulary"),
        *("contentEncoding", "contentMediaType", "contentSchema"),
        "default",
        "deprecated",
        "description",
        "discriminator",
        "example",
        "examples",
        "externalDocs",
        "readOnly",
        "title",
        "writeOnly",
    }
)
# Keywords of JSON Schema, and the compiler's own, that would change which values are valid.
REFUSED = frozenset(
    {
        *("not", "if", "then", "else", "dependencies", "dependentRequired", "dependentSchemas"),
        *("contains", "minContains", "maxContains", "unevaluatedItems", "unevaluatedProperties"),
        *("$dynamicRef", "$recursiveRef"),
        *("divisibleBy", "disallow", "extends"),  # of draft 3
        "x-guidance",
    }
)
# Keywords that are read together with those beside them, in methods of their own.
TRANSLATED = frozenset({"nullable", "propertyNames", "uniqueItems"})
# Names of extensions.
EXTENSION_PREFIX = "x-"
# Formats of OpenAPI that are ranges.
RANGES_OF_FORMAT = {"int32": (-(2**31), 2**31 - 1)}
# Arrays that `uniqueItems` allows are listed, up to this number.
MAX_UNIQUE_ARRAYS = 400
MAX_COUNT = 1_000_000
# Larger integers have no exact value in the compiler, which computes with doubles.
MAX_NUMBER = 2**53
MAX_PATTERN_CHARACTERS = 4096
MAX_VIOLATIONS = 16

# A bound beyond that is replaced by the nearest number within: fewer values are valid then. 1 is an upper bound.
BOUNDS = {"minimum": -1, "exclusiveMinimum": -1, "maximum": 1, "exclusiveMaximum": 1}

ONE_SCHEMA = frozenset({"additionalProperties", "items"})
SCHEMA_LISTS = frozenset({"allOf", "anyOf", "oneOf", "prefixItems"})
SCHEMA_MAPS = frozenset({"$defs", "definitions", "patternProperties", "properties"})


def is_type(value: Any) -> bool:
    names = value if isinstance(value, list) else [value]
    return bool(names) and all(isinstance(name, str) and name in TYPES for name in names)


def is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_COUNT


def is_pattern(value: Any) -> bool:
    return isinstance(value, str) and len(value) <= MAX_PATTERN_CHARACTERS


_A_COUNT = (is_count, f"an integer from 0 to {MAX_COUNT}")
_A_NUMBER = (is_number, "a number")
VALUES: dict[str, tuple[Callable[[Any], bool], str]] = {
    "type": (is_type, f"one of {', '.join(sorted(TYPES))}, or a list of them"),
    "enum": (lambda value: isinstance(value, list) and bool(value), "a list of at least one value"),
    "const": (lambda _: True, "any value"),
    "required": (
        lambda value: isinstance(value, list) and all(isinstance(name, str) for name in value),
        "a list of names",
    ),
    "pattern": (is_pattern, f"a regular expression of at most {MAX_PATTERN_CHARACTERS} characters"),
    "format": (lambda value: isinstance(value, str), "a text"),
    "minimum": _A_NUMBER,
    "maximum": _A_NUMBER,
    "exclusiveMinimum": _A_NUMBER,
    "exclusiveMaximum": _A_NUMBER,
    "multipleOf": (lambda value: is_number(value) and value > 0, "a number above 0"),
    "minLength": _A_COUNT,
    "maxLength": _A_COUNT,
    "minItems": _A_COUNT,
    "maxItems": _A_COUNT,
    "minProperties": _A_COUNT,
    "maxProperties": _A_COUNT,
}


class SchemaError(Exception):
    """A schema that is not supported. Each text completes a sentence that begins with its field."""

    def __init__(self, violations: list[str]) -> None:
        super().__init__("; ".join(violations))
        self.violations = violations


def canonical_schema(schema: Any, ignored: set[str] | None = None) -> dict[str, Any]:
    """Returns the canonical form of a schema. Adds its keywords and formats that JSON Schema does not know to
    `ignored`. Raises `SchemaError`."""
    walk = _Walk(schema)
    canonical = walk.schema(schema, "")
    walk.check_references()
    if walk.violations:
        raise SchemaError(walk.violations)
    if ignored is not None:
        ignored |= walk.ignored
    return {} if canonical is True else canonical if isinstance(canonical, dict) else {"enum": []}


@dataclass(frozen=True, slots=True)
class SchemaPattern:
    """A pattern of a schema: the JSON pointer of its schema, its text, and the same in the compiler's dialect."""

    place: str
    text: str
    translated: str

    def refused(self, reason: str) -> str:
        """Returns a violation. `reason` completes the sentence."""
        return f"has the pattern {shortened(self.text)}{_at(self.place)}, which {reason}"


def patterns_of(schema: Any) -> list[SchemaPattern]:
    """Returns the patterns of a supported schema."""
    walk = _Walk(schema)
    walk.schema(schema, "")
    return walk.patterns


def _dialect(schema: Any) -> int:
    named = schema.get("$schema") if isinstance(schema, dict) else None
    if named is None:
        return NEWEST
    address = named.removesuffix("#").rpartition("://")[2] if isinstance(named, str) else ""
    if address not in DIALECTS:
        raise SchemaError([f"has an unknown `$schema`; must be one of {', '.join(DIALECTS)}, or not set"])
    return DIALECTS[address]


def pointed_at(reference: str, root: Any) -> Schema:
    """Returns the schema that a reference such as `#/$defs/name` names; true if there is none."""
    target = root
    for step in unquote(reference.removeprefix("#")).split("/")[1:]:
        name = step.replace("~1", "/").replace("~0", "~")
        try:
            target = target[int(name)] if isinstance(target, list) else target[name]
        except (KeyError, IndexError, ValueError, TypeError):
            return True
    return target if isinstance(target, bool | dict) else True


class _Walk:
    """One pass over a schema. `violations` are its unsupported places, `patterns` its supported patterns, and `ignored`
    its words that JSON Schema does not know."""

    def __init__(self, root: Any) -> None:
        self.violations: list[str] = []
        self.patterns: list[SchemaPattern] = []
        self.ignored: set[str] = set()
        self._root = root
        self._dialect = _dialect(root)
        self._places: set[str] = set()
        # Places of parts with ids that change what relative references mean.
        self._ids: list[str] = []
        self._references: list[tuple[str, str]] = []

    def schema(self, schema: Any, place: str) -> Schema:
        """Returns the canonical form of the schema at a JSON pointer."""
        self._places.add(place)
        if isinstance(schema, bool):
            return schema
        if not isinstance(schema, dict):
            self._refuse(f"is not a schema{_at(place)}: must be an object, true or false")
            return True
        canonical: dict[str, Any] = {}
        effective = self._effective(schema)
        if "pattern" in effective and PATTERNS_WITHIN_FORMAT.get(str(effective.get("format"))) == effective["pattern"]:
            effective = {name: value for name, value in effective.items() if name != "pattern"}
        for keyword, value in effective.items():
            self._keyword(keyword, value, place, canonical)
        self._old_items(schema, place, canonical)
        self._property_names(effective, place, canonical)
        self._unique_items(effective, place, canonical)
        self._check_min_properties(canonical, place)
        _replace_format(canonical)
        _add_range(effective, canonical)
        if effective.get("nullable") is True and "enum" not in canonical and "type" in canonical:
            types = canonical["type"]
            canonical["type"] = list(dict.fromkeys([*([types] if isinstance(types, str) else types), "null"]))
        return canonical

    def check_references(self) -> None:
        """Refuses references to places that are not schemas, and ids that would change what references mean."""
        for place in self._ids if self._references else ():
            self._refuse(f"has an id{_at(place)}, which is not supported beside `$ref`")
        for reference, place in self._references:
            if unquote(reference.removeprefix("#")) not in self._places:
                text = "must be # or a JSON pointer to a schema of this text, such as #/$defs/name"
                self._refuse(f"has `$ref` {shortened(reference)}{_at(place)}: {text}")

    def _effective(self, schema: dict[str, Any]) -> dict[str, Any]:
        """Returns the keywords that have an effect."""
        if "$ref" in schema and self._dialect <= LAST_WITH_LONE_REFERENCES:
            return {name: schema[name] for name in ("$ref", "$defs", "definitions") if name in schema}
        if self._dialect > LAST_WITH_EXCLUSIVE_FLAGS:
            return schema
        effective = dict(schema)
        for flag, limit in (("exclusiveMinimum", "minimum"), ("exclusiveMaximum", "maximum")):
            if isinstance(is_exclusive := effective.get(flag), bool):
                del effective[flag]
                if is_exclusive and limit in effective:
                    effective[flag] = effective.pop(limit)
        return effective

    def _keyword(self, keyword: str, value: Any, place: str, canonical: dict[str, Any]) -> None:
        inside = f"{place}/{_escaped(keyword)}"
        if keyword == "items" and isinstance(value, list) and self._dialect <= LAST_WITH_ITEM_LISTS:
            return
        if keyword in ONE_SCHEMA:
            canonical[keyword] = self.schema(value, inside)
        elif keyword in SCHEMA_LISTS:
            canonical[keyword] = self._list(keyword, value, inside)
        elif keyword in SCHEMA_MAPS:
            canonical[keyword] = self._map(keyword, value, inside)
        elif keyword in VALUES:
            self._value(keyword, value, place, canonical)
        elif keyword == "$ref":
            self._reference(value, place)
            canonical[keyword] = value
        elif keyword == "$id" or (keyword == "id" and self._dialect <= LAST_WITH_EXCLUSIVE_FLAGS):
            if place and not str(value).startswith("#"):
                self._ids.append(place)
        elif keyword in REFUSED:
            self._refuse_keyword(keyword, place)
        elif keyword == "additionalItems" and self._dialect <= LAST_WITH_ITEM_LISTS:
            pass  # see `_old_items`
        elif not (keyword in TRANSLATED or keyword in ANNOTATIONS or keyword.startswith(EXTENSION_PREFIX)):
            self.ignored.add(f"`{keyword}`")

    def _property_names(self, schema: dict[str, Any], place: str, canonical: dict[str, Any]) -> None:
        """Translates `propertyNames` that are listed, or that match one pattern, into properties."""
        if "propertyNames" not in schema:
            return
        names = self._resolved(self.schema(schema["propertyNames"], f"{place}/propertyNames"))
        properties, others = canonical.get("properties", {}), canonical.get("additionalProperties", True)
        if names is True or (isinstance(names, dict) and not set(names) - {"type"} and _can_be_text(names)):
            return
        if isinstance(names, dict) and "patternProperties" not in canonical and _can_be_text(names):
            if (listed := _listed_texts(names)) is not None:
                known = {name: part for name, part in properties.items() if name in listed}
                canonical["properties"] = known | {name: others for name in listed if name not in known}
                canonical["additionalProperties"] = False
                return
            if (pattern := _only_pattern(names)) is not None and not properties:
                canonical["patternProperties"] = {pattern: others}
                canonical["additionalProperties"] = False
                return
        self._refuse_keyword("propertyNames", place)

    def _unique_items(self, schema: dict[str, Any], place: str, canonical: dict[str, Any]) -> None:
        """Translates `uniqueItems` of few listed items into the list of arrays."""
        if schema.get("uniqueItems", False) is False or canonical.get("maxItems", 2) < 2:
            return
        items = self._resolved(canonical.get("items", True))
        values = items.get("enum") if isinstance(items, dict) and not set(items) - {"type", "enum"} else None
        is_plain = canonical.get("type") == "array" and not {"prefixItems", "enum", "const"} & set(canonical)
        arrays = _arrays(values, canonical) if values and is_plain and schema["uniqueItems"] is True else None
        if arrays is None:
            self._refuse_keyword("uniqueItems", place)
            return
        canonical["enum"] = arrays
        for name in ("items", "minItems", "maxItems"):
            canonical.pop(name, None)

    def _resolved(self, schema: Schema) -> Schema:
        """Returns the canonical schema that a lone reference leads to, if that has no parts."""
        if not isinstance(schema, dict) or set(schema) != {"$ref"}:
            return schema
        target = pointed_at(str(schema["$ref"]), self._root)
        with_parts = ONE_SCHEMA | SCHEMA_LISTS | SCHEMA_MAPS | REFUSED | {"propertyNames", "uniqueItems", "$ref"}
        if isinstance(target, dict) and set(target) & with_parts:
            return schema
        return _Walk(self._root).schema(target, "")  # its violations and patterns are found where it stands

    def _refuse_keyword(self, keyword: str, place: str) -> None:
        self._refuse(f"has the keyword `{keyword}`{_at(place)}, which is not supported")

    def _old_items(self, schema: dict[str, Any], place: str, canonical: dict[str, Any]) -> None:
        """Translates a list of `items`, and `additionalItems`, which has an effect only beside one."""
        if self._dialect > LAST_WITH_ITEM_LISTS or not isinstance(schema.get("items"), list) or "$ref" in canonical:
            return
        canonical["prefixItems"] = self._list("items", schema["items"], f"{place}/items")
        if "additionalItems" in schema:
            canonical["items"] = self.schema(schema["additionalItems"], f"{place}/additionalItems")

    def _check_min_properties(self, canonical: dict[str, Any], place: str) -> None:
        """Refuses a minimum that repeated names could seem to reach. The compiler repeats no name of `properties` or
        `required`, but knows no names beyond them, so at most one such property counts."""
        required, least = canonical.get("required", ()), canonical.get("minProperties", 0)
        if least > len(set(required)) + 1:
            text = "must be at most the number of names in `required` plus 1; a larger minimum is not supported"
            self._refuse(f"has `minProperties` {least}{_at(place)}: {text}")

    def _list(self, keyword: str, value: Any, place: str) -> list[Schema]:
        if not isinstance(value, list) or not value:
            self._refuse(f"has `{keyword}`{_at(place)}: must be a list of at least one schema")
            return [True]
        return [self.schema(part, f"{place}/{index}") for index, part in enumerate(value)]

    def _map(self, keyword: str, value: Any, place: str) -> dict[str, Schema]:
        if not isinstance(value, dict):
            self._refuse(f"has `{keyword}`{_at(place)}: must be an object of schemas")
            return {}
        is_by_pattern = keyword == "patternProperties"
        return {
            self._pattern(name, place) if is_by_pattern else name: self.schema(part, f"{place}/{_escaped(name)}")
            for name, part in value.items()
        }

    def _value(self, keyword: str, value: Any, place: str, canonical: dict[str, Any]) -> None:
        is_allowed, allowed = VALUES[keyword]
        if keyword in BOUNDS and is_number(value) and BOUNDS[keyword] * value > MAX_NUMBER:
            canonical[keyword] = BOUNDS[keyword] * MAX_NUMBER
        elif keyword == "format" and isinstance(value, str) and value not in FORMATS:
            if value not in RANGES_OF_FORMAT:  # see `_add_range`
                self.ignored.add(f"`format` {shortened(value)}")
        elif (large := next(_large_numbers(value), None)) is not None:
            text = f"has the number {shortened(str(large))} in `{keyword}`{_at(place)}"
            self._refuse(f"{text}; numbers beyond ±2^53 are not supported")
        elif is_allowed(value):
            canonical[keyword] = self._pattern(value, place) if keyword == "pattern" else value
        else:
            self._refuse(f"has `{keyword}` {shortened(str(value))}{_at(place)}: must be {allowed}")

    def _pattern(self, pattern: str, place: str) -> str:
        try:
            translated = rust_pattern(pattern)
        except PatternError as error:
            self._refuse(SchemaPattern(place, pattern, pattern).refused(str(error)))
            return pattern
        self.patterns.append(SchemaPattern(place, pattern, translated))
        return translated

    def _reference(self, value: Any, place: str) -> None:
        if isinstance(value, str):
            self._references.append((value, place))
        else:
            self._refuse(f"has a `$ref`{_at(place)} that is not a text")

    def _refuse(self, violation: str) -> None:
        if len(self.violations) < MAX_VIOLATIONS:
            self.violations.append(violation)


def _large_numbers(value: Any) -> Iterator[int | float]:
    if isinstance(value, dict | list):
        for part in value.values() if isinstance(value, dict) else value:
            yield from _large_numbers(part)
    elif is_number(value) and abs(value) > MAX_NUMBER:
        yield value


def _add_range(schema: dict[str, Any], canonical: dict[str, Any]) -> None:
    """Adds the range of a numeric format."""
    least, most = RANGES_OF_FORMAT.get(str(schema.get("format")), (None, None))
    if least is None or most is None or "integer" not in str(canonical.get("type")):
        return
    canonical["minimum"] = max(canonical.get("minimum", least), least)
    canonical["maximum"] = min(canonical.get("maximum", most), most)


def _can_be_text(schema: dict[str, Any]) -> bool:
    types = schema.get("type", "string")
    return "string" in ([types] if isinstance(types, str) else types)


def _listed_texts(schema: dict[str, Any]) -> list[str] | None:
    """Returns the texts that a schema lists; None if it says anything else."""
    if set(schema) - {"type"} == {"enum"}:
        return [value for value in schema["enum"] if isinstance(value, str)]
    if set(schema) - {"type"} == {"const"} and isinstance(schema["const"], str):
        return [schema["const"]]
    return None


def _only_pattern(schema: dict[str, Any]) -> str | None:
    """Returns a pattern that says the same about texts as a schema; None if there is none."""
    said = set(schema) - {"type"}
    if said == {"format"} and schema["format"] == "uuid":
        return UUID
    if said == {"pattern"}:
        return str(schema["pattern"])
    if said and said <= {"minLength", "maxLength"}:
        return f"^(?s:.){{{schema.get('minLength', 0)},{schema.get('maxLength', '')}}}$"
    return None


def _arrays(values: list[Any], canonical: dict[str, Any]) -> list[list[Any]] | None:
    """Returns all arrays without repetition of some values, within the bounds of their length; None if too many."""
    unique = list({json.dumps(value, sort_keys=True): value for value in values}.values())
    least, most = canonical.get("minItems", 0), min(canonical.get("maxItems", len(unique)), len(unique))
    if sum(math.perm(len(unique), length) for length in range(least, most + 1)) > MAX_UNIQUE_ARRAYS:
        return None
    return [list(array) for length in range(least, most + 1) for array in itertools.permutations(unique, length)]


def _replace_format(canonical: dict[str, Any]) -> None:
    """Replaces a format that the compiler takes too widely by exact patterns."""
    patterns = PATTERNS_OF_FORMAT.get(canonical.get("format", ""))
    if patterns is None:
        return
    del canonical["format"]
    if "pattern" not in canonical:
        canonical["pattern"], patterns = patterns[0], patterns[1:]
    if patterns:
        canonical["allOf"] = [*canonical.get("allOf", ()), *({"pattern": pattern} for pattern in patterns)]


def _escaped(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")


def _at(place: str) -> str:
    return f" at {shortened(place)}" if place else " at the root"
