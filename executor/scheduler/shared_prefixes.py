"""Prefixes that are being computed, so that a sequence with the same prefix waits for the blocks instead of computing
them as well.

Blocks are identified by their chain hashes, and those of different salts never match. So a client cannot learn from its
own wait what another client computes.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from collections.abc import Sequence as ReadOnlyList

from executor.scheduler.blocks import BlockPool
from executor.scheduler.prefix_cache import PrefixCache
from executor.scheduler.sequence import Sequence

# Fewer blocks are not worth waiting a step for.
LEAST_BLOCKS = 2


class PendingPrefixes:
    """The sequence that computes each block. A sequence waits at most `max_steps` steps in all."""

    def __init__(self, pool: BlockPool, prefix_cache: PrefixCache, max_steps: int) -> None:
        self._pool = pool
        self._prefix_cache = prefix_cache
        self._max_steps = max_steps
        self._computing: dict[bytes, Sequence] = {}

    def begin(self, sequence: Sequence) -> None:
        """Registers the full prompt blocks that a sequence that has just boarded will compute. One that scores its
        prompt computes too slowly to wait for."""
        if self._max_steps and self._prefix_cache.is_open_to(sequence) and not sequence.num_unscored:
            for block_hash in sequence.block_hashes[sequence.num_computed // self._pool.block_size :]:
                self._computing.setdefault(block_hash, sequence)

    def publish(self, sequence: Sequence, start: int, end: int) -> None:
        """Removes the blocks that computing `[start, end)` has filled; the prefix cache has them now."""
        if self._computing:
            block_size = self._pool.block_size
            self._forget(sequence, start // block_size, end // block_size)

    def forget(self, sequence: Sequence) -> None:
        """Removes all blocks of a sequence that has ended."""
        if self._computing:
            self._forget(sequence, 0, len(sequence.block_hashes))

    def should_wait(self, sequence: Sequence) -> bool:
        """Returns whether a waiting sequence should wait one more step, and counts the step."""
        if not self._computing or sequence.num_prefix_wait_steps >= self._max_steps or sequence.num_preemptions:
            return False
        if not self._prefix_cache.is_open_to(sequence) or not self._is_quicker(sequence):
            return False
        sequence.num_prefix_wait_steps += 1
        return True

    def _is_quicker(self, sequence: Sequence) -> bool:
        """Returns whether another sequence will have computed the first missing blocks sooner."""
        block_size = self._pool.block_size
        num_usable = sequence.num_reusable_tokens // block_size
        hashes = self._prefix_cache.name_blocks(sequence)[:num_usable]
        num_found = _num_leading(hashes, self._pool.is_findable)
        num_coming = _num_leading(hashes[num_found:], self._computing.__contains__)
        if num_coming < LEAST_BLOCKS:
            return False
        computing = self._computing[hashes[num_found + num_coming - 1]]
        end = (num_found + num_coming) * block_size
        return end - computing.num_computed <= num_coming * block_size

    def _forget(self, sequence: Sequence, first: int, last: int) -> None:
        for block_hash in sequence.block_hashes[first:last]:
            if self._computing.get(block_hash) is sequence:
                del self._computing[block_hash]


def _num_leading(hashes: ReadOnlyList[bytes], is_in: Callable[[bytes], bool]) -> int:
    """Returns how many hashes of a chain, from its start, are in a set. The tail of a chain is evicted before its head,
    so bisection works; otherwise the result is an estimate."""
    return bisect_left(range(len(hashes)), True, key=lambda index: not is_in(hashes[index]))
