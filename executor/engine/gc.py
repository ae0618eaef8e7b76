"""Garbage collection of Python's reference cycles at times when it delays no step.

The automatic collector runs in the middle of a step and over all objects, which pauses for tens of milliseconds with a
model loaded. Here the objects that exist after loading are excluded for good, and the loop decides when to collect:
young objects when there are many, all objects now and then and when the engine is idle.
"""

from __future__ import annotations

import gc

# Objects allocated and kept since the last collection. Traversing this many takes about a millisecond.
MANY_OBJECTS = 10_000
# Fewer are not worth a collection even when idle.
FEW_OBJECTS = 500
# Young collections between two full ones.
YOUNG_COLLECTIONS = 20


class GarbageCollection:
    """Replaces the automatic collection, for the whole process."""

    def __init__(self) -> None:
        self._num_young_collections = 0

    def start(self) -> None:
        """Excludes the objects that exist now and turns the automatic collection off. From here on only the calls below
        collect."""
        gc.collect()
        gc.freeze()
        gc.disable()

    def after_step(self) -> None:
        """Collects young objects if there are many, all objects now and then."""
        if gc.get_count()[0] < MANY_OBJECTS:
            return
        self._num_young_collections += 1
        if self._num_young_collections < YOUNG_COLLECTIONS:
            gc.collect(1)
        else:
            self._collect_all()

    def when_idle(self) -> None:
        """Collects all objects while the engine waits for work."""
        if gc.get_count()[0] >= FEW_OBJECTS or self._num_young_collections:
            self._collect_all()

    def _collect_all(self) -> None:
        self._num_young_collections = 0
        gc.collect()
