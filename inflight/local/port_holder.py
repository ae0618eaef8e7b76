"""The process that listens on a port, if this user may see it (Linux only)."""

from __future__ import annotations

import os
import shlex
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")
TABLES = ("net/tcp", "net/tcp6")
LISTENING = "0A"  # include/net/tcp_states.h
MAX_CHARACTERS = 60


@dataclass(frozen=True, slots=True)
class PortHolder:
    """A process that listens. `command` is how it was started, shortened."""

    pid: int
    command: str


def holder_of(port: int) -> PortHolder | None:
    """Returns the process that listens on a TCP port; None if there is none or it cannot be seen."""
    sockets = {f"socket:[{inode}]" for inode in _listening_inodes(port)}
    if not sockets:
        return None
    for process in PROC.glob("[0-9]*"):
        if _holds(process, sockets):
            return PortHolder(int(process.name), _command(process))
    return None


def _listening_inodes(port: int) -> set[str]:
    """Returns the inodes in /proc/net/tcp: local address `hex:hex port`, state in the fourth column, inode in the
    tenth."""
    inodes = set()
    for table in TABLES:
        try:
            lines = (PROC / table).read_text(encoding="ascii").splitlines()[1:]
        except OSError:
            continue
        for columns in (line.split() for line in lines):
            if columns[3] == LISTENING and int(columns[1].rpartition(":")[2], 16) == port:
                inodes.add(columns[9])
    return inodes


def _holds(process: Path, sockets: set[str]) -> bool:
    try:
        return any(os.readlink(descriptor) in sockets for descriptor in (process / "fd").iterdir())
    except OSError:  # of another user, or ended
        return False


def _command(process: Path) -> str:
    """Returns `inflight router` for a process of this project, otherwise its command line."""
    try:
        words = (process / "cmdline").read_bytes().decode(errors="replace").rstrip("\0").split("\0")
    except OSError:
        return "a process"
    if "inflight.cli.main" in words[:-1]:
        return f"inflight {words[words.index('inflight.cli.main') + 1]}"
    text = shlex.join([Path(words[0]).name, *words[1:]])
    return text if len(text) <= MAX_CHARACTERS else f"{text[:MAX_CHARACTERS]}…"
