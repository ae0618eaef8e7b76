"""The processes that vLLM starts: they end with this process, even by SIGKILL.

vLLM's engine is a process of its own and would otherwise stay, with its memory, while a new executor starts. vLLM forks
it, or starts a new interpreter by `multiprocessing`'s spawn, which it does on a CPU and once CUDA is in use. The
engine's own workers end with it.
"""

from __future__ import annotations

import ctypes
import logging
import multiprocessing.spawn
import os
import shlex
import signal
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from inflight.common import guard

log = logging.getLogger(__name__)

# An interpreter that guards what it runs. The resource tracker of `multiprocessing` is to outlive the process that
# started it: it removes the shared memory that is left.
SCRIPT = """#!/bin/sh
case "$*" in *resource_tracker*) exec {python} "$@";; esac
exec {guarded} {python} "$@"
"""


@contextmanager
def ending_with_this_process() -> Iterator[None]:
    """Guards the processes that are started, and have begun to run, within. Linux only; elsewhere it does nothing."""
    if not guard.HAS_KERNEL_GUARD:
        yield
        return
    with _guarded_forks(), _guarded_spawns():
        yield


@contextmanager
def _guarded_forks() -> Iterator[None]:
    is_active, starter = True, 0

    def note() -> None:
        nonlocal starter
        starter = os.getpid()

    def in_child() -> None:
        if is_active:
            ctypes.CDLL(None).prctl(guard.PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != starter:
                os._exit(1)

    # It cannot be taken back. The processes that are forked inherit it, for those that they fork.
    os.register_at_fork(before=note, after_in_child=in_child)
    try:
        yield
    finally:
        is_active = False


@contextmanager
def _guarded_spawns() -> Iterator[None]:
    before = multiprocessing.spawn.get_executable()
    with tempfile.TemporaryDirectory(prefix="inflight-") as folder:
        script = Path(folder) / "python"
        words = [shlex.quote(word) for word in guard.guarded((), by_kernel=True)]
        script.write_text(SCRIPT.format(python=shlex.quote(sys.executable), guarded=" ".join(words)))
        script.chmod(0o700)
        if os.access(script, os.X_OK):
            multiprocessing.spawn.set_executable(str(script))
        else:
            log.warning("%s forbids programs: vLLM's engine will not end with a killed executor", folder)
        try:
            yield
        finally:
            multiprocessing.spawn.set_executable(before)
