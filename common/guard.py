"""A launcher for commands that must end with the process that started them, even after a SIGKILL.

`guarded(command)` runs this file as a script, which becomes the command by `exec` and so keeps its pid. On Linux the
kernel sends SIGKILL when the thread that started the command ends. Elsewhere a small watcher waits for the end of the
starter's pipe; it is a child of the command, so its parent's pid tells whether the command still runs.

Uses only the standard library. Other modules use only `guarded`.
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
    """Returns the command to start instead of `command`. Without the kernel's guard its stdin must be a pipe."""
    mode = "kernel" if by_kernel else "pipe"
    return [sys.executable, "-S", "-E", __file__, mode, str(os.getpid()), *command]


def main(mode: str, starter_pid: int, command: list[str]) -> NoReturn:
    """Sets up the guard and becomes `command`."""
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
    """Forks a child that kills this process when the pipe on its stdin ends."""
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
