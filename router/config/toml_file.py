"""Validation of TOML text by a pydantic model: all problems at once, each with its line.

pydantic names the key that is wrong, but `tomllib` does not report the line of a key. `key_lines` finds it for the
forms that people write: table headers and `key = value` lines, with keys bare, quoted or dotted. A key inside an inline
table has the line of the table.
"""

from __future__ import annotations

import re
import tomllib
from typing import Any, TypeVar, get_args

from pydantic import BaseModel, ConfigDict, ValidationError
from pydantic_core import ErrorDetails

from inflight.router.config.watched_file import ContentError, Problem

Path = tuple[str, ...]
Location = tuple[str | int, ...]
Model = TypeVar("Model", bound=BaseModel)

# A validator's error may name a key below the value that it checks: `PydanticCustomError(…, {BELOW: location})`.
BELOW = "below"
# pydantic appends this to a key whose name is wrong.
KEY = "[key]"

EXPECTED = {
    "bool_type": "true or false",
    "datetime_type": "a date and time, as 2027-01-01T00:00:00Z",
    "dict_type": "a table",
    "float_type": "a number",
    "int_type": "a whole number",
    "list_type": "a list",
    "model_type": "a table",
    "string_type": "text",
    "timezone_aware": "a date and time with an offset, as 2027-01-01T00:00:00Z",
}

_KEY = r"""(?:[A-Za-z0-9_-]+|"(?:[^"\\]|\\.)*"|'[^']*')"""
_DOTTED = rf"{_KEY}(?:\s*\.\s*{_KEY})*"
_HEADER = re.compile(rf"\s*\[\s*({_DOTTED})\s*\]")
_ARRAY_HEADER = re.compile(rf"\s*\[\[\s*({_DOTTED})\s*\]\]")
_ASSIGNMENT = re.compile(rf"\s*({_DOTTED})\s*=")
_DECODE_ERROR_LINE = re.compile(r"\(at line (\d+),")


class Table(BaseModel):
    """A table with a fixed set of keys and strictly typed values."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True)


def read_toml(source: str, model: type[Model], context: Any = None, *, shows_values: bool = True) -> Model:
    """Returns the validated content; `context` is passed to the validators. Problems repeat wrong values only if
    `shows_values`. Raises `ContentError`."""
    try:
        content = tomllib.loads(source)
    except (ValueError, RecursionError) as error:  # also numbers too long and nesting too deep for Python
        raise ContentError((Problem(_error_line(error, source), f"is not TOML: {error}"),)) from None
    try:
        return model.model_validate(content, context=context)
    except ValidationError as error:
        lines = key_lines(source)
        problems = [_problem(one, model, lines, shows_values) for one in error.errors(include_url=False)]
    raise ContentError(tuple(sorted(problems, key=lambda problem: problem.line or 0)))


def key_lines(source: str) -> dict[Path, int]:
    """Returns the line, counted from 1, of each table and key where it first stands, or of its first key. The tables of
    `[[name]]` are `name`, `0`, …"""
    lines: dict[Path, int] = {}
    table: Path = ()
    lengths: dict[Path, int] = {}
    for number, line in enumerate(source.split("\n"), start=1):
        path = table
        if header := _ARRAY_HEADER.match(line):
            array = _split(header[1])
            lengths[array] = lengths.get(array, 0) + 1
            path = table = (*array, str(lengths[array] - 1))
        elif header := _HEADER.match(line):
            path = table = _split(header[1])
        elif assignment := _ASSIGNMENT.match(line):
            path = table + _split(assignment[1])
        for length in range(1, len(path) + 1):
            lines.setdefault(path[:length], number)
    return lines


def key_line(lines: dict[Path, int], path: Path) -> int | None:
    """Returns the line of a key, or of the nearest table around it that is known; None for the whole text."""
    return next((lines[path[:length]] for length in range(len(path), 0, -1) if path[:length] in lines), None)


def _problem(error: ErrorDetails, model: type[BaseModel], lines: dict[Path, int], shows_values: bool) -> Problem:
    below: Location = error.get("ctx", {}).get(BELOW, ())
    location = tuple(part for part in (*error["loc"], *below) if part != KEY)
    text = _text(error, model)
    value = error["input"]
    is_wrong_value = isinstance(value, str | int | float) and error["type"] != "extra_forbidden"
    if shows_values and is_wrong_value and KEY not in error["loc"]:
        text = f"is {value!r:.80}; {text}"
    return Problem(key_line(lines, tuple(map(str, location))), f"{_name(location)}: {text}")


def _text(error: ErrorDetails, model: type[BaseModel]) -> str:
    context = error.get("ctx", {})
    match error["type"]:
        case "extra_forbidden":
            known = _type_at(model, error["loc"][:-1]).model_fields
            return f"is not known; known: {', '.join(known)}"
        case "missing":
            return "is missing"
        case "too_short" | "string_too_short":
            return "must not be empty"
        case "too_long":
            return f"must have at most {context['max_length']} entries"
        case "value_error":
            return str(context["error"])
        case "list_type" if _is_table(_type_at(model, (*error["loc"], 0))):
            return f"must be tables [[{error['loc'][-1]}]]"
        case kind:
            expected = EXPECTED.get(kind)
            return f"must be {expected}" if expected else error["msg"].replace("Input should ", "must ")


def _name(location: Location) -> str:
    """Returns `tenants.acme.weight`, or `key number 2, hash` below a list."""
    name = ""
    for part in location:
        if isinstance(part, int):
            name += f" number {part + 1},"
        else:
            name += (" " if name.endswith(",") else "." if name else "") + part
    return name.removesuffix(",")


def _type_at(model: type[BaseModel], location: Location) -> Any:
    """Returns the annotation at a location. Tables are models, or dictionaries or lists of one type."""
    found: Any = model
    for part in location:
        found = found.model_fields[str(part)].annotation if _is_table(found) else get_args(found)[-1]
    return found


def _is_table(annotation: Any) -> bool:
    return isinstance(annotation, type) and issubclass(annotation, BaseModel)


def _error_line(error: Exception, source: str) -> int:
    """Returns the line of a syntax error; the last line if the error does not say."""
    found = _DECODE_ERROR_LINE.search(str(error))
    return int(found[1]) if found else source.count("\n") + 1


def _split(dotted: str) -> Path:
    """Returns the parts of a dotted key. Text inside a multi-line string that only looks like a key has none."""
    path: list[str] = []
    try:
        table: object = tomllib.loads(f"{dotted} = 0")
    except tomllib.TOMLDecodeError:
        return ()
    while isinstance(table, dict):
        ((key, table),) = table.items()
        path.append(key)
    return tuple(path)
