"""Python processes as copies of one that has loaded their code, in a tenth of a second instead of ten.

For short runs, in which a process that dies has to be back soon. The copies are forks of Python's fork server, with an
id, a session and memory of their own. They end with the fork server, which ends with this process. They can only be
`python -P -m MODULE …`.
"""

from __future__ import annotations

import asyncio
import ctypes
import multiprocessing
import os
import runpy
import signal
import sys
import traceback
from collections.abc import Mapping, Sequence
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any, NoReturn

from inflight.common.guard import PR_SET_PDEATHSIG
from inflight.executor.entry import SPIN_COUNT

CODE = (
    *("inflight.executor.main", "inflight.router.main", "inflight.gateway.main"),
    "transformers.models.llama.modeling_llama",
)


class Copy:
    """A forked process, with the interface of asyncio's processes."""

    def __init__(self, process: ForkServerProcess) -> None:
        self._process = process
        self._ended = asyncio.Event()
        asyncio.get_running_loop().add_reader(process.sentinel, self._on_end)

    @property
    def pid(self) -> int:
        assert self._process.pid is not None
        return self._process.pid

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode if self._ended.is_set() else None

    def terminate(self) -> None:
        """Asks it to end. Raises `ProcessLookupError` if it has."""
        if self._ended.is_set():
            raise ProcessLookupError
        os.kill(self.pid, signal.SIGTERM)

    async def wait(self) -> int:
        """Waits for its end and returns the exit code."""
        await self._ended.wait()
        assert self._process.exitcode is not None
        return self._process.exitcode

    def _on_end(self) -> None:
        asyncio.get_running_loop().remove_reader(self._process.sentinel)
        self._ended.set()


async def start_copy(command: Sequence[str], log_file: Path, environment: Mapping[str, str]) -> Copy:
    """Returns a copy that runs `python -P -m MODULE …`, its output going to `log_file`. Linux only."""
    interpreter, *options, module = command[:4]
    assert (interpreter, options) == (sys.executable, ["-P", "-m"])
    os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)  # the fork server has it when it loads torch
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(CODE))
    process = context.Process(target=_become, args=(module, command[4:], str(log_file), dict(environment)))
    await asyncio.to_thread(process.start)  # the first one waits until everything is loaded
    return Copy(process)


def _become(module: str, arguments: Sequence[str], log_file: str, environment: Mapping[str, str]) -> NoReturn:
    """Is the copy from now on, and never returns."""
    code: Any = 1
    try:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        os.setsid()
        log = os.open(log_file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.environ.update(environment)
        sys.argv = [module, *arguments]
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        code = 0
    except SystemExit as ended:
        code = ended.code or 0
    except BaseException:
        traceback.print_exc()
        raise
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code if isinstance(code, int) else 1)
