"""A worker's side of a tensor-parallel executor: it joins the leader with its shard and computes what the leader sends.

It decides nothing. It ends when its connection to the leader ends, whatever it does at that moment, and when it has not
heard of the leader for long.
"""

from __future__ import annotations

import json
import logging
import os
import queue
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any, Protocol, Self

import torch
from torch._C._distributed_c10d import Store  # torch.distributed does not export it to type checkers

from inflight.common.model_source import ModelError
from inflight.common.rpc.addresses import host_of
from inflight.executor.checkpoint.shards import Shard
from inflight.executor.native.library import NativeLibrary
from inflight.executor.parallel.device_exchange import DeviceExchange
from inflight.executor.parallel.exchange import Exchange, ProcessGroup, SharedMemory, open_store, prefer_loopback
from inflight.executor.parallel.messages import Connection, ConnectionEnded, Kind

log = logging.getLogger(__name__)

# Signs of life within the time after which a rank counts as lost.
ALIVE_PER_TIMEOUT = 4
# A leader that is silent for so many times the timeout is lost. Its own loss is found earlier by the routers.
LEADER_TIMEOUTS = 10
CONNECT_TIMEOUT_S = 600.0
CONNECT_INTERVAL_S = 0.2


@dataclass(frozen=True, slots=True)
class Hello:
    """What a rank has. `same` must be equal on all ranks; it maps names to values."""

    rank: int
    same: Mapping[str, str]
    host: str
    free_bytes: int

    def difference(self, own: Hello) -> str | None:
        """Returns how this rank differs from the leader."""
        differences = [
            f"its {name} is {self.same.get(name, 'unknown')} and the leader's is {value}"
            for name, value in own.same.items()
            if self.same.get(name) != value
        ]
        return "; ".join(differences) or None

    def fields(self) -> dict[str, Any]:
        """Returns it as JSON has it."""
        return asdict(self)

    @classmethod
    def parse(cls, content: bytes) -> Self:
        """Reads a message. Raises `ValueError`."""
        try:
            fields = json.loads(content)
            same = {str(name): str(value) for name, value in fields["same"].items()}
            return cls(int(fields["rank"]), same, str(fields["host"]), int(fields["free_bytes"]))
        except (KeyError, TypeError, AttributeError) as error:
            raise ValueError(f"it has joined without {error}") from None


@dataclass(frozen=True, slots=True)
class Welcome:
    """How a worker reaches the other ranks: through shared memory if there is a descriptor, else through a store."""

    timeout_s: float
    memory_fd: int | None = None
    half_bytes: int = 0
    result_bytes: int = 0
    store_port: int | None = None

    def fields(self) -> dict[str, Any]:
        """Returns it as JSON has it."""
        return asdict(self)

    @classmethod
    def parse(cls, content: bytes) -> Self:
        """Reads a message of the leader."""
        return cls(**json.loads(content))


class Executes(Protocol):
    """A shard that executes what the leader sends."""

    def execute(self, kind: Kind, content: bytes) -> None:
        """Executes a message of the leader."""
        ...


class Member:
    """A worker's connection to its leader."""

    def __init__(self, shard: Shard, leader: str) -> None:
        self.shard = shard
        self._host = host_of(leader)
        self._connection = Connection(_connect(leader))

    def fail(self, error: BaseException) -> None:
        """Tells the leader why this rank fails."""
        with suppress(OSError):  # the leader has ended
            self._connection.send(Kind.FAILED, f"{type(error).__name__}: {error}".encode())

    def reply(self, kind: Kind, content: bytes) -> None:
        """Sends a message to the leader. Raises `OSError`."""
        self._connection.send(kind, content)

    def serve(self, hello: Hello, start: Callable[[Welcome], Executes]) -> None:
        """Joins, and executes what the leader sends until it ends, by the shard that `start` connects with the other
        ranks. Raises `ModelError` if the leader refuses this worker."""
        self._connection.send_json(Kind.HELLO, hello.fields())
        try:
            kind, content = self._connection.receive()
        except ConnectionEnded:
            return log.info("the leader ended before all ranks had joined")
        if kind is Kind.REFUSED:
            raise ModelError(f"the leader refuses this rank: {content.decode()}")
        welcome = Welcome.parse(content)
        threading.Thread(target=self._stay_alive, args=(welcome.timeout_s,), name="alive", daemon=True).start()
        received: queue.SimpleQueue[tuple[Kind, bytes]] = queue.SimpleQueue()
        threading.Thread(
            target=self._receive, args=(welcome.timeout_s, received.put), name="leader", daemon=True
        ).start()
        shard = start(welcome)
        log.info("rank %d of %d serves", self.shard.rank, self.shard.num_ranks)
        while True:
            shard.execute(*received.get())

    def open_exchange(self, welcome: Welcome, library: NativeLibrary) -> Exchange:
        """Opens the exchange of ranks on CPUs."""
        if welcome.memory_fd is not None:
            return SharedMemory(
                welcome.memory_fd, self.shard, library, welcome.half_bytes, welcome.result_bytes, welcome.timeout_s
            )
        return ProcessGroup(self._open_store(welcome), self.shard, welcome.timeout_s)

    def open_device_exchange(self, welcome: Welcome, device: torch.device) -> DeviceExchange:
        """Opens the exchange of ranks with a device each."""
        return DeviceExchange(self._open_store(welcome), self.shard, device)

    def _open_store(self, welcome: Welcome) -> Store:
        store, _ = open_store(self._host, welcome.store_port, self.shard.num_ranks, welcome.timeout_s)
        if self._host == "127.0.0.1":
            prefer_loopback()
        return store

    def _stay_alive(self, timeout_s: float) -> None:
        while True:
            try:
                self._connection.send(Kind.ALIVE)
            except OSError:
                return  # the receiving thread ends the process
            time.sleep(timeout_s / ALIVE_PER_TIMEOUT)

    def _receive(self, timeout_s: float, take: Callable[[tuple[Kind, bytes]], None]) -> None:
        """Passes on what the leader sends. Without the leader the process ends at once: it may be in an exchange that
        never completes."""
        try:
            while True:
                message = self._connection.receive(LEADER_TIMEOUTS * timeout_s)
                if message[0] is not Kind.ALIVE:
                    take(message)
        except (OSError, ConnectionEnded, ValueError) as error:
            log.info("the leader has ended: %s", error)
            logging.shutdown()
            os._exit(0)


def _connect(leader: str) -> socket.socket:
    """Connects to a leader, which may start later."""
    host, _, port = leader.rpartition(":")
    ends_at = time.monotonic() + CONNECT_TIMEOUT_S
    while True:
        try:
            connection = socket.create_connection((host.strip("[]"), int(port)), timeout=5.0)
            if connection.getsockname() != connection.getpeername():
                return connection
            # Before the leader listens, the kernel may choose its port for this end: then a socket connects to itself.
            connection.close()
            raise ConnectionRefusedError("the leader does not listen yet")
        except OSError as error:
            if time.monotonic() > ends_at:
                raise ModelError(f"the leader at {leader} cannot be reached: {error}") from None
            time.sleep(CONNECT_INTERVAL_S)
