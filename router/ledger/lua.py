"""The library of Redis Functions with the Lua scripts.

It is one Lua text: the files below `scripts`, as they are, and the generated schema. Lua allows 200 local variables at
a time, so each file is a block. A file of `scripts/shared` has a table of its name for what other files use. The files
of `BASE`, on which all others build, have no block. Redis reports an error by its line of the library, from which
`Library.find_place` finds its file and line.
"""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from inflight.router.ledger.scripts import schema

SOURCES = Path(__file__).with_name("scripts")
LIBRARY_PREFIX = "inflight_"
_FILE = "-- File: "
BASE = ("library", "clock", "schema", "records")
OTHERS = (path.relative_to(SOURCES) for path in SOURCES.glob("shared/**/*.lua") if path.stem not in BASE)
BLOCKS = sorted(path.with_suffix("").as_posix() for path in OTHERS)
NAMES = tuple(sorted(path.stem for path in SOURCES.glob("*.lua")))


class ScriptCaller(Protocol):
    """The part of a Redis client that runs scripts."""

    async def execute_command(self, *args: Any) -> Any:
        """Sends one command and returns its reply."""


@dataclass(frozen=True, slots=True)
class Library:
    """A library of Redis Functions. `digest` is part of its name and of the names of its functions."""

    digest: str
    source: str

    @property
    def name(self) -> str:
        """Returns the library's name."""
        return LIBRARY_PREFIX + self.digest

    def function(self, script: str) -> str:
        """Returns the name of a script's function."""
        return f"{LIBRARY_PREFIX}{script}_{self.digest}"

    def find_place(self, error: str) -> str:
        """Returns the file and the line of an error in a function, or '' if it names none."""
        found = re.search(r"\buser_function:(\d+)", error)
        before = self.source.split("\n")[: int(found[1])] if found else []
        starts = [number for number, line in enumerate(before, 1) if line.startswith(_FILE)]
        return f"{before[starts[-1] - 1].removeprefix(_FILE)}:{len(before) - starts[-1]}" if starts else ""


def compose_library(shared: str, scripts: Mapping[str, str]) -> Library:
    """Returns the library of these scripts. The names of the library and of its functions contain the hash of its text,
    so that routers of different versions can use one Redis."""
    text = shared + "".join(_block(name, source) for name, source in scripts.items())
    digest = hashlib.sha256(text.encode()).hexdigest()[:16]
    return Library(digest, f"#!lua name={LIBRARY_PREFIX}{digest}\nlocal DIGEST = '{digest}'\n{text}")


@functools.cache
def load_scripts(clock: str | None = None) -> Library:
    """Returns the library of all scripts, composed once per process and clock. A test that controls time passes the Lua
    source of its own `now_ms` as `clock`."""
    return compose_scripts(shared_source(clock))


def compose_scripts(shared: str) -> Library:
    """Returns the library of all scripts, composed with this shared source. An experiment passes a modified source."""
    return compose_library(shared, {name: _read(name) for name in NAMES})


def shared_source(clock: str | None = None) -> str:
    """Returns the shared source of all scripts."""
    given = {"clock": clock, "schema": schema.source()}
    base = (_file(f"shared/{name}", given.get(name) or _read(f"shared/{name}")) for name in BASE)
    tables = f"local {', '.join(Path(name).name for name in BLOCKS)} = {', '.join('{}' for _ in BLOCKS)}\n"
    return "".join((*base, tables, *(_block(name, _read(name)) for name in BLOCKS)))


def _file(name: str, source: str) -> str:
    return f"{_FILE}{name}.lua\n{source}"


def _block(name: str, source: str) -> str:
    return f"do\n{_file(name, source)}end\n"


def _read(name: str) -> str:
    return (SOURCES / f"{name}.lua").read_text(encoding="utf-8")


if __name__ == "__main__":
    print(load_scripts().source, end="")
