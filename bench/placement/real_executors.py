"""The executors of the placement benchmarks, and the ways to them: processes of this machine.

One router is linked to all and places by the ledger. Each executor has one more to itself, with a ledger of its
own, so that the benchmark itself can choose the executor of a request.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from inflight import AsyncClient
from inflight.bench.redis.private import private_redis
from inflight.local.options import STOP_GRACE_S, StackOptions, executor_command, router_command
from inflight.local.ports import free_ports
from inflight.local.process import ChildProcess
from inflight.local.ready import wait_until_serving
from inflight.local.stack import EXECUTOR_SERVICE, REDIS_URL_VARIABLE, ROUTER_SERVICE

HOST = "127.0.0.1"
START_TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True)
class RealExecutors:
    """Clients of the routers. `of_executor` are by the name of the executor, in order."""

    placing: AsyncClient
    of_executor: Mapping[str, AsyncClient]


@asynccontextmanager
async def real_executors(
    folder: Path, executor_args: Sequence[str], num_executors: int = 2
) -> AsyncIterator[RealExecutors]:
    """Runs the processes while the block runs."""
    options = StackOptions(executors=num_executors, executor_args=tuple(executor_args), run_dir=folder)
    addresses = [f"{HOST}:{port}" for port in free_ports(HOST, 2 * num_executors + 1)]
    names = [f"executor-{index}" for index in range(num_executors)]
    executors, routers = addresses[:num_executors], addresses[num_executors:]
    links = [tuple(executors), *((address,) for address in executors)]
    async with AsyncExitStack() as stack:
        for name, address in zip(names, executors, strict=True):
            await _start(stack, folder, name, address, executor_command(options, name, address), {})
        await _serve(executors, EXECUTOR_SERVICE)
        for index, (address, linked) in enumerate(zip(routers, links, strict=True)):
            name = f"router-{index}"
            (folder / name).mkdir(parents=True)
            redis = stack.enter_context(private_redis(folder / name))
            command = router_command(options, name, address, linked)
            await _start(stack, folder, name, address, command, {REDIS_URL_VARIABLE: redis.url})
        await _serve(routers, ROUTER_SERVICE)
        clients = [await stack.enter_async_context(AsyncClient(address)) for address in routers]
        yield RealExecutors(clients[0], dict(zip(names, clients[1:], strict=True)))


async def _start(
    stack: AsyncExitStack, folder: Path, name: str, address: str, command: Sequence[str], environment: Mapping[str, str]
) -> None:
    role = name.partition("-")[0]
    process = await ChildProcess.start(name, role, address, command, folder / f"{name}.log", environment)
    stack.push_async_callback(process.stop, STOP_GRACE_S)


async def _serve(addresses: Sequence[str], service: str) -> None:
    async with asyncio.TaskGroup() as group:
        for address in addresses:
            group.create_task(wait_until_serving(address, service, START_TIMEOUT_S))
