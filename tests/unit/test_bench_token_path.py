"""The measurement of the token path: threads, trees and the table."""

from __future__ import annotations

from pathlib import Path

import pytest

from inflight.bench.token_path.__main__ import TICKS_PER_S, Tree, table_of, thread_seconds, tree_of


def write_thread(proc: Path, pid: int, thread: int, name: str, user: int, system: int) -> None:
    folder = proc / str(pid) / "task" / str(thread)
    folder.mkdir(parents=True)
    fields = ["S", *["0"] * 10, str(user), str(system), *["0"] * 20]
    (folder / "stat").write_text(f"{thread} ({name}) {' '.join(fields)}\n")


def test_time_of_threads_is_split_into_loop_grpc_and_others(tmp_path: Path) -> None:
    write_thread(tmp_path, 7, 7, "python", 100, 20)
    write_thread(tmp_path, 7, 8, "event_engine", 30, 4)
    write_thread(tmp_path, 7, 9, "grpc_global_tim", 1, 1)
    write_thread(tmp_path, 7, 10, "a (strange) name", 500, 5)
    ticks = {part: seconds * TICKS_PER_S for part, seconds in thread_seconds(7, tmp_path).items()}
    assert ticks == pytest.approx({"loop": 120, "grpc": 36, "other": 505})


def test_tree_is_a_path_with_an_interval() -> None:
    assert tree_of("../old") == Tree(Path("../old"), 1)
    assert tree_of(".:8") == Tree(Path(), 8)
    assert str(tree_of(".:8")) == ".:8"
    assert tree_of(".:1:shared") == Tree(Path(), 1, is_shared=True)
    assert str(tree_of(".:1:shared")) == ".:1:shared"


def test_table_has_medians_and_ratios_to_the_first_tree() -> None:
    def figures(value: float) -> dict[str, float]:
        names = ("router", "client", "executor loop", "sum", "redis", "executor engine", "events per token")
        return dict.fromkeys(names, value)

    trees = [Tree(Path("old")), Tree(Path("new"))]
    table = table_of(trees, [[figures(10), figures(100), figures(20)], [figures(5)]])
    assert table.header == ["µs of CPU per token", "old", "new", "new / first"]
    assert table.rows[0] == ["router", "20", "5", "0.25"]
