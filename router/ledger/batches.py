"""Batched calls of one kind: items that arrive while calls are in flight are sent together in the next call.

There is no timer. An item that arrives while fewer than `MAX_CALLS` calls are in flight is sent at once. Under load
more items share a call, which saves round trips and the fixed cost of a script.
"""

from __future__ import annotations

import asyncio
import contextvars
from collections import deque
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from inflight.common.errors import RequestError

Item = TypeVar("Item")
Outcome = TypeVar("Outcome")

# A call with this many items occupies Redis for at most about 2 ms.
MAX_ITEMS = 16
# Two calls, so that one lost packet does not delay all items.
MAX_CALLS = 2


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
