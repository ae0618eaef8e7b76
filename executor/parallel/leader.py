"""The leader's side of a tensor-parallel executor: its workers, from their start until one fails.

The leader is rank 0. It starts the other ranks itself, or waits on an address for ranks of other machines. A worker
that joins has loaded its shard and says what it has. If anything differs from the leader's, it is refused with the
reason. After that each worker says at intervals that it lives. The first failure of any rank is logged, ends the
workers of this machine and fails the executor: a shard cannot be replaced, because its KV is lost.
"""

from __future__ import annotations

import logging
import os
import queue
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._C._distributed_c10d import Store  # torch.distributed does not export it to type checkers

from inflight.common.guard import guarded
from inflight.common.model_source import ModelError
from inflight.common.process import EXIT_FAILED
from inflight.common.rpc.addresses import host_of
from inflight.common.rpc.server import bind
from inflight.executor.checkpoint.shards import Shard
from inflight.executor.cpu.decoder import NativeDecoder
from inflight.executor.native.library import NativeLibrary
from inflight.executor.parallel.device_exchange import DeviceExchange
from inflight.executor.parallel.exchange import (
    Connected,
    Exchange,
    ProcessGroup,
    SharedMemory,
    open_store,
    prefer_loopback,
)
from inflight.executor.parallel.member import ALIVE_PER_TIMEOUT, Hello, Welcome
from inflight.executor.parallel.messages import Connection, ConnectionEnded, Kind
from inflight.executor.parallel.results import result_width

log = logging.getLogger(__name__)

# Loading a large model from a slow disk takes minutes.
JOIN_TIMEOUT_S = 1800.0
# Time for the connection of a rank to show why an exchange has failed.
CAUSE_TIMEOUT_S = 1.0
KILL_TIMEOUT_S = 5.0
# Reading an adapter of some hundred megabytes from a slow disk takes a minute.
ADAPTER_TIMEOUT_S = 600.0
# Tokens of the check of a loaded model, which is a step of all ranks.
MIN_TOKENS = 64


@dataclass(frozen=True, slots=True)
class GroupSettings:
    """How ranks are started and watched. Without `listen` the leader starts them on this machine."""

    num_ranks: int
    listen: str
    timeout_s: float
    # Of a step; the ranks make room for them.
    max_num_tokens: int
    # Of the workers that the leader starts.
    environment: Mapping[str, str] = field(default_factory=dict)
    # Whether each rank uses a GPU of its own. The leader sees its own one first.
    has_gpus: bool = False


class WorkerGroup:
    """The workers. `join` is called once, and steps are sent afterwards."""

    def __init__(self, settings: GroupSettings) -> None:
        self.shard = Shard(0, settings.num_ranks)
        self.timeout_s = settings.timeout_s
        self._max_num_tokens = settings.max_num_tokens
        self._has_gpus = settings.has_gpus
        self.is_local = not settings.listen
        self.hellos: dict[int, Hello] = {}
        self._connections: dict[int, Connection] = {}
        # With those of workers that have not joined.
        self._open_connections: set[Connection] = set()
        self._processes: dict[int, subprocess.Popen[bytes]] = {}
        self._joining: queue.SimpleQueue[tuple[Hello, Connection]] = queue.SimpleQueue()
        # Of each rank's attempt to load an adapter, why it cannot, and "" if it has; None once the group has failed.
        self._adapter_replies: queue.SimpleQueue[str | None] = queue.SimpleQueue()
        # Memory that each rank has taken since the ranks joined, in addition to its shard.
        self.reserved_bytes = 0
        self._exchange: Connected | None = None
        self._is_joined = self._is_closing = self._is_connecting = False
        self._failing = threading.Lock()
        self._failure = ""
        self._has_failed = threading.Event()
        self._on_failure: Callable[[], None] | None = None
        self._listener = bind(settings.listen or "127.0.0.1:0")
        self._listener.listen()
        self._memory_fd = os.memfd_create("inflight-ranks") if self.is_local else None
        threading.Thread(target=self._accept, name="ranks", daemon=True).start()
        log.info("rank 0 of %d waits for the others on %s", settings.num_ranks, self.address)
        if self.is_local:
            for rank in range(1, settings.num_ranks):
                self._processes[rank] = self._start(rank, settings.environment)

    @property
    def address(self) -> str:
        """Where workers join."""
        host, port = self._listener.getsockname()[:2]
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

    def join(self, hello: Hello) -> None:
        """Waits for all workers. `hello` is what this rank has."""
        self.hellos[0] = hello
        ends_at = time.monotonic() + JOIN_TIMEOUT_S
        while len(self.hellos) < self.shard.num_ranks:
            self._check_processes()
            try:
                found, connection = self._joining.get(timeout=0.2)
            except queue.Empty:
                if time.monotonic() > ends_at:
                    raise ModelError(f"ranks {self._missing()} have not joined in {JOIN_TIMEOUT_S:.0f} s") from None
                continue
            refusal = self._refusal(found, hello)
            if refusal is None:
                self.hellos[found.rank] = found
                self._connections[found.rank] = connection
                log.info("rank %d has joined (%d of %d)", found.rank, len(self.hellos), self.shard.num_ranks)
            else:
                log.error("refused a worker as rank %d: %s", found.rank, refusal)
                connection.send(Kind.REFUSED, refusal.encode())
                connection.close()

    def open_exchange(self, decoder: NativeDecoder, library: NativeLibrary) -> Exchange:
        """Opens the exchange of ranks on CPUs, once all have joined. `decoder` is what this rank has."""
        self._exchange = exchange = self._open(decoder, library)
        self._show_life()
        return exchange

    def open_device_exchange(self, device: torch.device) -> DeviceExchange:
        """Opens the exchange of ranks with a device each, once all have joined."""
        store = self._open_store()
        self._show_life()  # NCCL may take long to connect
        self._is_connecting = self._has_gpus
        self._exchange = exchange = DeviceExchange(store, self.shard, device)
        self._is_connecting = False
        return exchange

    @property
    def failure(self) -> str:
        """The first failure; empty if there is none."""
        return self._failure

    @property
    def free_bytes_per_rank(self) -> int:
        """The memory that every rank has at least, if those of a machine share what is free there."""
        by_host = [
            [hello.free_bytes for hello in self.hellos.values() if hello.host == host]
            for host in {hello.host for hello in self.hellos.values()}
        ]
        return max(0, min(min(free_bytes) // len(free_bytes) for free_bytes in by_host) - self.reserved_bytes)

    def wait_for_adapter(self) -> list[str]:
        """Waits until every worker has tried to load the adapter of the last LOAD_ADAPTER, and returns why some cannot.
        A worker that does not answer is a failure."""
        replies: list[str] = []
        ends_at = time.monotonic() + ADAPTER_TIMEOUT_S
        while len(replies) < len(self._connections):
            try:
                reply = self._adapter_replies.get(timeout=max(0.0, ends_at - time.monotonic()))
            except queue.Empty:
                self.fail(f"a rank has not loaded an adapter in {ADAPTER_TIMEOUT_S:.0f} s")
                reply = None
            if reply is None:
                self._adapter_replies.put(None)  # also the next call finds it
                return [f"a rank has failed: {self._failure or 'the executor ends'}"]
            replies.append(reply)
        return sorted(reply for reply in replies if reply)

    def send(self, kind: Kind, content: bytes) -> None:
        """Sends a message to every worker. A worker that cannot be reached is a failure."""
        for rank, connection in self._connections.items():
            try:
                connection.send(kind, content)
            except OSError as error:
                self.fail(f"rank {rank} cannot be reached: {error}")

    def watch(self, on_failure: Callable[[], None]) -> None:
        """Lets the next failure, or one that has happened already, call `on_failure` from some thread."""
        self._on_failure = on_failure
        if self._has_failed.is_set():
            on_failure()

    def fail(self, reason: str) -> None:
        """Ends the group. Only the first reason counts."""
        with self._failing:
            if self._failure or self._is_closing:
                return
            self._failure = reason
        log.error("a rank of this executor has failed, so the executor fails: %s", reason)
        if self._exchange is not None:
            self._exchange.abandon()
        self._kill()
        if self._is_connecting:
            # NCCL would wait for the lost rank, and cannot be told.
            logging.shutdown()
            os._exit(EXIT_FAILED)
        self._has_failed.set()
        self._adapter_replies.put(None)
        if self._on_failure is not None:
            self._on_failure()

    def cause(self, otherwise: str) -> str:
        """Returns the first failure. It may become known shortly after its effect; if none does, `otherwise` is it."""
        if not self._has_failed.wait(CAUSE_TIMEOUT_S):
            self.fail(otherwise)
        return self._failure

    def close(self) -> None:
        """Ends the workers."""
        with self._failing:
            self._is_closing = True
        self._adapter_replies.put(None)
        if self._exchange is not None and not self._failure:
            self._exchange.close()
        self._kill()
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)  # wakes the thread that accepts
        self._listener.close()
        if self._memory_fd is not None:
            os.close(self._memory_fd)
            self._memory_fd = None

    # ---- from here on on threads of their own ----

    def _accept(self) -> None:
        while True:
            try:
                connected, address = self._listener.accept()
            except OSError:
                return
            threading.Thread(
                target=self._serve, args=(Connection(connected), address), name="rank", daemon=True
            ).start()

    def _serve(self, connection: Connection, address: Any) -> None:
        """Reads what a worker sends until its connection ends."""
        name, is_member = f"the worker at {address[0]}:{address[1]}", False
        self._open_connections.add(connection)
        try:
            while True:
                kind, content = connection.receive(self.timeout_s if is_member and self._is_joined else None)
                if kind is Kind.HELLO:
                    hello = Hello.parse(content)
                    name, is_member = f"rank {hello.rank}", True
                    self._joining.put((hello, connection))
                elif kind is Kind.ADAPTER_LOADED and is_member:
                    reason = content.decode(errors="replace")
                    self._adapter_replies.put(reason and f"{name}: {reason}")
                elif kind is Kind.FAILED and (is_member or not self._is_joined):
                    return self.fail(f"{name}: {content.decode(errors='replace')}")
        except TimeoutError:
            self.fail(f"{name} has shown no sign of life for {self.timeout_s:g} s")
        except (OSError, ConnectionEnded, ValueError) as error:
            if is_member and connection in self._connections.values():
                self.fail(f"{name}: {self._end_of(name) or error}")
            else:
                log.warning("%s has left before it joined: %s", name, error)
        finally:
            self._open_connections.discard(connection)
            connection.close()

    def _end_of(self, name: str) -> str:
        """Returns how the process of a rank has ended, if this is known."""
        process = self._processes.get(int(name.removeprefix("rank ")))
        if process is None:
            return ""
        try:
            code = process.wait(timeout=CAUSE_TIMEOUT_S / 2)
        except subprocess.TimeoutExpired:
            return ""
        return f"its process was ended by signal {-code}" if code < 0 else f"its process ended with code {code}"

    # ---- helpers ----

    def _start(self, rank: int, environment: Mapping[str, str]) -> subprocess.Popen[bytes]:
        own = {"INFLIGHT_TENSOR_PARALLEL_RANK": str(rank), "INFLIGHT_TENSOR_PARALLEL_LEADER": self.address}
        if self._has_gpus:
            own["INFLIGHT_DEVICE_INDEX"] = str(rank)
        assert self._memory_fd is not None
        return subprocess.Popen(
            guarded([sys.executable, "-P", "-m", "inflight.cli.main", "executor"]),
            stdin=subprocess.DEVNULL,
            env={**os.environ, **environment, **own},
            pass_fds=(self._memory_fd,),
            # Signals of a terminal are for the leader.
            start_new_session=True,
        )

    def _refusal(self, found: Hello, own: Hello) -> str | None:
        if not 0 < found.rank < self.shard.num_ranks:
            return f"rank {found.rank} is not one of 1 to {self.shard.num_ranks - 1}"
        if found.rank in self.hellos:
            return f"there is a rank {found.rank} already"
        return found.difference(own)

    def _open(self, decoder: NativeDecoder, library: NativeLibrary) -> Exchange:
        if self._memory_fd is not None:
            num_tokens = max(self._max_num_tokens, MIN_TOKENS)
            half_bytes = self.shard.num_ranks * _whole_lines(num_tokens * decoder.row_part_bytes)
            result_bytes = _whole_lines(num_tokens * max(4 * result_width(decoder), 16))
            os.ftruncate(self._memory_fd, SharedMemory.num_bytes(self.shard.num_ranks, half_bytes, result_bytes))
            welcome = Welcome(self.timeout_s, self._memory_fd, half_bytes, result_bytes)
            exchange = SharedMemory(self._memory_fd, self.shard, library, half_bytes, result_bytes, self.timeout_s)
            self._welcome(welcome)
            return exchange
        return ProcessGroup(self._open_store(), self.shard, self.timeout_s)

    def _open_store(self) -> Store:
        """Opens the store of a process group, and tells the workers where it is."""
        host = host_of(self.address)
        store, port = open_store(host, None, self.shard.num_ranks, self.timeout_s)
        self._welcome(Welcome(self.timeout_s, store_port=port))
        if host == "127.0.0.1":
            prefer_loopback()
        return store

    def _show_life(self) -> None:
        threading.Thread(target=self._stay_alive, name="ranks-alive", daemon=True).start()

    def _welcome(self, welcome: Welcome) -> None:
        for connection in self._connections.values():
            connection.send_json(Kind.WELCOME, welcome.fields())
        self._is_joined = True

    def _stay_alive(self) -> None:
        while not self._has_failed.wait(self.timeout_s / ALIVE_PER_TIMEOUT) and not self._is_closing:
            self.send(Kind.ALIVE, b"")

    def _check_processes(self) -> None:
        if self._failure or self._is_closing:
            raise ModelError(self._failure or "the executor ends")
        for rank, process in self._processes.items():
            if rank not in self.hellos and process.poll() is not None:
                raise ModelError(f"rank {rank} ended with code {process.returncode} before it joined; see its log")

    def _missing(self) -> str:
        return ", ".join(str(rank) for rank in range(self.shard.num_ranks) if rank not in self.hellos)

    def _kill(self) -> None:
        for process in self._processes.values():
            process.kill()
        for connection in tuple(self._open_connections):
            connection.close()
        for process in self._processes.values():
            try:
                process.wait(KILL_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                log.error("process %d does not end", process.pid)


def _whole_lines(num_bytes: int) -> int:
    """Returns the size of whole cache lines, so that what follows is aligned."""
    return -(-num_bytes // 64) * 64
