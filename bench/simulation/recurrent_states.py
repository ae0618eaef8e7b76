"""Recurrent state of a modelled device: a hash of the tokens that it comes from, in slots, checkpoints and host slots.

A step goes on from what the slots have, as a real device does. So state that was not restored, or is another
sequence's, stays wrong, and every token that the sequence yields from then on is wrong too.
"""

from __future__ import annotations

from collections.abc import Callable

from inflight.executor.scheduler.sequence import Sequence, StepPlan

# No state of any tokens.
UNWRITTEN = 0


class ModelledStates:
    """The state of one device. `token_of(sequence, position)` is the token of a sequence."""

    def __init__(self, token_of: Callable[[Sequence, int], int]) -> None:
        self._token_of = token_of
        self._slots: dict[int | None, int] = {}
        self._host_slots: dict[int, int] = {}
        self._checkpoints: dict[int, int] = {}
        # The right state after so many tokens of each request: these follow from the request alone.
        self._right: dict[str, list[int]] = {}
        self.num_swapped_in = 0

    def run(self, plan: StepPlan) -> list[bool]:
        """Takes the states to the end of a step. Returns for each row whether its state is right there."""
        for slot, host_slot in plan.state_swaps_out:
            self._host_slots[host_slot] = self._slots.get(slot, UNWRITTEN)
        for host_slot, slot in plan.state_swaps_in:
            self._slots[slot] = self._host_slots.get(host_slot, UNWRITTEN)
            self.num_swapped_in += 1
        for load in plan.state_loads:
            self._slots[load.slot] = self._checkpoints.get(load.checkpoint, UNWRITTEN)
        # Those at a position that the row does not compute stay so.
        self._checkpoints.update({save.checkpoint: UNWRITTEN for save in plan.state_saves})
        saves = {(save.row, save.position): save.checkpoint for save in plan.state_saves}
        are_right = []
        for row, (sequence, start, length) in enumerate(zip(plan.sequences, plan.starts, plan.lengths, strict=True)):
            # What a slot has from another sequence is not read at position 0.
            state = self._slots.get(sequence.state_slot, UNWRITTEN) if start else _root(sequence)
            for position in range(start, start + length):
                state = hash((state, self._token_of(sequence, position)))
                checkpoint = saves.get((row, position + 1))
                if checkpoint is not None:
                    self._checkpoints[checkpoint] = state
            self._slots[sequence.state_slot] = state
            are_right.append(state == self._right_after(sequence, start + length))
        return are_right

    def _right_after(self, sequence: Sequence, num_tokens: int) -> int:
        states = self._right.setdefault(sequence.request_id, [_root(sequence)])
        while len(states) <= num_tokens:
            states.append(hash((states[-1], self._token_of(sequence, len(states) - 1))))
        return states[num_tokens]


def _root(sequence: Sequence) -> int:
    """Returns the state of no tokens. Those of other tenants are others."""
    return int.from_bytes(sequence.cache_salt or sequence.request_id.encode(), "little")
