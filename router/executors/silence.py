"""When a peer that ought to speak every second has been silent for too long.

Counted in looks a second apart. A look that comes late says that this process stood still, not the peer: what the peer
has sent meanwhile is still to be read, so the count begins anew.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

LOOK_EVERY_S = 1.0
LATE_S = 1.0


class LivenessTimer:
    """The silence of one peer; over when it has lasted for `max_silent_s` looks."""

    def __init__(self, max_silent_s: int) -> None:
        self.is_over = False
        self._max_silent = max_silent_s
        self._num_silent = 0
        self._has_heard = False

    def hear(self) -> None:
        """The peer said something."""
        self._has_heard = True

    def look(self, late_s: float) -> bool:
        """Whether it is too long now, at a look that comes so many seconds late."""
        self._num_silent = 0 if self._has_heard or late_s > LATE_S else self._num_silent + 1
        self._has_heard = False
        self.is_over = self._num_silent >= self._max_silent
        return self.is_over

    async def watch(self, end: Callable[[], object]) -> None:
        """Looks until it is over, and then calls `end`."""
        loop = asyncio.get_running_loop()
        while not self.is_over:
            due = loop.time() + LOOK_EVERY_S
            await asyncio.sleep(LOOK_EVERY_S)
            self.look(loop.time() - due)
        end()
