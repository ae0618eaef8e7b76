"""Runs a command that cannot outlive the process which started it, not even one that was killed with SIGKILL.

Started as a script of its own by `guarded(command)`; becomes the command by `exec`, so that its pid is the command's.
On Linux the kernel sends the signal when the thread that started the command ends. Elsewhere a small watcher waits for
the end of the starter's pipe; it is a child of the command, so its parent's pid tells whether that is still there.

Uses the standard library only, and is not imported for its effects: nothing but `guarded` is for others.
"""

from __future__ import annotations

import ctypes
import os
import signal
import sys
from collections.abc import Sequence
from typing import NoReturn

# From <sys/prctl.h>.
PR_SET_PDEATHSIG = 1

HAS_KERNEL_GUARD = sys.platform == "linux"


def guarded(command: Sequence[str], *, by_kernel: bool = HAS_KERNEL_GUARD) -> list[str]:
    """The command to start in place of `command`. Where the kernel does not guard, its stdin must be a pipe."""
    mode = "kernel" if by_kernel else "pipe"
    return [sys.executable, "-S", "-E", __file__, mode, str(os.getpid()), *command]


def main(mode: str, starter_pid: int, command: list[str]) -> NoReturn:
    """Arranges for the end and becomes `command`."""
    if mode == "kernel":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != starter_pid:
            sys.exit("guard: the starter ended before its command began")
    else:
        _start_watcher()
    try:
        os.execvp(command[0], command)
    except OSError as error:
        sys.exit(f"error: cannot run {command[0]}: {error.strerror}")


def _start_watcher() -> None:
    """Leaves a child behind that kills this process when the pipe on its stdin ends."""
    command_pid = os.getpid()
    if os.fork() == 0:
        while os.read(0, 4096):
            pass
        if os.getppid() == command_pid:
            os.kill(command_pid, signal.SIGKILL)
        os._exit(0)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3:])
