"""Drafts of the running sequences: which of them a step verifies, and which sequences wait for the step in flight.

A sequence without a matching draft is planned one step ahead, like any other. A draft continues the known tokens, so a
sequence whose draft is likely to pay is planned only once its step has retired, and so is one whose drafts are being
verified. Where few sequences would go ahead of those that wait, the whole step waits, so that the batch stays one.

A draft decides how many tokens a step yields and never which ones.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from collections.abc import Sequence as ReadOnlyList
from typing import Any

from inflight.executor.scheduler.plan_builder import StepBuilder
from inflight.executor.scheduler.sequence import Sequence, StepPlan
from inflight.executor.scheduler.step_constraint import DraftTerms
from inflight.executor.speculation.budget import DraftBudget
from inflight.executor.speculation.counts import DraftTally
from inflight.executor.speculation.earlier import EarlierOutputs
from inflight.executor.speculation.forced import GrammarProposer
from inflight.executor.speculation.proposer import NO_DRAFT, Draft, Proposer

# The step waits unless more than this many sequences can go ahead for each one that waits. A sequence that misses the
# step loses all of its time, the others lose only the time that the host takes between two steps.
NUM_AHEAD_PER_WAITING = 8
# Lookups take host time in proportion to the sequences of a step. After `n` steps in a row without a draft, the next
# `n // STEPS_PER_REST` steps look up nothing. They are at most one step for each SEQUENCES_PER_REST sequences.
STEPS_PER_REST = 4
SEQUENCES_PER_REST = 4


class Drafting:
    """The proposers and newest drafts of the sequences that may draft."""

    def __init__(
        self,
        make_proposer: Callable[[], Proposer],
        budget: DraftBudget,
        num_ahead_per_waiting: int = NUM_AHEAD_PER_WAITING,
        within_grammar: Callable[[Proposer, Any, ReadOnlyList[int]], Proposer] = GrammarProposer,
    ) -> None:
        """`within_grammar` makes the proposer of a constrained sequence from another one, a matcher and the output."""
        self.num_ahead_per_waiting = num_ahead_per_waiting
        self._make_proposer = make_proposer
        self._budget = budget
        self._within_grammar = within_grammar
        self._earlier = EarlierOutputs()
        # What may follow the known tokens.
        self._drafts: dict[Sequence, Draft] = {}
        # Tokens that the proposer of a sequence has.
        self._num_read: dict[Sequence, int] = {}
        self._num_idle_steps = 0
        self._num_steps_to_rest = 0
        # Whether sequences wait for the steps in flight, to draft then.
        self._has_waiting = False
        # Drafted tokens that were verified and accepted.
        self.tally = DraftTally()

    def waiting(
        self, decodes: Collection[Sequence], plans: ReadOnlyList[StepPlan], terms: DraftTerms
    ) -> frozenset[Sequence]:
        """Returns the decodes that are not to be in a step before the plans in flight have retired."""
        verifying = {plan.sequences[row] for plan in plans for row in plan.drafts}
        waiting = [sequence for sequence in decodes if sequence in verifying]
        self._has_waiting = bool(waiting)
        if self._num_steps_to_rest:
            return frozenset(waiting)
        may_draft = (s for s in decodes if s.num_pending and s not in verifying and _drafts(s, terms))
        drafts = {sequence: self._draft(sequence) for sequence in may_draft}
        # The first id of each is the token in flight.
        drafts = {sequence: draft for sequence, draft in drafts.items() if len(draft.ids) > 1}
        if drafts:
            num_ids = terms.fitting(len(decodes), sum(len(draft.ids) for draft in drafts.values()))
            others = [NO_DRAFT] * (len(decodes) - len(drafts))
            # The step waits, and so does the one after it.
            time_of_step = terms.with_waits(len(decodes), 2)
            chosen = self._budget.choose([*drafts.values(), *others], len(decodes), time_of_step, num_ids)
            waiting += [sequence for sequence, number in zip(drafts, chosen, strict=False) if number > 1]
        self._has_waiting = bool(waiting)
        return frozenset(waiting)

    def add_drafts(self, step: StepBuilder, num_blocks: int, block_size: int, terms: DraftTerms) -> None:
        """Adds drafts to the step that is being planned, with what prompts left of its tokens. They take at most
        `num_blocks` blocks."""
        if self._num_steps_to_rest:
            self._num_steps_to_rest -= 1
            return
        taken = self._choose(step, num_blocks, block_size, terms)
        if taken:
            step.add_drafts(taken)
        if taken or self._has_waiting:
            self._num_idle_steps = 0
        elif step.num_decodes:
            self._num_idle_steps += 1
            most = step.num_decodes // SEQUENCES_PER_REST
            self._num_steps_to_rest = min(self._num_idle_steps // STEPS_PER_REST, most)
        self._has_waiting = False

    def _choose(
        self, step: StepBuilder, num_blocks: int, block_size: int, terms: DraftTerms
    ) -> dict[Sequence, tuple[int, ...]]:
        """Returns the drafts that the step verifies."""
        drafts = {s: self._draft(s) for s in step.known_decodes if _drafts(s, terms)}
        drafts = {s: _within(draft, s.length_limit - len(s.token_ids) - 1) for s, draft in drafts.items() if draft.ids}
        num_wanted = sum(len(draft.ids) for draft in drafts.values())
        num_ids = terms.fitting(step.num_tokens, min(num_wanted, step.num_tokens_left))
        if not num_ids:
            return {}
        others = [NO_DRAFT] * (step.num_decodes + len(step.prompts_done) - len(drafts))
        time_of_step = terms.with_waits(step.num_tokens, 1)
        chosen = self._budget.choose([*drafts.values(), *others], step.num_tokens, time_of_step, num_ids)
        taken: dict[Sequence, tuple[int, ...]] = {}
        for (sequence, draft), number in zip(drafts.items(), chosen, strict=False):
            num_held = len(sequence.block_table)
            most = (num_held + num_blocks) * block_size - len(sequence.token_ids)
            if ids := draft.ids[: min(number, most)]:
                taken[sequence] = ids
                num_blocks -= max(0, -(-(len(sequence.token_ids) + len(ids)) // block_size) - num_held)
        return taken

    @property
    def has_drafts(self) -> bool:
        """Whether there are drafts that `follow` has not compared with the tokens that came."""
        return bool(self._drafts)

    def follow(self, sequence: Sequence, new_ids: ReadOnlyList[int]) -> None:
        """Compares the newest tokens of a sequence with its draft, whether or not they were drafted, and learns from
        them. While `has_drafts` is false, it need not be called."""
        draft = self._drafts.pop(sequence, NO_DRAFT)
        num_compared = min(len(draft.ids), len(new_ids))
        if num_compared:
            is_equal = [one == other for one, other in zip(draft.ids, new_ids, strict=False)]
            self._budget.observe(draft, num_compared, [*is_equal, False].index(False))

    def forget(self, sequence: Sequence) -> None:
        """Drops what belongs to a sequence that ends, and keeps its output for those that come."""
        self._drafts.pop(sequence, None)
        self._num_read.pop(sequence, None)
        sequence.proposer = None
        if sequence.max_drafts:
            self._earlier.add(sequence.cache_salt, sequence.token_ids[sequence.num_prompt_tokens :])

    def _draft(self, sequence: Sequence) -> Draft:
        if sequence.constraint is not None and sequence.constraint.is_slow:
            # A step would have to compute a mask for each draft.
            return NO_DRAFT
        draft = self._drafts.get(sequence)
        if draft is None:
            if sequence.proposer is None:
                sequence.proposer = self._proposer_of(sequence)
            elif self._num_read[sequence] < len(sequence.token_ids):
                sequence.proposer.extend(sequence.token_ids[self._num_read[sequence] :])
            self._num_read[sequence] = len(sequence.token_ids)
            draft = self._drafts[sequence] = sequence.proposer.propose(sequence.max_drafts)
        return draft

    def _proposer_of(self, sequence: Sequence) -> Proposer:
        proposer = self._make_proposer()
        proposer.extend(self._earlier.of(sequence.cache_salt))
        proposer.extend(sequence.token_ids)
        if sequence.constraint is None:
            return proposer
        output_ids = sequence.token_ids[sequence.num_prompt_tokens :]
        return self._within_grammar(proposer, sequence.constraint.compiled.matcher.deep_copy(), output_ids)


def _within(draft: Draft, limit: int) -> Draft:
    return draft if len(draft.ids) <= limit else Draft(draft.ids[: max(0, limit)], draft.match_length)


def _drafts(sequence: Sequence, terms: DraftTerms) -> bool:
    return sequence.max_drafts > 0 and (terms.drafts_batch or not sequence.is_batch)
