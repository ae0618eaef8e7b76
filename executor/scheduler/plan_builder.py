"""Builder of a step plan, and the order of prompts in a step.

`StepBuilder` holds the rows of the plan, the rest of its token budget, and the blocks that its rows need. A row counts
as in flight as soon as it is added. If blocks for a sequence are missing, it gets no row and is `broken`: it has to
end. The other sequences continue.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from collections.abc import Sequence as ReadOnlyList
from dataclasses import dataclass, replace

from inflight.common.protocol import MAX_PROMPT_LOGPROB_ROWS
from inflight.executor.pooling.pooled import PooledOutput
from inflight.executor.scheduler.blocks import BlockPool, WindowPool
from inflight.executor.scheduler.limits import SchedulerLimits
from inflight.executor.scheduler.sequence import (
    NO_DRAFTS,
    HostPrefix,
    PooledRows,
    Restored,
    ScoredRows,
    Sequence,
    StateLoad,
    StateSave,
    StepPlan,
)
from inflight.executor.scheduler.step_constraint import CopyCost, PrefillAllowance, StepConstraint


class StepBuilder:
    """A step plan under construction. Takes rows until the token budget is spent.

    `allowance` bounds the prompt tokens, and the blocks that are copied back from host memory; None means no bound. It
    applies only to chunked prefill: a prompt that must be computed in one step is not divided. So does `batch`, which
    bounds the prompts of class batch as well. Without `copy_cost`, copying a block back counts as cheaper than
    computing it.
    """

    def __init__(
        self,
        limits: SchedulerLimits,
        pool: BlockPool,
        allowance: PrefillAllowance | None,
        copy_cost: CopyCost | None = None,
        windows: WindowPool | None = None,
        batch: PrefillAllowance | None = None,
    ) -> None:
        self._pool = pool
        self._windows = windows
        self._copy_cost = copy_cost
        self._is_chunked = limits.enable_chunked_context
        self._num_tokens_left = limits.max_num_tokens
        self._allowance = allowance if self._is_chunked else None
        self._batch = batch if self._is_chunked else None
        self._sequences: list[Sequence] = []
        self._starts: list[int] = []
        self._lengths: list[int] = []
        self._samples: list[bool] = []
        self._carries: list[bool] = []
        self._drafts: Mapping[int, tuple[int, ...]] = NO_DRAFTS
        self.num_decodes = 0
        # Blocks that the sequences get beyond their reservations.
        self.num_overrun_blocks = 0
        self._num_tokens = 0
        self._boarded: list[Sequence] = []
        self._grown: list[Sequence] = []
        self._is_pace_spent = False
        self._scored: list[ScoredRows] = []
        self._num_scores_left = MAX_PROMPT_LOGPROB_ROWS
        # Whether a prompt got less than it could have used.
        self.is_cut = False
        # Sequences that lost their seat, and the KV that moves; see `StepPlan`.
        self.preempted: list[Sequence] = []
        self.swaps_out: list[tuple[int, int]] = []
        self.swaps_in: list[tuple[int, int]] = []
        self.swapped: list[Sequence] = []
        self.restored: list[Restored] = []
        self.stored: list[bytes] = []
        self.state_loads: list[StateLoad] = []
        self.state_saves: list[StateSave] = []
        self.state_swaps_out: list[tuple[int, int]] = []
        self.state_swaps_in: list[tuple[int, int]] = []
        # Sequences whose prompt is computed with this step, and those whose last token it yields, whatever the tokens
        # are.
        self.prompts_done: list[Sequence] = []
        # Sequences that yield no token and whose prompt is computed with this step.
        self.prompts_ended: list[Sequence] = []
        self._pooled: list[PooledRows] = []
        self.ending: list[Sequence] = []
        # Sequences that cannot be in this step or any other, with the reason.
        self.broken: dict[Sequence, str] = {}

    @property
    def is_full(self) -> bool:
        """Whether the token budget is spent."""
        return self._num_tokens_left <= 0

    def has_tokens_after(self, prompts: Iterable[Sequence]) -> bool:
        """Returns whether the step can take a token of another prompt once these are computed."""
        num_tokens_left = self._num_tokens_left
        allowance = None if self._allowance is None else replace(self._allowance)
        for prompt in prompts:
            num_tokens = prompt.num_uncomputed
            num_tokens_left -= num_tokens
            if allowance is not None:
                allowance.take(num_tokens, prompt.num_tokens - num_tokens)
        return num_tokens_left > 0 and (allowance is None or allowance.fitting(1, 0) > 0)

    def may_score(self, sequence: Sequence) -> bool:
        """Returns whether the sequence needs no log probabilities of its prompt, or can get some in this step."""
        return self._num_scores_left > 0 or not sequence.num_unscored

    def may_join(self, sequence: Sequence) -> bool:
        """Returns whether class batch has a share of the step left, if the sequence is of that class. If not, the step
        counts as cut short."""
        may_join = self._batch is None or not sequence.is_batch or self._batch.fitting(1, 0) > 0
        self._is_pace_spent |= not may_join
        return may_join

    @property
    def closed_by(self) -> StepConstraint:
        """The constraint of a prompt that gets nothing more."""
        return StepConstraint.PACE if self._is_pace_spent else StepConstraint.TOKENS

    @property
    def num_tokens(self) -> int:
        return self._num_tokens

    @property
    def num_tokens_left(self) -> int:
        """What is left of the token budget; nothing once a prompt got less than it could have used."""
        return max(0, self._num_tokens_left)

    @property
    def known_decodes(self) -> list[Sequence]:
        """The decodes whose tokens are all known."""
        decodes = zip(self._sequences[: self.num_decodes], self._carries, strict=False)
        return [sequence for sequence, carries in decodes if not carries]

    @property
    def boarded(self) -> ReadOnlyList[Sequence]:
        """The sequences that board."""
        return self._boarded

    def known_rows(self) -> Iterator[tuple[int, Sequence, int]]:
        """Yields each row with its sequence and the end of the tokens that it computes, without drafts."""
        for row, (sequence, start, length) in enumerate(zip(self._sequences, self._starts, self._lengths, strict=True)):
            yield row, sequence, start + length - len(self._drafts.get(row, ()))

    def board(self, sequence: Sequence) -> None:
        self._boarded.append(sequence)

    def add_decodes(self, sequences: Iterable[Sequence]) -> None:
        """Adds one row of one token for each sequence. The budget has a token for every seat, and decodes come
        first."""
        assert not self._sequences
        block_size, windows = self._pool.block_size, self._windows
        for sequence in sequences:
            start, num_pending = sequence.num_computed, sequence.num_pending
            is_missing = start >= len(sequence.block_table) * block_size
            if windows is not None:
                is_missing = is_missing or not self._has_window(sequence, start)
            if is_missing and not self._grow(sequence, start + 1):
                continue
            self._sequences.append(sequence)
            self._starts.append(start)
            self._carries.append(num_pending > 0)
            sequence.num_computed = start + 1
            sequence.num_pending = num_pending + 1
            sequence.num_in_flight += 1
            if start + 2 >= sequence.length_limit:
                self.ending.append(sequence)
        self.num_decodes = self._num_tokens = len(self._sequences)
        self._lengths = [1] * self.num_decodes
        self._samples = [True] * self.num_decodes
        self._num_tokens_left -= self.num_decodes

    def add_prefill(self, sequence: Sequence) -> None:
        """Adds as much of the prompt as this step can take. A prompt that does not fit closes the step, so that no
        other overtakes it. One that waits for its turn to be scored does not, nor one of class batch that waits for its
        share of a step."""
        if sequence.host_prefix is not None and not self._bring_back(sequence, sequence.host_prefix):
            return
        num_wanted = sequence.num_tokens - sequence.num_computed
        num_scorable = self._scorable_tokens(sequence, num_wanted)
        batch = self._batch if sequence.is_batch else None
        if batch is not None:
            num_scorable = batch.fitting(num_scorable, sequence.num_computed)
            self._is_pace_spent |= not num_scorable
        if not num_scorable:
            self.is_cut = True
            return
        num_tokens = self._fitting_tokens(num_scorable, sequence.num_computed)
        if batch is not None:
            batch.take(num_tokens, sequence.num_computed)
        if num_tokens < num_wanted:
            self.is_cut = True
        if num_tokens > 0:
            self._add_chunk(sequence, num_tokens)
        else:
            self._num_tokens_left = 0

    def add_drafts(self, drafts: Mapping[Sequence, tuple[int, ...]]) -> None:
        """Has these decodes, all of whose tokens are known, verify drafts. They come behind the other decodes."""
        decodes = self._sequences[: self.num_decodes]
        order = sorted(range(self.num_decodes), key=lambda row: decodes[row] in drafts)
        first = self.num_decodes - len(drafts)
        self._sequences[: self.num_decodes] = [decodes[row] for row in order]
        self._starts[: self.num_decodes] = [self._starts[row] for row in order]
        self._carries[: self.num_decodes] = [self._carries[row] for row in order]
        self._drafts = {row: drafts[self._sequences[row]] for row in range(first, self.num_decodes)}
        for row, draft in self._drafts.items():
            self._lengths[row] += len(draft)
            self._num_tokens += len(draft)
            self._grow(self._sequences[row], self._starts[row] + self._lengths[row])

    def finish(self, constraint: StepConstraint) -> StepPlan:
        """Returns the plan, without the broken sequences."""
        broken = self.broken
        return StepPlan(
            self._sequences,
            self._starts,
            self._lengths,
            self._samples,
            self._carries,
            self.num_decodes - len(self._drafts),
            tuple(sequence for sequence in self._boarded if sequence not in broken),
            tuple(sequence for sequence in self._grown if sequence not in broken),
            tuple(self.preempted),
            tuple(self.swaps_out),
            tuple(self.swaps_in),
            tuple(sequence for sequence in self.swapped if sequence not in broken),
            constraint,
            tuple(self.restored),
            tuple(self.stored),
            tuple(self._scored),
            self._drafts,
            tuple(self.state_loads),
            tuple(self.state_saves),
            tuple(self._pooled),
            tuple(self.state_swaps_out),
            tuple(self.state_swaps_in),
        )

    def is_copy_cheaper(self, num_blocks: int, position: int) -> bool:
        """Returns whether these blocks should come back from host memory rather than be computed."""
        cost = self._copy_cost
        return cost is None or cost.is_cheaper(num_blocks, self._pool.block_size, position)

    def store(self, block: int, block_hash: bytes, host_block: int) -> None:
        """Has an evicted prefix block copied to host memory."""
        self.stored.append(block_hash)
        self.swaps_out.append((block, host_block))

    @property
    def num_storable(self) -> int:
        """Evicted blocks that may still be copied to host memory. Those that computed tokens displace are paid for."""
        if self._allowance is None:
            return self._pool.num_blocks
        num_paid = self.num_decodes + self._num_tokens // self._pool.block_size + len(self.swaps_in)
        num_fitting = self._allowance.fitting_copies(self._pool.num_blocks)
        return max(0, num_paid + num_fitting - len(self.stored))

    def _bring_back(self, sequence: Sequence, prefix: HostPrefix) -> bool:
        """Has blocks of the sequence's prefix copied back, as many as this step can take. Returns whether these were
        the last; others follow with the next step, and this one is closed.

        A step without other rows takes all, because a plan must have a row.
        """
        start, block_size = sequence.num_computed, self._pool.block_size
        num_left = (prefix.end - start) // block_size
        num_blocks = num_left
        if self._allowance is not None and self._sequences:
            num_blocks = self._allowance.fitting_restores(num_left, block_size)
        if num_blocks < num_left:
            self.is_cut = self._is_pace_spent = True
            self._num_tokens_left = 0
        if num_blocks:
            end = start + num_blocks * block_size
            if not self._grow(sequence, end):
                return False
            first = start // block_size
            blocks = sequence.block_table[first : first + num_blocks]
            host_blocks = prefix.host_blocks[len(prefix.host_blocks) - num_left :]
            self.swaps_in += zip(host_blocks, blocks, strict=False)
            self.swapped.append(sequence)
            self.restored.append(Restored(sequence, start, end, tuple(blocks)))
            sequence.num_computed = end
            if self._allowance is not None:
                self._allowance.take_restores(num_blocks, block_size)
        return num_blocks == num_left

    def _scorable_tokens(self, sequence: Sequence, num_wanted: int) -> int:
        """Returns how many of the tokens the step can take with the rows that are left for scoring. Rows that were
        scored before a preemption need no logits."""
        if sequence.num_unscored <= self._num_scores_left:
            return num_wanted
        return sequence.num_scored - sequence.num_computed + self._num_scores_left

    def _fitting_tokens(self, num_wanted: int, position: int) -> int:
        if self._is_chunked:
            num_fitting = min(num_wanted, self._num_tokens_left)
            if self._allowance is None:
                return num_fitting
            # A plan must have a row, even if blocks that come back have used up the allowance.
            num_least = 0 if self._sequences else min(num_fitting, 1)
            num_allowed = max(num_least, self._allowance.fitting(num_fitting, position))
            self._is_pace_spent |= num_allowed < num_fitting
            return num_allowed
        # A prompt above the whole budget gets a step of its own.
        return num_wanted if num_wanted <= self._num_tokens_left or not self._sequences else 0

    def _add_chunk(self, sequence: Sequence, num_tokens: int) -> None:
        start = sequence.num_computed
        end = start + num_tokens
        if not self._grow(sequence, end):
            return
        is_last = end == sequence.num_tokens
        samples = is_last and sequence.pooled is None
        self._sequences.append(sequence)
        self._starts.append(start)
        self._lengths.append(num_tokens)
        self._samples.append(samples)
        self._carries.append(False)
        if sequence.num_unscored and end > sequence.num_scored:
            self._add_scored(sequence, min(end, sequence.num_prompt_tokens - 1))
        if sequence.pooled is not None:
            self._add_pooled(sequence, sequence.pooled, start, end)
            if is_last:
                self.prompts_ended.append(sequence)
        sequence.num_computed = end
        sequence.num_in_flight += 1
        if samples:
            sequence.num_pending += 1
            self.prompts_done.append(sequence)
            if end + 1 >= sequence.length_limit:
                self.ending.append(sequence)
        self._num_tokens += num_tokens
        self._num_tokens_left -= num_tokens
        if self._allowance is not None:
            self._allowance.take(num_tokens, start)
            self._is_pace_spent |= self._num_tokens_left > 0 and self._allowance.fitting(1, 0) == 0
            if self._is_pace_spent:
                self._num_tokens_left = 0

    def _add_scored(self, sequence: Sequence, end: int) -> None:
        """Has the newest row score the prompt up to position `end`."""
        start, sequence.num_scored = sequence.num_scored, end
        self._num_scores_left -= end - start
        self._scored.append(ScoredRows(len(self._sequences) - 1, sequence, start, end))

    def _add_pooled(self, sequence: Sequence, pooled: PooledOutput, start: int, end: int) -> None:
        """Takes what the sequence's result needs of the newest row, which computes `[start, end)`."""
        first, last = pooled.rows_of_chunk(start, end, sequence.num_tokens)
        if first < last:
            pooled.num_planned = last
            self._pooled.append(PooledRows(len(self._sequences) - 1, sequence, first, last))

    def _grow(self, sequence: Sequence, end: int) -> bool:
        """Extends the block table to position `end`. Without enough blocks the sequence is broken and gets no row,
        which would write to blocks of others; the result is False."""
        num_missing = -(-end // self._pool.block_size) - len(sequence.block_table)
        if num_missing > 0:
            blocks = self._pool.allocate(num_missing)
            if blocks is None:
                self.broken[sequence] = f"{num_missing} of the KV blocks reserved for it are not available"
                return False
            self.num_overrun_blocks -= sequence.num_overrun_blocks
            sequence.block_table.extend(blocks)
            self.num_overrun_blocks += sequence.num_overrun_blocks
            self._grown.append(sequence)
        return self._has_window(sequence, end - 1) or self._grow_window(sequence, end)

    def _has_window(self, sequence: Sequence, position: int) -> bool:
        """Returns whether the layers with a window have a block for the position, or need none of their own."""
        table = sequence.window_table
        return self._windows is None or (table is not None and self._windows.covers(table, position))

    def _grow_window(self, sequence: Sequence, end: int) -> bool:
        table = sequence.window_table
        if self._windows is None or table is None or not self._windows.grow(table, end):
            self.broken[sequence] = "a block for the layers with a sliding window is not available"
            return False
        self._grown.append(sequence)
        return True


@dataclass(slots=True)
class _Place:
    """A prompt in the order. `num_passed` counts the tokens of later prompts that overtake it, including those of this
    step. A prompt that boards in this step (`is_new`) is not overtaken, because it boarded to get tokens."""

    sequence: Sequence
    number: int
    num_left: int
    num_passed: int
    is_new: bool = False


class PrefillOrder:
    """The order in which the prompts of one step get tokens: shortest remaining prompt first, with ageing. Without
    `may_pass` it is the order of boarding.

    A prompt overtakes those that boarded before it if it has fewer tokens left, so that a short prompt does not wait
    for a long one. Ageing bounds this: the prompts that overtake a prompt have fewer tokens in all than it has itself.
    So it waits for the prompts that boarded before it, plus at most its own length. A prompt never overtakes one of
    higher priority, and one of class batch is overtaken by all others.
    """

    def __init__(self, seated: Iterable[Sequence], *, may_pass: bool) -> None:
        self._may_pass = may_pass
        self._places: list[_Place] = []
        self._is_computed = False
        for sequence in seated:
            self._insert(self._index_for(sequence), sequence, is_new=False)

    def is_passed_by(self, sequence: Sequence, builder: StepBuilder) -> bool:
        """Returns whether a sequence that boards now would overtake a seated prompt and get tokens of this step."""
        if self._is_computed:
            return False
        index = self._index_for(sequence)
        ahead = (place.sequence for place in self._places[:index])
        return index < len(self._places) and builder.has_tokens_after(ahead)

    def add(self, sequence: Sequence, builder: StepBuilder) -> None:
        """Adds a sequence that has just boarded."""
        if self._is_computed:
            builder.add_prefill(sequence)
        else:
            self._insert(self._index_for(sequence), sequence, is_new=True)

    def compute(self, builder: StepBuilder) -> None:
        """Gives the prompts their tokens, once. Sequences that are added later get what is left."""
        if self._is_computed:
            return
        self._is_computed = True
        given: list[tuple[int, int]] = []
        for place in self._places:
            num_planned = builder.num_tokens
            builder.add_prefill(place.sequence)
            num_tokens = builder.num_tokens - num_planned
            if num_tokens < place.num_left:
                place.sequence.num_passed_tokens += sum(tokens for number, tokens in given if number > place.number)
            if num_tokens:
                given.append((place.number, num_tokens))

    def _index_for(self, sequence: Sequence) -> int:
        """Returns the place that the sequence gets. A prompt that needs log probabilities overtakes no other, because
        its rows of logits are limited."""
        index = len(self._places)
        if not self._may_pass or sequence.num_unscored:
            return index
        num_left = sequence.num_uncomputed
        while index and _may_pass(sequence, num_left, self._places[index - 1]):
            index -= 1
        return index

    def _insert(self, index: int, sequence: Sequence, *, is_new: bool) -> None:
        num_left = sequence.num_uncomputed
        for place in self._places[index:]:
            place.num_passed += num_left
        place = _Place(sequence, len(self._places), num_left, sequence.num_passed_tokens, is_new)
        self._places.insert(index, place)


def _may_pass(sequence: Sequence, num_left: int, place: _Place) -> bool:
    if place.is_new:
        return False
    if place.sequence.is_batch and not sequence.is_batch:
        return True
    is_shorter = num_left + place.num_passed < place.num_left
    return is_shorter and sequence.priority >= place.sequence.priority
