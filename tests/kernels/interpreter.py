"""Triton's interpreter without work that it repeats.

At each launch it replaces the functions of `triton.language`, and again at each call of one function of a kernel by
another. That takes a quarter of the time of these tests, so here each module's are replaced once per launch.
"""

from __future__ import annotations

from types import FunctionType
from typing import Any


class LaunchPatches:
    """What is replaced until the launch in progress ends, by the module whose functions use it."""

    def __init__(self, patch_lang: Any) -> None:
        self._patch_lang = patch_lang
        self._scopes: dict[str, Any] = {}

    def patch(self, fn: FunctionType) -> LaunchPatches:
        """Stands in for `_patch_lang`. The interpreter restores what it returns when a launch ends."""
        if fn.__module__ not in self._scopes:
            self._scopes[fn.__module__] = self._patch_lang(fn)
        return self

    def restore(self) -> None:
        """Undoes all replacements, the last one first."""
        while self._scopes:
            self._scopes.popitem()[1].restore()
