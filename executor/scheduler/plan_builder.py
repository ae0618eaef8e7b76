"""A step plan while it is being made: its rows, what is left of its token budget, the blocks that its rows need.

Whose turn it is, the scheduler decides. A row that is added counts as in flight from then on. A sequence whose blocks
are not there gets no row and is `broken`: it has to end, and the others go on.
"""

from __future__ import annotations

from collections.abc import Iterable

from executor.scheduler.blocks import BlockPool
from executor.scheduler.limits import SchedulerLimits
from executor.scheduler.sequence import Restored, Sequence, StepPlan
from executor.scheduler.step_constraint import StepConstraint


class StepDraft:
    """Takes rows until the token budget is spent.

    `max_prefill_tokens` bounds what prompts take of it; None does not. It is a matter of chunks: a prompt that must be
    computed at once is.
    """

    def __init__(self, limits: SchedulerLimits, pool: BlockPool, max_prefill_tokens: int | None) -> None:
        self._pool = pool
        self._is_chunked = limits.enable_chunked_context
        self._num_tokens_left = limits.max_num_tokens
        self._max_prefill_tokens = max_prefill_tokens if self._is_chunked else None
        self._sequences: list[Sequence] = []
        self._starts: list[int] = []
        self._lengths: list[int] = []
        self._samples: list[bool] = []
        self._carries: list[bool] = []
        self._num_decodes = 0
        self._num_tokens = 0
        self._boarded: list[Sequence] = []
        self._grown: list[Sequence] = []
        self._is_pace_spent = False
        # Whether a prompt got less than it could have used.
        self.is_cut = False
        # Who gave up its seat, and whose KV moves; see `StepPlan`.
        self.preempted: list[Sequence] = []
        self.swaps_out: list[tuple[int, int]] = []
        self.swaps_in: list[tuple[int, int]] = []
        self.swapped: list[Sequence] = []
        self.restored: list[Restored] = []
        # Whose prompt is computed with this step, and whose last token it yields, whatever the tokens are.
        self.prompts_done: list[Sequence] = []
        self.ending: list[Sequence] = []
        # Sequences that cannot be in this step or any other, with the reason.
        self.broken: dict[Sequence, str] = {}

    @property
    def is_full(self) -> bool:
        """Whether nobody gets tokens in this step any more."""
        return self._num_tokens_left <= 0

    @property
    def closed_by(self) -> StepConstraint:
        """What a prompt that gets nothing more is short of."""
        return StepConstraint.PACE if self._is_pace_spent else StepConstraint.TOKENS

    @property
    def num_tokens(self) -> int:
        """Tokens of the rows so far."""
        return self._num_tokens

    def board(self, sequence: Sequence) -> None:
        """Notes that the sequence took a seat."""
        self._boarded.append(sequence)

    def add_decodes(self, sequences: Iterable[Sequence]) -> None:
        """Adds the one token that each sequence is behind. The budget has one for every seat, and they come first."""
        assert not self._sequences
        block_size = self._pool.block_size
        for sequence in sequences:
            start, num_pending = sequence.num_computed, sequence.num_pending
            if start >= len(sequence.block_table) * block_size and not self._grow(sequence, start + 1):
                continue
            self._sequences.append(sequence)
            self._starts.append(start)
            self._carries.append(num_pending > 0)
            sequence.num_computed = start + 1
            sequence.num_pending = num_pending + 1
            sequence.num_in_flight += 1
            if start + 2 >= sequence.length_limit:
                self.ending.append(sequence)
        self._num_decodes = self._num_tokens = len(self._sequences)
        self._lengths = [1] * self._num_decodes
        self._samples = [True] * self._num_decodes
        self._num_tokens_left -= self._num_decodes

    def add_prefill(self, sequence: Sequence) -> None:
        """Adds as much of the prompt as this step can take. What does not fit closes the step: nobody overtakes it."""
        num_wanted = sequence.num_tokens - sequence.num_computed
        num_tokens = self._fitting_tokens(num_wanted)
        if num_tokens < num_wanted:
            self.is_cut = True
        if num_tokens > 0:
            self._add_chunk(sequence, num_tokens)
        else:
            self._num_tokens_left = 0

    def finish(self, constraint: StepConstraint) -> StepPlan:
        """The plan, kept from holding more by the constraint. It touches none of the broken."""
        broken = self.broken
        return StepPlan(
            self._sequences,
            self._starts,
            self._lengths,
            self._samples,
            self._carries,
            self._num_decodes,
            tuple(sequence for sequence in self._boarded if sequence not in broken),
            tuple(self._grown),
            tuple(self.preempted),
            tuple(self.swaps_out),
            tuple(self.swaps_in),
            tuple(sequence for sequence in self.swapped if sequence not in broken),
            constraint,
            tuple(self.restored),
        )

    def _fitting_tokens(self, num_wanted: int) -> int:
        if self._is_chunked:
            num_fitting = min(num_wanted, self._num_tokens_left)
            return num_fitting if self._max_prefill_tokens is None else min(num_fitting, self._max_prefill_tokens)
        # A prompt above the whole budget gets a step of its own.
        return num_wanted if num_wanted <= self._num_tokens_left or not self._sequences else 0

    def _add_chunk(self, sequence: Sequence, num_tokens: int) -> None:
        start = sequence.num_computed
        end = start + num_tokens
        if not self._grow(sequence, end):
            return
        samples = end == sequence.num_tokens
        self._sequences.append(sequence)
        self._starts.append(start)
        self._lengths.append(num_tokens)
        self._samples.append(samples)
        self._carries.append(False)
        sequence.num_computed = end
        sequence.num_in_flight += 1
        if samples:
            sequence.num_pending += 1
            self.prompts_done.append(sequence)
            if end + 1 >= sequence.length_limit:
                self.ending.append(sequence)
        self._num_tokens += num_tokens
        self._num_tokens_left -= num_tokens
        if self._max_prefill_tokens is not None:
            self._max_prefill_tokens -= num_tokens
            if self._max_prefill_tokens <= 0 < self._num_tokens_left:
                self._is_pace_spent = True
                self._num_tokens_left = 0

    def _grow(self, sequence: Sequence, end: int) -> bool:
        """Makes the block table reach position `end`. False, and the sequence is broken, if there are no blocks for
        that: a row of it would write to blocks of others."""
        num_missing = -(-end // self._pool.block_size) - len(sequence.block_table)
        if num_missing > 0:
            blocks = self._pool.allocate(num_missing)
            if blocks is None:
                self.broken[sequence] = f"{num_missing} of the KV blocks reserved for it are not there"
                return False
            sequence.block_table.extend(blocks)
            self._grown.append(sequence)
        return True
