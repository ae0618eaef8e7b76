"""Canonical grammars of constraints: what they mean, what is refused by name, and the bounds of the work."""

from __future__ import annotations

import datetime
import decimal
import enum
import ipaddress
import json
import pathlib
import re
import uuid
from typing import Annotated, Any, Literal

import pydantic
import pytest

from inflight.common.grammar import grammar_hash, grammar_violation
from inflight.router.constraint.json_schema import (
    MAX_VIOLATIONS,
    PATTERNS_WITHIN_FORMAT,
    canonical_schema,
)
from inflight.router.constraint.source import ConstraintError, ConstraintSource, canonical, source_of
from inflight.router.constraint.worker import Compiler, readable
from tests.support.text.grammars import accepts


def grammar_of(kind: str, *texts: str, max_whitespace: int = 8) -> str:
    return Compiler().compile(ConstraintSource(kind, texts, max_whitespace).to_json())


def schema_grammar(schema: Any, max_whitespace: int = 8) -> str:
    return grammar_of("json_schema", json.dumps(schema), max_whitespace=max_whitespace)


def violations(kind: str, *texts: str) -> list[str]:
    with pytest.raises(ConstraintError) as caught:
        grammar_of(kind, *texts)
    return caught.value.violations


def schema_violations(schema: Any) -> str:
    return "; ".join(violations("json_schema", json.dumps(schema)))


POINT = {"type": "object", "properties": {"x": {"type": "integer"}, "y": {"type": "integer"}}, "required": ["x", "y"]}


def test_canonical_schema_has_no_annotations_and_keeps_the_order_of_properties() -> None:
    described = {"title": "Point", "description": "…", "x-order": 1, "$id": "https://example.com/point", **POINT}
    described["properties"] = {
        name: {"description": name, "default": 3, "examples": [3], **part}
        for name, part in POINT["properties"].items()  # type: ignore[attr-defined]
    }
    assert schema_grammar(described) == schema_grammar(POINT)
    assert schema_grammar(POINT).index('"x"') < schema_grammar(POINT).index('"y"')


def test_large_numbers_in_annotations_have_no_effect() -> None:
    large = {"default": 2**60, "examples": [1e300, -(2**70)], "x-more": {"a": 10**400}}
    described = {**POINT, **large, "properties": {name: {"type": "integer", **large} for name in ("x", "y")}}
    text = json.dumps(described).replace("1e+300", "1e999")
    assert grammar_of("json_schema", text) == schema_grammar(POINT)


def test_hash_is_that_of_the_text() -> None:
    grammar = schema_grammar(POINT)
    assert grammar_violation(grammar, grammar_hash(grammar)) is None
    assert grammar_violation(grammar + " ", grammar_hash(grammar)) == "the hash is not the SHA-256 of the grammar"
    assert grammar_violation("", grammar_hash("")) is not None


def test_source_survives_the_pipe() -> None:
    source = ConstraintSource("choice", ("é\n", '"'), 3)
    assert source_of(source.to_json()) == source


@pytest.mark.parametrize("max_whitespace", [0, 1, 8, 64])
def test_no_run_of_whitespace_is_longer_than_allowed(max_whitespace: int) -> None:
    grammar = schema_grammar({"type": "object", "properties": {"a": {"type": "array"}}}, max_whitespace)
    assert accepts(grammar, '{"a":[1,{"b":2}]}')
    places = '{_"a"_:_[_1_,_{_"b"_:_2_}_]_}'
    for at in range(places.count("_")):
        before, after = places.split("_")[: at + 1], places.split("_")[at + 1 :]
        for character in " \n\t\r":
            run = character * max_whitespace
            assert accepts(grammar, "".join(before) + run + "".join(after))
            assert not accepts(grammar, "".join(before) + run + character + "".join(after))


def test_pretty_printed_object_is_accepted_up_to_the_bound() -> None:
    def nested(levels: int) -> Any:
        return {"a": nested(levels - 1)} if levels else 1

    grammar = grammar_of("json_object")
    # A line break and the indent: 1 + 2 · levels characters.
    assert accepts(grammar, json.dumps(nested(3), indent=2))
    assert not accepts(grammar, json.dumps(nested(4), indent=2))


def test_json_object_is_an_object() -> None:
    grammar = grammar_of("json_object")
    assert accepts(grammar, '{"a": [null, true, -1.5e3, "é"]}')
    assert not accepts(grammar, "[1]")


@pytest.mark.parametrize("text", ["yes", 'a"b\\c', "line\nbreak", "é😀\u2028", "\0", "/", "a | b"])
def test_choice_is_taken_literally(text: str) -> None:
    grammar = grammar_of("choice", "other", text, text + "!")
    assert [accepts(grammar, one) for one in (text, text + "!", "other", text + "?", "")] == [True] * 3 + [False] * 2


@pytest.mark.parametrize(
    ("regex", "text", "other"),
    [
        (r"\d", "7", "٣"),
        (r"[\d.]+", "1.5", "٣"),
        (r"[]\d]", "]", "٣"),
        (r"[^\d]", "x", "٣"),
        (r"[^]\d]", "x", "٣"),
        (r"\\d", "\\d", "7"),
        (r"a/b\/c", "a/b/c", "a/b"),
        ("a\nb", "a\nb", "ab"),
        ("\\\n", "\n", "\\"),
        (r"[0-9]{2}", "12", "123"),
    ],
)
def test_regex_matches_the_whole_output(regex: str, text: str, other: str) -> None:
    grammar = grammar_of("regex", regex)
    assert accepts(grammar, text)
    assert not accepts(grammar, other)


@pytest.mark.parametrize(
    ("schema", "named"),
    [
        ({"uniqueItems": True}, "keyword `uniqueItems` at the root"),
        ({"properties": {"a/b": {"not": {}}}}, 'keyword `not` at "/properties/a~1b"'),
        ({"if": {}, "then": {}}, "keyword `if`"),
        ({"dependentRequired": {}}, "keyword `dependentRequired`"),
        ({"propertyNames": {"not": {}}}, "keyword `not`"),
        ({"propertyNames": {"pattern": "^a", "minLength": 3}}, "keyword `propertyNames`"),
        ({"propertyNames": {"pattern": "^a"}, "properties": {"b": {}}}, "keyword `propertyNames`"),
        ({"$defs": {"a": {"propertyNames": {"$ref": "#/$defs/a"}}}}, "keyword `propertyNames`"),
        ({"type": "array", "uniqueItems": True, "items": {"enum": list("abcdefgh")}}, "keyword `uniqueItems`"),
        ({"uniqueItems": True, "items": {"enum": ["a"]}}, "keyword `uniqueItems`"),
        ({"x-guidance": {"lenient": True}}, "keyword `x-guidance`"),
        ({"items": {"x-guidance": {}}}, 'keyword `x-guidance` at "/items"'),
        ({"$defs": {"a": {"$id": "b"}}, "items": {"$ref": "#/$defs/a"}}, 'an id at "/$defs/a"'),
        ({"$anchor": "a", "items": {"$ref": "#a"}}, '`$ref` "#a"'),
        ({"$dynamicRef": "#a"}, "keyword `$dynamicRef`"),
        ({"items": [{}]}, 'at "/items": must be an object, true or false'),
        ({"format": [], "minProperties": {}, "required": [[]]}, "`format`"),
        ({"type": "text"}, "`type`"),
        ({"type": []}, "`type`"),
        ({"enum": []}, "`enum`"),
        ({"minimum": "3"}, "`minimum`"),
        ({"exclusiveMinimum": True}, "`exclusiveMinimum`"),
        ({"minItems": 1_000_000_000}, '`minItems` "1000000000" at the root: must be an integer from 0 to 1000000'),
        ({"maxLength": -1}, "`maxLength`"),
        ({"minProperties": 3, "required": ["a"]}, "`minProperties` 3 at the root: must be at most"),
        ({"multipleOf": 0}, "`multipleOf`"),
        ({"required": "a"}, "`required`"),
        ({"properties": []}, "`properties`"),
        ({"anyOf": []}, "`anyOf`"),
        ({"$ref": "https://example.com/schema"}, '`$ref` "https://example.com/schema" at the root: must be #'),
        ({"$ref": "#/examples/0", "examples": [{"not": {}}]}, '`$ref` "#/examples/0"'),
        ({"$ref": "#/$defs/none"}, '`$ref` "#/$defs/none"'),
        ({"$ref": "file:///etc/passwd"}, "`$ref`"),
        ({"$schema": "http://json-schema.org/draft-03/schema#"}, "unknown `$schema`"),
        ({"pattern": "(?=a)b"}, "look-around"),
        ({"pattern": r"(a)\1"}, r"escape \1"),
        ({"pattern": "(?i)a"}, "group (?i)"),
        ({"pattern": "a" * 5000}, "`pattern`"),
        ({"patternProperties": {r"\Z": {}}}, r"escape \Z"),
        ({"minimum": 2**60}, "numbers beyond"),
        ({"enum": [1, {"a": [-(2**60)]}]}, "numbers beyond"),
        ({"maximum": -1e300}, "numbers beyond"),
        ({"oneOf": [{"type": "number"}, {"type": "integer"}]}, "oneOf constraints are not supported"),
        ({"enum": ["\ud800"]}, "unpaired surrogate"),
        (False, "Unsatisfiable"),
        (3, "is not a schema"),
    ],
)
def test_unsupported_schema_is_refused_by_name(schema: Any, named: str) -> None:
    assert named in schema_violations(schema)


@pytest.mark.parametrize(
    ("schema", "same"),
    [
        ({"type": "integer", "javaType": "long", "minimun": 3, "self": {"not": {}}}, {"type": "integer"}),
        ({"type": "string", "contentEncoding": "base64", "format": "binary"}, {"type": "string"}),
        ({"type": "string", "format": "uuid7", "pattern": "^a"}, {"type": "string", "pattern": "^a"}),
        ({"type": "number", "format": "double"}, {"type": "number"}),
        ({"type": "integer", "format": "int32", "minimum": 0}, {"type": "integer", "minimum": 0, "maximum": 2**31 - 1}),
        ({"type": "number", "maximum": 3.4e38}, {"type": "number", "maximum": 2**53}),
        ({"type": "integer", "exclusiveMinimum": -(2**63)}, {"type": "integer", "exclusiveMinimum": -(2**53)}),
        ({"type": "string", "nullable": True}, {"type": ["string", "null"]}),
        ({"type": "string", "nullable": False}, {"type": "string"}),
        ({"$defs": {"a": {"$id": "b", "$anchor": "c"}}}, {"$defs": {"a": {}}}),
        ({"type": "array", "uniqueItems": False}, {"type": "array"}),
        ({"type": "array", "uniqueItems": True, "maxItems": 1}, {"type": "array", "maxItems": 1}),
        (
            {"type": "array", "uniqueItems": True, "items": {"enum": [1, 2]}, "minItems": 1},
            {"type": "array", "enum": [[1], [2], [1, 2], [2, 1]]},
        ),
        ({"type": "object", "propertyNames": {"type": "string"}}, {"type": "object"}),
        (
            {"type": "object", "propertyNames": {"enum": ["a", "b"]}, "additionalProperties": {"type": "null"}},
            {
                "type": "object",
                "additionalProperties": False,
                "properties": {"a": {"type": "null"}, "b": {"type": "null"}},
            },
        ),
        (
            {"type": "object", "propertyNames": {"pattern": "^a"}, "additionalProperties": {"type": "null"}},
            {"type": "object", "additionalProperties": False, "patternProperties": {"^a": {"type": "null"}}},
        ),
    ],
)
def test_words_that_are_unknown_or_say_something_simpler_are_translated(
    schema: dict[str, Any], same: dict[str, Any]
) -> None:
    assert canonical_schema(schema) == same


class Color(enum.Enum):
    RED = "red"
    BLUE = "blue"


@pytest.mark.parametrize(
    "kind",
    [
        *(bytes, datetime.timedelta, decimal.Decimal, ipaddress.IPv4Network, pathlib.Path, re.Pattern, uuid.UUID),
        *(pydantic.AnyUrl, pydantic.Base64Str, pydantic.ByteSize, pydantic.Json, pydantic.SecretStr),
        *(dict[Color, int], dict[Literal["a", "b"], int], dict[uuid.UUID, int], dict[int, str], set[Color]),
        dict[Annotated[str, pydantic.Field(min_length=1)], int],
        Annotated[float, pydantic.Field(ge=-3.4e38, le=3.4e38)],
        Annotated[int, pydantic.Field(ge=-(2**63), lt=2**63)],
    ],
    ids=str,
)
def test_schemas_of_pydantics_types_compile(kind: Any) -> None:
    model = pydantic.create_model("Model", value=(kind, ...))
    for mode in ("validation", "serialization"):
        assert schema_grammar(model.model_json_schema(mode=mode))


@pytest.mark.parametrize(("form", "text"), [("hostname", "example.com"), ("duration", "P1Y2M3DT4H")])
def test_zods_patterns_with_look_around_are_left_to_their_formats(form: str, text: str) -> None:
    schema = {"type": "string", "format": form, "pattern": PATTERNS_WITHIN_FORMAT[form]}
    assert re.match(schema["pattern"], text)
    assert accepts(schema_grammar(schema), json.dumps(text))
    assert "look-around" in schema_violations({**schema, "format": "uri"})


def test_names_listed_elsewhere_become_properties() -> None:
    colors = {"$defs": {"Color": {"enum": ["red", "blue"], "title": "Color"}}}
    grammar = schema_grammar(
        {**colors, "type": "object", "propertyNames": {"$ref": "#/$defs/Color"}, "additionalProperties": {"const": 1}}
    )
    assert accepts(grammar, '{"blue":1}')
    assert not accepts(grammar, '{"green":1}')


def test_exclusive_limits_of_draft_4_are_flags() -> None:
    draft4 = {"$schema": "http://json-schema.org/draft-04/schema#", "id": "https://example.com/a", "type": "integer"}
    grammar = schema_grammar(
        {**draft4, "minimum": 1, "exclusiveMinimum": True, "maximum": 3, "exclusiveMaximum": False}
    )
    assert [number for number in range(5) if accepts(grammar, str(number))] == [2, 3]
    flag_alone = schema_grammar({**draft4, "exclusiveMinimum": True})
    assert accepts(flag_alone, "-7")


def ignored_words(schema: Any) -> list[str]:
    ignored: set[str] = set()
    canonical_schema(schema, ignored)
    return sorted(ignored)


def test_words_that_json_schema_does_not_know_are_reported() -> None:
    schema = {"javaType": "long", "x-order": 1, "title": "a", "items": {"format": "int64"}}
    assert ignored_words(schema) == ['`format` "int64"', "`javaType`"]
    assert not ignored_words({"type": "string", "nullable": True})
    draft7 = {"$schema": "http://json-schema.org/draft-07/schema#"}
    assert not ignored_words({**draft7, "items": [{}], "additionalItems": False})
    assert ignored_words({"additionalItems": False}) == ["`additionalItems`"]


def test_all_unsupported_keywords_are_named_up_to_a_bound() -> None:
    assert len(violations("json_schema", json.dumps({"not": {}, "if": {}, "contains": {}}))) == 3
    many: Any = {"properties": {str(i): {"not": {}} for i in range(1000)}}
    assert len(violations("json_schema", json.dumps(many))) == 16


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("", "is not JSON"),
        ("{", "is not JSON: Expecting property name enclosed in double quotes at line 1, column 2"),
        ('{"minimum": NaN}', "NaN is no JSON number"),
        ('{"type": "object", "type": "array"}', 'the name "type" twice'),
        ('{"minimum": 1' + "0" * 5000 + "}", "numbers beyond"),
        ('{"maximum": -1e400}', "numbers beyond"),
        ("[" * 60_000, "nested more than 100 levels"),
        ('{"items":' * 1000 + "{}" + "}" * 1000, "nested more than 100 levels"),
        ('{"enum":[' + "[" * 1000 + "]" * 1000 + "]}", "nested more than 100 levels"),
    ],
)
def test_text_that_is_no_bounded_json_is_refused(text: str, named: str) -> None:
    assert named in "; ".join(violations("json_schema", text))


def test_deepest_allowed_schema_compiles() -> None:
    assert schema_grammar(json.loads('{"items":' * 99 + "{}" + "}" * 99))


def test_patterns_that_do_not_compile_are_refused_with_their_places() -> None:
    name = {"type": "string", "pattern": "("}
    schema = {
        "$defs": {"date": {"type": "string", "pattern": "^[z-a]$"}},
        "type": "object",
        "properties": {"na/me": name, "ok": {"type": "string", "pattern": "^[a-z]$"}, "d": {"$ref": "#/$defs/date"}},
    }
    assert violations("json_schema", json.dumps(schema)) == [
        'has the pattern "^[z-a]$" at "/$defs/date", which does not compile: invalid character class range, the start '
        "must be <= the end",
        'has the pattern "(" at "/properties/na~1me", which does not compile: unclosed group',
    ]
    by_pattern = {"type": "object", "patternProperties": {"(": {}}}
    assert 'has the pattern "(" at "/patternProperties", which' in schema_violations(by_pattern)
    many = {"type": "object", "properties": {f"p{number}": name for number in range(100)}}
    assert len(violations("json_schema", json.dumps(many))) == MAX_VIOLATIONS


def test_error_of_the_compiler_about_something_else_is_kept() -> None:
    schema = {"type": "string", "pattern": "^a+$", "minLength": 5, "maxLength": 2}
    assert schema_violations(schema) == "Unsatisfiable schema: minLength (5) is greater than maxLength (2)"


@pytest.mark.parametrize(
    ("kind", "text", "named"),
    [
        ("regex", "(", "unclosed group"),
        ("regex", "(?=a)", "look-around"),
        ("regex", r"(a)\1", "backreferences"),
        ("regex", r"\bfoo", "lookarounds"),
        ("grammar", "start: b", 'unknown name: "b"'),
        ("grammar", 'a: "b"', "no start rule"),
        ("grammar", "start: start", "no output satisfies it"),
        ("grammar", 'start: "a"{1000000000}', "Too many items"),
        ("grammar", "start: %json {}", "%json"),
        ("grammar", "start: % lark { }", "%lark"),
        ("grammar", '%llguidance {"no_forcing": true}\nstart: "a"', "%llguidance"),
        ("grammar", 'start[temperature=0.5]: "a"', "temperature"),
        ("grammar", "start: <|im_end|>", "special token"),
        ("grammar", "start: <[0-9]>", "special token"),
        ("grammar", "start: @other", "another grammar"),
    ],
)
def test_unsupported_regex_or_grammar_is_refused_by_name(kind: str, text: str, named: str) -> None:
    assert named in "; ".join(violations(kind, text))


def test_texts_and_comments_of_a_grammar_may_contain_what_is_refused_elsewhere() -> None:
    grammar = grammar_of("grammar", 'start: "%json @x <think>" | /<[a-z]+>/ // %lark temperature=1\n# @b')
    assert accepts(grammar, "%json @x <think>")
    assert accepts(grammar, "<think>")


def test_exclusive_alternatives_behind_references_are_a_union() -> None:
    def animal(kind: str) -> Any:
        return {
            "type": "object",
            "properties": {"kind": {"const": kind}, "n": {"type": "integer"}},
            "required": ["kind"],
        }

    union = {
        "$defs": {"Cat": animal("cat"), "Dog": animal("dog")},
        "oneOf": [{"$ref": "#/$defs/Cat"}, {"$ref": "#/$defs/Dog"}],
        "discriminator": {"propertyName": "kind", "mapping": {"cat": "#/$defs/Cat", "dog": "#/$defs/Dog"}},
    }
    grammar = schema_grammar(union)
    assert accepts(grammar, '{"kind":"dog","n":1}')
    assert not accepts(grammar, '{"kind":"cow"}')
    optional: Any = {"oneOf": [{"$ref": f"#/$defs/{name}"} for name in ("Cat", "Dog")], "$defs": {}}
    optional["$defs"] = {name: animal(name) | {"required": []} for name in ("Cat", "Dog")}
    assert "oneOf" in schema_violations(optional)


def test_older_drafts_are_translated() -> None:
    draft7 = {"$schema": "http://json-schema.org/draft-07/schema#"}
    pair = draft7 | {"type": "array", "items": [{"type": "integer"}, {"type": "null"}], "additionalItems": False}
    grammar = schema_grammar(pair)
    assert [accepts(grammar, text) for text in ("[1,null]", "[null]", "[1,null,2]")] == [True, False, False]
    lone = draft7 | {"$ref": "#/definitions/a", "type": "object", "definitions": {"a": {"type": "integer"}}}
    assert accepts(schema_grammar(lone), "3")


@pytest.mark.parametrize(
    ("pattern", "text", "is_match"),
    [
        ("[[a]]", "[]", True),
        ("^[a&&b]$", "&", True),
        ("^.$", "\u2028", False),
        (r"^\s$", "\ufeff", True),
        (r"^\S$", "\ufeff", False),
        (r"^[\S]$", "x", True),
        (r"^\d$", "٣", False),
        (r"^\<\/a\>$", "</a>", True),
        (r"^\u00e9$", "é", True),
    ],
)
def test_patterns_have_the_meaning_of_ecmascript(pattern: str, text: str, is_match: bool) -> None:
    grammar = schema_grammar({"type": "string", "pattern": pattern})
    assert accepts(grammar, json.dumps(text, ensure_ascii=False)) is is_match


@pytest.mark.parametrize("kind", ["date", "date-time"])
def test_dates_exist(kind: str) -> None:
    grammar = schema_grammar({"type": "string", "format": kind, "pattern": "^2"})
    time_of_day = "T23:59:59Z" if kind == "date-time" else ""
    days = {"2024-02-29": True, "2023-02-29": False, "2100-02-29": False, "2000-02-29": True, "2023-04-31": False}
    assert {day: accepts(grammar, f'"{day}{time_of_day}"') for day in days} == days
    assert not accepts(grammar, f'"1999-01-01{time_of_day}"')


def test_messages_of_the_compiler_are_one_line() -> None:
    assert readable("regex parse error:\n    (?=a)\n    ^^^\nerror: look-around is not supported") == (
        "look-around is not supported"
    )
    assert readable("NoExtensionBias\n<non-verbose/>") == "no output satisfies it"
    assert len(readable("x" * 10_000)) == 300


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "array", "minItems": 1_000_000, "items": {"type": "array", "minItems": 1_000_000}},
        {"type": "string", "minLength": 1_000_000, "maxLength": 1_000_000},
        {"type": "string", "pattern": "^(a+)+(b+)+$"},
        {"type": "string", "pattern": "a{1000}{1000}{1000}"},
        {"type": "object", "properties": {f"p{i}": {"type": "integer"} for i in range(300)}},
        {"$ref": "#/$defs/a", "$defs": {"a": {"anyOf": [{"$ref": "#/$defs/a"}, {"type": "null"}]}}},
        {"type": "object", "properties": {"next": {"$ref": "#"}}},
    ],
)
def test_large_bounds_and_recursion_are_little_work(schema: Any) -> None:
    assert schema_grammar(schema)  # the compiler refuses what takes much work


def test_canonical_grammar_is_bounded() -> None:
    with pytest.raises(ConstraintError, match="at most 262144 are allowed"):
        canonical(ConstraintSource("grammar", ("x" * 300_000,)))
