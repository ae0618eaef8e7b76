"""Error messages that docs/troubleshooting.md quotes are those of the programs."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator

from tests.contract.test_imports import PACKAGES, REPOSITORY, parsed, sources

PAGE = REPOSITORY / "docs" / "troubleshooting.md"
QUOTED = re.compile(r"^```text\n(.*?)^```", re.DOTALL | re.MULTILINE)
# How logging formats its arguments.
PLACEHOLDER = re.compile(r"%[-.\d]*[sdrfg]")
MIN_LITERAL_CHARACTERS = 14


def quoted_messages() -> list[str]:
    return [line for block in QUOTED.findall(PAGE.read_text(encoding="utf-8")) for line in block.splitlines()]


def patterns_of(tree: ast.Module) -> Iterator[str]:
    """A pattern for each text of a source, with what is formatted left open."""
    for node in ast.walk(tree):
        match node:
            case ast.Constant(value=str(text)):
                parts = PLACEHOLDER.split(text)
            case ast.JoinedStr(values=values):
                parts = [""]
                for value in values:
                    if isinstance(value, ast.Constant):
                        parts[-1] += str(value.value)
                    else:
                        parts.append("")
            case _:
                continue
        if sum(map(len, parts)) >= MIN_LITERAL_CHARACTERS:
            yield ".*?".join(map(re.escape, parts))


@functools.cache
def patterns() -> tuple[re.Pattern[str], ...]:
    return tuple({re.compile(pattern) for path in sources(*PACKAGES) for pattern in patterns_of(parsed(path))})


def is_said(message: str) -> bool:
    """Whether a program can print the message."""
    return any(pattern.search(message) for pattern in patterns())


def test_quoted_messages_are_those_of_the_programs() -> None:
    assert len(quoted_messages()) > 30
    assert not [message for message in quoted_messages() if not is_said(message)]


def test_message_that_no_program_prints_is_found() -> None:
    assert is_said("NOT_FOUND: model: there is no model 'x'; known: none")
    assert not is_said("NOT_FOUND: model: there was no model 'x'; known: none")
