"""Files of a running stack: `state.json`, and the lock that shows that it runs.

The kernel releases the lock (`flock`) when the process ends. `state.json` holds the password of a private Redis, so
only its owner can read it.
"""

from __future__ import annotations

import fcntl
import json
import os
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

DEFAULT_RUN_DIR = Path("run")
STATE_FILE = "state.json"
LOCK_FILE = "stack.lock"


@dataclass(frozen=True, slots=True)
class ProcessState:
    """One process of the stack. `role` is `redis`, `executor`, `router` or `gateway`.

    `http_address` serves its metrics, and a router's dashboard; empty for a process without HTTP.
    """

    name: str
    role: str
    pid: int
    address: str
    log_file: str
    http_address: str = ""


@dataclass(frozen=True, slots=True)
class StackState:
    """A running stack. `address` is the first router's; `ca_file` its authority, empty without TLS."""

    pid: int
    address: str
    redis_url: str
    processes: tuple[ProcessState, ...]
    ca_file: str = ""


class RunFolderLock:
    """The lock that a stack holds on its run directory."""

    def __init__(self, run_dir: Path) -> None:
        self._path = run_dir / LOCK_FILE
        self._descriptor: int | None = None

    def acquire(self) -> bool:
        """Takes the lock; False if another process holds it."""
        descriptor = os.open(self._path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(descriptor)
            return False
        self._descriptor = descriptor
        return True

    def release(self) -> None:
        """Releases the lock if it is held."""
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def write_state(run_dir: Path, state: StackState) -> None:
    """Writes `state.json` atomically."""
    partial = run_dir / f"{STATE_FILE}.{os.getpid()}"
    partial.touch(mode=0o600)
    partial.write_text(json.dumps(asdict(state), indent=2) + "\n", encoding="utf-8")
    partial.replace(run_dir / STATE_FILE)


def remove_state(run_dir: Path) -> None:
    """Removes `state.json` if it exists."""
    (run_dir / STATE_FILE).unlink(missing_ok=True)


def read_state(run_dir: Path) -> StackState | None:
    """Returns the stack that runs in this directory; `None` if there is none or its process has ended."""
    try:
        values: dict[str, Any] = json.loads((run_dir / STATE_FILE).read_text(encoding="utf-8"))
        processes = tuple(ProcessState(**process) for process in values.pop("processes"))
        state = StackState(**values, processes=processes)
    except (OSError, ValueError, TypeError, KeyError):
        return None
    return state if _is_alive(state.pid) else None


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
