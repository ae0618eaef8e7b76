"""The installed version of this program."""

from __future__ import annotations

import importlib.metadata


def installed_version() -> str:
    """Returns the version of the installed distribution."""
    try:
        return importlib.metadata.version("inflight")
    except importlib.metadata.PackageNotFoundError:
        return "(not installed)"
