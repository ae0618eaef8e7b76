"""The Lua scripts as Redis Functions (Redis 7, Valkey 7.2): their library, and calls of them.

The library is one Lua text: the files below `scripts`, as they are, and the generated schema. Lua allows 200 local
variables at a time, so each file is a block. A file of `scripts/shared` has a table of its name for what other files
use. The files of `BASE`, on which all others build, have no block. Redis reports an error by its line of the library,
from which `Library.find_place` finds its file and line.

A call that does not find the library loads it. This happens at the first use of a library version, after a restart or
failover that lost it, and on a cluster's primary that has no pool with this library yet. Redis replicates and persists
libraries with the data.

Every key of a pool is soft state, so unreadable state is handled as lost state: a key of another type, or a value that
is no record. All keys of the call are dropped, and the ledger is built again from the reports of executors and the
submits of routers, as after a restart of Redis without its data. Dropping only the unreadable key would leave others
that no longer fit, for example reservations without requests.

Routers of another version have another library. A router that loads its library removes the libraries that no call has
used for `UNUSED_MS`. If a removed library is still needed, the next call of a router that uses it loads it again.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from redis.exceptions import RedisError, ResponseError

from inflight.router.ledger.codec import Argument
from inflight.router.ledger.connection import CommandClient
from inflight.router.ledger.scripts import schema

logger = logging.getLogger(__name__)

UNUSED_MS = 600_000
MAX_LOADS = 3

# Errors of a command on a key of another type, of Lua on a value that is no record, and of a stream that takes no more
# entries. Other errors are states of the server: READONLY, OOM, NOPERM, …
_UNREADABLE = re.compile(r"WRONGTYPE|attempt to |bad argument #|last possible ID|not a valid float")

SOURCES = Path(__file__).with_name("scripts")
LIBRARY_PREFIX = "inflight_"
_FILE = "-- File: "
BASE = ("library", "clock", "schema", "records")
OTHERS = (path.relative_to(SOURCES) for path in SOURCES.glob("shared/**/*.lua") if path.stem not in BASE)
BLOCKS = sorted(path.with_suffix("").as_posix() for path in OTHERS)
NAMES = tuple(sorted(path.stem for path in SOURCES.glob("*.lua")))


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


class ScriptCalls:
    """The scripts on one Redis."""

    def __init__(self, redis: CommandClient, library: Library) -> None:
        self._redis = redis
        self._library = library

    async def run(self, name: str, keys: Sequence[str], args: Sequence[Argument]) -> Any:
        """Runs a script and returns its reply. Drops the pool's state first if no script can read it. Raises redis-py's
        errors."""
        try:
            return await self._call(name, keys, args)
        except (ResponseError, UnicodeDecodeError) as error:
            if not is_unreadable(error):
                raise
            # At once: the script may have written half of its changes, and a repeated call may not fail again.
            place = self._library.find_place(str(error))
            logger.error(
                "the ledger's state is unreadable and is built again from reports: %s: %s%s",
                keys[0],
                error,
                f" ({place})" if place else "",
            )
        await self.forget(keys)
        return await self._call(name, keys, args)

    async def forget(self, keys: Sequence[str]) -> None:
        """Drops keys of one hash slot."""
        await self._call("forget", keys, ())

    async def _call(self, name: str, keys: Sequence[str], args: Sequence[Argument]) -> Any:
        call = ("FCALL", self._library.function(name), len(keys), *keys, *args)
        for _ in range(MAX_LOADS):
            try:
                return await self._redis.execute_command(*call, keys=keys)
            except ResponseError as error:
                if str(error) != "Function not found":
                    raise
            await self.load(keys[0])
        return await self._redis.execute_command(*call, keys=keys)

    async def load(self, key: str) -> None:
        """Loads the library on the node that has the key."""
        try:
            await self._redis.execute_command("FUNCTION", "LOAD", self._library.source, keys=[key])
        except ResponseError as error:
            if "already exists" in str(error):
                return  # another call has loaded it meanwhile
            raise
        try:
            await self._remove_unused(key)
        except RedisError as error:
            logger.debug("unused libraries remain: %s", error)

    async def _remove_unused(self, key: str) -> None:
        execute = partial(self._redis.execute_command, keys=[key])
        found = await execute("FUNCTION", "LIST", "LIBRARYNAME", f"{LIBRARY_PREFIX}*")
        for fields in found:
            name = dict(zip(fields[::2], fields[1::2], strict=True))["library_name"]
            if name != self._library.name:
                idle = f"{LIBRARY_PREFIX}idle_ms_{name.removeprefix(LIBRARY_PREFIX)}"
                if await execute("FCALL", idle, 0) > UNUSED_MS:
                    await execute("FUNCTION", "DELETE", name)
                    logger.info("removed library %s, which no router uses", name)


def is_unreadable(error: BaseException | None) -> bool:
    """Returns whether Redis, or the decoding of its reply, failed because of what is stored."""
    if isinstance(error, UnicodeDecodeError):  # in a reply, which has texts only
        return True
    return type(error) is ResponseError and _UNREADABLE.search(str(error)) is not None


if __name__ == "__main__":
    print(load_scripts().source, end="")
