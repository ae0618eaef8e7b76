"""An event loop of asyncio in virtual time: coroutines of a router run on the timeline, in the router's process.

Each callback of the loop is an event of the timeline, so a process can die or hang between any two of them. What a dead
process awaits is never resumed. Nothing here waits for a descriptor or a thread.
"""

from __future__ import annotations

import asyncio
import contextvars
import inspect
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from inflight.bench.timeline.timeline import US_PER_S, Process, Timeline

T = TypeVar("T")


class VirtualLoop(asyncio.AbstractEventLoop):
    """What tasks, futures, `asyncio.sleep`, `gather` and `shield` need of a loop."""

    def __init__(self, timeline: Timeline, process: Process) -> None:
        self._timeline = timeline
        self._process = process
        # Until they are done: tasks are referred to by nothing else.
        self._tasks: set[asyncio.Task[Any]] = set()

    def start(self, coroutine: Coroutine[Any, Any, T], on_result: Callable[[T], None] = lambda result: None) -> None:
        """Runs a coroutine. What it raises ends the simulation."""

        def finished(task: asyncio.Task[T]) -> None:
            on_result(task.result())

        self.create_task(coroutine).add_done_callback(finished)

    def close(self) -> None:
        """Drops the tasks of a process that is dead."""
        for task in self._tasks:
            _close_unstarted(task.get_coro())
        self._tasks.clear()

    def time(self) -> float:
        return self._timeline.now_us / US_PER_S

    def call_soon(  # type: ignore[override]
        self, callback: Callable[..., object], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, self, context)
        self._timeline.after(0, self._process.run, self._run, handle)
        return handle

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., object], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
        handle = asyncio.TimerHandle(when, callback, args, self, context)
        when_us = max(self._timeline.now_us, round(when * US_PER_S))
        self._timeline.at(when_us, self._process.run, self._run, handle)
        return handle

    def call_later(  # type: ignore[override]
        self, delay: float, callback: Callable[..., object], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
        return self.call_at(self.time() + delay, callback, *args, context=context)

    def create_future(self) -> asyncio.Future[Any]:
        return asyncio.Future(loop=self)

    def create_task(self, coro: Any, **options: Any) -> asyncio.Task[Any]:
        task = asyncio.Task(coro, loop=self, **options)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """Ignores tasks that a killed process leaves behind; ends the simulation for all else."""
        if "exception" in context:
            raise context["exception"]

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return True

    def is_closed(self) -> bool:
        return False

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """Does nothing: a cancelled callback is skipped when its time comes."""

    def _run(self, handle: asyncio.Handle) -> None:
        if handle.cancelled():
            return
        asyncio._set_running_loop(self)
        try:
            handle._run()
        finally:
            asyncio._set_running_loop(None)


def _close_unstarted(coroutine: Any) -> None:
    """Closes a coroutine that has not started, and those that it was given to await: else Python warns of them."""
    if inspect.iscoroutine(coroutine) and inspect.getcoroutinestate(coroutine) == inspect.CORO_CREATED:
        given = list(coroutine.cr_frame.f_locals.values()) if coroutine.cr_frame else []
        coroutine.close()
        for one in given:
            _close_unstarted(one)
