"""Which process listens on a port, if this user may see it (Linux only)."""

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
    sockets = _listening_sockets(port)
    if not sockets:
        return None
    for process in PROC.glob("[0-9]*"):
        if _holds(process, sockets):
            return PortHolder(int(process.name), _command(process))
    return None


def is_listening(pid: int, port: int) -> bool:
    """Whether a process of this user listens on a TCP port. True as well where no listener can be seen."""
    sockets = _listening_sockets(port)
    return not sockets or _holds(PROC / str(pid), sockets)


def _listening_sockets(port: int) -> set[str]:
    """Returns the sockets that listen on a port, as descriptors link to them. In /proc/net/tcp the second column is
    the local address, `hex:hex port`, the fourth the state, and the tenth the inode."""
    sockets = set()
    for table in TABLES:
        try:
            lines = (PROC / table).read_text(encoding="ascii").splitlines()[1:]
        except OSError:
            continue
        for columns in (line.split() for line in lines):
            if columns[3] == LISTENING and int(columns[1].rpartition(":")[2], 16) == port:
                sockets.add(f"socket:[{columns[9]}]")
    return sockets


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
