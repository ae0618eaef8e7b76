"""The processes of stacks as forks of one that has loaded their code, which takes most of the time of a start."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from inflight.bench.fleet.fork_server import start_copy
from inflight.local.process import ChildProcess


@contextmanager
def forked_processes() -> Iterator[None]:
    """Forks the processes that are started within as `python -P -m MODULE`; others start as ever."""
    begin = ChildProcess.start

    async def start(
        name: str,
        role: str,
        address: str,
        command: Sequence[str],
        log_file: Path,
        environment: Mapping[str, str],
        http_address: str = "",
    ) -> ChildProcess:
        if tuple(command[:3]) != (sys.executable, "-P", "-m"):
            return await begin(name, role, address, command, log_file, environment, http_address)
        process = await start_copy(command, log_file, {**os.environ, **environment})
        return ChildProcess(name, role, address, log_file, process, http_address)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ChildProcess, "start", start)
        yield
