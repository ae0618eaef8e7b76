"""Calls of scripts: by FCALL if the server has Redis Functions (Redis 7, Valkey 7.2), else by EVALSHA.

A call that does not find the library loads it. This happens at the first use of a library version, after a restart or
failover that lost it, and on a cluster's primary that has no pool with this library yet. Redis replicates and persists
libraries with the data. FCALL and EVALSHA run the same source on the same records, so routers may use either.

If the server has no functions, or the user may not call or load them, the router uses EVALSHA until it restarts.

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
from typing import Any

from redis.exceptions import NoPermissionError, NoScriptError, RedisError, ResponseError

from inflight.router.store.cluster import ClusterClient
from inflight.router.store.lua import LIBRARY_PREFIX, Argument, Library, Script, ScriptCaller

logger = logging.getLogger(__name__)

UNUSED_MS = 600_000
MAX_LOADS = 3

# Drops its keys. A router's user in Redis may call PEXPIRE, but not DEL.
FORGET = "for _, key in ipairs(KEYS) do redis.call('PEXPIRE', key, 0) end"
# Errors of a command on a key of another type, of Lua on a value that is no record, and of a stream that takes no more
# entries. Other errors are states of the server: READONLY, OOM, NOPERM, …
_UNREADABLE = re.compile(r"WRONGTYPE|attempt to |bad argument #|last possible ID|not a valid float")


class ScriptCalls:
    """The scripts on one Redis."""

    def __init__(self, redis: ScriptCaller, scripts: Mapping[str, Script]) -> None:
        self._redis = redis
        self._scripts = scripts
        self.command = "FCALL"
        """The command that the next call uses."""

    async def run(self, name: str, keys: Sequence[str], args: Sequence[Argument]) -> Any:
        """Runs a script and returns its reply. Drops the pool's state first if no script can read it. Raises redis-py's
        errors."""
        try:
            return await self._run(name, keys, args)
        except (ResponseError, UnicodeDecodeError) as error:
            if not is_unreadable(error):
                raise
            # At once: the script may have written half of its changes, and a repeated call may not fail again.
            logger.error("the ledger's state is unreadable and is built again from reports: %s: %s", keys[0], error)
        await run_source(self._redis, FORGET, keys, ())
        return await self._run(name, keys, args)

    async def _run(self, name: str, keys: Sequence[str], args: Sequence[Argument]) -> Any:
        script = self._scripts[name]
        if self.command == "FCALL":
            try:
                return await self._call(script, keys, args)
            except _NoFunctionsError as error:
                self._use_evalsha(error)
        return await script.run(self._redis, keys, args)

    async def _call(self, script: Script, keys: Sequence[str], args: Sequence[Argument]) -> Any:
        for _ in range(MAX_LOADS):
            try:
                return await self._redis.execute_command("FCALL", script.function, len(keys), *keys, *args)
            except ResponseError as error:
                if _is_refused(error):
                    raise _NoFunctionsError from error
                if str(error) != "Function not found":
                    raise
            await self._load(script.library, keys[0])
        return await self._redis.execute_command("FCALL", script.function, len(keys), *keys, *args)

    async def _load(self, library: Library, key: str) -> None:
        """Loads the library on the node that has the key."""
        try:
            await self._execute_at(key, "FUNCTION", "LOAD", library.source)
        except ResponseError as error:
            if "already exists" in str(error):
                return  # another call has loaded it meanwhile
            if _is_refused(error) or _has_no_code(error):
                raise _NoFunctionsError from error
            raise
        try:
            await self._remove_unused(library, key)
        except RedisError as error:
            logger.debug("unused libraries remain: %s", error)

    async def _remove_unused(self, library: Library, key: str) -> None:
        found = await self._execute_at(key, "FUNCTION", "LIST", "LIBRARYNAME", f"{LIBRARY_PREFIX}*")
        for fields in found:
            name = dict(zip(fields[::2], fields[1::2], strict=True))["library_name"]
            if name != library.name:
                idle = f"{LIBRARY_PREFIX}idle_ms_{name.removeprefix(LIBRARY_PREFIX)}"
                if await self._execute_at(key, "FCALL", idle, 0) > UNUSED_MS:
                    await self._execute_at(key, "FUNCTION", "DELETE", name)
                    logger.info("removed library %s, which no router uses", name)

    async def _execute_at(self, key: str, *args: Any) -> Any:
        """Runs a command without keys on the node that has the key."""
        if isinstance(self._redis, ClusterClient):
            return await self._redis.execute_at(key, *args)
        return await self._redis.execute_command(*args)

    def _use_evalsha(self, error: _NoFunctionsError) -> None:
        if self.command == "EVALSHA":
            return  # another call has noticed it
        self.command = "EVALSHA"
        cause = error.__cause__
        if str(cause).startswith("unknown command"):
            logger.info("Redis has no functions: the ledger's scripts run by EVALSHA")
        else:
            text = "Redis refuses functions, so the ledger's scripts run by EVALSHA, which costs more of its time: %s"
            logger.warning(text, cause)


class _NoFunctionsError(Exception):
    """Raised if the server has no functions or refuses them to this user. Its cause is the server's reply."""


def is_unreadable(error: BaseException | None) -> bool:
    """Returns whether Redis, or the decoding of its reply, failed because of what is stored."""
    if isinstance(error, UnicodeDecodeError):  # in a reply, which has texts only
        return True
    return type(error) is ResponseError and _UNREADABLE.search(str(error)) is not None


def _is_refused(error: ResponseError) -> bool:
    return isinstance(error, NoPermissionError) or str(error).startswith("unknown command")


def _has_no_code(error: ResponseError) -> bool:
    """Returns whether the reply has the error code ERR, which redis-py removes. Then the server refuses the library
    itself. Other codes (READONLY, OOM, MISCONF, …) are states of the server."""
    return type(error) is ResponseError and not str(error).partition(" ")[0].isupper()


async def run_source(redis: ScriptCaller, source: str, keys: Sequence[str], args: Sequence[Argument]) -> Any:
    """Runs a script that needs only its keys and arguments, by EVALSHA or, if Redis does not know it, by EVAL."""
    try:
        return await redis.execute_command("EVALSHA", _sha(source), len(keys), *keys, *args)
    except NoScriptError:
        return await redis.execute_command("EVAL", source, len(keys), *keys, *args)


@functools.cache
def _sha(source: str) -> str:
    return hashlib.sha1(source.encode(), usedforsecurity=False).hexdigest()
