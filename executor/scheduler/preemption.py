"""Choice of the sequence to preempt, and of swapping or recomputing its KV. Pure functions that read neither tokens nor
blocks, so their cost does not depend on the length of the contexts."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from inflight.executor.scheduler.limits import PreemptionCost
from inflight.executor.scheduler.sequence import Sequence


@dataclass(frozen=True, slots=True)
class PreemptedKv:
    """How much of a sequence's KV is in blocks of its own, and how much of that preemption would lose.

    Blocks found in the prefix cache may be held by others as well. Published blocks of its own stay in the cache, but
    the cache is empty when a sequence is preempted: as many as are needed now are evicted from them, last block first.
    """

    num_own_blocks: int
    num_lost_tokens: int

    @classmethod
    def of(cls, sequence: Sequence, block_size: int, num_wanted_blocks: int, *, is_published: bool) -> PreemptedKv:
        """`is_published` says whether the full blocks that the sequence has computed are in the prefix cache."""
        num_computed = sequence.num_computed
        num_shared = min(sequence.num_shared_tokens, num_computed) // block_size
        num_findable = max(num_shared, num_computed // block_size) if is_published else num_shared
        num_partial = len(sequence.block_table) - num_findable
        num_evicted = min(max(0, num_wanted_blocks - num_partial), num_findable - num_shared)
        num_lost_tokens = num_computed - (num_findable - num_evicted) * block_size
        return cls(len(sequence.block_table) - num_shared, max(0, num_lost_tokens))


def swap_cost(kept: PreemptedKv, block_size: int, cost: PreemptionCost) -> float:
    """Returns the cost of copying out and in again."""
    return 2 * kept.num_own_blocks * block_size * cost.swap_token


def recompute_cost(kept: PreemptedKv, cost: PreemptionCost) -> float:
    """Returns the cost of computing the lost tokens again."""
    return kept.num_lost_tokens * cost.recompute_token


def is_swap_cheaper(kept: PreemptedKv, block_size: int, cost: PreemptionCost, num_host_blocks: int) -> bool:
    """Returns whether the KV should go to host memory, where so many blocks are available, rather than be computed
    again."""
    if kept.num_own_blocks > num_host_blocks:
        return False
    return swap_cost(kept, block_size, cost) < recompute_cost(kept, cost)


@dataclass(frozen=True, slots=True)
class Candidate:
    """A sequence that could be preempted, and the cost of restoring its KV."""

    sequence: Sequence
    cost: float


def choose_victim(candidates: Iterable[Candidate], last_victim: Sequence | None) -> Sequence | None:
    """Returns the sequence to preempt: the lowest priority first, then no deadline, then the latest deadline, then the
    lowest cost, then the latest arrival. The last victim is chosen again only if it is alone."""
    candidates = list(candidates)
    others = [candidate for candidate in candidates if candidate.sequence is not last_victim]
    victim = min(others or candidates, key=_order, default=None)
    return None if victim is None else victim.sequence


def _order(candidate: Candidate) -> tuple[int, float, float, int]:
    sequence = candidate.sequence
    latest = math.inf if sequence.deadline_ms is None else sequence.deadline_ms
    return sequence.priority, -latest, candidate.cost, -sequence.arrival
