"""Disk cache of results that are costly to make: each is built once and shared by processes.

Invariants: a path in the cache is complete or absent, because it is built aside and renamed into place; one process
builds, the others wait for it; nothing in the cache is ever changed. It is always safe to delete the folder.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

CACHE_VARIABLE = "INFLIGHT_CACHE_DIR"


class CacheError(OSError):
    """The cache cannot be written. The text names the folder and a remedy."""


def cache_folder() -> Path:
    """Returns `$INFLIGHT_CACHE_DIR`, or `~/.cache/inflight`."""
    chosen = os.environ.get(CACHE_VARIABLE)
    return Path(chosen).expanduser() if chosen else Path.home() / ".cache" / "inflight"


def build_once(target: Path, build: Callable[[Path], None]) -> Path:
    """Returns `target`. If it does not exist, `build` makes it at the path that it is given.

    An exception of `build` is passed on and leaves nothing behind, so the next caller tries again.
    """
    if target.exists():
        return target
    from filelock import FileLock  # only where something is built: `inflight doctor` runs without the extra `serve`

    lock = FileLock(target.parent / f".{target.name}.lock")
    try:
        target.parent.mkdir(parents=True, exist_ok=True)
        lock.acquire()
    except OSError as error:
        raise CacheError(
            f"cannot write to {target.parent} ({error.strerror}); set {CACHE_VARIABLE} to a writable folder"
        ) from error
    try:
        if not target.exists():
            _build(target, build)
    finally:
        lock.release()
    return target


def _build(target: Path, build: Callable[[Path], None]) -> None:
    scratch = Path(tempfile.mkdtemp(prefix=f".{target.name}.", dir=target.parent))
    try:
        build(scratch / target.name)
        os.replace(scratch / target.name, target)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
