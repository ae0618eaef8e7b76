"""New tokens of one link's streams, published together: once per step while the event loop keeps up.

Publishing makes an event for every client, which is most of a router's work. So the loop is left to other work for as
long as it was busy with the last round, of this link and of all others: tokens of steps in that time leave together.
A loop that keeps up is busy for a fraction of a step, and delays nothing.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from router.stream.request_stream import RequestStream


class StepOutput:
    """The streams with tokens that have not been published."""

    def __init__(self) -> None:
        self._streams: dict[RequestStream, None] = {}
        # The end of the pause after the last round.
        self._due_s = 0.0
        self._timer: asyncio.TimerHandle | None = None

    def add(self, streams: Iterable[RequestStream]) -> None:
        """Adds the streams of a step. A stream whose reader waits for its first token is told at once."""
        for stream in streams:
            if stream.on_output is None:
                stream.tell_output()
            else:
                self._streams[stream] = None
        if not self._streams or self._timer is not None:
            return
        loop = asyncio.get_running_loop()
        if loop.time() >= self._due_s:
            self.publish()
        else:
            self._timer = loop.call_at(self._due_s, self.publish)

    def publish(self) -> None:
        """Publishes all tokens now."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if not self._streams:
            return
        loop = asyncio.get_running_loop()
        began_s = loop.time()
        streams, self._streams = self._streams, {}
        for stream in streams:
            stream.tell_output()
        loop.call_soon(self._note_busy, began_s)

    def _note_busy(self, began_s: float) -> None:
        """Runs once the loop has done everything that was due."""
        now_s = asyncio.get_running_loop().time()
        self._due_s = now_s + (now_s - began_s)
