"""Detection of changed files by polling their versions."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

POLL_INTERVAL_S = 1.0

# Modification time, size and inode, with links resolved: an editor may write into the file or replace it, and
# Kubernetes redirects a link to another folder.
FileVersion = tuple[int, int, int]


def version_of(path: Path) -> FileVersion | None:
    """Returns the current version; None if the file does not exist. Take it before reading: a write in between is then
    detected by the next poll."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


async def poll(check: Callable[[], None]) -> None:
    """Calls `check` every `POLL_INTERVAL_S` seconds until cancelled, in a thread, so that a slow disk does not block
    the event loop."""
    while True:
        await asyncio.sleep(POLL_INTERVAL_S)
        await asyncio.to_thread(check)
