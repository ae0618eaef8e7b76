"""A local stack: Redis, executors, routers and gateways as processes of this machine.

    async with LocalStack(StackOptions(executors=2)) as stack:
        async with Client(stack.address) as client:
            ...

Owns the processes from start to end. No process is left behind, even after a failed start or a SIGKILL of this process.
The processes end with the thread that started them, so start a stack from the main thread. A run directory belongs to
one stack at a time: `state.json` has the addresses, `<name>.log` the output of each process.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from types import TracebackType
from typing import Self
from urllib.parse import urlsplit

import grpc
from redis.asyncio import Redis
from redis.exceptions import RedisError

from inflight.common.process import EXIT_BAD_SETTING, EXIT_CANNOT_LISTEN
from inflight.common.rpc.server import ListenError, check_listen
from inflight.common.settings import SettingError
from inflight.local.certificates import make_certificates
from inflight.local.gpus import devices_of, num_gpus
from inflight.local.options import (
    STOP_GRACE_S,
    StackOptions,
    executor_command,
    gateway_command,
    router_command,
)
from inflight.local.port_holder import holder_of, is_listening
from inflight.local.ports import LOOPBACK_HOST, free_ports
from inflight.local.process import ChildProcess
from inflight.local.ready import wait_until_http_ready, wait_until_serving
from inflight.local.redis_server import PrivateRedis, RedisStartError
from inflight.local.state import ProcessState, RunFolderLock, StackState, read_state, remove_state, write_state

REDIS = "redis"
EXECUTOR_SERVICE = "inflight.v1.ExecutorService"
ROUTER_SERVICE = "inflight.v1.InferenceService"

# Its URL holds a password, and the command lines of processes are public.
REDIS_URL_VARIABLE = "INFLIGHT_REDIS_URL"
STORE_URL_VARIABLE = "INFLIGHT_STORE_URL"
FILES_VARIABLE = "INFLIGHT_FILES"

# Another process can take a free port before ours listens on it; then everything is started again.
MAX_START_ATTEMPTS = 3

PING_TIMEOUT_S = 5.0


class Phase(Enum):
    """Phase of a process of the stack."""

    STARTING = "starting"
    READY = "ready"
    STOPPING = "stopping"
    STOPPED = "stopped"


@dataclass(frozen=True, slots=True)
class Progress:
    """A process reached a phase, `elapsed_s` seconds after the stack began to start or stop."""

    name: str
    phase: Phase
    elapsed_s: float
    address: str


class StackError(Exception):
    """The stack cannot start or continue. The text is for the user. `is_setting`: a setting is wrong."""

    def __init__(self, text: str, *, is_setting: bool = False) -> None:
        super().__init__(text)
        self.is_setting = is_setting


class _PortTaken(Exception):
    """A process found its free port taken."""


class LocalStack:
    """The processes of one local stack."""

    def __init__(self, options: StackOptions, on_progress: Callable[[Progress], None] = lambda progress: None) -> None:
        self.options = options
        self._on_progress = on_progress
        self._began_s = time.monotonic()
        self._lock: RunFolderLock | None = None
        self._redis: PrivateRedis | None = None
        self._credentials: grpc.ChannelCredentials | None = None
        self._devices: list[int | None] = []
        self.redis_url = options.redis_url or ""
        self.executors: list[ChildProcess] = []
        self.routers: list[ChildProcess] = []
        self.gateways: list[ChildProcess] = []

    @property
    def redis_admin_url(self) -> str:
        """Redis with all rights; for an external Redis, the URL as given."""
        return self.redis_url if self._redis is None else self._redis.admin_url

    @property
    def address(self) -> str:
        """The first router's address."""
        return self.routers[0].address

    @property
    def router_addresses(self) -> tuple[str, ...]:
        """Every router's address."""
        return tuple(router.address for router in self.routers)

    @property
    def gateway_addresses(self) -> tuple[str, ...]:
        """Every gateway's address."""
        return tuple(gateway.address for gateway in self.gateways)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.stop()

    async def start(self) -> None:
        """Starts everything and returns when every process serves.

        Raises:
            StackError: something ended before it was ready, did not get ready in time, or the run folder is in use.
        """
        self._began_s = time.monotonic()
        self._lock = _lock_run_folder(self.options)
        try:
            self._check_chosen_ports()
            self._assign_devices()
            self._make_certificates()
            await self._start_redis()
            await self._start_servers()
            write_state(self.options.run_dir, self._state())
        except BaseException:
            await self.stop()
            raise

    async def stop(self) -> None:
        """Stops everything: gateways and routers first, so that streams end, then executors, then Redis."""
        self._began_s = time.monotonic()
        try:
            await self._stop_servers()
        finally:
            if self._redis is not None:
                redis, self._redis = self._redis, None
                await asyncio.to_thread(redis.stop)
                # Their records were in that Redis.
                await asyncio.to_thread(shutil.rmtree, self._files, ignore_errors=True)
                self._report(REDIS, Phase.STOPPED, "")
            if self._lock is not None:
                remove_state(self.options.run_dir)
                self._lock.release()
                self._lock = None

    async def wait_for_exit(self) -> ChildProcess:
        """Returns the first process that ends by itself, and removes it from the stack."""
        running = (self.gateways, self.routers, self.executors)
        child = await _first_to_end([child for children in running for child in children])
        for children in running:
            if child in children:
                children.remove(child)
        return child

    def _check_chosen_ports(self) -> None:
        """Checks that the ports are free: a process that holds one would be mistaken for a process of the stack."""
        options = self.options
        chosen = (
            ("--port", options.host, options.port),
            ("--http-port", LOOPBACK_HOST, options.http_port),
            ("--gateway-port", LOOPBACK_HOST, options.gateway_port),
        )
        for flag, host, port in chosen:
            try:
                if port is not None:
                    check_listen(f"{host}:{port}")
            except ListenError as error:
                holder = holder_of(port or 0)
                by = "" if holder is None else f" by {holder.command} (pid {holder.pid})"
                raise StackError(f"{error}{by}; choose another port with {flag}", is_setting=True) from None

    def _assign_devices(self) -> None:
        try:
            self._devices = devices_of(self.options, num_gpus())
        except (ValueError, SettingError) as error:
            raise StackError(str(error), is_setting=True) from None

    def _make_certificates(self) -> None:
        made = self.options.certificates
        if made is None:
            return
        try:
            for path in made.files:
                path.unlink(missing_ok=True)
            make_certificates(made.folder)
        except OSError as error:
            raise StackError(f"cannot write certificates to {made.folder}: {error.strerror}", is_setting=True) from None
        self._credentials = made.channel_credentials()

    async def _start_redis(self) -> None:
        if self.options.redis_url is not None:
            await self._check_given_redis()
            return
        self._report(REDIS, Phase.STARTING, "")
        try:
            # Not on another thread, with which Redis would end. It takes a fraction of a second.
            self._redis = PrivateRedis.start(self.options.run_dir / f"{REDIS}.log")
        except RedisStartError as error:
            raise StackError(str(error)) from None
        self.redis_url = self._redis.url
        self._report(REDIS, Phase.READY, _without_password(self.redis_url))

    async def _check_given_redis(self) -> None:
        """Raises if the given Redis does not answer, for which routers would wait. Clusters, Sentinels and TLS have
        settings of the routers, so only routers can connect to them."""
        if not self.redis_url.startswith(("redis://", "unix://")):
            return
        try:
            client: Redis = Redis.from_url(
                self.redis_url, socket_connect_timeout=PING_TIMEOUT_S, socket_timeout=PING_TIMEOUT_S
            )
        except ValueError as error:
            raise StackError(f"--redis-url: {error}", is_setting=True) from None
        try:
            await client.execute_command("PING")  # type: ignore[no-untyped-call]
        except (RedisError, OSError) as error:
            text = f"--redis-url: Redis at {_without_password(self.redis_url)} does not answer: {error}"
            raise StackError(text, is_setting=True) from None
        finally:
            await client.aclose()

    async def _start_servers(self) -> None:
        for attempt in range(1, MAX_START_ATTEMPTS + 1):
            try:
                await self._start_children()
                return
            except _PortTaken as taken:
                await self._stop_servers()
                if attempt == MAX_START_ATTEMPTS:
                    raise StackError(str(taken)) from None

    async def _start_children(self) -> None:
        options = self.options
        # All at once, so that they differ: two for each executor and router.
        ports = iter(free_ports(options.host, 2 * (options.executors + options.routers) + options.gateways))
        for index, device in enumerate(self._devices):
            address, http, name = _loopback(next(ports)), _loopback(next(ports)), f"executor-{index}"
            command = executor_command(options, name, address, http, device)
            self.executors.append(await self._start_child(name, "executor", address, command, http))
        executors = tuple(executor.address for executor in self.executors)
        for index in range(options.routers):
            port, http_port = next(ports), next(ports)
            if index == 0:
                port, http_port = options.port or port, options.http_port or http_port
            address, http, name = f"{options.host}:{port}", _loopback(http_port), f"router-{index}"
            command = router_command(options, name, address, executors, http)
            self.routers.append(await self._start_child(name, "router", address, command, http))
        for index in range(options.gateways):
            port = next(ports)
            if index == 0:
                port = options.gateway_port or port
            address, name = _loopback(port), f"gateway-{index}"
            command = gateway_command(options, address, self.router_addresses)
            self.gateways.append(await self._start_child(name, "gateway", address, command, address))
        await self._wait_until_all_ready()

    async def _start_child(self, name: str, role: str, address: str, command: list[str], http: str) -> ChildProcess:
        self._report(name, Phase.STARTING, address)
        log_file = self.options.run_dir / f"{name}.log"
        environment = {REDIS_URL_VARIABLE: self.redis_url}
        if role == "gateway":
            environment = {REDIS_URL_VARIABLE: "", **self._store()}
        return await ChildProcess.start(name, role, address, command, log_file, environment, http)

    @property
    def _files(self) -> Path:
        return self.options.run_dir.absolute() / "files"

    def _store(self) -> dict[str, str]:
        """Returns the settings of gateways that make them keep responses in the stack's Redis, and files in its folder,
        unless the user has set them. Gateways cannot connect to a cluster, or to a master behind Sentinels."""
        if STORE_URL_VARIABLE in os.environ or not self.redis_url.startswith(("redis://", "rediss://", "unix://")):
            return {}
        files = {} if FILES_VARIABLE in os.environ else {FILES_VARIABLE: str(self._files)}
        return {STORE_URL_VARIABLE: self.redis_url, **files}

    async def _wait_until_all_ready(self) -> None:
        try:
            async with asyncio.TaskGroup() as group:
                for child in (*self.executors, *self.routers, *self.gateways):
                    group.create_task(self._wait_until_ready(child))
        except ExceptionGroup as failed:
            raise failed.exceptions[0] from None

    async def _wait_until_ready(self, child: ChildProcess) -> None:
        """Returns when the child serves; raises if it ends before that or takes too long."""
        ready = asyncio.create_task(self._serving(child))
        ended = asyncio.create_task(child.wait())
        try:
            await asyncio.wait({ready, ended}, return_when=asyncio.FIRST_COMPLETED)
            if child.exit_code is not None:
                raise self._explain_exit(child)
            await ready
        except TimeoutError:
            raise StackError(
                f"{child.name} was not ready after {self.options.start_timeout_s:.0f} s\n{describe_log(child)}"
            ) from None
        finally:
            ready.cancel()
            ended.cancel()
            await asyncio.gather(ready, ended, return_exceptions=True)
        self._report(child.name, Phase.READY, child.address)

    async def _serving(self, child: ChildProcess) -> None:
        timeout_s = self.options.start_timeout_s
        if child.role == "gateway":
            await wait_until_http_ready(child.address, timeout_s)
        else:
            service = EXECUTOR_SERVICE if child.role == "executor" else ROUTER_SERVICE
            await wait_until_serving(child.address, service, timeout_s, self._credentials)
        if not is_listening(child.pid, int(child.address.rpartition(":")[2])):
            # Another server has taken the port and has answered. The child ends when it finds the port taken.
            async with asyncio.timeout(timeout_s):
                await child.wait()

    def _explain_exit(self, child: ChildProcess) -> StackError | _PortTaken:
        own_words = next((line for line in reversed(child.log_tail()) if line.startswith("error: ")), None)
        if child.exit_code == EXIT_CANNOT_LISTEN and child.name not in self.options.names_with_chosen_ports:
            return _PortTaken(f"{child.name}: {own_words}")
        if own_words is not None and child.exit_code in (EXIT_BAD_SETTING, EXIT_CANNOT_LISTEN):
            return StackError(f"{child.name}: {own_words.removeprefix('error: ')}", is_setting=True)
        return StackError(f"{describe_exit(child)} before it was ready\n{describe_log(child)}")

    async def _stop_servers(self) -> None:
        for children in (self.gateways, self.routers, self.executors):
            async with asyncio.TaskGroup() as group:
                for child in children:
                    group.create_task(self._stop_child(child))
            children.clear()

    async def _stop_child(self, child: ChildProcess) -> None:
        self._report(child.name, Phase.STOPPING, child.address)
        await child.stop(STOP_GRACE_S)
        self._report(child.name, Phase.STOPPED, child.address)

    def _state(self) -> StackState:
        processes = []
        if self._redis is not None:
            log_file = str((self.options.run_dir / f"{REDIS}.log").resolve())
            processes.append(ProcessState(REDIS, REDIS, self._redis.pid, _without_password(self.redis_url), log_file))
        for child in (*self.executors, *self.routers, *self.gateways):
            log_file = str(child.log_file.resolve())
            processes.append(
                ProcessState(child.name, child.role, child.pid, child.address, log_file, child.http_address)
            )
        certificates = self.options.certificates
        ca_file = "" if certificates is None else str(certificates.ca_file.resolve())
        return StackState(os.getpid(), self.address, self.redis_url, tuple(processes), ca_file)

    def _report(self, name: str, phase: Phase, address: str) -> None:
        self._on_progress(Progress(name, phase, time.monotonic() - self._began_s, address))


def describe_exit(child: ChildProcess) -> str:
    """Returns how a child ended, as text."""
    code = child.exit_code
    if code is not None and code < 0:
        return f"{child.name} was killed by signal {-code}"
    return f"{child.name} ended with code {code}"


def describe_log(child: ChildProcess) -> str:
    """Returns the path of a child's log, and its last lines."""
    tail = "\n".join(f"    {line}" for line in child.log_tail())
    return f"  the end of {child.log_file}:\n{tail}" if tail else f"  {child.log_file} is empty"


def _lock_run_folder(options: StackOptions) -> RunFolderLock:
    try:
        options.run_dir.mkdir(parents=True, exist_ok=True)
        lock = RunFolderLock(options.run_dir)
        if lock.acquire():
            return lock
    except OSError as error:
        text = (
            f"--run-dir (INFLIGHT_RUN_DIR): cannot use the run directory {options.run_dir}: {_reason(error, options)}"
        )
        raise StackError(text, is_setting=True) from None
    other = read_state(options.run_dir)
    where = "is starting" if other is None else f"serves at {other.address} (pid {other.pid})"
    raise StackError(f"a stack already {where} in {options.run_dir}; stop it first, or use another --run-dir")


def _reason(error: OSError, options: StackOptions) -> str:
    """Returns why the run directory cannot be used, as text."""
    file = next((path for path in (options.run_dir, *options.run_dir.parents) if os.path.isfile(path)), None)
    if file is None:
        return error.strerror or str(error)
    return "it is a file" if file == options.run_dir else f"{file} is a file"


def _loopback(port: int) -> str:
    return f"{LOOPBACK_HOST}:{port}"


def _without_password(redis_url: str) -> str:
    """Returns the host and port of a Redis URL, or the path of its socket."""
    parts = urlsplit(redis_url)
    return parts.netloc.rpartition("@")[2] or parts.path


async def _first_to_end(children: Iterable[ChildProcess]) -> ChildProcess:
    waits = {asyncio.create_task(child.wait()): child for child in children}
    try:
        done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for wait in waits:
            wait.cancel()
    return waits[done.pop()]
