"""Log lines of a Redis outage: one at its start, one per minute, and one at its end."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

# An outage is over after this time without a failed call. A success between failures is no recovery: Redis may answer
# reads while it refuses writes. Longer than the interval of the ledger's periodic calls.
QUIET_S = 3.0
REMINDER_S = 60.0


class Outage:
    """Tracks the calls of one pool's store. It counts failed calls, so their callers need not log them."""

    def __init__(self, pool: str, logger: logging.Logger, clock: Callable[[], float] = time.monotonic) -> None:
        self._pool = pool
        self._logger = logger
        self._clock = clock
        # All None or 0 while Redis answers.
        self._began_s: float | None = None
        self._failed_s = 0.0
        self._answered_s: float | None = None
        self._reminded_s = 0.0
        self._num_failures = 0

    def failed(self, cause: str) -> None:
        """Records a failed call."""
        now = self._clock()
        self._failed_s, self._answered_s = now, None
        self._num_failures += 1
        if self._began_s is None:
            self._began_s = self._reminded_s = now
            self._logger.warning("pool %s: the admission store is unavailable: %s", self._pool, cause)
        elif now - self._reminded_s >= REMINDER_S:
            self._reminded_s = now
            since_s = now - self._began_s
            text = "pool %s: the admission store is still unavailable after %.0f s, %d calls have failed: %s"
            self._logger.warning(text, self._pool, since_s, self._num_failures, cause)

    def answered(self) -> None:
        """Records an answered call."""
        if self._began_s is None:
            return
        now = self._clock()
        if self._answered_s is None:
            self._answered_s = now
        if now - self._failed_s < QUIET_S:
            return
        text = "pool %s: the admission store is available again after %.1f s, %d calls have failed"
        self._logger.warning(text, self._pool, self._answered_s - self._began_s, self._num_failures)
        self._began_s, self._num_failures = None, 0
