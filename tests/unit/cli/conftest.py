"""A scripted router for the commands of this folder, which find no stack and no address but the test's."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from inflight.cli.main import main
from tests.unit.scripted_router import ScriptedRouter, serving


@pytest.fixture
def router() -> ScriptedRouter:
    return ScriptedRouter()


@pytest.fixture
def address(router: ScriptedRouter) -> Iterator[str]:
    with serving(router) as served:
        yield served


@pytest.fixture
def output(address: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Callable[..., str]:
    """Runs a command that succeeds, in a wide terminal, and returns its output."""
    monkeypatch.setenv("COLUMNS", "200")

    def run(*arguments: str) -> str:
        assert main([*arguments, "--address", address]) == 0
        return capsys.readouterr().out

    return run


@pytest.fixture(autouse=True)
def _nothing_around(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No stack and no address but the test's."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("INFLIGHT_ADDRESS", raising=False)
    monkeypatch.delenv("INFLIGHT_RUN_DIR", raising=False)
