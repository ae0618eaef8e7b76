"""JSON text of a client, read with bounds.

Python's parser raises RecursionError for deep nesting, takes the last of two equal names, and reads numbers that JSON
does not have. Here each of these is an error with its reason.
"""

from __future__ import annotations

import json
import re
from typing import Any

# Compilers of schemas recurse, as does everything here. serde_json, which reads the grammar, stops at 128.
MAX_NESTING = 100
# Larger integers have no exact value in the compiler, which computes with doubles.
MAX_INTEGER = 2**53

_BRACKET = re.compile(r'"(?:[^"\\]|\\.)*+"|[\[\]{}]', re.DOTALL)
_OPENING = frozenset("[{")
_CLOSING = frozenset("]}")


class JsonTextError(Exception):
    """Text that is not JSON, or JSON beyond the bounds. The message completes a sentence that begins with its field."""


def parse_json(text: str) -> Any:
    """Returns the value of a JSON text. Raises `JsonTextError`."""
    _check_nesting(text)
    try:
        return json.loads(
            text,
            object_pairs_hook=_unique_names,
            parse_constant=_refuse_constant,
            parse_int=_bounded_integer,
            parse_float=_finite_number,
        )
    except json.JSONDecodeError as error:
        raise JsonTextError(f"is not JSON: {error.msg} at line {error.lineno}, column {error.colno}") from None


def _check_nesting(text: str) -> None:
    depth = 0
    for match in _BRACKET.finditer(text):
        if match[0] in _OPENING:
            depth += 1
            if depth > MAX_NESTING:
                raise JsonTextError(f"is nested more than {MAX_NESTING} levels deep")
        elif match[0] in _CLOSING:
            depth -= 1


def _unique_names(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        names = [name for name, _ in pairs]
        repeated = next(name for name in names if names.count(name) > 1)
        raise JsonTextError(f"has the name {shortened(repeated)} twice in one object")
    return value


def _refuse_constant(name: str) -> None:
    raise JsonTextError(f"is not JSON: {name} is no JSON number")


def _bounded_integer(digits: str) -> int:
    if len(digits) > len(str(MAX_INTEGER)) + 1 or abs(int(digits)) > MAX_INTEGER:
        raise JsonTextError(f"has the number {shortened(digits)}; integers beyond ±2^53 are not supported")
    return int(digits)


def _finite_number(digits: str) -> float | int:
    """Returns an integer for 1.0 and 1e3, which JSON schema does not distinguish from 1 and 1000."""
    number = float(digits)
    if abs(number) > MAX_INTEGER:
        raise JsonTextError(f"has the number {shortened(digits)}; numbers beyond ±2^53 are not supported")
    return int(number) if number.is_integer() else number


def shortened(text: str, length: int = 60) -> str:
    """Returns a text of the client for an error: quoted, cut, without unpaired surrogates."""
    cut = text if len(text) <= length else text[: length - 1] + "…"
    return json.dumps(cut.encode("utf-8", "replace").decode(), ensure_ascii=False)
