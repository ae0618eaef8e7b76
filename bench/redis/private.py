"""A private Redis on a Unix socket, the fastest way to reach one."""

from __future__ import annotations

from pathlib import Path

from inflight.local.redis_server import PrivateRedis


def private_redis(folder: Path, binary: Path | None = None) -> PrivateRedis:
    """Starts a Redis with its log and socket in a folder; `with` ends it. `binary` None: the one that is found."""
    return PrivateRedis.start(folder / "redis.log", binary=binary, unix_socket=folder / "redis.sock")
