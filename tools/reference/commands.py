"""The command line as its parsers describe it: asks every command for its parser, and runs none.

A command's function makes its parser and has it parse first of all, so parsing is where it is stopped. What stands in
the parser is the same for every version of Python, which the text of `--help` is not."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NoReturn

import inflight.common.settings
from inflight.cli.main import COMMANDS, Command
from tools.reference.settings_page import settings_classes


class _Found(BaseException):
    """Carries a parser out of the command that made it; past whatever the command does about errors."""

    def __init__(self, parser: argparse.ArgumentParser) -> None:
        super().__init__()
        self.parser = parser


def parser_of(command: Command) -> argparse.ArgumentParser:
    """The parser of one command. That of a process follows from its settings alone, which load no model's code."""
    settings = dict(settings_classes()).get(command.name)
    if settings is not None:
        return inflight.common.settings.parser_of(settings, f"inflight {command.name}")
    module_name, _, function_name = command.run.partition(":")
    function = getattr(importlib.import_module(module_name), function_name)
    with _no_parsing():
        try:
            function(["--help"])
        except _Found as found:
            return found.parser
    raise AssertionError(f"inflight {command.name} parses no arguments")


def parsers() -> dict[str, argparse.ArgumentParser]:
    """The parser of every command by the command's name, in the order of `inflight --help`."""
    return {command.name: parser_of(command) for command in COMMANDS}


def commands_below(parser: argparse.ArgumentParser) -> dict[str, argparse.ArgumentParser]:
    """The commands that a command has of its own, such as `inflight key new`."""
    return {
        name: child
        for action in parser._actions
        if isinstance(action, argparse._SubParsersAction)
        for name, child in action.choices.items()
    }


@contextmanager
def _no_parsing() -> Iterator[None]:
    def stop(parser: argparse.ArgumentParser, args: Sequence[str] | None = None, namespace: object = None) -> NoReturn:
        raise _Found(parser)

    original = argparse.ArgumentParser.parse_known_args
    argparse.ArgumentParser.parse_known_args = stop  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        argparse.ArgumentParser.parse_known_args = original  # type: ignore[method-assign]
