"""How calls of scripts share the connections to Redis: turns, batches, and log lines of an outage.

`Turns` bounds the calls that requests cause. `Batches` sends items of one kind that arrive while calls are in flight
together in the next call. There is no timer. An item that arrives while fewer than `MAX_CALLS` calls are in flight is
sent at once. Under load more items share a call, which saves round trips and the fixed cost of a script.
"""

from __future__ import annotations

import asyncio
import contextvars
import logging
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from inflight.common.errors import RequestError
from inflight.router.ledger.connection import NotSent, unavailable
from inflight.router.ledger.settings import LedgerSettings

Item = TypeVar("Item")
Outcome = TypeVar("Outcome")

# An outage is over after this time without a failed call. A success between failures is no recovery: Redis may answer
# reads while it refuses writes. Longer than the interval of the ledger's periodic calls.
QUIET_S = 3.0
REMINDER_S = 60.0
# A call with this many items occupies Redis for at most about 2 ms.
MAX_ITEMS = 16
# Two calls, so that one lost packet does not delay all items.
MAX_CALLS = 2


@dataclass(frozen=True, slots=True)
class _WaitingTurn:
    turn: asyncio.Future[None]
    since_s: float


class Turns:
    """Turns of the calls that requests cause: submits, cancels, hand-backs, queries. All pools of a Redis client share
    them.

    These calls use at most half of the connections. The other half stays free for leases, reports and settles. Kinds of
    calls alternate, and calls of one kind are served in order of arrival, so a thousand cancels delay a submit by one
    cancel. A turn has no deadline while Redis answers. If Redis has answered no call for the timeout of a call, the
    calls that have waited at least that long are refused.
    """

    def __init__(self, settings: LedgerSettings, clock: Callable[[], float] = time.monotonic) -> None:
        self._settings = settings
        self._clock = clock
        self._num_free = max(1, settings.max_connections // 2)
        # Waiters by kind. The first kind gets the next turn. A cancelled waiter stays until its turn comes.
        self._waiting: dict[str, deque[_WaitingTurn]] = {}
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
        """Records a failed call. If Redis has answered no call for the timeout of a call, refuses the calls that have
        waited at least that long."""
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
        waiter = _WaitingTurn(asyncio.get_running_loop().create_future(), self._clock())
        self._waiting.setdefault(kind, deque()).append(waiter)
        try:
            await waiter.turn
        except asyncio.CancelledError:
            if waiter.turn.done() and not waiter.turn.cancelled() and waiter.turn.exception() is None:
                self._pass_on()  # the turn was granted before the cancel arrived
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


@dataclass(frozen=True, slots=True)
class _Waiter(Generic[Item, Outcome]):
    item: Item
    answered: asyncio.Future[Outcome]
    context: contextvars.Context = field(default_factory=contextvars.copy_context)


class Batches(Generic[Item, Outcome]):
    """The batches of one kind of call.

    `call` returns the outcomes in the order of the items. It runs in the `contextvars` context of the first item's
    caller. `turn` is held during a call. `start` starts a task that may outlive the caller.
    """

    def __init__(
        self,
        call: Callable[[Sequence[Item]], Awaitable[Sequence[Outcome]]],
        turn: Callable[[], AbstractAsyncContextManager[None]],
        start: Callable[[Coroutine[Any, Any, None]], object],
    ) -> None:
        self._call = call
        self._turn = turn
        self._start = start
        self._waiting: deque[_Waiter[Item, Outcome]] = deque()
        self._num_calls = 0

    async def add(self, item: Item) -> Outcome:
        """Adds the item to a call and returns its outcome. Raises `RequestError` if its call fails or gets no turn."""
        answered: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        waiter = _Waiter(item, answered)
        self._waiting.append(waiter)
        if self._num_calls < MAX_CALLS:
            self._num_calls += 1
            self._start(self._send())
        return await answered

    async def _send(self) -> None:
        try:
            while self._waiting:
                before = len(self._waiting)
                try:
                    async with self._turn():
                        sending = [self._waiting.popleft() for _ in range(min(MAX_ITEMS, len(self._waiting)))]
                        if sending:
                            await asyncio.create_task(self._answer(sending), context=sending[0].context)
                except RequestError as error:  # no turn: fail the items that were waiting when it was requested
                    for waiter in [self._waiting.popleft() for _ in range(min(before, len(self._waiting)))]:
                        _fail(waiter, error)
        finally:
            self._num_calls -= 1

    async def _answer(self, sending: Sequence[_Waiter[Item, Outcome]]) -> None:
        try:
            outcomes = await self._call([waiter.item for waiter in sending])
        except Exception as error:
            for waiter in sending:
                _fail(waiter, error)
            return
        except BaseException:
            for waiter in sending:
                waiter.answered.cancel()
            raise
        for waiter, outcome in zip(sending, outcomes, strict=True):
            if not waiter.answered.done():
                waiter.answered.set_result(outcome)


def _fail(waiter: _Waiter[Item, Outcome], error: Exception) -> None:
    if not waiter.answered.done():
        waiter.answered.set_exception(error)


class Outage:
    """Tracks the calls of one pool. It counts failed calls, so their callers need not log them."""

    def __init__(self, pool: str, logger: logging.Logger, clock: Callable[[], float] = time.monotonic) -> None:
        self._pool = pool
        self._logger = logger
        self._clock = clock
        # All None or 0 while Redis answers.
        self._began_s: float | None = None
        self._failed_s = 0.0
        self._answered_s: float | None = None
        self._reminded_s = 0.0
        self._num_failures = 0

    def failed(self, cause: str) -> None:
        """Records a failed call."""
        now = self._clock()
        self._failed_s, self._answered_s = now, None
        self._num_failures += 1
        if self._began_s is None:
            self._began_s = self._reminded_s = now
            self._logger.warning("pool %s: the ledger is unavailable: %s", self._pool, cause)
        elif now - self._reminded_s >= REMINDER_S:
            self._reminded_s = now
            since_s = now - self._began_s
            text = "pool %s: the ledger is still unavailable after %.0f s, %d calls have failed: %s"
            self._logger.warning(text, self._pool, since_s, self._num_failures, cause)

    def answered(self) -> None:
        """Records an answered call."""
        if self._began_s is None:
            return
        now = self._clock()
        if self._answered_s is None:
            self._answered_s = now
        if now - self._failed_s < QUIET_S:
            return
        text = "pool %s: the ledger is available again after %.1f s, %d calls have failed"
        self._logger.warning(text, self._pool, self._answered_s - self._began_s, self._num_failures)
        self._began_s, self._num_failures = None, 0
