"""Where the KV blocks of a step come from: who may decode, and who may board. One way for each policy."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from executor.scheduler.blocks import BlockPool
from executor.scheduler.plan_builder import StepDraft
from executor.scheduler.prefix_cache import PrefixCache
from executor.scheduler.queues import SequenceQueues
from executor.scheduler.sequence import Sequence


class KvPolicy(Protocol):
    """Decides about blocks, not about seats or tokens."""

    num_preemptions: int
    num_recomputed_tokens: int

    def decodes(self, draft: StepDraft) -> Iterable[Sequence]:
        """Who of the decodes gets its next token in this step; each of them can grow."""
        ...

    def take(self, sequence: Sequence, draft: StepDraft) -> bool:
        """Starts the sequence's block table if there are blocks for it now. Else nothing happens."""
        ...

    def overdue(self) -> list[Sequence]:
        """Who has waited too long to come back; called once for each step."""
        ...

    def release(self, sequence: Sequence) -> None:
        """Takes back what the sequence holds. No step in flight may have a row of it."""
        ...

    @property
    def num_overrun_blocks(self) -> int:
        """Blocks that sequences use, or need to come back, beyond those reserved for them."""
        ...

    def budget_blocks(self, num_reserved_blocks: int) -> int:
        """Blocks that can be promised, those included that are."""
        ...

    @property
    def num_used_host_blocks(self) -> int:
        """Host blocks that keep KV."""
        ...

    def check(self) -> None:
        """Asserts that nothing beside the device's blocks is lost."""
        ...


class GuaranteedNoEvict:
    """guaranteed_no_evict: the gate has promised each sequence all that it can need, so an allocation cannot fail."""

    num_preemptions = 0
    num_recomputed_tokens = 0
    num_overrun_blocks = 0
    num_used_host_blocks = 0

    def __init__(self, pool: BlockPool, prefix_cache: PrefixCache, queues: SequenceQueues) -> None:
        self._pool = pool
        self._prefix_cache = prefix_cache
        self._queues = queues

    def decodes(self, draft: StepDraft) -> Iterable[Sequence]:
        """Everyone."""
        return self._queues.decodes

    def take(self, sequence: Sequence, draft: StepDraft) -> bool:
        """See `KvPolicy`."""
        if not self._has_blocks_for(sequence):
            return False
        self._prefix_cache.attach(sequence)
        return True

    def overdue(self) -> list[Sequence]:
        """Nobody is ever away."""
        return []

    def release(self, sequence: Sequence) -> None:
        """See `KvPolicy`."""
        self._pool.release(sequence.block_table)
        sequence.block_table = []
        sequence.num_computed = 0

    def budget_blocks(self, num_reserved_blocks: int) -> int:
        """All of them, for nobody uses more than was reserved for it."""
        return self._pool.num_blocks

    def check(self) -> None:
        """There is nothing else."""

    def _has_blocks_for(self, sequence: Sequence) -> bool:
        """Whether its reservation fits beside what the others hold or may take until their end. The gate made sure of
        that, but for the blocks of those who are leaving."""
        leaving = self._queues.leaving
        if not leaving:
            return True
        num_taken = sum(s.num_reserved_blocks for s in self._queues.boarded())
        num_taken += sum(len(s.block_table) for s in leaving)
        return num_taken + sequence.num_reserved_blocks <= self._pool.num_blocks
