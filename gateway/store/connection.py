"""Connection of a store to Redis: its library of Functions, its calls, and the encryption of keys that it keeps.

Every call ends within a timeout. It runs to its end even if its caller is cancelled, so that no other call gets its
reply.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cryptography.fernet import Fernet, InvalidToken
from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import NoBackoff
from redis.exceptions import RedisError, ResponseError

from inflight.gateway.errors import ApiError

log = logging.getLogger(__name__)

CALL_TIMEOUT_S = 2.0
MAX_CONNECTIONS = 16
RETRY_AFTER_S = 1.0
# Functions of `records.lua`, which every store has besides its own.
SHARED_FUNCTIONS = ("create", "take", "tend", "delete")


class Seal:
    """Encrypts the authorization of clients; without a secret it stays as it is."""

    def __init__(self, secret: str | None) -> None:
        key = None if secret is None else base64.urlsafe_b64encode(hashlib.sha256(secret.encode()).digest())
        self._fernet = None if key is None else Fernet(key)

    def close(self, text: str) -> str:
        """Returns a text encrypted."""
        return text if self._fernet is None or not text else self._fernet.encrypt(text.encode()).decode()

    def open(self, text: str) -> str:
        """Returns an encrypted text; nothing, with which a router refuses the request, if another secret encrypted
        it."""
        if self._fernet is None or not text:
            return text
        try:
            return self._fernet.decrypt(text.encode()).decode()
        except InvalidToken:
            log.error("an authorization in the store is encrypted with another store_secret")
            return ""


class StoreConnection:
    """Calls of one store. Every method raises `ApiError` 503 if Redis does not answer."""

    def __init__(self, url: str, kind: str, functions: Sequence[str]) -> None:
        """`kind` names what is stored, and the Lua file with the store's own `functions`."""
        self._kind = kind
        self._options: dict[str, Any] = {
            "socket_timeout": CALL_TIMEOUT_S,
            "socket_connect_timeout": CALL_TIMEOUT_S,
            "decode_responses": True,
            "protocol": 2,
            "retry": Retry(NoBackoff(), 0),
        }
        self._url = url
        self._redis = self._opened(MAX_CONNECTIONS, timeout=CALL_TIMEOUT_S)
        self._readers: list[Redis] = []
        folder = Path(__file__).parent
        source = "".join((folder / f"{name}.lua").read_text() for name in ("records", kind))
        self._digest = hashlib.sha256(source.encode()).hexdigest()[:16]
        # Not the prefix of the router's libraries, which routers remove when they are unused.
        names = (*SHARED_FUNCTIONS, *functions)
        registered = "".join(f"redis.register_function('{self._function(name)}', {name})\n" for name in names)
        self._library = f"#!lua name=gateway_{self._digest}\n{source}{registered}"

    def reader(self, block_s: float) -> Redis:
        """Opens a connection for calls that block for up to `block_s` seconds. It closes with this one."""
        self._readers.append(self._opened(1, socket_timeout=block_s + CALL_TIMEOUT_S))
        return self._readers[-1]

    async def close(self) -> None:
        """Closes the connections."""
        for redis in (self._redis, *self._readers):
            try:
                await redis.aclose()
            except (RedisError, OSError, TimeoutError) as error:
                log.debug("a connection to the store did not close: %s", error)

    async def call(self, name: str, keys: Sequence[str], *arguments: str | int) -> Any:
        """Calls a function, and loads the library if Redis does not have it."""
        call = ("FCALL", self._function(name), len(keys), *keys, *arguments)
        try:
            return await self._shielded(*call)
        except ResponseError as error:
            if str(error) != "Function not found":
                raise self.failed(error) from error
        await self.command("FUNCTION", "LOAD", "REPLACE", self._library)
        return await self.command(*call)

    async def command(self, *command: str | int) -> Any:
        """Runs a command."""
        try:
            return await self._shielded(*command)
        except ResponseError as error:
            raise self.failed(error) from error

    async def read(self, reader: Redis, *command: str | int) -> Any:
        """Runs a command on the connection of a reader."""
        try:
            return await _execute(reader, *command)
        except (RedisError, OSError, TimeoutError) as error:
            raise self.failed(error) from error

    def failed(self, error: Exception) -> ApiError:
        """Returns the error for clients. That of Redis may contain an address."""
        log.warning("the store of %s: %s: %s", self._kind, type(error).__name__, error)
        text = f"the store of {self._kind} does not answer"
        return ApiError(503, text, "server_error", code="unavailable", retry_after_s=RETRY_AFTER_S)

    def _opened(self, max_connections: int, **options: Any) -> Redis:
        pool = BlockingConnectionPool.from_url(
            self._url, max_connections=max_connections, **{**self._options, **options}
        )
        return Redis.from_pool(pool)

    def _function(self, name: str) -> str:
        return f"gateway_{name}_{self._digest}"

    async def _shielded(self, *command: str | int) -> Any:
        try:
            return await asyncio.shield(asyncio.ensure_future(_execute(self._redis, *command)))
        except ResponseError:
            raise
        except (RedisError, OSError, TimeoutError) as error:
            raise self.failed(error) from error


def tenant_keys(prefix: str, tenant: str, kinds: Sequence[str]) -> list[str]:
    """Returns keys of a tenant. Its id is hashed: it may be of any length and may contain anything."""
    digest = hashlib.sha256(tenant.encode()).hexdigest()[:32]
    return [f"{prefix}{kind}:{digest}" for kind in kinds]


async def _execute(redis: Redis, *command: str | int) -> Any:
    return await redis.execute_command(*command)  # type: ignore[no-untyped-call]
