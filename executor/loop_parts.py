"""How long the parts of the loop take on the host. Engine's thread only."""

from __future__ import annotations

from collections.abc import Callable

from executor.step_record import LoopPart

_NOTHING = (0.0,) * len(LoopPart)


class LoopParts:
    """A clock that is read at the end of each part. What passed since it was read last is that part's."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._seconds = list(_NOTHING)
        # When it was read last.
        self.read_s = 0.0

    def begin(self, now_s: float) -> None:
        """There was nothing to do until now."""
        self.read_s = now_s

    def end(self, part: LoopPart) -> None:
        """A part is over."""
        now_s = self._clock()
        self._seconds[part] += now_s - self.read_s
        self.read_s = now_s

    def take(self) -> tuple[float, ...]:
        """The seconds of each part since the last call."""
        taken = tuple(self._seconds)
        self._seconds[:] = _NOTHING
        return taken
