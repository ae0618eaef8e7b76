"""The newest steps, for whoever looks on. Kept by the event loop's thread; a thousand of them take about a megabyte."""

from __future__ import annotations

from collections import deque
from itertools import islice

from executor.step_record import StepRecord

NUM_KEPT = 1000


class StepHistory:
    """Records in order, without gaps."""

    def __init__(self, num_kept: int = NUM_KEPT) -> None:
        self._records: deque[StepRecord] = deque(maxlen=num_kept)

    def add(self, record: StepRecord) -> None:
        """Takes in the next; the oldest gives way."""
        self._records.append(record)

    @property
    def newest_step(self) -> int:
        """The number of the newest; 0 before the first."""
        return self._records[-1].step if self._records else 0

    def after(self, step: int) -> list[StepRecord]:
        """Those behind this step that are still here, oldest first."""
        num_wanted = min(self.newest_step - step, len(self._records))
        newest_first = islice(reversed(self._records), num_wanted)
        return list(newest_first)[::-1]
