"""Requests that have ended, kept for a while so that clients can read them again.

Bounded by count and bytes; the oldest are dropped first. For a request that was dropped the router asks the executor,
which keeps ended requests too.
"""

from __future__ import annotations

from collections import OrderedDict

from router.stream.request_stream import RequestStream

MAX_STREAMS = 10_000
MAX_BYTES = 64 * 1024 * 1024


class EndedStreams:
    """The ended requests of one pool. All times are seconds of one monotonic clock."""

    def __init__(self, keep_s: float, max_streams: int = MAX_STREAMS, max_bytes: int = MAX_BYTES) -> None:
        self._keep_s = keep_s
        self._max_streams = max_streams
        self._max_bytes = max_bytes
        # With the time to drop each and its bytes, in the order in which they ended.
        self._kept: OrderedDict[str, tuple[RequestStream, float, int]] = OrderedDict()
        self._num_bytes = 0

    def __len__(self) -> int:
        return len(self._kept)

    def keep(self, stream: RequestStream, now: float) -> None:
        """Keeps a request that has ended. It replaces an older one of the same id."""
        self._drop(stream.request_id)
        reading = stream.reading
        asked_s = None if reading is None else reading.kept_s
        keep_s = self._keep_s if asked_s is None else min(asked_s, self._keep_s)
        num_bytes = stream.num_bytes
        self._kept[stream.request_id] = (stream, now + keep_s, num_bytes)
        self._num_bytes += num_bytes
        while self._kept and self._is_too_much(now):
            self._drop(next(iter(self._kept)))

    def find(self, ledger_id: str, now: float) -> RequestStream | None:
        """Returns the request of this id if it is still kept."""
        stream, until, _ = self._kept.get(ledger_id, (None, now, 0))
        if stream is not None and until <= now:
            self._drop(ledger_id)
            return None
        return stream

    def _is_too_much(self, now: float) -> bool:
        _, oldest_until, _ = next(iter(self._kept.values()))
        return oldest_until <= now or len(self._kept) > self._max_streams or self._num_bytes > self._max_bytes

    def _drop(self, ledger_id: str) -> None:
        _, _, num_bytes = self._kept.pop(ledger_id, (None, 0.0, 0))
        self._num_bytes -= num_bytes
