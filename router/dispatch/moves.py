"""Moves of waiting requests from a sub-pool with a queue to one that is idle.

The ledger of a sub-pool serves its own queue in fair order and does not know other queues. So each router checks its
own waiting requests every `INTERVAL_S`. If one sub-pool has a queue and another one has open seats and no queue, the
router moves requests there that have waited for at least `MIN_WAIT_S`: higher classes first, then longer waits first.
At a time it moves at most its share of the executors that have room there.

A request that is moved is removed from the first ledger. Then it is submitted to the other ledger like a request that
the ledger has lost. If a step in between fails, it is therefore submitted again, and it is in at most one ledger at any
time. It keeps its id, tenant and deadline. A request that has run is moved only if its sub-pool has no executor left,
because the ledger's record of the losses that it may have caused is not moved with it.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

from inflight.common.errors import RequestError
from inflight.router.dispatch.waiting_audit import WaitingRequests
from inflight.router.store.types import Demand
from inflight.router.stream.request_stream import RequestStream
from inflight.router.subpools.store import SubPoolStore

log = logging.getLogger(__name__)

INTERVAL_S = 1.0
MIN_WAIT_S = 1.0


class Moves:
    """Moves the waiting requests of one model between its sub-pools."""

    def __init__(
        self,
        requests: WaitingRequests,
        store: SubPoolStore,
        clock: Callable[[], float] = time.monotonic,
        pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self._requests = requests
        self._store = store
        self._clock = clock
        self._pause = pause

    async def run(self) -> None:
        """Moves until cancelled."""
        while True:
            await self._pause(INTERVAL_S)
            await self.move_waiting()

    async def move_waiting(self) -> int:
        """Moves the requests that should move now. Returns how many were moved."""
        room = self._store.room_by_subpool()
        if not room:
            return 0
        moves: list[Awaitable[bool]] = []
        for stream, demand in self._candidates():
            target = self._target(demand, room)
            if target is not None:
                room[target] -= 1
                moves.append(self._move(stream, demand, target))
        return sum(await asyncio.gather(*moves))

    def _candidates(self) -> list[tuple[RequestStream, Demand]]:
        now = self._clock()
        old = [stream for stream in self._requests.waiting() if now - stream.clock.arrived >= MIN_WAIT_S]
        demands = [(stream, stream.demand(is_served=True)) for stream in old]
        return sorted(demands, key=lambda one: (one[1].priority_class, one[0].clock.arrived))

    def _target(self, demand: Demand, room: dict[int, int]) -> int | None:
        source = self._store.where(demand.request_id)
        if source is None or source in room:
            return None
        if demand.last_attempt and self._store.has_executors(source):
            return None
        allowed = [number for number in self._store.open_to(demand) if room.get(number, 0) > 0]
        return max(allowed, key=lambda number: room[number], default=None)

    async def _move(self, stream: RequestStream, demand: Demand, target: int) -> bool:
        try:
            is_out = await self._store.take_out(demand, target)
        except RequestError as error:
            log.debug("%s is not moved: %s", stream.request_id, error)
            return False
        if is_out and self._requests.waits(stream):
            self._requests.resubmit_forgotten(stream)
        return is_out
