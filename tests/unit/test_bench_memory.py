"""Whether memory grows, and what /proc says of processes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from bench.memory import BYTES_PER_MIB, MemoryReading, trend
from bench.processes import THIS_BENCH, CoreMeter, cpu_seconds, resident_bytes


def readings(*mib: float) -> list[MemoryReading]:
    return [MemoryReading(100 * index, int(held * BYTES_PER_MIB)) for index, held in enumerate(mib, start=1)]


def test_growth_during_the_warm_up_does_not_count() -> None:
    found = trend(readings(10, 100, 100, 100, 100, 100, 100, 100, 100, 100), num_requests=1000)
    assert found is not None
    assert (found.start_mib, found.end_mib) == (100.0, 100.0)
    assert found.mib_per_1000_requests == pytest.approx(0.0)


def test_slope_is_memory_for_a_thousand_requests() -> None:
    found = trend(readings(*(100 + index for index in range(10))), num_requests=1000)
    assert found is not None
    assert found.mib_per_1000_requests == pytest.approx(10.0)
    assert (found.least_mib, found.most_mib) == (101.0, 109.0)


def test_one_reading_is_no_trend() -> None:
    assert trend(readings(10), num_requests=100) is None
    assert trend([], num_requests=100) is None


def stat_line(pid: int, name: str, session: int, *ticks: int) -> str:
    return f"{pid} ({name}) S 1 {session} {session} 0 -1 4194304 0 0 0 0 {' '.join(map(str, ticks))} 20 0 1 0 5\n"


def write_process(proc: Path, pid: int, text: str) -> None:
    (proc / str(pid)).mkdir()
    (proc / str(pid) / "stat").write_text(text)


def test_processor_time_is_summed_over_a_session_whatever_commands_are_called(tmp_path: Path) -> None:
    ticks_per_s = os.sysconf("SC_CLK_TCK")
    write_process(tmp_path, 10, stat_line(10, "python", 10, ticks_per_s, 0, 0, 0))
    write_process(tmp_path, 11, stat_line(11, "a) S 1 (b", 10, 0, ticks_per_s, 0, ticks_per_s))
    write_process(tmp_path, 12, stat_line(12, "other", 12, 9 * ticks_per_s, 0, 0, 0))
    (tmp_path / "13").mkdir()  # ended while we looked
    (tmp_path / "self").mkdir()
    assert cpu_seconds({"engine": 10, "gone": 99}, tmp_path) == {"engine": 3.0, "gone": 0.0}


def test_machine_without_proc_knows_nothing(tmp_path: Path) -> None:
    assert cpu_seconds({"engine": 1}, tmp_path / "absent") == {"engine": 0.0}
    assert resident_bytes(1, tmp_path) is None


def test_resident_memory_is_the_second_number_of_statm(tmp_path: Path) -> None:
    (tmp_path / "7").mkdir()
    (tmp_path / "7" / "statm").write_text("900 300 20 1 0 400 0\n")
    assert resident_bytes(7, tmp_path) == 300 * os.sysconf("SC_PAGE_SIZE")


def test_meter_says_nothing_where_no_session_is_known() -> None:
    assert CoreMeter({}).stop() == {}
    assert CoreMeter({"me": os.getsid(0)}).stop().keys() == {"me", THIS_BENCH}
