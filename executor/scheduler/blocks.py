"""The KV block pool: reference counts, free blocks and cached prefixes. Pure bookkeeping; the KV itself lives on the
device.

Blocks are numbered from 1 to `num_blocks`. Block 0 is spare: no sequence ever owns it, padding writes go there. Each
block is in exactly one state:

| state  | references | hash   | where it is kept                                          |
| ------ | ---------- | ------ | --------------------------------------------------------- |
| free   | 0          | none   | `_free`, a stack                                          |
| cached | 0          | a hash | `_cached`, least recently used first; evicted when none is free |
| used   | 1 or more  | maybe  | the block tables of the sequences that refer to it        |

Only a published block is ever shared. A published block is full: no sequence writes to it until it is evicted.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterable, Set
from collections.abc import Sequence as ReadOnlyList
from itertools import chain


class HostBlocks:
    """Free list of the host memory's blocks, numbered from 0."""

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks))[::-1]

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_used(self) -> int:
        """Blocks that hold a copy."""
        return self.num_blocks - len(self._free)

    def allocate(self, count: int) -> list[int] | None:
        """Allocates `count` blocks, or returns None when there are not enough."""
        if count > len(self._free):
            return None
        return [self._free.pop() for _ in range(count)]

    def release(self, blocks: ReadOnlyList[int]) -> None:
        self._free.extend(blocks)

    def check(self, owned: Iterable[ReadOnlyList[int]]) -> None:
        """Asserts that each block is free or in exactly one of the copies `owned`."""
        blocks = sorted(chain(self._free, *owned))
        assert blocks == list(range(self.num_blocks)), f"host blocks free or owned: {blocks[:10]} of {self.num_blocks}"


class BlockError(Exception):
    """Raised when a block would be shared or released by a sequence that does not own it. The pool is unchanged."""


class BlockPool:
    """Reference-counted blocks. A published block stays findable by its hash until it is evicted."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError(f"num_blocks and block_size must be at least 1, not {num_blocks} and {block_size}")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._free = list(range(num_blocks, 0, -1))
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._num_references = [0] * (num_blocks + 1)
        self._hash_of: list[bytes | None] = [None] * (num_blocks + 1)
        self._block_of: dict[bytes, int] = {}

    @property
    def num_free(self) -> int:
        """Blocks that hold no KV."""
        return len(self._free)

    @property
    def num_cached(self) -> int:
        """Unreferenced blocks that are kept for their prefix."""
        return len(self._cached)

    @property
    def num_published(self) -> int:
        """Blocks that can be found by their hash, referenced or not."""
        return len(self._block_of)

    @property
    def num_available(self) -> int:
        """Blocks that can be allocated: the free ones, and the cached ones by eviction."""
        return len(self._free) + len(self._cached)

    @property
    def num_used(self) -> int:
        """Blocks that sequences refer to; a shared block counts once."""
        return self.num_blocks - self.num_available

    def allocate(self, count: int) -> list[int] | None:
        """Allocates `count` blocks with one reference each, or returns None when there are not enough."""
        if count > self.num_available:
            return None
        blocks = [self._free.pop() if self._free else self._evict() for _ in range(count)]
        for block in blocks:
            self._num_references[block] = 1
        return blocks

    def share(self, hashes: Iterable[bytes]) -> list[int]:
        """Takes a reference to each block of the longest published prefix of `hashes`."""
        blocks: list[int] = []
        for block_hash in hashes:
            block = self._block_of.get(block_hash)
            if block is None:
                break
            if self._num_references[block] == 0:
                del self._cached[block]
            self._num_references[block] += 1
            blocks.append(block)
        return blocks

    def is_findable(self, block_hash: bytes) -> bool:
        """Returns whether a block with this content is published."""
        return block_hash in self._block_of

    def publish(self, block: int, block_hash: bytes) -> None:
        """Makes a full block findable. If an equal block is published already, that one stays published and this one
        stays private.

        Raises `BlockError` for an unreferenced block: another sequence could write to it while it is read.
        """
        if self._num_references[block] == 0:
            raise BlockError(f"block {block} is published and no sequence holds it")
        if self._hash_of[block] is not None:
            raise BlockError(f"block {block} is published twice")
        if block_hash not in self._block_of:
            self._block_of[block_hash] = block
            self._hash_of[block] = block_hash

    def retract(self, block_table: ReadOnlyList[int]) -> None:
        """Withdraws the hashes of the blocks that no other sequence holds, so that their content is not shared."""
        for block in block_table:
            block_hash = self._hash_of[block]
            if block_hash is not None and self._num_references[block] == 1:
                del self._block_of[block_hash]
                self._hash_of[block] = None

    def release(self, block_table: ReadOnlyList[int]) -> None:
        """Drops one reference to each block, last block first, so that the tail of a prefix is evicted before its head.

        Raises `BlockError` for an unreferenced block: a block released twice would belong to two sequences.
        """
        for block in block_table:
            if self._num_references[block] == 0:
                raise BlockError(f"block {block} is released and no sequence holds it")
        for block in reversed(block_table):
            self._num_references[block] -= 1
            if self._num_references[block] > 0:
                continue
            if self._hash_of[block] is None:
                self._free.append(block)
            else:
                self._cached[block] = None

    def num_references(self, block: int) -> int:
        """Returns the number of block tables that contain the block."""
        return self._num_references[block]

    def is_published(self, block: int) -> bool:
        """Returns whether the block can be found by its hash."""
        return self._hash_of[block] is not None

    def check(self, block_tables: Iterable[ReadOnlyList[int]]) -> None:
        """Asserts that exactly these tables refer to blocks and that each block is in exactly one state."""
        tables = list(block_tables)
        owners = Counter(chain.from_iterable(tables))
        references = {block: count for block, count in enumerate(self._num_references) if count}
        wrong = sorted(block for block in owners | references if owners[block] != references.get(block, 0))
        assert not wrong, f"tables against references: {[(b, owners[b], references.get(b, 0)) for b in wrong[:10]]}"
        assert all(len(set(table)) == len(table) for table in tables), "a block is twice in one table"
        self._check_states(owners.keys())
        hashed = {block for block, block_hash in enumerate(self._hash_of) if block_hash is not None}
        private = sorted(block for block, count in owners.items() if count > 1 and block not in hashed)
        assert not private, f"shared but not published: {private[:10]}"
        self._check_hashes(hashed)

    def _check_states(self, used: Set[int]) -> None:
        free, cached = set(self._free), self._cached.keys()
        counts = f"{len(self._free)} free + {len(cached)} cached + {len(used)} used of {self.num_blocks} blocks"
        assert len(self._free) + len(cached) + len(used) == self.num_blocks, counts
        odd = (free | cached | used) ^ set(range(1, self.num_blocks + 1))
        assert not odd, f"{counts}; in no state, or unknown: {sorted(odd)[:10]}"

    def _check_hashes(self, hashed: Set[int]) -> None:
        found = {block for block_hash, block in self._block_of.items() if self._hash_of[block] == block_hash}
        assert len(self._block_of) == len(found), "a hash leads to a block that has another"
        assert found == hashed, f"not found by their hash: {sorted(found ^ hashed)[:10]}"
        assert hashed.isdisjoint(self._free), "a free block has a hash"
        assert hashed >= self._cached.keys(), "a cached block has no hash"

    def _evict(self) -> int:
        block, _ = self._cached.popitem(last=False)
        block_hash = self._hash_of[block]
        assert block_hash is not None, f"block {block} is cached without a hash"
        del self._block_of[block_hash]
        self._hash_of[block] = None
        return block
