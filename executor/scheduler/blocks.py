"""The KV block pool: reference counts, free blocks and cached prefixes; the pool of layers with a sliding window; and
the blocks of host memory. Pure bookkeeping; the KV itself lives on the device and in host memory.

The pool's blocks are numbered from 1 to `num_blocks`. Block 0 is spare: no sequence ever owns it, padding writes go
there. Each block is in exactly one state:

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
from dataclasses import dataclass, field
from itertools import chain
from typing import NamedTuple


class HostBlocks:
    """Blocks of host memory, numbered from 0: copies of preempted sequences' KV, and prefix blocks that were evicted
    from the pool. Each block is in exactly one state:

    | state    | content                                     | where it is kept                            |
    | -------- | ------------------------------------------- | ------------------------------------------- |
    | free     | none that is needed                         | `_free`                                     |
    | copy     | KV of a preempted sequence                  | the sequence's `HostCopy`                   |
    | held     | a prefix block that the newest plan writes, or that a sequence is to get back | `_num_holds` |
    | idle     | any other prefix block                      | `_idle`, the next one to be dropped first   |
    | released | what the newest plan may still read         | `_released`                                 |

    A step copies out before it copies in. So a plan must not write what it reads, and must not write a block twice.
    That is why blocks that are given back stay as they are until the next plan begins.

    A prefix block can be found from the plan on that stores it. It stays here when it is copied back, so that it need
    not be copied out again, and is then the next to be dropped. Copies of sequences displace prefix blocks.
    """

    def __init__(self, num_blocks: int) -> None:
        self.num_blocks = num_blocks
        self._free = list(range(num_blocks))[::-1]
        self._released: list[int] = []
        self._block_of: dict[bytes, int] = {}
        self._hash_of: dict[int, bytes] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._num_holds: Counter[int] = Counter()
        # Holds that end when the next plan begins, and whether the pool has the block as well.
        self._ending_holds: list[tuple[int, bool]] = []
        self.num_in_copies = 0
        # Prefix blocks copied to host memory, and those dropped to make room, since the start.
        self.num_stored = 0
        self.num_dropped = 0

    @property
    def num_available(self) -> int:
        """Blocks that can be allocated now: the free ones, and the idle ones by dropping what they hold."""
        return len(self._free) + len(self._idle)

    @property
    def num_prefix_blocks(self) -> int:
        """Prefix blocks that can be found."""
        return len(self._block_of)

    def begin_plan(self) -> None:
        """Begins a plan. It may write what the plans before it read, and drop what they store."""
        self._free += self._released
        self._released.clear()
        for block, is_in_pool in self._ending_holds:
            self._end_hold(block, is_in_pool)
        self._ending_holds.clear()

    # Copies of preempted sequences.

    def allocate(self, count: int) -> list[int] | None:
        """Allocates `count` blocks for a copy, or returns None when there are not enough."""
        if count > self.num_available:
            return None
        self.num_in_copies += count
        return [self._take() for _ in range(count)]

    def release(self, blocks: ReadOnlyList[int]) -> None:
        """Gives back the blocks of a copy."""
        self.num_in_copies -= len(blocks)
        self._released.extend(blocks)

    # Prefix blocks.

    def keep(self, block_hash: bytes) -> bool:
        """Returns whether a prefix block that is being evicted from the pool is here already. Then it is the last to be
        dropped."""
        block = self._block_of.get(block_hash)
        if block is None:
            return False
        if block in self._idle:
            self._idle.move_to_end(block)
        return True

    def store(self, block_hash: bytes) -> int:
        """Returns the block to which the plan has to copy an evicted prefix block. It must not be here already, and a
        block must be available."""
        block = self._take()
        self._block_of[block_hash] = block
        self._hash_of[block] = block_hash
        self._num_holds[block] = 1
        self._ending_holds.append((block, False))
        self.num_stored += 1
        return block

    def find(self, hashes: Iterable[bytes]) -> list[int]:
        """Returns the blocks of the longest prefix of `hashes` that is here."""
        blocks: list[int] = []
        for block_hash in hashes:
            block = self._block_of.get(block_hash)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def hold(self, blocks: Iterable[int]) -> None:
        """Keeps prefix blocks from being dropped until `unhold`."""
        for block in blocks:
            self._idle.pop(block, None)
            self._num_holds[block] += 1

    def unhold(self, blocks: Iterable[int], *, are_in_pool: bool) -> None:
        """Ends a `hold`. Blocks that the pool has as well are the next to be dropped."""
        self._ending_holds += [(block, are_in_pool) for block in blocks]

    def forget(self, hashes: Iterable[bytes]) -> list[int]:
        """Makes prefix blocks impossible to find whose content is wrong, and returns them."""
        forgotten = [block for block_hash in hashes if (block := self._block_of.pop(block_hash, None)) is not None]
        for block in forgotten:
            del self._hash_of[block]
            if block in self._idle:
                del self._idle[block]
                self._released.append(block)
        return forgotten

    def check(self, copies: Iterable[ReadOnlyList[int]], held: Iterable[ReadOnlyList[int]] = ()) -> None:
        """Asserts that each block is in exactly one state, and that exactly these copies and holds exist."""
        in_copies = list(chain.from_iterable(copies))
        blocks = sorted(chain(self._free, self._released, in_copies, self._idle, self._num_holds))
        assert blocks == list(range(self.num_blocks)), f"host blocks by state: {blocks[:10]} of {self.num_blocks}"
        assert len(in_copies) == self.num_in_copies, f"{len(in_copies)} host blocks in copies, not {self.num_in_copies}"
        holds = Counter(chain.from_iterable(held)) + Counter(block for block, _ in self._ending_holds)
        assert holds == self._num_holds, f"holds of host blocks: {holds} and {self._num_holds}"
        assert self._block_of == {block_hash: block for block, block_hash in self._hash_of.items()}
        assert self._idle.keys() <= self._hash_of.keys() <= self._idle.keys() | self._num_holds.keys()

    def content_names(self) -> dict[int, bytes]:
        """Returns the hash of each prefix block that can be found."""
        return dict(self._hash_of)

    def _take(self) -> int:
        """Returns a free block, or else the idle one whose turn it is to be dropped."""
        if self._free:
            return self._free.pop()
        block, _ = self._idle.popitem(last=False)
        del self._block_of[self._hash_of.pop(block)]
        self.num_dropped += 1
        return block

    def _end_hold(self, block: int, is_in_pool: bool) -> None:
        self._num_holds[block] -= 1
        if self._num_holds[block]:
            return
        del self._num_holds[block]
        if block not in self._hash_of:
            self._free.append(block)
            return
        self._idle[block] = None
        if is_in_pool:
            self._idle.move_to_end(block, last=False)


class BlockError(Exception):
    """Raised when a block would be shared or released by a sequence that does not own it. The pool is unchanged."""


class PoolCounts(NamedTuple):
    """Blocks of a pool: in all, referenced by sequences, cached without references, and findable by hash."""

    total_blocks: int
    used_blocks: int
    evictable_blocks: int
    published_blocks: int


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
        # Blocks that sharing saves: the lengths of all block tables together, less the blocks in use.
        self.num_saved = 0
        self._hash_of: list[bytes | None] = [None] * (num_blocks + 1)
        self._block_of: dict[bytes, int] = {}
        # Evicted blocks with their hashes, in order, where the scheduler takes them from here; None: not recorded.
        self.evicted: list[tuple[int, bytes]] | None = None

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

    def num_leading_used(self, hashes: Iterable[bytes]) -> int:
        """Returns how many blocks of the longest published prefix of `hashes` sequences refer to."""
        num_used = 0
        for block_hash in hashes:
            block = self._block_of.get(block_hash)
            if block is None:
                break
            num_used += self._num_references[block] > 0
        return num_used

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
            else:
                self.num_saved += 1
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

    def forget(self, hashes: Iterable[bytes]) -> None:
        """Frees the cached blocks with these hashes, whose content is wrong."""
        for block_hash in hashes:
            block = self._block_of.get(block_hash)
            if block is not None and self._num_references[block] == 0:
                del self._block_of[block_hash], self._cached[block]
                self._hash_of[block] = None
                self._free.append(block)

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
                self.num_saved -= 1
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
        assert self.num_saved == owners.total() - len(owners), f"{self.num_saved} blocks saved"
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
        if self.evicted is not None:
            self.evicted.append((block, block_hash))
        return block


@dataclass(slots=True)
class WindowTable:
    """A sequence's blocks in the pool of the layers with a window: `blocks[i]` holds the positions of block `first + i`
    of its block table."""

    first: int = 0
    blocks: list[int] = field(default_factory=list)


class WindowPool:
    """The blocks of the layers that attend to a sliding window.

    A sequence holds the blocks of its window and of the positions behind it. Blocks that leave the window are released
    when the step that passed them retires. A published one stays findable until it is evicted, as in any `BlockPool`.

    The pool is as large as `num_blocks_for` says, so an allocation cannot fail while at most `max_tables` sequences
    hold blocks.
    """

    def __init__(self, num_blocks: int, block_size: int, num_window_tokens: int, max_tables: int) -> None:
        self._pool = BlockPool(num_blocks, block_size)
        self._block_size = block_size
        self._num_window_tokens = num_window_tokens
        self._num_free_tables = max_tables

    @property
    def num_free_tables(self) -> int:
        """Sequences that may still begin to hold blocks."""
        return self._num_free_tables

    def counts(self) -> PoolCounts:
        """Returns the counts of its blocks."""
        pool = self._pool
        return PoolCounts(pool.num_blocks, pool.num_used, pool.num_cached, pool.num_published)

    def num_usable(self, hashes: ReadOnlyList[bytes]) -> int:
        """Returns how many blocks of this prefix can be used: as many as leave a whole window of blocks here."""
        num_usable = num_here = 0
        for number, block_hash in enumerate(hashes, start=1):
            num_here = num_here + 1 if self._pool.is_findable(block_hash) else 0
            if num_here >= number - self._first_of(number * self._block_size):
                num_usable = number
        return num_usable

    def open(self, hashes: ReadOnlyList[bytes] = ()) -> WindowTable:
        """Returns the table of a sequence that boards with this prefix, all of which must be usable."""
        assert self._num_free_tables > 0, "more sequences hold window blocks than there is room for"
        self._num_free_tables -= 1
        first = self._first_of(len(hashes) * self._block_size)
        blocks = self._pool.share(hashes[first:])
        assert len(blocks) == len(hashes) - first, "the window of a prefix is not here"
        return WindowTable(first, blocks)

    def grow(self, table: WindowTable, end: int) -> bool:
        """Extends a table to position `end`. Returns False without enough blocks."""
        num_missing = -(-end // self._block_size) - table.first - len(table.blocks)
        if num_missing > 0:
            blocks = self._pool.allocate(num_missing)
            if blocks is None:
                return False
            table.blocks += blocks
        return True

    def covers(self, table: WindowTable, position: int) -> bool:
        """Returns whether a table has the block of a position."""
        return position < (table.first + len(table.blocks)) * self._block_size

    def publish(self, table: WindowTable, index: int, block_hash: bytes) -> None:
        """Makes a full block findable."""
        self._pool.publish(table.blocks[index - table.first], block_hash)

    def trim(self, table: WindowTable, start: int) -> None:
        """Releases the blocks that no position from `start` on sees."""
        num_passed = self._first_of(start) - table.first
        if num_passed > 0:
            self._pool.release(table.blocks[:num_passed])
            del table.blocks[:num_passed]
            table.first += num_passed

    def close(self, table: WindowTable) -> None:
        """Releases all blocks of a table."""
        self._num_free_tables += 1
        self._pool.release(table.blocks)

    def retract(self, table: WindowTable, hashes: Iterable[bytes]) -> None:
        """Withdraws the hashes of a sequence's blocks, so that their content is not shared."""
        self._pool.retract(table.blocks)
        self._pool.forget(hashes)

    def check(self, tables: Iterable[WindowTable]) -> None:
        """Asserts that exactly these tables refer to blocks."""
        self._pool.check([table.blocks for table in tables])

    def is_writable(self, block: int) -> bool:
        """Returns whether one sequence alone holds the block, and no other can find it."""
        return self._pool.num_references(block) == 1 and not self._pool.is_published(block)

    def _first_of(self, position: int) -> int:
        """Returns the first block that a position sees."""
        return max(0, position + 1 - self._num_window_tokens) // self._block_size
