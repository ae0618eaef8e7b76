"""An event loop of asyncio in virtual time: coroutines of a router run on the timeline, in the router's process.

Each callback of the loop is an event of the timeline, so a process can die or hang between any two of them. Nothing
here waits for a descriptor or a thread.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections import deque
from collections.abc import Callable, Coroutine
from typing import Any

from inflight.bench.timeline.timeline import US_PER_S, Action, Process, Timeline

# Of the tasks of a dead process: what they start at their end is cancelled in the next round.
MAX_ROUNDS = 10


class VirtualLoop(asyncio.AbstractEventLoop):
    """What tasks, futures, timeouts and the locks of asyncio need of a loop."""

    def __init__(self, timeline: Timeline, process: Process) -> None:
        self._timeline = timeline
        self._process = process
        # Until they are done, in the order of their start: tasks are referred to by nothing else.
        self._tasks: dict[asyncio.Task[Any], None] = {}
        self._ready: deque[asyncio.Handle] = deque()
        self._is_closed = False

    def start(self, coroutine: Coroutine[Any, Any, Any]) -> asyncio.Task[Any]:
        """Runs a coroutine. What it raises ends the simulation."""
        task = self.create_task(coroutine)
        task.add_done_callback(lambda done: None if done.cancelled() else done.result())
        return task

    def run(self, action: Action, *args: Any) -> None:
        """Does something that needs the running loop."""
        asyncio._set_running_loop(self)
        try:
            action(*args)
        finally:
            asyncio._set_running_loop(None)

    def close(self) -> None:
        """Cancels the tasks of a process that is dead, the newest first, and lets them end at once. What they do then
        must reach nothing outside the process."""
        self._is_closed = True
        for _ in range(MAX_ROUNDS):
            for task in reversed(tuple(self._tasks)):
                task.cancel()
            while self._ready:
                self._run_next()
        assert not self._tasks, f"{next(iter(self._tasks))} does not end"

    def time(self) -> float:
        return self._timeline.now_us / US_PER_S

    def call_soon(  # type: ignore[override]
        self, callback: Callable[..., object], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.Handle:
        handle = asyncio.Handle(callback, args, self, context)
        self._ready.append(handle)
        if not self._is_closed:
            self._timeline.after(0, self._process.run, self._run_next)
        return handle

    def call_at(  # type: ignore[override]
        self, when: float, callback: Callable[..., object], *args: Any, context: contextvars.Context | None = None
    ) -> asyncio.TimerHandle:
        handle = asyncio.TimerHandle(when, callback, args, self, context)
        # A time that is still to come is a later one in whole microseconds, too.
        soonest_us = self._timeline.now_us + (when > self.time())
        when_us = max(soonest_us, -int(-when * US_PER_S // 1))
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
        self._tasks[task] = None
        task.add_done_callback(self._tasks.pop)
        return task

    def call_exception_handler(self, context: dict[str, Any]) -> None:
        """Ends the simulation, unless the process is dead."""
        if "exception" in context and not self._is_closed:
            raise context["exception"]

    def get_debug(self) -> bool:
        return False

    def is_running(self) -> bool:
        return True

    def is_closed(self) -> bool:
        return False

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """Does nothing: a cancelled callback is skipped when its time comes."""

    def _run_next(self) -> None:
        self._run(self._ready.popleft())

    def _run(self, handle: asyncio.Handle) -> None:
        if not handle.cancelled():
            self.run(handle._run)
