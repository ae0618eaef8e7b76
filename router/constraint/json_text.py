"""JSON text of a client, read with bounds.

Python's parser has no fixed limit on nesting, takes the last of two equal names, reads numbers that JSON does not have,
and fails or gives infinity for very large ones. Here each of these is an error with its reason, except large numbers,
which are read: whether one matters depends on its place.
"""

from __future__ import annotations

import json
import math
import sys
from typing import Any

from inflight.common.rpc.json_counts import MAX_NESTING, nests_deeper

# Longer ones are larger than any double.
MAX_INTEGER_DIGITS = 309


class JsonTextError(ValueError):
    """Text that is not JSON, or JSON beyond the bounds. The message completes a sentence that begins with its field."""


def parse_json(text: str) -> Any:
    """Returns the value of a JSON text. Integers are those for a JSON schema, such as 1 for 1.0. Raises
    `JsonTextError`."""
    _check_nesting(text)
    try:
        return json.loads(
            text,
            object_pairs_hook=_unique_names,
            parse_constant=_refuse_constant,
            parse_int=_integer,
            parse_float=_whole_or_float,
        )
    except json.JSONDecodeError as error:
        raise JsonTextError(f"is not JSON: {error.msg} at line {error.lineno}, column {error.colno}") from None


def read_json(text: str) -> Any:
    """Returns the value of a JSON text with the bound on nesting alone, with numbers as they are written. Raises
    `ValueError`."""
    _check_nesting(text)
    return json.loads(text, parse_constant=_refuse_constant, parse_int=_integer, parse_float=_float)


def _check_nesting(text: str) -> None:
    if nests_deeper(text.encode("utf-8", "surrogatepass")):
        raise JsonTextError(f"is nested more than {MAX_NESTING} levels deep")


def _unique_names(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) < len(pairs):
        names = [name for name, _ in pairs]
        repeated = next(name for name in names if names.count(name) > 1)
        raise JsonTextError(f"has the name {shortened(repeated)} twice in one object")
    return value


def _refuse_constant(name: str) -> None:
    raise JsonTextError(f"is not JSON: {name} is no JSON number")


def _integer(digits: str) -> int | float:
    return int(digits) if len(digits) <= MAX_INTEGER_DIGITS else _float(digits)


def _whole_or_float(digits: str) -> float | int:
    """Returns an integer for 1.0 and 1e3, which JSON schema does not distinguish from 1 and 1000."""
    number = _float(digits)
    return int(number) if number.is_integer() else number


def _float(digits: str) -> float:
    """Returns the nearest double, never infinity, which JSON cannot express."""
    number = float(digits)
    return number if math.isfinite(number) else math.copysign(sys.float_info.max, number)


def shortened(text: str, length: int = 60) -> str:
    """Returns a text of the client for an error: quoted, cut, without unpaired surrogates."""
    cut = text if len(text) <= length else text[: length - 1] + "…"
    return json.dumps(cut.encode("utf-8", "replace").decode(), ensure_ascii=False)
