"""How long a client may leave its stream unread.

While a client does not read, gRPC holds one event and the router the ids of the tokens since; nothing waits for it but
its own call. One that has not read for `write_timeout_s` is taken for stalled: its call ends, so that it frees what the
call holds, and it can resume.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from common.errors import Reason, RequestError

Event = TypeVar("Event")


def patient(write: Callable[[Event], Awaitable[None]], timeout_s: float) -> Callable[[Event], Awaitable[None]]:
    """The same, but for a write that takes longer, which raises `RequestError` STALLED."""

    async def bounded(event: Event) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                await write(event)
        except TimeoutError as error:
            text = f"the stream was not read for {timeout_s:g} s; resume it from the next offset"
            raise RequestError(Reason.STALLED, text) from error

    return bounded
