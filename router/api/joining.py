"""The start of a request's choices: each is submitted, or found where it already waits or runs.

The first choice is submitted alone, and with it the ledger admits or refuses the whole request. The others follow at
once, so that they share the first one's prompt through the prefix cache. If one of them fails, all are ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from router.dispatch.dispatcher import Dispatcher
from router.lifecycle.events import Admitted
from router.store.types import Adopted
from router.stream.choices import run_all
from router.stream.request_stream import RequestStream


@dataclass(frozen=True, slots=True)
class JoinedChoice:
    """The stream of a choice, and the ledger's answer; None if this router already serves it or has just done so."""

    stream: RequestStream
    outcome: Admitted | None

    @property
    def is_new(self) -> bool:
        """Whether no other call can have this choice."""
        return self.outcome is not None and not isinstance(self.outcome, Adopted)


async def join_all(streams: Sequence[RequestStream], dispatcher: Dispatcher) -> list[JoinedChoice]:
    """Starts every choice of a request. Raises `RequestError` if one is refused."""
    joined: list[JoinedChoice] = []

    async def join(stream: RequestStream) -> JoinedChoice:
        one = await _join(stream, dispatcher)
        joined.append(one)
        return one

    try:
        return [await join(streams[0]), *await run_all([join(stream) for stream in streams[1:]])]
    except BaseException:
        for one in joined:
            if one.is_new:
                dispatcher.release(one.stream)
            else:
                dispatcher.leave(one.stream, one.stream.reader)
        raise


async def _join(stream: RequestStream, dispatcher: Dispatcher) -> JoinedChoice:
    known = await dispatcher.find_repeated(stream)
    if known is not None:
        known.attend()
        known.record.resumed()
        return JoinedChoice(known, None)
    outcome = await dispatcher.submit(stream)
    if isinstance(outcome, Adopted):
        stream.record.resumed()
    return JoinedChoice(stream, outcome)
