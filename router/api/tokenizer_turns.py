"""Turns of tenants on threads for work on their texts.

Tokenizing takes a whole core and releases the interpreter lock. It runs on a few threads, so that cores are left for
the event loop and for other processes. Tenants take turns on the threads: a tenant with much to tokenize delays only
itself. Constraints are compiled in the same way, on threads that wait for compiling processes. A call that is cancelled
while it waits leaves the queue; one that runs cannot be stopped and keeps its thread until it ends.
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict, deque
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import TypeVar

from inflight.common.errors import Reason, RequestError
from inflight.common.machine import num_usable_cores
from inflight.router.request.errors import RETRY_AFTER_MS

T = TypeVar("T")

# Bytes of one tenant's texts that may wait for a thread: about ten seconds of one core.
MAX_WAITING_BYTES = 32 * 1024 * 1024


def default_threads() -> int:
    """Returns half of the cores, at most four, so that tokenizing does not starve the router."""
    return min(4, max(1, num_usable_cores() // 2))


@dataclass(frozen=True, slots=True)
class _Waiting:
    may_run: asyncio.Future[None]
    num_bytes: int


class TokenizerTurns:
    """The threads, and the calls that wait for one. All calls come from one event loop."""

    def __init__(
        self,
        num_threads: int | None = None,
        max_waiting_bytes: int = MAX_WAITING_BYTES,
        verb: str = "tokenize",
    ) -> None:
        self._num_threads = num_threads or default_threads()
        self._verb = verb
        # No tenant may hold all of several threads.
        self._max_per_tenant = max(1, self._num_threads // 2)
        self._max_waiting_bytes = max_waiting_bytes
        self._threads = ThreadPoolExecutor(self._num_threads, thread_name_prefix=verb)
        self._running: Counter[str] = Counter()
        # Tenants in the order of their turns.
        self._lines: OrderedDict[str, deque[_Waiting]] = OrderedDict()
        self._waiting_bytes: Counter[str] = Counter()

    @property
    def num_running(self) -> int:
        """Calls that have a thread."""
        return self._running.total()

    async def run(self, tenant: str, num_bytes: int, work: Callable[[], T]) -> T:
        """Runs `work`, on a text of `num_bytes` bytes, when it is the tenant's turn. Raises `RequestError` QUEUE_FULL
        if too many bytes of the tenant wait already."""
        await self._take_turn(tenant, num_bytes)
        running = asyncio.get_running_loop().run_in_executor(self._threads, work)
        running.add_done_callback(lambda done: self._end_turn(tenant, done))
        # The thread counts as the tenant's until the work has ended, even if its caller is gone.
        return await asyncio.shield(running)

    async def _take_turn(self, tenant: str, num_bytes: int) -> None:
        if tenant not in self._lines and self._may_run(tenant):
            self._running[tenant] += 1
            return
        if self._waiting_bytes[tenant] + num_bytes > self._max_waiting_bytes and self._waiting_bytes[tenant]:
            raise _too_much_waits(self._verb)
        one = _Waiting(asyncio.get_running_loop().create_future(), num_bytes)
        self._lines.setdefault(tenant, deque()).append(one)
        self._waiting_bytes[tenant] += num_bytes
        try:
            await one.may_run
        except asyncio.CancelledError:
            if one.may_run.done() and not one.may_run.cancelled():
                self._running[tenant] -= 1
                self._start_next()
            else:
                self._leave(tenant, one)
            raise

    def _may_run(self, tenant: str) -> bool:
        return self.num_running < self._num_threads and self._running[tenant] < self._max_per_tenant

    def _end_turn(self, tenant: str, done: asyncio.Future[T]) -> None:
        if not done.cancelled():
            done.exception()  # retrieves it: its caller may be gone
        self._running[tenant] -= 1
        self._start_next()

    def _start_next(self) -> None:
        """Gives free threads to the tenants whose turn it is."""
        self._running += Counter()  # drops the entries at zero
        for tenant in list(self._lines):
            if not self._may_run(tenant):
                continue
            one = self._lines[tenant][0]
            self._leave(tenant, one)
            if tenant in self._lines:
                self._lines.move_to_end(tenant)
            self._running[tenant] += 1
            one.may_run.set_result(None)

    def _leave(self, tenant: str, one: _Waiting) -> None:
        line = self._lines[tenant]
        line.remove(one)
        self._waiting_bytes[tenant] -= one.num_bytes
        if not line:
            del self._lines[tenant], self._waiting_bytes[tenant]


def _too_much_waits(verb: str) -> RequestError:
    text = f"too much text of the tenant waits to be {verb}d"
    return RequestError(Reason.QUEUE_FULL, text, retry_after_ms=RETRY_AFTER_MS, quota=f"tenant text to {verb}")
