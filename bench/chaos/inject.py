"""Injection of faults into a fleet, for as long as they last."""

from __future__ import annotations

import asyncio
import signal
from collections.abc import Callable, Coroutine
from contextlib import aclosing, suppress
from typing import Any

from inflight.bench.chaos.adapters import ServedAdapters
from inflight.bench.chaos.schedule import Fault, FaultKind
from inflight.bench.fleet.fleet import Fleet, Member
from inflight.bench.fleet.proxy import Proxy, Weather
from inflight.bench.simulation.store_link import REMEMBER, RESTORE
from inflight.common.errors import RequestError
from inflight.router.ledger.connection import answered, connect_node
from inflight.router.ledger.settings import LedgerSettings

# What routers keep in Redis, and before the names of its copies.
KEYS, KEPT = "inflight:*", "kept:"


async def inject(fleet: Fleet, fault: Fault, adapters: ServedAdapters | None = None) -> None:
    """Returns when the fault is over; the system need not have recovered by then. Faults of adapters need
    `adapters`."""
    if adapters is not None and fault.kind in _ADAPTER_INJECTIONS:
        async with adapters.turn:
            await _ADAPTER_INJECTIONS[fault.kind](adapters, fault)
    else:
        await _INJECTIONS[fault.kind](fleet, fault)


async def _kill(member: Member) -> None:
    member.send(signal.SIGKILL)


async def _restart(member: Member) -> None:
    """A rolling restart asks the process to end, and waits for it to."""
    process = member.process
    assert process is not None
    member.send(signal.SIGTERM)
    await process.wait()


async def _hang(member: Member, lasts_s: float) -> None:
    member.send(signal.SIGSTOP)
    try:
        await asyncio.sleep(lasts_s)
    finally:
        member.send(signal.SIGCONT)


async def _empty(fleet: Fleet) -> None:
    fleet.redis_process.forget()
    await _kill(fleet.redis)


async def _forget_newest(fleet: Fleet, lost_s: float) -> None:
    """Has Redis lose what it is told in so many seconds. Its connections stay, and no call fails."""
    settings = LedgerSettings()
    async with aclosing(connect_node(fleet.redis_process.url(), settings)) as redis:
        with suppress(RequestError):  # where Redis dies meanwhile, that is the fault
            await answered(redis.eval(REMEMBER, 0, KEYS, KEPT), settings)
            await asyncio.sleep(lost_s)
            await answered(redis.eval(RESTORE, 0, KEYS, KEPT), settings)


async def _disturb(proxy: Proxy, fault: Fault, weather: Weather) -> None:
    proxy.set_weather(weather, fault.delay_s)
    try:
        await asyncio.sleep(fault.lasts_s)
    finally:
        proxy.set_weather(Weather.FAIR)


def _link(weather: Weather) -> Callable[[Fleet, Fault], Coroutine[Any, Any, None]]:
    return lambda fleet, fault: _disturb(fleet.links[fault.router, fault.executor], fault, weather)


def _store(weather: Weather) -> Callable[[Fleet, Fault], Coroutine[Any, Any, None]]:
    return lambda fleet, fault: _disturb(fleet.stores[fault.router], fault, weather)


async def _replace(adapters: ServedAdapters, fault: Fault) -> None:
    await adapters.replace(fault.adapter)


async def _remove(adapters: ServedAdapters, fault: Fault) -> None:
    await adapters.remove(fault.adapter)
    await asyncio.sleep(fault.lasts_s)
    await adapters.replace(fault.adapter)


async def _truncate(adapters: ServedAdapters, fault: Fault) -> None:
    await adapters.truncate(fault.adapter)
    await asyncio.sleep(fault.lasts_s)
    await adapters.replace(fault.adapter)


_ADAPTER_INJECTIONS = {
    FaultKind.ADAPTER_REPLACE: _replace,
    FaultKind.ADAPTER_REMOVE: _remove,
    FaultKind.ADAPTER_TRUNCATE: _truncate,
}
_INJECTIONS: dict[FaultKind, Callable[[Fleet, Fault], Coroutine[Any, Any, None]]] = {
    FaultKind.EXECUTOR_KILL: lambda fleet, fault: _kill(fleet.executors[fault.executor]),
    FaultKind.EXECUTOR_HANG: lambda fleet, fault: _hang(fleet.executors[fault.executor], fault.lasts_s),
    FaultKind.EXECUTOR_RESTART: lambda fleet, fault: _restart(fleet.executors[fault.executor]),
    FaultKind.ROUTER_KILL: lambda fleet, fault: _kill(fleet.routers[fault.router]),
    FaultKind.ROUTER_HANG: lambda fleet, fault: _hang(fleet.routers[fault.router], fault.lasts_s),
    FaultKind.ROUTER_RESTART: lambda fleet, fault: _restart(fleet.routers[fault.router]),
    FaultKind.REDIS_EMPTY: lambda fleet, fault: _empty(fleet),
    FaultKind.REDIS_RESTART: lambda fleet, fault: _kill(fleet.redis),
    FaultKind.REDIS_HANG: lambda fleet, fault: _hang(fleet.redis, fault.lasts_s),
    FaultKind.LINK_CUT: _link(Weather.CUT),
    FaultKind.LINK_BLACK_HOLE: _link(Weather.BLACK_HOLE),
    FaultKind.LINK_DELAY: _link(Weather.DELAY),
    FaultKind.STORE_CUT: _store(Weather.CUT),
    FaultKind.STORE_BLACK_HOLE: _store(Weather.BLACK_HOLE),
    FaultKind.STORE_DELAY: _store(Weather.DELAY),
    FaultKind.STORE_STALE: lambda fleet, fault: _forget_newest(fleet, fault.lasts_s),
}
