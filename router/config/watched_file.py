"""A file on disk that is read at start and again whenever it changes.

A version that cannot be used has no effect: the previous version stays in force, and the log says what is wrong. The
file is checked and read in a thread.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Generic, TypeVar

from inflight.common.followed import FileVersion, poll, version_of
from inflight.common.settings import SettingError

log = logging.getLogger(__name__)

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Problem:
    """A problem in a file. `line` None: it concerns the whole file."""

    line: int | None
    text: str

    def __str__(self) -> str:
        return self.text if self.line is None else f"line {self.line}: {self.text}"


class ContentError(Exception):
    """The content of a file cannot be used. `problems` lists all that were found."""

    def __init__(self, problems: tuple[Problem, ...]) -> None:
        super().__init__("; ".join(map(str, problems)))
        self.problems = problems


class FileWatcher(Generic[T]):
    """The current content of a file. `setting` is the setting that names the file, `what` the file's name in the log.
    `parse` turns its text into content or raises `ContentError`. `on_read` gets None for a change that is in force,
    else the problem. Raises `SettingError` if the file cannot be used at start."""

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
        """The content in force."""
        return self._content

    async def follow(self) -> None:
        """Checks the file for changes until cancelled."""
        await poll(self.look)

    def look(self) -> None:
        """Reads the file again if it has changed since the last look."""
        version = version_of(self._path)
        if version == self._version:
            return
        self._version = version  # an unusable version is logged once
        try:
            self._version, self._content = self._read()
        except _Unusable as error:
            log.error("the %s changed and cannot be used; the previous version stays in force: %s", self._what, error)
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
