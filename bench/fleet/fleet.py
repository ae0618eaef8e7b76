"""The system under test: real processes, each behind proxies, and a supervisor that starts again what ends.

Addresses stay: what is started again comes back at the same one, as a pod behind its Service would. Each router has a
way of its own to Redis and to each executor, so that any of these can fail alone.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from inflight.bench.fleet.fork_server import start_copy
from inflight.bench.fleet.proxy import Proxy
from inflight.bench.fleet.redis_process import NAME as REDIS
from inflight.bench.fleet.redis_process import RedisProcess
from inflight.local.options import STOP_GRACE_S, StackOptions, executor_command, router_command
from inflight.local.ports import free_ports
from inflight.local.process import ChildProcess
from inflight.local.ready import wait_until_serving
from inflight.local.stack import (
    EXECUTOR_SERVICE,
    REDIS_URL_VARIABLE,
    ROUTER_SERVICE,
    StackError,
    describe_exit,
    describe_log,
)

HOST = "127.0.0.1"
# A process is started again after a moment, as Kubernetes does it; one that keeps ending ends the run.
RESTART_PAUSE_S = 0.2
EARLY_END_S = 15.0
MAX_EARLY_ENDS = 5

Start = Callable[[int], Awaitable[ChildProcess]]
Begin = Callable[[str, str, str, Sequence[str], Path, Mapping[str, str]], Awaitable[ChildProcess]]


@dataclass(slots=True, eq=False)
class Member:
    """A place in the system, and the process that is there now. `start` starts its n-th. An executor has metrics at
    `http_address`."""

    name: str
    role: str
    address: str
    start: Start
    http_address: str = ""
    process: ChildProcess | None = None
    num_starts: int = 0
    started_s: float = 0.0
    num_early_ends: int = 0

    async def renew(self) -> None:
        """Starts the next process at this place."""
        self.num_starts += 1
        self.started_s = time.monotonic()
        self.process = await self.start(self.num_starts)

    def send(self, number: signal.Signals) -> None:
        """Sends a signal to the process, if it is still there."""
        if self.process is not None and self.process.exit_code is None:
            with suppress(ProcessLookupError):
                os.kill(self.process.pid, number)


@dataclass(frozen=True, slots=True)
class Exit:
    """A process ended; a negative code is a signal's number."""

    at_s: float
    name: str
    role: str
    code: int


@dataclass(slots=True)
class Fleet:
    """The members of a running system, and the proxies between them."""

    options: StackOptions
    redis_process: RedisProcess
    redis: Member
    executors: list[Member] = field(default_factory=list)
    routers: list[Member] = field(default_factory=list)
    links: dict[tuple[int, int], Proxy] = field(default_factory=dict)
    stores: list[Proxy] = field(default_factory=list)
    exits: list[Exit] = field(default_factory=list)

    @property
    def members(self) -> list[Member]:
        """All members, in the order of starting."""
        return [self.redis, *self.executors, *self.routers]

    @property
    def addresses(self) -> tuple[str, ...]:
        return tuple(router.address for router in self.routers)

    @property
    def proxies(self) -> list[Proxy]:
        return [*self.links.values(), *self.stores]

    async def wait_until_serving(self, timeout_s: float) -> None:
        """Returns when every router and executor serves. Raises `TimeoutError`."""
        async with asyncio.timeout(timeout_s), asyncio.TaskGroup() as group:
            for service, members in ((EXECUTOR_SERVICE, self.executors), (ROUTER_SERVICE, self.routers)):
                for member in members:
                    group.create_task(wait_until_serving(member.address, service, 2 * timeout_s))

    async def supervise(self) -> None:
        """Starts again what ends, until cancelled. Raises `StackError` if a process keeps ending."""
        async with asyncio.TaskGroup() as group:
            for member in self.members:
                group.create_task(self._keep(member), name=f"keep {member.name}")

    async def _keep(self, member: Member) -> None:
        while True:
            assert member.process is not None
            code = await member.process.wait()
            now = time.monotonic()
            self.exits.append(Exit(now, member.name, member.role, code))
            is_early = code > 0 and now - member.started_s < EARLY_END_S  # what a signal ended is our doing
            member.num_early_ends = member.num_early_ends + 1 if is_early else 0
            if member.num_early_ends >= MAX_EARLY_ENDS:
                raise StackError(f"{describe_exit(member.process)} again and again\n{describe_log(member.process)}")
            await asyncio.sleep(RESTART_PAUSE_S)
            await member.renew()


@asynccontextmanager
async def running_fleet(options: StackOptions, *, copies: bool = False) -> AsyncIterator[Fleet]:
    """Runs a fleet of the size in `options`, complete when the block begins. Nothing is left of it afterwards.

    With `copies` its routers and executors are copies of a process that has loaded their code.
    """
    fleet = _laid_out(options, _begin_copy if copies else ChildProcess.start)
    options.run_dir.mkdir(parents=True, exist_ok=True)
    try:
        for proxy in fleet.proxies:
            await proxy.start()
        for member in fleet.members:
            await member.renew()
        supervisor = asyncio.create_task(fleet.supervise(), name="supervisor")
        try:
            await _up(fleet, supervisor, options.start_timeout_s)
            yield fleet
        finally:
            supervisor.cancel()
            await asyncio.gather(supervisor, return_exceptions=True)
    finally:
        await _stop(fleet)


async def _up(fleet: Fleet, supervisor: asyncio.Task[None], timeout_s: float) -> None:
    """Returns when all members serve. Raises `StackError` if one keeps ending, or it takes too long."""
    ready = asyncio.create_task(fleet.wait_until_serving(timeout_s))
    try:
        await asyncio.wait({ready, supervisor}, return_when=asyncio.FIRST_COMPLETED)
        if supervisor.done():
            raise StackError(_words_of(supervisor.exception()))
        await ready
    except TimeoutError:
        raise StackError(f"the system was not up after {timeout_s:.0f} s") from None
    finally:
        ready.cancel()
        await asyncio.gather(ready, return_exceptions=True)


def _words_of(error: BaseException | None) -> str:
    """What a supervisor gave up with; it comes in a group of one."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return str(error)


def _laid_out(options: StackOptions, begin: Begin) -> Fleet:
    """Returns every member and every proxy, not started yet."""
    num_ports = 1 + 2 * options.executors + options.routers * (2 + options.executors)
    ports = iter(free_ports(HOST, num_ports))

    def address() -> str:
        return f"{HOST}:{next(ports)}"

    redis_process = RedisProcess(options.run_dir / REDIS, next(ports))
    fleet = Fleet(
        options, redis_process, Member(REDIS, REDIS, redis_process.address, lambda number: redis_process.start())
    )
    for index in range(options.executors):
        fleet.executors.append(_executor(options, f"executor-{index}", address(), address(), begin))
    for index in range(options.routers):
        name = f"router-{index}"
        fleet.stores.append(Proxy(f"{name} – {REDIS}", address(), redis_process.address))
        for number, executor in enumerate(fleet.executors):
            fleet.links[index, number] = Proxy(f"{name} – {executor.name}", address(), executor.address)
        links = tuple(fleet.links[index, number].address for number in range(options.executors))
        redis_url = redis_process.url(fleet.stores[index].address)
        fleet.routers.append(_router(options, name, address(), links, redis_url, begin))
    return fleet


def _executor(options: StackOptions, name: str, address: str, http_address: str, begin: Begin) -> Member:
    command = executor_command(options, name, address, http_address)

    async def start(number: int) -> ChildProcess:
        log_file = options.run_dir / f"{name}.{number}.log"
        return await begin(name, "executor", address, command, log_file, {})

    return Member(name, "executor", address, start, http_address)


def _router(
    options: StackOptions, name: str, address: str, links: tuple[str, ...], redis_url: str, begin: Begin
) -> Member:
    async def start(number: int) -> ChildProcess:
        # Another id at every start, as a router has by default: mail for the one before it is not for this one.
        command = router_command(options, f"{name}.{number}", address, links)
        log_file = options.run_dir / f"{name}.{number}.log"
        return await begin(name, "router", address, command, log_file, {REDIS_URL_VARIABLE: redis_url})

    return Member(name, "router", address, start)


async def _begin_copy(
    name: str, role: str, address: str, command: Sequence[str], log_file: Path, environment: Mapping[str, str]
) -> ChildProcess:
    """As `ChildProcess.start`, with a copy."""
    return ChildProcess(name, role, address, log_file, await start_copy(command, log_file, environment))


async def _stop(fleet: Fleet) -> None:
    async with asyncio.TaskGroup() as group:
        for member in fleet.members:
            if member.process is not None:
                member.send(signal.SIGCONT)  # a stopped one would not hear that it is to end
                grace_s = 0.0 if member is fleet.redis else STOP_GRACE_S
                group.create_task(member.process.stop(grace_s))
    for proxy in fleet.proxies:
        await proxy.stop()
