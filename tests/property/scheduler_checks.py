"""Checks of each plan against the queues before it was made."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass

from inflight.executor.scheduler.scheduler import Batching, SchedulerLimits
from inflight.executor.scheduler.sequence import Sequence, StepPlan
from inflight.executor.scheduler.step_constraint import StepConstraint


@dataclass(frozen=True, slots=True)
class Standing:
    """Before a plan: who has a seat and goes on, who has had none, who gave one up; `decodes` have had a token."""

    seated: list[Sequence]
    arrivals: list[Sequence]
    preempted: list[Sequence]
    decodes: set[Sequence]
    has_leaving: bool


class RowChecks:
    """What holds for the rows and copies of every plan."""

    def __init__(self, limits: SchedulerLimits, block_size: int) -> None:
        self._limits = limits
        self._block_size = block_size

    def check(self, plan: StepPlan) -> None:
        """Asserts it."""
        self._check_copies(plan)
        is_alone = len(plan.rows) == 1 and not self._limits.enable_chunked_context
        assert plan.num_tokens <= self._limits.max_num_tokens or is_alone
        assert len({row.sequence for row in plan.rows}) == len(plan.rows) <= self._limits.max_num_sequences
        for row in plan.rows:
            sequence = row.sequence
            last = row.start + row.num_tokens
            end = last - len(row.drafts)
            assert end > row.start
            assert end == sequence.num_computed <= last < sequence.length_limit, "a step behind the last token"
            assert len(row.drafts) <= sequence.max_drafts
            assert not row.drafts or (end == row.start + 1 == len(sequence.token_ids) and not row.carries)
            assert row.samples == (end == sequence.num_tokens - row.samples)
            assert row.samples or self._limits.enable_chunked_context
            assert row.carries == (row.start >= len(sequence.token_ids))
            assert len(sequence.block_table) * self._block_size >= last

    def _check_copies(self, plan: StepPlan) -> None:
        """Each block that is copied back is one of the positions that the plan says come back, and no step has a row
        of a sequence before all of its blocks are back."""
        blocks = [block for restored in plan.restored for block in restored.blocks]
        assert blocks == [block for _, block in plan.swaps_in]
        assert len({host_block for _, host_block in plan.swaps_out}) == len(plan.swaps_out)
        for sequence, start, end, own in plan.restored:
            assert sequence in plan.swapped
            first = start // self._block_size
            assert sequence.block_table[first : first + len(own)] == list(own) or not sequence.block_table
            assert start % self._block_size == 0
            assert end <= sequence.num_tokens
        assert all(row.sequence.host_prefix is None for row in plan.rows)


class PassingChecks:
    """Prompts that pass others: the shorter one, of no lower priority, and by fewer tokens in all than the other has.
    A prompt that is not done with a step was passed by the later ones that got tokens of it. All others may pass those
    of class batch."""

    def __init__(self, limits: SchedulerLimits) -> None:
        self._may_pass = limits.batching is Batching.INFLIGHT
        self._num_passed: Counter[Sequence] = Counter()

    def check(self, plan: StepPlan, line: list[Sequence]) -> None:
        """Asserts it of a plan. `line` are the prompts in order of boarding."""
        row_of = {row.sequence: row for row in plan.rows}
        for index, passed in enumerate(line):
            row = row_of.get(passed)
            if row is not None and row.samples:
                continue
            num_left = passed.num_uncomputed if row is None else passed.num_tokens - row.start
            for other in line[index + 1 :]:
                if other in row_of:
                    assert self._may_pass
                    assert other.priority >= passed.priority
                    gives_way = passed.is_batch and not other.is_batch
                    assert gives_way or other.num_tokens - row_of[other].samples - row_of[other].start < num_left
                    self._num_passed[passed] += row_of[other].num_tokens
            assert self._num_passed[passed] == passed.num_passed_tokens
            assert passed.is_batch or passed.num_passed_tokens < passed.num_tokens


class OvercommittedChecks:
    """max_utilization: who goes on depends on the blocks; who comes back goes first."""

    def __init__(self, limits: SchedulerLimits, block_size: int, max_prefill_tokens: int | None) -> None:
        self._limits = limits
        self._rows = RowChecks(limits, block_size)

    def check(self, plan: StepPlan, standing: Standing, waits: bool = False) -> None:
        """Asserts what holds. With `waits` a decode may wait for the step in flight."""
        self._rows.check(plan)
        # A sequence can give up its seat in this very step and get it back, when its blocks are shared or still cached.
        back = [s for s in plan.boarded if s in standing.preempted or s in plan.preempted]
        new = [sequence for sequence in plan.boarded if sequence in standing.arrivals]
        away = {s for s in (*standing.preempted, *plan.preempted) if s.seat is None}
        assert [*back, *new] == list(plan.boarded), "a sequence boards twice, or ahead of a preempted one"
        assert not (new and any(s.host_copy or s.num_steps_away for s in away)), (
            "someone new boards before the preempted"
        )
        assert all(sequence.block_table == [] and sequence.num_computed == 0 for sequence in away)
        if not self._limits.max_prefix_wait_steps:
            assert new == standing.arrivals[: len(new)], "boarding is not in order of turn"
        assert len(standing.seated) - len(plan.preempted) + len(plan.boarded) <= self._limits.max_num_sequences


class ReservedChecks:
    """guaranteed_no_evict: every sequence has its blocks, so seats, tokens and the order of turn decide alone."""

    def __init__(self, limits: SchedulerLimits, block_size: int, max_prefill_tokens: int | None) -> None:
        self.limits = limits
        self.block_size = block_size
        self.max_prefill_tokens = max_prefill_tokens
        self._rows = RowChecks(limits, block_size)
        self._passing = PassingChecks(limits)
        self.decodes_skipped: set[Sequence] = set()
        self.head_skipped: list[Sequence] = []

    def check(self, plan: StepPlan, standing: Standing, waits: bool = False) -> None:
        """Asserts what holds. With `waits` a decode may wait for the step in flight."""
        self._rows.check(plan)
        for row in plan.rows:
            num_blocks = math.ceil((row.start + row.num_tokens) / self.block_size)
            # An earlier draft may have taken blocks.
            num_held = len(row.sequence.block_table)
            assert num_held == num_blocks or (num_held > num_blocks and row.sequence.max_drafts)
        assert plan.preempted == ()
        assert len(plan.swaps_out) == len(plan.stored), "a sequence's own blocks go out"
        self._check_boarding(plan, standing)
        self._check_decodes(plan, standing.decodes, waits)
        self._check_line_of_prefills(plan, standing.seated, standing.decodes)

    def _check_boarding(self, plan: StepPlan, standing: Standing) -> None:
        num_seated, has_leaving = len(standing.seated), standing.has_leaving
        waited = [s for s in standing.arrivals if s not in plan.boarded and s.num_prefix_wait_steps > 0]
        arrivals = [s for s in standing.arrivals if s not in waited]
        assert not waited or self.limits.max_prefix_wait_steps
        assert list(plan.boarded) == arrivals[: len(plan.boarded)], "boarding is not in order of turn"
        num_free_seats = self.limits.max_num_sequences - num_seated
        most_boarding = min(len(arrivals), num_free_seats)
        if self.limits.batching is Batching.STATIC:
            expected = 0 if num_seated or has_leaving else most_boarding
            is_one = len(plan.boarded) == expected or self._has_no_window(plan)
            assert is_one, "a static batch was not boarded as one"
            return
        rows = {row.sequence for row in plan.rows}
        without_row = [sequence for sequence in plan.boarded if sequence not in rows]
        # Without chunks the last one may find that it does not fit.
        assert without_row in ([], [] if self.limits.enable_chunked_context else list(plan.boarded[-1:]))
        if self._has_room(plan, standing.decodes) and self.limits.enable_chunked_context and not has_leaving:
            is_full = len(plan.boarded) == most_boarding or self._has_no_window(plan)
            assert is_full, "a seat and tokens were left unused"

    def _has_no_window(self, plan: StepPlan) -> bool:
        """Whether the window pool, or slots of recurrent state, kept sequences from boarding: those whose last step is
        in flight have left their seats and still hold blocks there."""
        has_own_pool = self.limits.kv_window is not None or self.limits.states is not None
        return has_own_pool and plan.constraint is StepConstraint.BLOCKS

    def _has_room(self, plan: StepPlan, decodes: set[Sequence]) -> bool:
        """Whether a prompt could have had more of this step."""
        num_left = self.limits.max_num_tokens - plan.num_tokens + sum(map(len, plan.drafts.values()))
        if self.max_prefill_tokens is not None:
            num_prefill = sum(row.num_tokens for row in plan.rows if row.sequence not in decodes)
            if self.limits.num_host_blocks:
                num_prefill += sum(restored.end - restored.start for restored in plan.restored)
            num_left = min(num_left, self.max_prefill_tokens - num_prefill)
        return num_left > 0

    def _check_decodes(self, plan: StepPlan, decodes: set[Sequence], waits: bool) -> None:
        """Decodes are in every step; they may give way to a long prompt without chunks, and wait for the step in flight
        with drafts, but not twice in a row."""
        skipped = decodes - {row.sequence for row in plan.rows}
        may_skip = waits and all(sequence.max_drafts for sequence in skipped)
        assert not skipped or may_skip or not self.limits.enable_chunked_context
        assert not skipped & self.decodes_skipped
        self.decodes_skipped = skipped

    def _check_line_of_prefills(self, plan: StepPlan, seated: list[Sequence], decodes: set[Sequence]) -> None:
        """Without chunks prompts are computed in order of boarding. The first that gets nothing does not fit, and not
        for long."""
        rows = {row.sequence for row in plan.rows}
        line = [sequence for sequence in (*seated, *plan.boarded) if sequence not in decodes]
        skipped = [sequence for sequence in line if sequence not in rows]
        if self.limits.enable_chunked_context:
            assert not skipped or not self._has_room(plan, decodes)
            self._passing.check(plan, line)
            return
        assert line[len(line) - len(skipped) :] == skipped, "a prompt was overtaken"
        for sequence in skipped[:1]:
            num_behind = sequence.num_tokens - sequence.num_computed
            assert plan.num_tokens + num_behind > self.limits.max_num_tokens, "a prompt that fits was left out"
        self.head_skipped = [*self.head_skipped, *skipped[:1]] if skipped[:1] == self.head_skipped[:1] else skipped[:1]
        assert len(self.head_skipped) <= 2, "the first prompt in line is kept waiting"
