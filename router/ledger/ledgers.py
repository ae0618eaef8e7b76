"""A router's connection to Redis, with the ledgers of all pools and the secret that all routers share.

If no secret is configured, the first router generates one and stores it in Redis, outside all pools. If Redis loses the
secret, a router that knows it writes it again.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Awaitable, Callable
from typing import Any

from redis.exceptions import NoPermissionError, ResponseError

from inflight.common.errors import RequestError
from inflight.router.ledger.calls import Turns
from inflight.router.ledger.connection import CommandClient, answered, close, connect, connect_reader, unavailable
from inflight.router.ledger.functions import ScriptCalls, is_unreadable, load_scripts
from inflight.router.ledger.ledger import Ledger, OnEvent
from inflight.router.ledger.redis_ledger import RedisLedger
from inflight.router.ledger.settings import LedgerSettings
from inflight.router.ledger.types import LedgerCall

logger = logging.getLogger(__name__)

KEY = "inflight:secret"
SECRET_BYTES = 32


def _calls(key: str) -> list[tuple[str | int, ...]]:
    """Returns a harmless call of each command that a router and its scripts use, on a key that expires by itself."""
    return [
        *(("XREAD", "STREAMS", key, 0), ("XREVRANGE", key, "+", "-", "COUNT", 1)),
        *(("SET", key, "x", "PX", 1000), ("GET", key), ("PEXPIRE", key, 1000), ("RENAME", key, key), ("TIME",)),
        *(("HDEL", key, "x"), ("HGET", key, "x"), ("HKEYS", key), ("HLEN", key), ("HMGET", key, "x")),
        *(("HSCAN", key, 0), ("HSET", key, "x", "x"), ("ZADD", key, 0, "x"), ("ZCARD", key)),
        *(("ZLEXCOUNT", key, "-", "+"), ("ZRANGE", key, 0, 0), ("ZRANGEBYLEX", key, "-", "+")),
        *(("ZRANGEBYSCORE", key, 0, 0), ("ZREM", key, "x"), ("ZREMRANGEBYSCORE", key, 0, 0), ("ZREVRANGE", key, 0, 0)),
        *(("ZREVRANGEBYSCORE", key, 0, 0), ("ZSCORE", key, "x"), ("XADD", key, "*", "x", "x"), ("PEXPIRE", key, 0)),
    ]


class NoFunctionsError(Exception):
    """Raised if the server has no functions."""


async def missing_commands(redis: CommandClient, settings: LedgerSettings) -> list[str]:
    """Returns the commands that a router needs and its user in Redis may not call, in capitals. Loads the library of
    scripts if the server does not have it. Raises `RequestError` if Redis does not answer, and `NoFunctionsError`."""
    key = f"inflight:check:{secrets.token_hex(8)}"
    missing = await _missing_for_functions(redis, settings, key)
    for call in _calls(key):
        name = str(call[0])
        if name not in missing and await _is_refused(redis.execute_command(*call, keys=[key]), settings):
            missing.append(name)
    return missing


async def _missing_for_functions(redis: CommandClient, settings: LedgerSettings, key: str) -> list[str]:
    library = load_scripts()
    try:
        await answered(redis.execute_command("FCALL", library.function("forget"), 0, keys=[key]), settings)
    except RequestError as error:
        cause = error.__cause__
        if not isinstance(cause, ResponseError):
            raise
        if isinstance(cause, NoPermissionError):
            return ["FCALL"]
        if str(cause).startswith("unknown command"):
            raise NoFunctionsError from error
        if str(cause) == "Function not found" and await _is_refused(ScriptCalls(redis, library).load(key), settings):
            return ["FUNCTION|LOAD"]
    return []


async def _is_refused(call: Awaitable[Any], settings: LedgerSettings) -> bool:
    try:
        await answered(call, settings)
    except RequestError as error:
        if isinstance(error.__cause__, NoPermissionError):
            return True
        if not isinstance(error.__cause__, ResponseError):
            raise
    return False


async def learn_secret(redis: CommandClient, settings: LedgerSettings, own: bytes | None = None) -> bytes:
    """Returns the secret in Redis. If there is none, writes the caller's `own` or a new one.

    The result differs from `own` if Redis lost it and another router has already generated a new one.
    """
    secret = secrets.token_bytes(SECRET_BYTES) if own is None else own
    try:
        return await _shared(redis, settings, secret)
    except (RequestError, ValueError) as error:
        if isinstance(error, RequestError) and not is_unreadable(error.__cause__):
            raise
        logger.error("%s is not what a router puts there, and is replaced", KEY)
        await answered(ScriptCalls(redis, load_scripts()).forget([KEY]), settings)
        try:
            return await _shared(redis, settings, secret)
        except ValueError:
            raise unavailable(settings, f"{KEY} is not what a router puts there") from None


async def _shared(redis: CommandClient, settings: LedgerSettings, secret: bytes) -> bytes:
    """Returns the secret in Redis. Raises `ValueError` if it is none."""
    await answered(redis.execute_command("SET", KEY, secret.hex(), "NX", keys=[KEY]), settings)
    found = await answered(redis.execute_command("GET", KEY, keys=[KEY]), settings)
    if found is None:
        raise unavailable(settings, f"{KEY} vanished")
    return bytes.fromhex(str(found))


OnCall = Callable[[LedgerCall], None]


class Ledgers:
    """The Redis client of one router. It connects at the first call.

    `router_id` is new at every start of the router. `on_call` is called after every call of a script by a ledger.
    """

    def __init__(self, url: str, router_id: str, settings: LedgerSettings, on_call: OnCall = lambda call: None) -> None:
        self._url = url
        self._redis = connect(url, settings)
        self._router_id = router_id
        self._settings = settings
        self._on_call = on_call
        self._turns = Turns(settings)

    def open(self, pool: str, on_event: OnEvent) -> Ledger:
        """Returns the ledger of a pool."""
        return RedisLedger(
            self._redis,
            pool,
            self._router_id,
            self._settings,
            on_event,
            on_call=self._on_call,
            turns=self._turns,
            reader=connect_reader(self._url, self._settings),
        )

    async def learn_secret(self, own: bytes | None) -> bytes:
        return await learn_secret(self._redis, self._settings, own)

    async def missing_commands(self) -> list[str]:
        """Returns the commands that the user in Redis may not call. Raises `RequestError` if Redis does not answer."""
        return await missing_commands(self._redis, self._settings)

    async def aclose(self) -> None:
        """Closes the connection. The ledgers cannot be used afterwards."""
        await close(self._redis)
