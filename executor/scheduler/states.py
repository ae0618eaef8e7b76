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

Checkpoints of a sequence are saved at three places at most: where its prompt leaves the blocks that others have
computed (a branch of the tree of prefixes), at the end of its prompt, and at the end of what it has computed since. The
last one replaces the one before it, unless another sequence has used that.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable
from collections.abc import Sequence as ReadOnlyList
from typing import NamedTuple

from inflight.executor.scheduler.limits import StateLimits
from inflight.executor.scheduler.plan_builder import StepBuilder
from inflight.executor.scheduler.sequence import Sequence, StateLoad, StateSave


class StateCounts(NamedTuple):
    """Slots of recurrent state in all and with a sequence; checkpoints in all and kept; and since the start those that
    were saved, loaded for a sequence, and dropped to make room."""

    slots: int
    used_slots: int
    checkpoints: int
    kept_checkpoints: int
    saved: int
    loaded: int
    dropped: int


class StatePool:
    """The slots and the checkpoints. `block_size` is that of the KV blocks, of which a checkpoint ends one."""

    def __init__(self, limits: StateLimits, block_size: int) -> None:
        if limits.grid_tokens % block_size:
            raise ValueError(f"checkpoints each {limits.grid_tokens} tokens do not end blocks of {block_size}")
        self._limits = limits
        self._block_size = block_size
        self._free_slots = list(range(limits.num_slots))[::-1]
        self._free = list(range(limits.num_checkpoints))[::-1]
        self._kept: OrderedDict[bytes, int] = OrderedDict()
        # The kept checkpoints that a sequence has loaded.
        self._loaded: set[bytes] = set()
        self._num_saved = self._num_loaded = self._num_dropped = 0

    # Sequences.

    @property
    def num_free_slots(self) -> int:
        """Sequences that may still board."""
        return len(self._free_slots)

    def num_usable(self, hashes: ReadOnlyList[bytes]) -> int:
        """Returns how many blocks of this prefix can be used: as many as end at a checkpoint."""
        stride = self._limits.grid_tokens // self._block_size
        longest = len(hashes) // stride * stride
        return next((number for number in range(longest, 0, -stride) if hashes[number - 1] in self._kept), 0)

    def open(self, sequence: Sequence, hashes: ReadOnlyList[bytes] = (), num_found_tokens: int = 0) -> None:
        """Gives a sequence a slot that boards with this prefix, all of which must be usable. `num_found_tokens` is the
        length of the prefix whose blocks were found."""
        assert self._free_slots, "more sequences have state than there are slots"
        sequence.state_slot = self._free_slots.pop()
        sequence.branch_tokens = num_found_tokens
        sequence.num_passed_states = position = len(hashes) * self._block_size
        if hashes:
            self._kept.move_to_end(hashes[-1])
            self._loaded.add(hashes[-1])
            sequence.state_load = StateLoad(self._kept[hashes[-1]], sequence.state_slot, position)

    def close(self, sequence: Sequence) -> None:
        """Takes the slot of a sequence, if it has one. No step in flight may have a row of it."""
        if sequence.state_slot is not None:
            self._free_slots.append(sequence.state_slot)
        sequence.state_slot = sequence.state_load = sequence.newest_state = None

    def last_place(self, sequence: Sequence, end: int) -> int:
        """Returns the last position up to `end` at which a sequence saves the state of its prompt; 0 if there is
        none."""
        return max(self._places(sequence, min(end, sequence.num_prompt_tokens)), default=0)

    # Plans.

    def load(self, builder: StepBuilder) -> None:
        """Has the plan load the checkpoints of sequences that board."""
        for sequence in builder.boarded:
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
        self._kept[prefix] = save.checkpoint
        self._num_saved += 1
        if save.position >= sequence.num_prompt_tokens:
            if sequence.newest_state is not None and sequence.newest_state not in self._loaded:
                self.forget([sequence.newest_state])
            sequence.newest_state = prefix

    def give_back(self, save: StateSave) -> None:
        """Frees the checkpoint of a save that did not take effect or is not needed."""
        self._free.append(save.checkpoint)

    def forget(self, hashes: Iterable[bytes]) -> None:
        """Frees the checkpoints of these prefixes."""
        for prefix in hashes:
            checkpoint = self._kept.pop(prefix, None)
            if checkpoint is not None:
                self._free.append(checkpoint)
                self._loaded.discard(prefix)

    # State.

    def counts(self) -> StateCounts:
        limits = self._limits
        return StateCounts(
            limits.num_slots,
            limits.num_slots - len(self._free_slots),
            limits.num_checkpoints,
            len(self._kept),
            self._num_saved,
            self._num_loaded,
            self._num_dropped,
        )

    def check(self, holders: Iterable[Sequence], saves: Iterable[StateSave]) -> None:
        """Asserts that exactly these sequences have slots, and exactly these checkpoints are being written."""
        slots = [sequence.state_slot for sequence in holders if sequence.state_slot is not None]
        assert sorted([*slots, *self._free_slots]) == list(range(self._limits.num_slots)), f"state slots: {slots}"
        written = [save.checkpoint for save in saves]
        checkpoints = sorted([*written, *self._free, *self._kept.values()])
        assert checkpoints == list(range(self._limits.num_checkpoints)), f"checkpoints: {checkpoints}"
        assert self._loaded <= self._kept.keys()

    def _places(self, sequence: Sequence, end: int) -> list[int]:
        """Returns the positions up to `end` at which the state of a sequence is to be kept, in order."""
        grid, num_prompt_tokens = self._limits.grid_tokens, sequence.num_prompt_tokens
        # Of a prompt that comes again, the last token at least is computed.
        wanted = {sequence.branch_tokens // grid * grid, (num_prompt_tokens - 1) // grid * grid}
        if end >= num_prompt_tokens:
            wanted.add(end // grid * grid)
        return sorted(position for position in wanted if 0 < position <= end)

    def _reserve(self) -> int | None:
        """Returns a free checkpoint, or else the one whose turn it is to be dropped; None if all are being written."""
        if self._free:
            return self._free.pop()
        if not self._kept:
            return None
        prefix, checkpoint = self._kept.popitem(last=False)
        self._loaded.discard(prefix)
        self._num_dropped += 1
        return checkpoint
