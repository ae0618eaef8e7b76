"""The limits on the values and the nesting of a JSON text."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inflight.common.rpc.json_counts import has_more_values, nests_deeper

SCALARS = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=8)
JSON = st.recursive(SCALARS, lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=6), inner))


def num_values(value: Any) -> int:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return 1 + sum(map(num_values, inner))


@given(JSON)
def test_text_of_more_values_is_found_and_no_text_of_fewer_is(value: Any) -> None:
    text, num = json.dumps(value).encode(), num_values(value)
    assert not has_more_values(text, 2 * num)
    if num > 1:
        assert has_more_values(text, (num - 1) // 3)


def test_what_is_in_strings_does_not_count() -> None:
    assert not has_more_values(json.dumps({"a": '{"[,' * 1000, "b": "\\"}).encode(), 10)


def test_list_of_ids_is_one_value_where_it_may_be() -> None:
    text = json.dumps({"prompt": [list(range(100)), list(range(100))]}).encode()
    assert has_more_values(text, 10)
    assert not has_more_values(text, 10, id_list_is_one=True)


@pytest.mark.parametrize("text", [b"{}," * 10**6, b'"",' * 10**6, b'""' * 10**6, b"[" * 10**6, b'{"":' * 10**6])
def test_flood_is_found(text: bytes) -> None:
    assert has_more_values(text + b",,,,,,,,,,,,", 10)


@given(st.binary(max_size=50))
def test_any_bytes_have_an_answer(text: bytes) -> None:
    assert has_more_values(text, 5) in (True, False)


def nesting(value: Any) -> int:
    if not isinstance(value, dict | list):
        return 0
    return 1 + max(map(nesting, value.values() if isinstance(value, dict) else value), default=0)


@given(JSON)
def test_nesting_is_that_of_the_value(value: Any) -> None:
    text, levels = json.dumps(value).encode(), nesting(value)
    assert not nests_deeper(text, levels)
    if levels:
        assert nests_deeper(text, levels - 1)


@pytest.mark.parametrize("text", [b"[" * 10**6, b'{"":' * 10**6, b'"[",[' * 10**6])
def test_depth_is_found(text: bytes) -> None:
    assert nests_deeper(text)


def test_string_without_an_end_is_read_once() -> None:
    assert not nests_deeper(b'[{"' + b'\\"[' * 10**6, 3)


@given(st.binary(max_size=50))
def test_nesting_of_any_bytes_has_an_answer(text: bytes) -> None:
    assert nests_deeper(text, 5) in (True, False)
