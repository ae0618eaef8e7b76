"""The commands of a chat, which are lines that begin with a slash: a table of functions.

A command that fails returns the reason, changes nothing and does not end the chat.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from inflight.cli.chat.conversation import Conversation, ConversationError
from inflight.common.parameters import LARGEST_INTEGERS, PARAMETERS, SAMPLING_NUMBERS, Kind
from inflight.requests import PRIORITIES, GenerateOptions

UNSET = "default"


# What `/set` takes. The router checks the values again; checking them here gives an answer at once.
SETTINGS = (
    *(one.name for one in SAMPLING_NUMBERS),
    *("bad_words", "seed", "max_tokens", "min_tokens", "stop", "priority", "tenant", "deadline_s"),
)
_READ: Mapping[Kind, Callable[[str], Any]] = {
    **dict.fromkeys((Kind.FLOAT, Kind.DURATION), float),
    **dict.fromkeys(LARGEST_INTEGERS, int),
    Kind.TEXTS: lambda text: [text],
}


def _value(name: str, text: str) -> Any:
    """Reads and checks a value of `/set`. Raises `ValueError` with the reason."""
    parameter = PARAMETERS[name]
    try:
        value = _READ.get(parameter.kind, str)(text)
    except ValueError:
        raise ValueError(f"{text!r} is not a number") from None
    if name == "priority" and value not in PRIORITIES:
        raise ValueError(f"{text!r} is not one of {', '.join(PRIORITIES)}")
    if not parameter.allows(value):
        raise ValueError(f"is {text}; must be {parameter.rule}")
    return value


@dataclass(slots=True)
class ChatState:
    """The state that commands change. `model_names` asks the router."""

    conversation: Conversation
    model_names: Callable[[], list[str]]
    options: GenerateOptions = field(default_factory=lambda: GenerateOptions())
    has_left: bool = False


@dataclass(frozen=True, slots=True)
class ChatCommand:
    """A command: its arguments and its summary for the help, and its function."""

    arguments: str
    summary: str
    run: Callable[[ChatState, str], str]


def run_command(state: ChatState, line: str) -> str:
    """Runs a line that begins with a slash and returns the text to show, which may be empty."""
    name, _, argument = line.removeprefix("/").partition(" ")
    command = COMMANDS.get(ALIASES.get(name, name))
    if command is None:
        close = _nearest(name, (*COMMANDS, *ALIASES), "/")
        return f"unknown command /{name}; {close}/help lists the commands"
    return command.run(state, argument.strip())


def _nearest(name: str, known: Iterable[str], mark: str = "") -> str:
    close = difflib.get_close_matches(name, list(known), n=1)
    return f"did you mean {mark}{close[0]}? " if close else ""


def _help(state: ChatState, argument: str) -> str:
    width = max(len(f"/{name} {command.arguments}") for name, command in COMMANDS.items())
    lines = [f"{f'/{name} {command.arguments}':<{width}}  {command.summary}" for name, command in COMMANDS.items()]
    return "\n".join([*lines, *KEYS])


def _reset(state: ChatState, argument: str) -> str:
    state.conversation.reset()
    return "conversation cleared"


def _system(state: ChatState, argument: str) -> str:
    if not argument:
        return state.conversation.system or "no system message"
    state.conversation.system = None if argument == UNSET else argument
    state.conversation.reset()
    done = "set" if state.conversation.system else "removed"
    return f"system message {done}; conversation cleared"


def _save(state: ChatState, argument: str) -> str:
    if not argument:
        return "/save needs a file name"
    try:
        state.conversation.save(Path(argument).expanduser())
    except ConversationError as error:
        return str(error)
    return f"saved {len(state.conversation.messages)} messages to {argument}"


def _load(state: ChatState, argument: str) -> str:
    if not argument:
        return "/load needs a file name"
    try:
        state.conversation.load(Path(argument).expanduser())
    except ConversationError as error:
        return str(error)
    return f"loaded {len(state.conversation.messages)} messages"


def _model(state: ChatState, argument: str) -> str:
    names = state.model_names()
    if not argument:
        chosen = state.options.get("model")
        return "\n".join(f"{'*' if name == chosen else ' '} {name}" for name in names) or "no model is served"
    if argument not in names:
        return f"unknown model {argument!r}; served: {', '.join(names) or 'none'}"
    state.options["model"] = argument
    return f"model is {argument}"


def _set(state: ChatState, argument: str) -> str:
    name, _, text = argument.partition(" ")
    text = text.strip()
    if not name:
        shown = [f"{key} {value}" for key, value in state.options.items()]
        return "\n".join(shown) or f"all settings have the model's defaults; /set takes {', '.join(SETTINGS)}"
    if name not in SETTINGS:
        close = _nearest(name, SETTINGS)
        return f"unknown setting {name}; {close.strip()}" if close else f"/set takes {', '.join(SETTINGS)}"
    options: dict[str, object] = dict(state.options)
    if text in ("", UNSET):
        options.pop(name, None)
        said = f"{name} has the model's default"
    else:
        try:
            options[name] = _value(name, text)
        except ValueError as error:
            return f"{name}: {error}"
        said = f"{name} is {text}"
    state.options = GenerateOptions(**options)  # type: ignore[typeddict-item]
    return said


def _exit(state: ChatState, argument: str) -> str:
    state.has_left = True
    return ""


COMMANDS = {
    "help": ChatCommand("", "list the commands", _help),
    "reset": ChatCommand("", "clear the conversation, keep the system message", _reset),
    "system": ChatCommand(
        "[TEXT]", f"set the system message ({UNSET}: none) and clear the conversation; alone: show it", _system
    ),
    "save": ChatCommand("FILE", "save the conversation", _save),
    "load": ChatCommand("FILE", "continue a saved conversation", _load),
    "model": ChatCommand("[NAME]", "choose a model; alone: list them", _model),
    "set": ChatCommand(
        "[NAME VALUE]", f"set temperature, max_tokens or others ({UNSET}: unset); alone: show them", _set
    ),
    "exit": ChatCommand("", "exit", _exit),
}
ALIASES = {"clear": "reset", "quit": "exit", "?": "help"}
KEYS = (
    'A line that ends in \\ continues on the next. """ starts and ends a text of several lines. // starts one with /.',
    "Ctrl-C stops the answer or clears the line. Ctrl-C twice at the prompt, or Ctrl-D, exits.",
)
