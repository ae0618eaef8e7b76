"""A router's connection to Redis, and what goes over it: the store of every pool, and the secret that routers share.

Where no secret is set, the first router makes it and leaves it in Redis. It belongs to no pool. Redis may lose it; then
a router that knows it writes it again.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable

from redis.asyncio import Redis

from router.store.connection import answered, close, connect, unavailable
from router.store.settings import StoreSettings
from router.store.store import AdmissionStore
from router.store.turns import Turns
from router.store.types import StoreCall, StoreEvent

KEY = "inflight:secret"
SECRET_BYTES = 32


async def shared_secret(redis: Redis, settings: StoreSettings) -> bytes:
    """The secret in Redis, made now where there is none."""
    return await restore(redis, settings, secrets.token_bytes(SECRET_BYTES))


async def restore(redis: Redis, settings: StoreSettings, secret: bytes) -> bytes:
    """Puts the secret into Redis where there is none, and returns the one that is there.

    Another than the caller's: Redis lost that one, and somebody made a new one before.
    """
    await answered(redis.set(KEY, secret.hex(), nx=True), settings)
    found = await answered(redis.get(KEY), settings)
    if found is None:
        raise unavailable(settings, f"{KEY} vanished")
    try:
        return bytes.fromhex(str(found))
    except ValueError as error:
        raise unavailable(settings, f"{KEY} is not what a router puts there") from error


async def learn_secret(redis: Redis, settings: StoreSettings, own: bytes | None) -> bytes:
    """The secret in Redis; where there is none the caller's `own` becomes it, or a new one."""
    return await (shared_secret(redis, settings) if own is None else restore(redis, settings, own))


OnEvent = Callable[[StoreEvent], None]
OnCall = Callable[[StoreCall], None]


class Ledgers:
    """Connects at the first call. `router_id` is new at every start of the router. `on_call` is told of every call of a
    script."""

    def __init__(self, url: str, router_id: str, settings: StoreSettings, on_call: OnCall = lambda call: None) -> None:
        self._redis = connect(url, settings)
        self._router_id = router_id
        self._settings = settings
        self._on_call = on_call
        self._turns = Turns(settings)

    def open(self, pool: str, on_event: OnEvent) -> AdmissionStore:
        """The store of a pool."""
        return AdmissionStore(
            self._redis, pool, self._router_id, self._settings, on_event, on_call=self._on_call, turns=self._turns
        )

    async def learn_secret(self, own: bytes | None) -> bytes:
        """See `learn_secret`."""
        return await learn_secret(self._redis, self._settings, own)

    async def aclose(self) -> None:
        """Closes the connection; the stores can be used no more."""
        await close(self._redis)
