"""Detection of clients that disconnect, and cancellation of the work for them."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.types import Receive

Result = TypeVar("Result")


class ClientGone(Exception):
    """The client closed the connection before it had its answer."""


async def while_connected(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """Runs the work for a client whose request has been read, and cancels it when the client disconnects.

    Raises:
        ClientGone: the client disconnected. The work has ended by then.
    """
    working = asyncio.create_task(work)
    leaving = asyncio.create_task(_gone(receive))
    try:
        await asyncio.wait((working, leaving), return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientGone
        return working.result()
    finally:
        for running in (working, leaving):
            running.cancel()
        await asyncio.gather(working, leaving, return_exceptions=True)


async def _gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
