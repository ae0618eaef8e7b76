"""Redis processes as tests need them: a master with a replica and a Sentinel, and a cluster
of three nodes."""

from __future__ import annotations

import functools
import itertools
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from redis import Redis
from redis.exceptions import RedisError

from inflight.common.guard import HAS_KERNEL_GUARD, guarded
from inflight.local.ports import free_ports
from inflight.local.redis_server import ACL_RULES, find_redis_binary

START_TIMEOUT_S = 60.0
PASSWORD = "store-password"
ADMIN_PASSWORD = "admin-password"
NUM_SLOTS = 16384
MASTER = "the-master"


@dataclass(slots=True)
class Server:
    """A running server on a port of its own; `kill` leaves it no time to say goodbye."""

    port: int
    process: subprocess.Popen[bytes]

    def admin(self) -> Redis:
        """A client that may do everything."""
        return Redis(port=self.port, password=ADMIN_PASSWORD, decode_responses=True)

    def ask(self, *command: str | int) -> Any:
        """The reply to a command."""
        return self.admin().execute_command(*command)  # type: ignore[no-untyped-call]

    def kill(self) -> None:
        """Ends the process at once."""
        self.process.kill()
        self.process.wait()


def free_cluster_ports(count: int) -> list[int]:
    """Ports whose cluster ports, 10,000 above, are free and below the ephemeral range as well."""
    candidates = (port for port in free_ports("127.0.0.1", 30 * count) if port < 22_000 and _is_free(port + 10_000))
    return list(itertools.islice(candidates, count))


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def start(folder: Path, port: int, lines: str, *flags: str) -> Server:
    """Starts a server and waits until it answers. It keeps its configuration, as Sentinels and nodes must."""
    folder.mkdir(parents=True, exist_ok=True)
    configuration = folder / f"{port}.conf"
    if not configuration.exists():
        configuration.write_text(f"bind 127.0.0.1\nport {port}\ndir {folder}\n{lines}")
    command = [str(find_redis_binary()), str(configuration), *flags]
    output = folder / f"{port}.log"
    with output.open("ab") as log:
        process = subprocess.Popen(guarded(command) if HAS_KERNEL_GUARD else command, stdout=log, stderr=log)
    server = Server(port, process)

    def answers() -> bool:
        if process.poll() is not None:
            pytest.fail(f"Redis ended at its start:\n{output.read_text()}")
        return bool(server.admin().ping())

    until(answers)
    return server


def until(is_so: object) -> None:
    """Polls for a condition of servers that they do not announce."""
    assert callable(is_so)
    deadline = time.monotonic() + START_TIMEOUT_S
    while True:
        try:
            if is_so():
                return
        except RedisError:
            pass  # not yet
        if time.monotonic() > deadline:
            raise TimeoutError
        time.sleep(0.02)


def users(password: str = PASSWORD) -> str:
    """The default user for the test and for servers among themselves; the least-privilege one for the store."""
    return (
        f"requirepass {ADMIN_PASSWORD}\nmasterauth {ADMIN_PASSWORD}\n"
        f'save ""\nappendonly no\nrepl-diskless-sync yes\nrepl-diskless-sync-delay 0\n'
        f"user inflight on >{password} {ACL_RULES}\n"
    )


@dataclass(slots=True)
class Watched:
    """A master, its replica, the Sentinel that watches them, and the URL for a router."""

    master: Server
    replica: Server
    sentinel: Server
    url: str

    def fail_over(self) -> None:
        """Replaces the master by the replica, and has the Sentinel say so. By itself a Sentinel replaces nothing for
        half a minute after a machine stood still for two seconds."""
        self.sentinel.ask("SENTINEL", "REMOVE", MASTER)
        self.sentinel.ask("SENTINEL", "MONITOR", MASTER, "127.0.0.1", self.replica.port, 1)
        self.sentinel.ask("SENTINEL", "SET", MASTER, "auth-pass", ADMIN_PASSWORD)
        self.sentinel.ask("SENTINEL", "SET", MASTER, "down-after-milliseconds", 60_000)
        self.replica.ask("REPLICAOF", "NO", "ONE")


@contextmanager
def sentinel_servers(folder: Path) -> Iterator[Watched]:
    """A master that a Sentinel replaces by its replica when it is told to: not because the machine stood still."""
    master_port, replica_port, sentinel_port = free_cluster_ports(3)
    watch = (
        f"requirepass {ADMIN_PASSWORD}\nsentinel monitor {MASTER} 127.0.0.1 {master_port} 1\n"
        f"sentinel auth-pass {MASTER} {ADMIN_PASSWORD}\nsentinel down-after-milliseconds {MASTER} 60000\n"
        f"sentinel failover-timeout {MASTER} 60000\n"
    )
    with ExitStack() as stack:
        master = start(folder, master_port, users())
        stack.callback(master.kill)
        lines = users() + f"replicaof 127.0.0.1 {master_port}\n"
        replica = start(folder, replica_port, lines)
        stack.callback(replica.kill)
        until(lambda: replica.admin().info("replication")["master_link_status"] == "up")
        sentinel = start(folder, sentinel_port, watch, "--sentinel")
        stack.callback(sentinel.kill)
        until(lambda: len(sentinel.ask("SENTINEL", "REPLICAS", MASTER)) == 1)
        hosts = f"127.0.0.1:1,127.0.0.1:{sentinel_port}"  # the first one is not there
        options = f"?sentinel_password={ADMIN_PASSWORD}"
        yield Watched(master, replica, sentinel, f"redis+sentinel://inflight:{PASSWORD}@{hosts}/{MASTER}/0{options}")


def _is_whole(node: Server) -> bool:
    found = node.admin().cluster("info")
    return (found["cluster_state"], found["cluster_slots_ok"]) == ("ok", str(NUM_SLOTS))


@contextmanager
def cluster_servers(folder: Path) -> Iterator[tuple[list[Server], str]]:
    """Three nodes that share the slots, and the URL for a router."""
    ports = free_cluster_ports(3)
    lines = users() + "cluster-enabled yes\ncluster-node-timeout 15000\ncluster-require-full-coverage no\n"
    with ExitStack() as stack:
        nodes = []
        for port in ports:
            nodes.append(start(folder, port, lines + f"cluster-config-file nodes-{port}.conf\n"))
            stack.callback(nodes[-1].kill)
        for index, node in enumerate(nodes):
            first, last = index * NUM_SLOTS // 3, (index + 1) * NUM_SLOTS // 3 - 1
            node.ask("CLUSTER", "ADDSLOTS", *range(first, last + 1))
            for other in nodes[:index]:
                node.ask("CLUSTER", "MEET", "127.0.0.1", other.port)
        for node in nodes:
            until(functools.partial(_is_whole, node))
        hosts = ",".join(f"127.0.0.1:{port}" for port in ports)
        yield nodes, f"redis+cluster://inflight:{PASSWORD}@{hosts}"
