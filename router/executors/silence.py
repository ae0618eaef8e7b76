"""Detection of a peer that has been silent for too long.

A peer should send a message every second. Silence is counted in checks that are one second apart. A late check shows
that this process stood still, not the peer: messages that the peer has sent meanwhile are still unread, so the count
starts again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

LOOK_EVERY_S = 1.0
LATE_S = 1.0


class LivenessTimer:
    """The silence of one peer. It is over once no message has come for `max_silent_s` checks."""

    def __init__(self, max_silent_s: int) -> None:
        self.is_over = False
        self._max_silent = max_silent_s
        self._num_silent = 0
        self._has_heard = False

    def hear(self) -> None:
        """Records a message of the peer."""
        self._has_heard = True

    def look(self, late_s: float) -> bool:
        """Counts a check that comes `late_s` seconds late. Returns whether the peer has been silent for too long."""
        self._num_silent = 0 if self._has_heard or late_s > LATE_S else self._num_silent + 1
        self._has_heard = False
        self.is_over = self._num_silent >= self._max_silent
        return self.is_over

    async def watch(self, end: Callable[[], object]) -> None:
        """Checks every second. Calls `end` once the peer has been silent for too long."""
        loop = asyncio.get_running_loop()
        while not self.is_over:
            due = loop.time() + LOOK_EVERY_S
            await asyncio.sleep(LOOK_EVERY_S)
            self.look(loop.time() - due)
        end()
