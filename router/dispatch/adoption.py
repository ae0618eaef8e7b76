"""How a router goes on with a request that another one began.

The ledger says where the request runs and makes it this router's; its executor gives back what it was told of the
request, and every token. What neither of them knows is lost.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

from common.errors import RequestError
from inflight.v1 import executor_pb2
from router.dispatch.ledger_writer import LedgerWriter
from router.dispatch.placer import Placer
from router.executors.link import Answer, NotAttached
from router.request.errors import mismatch, not_in_the_ledger, out_of_reach, output_lost, still_waits
from router.store.store import AdmissionStore
from router.store.types import Adopted, Ending, Placement, RequestState
from router.stream.request_stream import RequestStream, unread_stream

log = logging.getLogger(__name__)

# A router that has just started links its executors within a second.
LINK_WAIT_S = 3.0
# An executor answers between two steps, unless it hangs.
ANSWER_WAIT_S = 5.0

OpenAttached = Callable[[executor_pb2.SequenceAttached], RequestStream]


class Adopter:
    """Adopts requests for one model on this router."""

    def __init__(self, store: AdmissionStore, ledger: LedgerWriter, placer: Placer) -> None:
        self._store = store
        self._ledger = ledger
        self._placer = placer

    async def resume(self, ledger_id: str, open_attached: OpenAttached) -> RequestStream | RequestError:
        """The stream of a request of which only the id is known, or why there is none."""
        try:
            outcome = await self._store.adopt(ledger_id)
        except RequestError as error:
            return error
        if outcome is None:
            return not_in_the_ledger()
        if outcome in (RequestState.WAITING, RequestState.LOST):
            return still_waits()
        if not isinstance(outcome, Adopted):
            return output_lost("no executor holds the request")
        opened: list[RequestStream] = []

        def on_attached(attached: executor_pb2.SequenceAttached) -> RequestStream:
            stream = open_attached(attached)
            opened.append(stream)
            self._placer.streams[ledger_id] = stream
            _take_in(stream, outcome, attached)
            return stream

        answer = await self._attach(outcome.placement, on_attached)
        if opened:
            log.info("%s continues on this router", ledger_id)
            return opened[0]
        if answer is NotAttached.NOT_HELD and not outcome.ended:
            # Nobody has its prompt any more: its place is free.
            self._ledger.settle(Ending(ledger_id, outcome.placement.attempt, cancelled=True))
        return output_lost("its executor does not hold the request any more, or cannot be reached")

    async def attach(self, stream: RequestStream, adopted: Adopted) -> RequestError | None:
        """Goes on with a request whose repeat this router has. Returns why that cannot be."""

        others: list[RequestStream] = []

        def on_attached(attached: executor_pb2.SequenceAttached) -> RequestStream:
            if not stream.is_repeat_of(attached):
                # The ledger had forgotten whose it is. It goes on for who comes for it with what it was asked for.
                others.append(unread_stream(attached.request_id))
                return others[0]
            _take_in(stream, adopted, attached)
            stream.is_uncancelled = adopted.ended  # what was cancelled, the ledger starts anew
            return stream

        answer = await self._attach(adopted.placement, on_attached)
        if others:
            return mismatch()
        if isinstance(answer, executor_pb2.SequenceAttached):
            if stream.is_abandoned:
                self._placer.stop(stream)
            return None
        if adopted.ended and answer is NotAttached.LINK_LOST:
            return out_of_reach()
        if adopted.ended:
            return output_lost("the request has ended, and its executor does not hold its output any more")
        self._placer.place(adopted.placement)  # nobody has told the executor, or it cannot be reached
        return None

    async def _attach(
        self, placement: Placement, on_attached: Callable[[executor_pb2.SequenceAttached], RequestStream]
    ) -> Answer:
        link = await self._placer.link_to(placement, LINK_WAIT_S)
        if link is None:
            # One that has started anew holds nothing of before.
            is_another = placement.executor_id in self._placer.links
            return NotAttached.NOT_HELD if is_another else NotAttached.LINK_LOST
        answered: asyncio.Future[Answer] = asyncio.get_running_loop().create_future()

        def on_answer(answer: Answer) -> RequestStream | None:
            if answered.done():  # too late
                return None
            # Before any frame that names its slot.
            stream = on_attached(answer) if isinstance(answer, executor_pb2.SequenceAttached) else None
            answered.set_result(answer)
            return stream

        link.attach(placement.request_id, placement.attempt, 0, on_answer)
        try:
            return await asyncio.wait_for(answered, ANSWER_WAIT_S)
        except TimeoutError:
            return NotAttached.LINK_LOST


def _take_in(stream: RequestStream, adopted: Adopted, attached: executor_pb2.SequenceAttached) -> None:
    stream.attach(adopted.placement, attached.started, attached.cached_tokens)
    stream.is_suspect = adopted.placement.suspect
    stream.is_over = adopted.ended
