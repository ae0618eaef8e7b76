"""A fork server: Python processes as copies of one that has loaded its code, in a tenth of a second instead of ten.

For short runs, in which a process that dies has to be back soon. The copies are processes like any other, with an id, a
session and memory of their own. They end with the fork server, which ends with this process. They can only be
`python -m MODULE …`.
"""

from __future__ import annotations

import asyncio
import ctypes
import itertools
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn, Self

from inflight.common.guard import PR_SET_PDEATHSIG, guarded

LOAD_TIMEOUT_S = 120.0
CHUNK_BYTES = 64 * 1024


class Copy:
    """A forked process, with the interface of asyncio's processes."""

    def __init__(self) -> None:
        self.pid = 0
        self.returncode: int | None = None
        self.started = asyncio.Event()
        self.ended = asyncio.Event()

    def terminate(self) -> None:
        """Asks it to end. Raises `ProcessLookupError` if it has."""
        if self.returncode is not None:
            raise ProcessLookupError
        os.kill(self.pid, signal.SIGTERM)

    async def wait(self) -> int:
        """Waits for its end and returns the exit code."""
        await self.ended.wait()
        assert self.returncode is not None
        return self.returncode


class ForkServer:
    """The process that is copied. `async with ForkServer(log_file) as fork_server`; Linux only."""

    def __init__(self, log_file: Path) -> None:
        self._log_file = log_file
        self._copies: dict[int, Copy] = {}
        self._numbers = itertools.count()

    async def __aenter__(self) -> Self:
        ours, theirs = socket.socketpair()
        command = guarded([sys.executable, "-P", "-m", "inflight.bench.fleet.fork_server", str(theirs.fileno())])
        with self._log_file.open("wb") as log, theirs:
            self._process = await asyncio.create_subprocess_exec(
                *command,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                pass_fds=(theirs.fileno(),),
            )
        reader, self._writer = await asyncio.open_unix_connection(sock=ours)
        async with asyncio.timeout(LOAD_TIMEOUT_S):
            await reader.readline()  # it has loaded everything
        self._following = asyncio.create_task(self._follow(reader), name="fork-server")
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        self._following.cancel()
        self._writer.close()
        self._process.kill()
        await self._process.wait()

    async def start(self, command: Sequence[str], log_file: Path, environment: Mapping[str, str]) -> Copy:
        """Returns a copy that runs `python -P -m MODULE …`, its output going to `log_file`."""
        interpreter, *options, module = command[:4]
        assert (interpreter, options) == (sys.executable, ["-P", "-m"])
        arguments = command[4:]
        number, copy = next(self._numbers), Copy()
        self._copies[number] = copy
        asked = [number, module, arguments, str(log_file), dict(environment)]
        self._writer.write(json.dumps(asked).encode() + b"\n")
        await self._writer.drain()
        await copy.started.wait()
        return copy

    async def _follow(self, reader: asyncio.StreamReader) -> None:
        while line := await reader.readline():
            number, what, value = json.loads(line)
            copy = self._copies[number]
            if what == "pid":
                copy.pid = value
                copy.started.set()
            else:
                copy.returncode = value
                copy.ended.set()


def main(descriptor: int) -> None:
    """Loads everything, and forks copies on request until its socket closes."""
    _load()
    connection = socket.socket(fileno=descriptor)
    woken, waking = socket.socketpair()
    waking.setblocking(False)
    signal.signal(signal.SIGCHLD, lambda number, frame: None)
    signal.set_wakeup_fd(waking.fileno())
    ours = (connection, woken, waking)
    connection.sendall(b"ready\n")
    numbers: dict[int, int] = {}
    buffered = b""
    while True:
        readable, _, _ = select.select([connection, woken], [], [])
        if woken in readable:
            woken.recv(CHUNK_BYTES)
        if connection in readable:
            received = connection.recv(CHUNK_BYTES)
            if not received:
                return
            *lines, buffered = (buffered + received).split(b"\n")
            for line in lines:
                number, *asked = json.loads(line)
                pid = os.fork()
                if pid == 0:
                    _become(ours, *asked)
                numbers[pid] = number
                _say(connection, number, "pid", pid)
        for pid, code in _ended():
            _say(connection, numbers.pop(pid), "code", code)


def _load() -> None:
    from inflight.executor.entry import SPIN_COUNT

    os.environ.setdefault("GOMP_SPINCOUNT", SPIN_COUNT)
    for module in ("inflight.executor.main", "inflight.router.main", "transformers.models.llama.modeling_llama"):
        __import__(module)


def _say(connection: socket.socket, number: int, what: str, value: int) -> None:
    connection.sendall(json.dumps([number, what, value]).encode() + b"\n")


def _ended() -> list[tuple[int, int]]:
    """Copies that have ended, with their exit codes."""
    ended: list[tuple[int, int]] = []
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return ended
        if pid == 0:
            return ended
        ended.append((pid, os.waitstatus_to_exitcode(status)))


def _become(
    not_ours: Sequence[socket.socket],
    module: str,
    arguments: Sequence[str],
    log_file: str,
    environment: Mapping[str, str],
) -> NoReturn:
    """Is the copy from now on, and never returns."""
    code: Any = 1
    try:
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        for inherited in not_ours:
            inherited.close()
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


if __name__ == "__main__":
    main(int(sys.argv[1]))
