"""One child process of the stack, and its log.

A child has its own process group, so that the terminal's Ctrl-C reaches only this process, and is guarded: it ends with
this process.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
from collections import deque
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, Self

from inflight.common.guard import HAS_KERNEL_GUARD, guarded


class RunningProcess(Protocol):
    """The part of `asyncio.subprocess.Process` that is used here."""

    @property
    def pid(self) -> int:
        """Its process id."""
        ...

    @property
    def returncode(self) -> int | None:
        """Its exit code; negative for a signal, `None` while it runs."""
        ...

    def terminate(self) -> None:
        """Sends SIGTERM. Raises `ProcessLookupError` if it has ended."""
        ...

    async def wait(self) -> int:
        """Waits for its end and returns the exit code."""
        ...


@dataclass(slots=True, eq=False)
class ChildProcess:
    """A running child, or one that has ended."""

    name: str
    role: str
    address: str
    log_file: Path
    process: RunningProcess
    http_address: str = ""

    @classmethod
    async def start(
        cls,
        name: str,
        role: str,
        address: str,
        command: Sequence[str],
        log_file: Path,
        environment: Mapping[str, str],
        http_address: str = "",
    ) -> Self:
        """Starts `command` with its output to `log_file`, truncated, and `environment` added to this process's."""
        with log_file.open("wb") as log:
            process = await asyncio.create_subprocess_exec(
                *guarded(command),
                stdin=subprocess.DEVNULL if HAS_KERNEL_GUARD else subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                env={**os.environ, **environment},
            )
        return cls(name, role, address, log_file, process, http_address)

    @property
    def pid(self) -> int:
        """Its process id."""
        return self.process.pid

    @property
    def exit_code(self) -> int | None:
        """Its exit code; negative for a signal, `None` while it runs."""
        return self.process.returncode

    async def wait(self) -> int:
        """Waits for its end and returns the exit code."""
        return await self.process.wait()

    async def stop(self, grace_s: float) -> None:
        """Sends SIGTERM, and after `grace_s` seconds kills it and its children."""
        if self.exit_code is not None:
            return  # its pid may be reused
        with suppress(ProcessLookupError):
            self.process.terminate()
        try:
            with suppress(TimeoutError):
                async with asyncio.timeout(grace_s):
                    await self.process.wait()
        finally:
            self.kill()
        await self.process.wait()

    def kill(self) -> None:
        """Kills it and its children."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)

    def log_tail(self, num_lines: int = 12) -> list[str]:
        """Returns the last lines of its log."""
        with self.log_file.open(encoding="utf-8", errors="replace") as log:
            return [line.rstrip() for line in deque(log, maxlen=num_lines)]
