"""The parser of a command's flags. A usage error is one line and another that points to the help."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NoReturn

from inflight.cli.console import EXIT_USAGE


class CommandParser(argparse.ArgumentParser):
    """argparse whose errors are short and name the nearest flag."""

    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        parsed, unknown = self.parse_known_args(args, namespace)
        if unknown:
            self.error(_about_unknown(unknown, _flags(self)))
        return parsed

    def error(self, message: str) -> NoReturn:
        """Ends the command with a usage error."""
        self.exit(EXIT_USAGE, f"error: {message}\n{self.prog} --help lists its flags\n")


def nearest(name: str, known: Iterable[str], mark: str = "") -> str:
    """Returns `; did you mean …?` if one of the known names is close, else nothing."""
    close = difflib.get_close_matches(name, list(known), n=1)
    return f"; did you mean {mark}{close[0]}{mark}?" if close else ""


def _about_unknown(unknown: Sequence[str], flags: Sequence[str]) -> str:
    flag = next((word.partition("=")[0] for word in unknown if word.startswith("-")), None)
    return f"unexpected argument {unknown[0]!r}" if flag is None else f"unknown flag {flag}{nearest(flag, flags)}"


def _flags(parser: argparse.ArgumentParser) -> list[str]:
    """Returns the flags of the parser and of the commands below it: argparse leaves what those do not know to the first
    one."""
    below = (action for action in parser._actions if isinstance(action, argparse._SubParsersAction))
    return [*parser._option_string_actions, *(flag for action in below for flag in _flags_of_choices(action.choices))]


def _flags_of_choices(choices: dict[str, argparse.ArgumentParser]) -> Iterator[str]:
    for child in choices.values():
        yield from _flags(child)
