"""The secret that all routers of a system share, where none is set: the first one makes it and leaves it in Redis.

It is no pool's, and outlives them all. Redis may lose it; then a router that knows it puts it back.
"""

from __future__ import annotations

import secrets

from redis.asyncio import Redis

from router.store.connection import answered, unavailable
from router.store.settings import StoreSettings

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
