"""A file on disk that is read at start, and again whenever it has changed.

A version that cannot be used changes nothing: the one before it goes on to hold, and the log says what is wrong. The
file is looked at and read in a thread.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

from common.followed import FileVersion, poll, version_of
from common.settings import SettingError
from router.config.file_problems import ContentError

log = logging.getLogger(__name__)

T = TypeVar("T")


class FollowedFile(Generic[T]):
    """What the file says now. `setting` names the setting that it comes from, `what` is what the log calls it; `parse`
    makes its text into content or raises `ContentError`. `on_read` is told of every change: None where it is in force,
    else what is wrong with it. Raises `SettingError` where it cannot be used at the start."""

    def __init__(
        self,
        path: Path,
        setting: str,
        what: str,
        parse: Callable[[str], T],
        on_read: Callable[[str | None], None] = lambda problem: None,
    ) -> None:
        self._on_read = on_read
        self._path = path
        self._what = what
        self._parse = parse
        try:
            self._version, self._content = self._read()
        except _Unusable as error:
            flag = setting.replace("_", "-")
            raise SettingError(f"--{flag} (INFLIGHT_{setting.upper()}): {error}") from None

    @property
    def content(self) -> T:
        """What holds now."""
        return self._content

    async def follow(self) -> None:
        """Looks at the file again and again until cancelled."""
        await poll(self.look)

    def look(self) -> None:
        """Reads the file again if it has changed since the last look."""
        version = version_of(self._path)
        if version == self._version:
            return
        self._version = version  # of a version that cannot be used the log speaks once
        try:
            self._version, self._content = self._read()
        except _Unusable as error:
            log.error("the %s changed and cannot be used; what it said before holds on: %s", self._what, error)
            self._on_read(str(error))
        else:
            log.info("the %s %s changed and is in force", self._what, self._path)
            self._on_read(None)

    def _read(self) -> tuple[FileVersion | None, T]:
        version = version_of(self._path)
        try:
            return version, self._parse(self._path.read_text(encoding="utf-8"))
        except OSError as error:
            raise _Unusable(f"cannot read {str(self._path)!r}: {error.strerror}") from None
        except UnicodeDecodeError as error:
            raise _Unusable(f"{self._path}: is not UTF-8: {error.reason} at byte {error.start}") from None
        except ContentError as error:
            raise _Unusable("; ".join(f"{self._path}, {problem}" for problem in error.problems)) from None


class _Unusable(Exception):
    """The file cannot be used. The text names it, the line and what is allowed."""
