"""The KV blocks of host memory that preempted sequences are kept in. Pure bookkeeping, as of the device's blocks.

Blocks are numbered from 0. Each is free or belongs to the copy of one sequence; copies are never shared.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as ReadOnlyList
from itertools import chain


class HostBlocks:
    """A list of free blocks."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks))[::-1]

    @property
    def num_free(self) -> int:
        """Blocks that belong to nobody."""
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Blocks that hold a copy."""
        return self.num_blocks - len(self._free)

    def allocate(self, count: int) -> list[int] | None:
        """Takes `count` blocks, or none at all when there are not enough."""
        if count > len(self._free):
            return None
        return [self._free.pop() for _ in range(count)]

    def release(self, blocks: ReadOnlyList[int]) -> None:
        """Gives blocks back."""
        self._free.extend(blocks)

    def check(self, owned: Iterable[ReadOnlyList[int]]) -> None:
        """Asserts that each block is free or in exactly one of these copies."""
        blocks = sorted(chain(self._free, *owned))
        assert blocks == list(range(self.num_blocks)), f"host blocks free or owned: {blocks[:10]} of {self.num_blocks}"
