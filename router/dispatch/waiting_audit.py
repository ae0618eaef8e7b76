"""Anti-entropy for waiting requests: finds requests that the ledger has lost although no call failed.

Redis can lose its newest writes: a replica that lags behind takes over, or an older snapshot is loaded, while a proxy
keeps the connections open. Then no call fails and no lease lapses, and a request that was submitted or handed back in
the lost interval would wait forever. So the router asks the ledger about its waiting requests, a bounded number at a
time, and submits the missing ones again. It asks twice before it submits, because the event of a request's end or
placement may still be in the mailbox when the first reply arrives.

After a lapsed lease or a lost reply, the router asks about all waiting requests at once, and only once. A request that
was placed meanwhile is then submitted again, too. This returns the placement, whose event may have been in the lost
reply.

The order is random, so that each check is a sample of all waiting requests. If 2 % of 10,000 requests are lost, the
first check of 256 finds a lost one with a probability of 99 %, and the others are then checked at once. A single lost
request among 10,000 is found within a minute.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Protocol

from inflight.common.errors import RequestError
from inflight.router.dispatch.retry_queue import LEDGER_RETRY_S
from inflight.router.ledger.types import ANY_ATTEMPT, Attempt
from inflight.router.stream.request_stream import RequestStream

log = logging.getLogger(__name__)

INTERVAL_S = 1.5
CONFIRM_S = 0.5
MAX_PER_CHECK = 256


class WaitingRequests(Protocol):
    """The waiting requests of a router, implemented by `inflight.router.dispatch.dispatcher.Dispatcher`."""

    def waiting(self) -> list[RequestStream]:
        """Returns the requests that this router believes to be in the queue."""

    def waits(self, stream: RequestStream) -> bool:
        """Returns whether this router believes the request to be in the queue."""

    def resubmit_forgotten(self, stream: RequestStream) -> None:
        """Submits the request again."""


class WaitingAudit:
    """Checks the waiting requests of one model. A round checks each of them once, `MAX_PER_CHECK` per `INTERVAL_S`.
    When a check finds a lost request, the rest of the round follows at once."""

    def __init__(
        self,
        requests: WaitingRequests,
        find_forgotten: Callable[[Sequence[Attempt]], Awaitable[frozenset[str]]],
        pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._requests = requests
        self._find_forgotten = find_forgotten
        self._pause = pause
        self._round: deque[RequestStream] = deque()
        self._lapsed = asyncio.Event()

    async def run(self) -> None:
        """Checks until cancelled."""
        while True:
            await self._pause(INTERVAL_S)
            try:
                await self.check_next()
            except RequestError as error:
                log.debug("waiting requests cannot be verified: %s", error)

    def lapsed(self) -> None:
        """Records that the ledger may have lost requests, or that this router has missed a reply."""
        self._lapsed.set()

    async def run_after_lapses(self) -> None:
        """Checks all waiting requests after each lapse, until cancelled. Repeats the check until Redis answers."""
        while True:
            await self._lapsed.wait()
            self._lapsed.clear()
            try:
                await self.check_all()
            except RequestError as error:
                log.debug("waiting requests cannot be verified after a lapse: %s", error)
                self._lapsed.set()
                await self._pause(LEDGER_RETRY_S)

    async def check_all(self) -> None:
        """Submits all waiting requests again that the ledger does not have in its queue."""
        streams, num_forgotten = self._requests.waiting(), 0
        for start in range(0, len(streams), MAX_PER_CHECK):
            waiting = [stream for stream in streams[start : start + MAX_PER_CHECK] if self._requests.waits(stream)]
            if waiting:
                ids = await self._find_forgotten([Attempt(stream.request_id, ANY_ATTEMPT) for stream in waiting])
                for stream in waiting:
                    if stream.request_id in ids and self._requests.waits(stream):
                        num_forgotten += 1
                        self._requests.resubmit_forgotten(stream)
        if num_forgotten:
            log.warning("%d of %d waiting requests are submitted again", num_forgotten, len(streams))

    async def check_next(self) -> None:
        """Checks the next requests of the current round, or starts a new round. Raises `RequestError` while Redis does
        not answer."""
        if not self._round:
            waiting = self._requests.waiting()
            random.shuffle(waiting)
            self._round.extend(waiting)
        if await self._resubmit_forgotten(await self._find_suspected(self._next())):
            suspected: list[RequestStream] = []
            while self._round:
                suspected += await self._find_suspected(self._next())
            await self._resubmit_forgotten(suspected)

    def _next(self) -> list[RequestStream]:
        return [self._round.popleft() for _ in range(min(MAX_PER_CHECK, len(self._round)))]

    async def _find_suspected(self, streams: Sequence[RequestStream]) -> list[RequestStream]:
        """Returns the requests that wait here but not in the ledger. `streams` has at most `MAX_PER_CHECK`."""
        waiting = [stream for stream in streams if self._requests.waits(stream)]
        if not waiting:
            return []
        ids = await self._find_forgotten([Attempt(stream.request_id, stream.life.attempt) for stream in waiting])
        return [stream for stream in waiting if stream.request_id in ids and self._requests.waits(stream)]

    async def _resubmit_forgotten(self, suspected: Sequence[RequestStream]) -> int:
        """Submits the requests again that are still missing after `CONFIRM_S`. Returns how many."""
        if not suspected:
            return 0
        await self._pause(CONFIRM_S)
        num_forgotten = 0
        for start in range(0, len(suspected), MAX_PER_CHECK):
            forgotten = await self._find_suspected(suspected[start : start + MAX_PER_CHECK])
            num_forgotten += len(forgotten)
            for stream in forgotten:
                self._requests.resubmit_forgotten(stream)
        if num_forgotten:
            log.warning("the ledger has lost %d waiting requests, which are submitted again", num_forgotten)
        return num_forgotten
