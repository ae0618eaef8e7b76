"""A warning where prefixes are rarely reused although their KV is there, because checkpoints of recurrent state are
missing. Otherwise such a collapse shows only as slow first tokens."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from inflight.executor.scheduler.states import StateCounts

log = logging.getLogger(__name__)

# Reuse is judged after both, so that neither a few requests nor a burst decides.
MIN_TOKENS = 10_000
MIN_INTERVAL_S = 60.0
# Share of the tokens with KV below which most of the cache is of no use.
LEAST_SHARE = 0.5


class StateReuse:
    """Watches the counts of one executor."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._since_s = clock()
        self._last: StateCounts | None = None

    def observe(self, counts: StateCounts) -> None:
        """Takes the newest counts. Logs a warning at the end of an interval in which little was usable."""
        last = self._last
        if last is None:
            self._last = counts
            return
        num_kv_tokens = counts.kv_tokens - last.kv_tokens
        if num_kv_tokens < MIN_TOKENS or self._clock() - self._since_s < MIN_INTERVAL_S:
            return
        num_usable_tokens = counts.usable_tokens - last.usable_tokens
        if num_usable_tokens < LEAST_SHARE * num_kv_tokens:
            log.warning(
                "prefix reuse: of %d prompt tokens with KV in the cache only %d could be used, because the checkpoints "
                "of recurrent state do not reach them; there are %d checkpoints, and %d were dropped meanwhile. More "
                "memory for the cache, or fewer seats, keep more of them",
                num_kv_tokens,
                num_usable_tokens,
                counts.checkpoints,
                counts.dropped - last.dropped,
            )
        self._last, self._since_s = counts, self._clock()
