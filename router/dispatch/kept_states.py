"""The prefixes whose recurrent state executors of a pool keep, by their newest reports."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable


class KeptStates:
    """A container of names of prefixes (`inflight.common.protocol`)."""

    def __init__(self) -> None:
        self._of: dict[str, frozenset[bytes]] = {}
        self._num_holders: Counter[bytes] = Counter()

    def __contains__(self, name: object) -> bool:
        return name in self._num_holders

    def set(self, executor_id: str, names: Iterable[bytes]) -> None:
        """Replaces what an executor keeps."""
        before, now = self._of.get(executor_id, frozenset()), frozenset(names)
        if now == before:
            return
        self._num_holders.update(now - before)
        for name in before - now:
            self._num_holders[name] -= 1
            if not self._num_holders[name]:
                del self._num_holders[name]
        self._of[executor_id] = now

    def forget(self, executor_id: str) -> None:
        """Drops what an executor that is gone keeps."""
        self.set(executor_id, ())
        self._of.pop(executor_id, None)
