"""How many sequences should wait here beyond the seats, so that a seat that falls free is taken at the very next step.

Whoever ends leaves a place; routers hear of it and send somebody else. Meanwhile so many more end as the rate of ends
and the time until a place is refilled say, and for each of them somebody should be waiting here. More would only wait
here instead of in the queue, where it could still go elsewhere. Ends at max_tokens count like those at a stop token:
routers do not foresee them either. Pure: times come from outside, in seconds.
"""

from __future__ import annotations

import math
from collections import deque

# An end counts for about so long.
MEMORY_S = 10.0
# A place that stays empty for longer was not wanted by anybody.
LONGEST_REFILL_S = 1.0
# Weight of the newest refill: about the last 20 count.
SMOOTHING = 0.05


class StandbyDepth:
    """The depth, at most `most`; that until the first place was refilled."""

    def __init__(self, most: int) -> None:
        self._most = most
        # Ends, and the seconds in which they came, both fading.
        self._num_ends = 0.0
        self._watched_s = 0.0
        self._since_s: float | None = None
        self._refill_s: float | None = None
        # When places fell free that nobody has taken yet.
        self._freed_s: deque[float] = deque(maxlen=4096)

    @property
    def depth(self) -> int:
        """Sequences that should wait beyond the seats."""
        if self._refill_s is None or not self._watched_s:
            return self._most
        # Without the slack the last remains of a rate long past would keep one waiting.
        return min(self._most, math.ceil(self._num_ends / self._watched_s * self._refill_s - 0.01))

    def ended(self, count: int, now_s: float) -> None:
        """So many sequences have ended since the last call."""
        passed_s = 0.0 if self._since_s is None else max(0.0, now_s - self._since_s)
        faded = math.exp(-passed_s / MEMORY_S)
        self._since_s = now_s
        self._num_ends = self._num_ends * faded + count
        self._watched_s = self._watched_s * faded + MEMORY_S * (1 - faded)
        self._freed_s.extend([now_s] * count)

    def refilled(self, now_s: float) -> None:
        """A sequence came in from outside."""
        if not self._freed_s:
            return
        refill_s = now_s - self._freed_s.popleft()
        if refill_s > LONGEST_REFILL_S:
            return
        if self._refill_s is None:
            self._refill_s = refill_s
        else:
            self._refill_s += SMOOTHING * (refill_s - self._refill_s)
