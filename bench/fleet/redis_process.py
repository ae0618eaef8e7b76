"""A Redis that can be killed and started again at the same address, with what it held or empty.

It writes every change to a file before it answers, so that a killed one loses no acknowledged change.
"""

from __future__ import annotations

import secrets
import shutil
from pathlib import Path

from inflight.local.process import ChildProcess
from inflight.local.redis_server import find_redis_binary

NAME = "redis"
CONFIGURATION = """\
bind 127.0.0.1
port {port}
requirepass {password}
dir "{folder}"
save ""
appendonly yes
appendfsync no
zset-max-ziplist-entries 0
"""


class RedisProcess:
    """A Redis with a folder of its own."""

    def __init__(self, folder: Path, port: int) -> None:
        self._folder = folder.absolute()
        self._port = port
        self._password = secrets.token_urlsafe(24)
        self._is_to_be_empty = True  # whatever an earlier run left

    def url(self, address: str | None = None) -> str:
        """Where it is, or where it is behind a proxy at `address`."""
        return f"redis://:{self._password}@{address or self.address}/0"

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self._port}"

    async def start(self) -> ChildProcess:
        """Starts it with what it held, unless it is to be empty."""
        self._folder.mkdir(parents=True, exist_ok=True)
        if self._is_to_be_empty:
            self._is_to_be_empty = False
            self._remove_files()
        configuration = self._folder / "redis.conf"
        configuration.touch(mode=0o600)  # arguments are public, and the password is none of the public's
        text = CONFIGURATION.format(port=self._port, password=self._password, folder=self._folder)
        configuration.write_text(text, encoding="utf-8")
        command = [str(find_redis_binary()), str(configuration)]
        log_file = self._folder / "redis.log"
        return await ChildProcess.start(NAME, NAME, self.address, command, log_file, {})

    def forget(self) -> None:
        """Makes the next start an empty one."""
        self._is_to_be_empty = True

    def _remove_files(self) -> None:
        for path in self._folder.glob("appendonly*"):
            if path.is_dir():  # from Redis 7 on there are several files
                shutil.rmtree(path)
            else:
                path.unlink()
