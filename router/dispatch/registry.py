"""The requests of one model that this router knows: those that it serves, and those that ended here lately."""

from __future__ import annotations

import asyncio
import time
from contextlib import suppress

from common.errors import Reason
from router.dispatch.ended_streams import EndedStreams
from router.request.errors import being_cancelled, duplicate, mismatch
from router.request.ids import client_id
from router.stream.request_stream import RequestStream

# How long a client that comes back waits for the end of its request, which is being cancelled.
CANCEL_WAIT_S = 5.0
# What a request failed with for good, so that it is told again; of anything else a client may try anew.
LASTING_ERRORS = frozenset({Reason.INTERNAL, Reason.ATTEMPTS_EXHAUSTED, Reason.NEVER_FITS})


class KnownRequests:
    """`served` is by ledger id; what is forgotten there is kept where it has ended."""

    def __init__(self, keep_ended_s: float) -> None:
        self.served: dict[str, RequestStream] = {}
        self._ended = EndedStreams(keep_ended_s)

    async def find(self, ledger_id: str) -> RequestStream | None:
        """A request that is served or kept here. One that ended here for want of a client may go on at another router:
        the ledger knows that. Raises `RequestError` where it is being cancelled for so long."""
        served = await self._wanted(ledger_id)
        if served is not None:
            return served
        kept = self._ended.find(ledger_id, time.monotonic())
        return None if kept is not None and kept.was_cancelled and not kept.is_cancelled else kept

    async def find_repeated(self, stream: RequestStream) -> RequestStream | None:
        """The request that this one repeats. Raises `RequestError` where the id is that of another one."""
        known = await self._wanted(stream.request_id)
        if known is None:
            known = self._ended.find(stream.request_id, time.monotonic())
            if known is None or known.was_cancelled or known.error is not None:
                return None
        digest = digest_of(stream)
        if not digest:
            raise duplicate(client_id(stream.request_id))
        if digest != digest_of(known):
            raise mismatch()
        return known

    async def _wanted(self, ledger_id: str) -> RequestStream | None:
        """A request that is served here. Where its client went away, its cancelled end is waited for: that is nobody
        else's."""
        known = self.served.get(ledger_id)
        if known is None or not known.is_abandoned or known.has_ended:
            return known
        with suppress(TimeoutError):
            await asyncio.wait_for(known.forgotten.wait(), CANCEL_WAIT_S)
        known = self.served.get(ledger_id)
        if known is not None and known.is_abandoned and not known.has_ended:
            raise being_cancelled()
        return known

    def forget(self, stream: RequestStream) -> None:
        """It is no longer served here."""
        if self.served.get(stream.request_id) is not stream:
            return
        del self.served[stream.request_id]
        stream.forget()
        is_lasting = stream.error is not None and stream.error.reason in LASTING_ERRORS
        if stream.reading is not None and not stream.is_let_go and (stream.end is not None or is_lasting):
            self._ended.keep(stream, time.monotonic())


def digest_of(stream: RequestStream) -> bytes:
    """The digest of a request that may be repeated; empty for any other."""
    return b"" if stream.reading is None else stream.reading.digest
