"""Turns of the calls that requests cause: submits, cancels, hand-backs, queries.

Half of the connections to Redis stay free for leases, reports and ends, at any number of calls. Kinds of calls
alternate, and calls of one kind go in order of arrival: a thousand cancels delay a submit by one cancel. A turn has no
deadline while Redis answers. After Redis was silent for the timeout of a call, the calls that have waited that long are
refused.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass

from router.store.connection import NotSent, unavailable
from router.store.settings import StoreSettings


@dataclass(frozen=True, slots=True)
class _Waiter:
    turn: asyncio.Future[None]
    since_s: float


class Turns:
    """The turns of one Redis client, shared by all pools that use it."""

    def __init__(self, settings: StoreSettings, clock: Callable[[], float] = time.monotonic) -> None:
        self._settings = settings
        self._clock = clock
        self._num_free = max(1, settings.max_connections // 2)
        # By kind; the first kind has the next turn. A cancelled caller stays until its turn comes.
        self._waiting: dict[str, deque[_Waiter]] = {}
        self._heard_s = clock()

    @asynccontextmanager
    async def turn(self, kind: str) -> AsyncIterator[None]:
        """Waits for a turn and holds it. Raises `NotSent` if Redis does not answer."""
        await self._take(kind)
        try:
            yield
        finally:
            self._pass_on()

    def heard(self) -> None:
        """Records that Redis has answered a call."""
        self._heard_s = self._clock()

    def missed(self) -> None:
        """Records a failed call; if Redis is silent, refuses the calls that have waited for the timeout of a call."""
        silent_since_s = self._clock() - self._settings.call_timeout_ms / 1000
        if self._heard_s > silent_since_s:
            return
        for kind, waiting in tuple(self._waiting.items()):
            while waiting and waiting[0].since_s <= silent_since_s:
                turn = waiting.popleft().turn
                if not turn.done():
                    turn.set_exception(unavailable(self._settings, "no turn: earlier calls have no answer", NotSent))
            if not waiting:
                del self._waiting[kind]

    async def _take(self, kind: str) -> None:
        if self._num_free:
            self._num_free -= 1
            return
        waiter = _Waiter(asyncio.get_running_loop().create_future(), self._clock())
        self._waiting.setdefault(kind, deque()).append(waiter)
        try:
            await waiter.turn
        except asyncio.CancelledError:
            if waiter.turn.done() and not waiter.turn.cancelled() and waiter.turn.exception() is None:
                self._pass_on()  # the turn came with the cancel
            raise

    def _pass_on(self) -> None:
        while self._waiting:
            kind, waiting = next(iter(self._waiting.items()))
            del self._waiting[kind]
            turn = waiting.popleft().turn
            if waiting:
                self._waiting[kind] = waiting  # behind the other kinds
            if not turn.done():
                turn.set_result(None)
                return
        self._num_free += 1
