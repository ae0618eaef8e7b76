"""Whom to preempt, and what becomes of its KV. Pure functions over what is known of a sequence without reading its
tokens or its blocks: choosing costs the same however long the contexts are."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from executor.scheduler.limits import PreemptionCost
from executor.scheduler.sequence import Sequence


@dataclass(frozen=True, slots=True)
class PreemptedKv:
    """How much of a sequence's KV is in blocks of its own, and how much of that its leaving would cost.

    What it found in the prefix cache others may hold as well. Blocks of its own that are published stay in the cache,
    but the cache is empty when somebody is preempted: so many as are wanted now are taken from them, last block first.
    """

    num_own_blocks: int
    num_lost_tokens: int

    @classmethod
    def of(cls, sequence: Sequence, block_size: int, num_wanted_blocks: int, *, is_published: bool) -> PreemptedKv:
        """`is_published` says whether the full blocks that it has computed are in the prefix cache."""
        num_computed = sequence.num_computed
        num_shared = min(sequence.num_cached_tokens, num_computed) // block_size
        num_findable = max(num_shared, num_computed // block_size) if is_published else num_shared
        num_partial = len(sequence.block_table) - num_findable
        num_evicted = min(max(0, num_wanted_blocks - num_partial), num_findable - num_shared)
        num_lost_tokens = num_computed - (num_findable - num_evicted) * block_size
        return cls(len(sequence.block_table) - num_shared, max(0, num_lost_tokens))


def swap_cost(kept: PreemptedKv, block_size: int, cost: PreemptionCost) -> float:
    """Out and in again."""
    return 2 * kept.num_own_blocks * block_size * cost.swap_token


def recompute_cost(kept: PreemptedKv, cost: PreemptionCost) -> float:
    """Only what is lost is computed again."""
    return kept.num_lost_tokens * cost.recompute_token


def is_swap_cheaper(kept: PreemptedKv, block_size: int, cost: PreemptionCost, num_free_host_blocks: int) -> bool:
    """Whether its KV goes to host memory rather than being computed again."""
    if kept.num_own_blocks > num_free_host_blocks:
        return False
    return swap_cost(kept, block_size, cost) < recompute_cost(kept, cost)


@dataclass(frozen=True, slots=True)
class Candidate:
    """Somebody who could be preempted, and what it would cost to have it back."""

    sequence: Sequence
    cost: float


def choose_victim(candidates: Iterable[Candidate], last_victim: Sequence | None) -> Sequence | None:
    """Lowest priority first; among equals who has no deadline, then the latest deadline; then the cheapest; then who
    came last. Never the same twice running while there is another."""
    candidates = list(candidates)
    others = [candidate for candidate in candidates if candidate.sequence is not last_victim]
    victim = min(others or candidates, key=_order, default=None)
    return None if victim is None else victim.sequence


def _order(candidate: Candidate) -> tuple[int, float, float, int]:
    sequence = candidate.sequence
    latest = math.inf if sequence.deadline_ms is None else sequence.deadline_ms
    return sequence.priority, -latest, candidate.cost, -sequence.arrival
