"""Keys in the event loop as they are pressed, without echo."""

from __future__ import annotations

import asyncio
import os
import sys
import termios
import tty
from collections.abc import Callable, Iterator
from contextlib import contextmanager

MAX_BYTES = 64


@contextmanager
def keyboard(on_key: Callable[[str], None]) -> Iterator[None]:
    """Calls `on_key` for each key, and restores the terminal at the end. Does nothing without a terminal.

    Ctrl-C stays a signal.
    """
    if not sys.stdin.isatty():
        yield
        return
    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    loop = asyncio.get_running_loop()

    def read() -> None:
        typed = os.read(descriptor, MAX_BYTES).decode(errors="replace")
        if not typed:
            loop.remove_reader(descriptor)
        for key in _keys(typed):
            on_key(key)

    tty.setcbreak(descriptor)
    loop.add_reader(descriptor, read)
    try:
        yield
    finally:
        loop.remove_reader(descriptor)
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)


def _keys(typed: str) -> Iterator[str]:
    """Splits the input into keys. An arrow's escape sequence is one key and arrives in one piece."""
    while typed:
        length = 3 if typed.startswith(("\x1b[", "\x1bO")) else 1
        yield typed[:length]
        typed = typed[length:]
