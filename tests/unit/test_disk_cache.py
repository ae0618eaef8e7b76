"""The disk cache: entries are complete or absent, and built by one process only."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from inflight.common.disk_cache import build_once, cache_folder


def test_second_call_does_not_build(tmp_path: Path) -> None:
    calls: list[Path] = []

    def build(target: Path) -> None:
        calls.append(target)
        target.mkdir()
        (target / "file").write_text("made")

    results = [build_once(tmp_path / "deep" / "thing", build) for _ in range(2)]

    assert results == [tmp_path / "deep" / "thing"] * 2
    assert (results[0] / "file").read_text() == "made"
    assert len(calls) == 1
    assert calls[0] != results[0], "built aside, then moved"


def test_failed_build_leaves_nothing_and_is_tried_again(tmp_path: Path) -> None:
    def fail(target: Path) -> None:
        target.write_text("half")
        raise ValueError("broken")

    with pytest.raises(ValueError, match="broken"):
        build_once(tmp_path / "thing", fail)
    assert [path.name for path in tmp_path.iterdir() if not path.name.endswith(".lock")] == []

    assert build_once(tmp_path / "thing", lambda target: target.touch()).exists()


def test_others_wait_for_the_one_that_builds(tmp_path: Path) -> None:
    # Given several callers at once
    num_callers = 4
    started = threading.Barrier(num_callers)
    builds: list[Path] = []

    def call() -> None:
        started.wait(60)
        build_once(tmp_path / "thing", build)

    def build(target: Path) -> None:
        builds.append(target)
        assert not (tmp_path / "thing").exists()
        target.write_text("made")

    threads = [threading.Thread(target=call) for _ in range(num_callers)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)

    assert len(builds) == 1
    assert (tmp_path / "thing").read_text() == "made"


def test_environment_moves_the_cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("INFLIGHT_CACHE_DIR", str(tmp_path / "mine"))
    assert cache_folder() == tmp_path / "mine"
    monkeypatch.delenv("INFLIGHT_CACHE_DIR")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert cache_folder() == tmp_path / ".cache" / "inflight"
