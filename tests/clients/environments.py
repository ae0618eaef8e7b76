"""Environments of third-party clients whose requirements conflict with ours: `.clients/NAME`, by `make clients`."""

from __future__ import annotations

from pathlib import Path

import pytest

REPOSITORY = Path(__file__).parents[2]


def python_of(name: str) -> str:
    """The interpreter of a client's environment. Skips the test where there is none."""
    python = REPOSITORY / ".clients" / name / "bin" / "python"
    if not python.exists():
        pytest.skip(f"there is no {name} in .clients: `make clients` could not make it, or was not run")
    return str(python)
