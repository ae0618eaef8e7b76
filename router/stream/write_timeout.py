"""How long a client may leave its stream unread.

While a client does not read, gRPC holds one event and the router the ids of the tokens since; nothing waits for it but
its own call. One that has not read for `write_timeout_s` is taken for stalled: its call ends, so that it frees what the
call holds, and it can resume: its request goes on for a little while, as if that had been asked for.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from common.errors import Reason, RequestError
from router.request.delivery import Delivery

Event = TypeVar("Event")

# Long enough for a client that reads again to see how its call ended, and to resume.
STALLED_GRACE_S = 10.0


def with_write_timeout(
    write: Callable[[Event], Awaitable[None]], timeout_s: float
) -> Callable[[Event], Awaitable[None]]:
    """The same, but for a write that takes longer, which raises `RequestError` STALLED."""

    async def bounded(event: Event) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                await write(event)
        except TimeoutError as error:
            text = f"the stream was not read for {timeout_s:g} s; resume it from the next offset"
            raise RequestError(Reason.STALLED, text) from error

    return bounded


def grace_after(error: RequestError) -> float:
    """The seconds for which a request goes on whose call ended with an error, though its client asked for none."""
    return STALLED_GRACE_S if error.reason is Reason.STALLED else 0.0


def unattended_s(reading: Delivery | None, grace_s: float, most_s: float) -> float | None:
    """For how many seconds a request goes on without a reader; None: to its end. A `resume_ttl` of 0 is a wish, too."""
    if reading is None:
        return 0.0
    if reading.unattended_s is None or reading.kept_s == 0:
        return reading.unattended_s
    return min(max(reading.unattended_s, grace_s), most_s)
