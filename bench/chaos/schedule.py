"""A seeded sequence of faults. Pure; a seed always gives the same sequence.

Every kind comes once before any comes again, in an order that the seed shuffles. The next fault waits until the system
has recovered from the one before: the promise is that any *single* death goes unnoticed.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum


class FaultKind(Enum):
    """What happens. The value is its name on the command line and in reports."""

    EXECUTOR_KILL = "executor-kill"
    EXECUTOR_HANG = "executor-hang"
    EXECUTOR_RESTART = "executor-restart"
    ROUTER_KILL = "router-kill"
    ROUTER_HANG = "router-hang"
    ROUTER_RESTART = "router-restart"
    REDIS_EMPTY = "redis-empty"
    REDIS_RESTART = "redis-restart"
    REDIS_HANG = "redis-hang"
    LINK_CUT = "link-cut"
    LINK_BLACK_HOLE = "link-black-hole"
    LINK_DELAY = "link-delay"
    STORE_CUT = "store-cut"
    STORE_BLACK_HOLE = "store-black-hole"
    STORE_DELAY = "store-delay"
    STORE_STALE = "store-stale"
    ADAPTER_REPLACE = "adapter-replace"
    ADAPTER_REMOVE = "adapter-remove"
    ADAPTER_TRUNCATE = "adapter-truncate"


ADAPTER_KINDS = frozenset({FaultKind.ADAPTER_REPLACE, FaultKind.ADAPTER_REMOVE, FaultKind.ADAPTER_TRUNCATE})
"""Kinds that change the files of an adapter."""

# Seconds that a fault lasts, [least, most): leases are 5 s, and a hang or a partition is to outlast them. A Redis that
# hangs, or that one router does not reach, must be noticed by calls, which wait 2 s. Of a stale Redis: what it loses.
LASTS_S: dict[FaultKind, tuple[float, float]] = {
    FaultKind.EXECUTOR_HANG: (6.5, 9.0),
    FaultKind.ROUTER_HANG: (6.5, 9.0),
    FaultKind.REDIS_HANG: (3.0, 8.0),
    FaultKind.LINK_CUT: (1.0, 6.0),
    FaultKind.LINK_BLACK_HOLE: (6.5, 9.0),
    FaultKind.LINK_DELAY: (2.0, 4.0),
    FaultKind.STORE_CUT: (1.0, 6.0),
    FaultKind.STORE_BLACK_HOLE: (3.0, 8.0),
    FaultKind.STORE_DELAY: (2.0, 4.0),
    FaultKind.STORE_STALE: (1.5, 2.5),
    FaultKind.ADAPTER_REMOVE: (0.5, 3.0),
    FaultKind.ADAPTER_TRUNCATE: (0.5, 3.0),
}
CALM_S = (0.5, 2.0)
DELAY_S = (0.02, 0.2)


@dataclass(frozen=True, slots=True)
class Fault:
    """One fault: `calm_s` after the system has recovered from the one before it happens, and lasts `lasts_s`.

    `router`, `executor` and `adapter` are indices; which of them count is the kind's affair. `delay_s` is for a slow
    network.
    """

    number: int
    kind: FaultKind
    calm_s: float
    router: int
    executor: int
    lasts_s: float = 0.0
    delay_s: float = 0.0
    adapter: int = 0

    @property
    def target(self) -> str:
        """The process or link that it hits, in words."""
        match self.kind.value.partition("-")[0]:
            case "executor":
                return f"executor-{self.executor}"
            case "router":
                return f"router-{self.router}"
            case "link":
                return f"router-{self.router} – executor-{self.executor}"
            case "store" if self.kind is not FaultKind.STORE_STALE:
                return f"router-{self.router} – redis"
            case "adapter":
                return f"lora-{self.adapter}"
            case _:
                return "redis"


def faults(
    seed: int, kinds: Sequence[FaultKind], num_routers: int, num_executors: int, num_adapters: int = 0
) -> Iterator[Fault]:
    """Yields the faults of a seed, without end."""
    rng, of_adapters = random.Random(f"faults/{seed}"), random.Random(f"adapters/{seed}")
    number = 0
    while True:
        for kind in rng.sample(list(kinds), len(kinds)):
            number += 1
            yield Fault(
                number,
                kind,
                calm_s=round(rng.uniform(*CALM_S), 3),
                router=rng.randrange(num_routers),
                executor=rng.randrange(num_executors),
                lasts_s=round(rng.uniform(*LASTS_S.get(kind, (0.0, 0.0))), 3),
                delay_s=round(rng.uniform(*DELAY_S), 3),
                adapter=of_adapters.randrange(max(1, num_adapters)),
            )
