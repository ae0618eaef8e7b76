"""When a file on disk has changed: its version, and looking at it again and again."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

LOOK_INTERVAL_S = 1.0

# Modification time, size and inode, links followed: an editor may write into the file or put another one in its place,
# and Kubernetes puts another folder behind a link.
FileVersion = tuple[int, int, int]


def version_of(path: Path) -> FileVersion | None:
    """The version that is there now; None for a file that is not. To be taken before reading: what is written in
    between is seen at the next look."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


async def poll(look: Callable[[], None]) -> None:
    """Looks every `LOOK_INTERVAL_S` seconds until cancelled; in a thread, so that a slow disk holds up nobody."""
    while True:
        await asyncio.sleep(LOOK_INTERVAL_S)
        await asyncio.to_thread(look)
