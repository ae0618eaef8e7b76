"""The installed version of this program."""

from __future__ import annotations

import functools
import importlib.metadata


@functools.cache
def installed_version() -> str:
    """Returns the version of the installed distribution."""
    try:
        return importlib.metadata.version("inflight")
    except importlib.metadata.PackageNotFoundError:
        return "(not installed)"
