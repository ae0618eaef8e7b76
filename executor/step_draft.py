"""A step plan while it is being made: its rows, what is left of its token budget, the blocks that its rows need.

Whose turn it is, the scheduler decides.
"""

from __future__ import annotations

from executor.blocks import BlockPool
from executor.limits import SchedulerLimits
from executor.sequence import PlanRow, Sequence, StepPlan


class StepDraft:
    """Takes rows until the token budget is spent."""

    def __init__(self, limits: SchedulerLimits, pool: BlockPool) -> None:
        self._pool = pool
        self._is_chunked = limits.enable_chunked_context
        self._num_tokens_left = limits.max_num_tokens
        self._rows: list[PlanRow] = []
        self._boarded: list[Sequence] = []

    @property
    def is_full(self) -> bool:
        """Whether nobody gets tokens in this step any more."""
        return self._num_tokens_left <= 0

    def board(self, sequence: Sequence) -> None:
        """Notes that the sequence took a seat."""
        self._boarded.append(sequence)

    def add_decode(self, sequence: Sequence) -> None:
        """Adds the one token that the sequence is behind. The budget has one for every seat."""
        self._add(sequence, 1)

    def add_prefill(self, sequence: Sequence) -> None:
        """Adds as much of the prompt as this step can take. What does not fit closes the step: nobody overtakes it."""
        num_tokens = self._fitting_tokens(sequence.num_tokens - sequence.num_computed)
        if num_tokens > 0:
            self._add(sequence, num_tokens)
        else:
            self._num_tokens_left = 0

    def finish(self) -> StepPlan:
        """The plan."""
        return StepPlan(tuple(self._rows), tuple(self._boarded))

    def _fitting_tokens(self, num_wanted: int) -> int:
        if self._is_chunked:
            return min(num_wanted, self._num_tokens_left)
        # A prompt above the whole budget gets a step of its own.
        return num_wanted if num_wanted <= self._num_tokens_left or not self._rows else 0

    def _add(self, sequence: Sequence, num_tokens: int) -> None:
        end = sequence.num_computed + num_tokens
        self._grow(sequence, end)
        samples = end == sequence.num_tokens
        self._rows.append(PlanRow(sequence, sequence.num_computed, num_tokens, samples, sequence.num_output_tokens))
        self._num_tokens_left -= num_tokens

    def _grow(self, sequence: Sequence, end: int) -> None:
        """Makes the block table reach position `end`."""
        num_missing = -(-end // self._pool.block_size) - len(sequence.block_table)
        if num_missing > 0:
            blocks = self._pool.allocate(num_missing)
            assert blocks is not None, f"{sequence.request_id}: {num_missing} reserved blocks are not there"
            sequence.block_table.extend(blocks)
