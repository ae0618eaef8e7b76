"""Deadlines of the held sequences, in milliseconds of the engine's clock, which the caller reads.

An entry of a sequence that ended early stays in the heap until its time comes or until there are too many of them.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator

from inflight.executor.scheduler.sequence import Sequence

Entry = tuple[int, str, int]
# Entries of ended sequences take 100 bytes each. This many may accumulate besides those of held sequences.
MAX_ENDED = 1024


class DeadlineHeap:
    """A heap of (deadline, request, attempt)."""

    def __init__(self) -> None:
        self._heap: list[Entry] = []

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, sequence: Sequence, held: Iterable[Sequence]) -> None:
        """Adds a sequence if it has a deadline. `held` is read only when the heap is to be rebuilt."""
        if sequence.deadline_ms is None:
            return
        heapq.heappush(self._heap, _entry(sequence.deadline_ms, sequence))
        if len(self._heap) > MAX_ENDED:
            known = [_entry(s.deadline_ms, s) for s in held if s.deadline_ms is not None]
            if len(self._heap) > MAX_ENDED + 2 * len(known):
                self._heap = known
                heapq.heapify(self._heap)

    def time_left_s(self, now_ms: float) -> float | None:
        """Returns the time until the earliest deadline, at least 0; None without one."""
        return max(0.0, self._heap[0][0] - now_ms) / 1000 if self._heap else None

    def take_due(self, now_ms: int) -> Iterator[tuple[str, int]]:
        """Yields request and attempt of each sequence whose deadline has passed, in order of the deadlines."""
        while self._heap and self._heap[0][0] <= now_ms:
            _, request_id, attempt = heapq.heappop(self._heap)
            yield request_id, attempt


def _entry(deadline_ms: int, sequence: Sequence) -> Entry:
    return deadline_ms, sequence.request_id, sequence.attempt
