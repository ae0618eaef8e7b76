"""Random and mutated constraints: each is refused or compiles, within its bounds, and what it allows is valid."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import jsonschema
import jsonschema_rs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inflight.router.constraint.process import CompilingProcess
from inflight.router.constraint.source import ConstraintError, ConstraintSource
from tests.support.examples import examples
from tests.support.text.grammars import TOKENIZER, matcher_of

# Of Python's `re` about a pattern of ECMAScript.
pytestmark = pytest.mark.filterwarnings("ignore:Possible nested set:FutureWarning")

MAX_OUTPUT_BYTES = 400
CLOSING = frozenset(b'"]}')

KEYWORDS = (
    *("type", "enum", "const", "required", "pattern", "format", "minimum", "maximum", "exclusiveMinimum"),
    *("exclusiveMaximum", "multipleOf", "minLength", "maxLength", "minItems", "maxItems", "minProperties"),
    *("maxProperties", "items", "prefixItems", "additionalProperties", "properties", "patternProperties", "anyOf"),
    *("oneOf", "allOf", "$ref", "$defs", "definitions", "additionalItems", "title", "not", "x-guidance", "$schema"),
)
NAMES = st.sampled_from(["a", "b", "é/~", "$ref", ""])
NUMBERS = st.integers(-20, 20) | st.sampled_from([0.5, 1.25, 1e-3, -7.75])
VALUES = st.recursive(
    st.none() | st.booleans() | NUMBERS | st.text('ab é"\\\n', max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=5,
)
COUNTS = st.integers(0, 5)
PATTERNS = st.sampled_from(["^a", "b$", "^[ab]{2,3}$", "é|a", "[[a]", r"^\d+\.\d$", ".", "^(a|b)*$"])
FORMATS = st.sampled_from(["date", "time", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid"])
LEAVES = st.one_of(
    st.just(True),
    st.fixed_dictionaries({"type": st.sampled_from(["null", "boolean", "integer", "number", "string"])}),
    st.fixed_dictionaries({"const": VALUES}),
    st.fixed_dictionaries({"enum": st.lists(VALUES, min_size=1, max_size=3)}),
    st.fixed_dictionaries({"$ref": st.sampled_from(["#", "#/$defs/a", "#/$defs/b"])}),
    st.fixed_dictionaries({"type": st.just("string"), "pattern": PATTERNS}),
    st.fixed_dictionaries({"type": st.just("string"), "format": FORMATS}),
    st.fixed_dictionaries(
        {"type": st.just("string")}, optional={"minLength": COUNTS, "maxLength": COUNTS, "pattern": PATTERNS}
    ),
    st.fixed_dictionaries(
        {"type": st.sampled_from(["integer", "number"])},
        optional={"minimum": NUMBERS, "maximum": NUMBERS, "exclusiveMaximum": NUMBERS, "multipleOf": st.just(3)},
    ),
)


def _larger(inner: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    schemas = st.lists(inner, min_size=1, max_size=3)
    return st.one_of(
        st.fixed_dictionaries(
            {"type": st.just("object"), "properties": st.dictionaries(NAMES, inner, max_size=3)},
            optional={
                "required": st.lists(NAMES, max_size=2, unique=True),
                "additionalProperties": inner,
                "patternProperties": st.dictionaries(PATTERNS, inner, max_size=1),
                "minProperties": COUNTS,
                "maxProperties": COUNTS,
            },
        ),
        st.fixed_dictionaries(
            {"type": st.just("array")},
            optional={"items": inner, "prefixItems": schemas, "minItems": COUNTS, "maxItems": COUNTS},
        ),
        st.fixed_dictionaries({"anyOf": schemas}),
        st.fixed_dictionaries({"oneOf": schemas}),
        st.fixed_dictionaries({"allOf": schemas}),
    )


SCHEMAS = st.recursive(LEAVES, _larger, max_leaves=8)
WITH_DEFINITIONS = st.builds(
    lambda schema, a, b: {**schema, "$defs": {"a": a, "b": b}} if isinstance(schema, dict) else schema,
    *(SCHEMAS, SCHEMAS, LEAVES),
)


@pytest.fixture(scope="module")
def compiler() -> Iterator[list[CompilingProcess]]:
    """One process, in a list: a constraint may end it."""
    processes = [CompilingProcess()]
    yield processes
    processes[0].close()


def grammar_or_refusal(compiler: list[CompilingProcess], kind: str, text: str) -> str | None:
    """Returns the grammar; None for a refusal. Anything else raises."""
    if not compiler[0].is_alive:
        compiler[0] = CompilingProcess()
    try:
        return compiler[0].compile(ConstraintSource(kind, (text,)), timeout_s=120)[0]
    except ConstraintError:
        return None


def random_output(grammar: str, seed: int) -> str | None:
    """Returns an output of a grammar; None if it does not end soon. It ends where it may, to stay short."""
    matcher, chance = matcher_of(grammar).deep_copy(), random.Random(seed)
    output = bytearray()
    while len(output) < MAX_OUTPUT_BYTES:
        mask = int.from_bytes(matcher.compute_bitmask(), "little")
        assert not matcher.is_error(), matcher.get_error()
        allowed = [token for token in range(TOKENIZER.vocab_size) if mask >> token & 1]
        if matcher.is_accepting() and (chance.random() < 0.7 or allowed == [TOKENIZER.eos_token]):
            return output.decode()
        closing = [token for token in allowed if token in CLOSING]
        token = chance.choice(closing if closing and chance.random() < 0.4 else allowed)
        if token == TOKENIZER.eos_token:
            return output.decode()
        assert matcher.consume_token(token)
        output.append(token)
    return None


def check_valid(schema: Any, text: str) -> None:
    """Checks an output by two validators. Only the second one knows all formats. A number beyond the doubles, such as
    1e999, is JSON, but neither of them can read it."""
    value = json.loads(text)
    if "Infinity" in json.dumps(value):
        return
    with suppress(RecursionError):  # a schema may refer to itself without end
        jsonschema.Draft202012Validator(schema).validate(value)
    jsonschema_rs.Draft202012Validator(schema, validate_formats=True).validate(value)


@given(schema=WITH_DEFINITIONS, seed=st.integers(0, 2**32))
@settings(max_examples=examples(300))
def test_outputs_of_random_schemas_are_valid(compiler: list[CompilingProcess], schema: Any, seed: int) -> None:
    grammar = grammar_or_refusal(compiler, "json_schema", json.dumps(schema))
    for i in range(3 if grammar else 0):
        assert grammar is not None
        if (text := random_output(grammar, seed + i)) is not None:
            check_valid(schema, text)


@given(schema=WITH_DEFINITIONS, keyword=st.sampled_from(KEYWORDS), value=VALUES | SCHEMAS, at=st.integers(0, 50))
@settings(max_examples=examples(200))
def test_mutated_schemas_are_refused_or_compile(
    compiler: list[CompilingProcess], schema: Any, keyword: str, value: Any, at: int
) -> None:
    objects = list(_objects(schema))
    if objects:
        objects[at % len(objects)][keyword] = value
    grammar_or_refusal(compiler, "json_schema", json.dumps(schema))


@given(schema=WITH_DEFINITIONS, cut=st.integers(0, 400), length=st.integers(0, 5), put=st.text(max_size=5))
@settings(max_examples=examples(100))
def test_damaged_texts_are_refused_or_compile(
    compiler: list[CompilingProcess], schema: Any, cut: int, length: int, put: str
) -> None:
    text = json.dumps(schema)
    cut %= len(text) + 1
    grammar_or_refusal(compiler, "json_schema", text[:cut] + put + text[cut + length :])


@given(
    kind=st.sampled_from(["regex", "grammar"]), text=st.text(r"ab(){}[]|*+?.^$\/-0129,<>:~&\"#%@ " "\n", max_size=40)
)
@settings(max_examples=examples(300))
def test_random_regexes_and_grammars_are_refused_or_compile(
    compiler: list[CompilingProcess], kind: str, text: str
) -> None:
    grammar_or_refusal(compiler, kind, text if kind == "regex" else f"start: {text}")


def _objects(value: Any) -> Iterator[dict[str, Any]]:
    if isinstance(value, dict):
        yield value
    for inner in value.values() if isinstance(value, dict) else value if isinstance(value, list) else ():
        yield from _objects(inner)
