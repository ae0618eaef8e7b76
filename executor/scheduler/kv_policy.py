"""KV policies: which sequences may decode and which may board, by the blocks that are available. One class per
policy."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from executor.scheduler.blocks import BlockPool
from executor.scheduler.plan_builder import StepBuilder
from executor.scheduler.prefix_cache import PrefixCache
from executor.scheduler.queues import SequenceQueues
from executor.scheduler.sequence import Sequence


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
        """Returns the blocks that can be reserved in all, including those reserved now."""
        ...


class GuaranteedNoEvict:
    """guaranteed_no_evict: no sequence uses more than the gate has reserved for it, so an allocation cannot fail."""

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

    def _has_blocks_for(self, sequence: Sequence) -> bool:
        """Returns whether the reservation fits beside the reservations on seats and the blocks of leaving sequences.
        The gate has checked all but the latter."""
        leaving = self._queues.leaving
        if not leaving:
            return True
        num_taken = self._queues.num_reserved_blocks + sum(len(s.block_table) for s in leaving)
        return num_taken + sequence.num_reserved_blocks <= self._pool.num_blocks
