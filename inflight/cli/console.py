"""Exit codes and errors of commands, their console, and how one runs in the foreground.

It does not import gRPC, so that `inflight.cli.main` can set gRPC's environment first.
"""

from __future__ import annotations

import asyncio
import os
import re
import signal
import sys
from collections.abc import Callable, Coroutine, Sequence
from typing import IO, TYPE_CHECKING, Any, NoReturn, cast

if TYPE_CHECKING:
    from rich.console import Console

EXIT_FAILURE = 1
EXIT_USAGE = 2
EXIT_INTERRUPTED = 130

# Without a terminal, lines are as wide as the widest table needs.
PLAIN_WIDTH = 120
BLANKS_AT_THE_END = re.compile(r"[ \t]+(?=\n)|[ \t]+\Z")


class CommandError(Exception):
    """The command failed. The text is for the user."""

    def __init__(self, text: str, exit_code: int = EXIT_FAILURE) -> None:
        super().__init__(text)
        self.exit_code = exit_code


def run_main(main: Callable[[Sequence[str]], int]) -> NoReturn:
    """Runs a command with the arguments of the process, and ends the process with its exit code."""
    try:
        sys.exit(main(sys.argv[1:]))
    except CommandError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)


def run_in_foreground(command: Callable[[], Coroutine[Any, Any, int]]) -> int:
    """Runs the coroutine to its end and returns its exit code; 130 after an interrupt.

    The first signal cancels it, so that its `async with` blocks clean up. The second ends the process, and with it all
    guarded children.
    """
    return asyncio.run(_run(command))


async def _run(command: Callable[[], Coroutine[Any, Any, int]]) -> int:
    running = asyncio.create_task(command())
    was_interrupted = False

    def on_signal() -> None:
        nonlocal was_interrupted
        if was_interrupted:
            os._exit(EXIT_INTERRUPTED)
        was_interrupted = True
        running.cancel()

    loop = asyncio.get_running_loop()
    for number in (signal.SIGINT, signal.SIGTERM):
        loop.add_signal_handler(number, on_signal)
    try:
        return await running
    except asyncio.CancelledError:
        return EXIT_INTERRUPTED


class TrimmedLines:
    """Standard output without trailing blanks, with which tables fill their lines."""

    def __init__(self) -> None:
        self._held = ""

    def write(self, text: str) -> int:
        """Writes the text; trailing blanks are held back until more of their line follows."""
        whole = self._held + text
        kept = BLANKS_AT_THE_END.sub("", whole)
        self._held = whole[len(whole.rstrip(" \t")) :]
        sys.stdout.write(kept)
        return len(text)

    def flush(self) -> None:
        sys.stdout.flush()

    def isatty(self) -> bool:
        """False: only output that does not go to a terminal is trimmed."""
        return False

    def fileno(self) -> int:
        return sys.stdout.fileno()

    @property
    def encoding(self) -> str:
        """Of standard output."""
        return sys.stdout.encoding


def open_console() -> Console:
    """Standard output. Text is printed as it is; it contains no markup."""
    from rich.console import Console  # here: commands that print plain text start sooner without rich

    plain = Console(markup=False, highlight=False)
    if plain.is_terminal:
        return plain
    width = None if "COLUMNS" in os.environ else PLAIN_WIDTH
    return Console(markup=False, highlight=False, width=width, file=cast(IO[str], TrimmedLines()))
