"""Python's collector of cyclic garbage, run where it holds nobody up.

By itself it runs in the middle of a step, and over everything that is alive: a pause of tens of milliseconds with a
model loaded. Here what is there after loading is left out for good, and the loop decides when: young objects when many
have come together, everything now and then and when there is nothing else to do.
"""

from __future__ import annotations

import gc

# Objects that have come and stayed since the last collection. Going through so many takes about a millisecond.
MANY_OBJECTS = 10_000
# Fewer are not worth it even when idle.
FEW_OBJECTS = 500
# Collections of young objects between two of all.
YOUNG_COLLECTIONS = 20


class GarbageCollection:
    """Takes over from the automatic collection, for the whole process."""

    def __init__(self) -> None:
        self._num_young_collections = 0

    def start(self) -> None:
        """What is alive now stays so. From here on nothing is collected but by the calls below."""
        gc.collect()
        gc.freeze()
        gc.disable()

    def after_step(self) -> None:
        """Bounds what has come together."""
        if gc.get_count()[0] < MANY_OBJECTS:
            return
        self._num_young_collections += 1
        if self._num_young_collections < YOUNG_COLLECTIONS:
            gc.collect(1)
        else:
            self._collect_all()

    def when_idle(self) -> None:
        """Nobody waits for a step."""
        if gc.get_count()[0] >= FEW_OBJECTS or self._num_young_collections:
            self._collect_all()

    def _collect_all(self) -> None:
        self._num_young_collections = 0
        gc.collect()
