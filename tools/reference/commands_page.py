"""docs/cli.md: every command with its arguments, from the parsers that the commands use."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from inflight.cli.main import ALIASES, COMMANDS, Command
from tools.reference.commands import commands_below, parser_of
from tools.reference.markdown import cell, notice, page, table
from tools.reference.settings_page import settings_classes

INTRODUCTION = """\
# Command line

One command, `inflight`. `inflight COMMAND --help` prints what this page says.

`pip install .` installs the commands that use routers. The others need an extra, see the table; without it they print
the command that installs it.

The exit status is 0 on success, 1 on failure, 2 for a wrong flag or setting or a missing package, and 130 after an
interrupt. An error is one line on standard error."""

CONNECTION = """\
Flags that many commands share: `--address`, `--tls`, `--ca-file`, `--server-name` and `--api-key-file` say how to reach
a router. Each has an `INFLIGHT_` variable ([client.md](client.md)). The default is the routers of the local stack that
`inflight up` started with the same run directory."""


def commands_page() -> str:
    """The whole page."""
    rows = [
        [f"[`inflight {one.name}`](#inflight-{one.name})", cell(one.summary), f"`{one.extra}`" if one.extra else ""]
        for one in COMMANDS
    ]
    sections = [part for command in COMMANDS for part in _section(command)]
    return page(
        notice("make docs-reference"),
        INTRODUCTION,
        table(("command", "what it does", "extra"), rows),
        CONNECTION,
        *sections,
    )


def _section(command: Command) -> Iterator[str]:
    parser = parser_of(command)
    yield f"## inflight {command.name}"
    others = [alias for alias, name in ALIASES.items() if name == command.name]
    yield f"Also called `inflight {others[0]}`." if others else ""
    yield _sentence(parser.description or command.summary)
    packages = {package for package, _ in settings_classes()}
    if command.name in packages:
        yield f"Its flags are the settings of [configuration.md](configuration.md#{command.name}), and `--config FILE`."
        return
    yield from _form(f"inflight {command.name}", parser)


def _form(name: str, parser: argparse.ArgumentParser) -> Iterator[str]:
    below = commands_below(parser)
    if not below:
        yield "\n".join(("```text", _usage(name, parser), "```"))
        yield _arguments(parser)
    for child_name, child in below.items():
        yield f"### {name} {child_name}"
        yield _sentence(child.description or "")
        yield from _form(f"{name} {child_name}", child)


def _sentence(text: str) -> str:
    if not text:
        return ""
    text = " ".join(text.split()).replace("<", "&lt;")
    return text[:1].upper() + text[1:] + ("" if text.endswith((".", ":")) else ".")


def _usage(name: str, parser: argparse.ArgumentParser) -> str:
    words = [name]
    has_options = any(action.option_strings and not _is_help(action) for action in parser._actions)
    words += ["[options]"] if has_options else []
    for action in parser._actions:
        if not action.option_strings:
            value = _value(action)
            words.append({"?": f"[{value}]", "*": f"[{value} ...]", "+": f"{value} ..."}.get(str(action.nargs), value))
    return " ".join(words)


def _arguments(parser: argparse.ArgumentParser) -> str:
    rows = [[_names(action), cell(_meaning(parser, action))] for action in parser._actions if not _is_help(action)]
    return table(("argument", "what it is"), rows) if rows else ""


def _names(action: argparse.Action) -> str:
    value = "" if action.nargs == 0 else f" {_value(action)}"
    if not action.option_strings:
        return f"`{_value(action)}`"
    return ", ".join(f"`{option}{value}`" for option in action.option_strings)


def _value(action: argparse.Action) -> str:
    if isinstance(action.metavar, str):
        return action.metavar
    if action.choices is not None:
        return "{" + ",".join(map(str, action.choices)) + "}"
    return action.dest.upper() if action.option_strings else action.dest


def _meaning(parser: argparse.ArgumentParser, action: argparse.Action) -> str:
    assert action.help is not argparse.SUPPRESS
    return (action.help or "") % {**vars(action), "prog": parser.prog}


def _is_help(action: argparse.Action) -> bool:
    return isinstance(action, argparse._HelpAction)
