"""A router's connection to Redis, with the stores of all pools and the secret that all routers share.

If no secret is configured, the first router generates one and stores it in Redis, outside all pools. If Redis loses the
secret, a router that knows it writes it again.
"""

from __future__ import annotations

import logging
import secrets
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Any

from redis.asyncio import Redis

from common.errors import RequestError
from router.store.connection import Turns, answered, close, connect, unavailable
from router.store.script_calls import FORGET, is_unreadable, run_source
from router.store.settings import StoreSettings
from router.store.store import AdmissionStore
from router.store.types import StoreCall, StoreEvent

logger = logging.getLogger(__name__)

KEY = "inflight:secret"
SECRET_BYTES = 32


async def shared_secret(redis: Redis, settings: StoreSettings) -> bytes:
    """Returns the secret in Redis. Generates one if there is none."""
    return await restore_secret(redis, settings, secrets.token_bytes(SECRET_BYTES))


async def restore_secret(redis: Redis, settings: StoreSettings, secret: bytes) -> bytes:
    """Writes the secret to Redis if there is none. Returns the secret that is then in Redis.

    The two differ if Redis lost the caller's secret and another router has already generated a new one.
    """
    try:
        return await _shared(redis, settings, secret)
    except (RequestError, ValueError) as error:
        if isinstance(error, RequestError) and not is_unreadable(error.__cause__):
            raise
        logger.error("%s is not what a router puts there, and is replaced", KEY)
        await answered(run_source(redis, FORGET, [KEY], ()), settings)
        try:
            return await _shared(redis, settings, secret)
        except ValueError:
            raise unavailable(settings, f"{KEY} is not what a router puts there") from None


async def _shared(redis: Redis, settings: StoreSettings, secret: bytes) -> bytes:
    """Returns the secret in Redis. Raises `ValueError` if it is none."""
    await answered(redis.set(KEY, secret.hex(), nx=True), settings)
    found = await answered(redis.get(KEY), settings)
    if found is None:
        raise unavailable(settings, f"{KEY} vanished")
    return bytes.fromhex(str(found))


async def learn_secret(redis: Redis, settings: StoreSettings, own: bytes | None) -> bytes:
    """Returns the secret in Redis. If there is none, writes the caller's `own` or a new one."""
    return await (shared_secret(redis, settings) if own is None else restore_secret(redis, settings, own))


OnEvent = Callable[[StoreEvent], None]
OnCall = Callable[[StoreCall], None]


class Ledgers:
    """The Redis client of one router. It connects at the first call.

    `router_id` is new at every start of the router. `on_call` is called after every call of a script by a store.
    """

    def __init__(self, url: str, router_id: str, settings: StoreSettings, on_call: OnCall = lambda call: None) -> None:
        self._redis = connect(url, settings)
        self._router_id = router_id
        self._settings = settings
        self._on_call = on_call
        self._turns = Turns(settings)

    def open(self, pool: str, on_event: OnEvent) -> AdmissionStore:
        """Returns the store of a pool."""
        return AdmissionStore(
            self._redis, pool, self._router_id, self._settings, on_event, on_call=self._on_call, turns=self._turns
        )

    def turn(self, kind: str) -> AbstractAsyncContextManager[None]:
        """Returns a turn for calls of `run_source`. Entering it raises `RequestError` if Redis does not answer."""
        return self._turns.turn(kind)

    async def run_source(self, source: str, keys: Sequence[str], *args: str | int) -> Any:
        """Runs a script that belongs to no pool. Its keys share one hash tag. Raises `RequestError` if Redis does not
        answer."""
        return await answered(run_source(self._redis, source, keys, args), self._settings)

    async def learn_secret(self, own: bytes | None) -> bytes:
        return await learn_secret(self._redis, self._settings, own)

    async def aclose(self) -> None:
        """Closes the connection. The stores cannot be used afterwards."""
        await close(self._redis)
