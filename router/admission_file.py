"""The admission file on disk: read at start, and again whenever it has changed.

A version that cannot be used changes nothing: the one before it goes on to hold, and the log says what is wrong. The
file is looked at and read in a thread, so that a slow disk holds up no request.
"""

from __future__ import annotations

import asyncio
import logging
import os
from pathlib import Path
from typing import Self

from common.settings import SettingError
from router.admission_rules import NO_RULES, AdmissionRules, RulesError, parse_rules

log = logging.getLogger(__name__)

LOOK_INTERVAL_S = 1.0

# Modification time, size and inode: an editor may write into the file or put another one in its place.
Version = tuple[int, int, int]


class AdmissionFile:
    """The rules that hold now. Without a path there are none, and none come."""

    def __init__(self, path: Path | None, served: frozenset[str], rules: AdmissionRules = NO_RULES) -> None:
        self._path = path
        self._served = served
        self._rules = rules
        self._version: Version | None = None

    @classmethod
    def open(cls, path: Path | None, served: frozenset[str]) -> Self:
        """Reads the file. Raises `SettingError` where it cannot be used."""
        file = cls(path, served)
        if path is not None:
            try:
                file._version, file._rules = _read(path, served)
            except _Unusable as error:
                raise SettingError(f"--admission-file (INFLIGHT_ADMISSION_FILE): {error}") from None
        return file

    @property
    def rules(self) -> AdmissionRules:
        """What holds now."""
        return self._rules

    async def follow(self, interval_s: float = LOOK_INTERVAL_S) -> None:
        """Looks at the file every `interval_s` seconds until cancelled."""
        while self._path is not None:
            await asyncio.sleep(interval_s)
            await asyncio.to_thread(self.look)

    def look(self) -> None:
        """Reads the file again if it has changed since the last look."""
        assert self._path is not None
        version = _version(self._path)
        if version == self._version:
            return
        self._version = version  # of a version that cannot be used the log speaks once
        try:
            self._version, self._rules = _read(self._path, self._served)
        except _Unusable as error:
            log.error("the admission file changed and cannot be used; what it said before holds on: %s", error)
        else:
            log.info("the admission file %s changed and is in force", self._path)


class _Unusable(Exception):
    """The file cannot be used. The text names it, the line and what is allowed."""


def _read(path: Path, served: frozenset[str]) -> tuple[Version | None, AdmissionRules]:
    version = _version(path)  # before reading: what is written in between is seen at the next look
    try:
        return version, parse_rules(path.read_text(encoding="utf-8"), served)
    except OSError as error:
        raise _Unusable(f"cannot read {str(path)!r}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise _Unusable(f"{path}: is not UTF-8: {error.reason} at byte {error.start}") from None
    except RulesError as error:
        raise _Unusable("; ".join(f"{path}, {problem}" for problem in error.problems)) from None


def _version(path: Path) -> Version | None:
    """None for a file that is not there."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino
