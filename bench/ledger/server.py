"""Redis' own figures: calls and microseconds by command, processor time, memory."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from inflight.bench.ledger.wire import Connection, bulk_text

SCRIPT = "fcall"


@dataclass(frozen=True, slots=True)
class Usage:
    """Calls and microseconds of one command."""

    calls: int
    us: float

    def __sub__(self, before: Usage) -> Usage:
        return Usage(self.calls - before.calls, self.us - before.us)

    def __add__(self, other: Usage) -> Usage:
        return Usage(self.calls + other.calls, self.us + other.us)


NOTHING = Usage(0, 0.0)
Usages = Mapping[str, Usage]


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


def difference(after: Usages, before: Usages) -> dict[str, Usage]:
    """What was used in between, by command."""
    used = {name: usage - before.get(name, NOTHING) for name, usage in after.items()}
    return {name: usage for name, usage in used.items() if usage.calls}
