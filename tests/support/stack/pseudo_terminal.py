"""A command at a terminal: a process whose standard streams are a pseudo-terminal, and a user who types and reads."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).parents[3]
# For a busy machine; what is expected comes at once.
WAIT_S = 60.0
COLOURS = re.compile(r"\x1b\[[0-9;]*m")
CTRL_C, CTRL_D, UP = "\x03", "\x04", "\x1b[A"


class Terminal:
    """The user's side. `screen` is all that was written so far, with the escape sequences, `text` without colours."""

    def __init__(self, process: subprocess.Popen[bytes], descriptor: int) -> None:
        self.process = process
        self.screen = ""
        self._descriptor = descriptor
        self._read_to = 0

    def type(self, text: str) -> None:
        """Types, without a return."""
        os.write(self._descriptor, text.encode())

    def enter(self, text: str) -> None:
        """Types a line."""
        self.type(f"{text}\r")

    def interrupt_the_prompt(self) -> None:
        """Types Ctrl-C when the process waits for a key. Of a signal that comes just before, Python's line editor takes
        no notice until the next key."""
        end_s, before = time.monotonic() + WAIT_S, ""
        while (now := self._main_thread()) != before or "State:\tS" not in now:
            assert time.monotonic() < end_s, "it never waits for a key"
            before = now
            self._read(time.monotonic() + 0.02)
        self.type(CTRL_C)

    def _main_thread(self) -> str:
        """Whether it sleeps, and how often it has gone to sleep: as before, where it has slept all the time."""
        status = Path(f"/proc/{self.process.pid}/status").read_text()
        return "\n".join(line for line in status.splitlines() if line.startswith(("State:", "voluntary_ctxt")))

    @property
    def text(self) -> str:
        return COLOURS.sub("", self.screen)

    def expect(self, text: str) -> None:
        """Waits until the text appears, in any colour, behind what was expected before."""
        end_s = time.monotonic() + WAIT_S
        while (found := self.text.find(text, self._read_to)) < 0:
            assert self._read(end_s), f"never said {text!r}, but {self.text[self._read_to :][-2000:]!r}"
        self._read_to = found + len(text)

    def wait(self) -> int:
        """Reads to the end and returns the exit code."""
        end_s = time.monotonic() + WAIT_S
        while self._read(end_s):
            pass
        return self.process.wait(WAIT_S)

    def is_cooked(self) -> bool:
        """Whether the terminal is as a shell expects it: lines are edited and echoed, Ctrl-C is a signal."""
        flags = termios.tcgetattr(self._descriptor)[3]
        return all(flags & flag for flag in (termios.ICANON, termios.ECHO, termios.ISIG))

    def _read(self, end_s: float) -> bool:
        """Reads what comes next; False at the end or when the time is over."""
        ready, _, _ = select.select([self._descriptor], [], [], max(0.0, end_s - time.monotonic()))
        if not ready:
            return False
        try:
            came = os.read(self._descriptor, 65_536)
        except OSError:  # Linux' way to say that the other side is closed
            return False
        self.screen += came.decode(errors="replace")
        return bool(came)


@contextmanager
def at_terminal(
    *arguments: str, environment: Mapping[str, str] | None = None, columns: int = 100, lines: int = 30
) -> Iterator[Terminal]:
    """Runs `inflight` with these arguments at a terminal."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", lines, columns, 0, 0))
    variables = {**os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm-256color", **(environment or {})}
    for name in ("INFLIGHT_ADDRESS", "NO_COLOR", "COLUMNS", "LINES"):
        variables.pop(name, None)
    command = [sys.executable, "-m", "inflight.cli.main", *arguments]
    # A session of its own whose terminal this is, so that Ctrl-C is a signal to it.
    process = subprocess.Popen(
        [sys.executable, "-c", TAKE_TERMINAL, *command],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        env=variables,
        start_new_session=True,
    )
    os.close(theirs)  # the process has its own: when that is closed, reading ends
    try:
        yield Terminal(process, ours)
    finally:
        process.kill()
        process.wait()
        os.close(ours)


# A shell ignores SIGINT and SIGQUIT for what it starts in the background, tests for instance; at a terminal they count.
TAKE_TERMINAL = """
import fcntl, os, signal, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
signal.signal(signal.SIGINT, signal.SIG_DFL)
signal.signal(signal.SIGQUIT, signal.SIG_DFL)
os.execv(sys.argv[1], sys.argv[1:])
"""
