"""Reuse of KV between sequences with a common prefix, in the pool and in host memory, and the prefixes that are being
computed.

A full block is identified by a hash over its tokens and all tokens before it, rooted in the sequence's salt and the
content of its adapter. Equal hashes mean equal KV. Without the salt a client cannot compute a hash, and so can neither
read a block nor probe for it. A sequence without a salt takes no part.

Blocks that are evicted from the pool go to host memory, as far as there is room, under the same hash. They come back
when a sequence has their prefix, if the model of step times predicts that copying takes less time than computing.

A sequence whose prefix another one is computing waits for the blocks instead of computing them as well. Hashes of
different salts never match, so a client cannot learn from its own wait what another client computes.
"""

from __future__ import annotations

import hashlib
import struct
from bisect import bisect_left
from collections.abc import Callable, Container, Iterable
from collections.abc import Sequence as ReadOnlyList
from itertools import takewhile

from inflight.executor.scheduler.blocks import BlockPool, HostBlocks, WindowPool
from inflight.executor.scheduler.plan_builder import StepBuilder
from inflight.executor.scheduler.sequence import HostPrefix, Restored, Sequence, StepPlan
from inflight.executor.scheduler.states import StatePool

# 256 bits: finding two prefixes with the same hash, and so reading another client's KV, is infeasible.
HASH_BYTES = 32
# Fewer blocks are not worth waiting a step for until another sequence has computed them.
LEAST_BLOCKS = 2


def root_hash(salt: bytes, adapter_hash: bytes = b"") -> bytes:
    """Returns the parent hash of a sequence's first block. `adapter_hash` is empty without an adapter."""
    return hashlib.blake2b(salt, key=adapter_hash, digest_size=HASH_BYTES).digest()


def block_hash(parent: bytes, token_ids: ReadOnlyList[int]) -> bytes:
    """Returns the hash of a full block that follows the block `parent`."""
    packed = struct.pack(f"<{len(token_ids)}I", *token_ids)
    return hashlib.blake2b(packed, key=parent, digest_size=HASH_BYTES).digest()


def chain_hashes(
    token_ids: ReadOnlyList[int],
    block_size: int,
    salt: bytes,
    known: ReadOnlyList[bytes] = (),
    adapter_hash: bytes = b"",
) -> list[bytes]:
    """Returns the hashes of all full blocks of `token_ids`. `known` are the first of them, if computed before."""
    hashes = list(known)
    parent = hashes[-1] if hashes else root_hash(salt, adapter_hash)
    for end in range((len(hashes) + 1) * block_size, len(token_ids) + 1, block_size):
        parent = block_hash(parent, token_ids[end - block_size : end])
        hashes.append(parent)
    return hashes


class PrefixCache:
    """Gives a boarding sequence the blocks of its prefix, publishes the blocks that sequences fill, and stores evicted
    ones in host memory.

    With a pool of its own for layers with a sliding window, a prefix is used as far as the window before its end is in
    that pool as well. It opens and closes the tables of that pool. With recurrent layers a prefix is used as far as
    there is a checkpoint of their state at its end, and it gives and takes the slots of that state. Host memory has
    states of preempted sequences only, so there evicted blocks are not stored.
    """

    def __init__(
        self,
        pool: BlockPool,
        host: HostBlocks,
        enabled: bool,
        windows: WindowPool | None = None,
        states: StatePool | None = None,
    ) -> None:
        self._pool = pool
        self._windows = windows
        self._states = states
        self._host = host
        self._enabled = enabled
        if enabled and (host.num_blocks or states is not None):
            pool.evicted = []
        # Tokens looked up for sequences that boarded, those of them found, and of the latter those found in host
        # memory, since the start.
        self.num_query_tokens = 0
        self.num_hit_tokens = 0
        self.num_host_hit_tokens = 0
        # Blocks that came back from host memory since the start.
        self.num_restored = 0

    @property
    def states(self) -> StatePool | None:
        """The slots of recurrent state; None without recurrent layers."""
        return self._states

    def attach(self, sequence: Sequence, builder: StepBuilder) -> None:
        """Starts the block table with the longest published prefix, and has what follows in host memory come back.
        Tokens whose logits are needed are left to compute."""
        if not self.is_open_to(sequence):
            if self._windows is not None:
                sequence.window_table = self._windows.open()
            if self._states is not None:
                self._states.open(sequence)
            return
        block_size, hashes = self._pool.block_size, self._usable_hashes(sequence)
        if self._windows is not None:
            sequence.window_table = self._windows.open(hashes)
        if self._states is not None and self._comes_back(sequence, hashes):
            self._states.reopen(sequence)
        elif self._states is not None:
            num_found = _num_leading(sequence.block_hashes, self._pool.is_findable)
            self._states.open(sequence, hashes, num_found * block_size)
        sequence.block_table = self._pool.share(hashes)
        num_found = len(sequence.block_table)
        sequence.num_computed = num_found * block_size
        num_host_tokens = self._attach_host(sequence, hashes[num_found:], builder) * block_size
        if not sequence.num_preemptions:
            sequence.num_host_tokens = num_host_tokens
            sequence.num_cached_tokens = sequence.num_computed + num_host_tokens

    def would_share(self, sequence: Sequence, num_blocks: int) -> bool:
        """Returns whether the sequence would share at least so many blocks with others if it boarded now."""
        if num_blocks <= 0:
            return True
        return self.is_open_to(sequence) and self._pool.num_leading_used(self._usable_hashes(sequence)) >= num_blocks

    def _usable_hashes(self, sequence: Sequence) -> list[bytes]:
        """Returns the hashes of the full blocks that need not be computed if they are found."""
        hashes = self.name_blocks(sequence)[: sequence.num_reusable_tokens // self._pool.block_size]
        if self._windows is not None:
            hashes = list(takewhile(self._pool.is_findable, hashes))
            hashes = hashes[: self._windows.num_usable(hashes)]
        if self._states is not None:
            hashes = list(takewhile(self._pool.is_findable, hashes))
            copy = sequence.host_copy
            if copy is not None and self._comes_back(sequence, hashes):
                return hashes[: copy.num_computed // self._pool.block_size]
            hashes = hashes[: self._states.num_usable(hashes)]
        return hashes

    def _comes_back(self, sequence: Sequence, found: ReadOnlyList[bytes]) -> bool:
        """Returns whether a sequence that boards again behind these blocks gets its state back from host memory: its
        copy there goes on from them, and has more than the last checkpoint."""
        assert self._states is not None
        copy, num_usable = sequence.host_copy, self._states.num_usable(found)
        return (
            copy is not None
            and copy.first_index <= len(found)
            and copy.num_computed > num_usable * self._pool.block_size
        )

    def _attach_host(self, sequence: Sequence, hashes: ReadOnlyList[bytes], builder: StepBuilder) -> int:
        """Returns how many blocks come back from host memory."""
        self.store_evicted(builder)
        host_blocks = self._host.find(hashes)
        start, num_blocks = sequence.num_computed, len(host_blocks)
        if not num_blocks or not builder.is_copy_cheaper(num_blocks, start):
            return 0
        self._host.hold(host_blocks)
        sequence.host_prefix = HostPrefix(host_blocks, start + num_blocks * self._pool.block_size)
        return num_blocks

    def span_usable(self, found: ReadOnlyList[bytes], computing: Sequence, end: int) -> tuple[int, int]:
        """Returns which positions of its prefix a sequence need not compute if it waits until another one has computed
        those up to `end`, of which the blocks `found` are here."""
        first = len(found) * self._pool.block_size
        if self._states is None:
            return first, end
        first = self._states.num_usable(found) * self._pool.block_size
        return first, self._states.last_place(computing, end)

    def can_attach(self) -> bool:
        """Returns whether the layers with a window or with recurrent state have room for one more sequence."""
        if self._states is not None and not self._states.num_free_slots:
            return False
        return self._windows is None or self._windows.num_free_tables > 0

    def release(self, sequence: Sequence) -> None:
        """Releases the sequence's blocks on the device, and its hold on blocks in host memory."""
        self.detach(sequence)
        window_table, sequence.window_table = sequence.window_table, None
        if self._windows is not None and window_table is not None:
            self._windows.close(window_table)
        if self._states is not None:
            self._states.close(sequence)
        self._pool.release(sequence.block_table)
        sequence.block_table = []
        sequence.num_computed = 0

    def detach(self, sequence: Sequence) -> None:
        """Ends the hold of the sequence on blocks in host memory, whether they have come back or not."""
        prefix = sequence.host_prefix
        if prefix is None:
            return
        sequence.host_prefix = None
        num_missing = max(0, prefix.end - sequence.num_computed) // self._pool.block_size
        num_back = len(prefix.host_blocks) - num_missing
        self._host.unhold(prefix.host_blocks[:num_back], are_in_pool=True)
        self._host.unhold(prefix.host_blocks[num_back:], are_in_pool=False)

    def store_evicted(self, builder: StepBuilder) -> None:
        """Has the blocks that were evicted for this plan copied to host memory, as far as there is room and time. The
        recurrent state at their ends is of no use any more."""
        evicted = self._pool.evicted
        if not evicted:
            return
        if self._states is not None:
            self._states.evicted(block_hash for _, block_hash in evicted)
            evicted.clear()
            return
        missing = [(block, block_hash) for block, block_hash in evicted if not self._host.keep(block_hash)]
        num_storable = min(len(missing), builder.num_storable, self._host.num_available)
        # The tail of a prefix is evicted first and is of no use without its head.
        for block, block_hash in missing[len(missing) - num_storable :]:
            builder.store(block, block_hash, self._host.store(block_hash))
        evicted.clear()

    def planned(self, restored: Restored) -> None:
        """Counts prefix blocks that a plan copies back. Ends the hold of a sequence whose last ones are among them."""
        prefix = restored.sequence.host_prefix
        if prefix is None:
            return
        self.num_restored += len(restored.blocks)
        if restored.end == prefix.end:
            self.detach(restored.sequence)

    def count(self, boarded: Iterable[Sequence]) -> None:
        """Counts tokens looked up and found for the sequences that board for the first time."""
        for sequence in boarded:
            if self.is_open_to(sequence) and not sequence.num_preemptions:
                self.num_query_tokens += len(sequence.token_ids)
                self.num_hit_tokens += sequence.num_cached_tokens
                self.num_host_hit_tokens += sequence.num_host_tokens

    def is_open_to(self, sequence: Sequence) -> bool:
        """Returns whether the sequence may share blocks."""
        return self._enabled and sequence.cache_salt is not None

    def name_blocks(self, sequence: Sequence) -> list[bytes]:
        """Returns the hashes of all full blocks of a sequence that shares. Hashes computed before are reused."""
        assert sequence.cache_salt is not None
        sequence.block_hashes = chain_hashes(
            sequence.token_ids,
            self._pool.block_size,
            sequence.cache_salt,
            sequence.block_hashes,
            sequence.adapter_hash,
        )
        return sequence.block_hashes

    def publish(self, sequence: Sequence, start: int, end: int) -> None:
        """Publishes the blocks that computing `[start, end)` has filled. The step must be retired: otherwise a reader
        could be ordered ahead of the write."""
        block_size = self._pool.block_size
        first, last = start // block_size, end // block_size
        if first == last or not self._enabled or sequence.cache_salt is None:
            return
        for index in range(first, last):
            if index == len(sequence.block_hashes):
                root = root_hash(sequence.cache_salt, sequence.adapter_hash)
                parent = sequence.block_hashes[-1] if index else root
                filled = sequence.token_ids[index * block_size : (index + 1) * block_size]
                sequence.block_hashes.append(block_hash(parent, filled))
            self._pool.publish(sequence.block_table[index], sequence.block_hashes[index])
            if self._windows is not None and sequence.window_table is not None:
                self._windows.publish(sequence.window_table, index, sequence.block_hashes[index])

    def pass_window(self, sequence: Sequence, start: int) -> None:
        """Releases the window blocks that no position from `start` on sees, once the step before has retired. They stay
        findable until they are evicted."""
        if self._windows is not None and sequence.window_table is not None:
            self._windows.trim(sequence.window_table, start)

    def plan_states(self, builder: StepBuilder) -> None:
        """Has the plan load the recurrent states of the prefixes that are used, and save those that are to be kept."""
        if self._states is None:
            return
        self._states.load(builder)
        for row, sequence, end in builder.known_rows():
            if self.is_open_to(sequence):
                self._states.save(builder, row, sequence, end)

    def keep_states(self, plan: StepPlan, without: Container[Sequence]) -> None:
        """Makes the states findable that a retired plan has saved, except those of sequences that have ended."""
        for save in plan.state_saves:
            assert self._states is not None
            if save.sequence in without:
                self._states.give_back(save)
            else:
                self.name_blocks(save.sequence)
                self._states.keep(save)

    def drop_states(self, plan: StepPlan) -> None:
        """Frees the checkpoints that a failed plan was to save."""
        for save in plan.state_saves:
            assert self._states is not None
            self._states.give_back(save)

    def publish_restored(self, restored: Restored) -> None:
        """Publishes the full blocks whose KV was restored from host memory, under their previous hashes. Does nothing
        if the sequence has lost those blocks since."""
        sequence, start, end, blocks = restored
        first = start // self._pool.block_size
        if sequence.block_table[first : first + len(blocks)] == list(blocks):
            self.publish(sequence, start, end)

    def retract(self, sequence: Sequence) -> None:
        """Withdraws the hashes of blocks that only this sequence holds, and of all its blocks in host memory."""
        self._pool.retract(sequence.block_table)
        if self._windows is not None and sequence.window_table is not None:
            self._windows.retract(sequence.window_table, sequence.block_hashes)
        if self._states is not None:
            self._states.forget(sequence.block_hashes)
        self._host.forget(sequence.block_hashes)


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
        num_wanted = sequence.num_reusable_tokens // block_size
        hashes = self._prefix_cache.name_blocks(sequence)[:num_wanted]
        num_found = _num_leading(hashes, self._pool.is_findable)
        num_coming = _num_leading(hashes[num_found:], self._computing.__contains__)
        if num_coming < LEAST_BLOCKS:
            return False
        computing = self._computing[hashes[num_found + num_coming - 1]]
        end = (num_found + num_coming) * block_size
        first, end = self._prefix_cache.span_usable(hashes[:num_found], computing, end)
        return first < end and end - computing.num_computed <= end - first

    def _forget(self, sequence: Sequence, first: int, last: int) -> None:
        for block_hash in sequence.block_hashes[first:last]:
            if self._computing.get(block_hash) is sequence:
                del self._computing[block_hash]


def _num_leading(hashes: ReadOnlyList[bytes], is_in: Callable[[bytes], bool]) -> int:
    """Returns how many hashes of a chain, from its start, are in a set. The tail of a chain is evicted before its head,
    so bisection works; otherwise the result is an estimate."""
    return bisect_left(range(len(hashes)), True, key=lambda index: not is_in(hashes[index]))
