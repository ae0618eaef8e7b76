"""Redis' own figures: calls and microseconds by command, the worst call, processor time, memory; and its machine's."""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from inflight.bench.ledger.wire import Connection, bulk_text

SCRIPT = "fcall"
MAX_SLOW_CALLS = 1024
LEAST_SLOW_US = 100
# Of the slow log's entries: id, time, microseconds, number of arguments, command and its first argument.
SLOW_CALL = re.compile(rb"\*6\r\n:(\d+)\r\n:\d+\r\n:(\d+)\r\n\*\d+\r\n\$\d+\r\n(\w+)\r\n\$\d+\r\n(\w*)")


@dataclass(frozen=True, slots=True)
class Usage:
    """Calls and microseconds of one command."""

    calls: int
    us: float

    def __sub__(self, before: Usage) -> Usage:
        return Usage(self.calls - before.calls, self.us - before.us)

    def __add__(self, other: Usage) -> Usage:
        return Usage(self.calls + other.calls, self.us + other.us)


# A number of the histogram of latencies.
BUCKET = re.compile(r"^:(\d+)\r?$", re.MULTILINE)
NOTHING = Usage(0, 0.0)
Usages = Mapping[str, Usage]


@dataclass(frozen=True, slots=True)
class SlowCall:
    """A call of a script that took long; `number` counts all that were ever logged."""

    number: int
    us: float
    function: str


class Server:
    """A connection for queries about the server."""

    def __init__(self, url: str) -> None:
        self._connection = Connection(url)
        self.version = self._fields("server")["redis_version"]
        self.allocator = self._fields("memory")["mem_allocator"]

    def usages(self) -> Usages:
        """By command, since the server's start. Commands that scripts call count, too."""
        return {
            name.removeprefix("cmdstat_"): Usage(int(stat["calls"]), float(stat["usec"]))
            for name, text in self._fields("commandstats").items()
            for stat in (dict(part.split("=", 1) for part in text.split(",")),)
        }

    def cpu_s(self) -> float:
        """Processor time of the thread that runs commands."""
        fields = self._fields("cpu")
        suffix = "_main_thread" if "used_cpu_user_main_thread" in fields else ""
        return float(fields[f"used_cpu_user{suffix}"]) + float(fields[f"used_cpu_sys{suffix}"])

    def memory_bytes(self) -> int:
        """What it has allocated."""
        return int(self._fields("memory")["used_memory"])

    def num_calls_by_us(self) -> Mapping[int, int]:
        """How many calls of scripts took at most so many microseconds, by Redis' clock, since the last reset."""
        text = self._connection.ask("LATENCY", "HISTOGRAM", SCRIPT).decode(errors="replace")
        counts: dict[int, int] = {}
        for command in text.split("histogram_usec")[1:]:
            numbers = [int(number) for number in BUCKET.findall(command)]
            former = 0
            for us, count in zip(numbers[::2], numbers[1::2], strict=False):
                counts[us], former = counts.get(us, 0) + count - former, count
        return dict(sorted(counts.items()))

    def execute(self, *words: str) -> None:
        """Runs a command; its reply does not matter."""
        self._connection.ask(*words)

    def set_option(self, name: str, value: str) -> str:
        """Sets an option and returns its former value."""
        former = self._connection.ask("CONFIG", "GET", name).split(b"\r\n")[4].decode()
        self._connection.ask("CONFIG", "SET", name, value)
        return former

    def slow_calls(self) -> list[SlowCall]:
        """Scripts in the slow log."""
        reply = self._connection.ask("SLOWLOG", "GET", MAX_SLOW_CALLS)
        return [
            SlowCall(int(number), float(us), function.decode())
            for number, us, name, function in SLOW_CALL.findall(reply)
            if name.lower().decode() == SCRIPT
        ]

    def delete_pool(self, pattern: str) -> None:
        """Removes the keys of a pattern."""
        cursor = "0"
        while True:
            lines = self._connection.ask("SCAN", cursor, "MATCH", pattern, "COUNT", 1000).decode().splitlines()
            cursor, keys = lines[2], lines[5::2]
            if keys:
                self._connection.ask("UNLINK", *keys)
            if cursor == "0":
                return

    def close(self) -> None:
        self._connection.close()

    def _fields(self, section: str) -> dict[str, str]:
        lines = bulk_text(self._connection.ask("INFO", section)).splitlines()
        return dict(line.split(":", 1) for line in lines if ":" in line)


def num_stolen_ticks(stat: Path = Path("/proc/stat")) -> int:
    """Returns how many hundredths of a second the host of this virtual machine has taken its processors away; 0 where
    that is not known."""
    try:
        return int(stat.read_text(encoding="utf-8").split(maxsplit=9)[8])
    except (OSError, IndexError):
        return 0


def real_time_stop_ms(policy: int | None = None, settings: Path = Path("/proc/sys/kernel")) -> float:
    """Returns for how many milliseconds of a period, usually a second, the kernel stops processes of this process's
    scheduling class that keep their core busy; 0 outside of the real-time classes (man 7 sched)."""
    if (os.sched_getscheduler(0) if policy is None else policy) not in (os.SCHED_FIFO, os.SCHED_RR):
        return 0.0
    try:
        period_us, runtime_us = (
            int((settings / f"sched_rt_{name}_us").read_text(encoding="utf-8")) for name in ("period", "runtime")
        )
    except OSError:
        return 0.0
    return 0.0 if runtime_us < 0 else (period_us - runtime_us) / 1e3


def difference(after: Usages, before: Usages) -> dict[str, Usage]:
    """What was used in between, by command."""
    used = {name: usage - before.get(name, NOTHING) for name, usage in after.items()}
    return {name: usage for name, usage in used.items() if usage.calls}


class Slowest:
    """Keeps the worst call of a script so far and lets Redis log only what could be worse.

    So the log, which forgets, never holds many. On leaving, Redis' options are what they were.
    """

    def __init__(self, server: Server, names: Mapping[str, str]) -> None:
        self._server = server
        self._names = names
        self._logged = max((call.number for call in server.slow_calls()), default=-1)
        self._max_former = server.set_option("slowlog-max-len", str(MAX_SLOW_CALLS))
        self._threshold_former = server.set_option("slowlog-log-slower-than", str(LEAST_SLOW_US))
        self.us = 0.0
        self.script = ""

    def look(self) -> None:
        """Takes what was logged since the last look."""
        new = [
            call for call in self._server.slow_calls() if call.number > self._logged and call.function in self._names
        ]
        if not new:
            return
        worst = max(new, key=lambda call: call.us)
        self._logged = max(call.number for call in new)
        if worst.us > self.us:
            self.us, self.script = worst.us, self._names[worst.function]
            self._server.set_option("slowlog-log-slower-than", str(int(worst.us)))

    def close(self) -> None:
        """Puts the options back."""
        self._server.set_option("slowlog-log-slower-than", self._threshold_former)
        self._server.set_option("slowlog-max-len", self._max_former)
