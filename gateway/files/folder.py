"""Contents in a folder, which all gateways share: a local one for one machine, or a volume that several can mount.

A content is written under another name, synchronized to the disk, and renamed.
"""

from __future__ import annotations

import asyncio
import logging
import os
import secrets
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import BinaryIO, TypeVar

from inflight.gateway.files.contents import lost, unavailable

log = logging.getLogger(__name__)

Result = TypeVar("Result")


class Folder:
    """The `Contents` of a folder."""

    def __init__(self, path: Path) -> None:
        """The folder is created with the first content."""
        self._path = path

    async def write(self, name: str, parts: AsyncIterator[bytes]) -> int:
        """Writes a content."""
        path = self._path / name
        partial = path.with_name(f".{path.name}.{secrets.token_hex(6)}")
        num_bytes = 0
        try:
            file = await _done(lambda: _opened(partial))
            try:
                async for part in parts:
                    num_bytes += len(part)
                    await _done(lambda part=part: file.write(part))  # type: ignore[misc]
                await _done(lambda: _synchronize(file))
            finally:
                await _done(file.close)
            await _done(lambda: partial.replace(path))
        except BaseException:
            await _done(lambda: partial.unlink(missing_ok=True))
            raise
        return num_bytes

    async def read(self, name: str, first: int, num_bytes: int) -> bytes:
        """Returns bytes of a content."""

        def read() -> bytes:
            with (self._path / name).open("rb") as file:
                file.seek(first)
                return file.read(num_bytes)

        return await _done(read)

    async def delete(self, name: str) -> None:
        """Deletes a content, and its folder if that is empty now."""

        def delete() -> None:
            path = self._path / name
            path.unlink(missing_ok=True)
            _remove_if_empty(path.parent)

        await _done(delete)

    async def delete_older(self, before_s: float) -> int:
        """Deletes contents by the times of their files."""

        def delete() -> int:
            old = [path for path in _files(self._path) if _modified_s(path) < before_s]
            for path in old:
                path.unlink(missing_ok=True)
                _remove_if_empty(path.parent)
            return len(old)

        return await _done(delete)


async def _done(work: Callable[[], Result]) -> Result:
    """Does work on files in a thread. It is done when this returns, also if the caller is cancelled meanwhile: what is
    done next may close the file."""
    working = asyncio.ensure_future(asyncio.to_thread(work))
    try:
        return await asyncio.shield(working)
    except asyncio.CancelledError:
        await asyncio.wait((working,))
        raise
    except FileNotFoundError:
        raise lost() from None
    except OSError as error:
        log.error("the folder of files: %s", error)
        raise unavailable() from error


def _opened(path: Path) -> BinaryIO:
    path.parent.mkdir(parents=True, exist_ok=True)
    return path.open("wb")


def _synchronize(file: BinaryIO) -> None:
    file.flush()
    os.fsync(file.fileno())


def _files(folder: Path) -> Iterator[Path]:
    for path, _, names in os.walk(folder):
        for name in names:
            yield Path(path, name)


def _modified_s(path: Path) -> float:
    try:
        return path.stat().st_mtime
    except FileNotFoundError:  # another gateway has deleted it
        return float("inf")


def _remove_if_empty(folder: Path) -> None:
    try:
        folder.rmdir()
    except OSError:
        return
