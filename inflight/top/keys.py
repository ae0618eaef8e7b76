"""Keys as they are pressed, in the event loop, without a return and without being shown."""

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
    """Calls `on_key` for each key; nothing where nobody sits there. The terminal is afterwards as it was before.

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
    """An escape sequence of an arrow comes in one piece, and is one key."""
    while typed:
        length = 3 if typed.startswith(("\x1b[", "\x1bO")) else 1
        yield typed[:length]
        typed = typed[length:]
