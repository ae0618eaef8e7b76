"""Slots of recurrent state: one for each sequence on a seat, and checkpoints of prefixes. Pure bookkeeping; the state
itself lives on the device.

A recurrent layer keeps a state of fixed size in place of the keys and values of all tokens. A slot has the state of a
sequence. A checkpoint is a copy of it at a position where a block ends that the prefix cache may keep; positions of
checkpoints are multiples of `grid_tokens`. A prefix can be used as far as its blocks are there and a checkpoint at its
end. A checkpoint is in exactly one state:

| state   | content                                        | where it is kept                                  |
| ------- | ---------------------------------------------- | ------------------------------------------------- |
| free    | none                                           | `_free`                                           |
| written | the state that a plan in flight saves          | `StepPlan.state_saves`                            |
| kept    | the state at the end of a prefix, by its hash  | `_kept`, the next one to be dropped first         |

A step loads checkpoints before it computes and saves them while it does, and steps run in the order of their launch. So
a plan may write a checkpoint that it, or a plan in flight, loads.

Checkpoints of a sequence are saved at these places:

- at the ends of the first and the last messages of its prompt and at the end of the prompt (`state_positions`), as far
  as it computes them, because others go on from there;
- where its prompt leaves the blocks that others have computed (a branch of the tree of prefixes);
- at the end of what it has computed since. This one replaces the one before it, unless another sequence has used that.

Which one is dropped for another depends on whether others are likely to go on from it. They are at the end of a
conversation and at a branch, from which several sequences have gone on. One that its own sequence has passed, by saving
another, is needed only for a fork or an edited message, so it is dropped before one that is up to `PASSED_AGE` times as
old. So a path holds few while others need them. Among equals the least recently used goes first, and only loading
counts as a use: what lies on the way to a longer prefix was of no use. A checkpoint whose block is evicted is dropped.

A preempted sequence whose KV goes to host memory has its slot copied to a host slot, and back to another slot when it
boards again.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from collections.abc import Sequence as ReadOnlyList
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

from inflight.common.protocol import PrefixName, name_salt, state_positions
from inflight.executor.scheduler.limits import StateLimits
from inflight.executor.scheduler.plan_builder import StepBuilder
from inflight.executor.scheduler.sequence import Sequence, StateLoad, StateSave

# Sequences that have loaded a checkpoint of a branch.
BRANCH_LOADS = 2
# Of 2, 4, 8 and 16 the one with which most of the prompts of `tests/support/scheduler/agent_trace.py` was found.
PASSED_AGE = 16
# Names in a report: 4 KB.
MAX_NAMES = 512


class StateCounts(NamedTuple):
    """Slots of recurrent state in all and with a sequence; checkpoints in all and kept; and since the start those that
    were saved, loaded for a sequence, and dropped, to make room or because their block was evicted. Of the prompts that
    boarded, `kv_tokens` had their KV in the pool, and `usable_tokens` of these a checkpoint as well. `names` are those
    of the prefixes that are kept (`PrefixName`), the last used first, at most `MAX_NAMES`."""

    slots: int
    used_slots: int
    checkpoints: int
    kept_checkpoints: int
    saved: int
    loaded: int
    dropped: int
    kv_tokens: int
    usable_tokens: int
    names: tuple[bytes, ...]


@dataclass(slots=True)
class _Kept:
    """The state at the end of a prefix. `used_at` counts the saves and loads before it was saved or last loaded."""

    checkpoint: int
    name: bytes
    used_at: int
    num_loads: int = 0

    @property
    def is_branch(self) -> bool:
        return self.num_loads >= BRANCH_LOADS


class StatePool:
    """The slots and the checkpoints. `block_size` is that of the KV blocks, of which a checkpoint ends one."""

    def __init__(self, limits: StateLimits, block_size: int) -> None:
        if limits.grid_tokens % block_size:
            raise ValueError(f"checkpoints each {limits.grid_tokens} tokens do not end blocks of {block_size}")
        self._limits = limits
        self._block_size = block_size
        self._free_slots = list(range(limits.num_slots))[::-1]
        self._free_host_slots = list(range(limits.num_host_slots))[::-1]
        self._free = list(range(limits.num_checkpoints))[::-1]
        self._kept: OrderedDict[bytes, _Kept] = OrderedDict()
        # Those of them that their sequence has passed, the first to be dropped first.
        self._passed: OrderedDict[bytes, None] = OrderedDict()
        self._names: tuple[bytes, ...] | None = ()
        self._num_saved = self._num_loaded = self._num_dropped = self._num_uses = 0
        self._num_kv_tokens = self._num_usable_tokens = 0

    # Sequences.

    @property
    def num_free_slots(self) -> int:
        """Sequences that may still board."""
        return len(self._free_slots)

    def num_usable(self, hashes: ReadOnlyList[bytes]) -> int:
        """Returns how many blocks of this prefix can be used: as many as end at a checkpoint."""
        longest = len(hashes) // self._stride * self._stride
        return next((number for number in range(longest, 0, -self._stride) if hashes[number - 1] in self._kept), 0)

    def open(self, sequence: Sequence, hashes: ReadOnlyList[bytes] = (), num_found_tokens: int = 0) -> None:
        """Gives a sequence a slot that boards with this prefix, all of which must be usable. `num_found_tokens` is the
        length of the prefix whose blocks were found."""
        assert self._free_slots, "more sequences have state than there are slots"
        sequence.state_slot = self._free_slots.pop()
        sequence.branch_tokens = num_found_tokens
        sequence.num_passed_states = position = len(hashes) * self._block_size
        sequence.kept_states = [prefix for prefix in hashes[self._stride - 1 :: self._stride] if prefix in self._kept]
        if hashes:
            self._kept.move_to_end(hashes[-1])
            self._names = None
            kept = self._kept[hashes[-1]]
            kept.num_loads, kept.used_at = kept.num_loads + 1, self._num_uses
            self._num_uses += 1
            if kept.is_branch:
                self._passed.pop(hashes[-1], None)
            sequence.state_load = StateLoad(kept.checkpoint, sequence.state_slot, position)

    def close(self, sequence: Sequence) -> None:
        """Takes the slot of a sequence, if it has one. No step in flight may have a row of it."""
        if sequence.state_slot is not None:
            self._free_slots.append(sequence.state_slot)
        sequence.state_slot = sequence.state_load = sequence.newest_state = sequence.state_name = None

    # Host memory.

    @property
    def slot_tokens(self) -> int:
        """Tokens whose KV takes as much memory as a slot."""
        return self._limits.slot_tokens

    @property
    def num_free_host_slots(self) -> int:
        """Preempted sequences whose state host memory still has room for."""
        return len(self._free_host_slots)

    def swap_out(self, sequence: Sequence, builder: StepBuilder) -> int:
        """Has the plan copy the slot of a sequence to a host slot, which it returns. One must be free."""
        assert sequence.state_slot is not None
        host_slot = self._free_host_slots.pop()
        builder.state_swaps_out.append((sequence.state_slot, host_slot))
        return host_slot

    def reopen(self, sequence: Sequence) -> None:
        """Gives a slot to a sequence whose state comes back from host memory."""
        sequence.state_slot = self._free_slots.pop()

    def swap_in(self, sequence: Sequence, host_slot: int, builder: StepBuilder) -> None:
        """Has the plan copy a host slot to the slot of a sequence."""
        assert sequence.state_slot is not None
        builder.state_swaps_in.append((host_slot, sequence.state_slot))

    def release_host_slot(self, host_slot: int) -> None:
        """Frees a host slot. The plan that is made may copy it back, but takes no other state out any more."""
        self._free_host_slots.append(host_slot)

    # Places.

    def last_place(self, sequence: Sequence, end: int) -> int:
        """Returns the last position up to `end` at which a sequence saves the state of its prompt; 0 if there is
        none."""
        return max(self._places(sequence, min(end, sequence.num_prompt_tokens)), default=0)

    # Plans.

    def load(self, builder: StepBuilder) -> None:
        """Has the plan load the checkpoints of sequences that board."""
        for sequence in builder.boarded:
            if not sequence.num_preemptions:
                self._num_kv_tokens += min(sequence.branch_tokens, sequence.num_reusable_tokens)
                self._num_usable_tokens += sequence.num_cached_tokens
            if sequence.state_load is not None:
                builder.state_loads.append(sequence.state_load)
                sequence.state_load = None
                self._num_loaded += 1

    def save(self, builder: StepBuilder, row: int, sequence: Sequence, end: int) -> None:
        """Has a row of the plan that computes up to `end` save the states that are to be kept."""
        first, sequence.num_passed_states = sequence.num_passed_states + 1, end
        for position in self._places(sequence, end):
            if position < first:
                continue
            checkpoint = self._reserve()
            if checkpoint is not None:
                builder.state_saves.append(StateSave(row, sequence, position, checkpoint))

    def keep(self, save: StateSave) -> None:
        """Makes a state findable that a retired step has saved."""
        sequence, index = save.sequence, save.position // self._block_size - 1
        prefix = sequence.block_hashes[index]
        if prefix in self._kept:
            self._free.append(save.checkpoint)
            return
        kept = self._kept[prefix] = _Kept(save.checkpoint, _name_of(sequence, save.position), self._num_uses)
        self._num_uses += 1
        if save.position == self._branch_of(sequence):
            kept.num_loads = BRANCH_LOADS
        self._pass(sequence)
        self._names = None
        self._num_saved += 1
        if save.position >= sequence.num_prompt_tokens:
            newest = sequence.newest_state
            if newest is not None and newest in self._kept and not self._kept[newest].num_loads:
                self.forget([newest])
            sequence.newest_state = prefix
        sequence.kept_states.append(prefix)

    def give_back(self, save: StateSave) -> None:
        """Frees the checkpoint of a save that did not take effect or is not needed."""
        self._free.append(save.checkpoint)

    def forget(self, hashes: Iterable[bytes]) -> int:
        """Frees the checkpoints of these prefixes. Returns how many there were."""
        num_free = len(self._free)
        for prefix in hashes:
            kept = self._kept.pop(prefix, None)
            if kept is not None:
                self._passed.pop(prefix, None)
                self._free.append(kept.checkpoint)
                self._names = None
        return len(self._free) - num_free

    def evicted(self, hashes: Iterable[bytes]) -> None:
        """Frees the checkpoints of prefixes whose last block was evicted."""
        self._num_dropped += self.forget(hashes)

    # State.

    def counts(self) -> StateCounts:
        limits = self._limits
        if self._names is None:
            self._names = tuple(kept.name for kept in islice(reversed(self._kept.values()), MAX_NAMES))
        return StateCounts(
            limits.num_slots,
            limits.num_slots - len(self._free_slots),
            limits.num_checkpoints,
            len(self._kept),
            self._num_saved,
            self._num_loaded,
            self._num_dropped,
            self._num_kv_tokens,
            self._num_usable_tokens,
            self._names,
        )

    def check(self, holders: Iterable[Sequence], saves: Iterable[StateSave], host_slots: Iterable[int]) -> None:
        """Asserts that exactly these sequences have slots, exactly these checkpoints are being written, and exactly
        these host slots are in use."""
        kept = sorted([*host_slots, *self._free_host_slots])
        assert kept == list(range(self._limits.num_host_slots)), f"host slots: {kept}"
        slots = [sequence.state_slot for sequence in holders if sequence.state_slot is not None]
        assert sorted([*slots, *self._free_slots]) == list(range(self._limits.num_slots)), f"state slots: {slots}"
        written = [save.checkpoint for save in saves]
        checkpoints = sorted([*written, *self._free, *(kept.checkpoint for kept in self._kept.values())])
        assert checkpoints == list(range(self._limits.num_checkpoints)), f"checkpoints: {checkpoints}"
        assert self._passed.keys() <= self._kept.keys(), "a checkpoint that is dropped is to be dropped"

    @property
    def _stride(self) -> int:
        """The blocks between two places of checkpoints."""
        return self._limits.grid_tokens // self._block_size

    def _places(self, sequence: Sequence, end: int) -> list[int]:
        """Returns the positions up to `end` at which the state of a sequence is to be kept, in order."""
        grid, num_prompt_tokens = self._limits.grid_tokens, sequence.num_prompt_tokens
        if sequence.state_positions is None:
            prompt = sequence.token_ids[:num_prompt_tokens]
            sequence.state_positions = state_positions(prompt, self._limits.end_token_ids, grid)
        wanted = {self._branch_of(sequence), *sequence.state_positions}
        if end >= num_prompt_tokens:
            wanted.add(end // grid * grid)
        return sorted(position for position in wanted if 0 < position <= end)

    def _branch_of(self, sequence: Sequence) -> int:
        """Returns the last place within what others had computed of a sequence's prompt."""
        return sequence.branch_tokens // self._limits.grid_tokens * self._limits.grid_tokens

    def _pass(self, sequence: Sequence) -> None:
        """Has the last checkpoint of a sequence be dropped early, because another one follows it."""
        for last in sequence.kept_states[-1:]:
            if last in self._kept and not self._kept[last].is_branch:
                self._passed[last] = None
                self._passed.move_to_end(last)

    def _reserve(self) -> int | None:
        """Returns a free checkpoint, or else the one whose turn it is to be dropped; None if all are being written."""
        if self._free:
            return self._free.pop()
        if not self._kept:
            return None
        prefix, passed = next(iter(self._kept)), next(iter(self._passed), None)
        if passed is not None and PASSED_AGE * self._age(passed) > self._age(prefix):
            prefix = passed
        self._passed.pop(prefix, None)
        self._names = None
        self._num_dropped += 1
        return self._kept.pop(prefix).checkpoint

    def _age(self, prefix: bytes) -> int:
        return self._num_uses - self._kept[prefix].used_at


def _name_of(sequence: Sequence, position: int) -> bytes:
    """Returns the name of a sequence's prefix. Mostly it is longer than the last one that was asked for."""
    name = sequence.state_name
    if name is None or name.num_tokens > position:
        assert sequence.cache_salt is not None
        name = sequence.state_name = PrefixName(name_salt(sequence.cache_salt, sequence.adapter_hash.hex()))
    return name.of(sequence.token_ids, position)
