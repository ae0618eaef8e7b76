"""Number of sequences that should wait here beyond the seats, so that a free seat is taken at the next step.

When a sequence ends, its router learns of it and submits another one, the *refill*. Before the refill arrives, other
sequences end. The depth is the number of sequences that end in the time of a refill, so that each of their seats finds
a waiting sequence. More sequences would only wait here instead of in the queue, from which another executor could take
them. Ends at max_tokens count like those at a stop token, since routers foresee neither. Pure: times come from outside,
in seconds.
"""

from __future__ import annotations

import math
from collections import deque

# Time constant of the rate of ends.
MEMORY_S = 10.0
# A slot that stays empty for longer had no demand.
LONGEST_REFILL_S = 1.0
# Weight of the newest refill: about the last 20 count.
SMOOTHING = 0.05


class StandbyDepth:
    """The depth, at most `most`, which it is until the first refill."""

    def __init__(self, most: int) -> None:
        self._most = most
        # Ends, and the seconds in which they happened, both decaying.
        self._num_ends = 0.0
        self._watched_s = 0.0
        self._since_s: float | None = None
        self._refill_s: float | None = None
        # Times at which slots were freed that have not been refilled.
        self._freed_s: deque[float] = deque(maxlen=4096)

    @property
    def depth(self) -> int:
        """Sequences that should wait beyond the seats."""
        if self._refill_s is None or not self._watched_s:
            return self._most
        # Without the slack, the remains of a past rate would keep one sequence waiting.
        return min(self._most, math.ceil(self._num_ends / self._watched_s * self._refill_s - 0.01))

    def ended(self, count: int, now_s: float) -> None:
        """Records `count` ends since the last call."""
        passed_s = 0.0 if self._since_s is None else max(0.0, now_s - self._since_s)
        faded = math.exp(-passed_s / MEMORY_S)
        self._since_s = now_s
        self._num_ends = self._num_ends * faded + count
        self._watched_s = self._watched_s * faded + MEMORY_S * (1 - faded)
        self._freed_s.extend([now_s] * count)

    def refilled(self, now_s: float) -> None:
        """Records that a sequence was submitted."""
        if not self._freed_s:
            return
        refill_s = now_s - self._freed_s.popleft()
        if refill_s > LONGEST_REFILL_S:
            return
        if self._refill_s is None:
            self._refill_s = refill_s
        else:
            self._refill_s += SMOOTHING * (refill_s - self._refill_s)
