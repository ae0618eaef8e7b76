"""KV policies: which sequences may decode and which may board, by the blocks that are available. One class per
policy."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from inflight.executor.scheduler.blocks import BlockPool
from inflight.executor.scheduler.plan_builder import StepBuilder
from inflight.executor.scheduler.prefix_cache import PrefixCache
from inflight.executor.scheduler.queues import SequenceQueues
from inflight.executor.scheduler.sequence import Sequence


class KvPolicy(Protocol):
    """Decides about blocks, not about seats or tokens."""

    num_preemptions: int
    num_recomputed_tokens: int

    def decodes(self, builder: StepBuilder) -> Iterable[Sequence]:
        """Returns the sequences that decode in this step. Each of them has, or can get, the block for its next
        token."""
        ...

    def take(self, sequence: Sequence, builder: StepBuilder) -> bool:
        """Starts the sequence's block table if its blocks are available now. Otherwise changes nothing and returns
        False."""
        ...

    def overdue(self) -> list[Sequence]:
        """Returns the sequences that have been preempted for too long. Must be called once per step."""
        ...

    @property
    def is_scarce(self) -> bool:
        """Whether a decode may lack its next block."""
        ...

    @property
    def num_draft_blocks(self) -> int:
        """Blocks that drafts may take without any sequence missing them."""
        ...

    def release(self, sequence: Sequence) -> None:
        """Releases the sequence's blocks. No step in flight may have a row of it."""
        ...

    @property
    def num_overrun_blocks(self) -> int:
        """Blocks that sequences use, or need to board again, beyond those reserved for them."""
        ...

    def budget_blocks(self, num_reserved_blocks: int) -> int:
        """Returns the blocks that can be reserved in all, including those reserved now, if sequences share none."""
        ...

    @property
    def num_saved_blocks(self) -> int:
        """Blocks that can be reserved beyond the budget, because sequences share so many."""
        ...


class GuaranteedNoEvict:
    """guaranteed_no_evict: no sequence uses more than the gate has reserved for it, and a sequence boards only if all
    boarded ones can use all of their reservations. So an allocation cannot fail.

    Let a boarded sequence have r blocks reserved and t in its table, and let sharing save s blocks: the tables have s
    more blocks in all than are in use. The boarded sequences need sum(r - t) more blocks; sum(t) - s are in use. So
    sum(r) - s must not exceed the pool. It stays so when a sequence ends, because at most the t of its r blocks are
    shared. The table of a leaving sequence counts like a reservation.
    """

    num_preemptions = 0
    num_recomputed_tokens = 0
    num_overrun_blocks = 0
    is_scarce = False

    def __init__(self, pool: BlockPool, prefix_cache: PrefixCache, queues: SequenceQueues) -> None:
        self._pool = pool
        self._prefix_cache = prefix_cache
        self._queues = queues

    def decodes(self, builder: StepBuilder) -> Iterable[Sequence]:
        return self._queues.decodes

    def take(self, sequence: Sequence, builder: StepBuilder) -> bool:
        if not self._prefix_cache.can_attach() or not self._has_blocks_for(sequence):
            return False
        self._prefix_cache.attach(sequence, builder)
        return True

    def overdue(self) -> list[Sequence]:
        """Returns no sequence: this policy never preempts."""
        return []

    @property
    def num_draft_blocks(self) -> int:
        """All: a draft stays within the sequence's reservation."""
        return self._pool.num_available

    def release(self, sequence: Sequence) -> None:
        self._prefix_cache.release(sequence)

    def budget_blocks(self, num_reserved_blocks: int) -> int:
        """Returns the whole pool, since no sequence uses more than its reservation."""
        return self._pool.num_blocks

    @property
    def num_saved_blocks(self) -> int:
        return self._pool.num_saved

    def _has_blocks_for(self, sequence: Sequence) -> bool:
        """Returns whether the reservation fits beside those on seats and the blocks of leaving sequences, less what
        sharing saves, with this sequence."""
        num_leaving = sum(len(s.block_table) for s in self._queues.leaving)
        num_taken = self._queues.num_reserved_blocks + num_leaving - self._pool.num_saved
        num_missing = num_taken + sequence.num_reserved_blocks - self._pool.num_blocks
        return self._prefix_cache.would_share(sequence, num_missing)
