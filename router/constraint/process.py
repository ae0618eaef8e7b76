"""A compiling process as its router sees it: started, asked, ended.

Started with a new interpreter, never forked: a fork of a process with gRPC's threads is not safe. `compile` blocks and
belongs on a thread.
"""

from __future__ import annotations

import json
import os
import selectors
import signal
import subprocess
import sys
import time
import weakref
from pathlib import Path

from inflight.router.constraint.source import ConstraintError, ConstraintSource

ROOT = Path(__file__).parents[3]
# Of the wall clock, which runs on while the machine is busy elsewhere. The process ends itself after much less
# processor time.
MAX_WAIT_S = 20.0
# Before each text in a pipe.
LENGTH_BYTES = 4
# The exit code of a process whose allocation failed.
OUT_OF_MEMORY = 3
TOO_LONG = "takes too long to compile; simplify it"
TOO_LARGE = "takes too much memory to compile; simplify it"


class CompilerLostError(Exception):
    """The process is gone, for no fault of the constraint that it had."""


class CompilerFailedError(Exception):
    """The process ended by an error of its own."""


class CompilerTimeoutError(Exception):
    """The process did not answer in time, and has not used its processor time either."""


class CompilingProcess:
    """One process. It can be asked until it ends; `is_alive` tells."""

    def __init__(self) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "inflight.router.constraint.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env=_environment(),
            cwd="/",
            bufsize=0,
        )
        # Ends it also when the router ends.
        self.close = weakref.finalize(self, _end, self._process)

    @property
    def is_alive(self) -> bool:
        """Whether the process can be asked."""
        return self._process.poll() is None

    @property
    def pid(self) -> int:
        return self._process.pid

    def compile(self, source: ConstraintSource, timeout_s: float = MAX_WAIT_S) -> tuple[str, list[str]]:
        """Returns the canonical grammar, and words of its schemas that have no effect. Blocks. Raises
        `ConstraintError`, also for a constraint that ended the process, `CompilerLostError`, `CompilerFailedError` or
        `CompilerTimeoutError`."""
        try:
            answer = self._exchange(source.to_json().encode(), time.monotonic() + timeout_s)
        except (BrokenPipeError, EOFError):
            raise self._death() from None
        except TimeoutError:
            self.close()
            raise CompilerTimeoutError from None
        result = json.loads(answer)
        if "violations" in result:
            raise ConstraintError(result["violations"])
        return result["grammar"], result["ignored"]

    def _exchange(self, source: bytes, until: float) -> bytes:
        assert self._process.stdin is not None
        # The pipe holds less than the longest constraint, but the process reads all of it before it writes.
        view = memoryview(len(source).to_bytes(LENGTH_BYTES, "big") + source)
        while view:
            view = view[self._process.stdin.write(view) :]
        length = int.from_bytes(self._read(LENGTH_BYTES, until), "big")
        return self._read(length, until)

    def _read(self, num_bytes: int, until: float) -> bytes:
        assert self._process.stdout is not None
        parts: list[bytes] = []
        with selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while num_bytes:
                if not selector.select(max(0.0, until - time.monotonic())):
                    raise TimeoutError
                part = os.read(self._process.stdout.fileno(), num_bytes)
                if not part:
                    raise EOFError
                parts.append(part)
                num_bytes -= len(part)
        return b"".join(parts)

    def _death(self) -> Exception:
        """Returns what the end of the process means for the constraint that it had."""
        code = self._process.wait()
        self.close()
        if code == -signal.SIGPROF:
            return ConstraintError([TOO_LONG])
        if code in (-signal.SIGKILL, -signal.SIGTERM):
            return CompilerLostError()
        if code == OUT_OF_MEMORY or code < 0:  # failed allocations in compiled code abort
            return ConstraintError([TOO_LARGE])
        return CompilerFailedError()


def _environment() -> dict[str, str]:
    """Returns the environment without the router's settings, some of which are secret."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("INFLIGHT_")}
    path = os.pathsep.join(part for part in (str(ROOT), kept.get("PYTHONPATH", "")) if part)
    return kept | {"PYTHONPATH": path, "RAYON_NUM_THREADS": "1"}


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.wait()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()
