"""The limit on how long a client may leave its stream unread.

While a client does not read, gRPC holds one event and the router the ids of the tokens since; only the client's own
call waits. A client that has not read for `write_timeout_s` counts as stalled. Its call ends, which frees what the call
holds. Its request continues for a short time, as if the client had asked for that, so that it can resume.
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
    """Returns a writer that raises `RequestError` STALLED if a write takes longer than `timeout_s`."""

    async def bounded(event: Event) -> None:
        try:
            async with asyncio.timeout(timeout_s):
                await write(event)
        except TimeoutError as error:
            text = f"the stream was not read for {timeout_s:g} s; resume it from the next offset"
            raise RequestError(Reason.STALLED, text) from error

    return bounded


def grace_after(error: RequestError) -> float:
    """Returns the seconds for which a request continues after its call ended with an error, without its client asking
    for it."""
    return STALLED_GRACE_S if error.reason is Reason.STALLED else 0.0


def unattended_s(reading: Delivery | None, grace_s: float, most_s: float) -> float | None:
    """Returns for how many seconds a request continues without a reader; None: to its end. A `resume_ttl` of 0 is
    respected."""
    if reading is None:
        return 0.0
    if reading.unattended_s is None or reading.kept_s == 0:
        return reading.unattended_s
    return min(max(reading.unattended_s, grace_s), most_s)
