"""Which prefixes are being computed right now, so that a sequence that wants the same may wait for the blocks instead
of computing them as well.

Blocks are named by their chain hashes, and those of different salts never match: nobody can tell from its own wait what
somebody else computes.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable
from collections.abc import Sequence as ReadOnlyList

from executor.scheduler.blocks import BlockPool
from executor.scheduler.prefix_cache import PrefixCache
from executor.scheduler.sequence import Sequence

# Less is not worth waiting a step for.
LEAST_BLOCKS = 2


class PendingPrefixes:
    """Who computes which block. A sequence waits at most `max_steps` steps in all."""

    def __init__(self, pool: BlockPool, prefix_cache: PrefixCache, max_steps: int) -> None:
        self._pool = pool
        self._prefix_cache = prefix_cache
        self._max_steps = max_steps
        self._computing: dict[bytes, Sequence] = {}

    def begin(self, sequence: Sequence) -> None:
        """A sequence that has just boarded will compute the full blocks of its prompt that it did not find."""
        if self._max_steps and self._prefix_cache.is_open_to(sequence):
            for block_hash in sequence.block_hashes[sequence.num_computed // self._pool.block_size :]:
                self._computing.setdefault(block_hash, sequence)

    def publish(self, sequence: Sequence, start: int, end: int) -> None:
        """The blocks that computing `[start, end)` has filled can be found from now on."""
        if self._computing:
            block_size = self._pool.block_size
            self._forget(sequence, start // block_size, end // block_size)

    def forget(self, sequence: Sequence) -> None:
        """The sequence computes no more."""
        if self._computing:
            self._forget(sequence, 0, len(sequence.block_hashes))

    def should_wait(self, sequence: Sequence) -> bool:
        """Whether a sequence in line does better to wait one more step."""
        if not self._computing or sequence.num_twin_steps >= self._max_steps or sequence.num_preemptions:
            return False
        if not self._prefix_cache.is_open_to(sequence) or not self._is_quicker(sequence):
            return False
        sequence.num_twin_steps += 1
        return True

    def _is_quicker(self, sequence: Sequence) -> bool:
        """Whether somebody is further with the blocks that it lacks first."""
        block_size = self._pool.block_size
        num_usable = (sequence.num_tokens - 1) // block_size
        hashes = self._prefix_cache.name_blocks(sequence)[:num_usable]
        num_found = _num_leading(hashes, self._pool.is_findable)
        num_coming = _num_leading(hashes[num_found:], self._computing.__contains__)
        if num_coming < LEAST_BLOCKS:
            return False
        twin = self._computing[hashes[num_found + num_coming - 1]]
        end = (num_found + num_coming) * block_size
        return end - twin.num_computed <= num_coming * block_size

    def _forget(self, sequence: Sequence, first: int, last: int) -> None:
        for block_hash in sequence.block_hashes[first:last]:
            if self._computing.get(block_hash) is sequence:
                del self._computing[block_hash]


def _num_leading(hashes: ReadOnlyList[bytes], is_in: Callable[[bytes], bool]) -> int:
    """How many of a chain, from its start, are in a set. The tail of a chain goes before its head, so halving will do;
    where it does not hold the answer is an estimate."""
    return bisect_left(range(len(hashes)), True, key=lambda index: not is_in(hashes[index]))
