"""Faults that come one after the other while a system is under load."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Protocol

from rich.console import Console

from inflight import AsyncClient
from inflight.bench.chaos.adapters import ServedAdapters
from inflight.bench.chaos.gaps import Window
from inflight.bench.chaos.inject import inject
from inflight.bench.chaos.options import ChaosOptions
from inflight.bench.chaos.schedule import Fault, faults
from inflight.bench.chaos.setting import Setting
from inflight.bench.fleet.fleet import Fleet, running_fleet
from inflight.bench.fleet.health import Observer


class Streams(Protocol):
    """The streams of a load, for the lines about faults."""

    @property
    def num_under_way(self) -> int: ...
    @property
    def num_ended(self) -> int: ...
    @property
    def num_failed(self) -> int: ...


@dataclass(slots=True)
class ChaosRun:
    """A run under way, and what has come of it so far."""

    options: ChaosOptions
    setting: Setting
    console: Console
    windows: list[Window] = field(default_factory=list)
    began_s: float = field(default_factory=time.monotonic)

    def say(self, text: str) -> None:
        """A line with the time since the load began."""
        self.console.print(
            f"{time.monotonic() - self.began_s:7.1f} s  {text}", markup=False, highlight=False, soft_wrap=True
        )


@dataclass(frozen=True, slots=True)
class System:
    """The processes, a client of their routers, what asks for their health, and the adapters, if there are any."""

    fleet: Fleet
    client: AsyncClient
    observer: Observer
    adapters: ServedAdapters | None = None


@asynccontextmanager
async def running_system(run: ChaosRun) -> AsyncIterator[System]:
    """Runs the system of a chaos run, whole when the block begins."""
    options = run.options
    run.say(f"starting {options.routers} routers and {options.executors} executors with {run.setting.pool}")
    async with (
        running_fleet(run.setting.stack, copies=options.copies) as fleet,
        AsyncClient(*fleet.addresses) as client,
        Observer(fleet, run.setting.pool) as observer,
    ):
        await observer.wait_until_whole(options.recovery_timeout_s)
        files, adapters = run.setting.adapters, None
        if files is not None:
            adapters = ServedAdapters(files, observer, await observer.adapter_hashes())
        yield System(fleet, client, observer, adapters)


async def disturb(run: ChaosRun, system: System, streams: Streams) -> None:
    """Injects faults until the time is over and the system is whole again."""
    options = run.options
    ends_s = time.monotonic() + options.seconds
    schedule = faults(options.seed, options.kinds, options.routers, options.executors, options.adapters)

    async def one_at_a_time() -> None:
        for fault in schedule:
            left_s = ends_s - time.monotonic()
            if left_s <= fault.calm_s:
                await asyncio.sleep(max(0.0, left_s))
                return
            await asyncio.sleep(fault.calm_s)
            await _one_fault(run, system, streams, fault)

    async with asyncio.TaskGroup() as group:
        for _ in range(options.overlap):
            group.create_task(one_at_a_time())


async def _one_fault(run: ChaosRun, system: System, streams: Streams, fault: Fault) -> None:
    """Makes it happen and waits until the system is whole again."""
    began_s = time.monotonic()
    run.say(f"{fault.number:3d}. {fault.kind.value}: {fault.target}, {streams.num_under_way} streams under way")
    window = Window(fault, began_s, began_s, None)
    run.windows.append(window)
    at = len(run.windows) - 1
    over_s = began_s
    try:
        await inject(system.fleet, fault, system.adapters)
        over_s = time.monotonic()
        await system.observer.wait_until_whole(run.options.recovery_timeout_s)
    except TimeoutError:
        run.say(f"{fault.number:3d}. not whole after {time.monotonic() - began_s:.1f} s")
        run.windows[at] = Window(fault, began_s, over_s, None)
        return
    run.windows[at] = Window(fault, began_s, over_s, time.monotonic())
    failed = f", {streams.num_failed} failed" if streams.num_failed else ""
    run.say(
        f"{fault.number:3d}. whole after {time.monotonic() - began_s:.1f} s; {streams.num_ended} streams ended{failed}"
    )
