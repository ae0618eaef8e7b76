"""Where in a TOML text a key stands: `tomllib` tells the line of what it cannot read, but not of what it has read.

Pure. Finds what people write into settings: table headers and `key = value` lines, keys bare, quoted or dotted. What
stands inside an inline table is found by the line of the table.
"""

from __future__ import annotations

import re
import tomllib

Path = tuple[str, ...]

_KEY = r"""(?:[A-Za-z0-9_-]+|"(?:[^"\\]|\\.)*"|'[^']*')"""
_DOTTED = rf"{_KEY}(?:\s*\.\s*{_KEY})*"
_HEADER = re.compile(rf"\s*\[\s*({_DOTTED})\s*\]")
_ARRAY_HEADER = re.compile(rf"\s*\[\[\s*({_DOTTED})\s*\]\]")
_ASSIGNMENT = re.compile(rf"\s*({_DOTTED})\s*=")
_DECODE_ERROR_LINE = re.compile(r"\(at line (\d+),")


def key_lines(source: str) -> dict[Path, int]:
    """The line, from 1, on which each table and key first stands. The tables of `[[name]]` are `name`, `0`, …"""
    lines: dict[Path, int] = {}
    table: Path = ()
    lengths: dict[Path, int] = {}
    for number, line in enumerate(source.split("\n"), start=1):
        if header := _ARRAY_HEADER.match(line):
            array = _split(header[1])
            lengths[array] = lengths.get(array, 0) + 1
            table = (*array, str(lengths[array] - 1))
            lines.setdefault(table, number)
        elif header := _HEADER.match(line):
            table = _split(header[1])
            lines.setdefault(table, number)
        elif assignment := _ASSIGNMENT.match(line):
            lines.setdefault(table + _split(assignment[1]), number)
    return lines


def line_of(lines: dict[Path, int], path: Path) -> int | None:
    """The line of a key, or of the nearest table around it that is known; None for the whole text."""
    for length in range(len(path), 0, -1):
        for known, number in lines.items():
            if known[:length] == path[:length]:
                return number
    return None


def error_line(error: Exception, source: str) -> int:
    """The line that a syntax error is on; the last one where the error does not say."""
    found = _DECODE_ERROR_LINE.search(str(error))
    return int(found[1]) if found else source.count("\n") + 1


def _split(dotted: str) -> Path:
    """The parts of a dotted key; none of what only looks like one, inside a text of several lines."""
    path: list[str] = []
    try:
        table: object = tomllib.loads(f"{dotted} = 0")
    except tomllib.TOMLDecodeError:
        return ()
    while isinstance(table, dict):
        ((key, table),) = table.items()
        path.append(key)
    return tuple(path)
