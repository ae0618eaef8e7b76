"""The choice of a sub-pool for a request: by prefix first, by load among a few.

A prompt whose prefix this router has placed before goes where that was. Another one has two candidates, which follow
from its first block, or are drawn if it has none: the less loaded one is chosen, so that prompts with the same
beginning stay in two sub-pools. Where the choice has a queue and another sub-pool has room, the request goes there.
The load is what the sub-pool told this router last, and what this router has submitted since.
"""

from __future__ import annotations

import random
from collections import OrderedDict
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from inflight.router.store.types import Demand, PoolLoad
from inflight.router.subpools.assignment import ranked

MAX_PREFIXES = 100_000
UNKNOWN = PoolLoad(0, 0, 0)


@dataclass(slots=True)
class SubPoolLoad:
    """One sub-pool as this router knows it. `is_away`: its Redis did not answer the last call."""

    told: PoolLoad = UNKNOWN
    num_queued: int = 0
    """Requests of this router that had to wait there since."""
    is_away: bool = False

    @property
    def has_executors(self) -> bool:
        return self.told.num_executors > 0 and not self.is_away

    @property
    def is_idle(self) -> bool:
        """Whether a request would be placed there at once."""
        return self.has_executors and self.told.num_with_room > 0 and not self.num_waiting

    @property
    def num_waiting(self) -> int:
        return self.told.num_waiting + self.num_queued

    def order(self) -> tuple[int, float]:
        """Returns a key by which less loaded sub-pools come first."""
        if not self.has_executors:
            return 2, 0.0
        if self.is_idle:
            return 0, -self.told.num_with_room / self.told.num_executors
        return 1, self.num_waiting / self.told.num_executors


class SubPoolChoice:
    """The loads of all sub-pools, and the prefixes that this router has submitted."""

    def __init__(self, num_subpools: int, chance: random.Random | None = None) -> None:
        self.loads = [SubPoolLoad() for _ in range(num_subpools)]
        self._chance = chance or random.Random()
        self._prefixes: OrderedDict[str, int] = OrderedDict()

    def order_for(self, demand: Demand, allowed: Collection[int]) -> list[int]:
        """Returns the allowed sub-pools, the chosen one first, then the others, the least loaded first."""
        ordered = sorted(allowed, key=self._key)
        chosen = self._preferred(demand, allowed)
        best, own = self._key(ordered[0])[0], self._key(chosen)[0]
        if best < own:
            better = [number for number in ordered if self._key(number)[0] == best]
            chosen = min(self._chance.sample(better, min(2, len(better))), key=self._key)
        return [chosen, *(number for number in ordered if number != chosen)]

    def submitted(self, demand: Demand, number: int, *, is_queued: bool) -> None:
        """Records where a request was placed or waits."""
        self.loads[number].num_queued += is_queued
        for prefix in demand.prefix_hashes:
            self._prefixes[prefix] = number
            self._prefixes.move_to_end(prefix)
        while len(self._prefixes) > MAX_PREFIXES:
            self._prefixes.popitem(last=False)

    def record_load(self, number: int, load: PoolLoad) -> None:
        """Takes the load that a sub-pool has told."""
        self.loads[number] = SubPoolLoad(load)

    def _preferred(self, demand: Demand, allowed: Collection[int]) -> int:
        for prefix in reversed(demand.prefix_hashes[1:]):
            if self._prefixes.get(prefix) in allowed:
                return self._prefixes[prefix]
        return min(self._candidates(demand, allowed), key=self._key)

    def _key(self, number: int) -> tuple[int, float]:
        return self.loads[number].order()

    def _candidates(self, demand: Demand, allowed: Collection[int]) -> Sequence[int]:
        if not demand.prefix_hashes:
            return self._chance.sample(sorted(allowed), min(2, len(allowed)))
        return [number for number in ranked(demand.prefix_hashes[0], len(self.loads)) if number in allowed][:2]
