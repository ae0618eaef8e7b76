"""A scripted router for the commands of this folder, which find no stack and no address but the test's."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.unit.scripted_router import ScriptedRouter, serving


@pytest.fixture
def router() -> ScriptedRouter:
    return ScriptedRouter()


@pytest.fixture
def address(router: ScriptedRouter) -> Iterator[str]:
    with serving(router) as served:
        yield served


@pytest.fixture(autouse=True)
def _nothing_around(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No stack and no address but the test's."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("INFLIGHT_ADDRESS", raising=False)
    monkeypatch.delenv("INFLIGHT_RUN_DIR", raising=False)
