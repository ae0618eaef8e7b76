"""When sequences must have ended. Times are milliseconds by the engine's clock; the clock itself is the engine's.

Who ended before its deadline stays in the heap, as a name, until its time comes or there are too many of them.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator

from executor.scheduler.sequence import Sequence

Entry = tuple[int, str, int]
# Names of sequences that have ended are worth 100 bytes each; so many may collect beside those that are held.
MAX_ENDED = 1024


class DeadlineHeap:
    """A heap of (deadline, request, attempt)."""

    def __init__(self) -> None:
        self._heap: list[Entry] = []

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, sequence: Sequence, held: Iterable[Sequence]) -> None:
        """Takes in a sequence that may have a deadline; `held` is asked only when there is much to forget."""
        if sequence.deadline_ms is None:
            return
        heapq.heappush(self._heap, _entry(sequence.deadline_ms, sequence))
        if len(self._heap) > MAX_ENDED:
            known = [_entry(s.deadline_ms, s) for s in held if s.deadline_ms is not None]
            if len(self._heap) > MAX_ENDED + 2 * len(known):
                self._heap = known
                heapq.heapify(self._heap)

    def take_due(self, now_ms: int) -> Iterator[tuple[str, int]]:
        """Request and attempt of everyone whose deadline has passed, in order."""
        while self._heap and self._heap[0][0] <= now_ms:
            _, request_id, attempt = heapq.heappop(self._heap)
            yield request_id, attempt


def _entry(deadline_ms: int, sequence: Sequence) -> Entry:
    return deadline_ms, sequence.request_id, sequence.attempt
