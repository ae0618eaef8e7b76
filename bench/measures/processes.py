"""Processor time and memory of running processes, from /proc. Where there is no /proc, nothing is known."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

PROC = Path("/proc")

THIS_BENCH = "bench"


@dataclass(frozen=True, slots=True)
class ProcessTimes:
    """The session that a process belongs to, and the processor time that it and its ended children have used."""

    session: int
    cpu_s: float


def cpu_seconds(sessions: Mapping[str, int], proc: Path = PROC) -> dict[str, float]:
    """Processor seconds of all the processes of some sessions, by the sessions' names."""
    spent = dict.fromkeys(sessions, 0.0)
    names = {session: name for name, session in sessions.items()}
    for times in _all_times(proc):
        if times.session in names:
            spent[names[times.session]] += times.cpu_s
    return spent


class CoreMeter:
    """How many cores some sessions, and this process, keep busy from when it is made."""

    def __init__(self, sessions: Mapping[str, int]) -> None:
        self._sessions = sessions
        self._began_s = time.monotonic()
        self._before = self._read()

    def stop(self) -> dict[str, float]:
        """Mean number of busy cores by part; nothing where no session is known."""
        elapsed_s = time.monotonic() - self._began_s
        if not self._sessions or elapsed_s <= 0:
            return {}
        return {name: round((cpu_s - self._before[name]) / elapsed_s, 4) for name, cpu_s in self._read().items()}

    def _read(self) -> dict[str, float]:
        return {**cpu_seconds(self._sessions), THIS_BENCH: time.process_time()}


def resident_bytes(pid: int, proc: Path = PROC) -> int | None:
    """Memory that a process holds; None if it is gone or the system does not say."""
    try:
        pages = int((proc / str(pid) / "statm").read_text().split()[1])
    except (OSError, IndexError, ValueError):
        return None
    return pages * os.sysconf("SC_PAGE_SIZE")


def _all_times(proc: Path) -> Iterator[ProcessTimes]:
    ticks_per_s = os.sysconf("SC_CLK_TCK")
    try:
        pids = [entry for entry in proc.iterdir() if entry.name.isdecimal()]
    except OSError:
        return
    for entry in pids:
        try:
            text = (entry / "stat").read_text()
        except OSError:
            continue  # ended meanwhile
        # The command's name, in brackets, may hold anything: fields are counted from its end.
        values = text.rpartition(")")[2].split()
        # proc(5): session is the 6th field of all, utime, stime, cutime and cstime the 14th to 17th.
        yield ProcessTimes(int(values[3]), sum(int(value) for value in values[11:15]) / ticks_per_s)
