"""The admission file: the rules that hold now, as the file on disk has them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Self

from router.config.tenants import NO_RULES, AdmissionRules, parse_rules
from router.config.watched_file import FollowedFile


class AdmissionFile:
    """The rules that hold now. Without a file they are what they were made with."""

    def __init__(self, file: FollowedFile[AdmissionRules] | None, rules: AdmissionRules = NO_RULES) -> None:
        self._file = file
        self._rules = rules

    @classmethod
    def open(
        cls, path: Path | None, served: frozenset[str], on_read: Callable[[str | None], None] = lambda problem: None
    ) -> Self:
        """Reads the file; `on_read` is told of every change (see `FollowedFile`). Raises `SettingError` where it cannot
        be used."""
        if path is None:
            return cls(None)
        parse = functools.partial(parse_rules, served=served)
        return cls(FollowedFile(path, "admission_file", "admission file", parse, on_read))

    @property
    def rules(self) -> AdmissionRules:
        """What holds now."""
        return self._rules if self._file is None else self._file.content

    async def follow(self) -> None:
        """Looks at the file again and again until cancelled; without one it returns."""
        if self._file is not None:
            await self._file.follow()

    def look(self) -> None:
        """Reads the file again if it has changed since the last look."""
        assert self._file is not None
        self._file.look()
