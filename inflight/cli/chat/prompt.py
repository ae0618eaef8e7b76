"""Input of a chat: messages of one or several lines, from a terminal with editing and a history, or from a pipe.

Only the user can read the history file. Without a terminal there is no history.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

QUOTES = '"""'
MAX_HISTORY_LINES = 1000
PROMPT, MORE = "> ", ". "
LEAVING = "\n(press Ctrl-C again or Ctrl-D to exit)"


def default_history_file(environment: Mapping[str, str] = os.environ) -> Path:
    """Returns the history file, in the state directory of the XDG base directory specification."""
    folder = environment.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(folder).expanduser() / "inflight" / "chat_history"


class Prompt:
    """Reads messages by `read_line`. Shows a prompt on a terminal."""

    def __init__(self, *, is_terminal: bool, read_line: Callable[[str], str] = input) -> None:
        self._is_terminal = is_terminal
        self._read_line = read_line

    def read(self) -> str | None:
        """Returns the user's next message; None at the end of the input or after two interrupts in a row."""
        was_interrupted = False
        while True:
            try:
                return self._read_message()
            except EOFError:
                return None
            except KeyboardInterrupt:
                if was_interrupted or not self._is_terminal:
                    return None
                was_interrupted = True
                print(LEAVING)

    def _read_message(self) -> str:
        line = self._read(PROMPT)
        if line.strip().startswith(QUOTES):
            return self._read_quoted(line.strip().removeprefix(QUOTES))
        lines = [line]
        while lines[-1].endswith("\\"):
            lines[-1] = lines[-1][:-1]
            lines.append(self._read_more())
        return "\n".join(lines).strip()

    def _read_quoted(self, first: str) -> str:
        lines = [first]
        while not lines[-1].rstrip().endswith(QUOTES):
            try:
                lines.append(self._read(MORE))
            except EOFError:
                return "\n".join(lines).strip()
        lines[-1] = lines[-1].rstrip().removesuffix(QUOTES)
        return "\n".join(lines).strip()

    def _read_more(self) -> str:
        try:
            return self._read(MORE)
        except EOFError:
            return ""

    def _read(self, prompt: str) -> str:
        return self._read_line(prompt if self._is_terminal else "")


@contextmanager
def line_editing(history_file: Path | None, commands: Sequence[str]) -> Iterator[None]:
    """Gives `input` editing, completion of commands, and a history in the file; None keeps no history.

    Does nothing without readline.
    """
    try:
        import readline
    except ImportError:
        yield
        return
    readline.set_completer_delims(" \t\n")
    readline.set_completer(_completer(commands))
    readline.parse_and_bind("tab: complete")
    if history_file is not None:
        _read_history(readline, history_file)
    try:
        yield
    finally:
        if history_file is not None:
            _write_history(readline, history_file)


def _completer(commands: Sequence[str]) -> Callable[[str, int], str | None]:
    def complete(text: str, index: int) -> str | None:
        found = [command for command in commands if text.startswith("/") and command.startswith(text)]
        return f"{found[index]} " if index < len(found) else None

    return complete


def _read_history(readline: ModuleType, path: Path) -> None:
    try:
        readline.read_history_file(str(path))
    except FileNotFoundError:
        return
    except OSError as error:
        print(f"cannot read the history {path}: {error.strerror}", file=sys.stderr)


def _write_history(readline: ModuleType, path: Path) -> None:
    readline.set_history_length(MAX_HISTORY_LINES)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT, 0o600))
        path.chmod(0o600)
        readline.write_history_file(str(path))
    except OSError as error:
        print(f"cannot write the history {path}: {error.strerror}", file=sys.stderr)
