"""An event loop whose clock jumps to the next timer whenever nothing is ready: waits take no time and are exact."""

from __future__ import annotations

import asyncio
import selectors
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

Result = TypeVar("Result")


class _JumpingSelector(selectors.DefaultSelector):
    """Waits for nothing: the time until the next timer passes at once."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """See `selectors.BaseSelector`."""
        ready: list[tuple[selectors.SelectorKey, int]] = super().select(0)
        if timeout is None and not ready:
            raise RuntimeError("everything waits, and no timer is set")
        self.now_s += timeout or 0.0
        return ready


class _VirtualLoop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)

    def time(self) -> float:
        """Virtual seconds since the start."""
        return self._jumping.now_s


def now_s() -> float:
    """The virtual time."""
    return asyncio.get_running_loop().time()


def run_virtual(work: Callable[[], Coroutine[Any, Any, Result]]) -> Result:
    """Runs what uses no network and no thread, in virtual time from 0."""
    with asyncio.Runner(loop_factory=_VirtualLoop) as runner:
        return runner.run(work())
