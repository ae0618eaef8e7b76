"""The Lua scripts: composed once from their sources (`compose`), run by hash.

A script is what it needs of the parts under `scripts/shared`, in the order of `SHARED`, and its own file.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from redis.exceptions import NoScriptError

from router.store.compose import compose

SOURCES = Path(__file__).with_name("scripts")
SHARED = ("clock", "records", "owners", "tenants", "lengths", "estimates", "states", "places", "board")
NAMES = (
    "submit",
    "settle",
    "report",
    "cancel",
    "hand_back",
    "adopt",
    "absolve",
    "verify",
    "reap",
    "renew",
    "board",
    "explain",
    "snapshot",
    "rates",
)

Argument = str | int | float | bytes


class ScriptCaller(Protocol):
    """What running a script takes of a Redis client."""

    async def execute_command(self, *args: Any) -> Any:
        """Sends one command and returns its reply."""


@dataclass(frozen=True, slots=True)
class Script:
    """One script and the hash under which Redis knows it."""

    source: str
    sha: str

    async def run(self, redis: ScriptCaller, keys: Sequence[str], args: Sequence[Argument]) -> Any:
        """Runs it; sends the source only where Redis does not know it (first use, restart, failover)."""
        try:
            return await redis.execute_command("EVALSHA", self.sha, len(keys), *keys, *args)
        except NoScriptError:
            return await redis.execute_command("EVAL", self.source, len(keys), *keys, *args)


def load_scripts(clock: str | None = None) -> dict[str, Script]:
    """All scripts by name. A test that steers time passes its own source of `now_ms` as `clock`."""
    shared = shared_source(clock)
    return {name: _script(compose(shared, _read(name))) for name in NAMES}


def shared_source(clock: str | None = None) -> str:
    """What scripts are composed of, besides their own file."""
    return (clock or _read("shared/clock")) + "".join(_read(f"shared/{part}") for part in SHARED[1:])


def _read(name: str) -> str:
    return (SOURCES / f"{name}.lua").read_text(encoding="utf-8")


def _script(source: str) -> Script:
    # SHA-1 is what EVALSHA names scripts by.
    return Script(source, hashlib.sha1(source.encode(), usedforsecurity=False).hexdigest())
