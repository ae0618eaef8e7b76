"""The in-flight scheduler: who boards, what each step computes, and when a sequence gets off. Pure.

One rule covers decode, chunked prefill, prefix hit and resume: a sequence's `num_computed` chases its `num_tokens`.

Invariants:
- The rows of a step stay within `max_num_tokens`, the sequences on a seat within `max_num_sequences`.
- An allocation cannot fail: the gate admits only reservations that last to the end and whose sum fits the pool, and
  nobody takes more blocks than it reserved. Hence whoever is accepted ends, whatever else happens.
- Each accepted sequence is released once and yields one `FinishEvent`.

Running a step ahead. `schedule()` may be called while the plan before is still in flight; `update()` retires the
oldest. So planning counts what it plans as done: `num_computed` includes the steps in flight, and the tokens they will
yield are counted before anybody knows them. An end that is known beforehand (max_tokens, the context's length) is
planned for: who has its last token in flight is in no further step and has left its seat. An end that is not (a stop
token, a cancel, a failed step) leaves at most one row in flight, whose token is dropped. The sequence is then marked as
leaving:

| where        | has a seat | is in further steps | tokens count | blocks                    |
| ------------ | ---------- | ------------------- | ------------ | ------------------------- |
| `_waiting`   | no         | yes                 |              | none                      |
| `_prefills`  | yes        | yes                 | yes          | its own                   |
| `_decodes`   | yes        | yes                 | yes          | its own                   |
| `_ending`    | no         | no                  | yes          | its own                   |
| `_leaving`   | no         | no                  | no           | until its last step retires |

Its promise is given back at once, its blocks with that step, and nobody boards on blocks that someone leaving holds.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator
from itertools import chain

from executor.admission import Gate, Refusal
from executor.blocks import BlockPool
from executor.demand import PrefillDemand
from executor.limits import Batching, SchedulerLimits
from executor.prefix_cache import PrefixCache
from executor.sequence import (
    FinishEvent,
    FinishReason,
    NewTokens,
    Sequence,
    StepOutcome,
    StepPlan,
    StepResult,
)
from executor.step_draft import StepDraft

__all__ = ["Batching", "Refusal", "Scheduler", "SchedulerLimits"]


class Scheduler:
    """Turns offered sequences into step plans, and step results into tokens and ends."""

    def __init__(self, limits: SchedulerLimits, pool: BlockPool) -> None:
        self.limits = limits
        self.pool = pool
        self._gate = Gate(
            num_blocks=pool.num_blocks,
            block_size=pool.block_size,
            max_inside=limits.max_num_sequences + limits.num_standby_sequences,
            context_length=limits.context_length,
        )
        self._prefix_cache = PrefixCache(pool, limits.enable_prefix_cache)
        # In order of arrival, because sequences board in that order and nobody overtakes.
        self._waiting: OrderedDict[Sequence, None] = OrderedDict()
        self._prefills: dict[Sequence, None] = {}
        self._decodes: dict[Sequence, None] = {}
        self._ending: dict[Sequence, None] = {}
        # The reason of an end that is still to be handed out; None where it has been.
        self._leaving: dict[Sequence, FinishReason | None] = {}
        self._plans: deque[StepPlan] = deque()
        self._free_seats = list(range(limits.num_seat_rows))[::-1]
        self._superseded: list[FinishEvent] = []
        self._decodes_gave_way = False
        # Changes whenever somebody is held or no longer held.
        self.num_held_changes = 0

    # Entering.

    def offer(self, sequence: Sequence) -> Refusal | None:
        """Takes the sequence, or says why not.

        A newer attempt ends an older one that is held, even when it is refused itself: to the routers the older one is
        dead. That end comes out of `take_finished()`, or of the next `update()`.
        """
        assert not sequence.block_table, f"{sequence.request_id} was offered before"
        if self._gate.is_stale(sequence):
            return Refusal.STALE_ATTEMPT
        older = self._gate.find(sequence.request_id)
        if older is not None:
            event = self._end(older, FinishReason.CANCELLED)
            if event is not None:
                self._superseded.append(event)
        refusal = self._gate.enter(sequence)
        if refusal is None:
            sequence.length_limit = min(
                sequence.num_prompt_tokens + sequence.stopping.max_tokens, self.limits.context_length
            )
            self._waiting[sequence] = None
            self.num_held_changes += 1
        return refusal

    def drain(self) -> None:
        """Refuses every further offer; what is held goes on."""
        self._gate.close()

    # A step.

    def schedule(self, max_prefill_tokens: int | None = None) -> StepPlan:
        """Plans a step: running decodes, then prefills in progress, then boarding.

        Prompts get at most `max_prefill_tokens` of it, if that is given. Without work the plan has no rows; such a plan
        is not in flight, and there is nothing to update.
        """
        assert len(self._plans) < 2, "two plans are in flight"
        draft = StepDraft(self.limits, self.pool, max_prefill_tokens)
        if not self._decodes_give_way():
            draft.add_decodes(self._decodes)
        for sequence in self._prefills:
            draft.add_prefill(sequence)
        self._board(draft)
        return self._launch(draft)

    def update(self, result: StepResult) -> StepOutcome:
        """Retires the oldest plan: appends the sampled tokens, publishes full blocks, decides who gets off."""
        plan = self._land(result.plan)
        num_sampling = sum(plan.samples)
        assert len(result.sampled_ids) == num_sampling, f"{len(result.sampled_ids)} tokens for {num_sampling} rows"
        sampled_ids = iter(result.sampled_ids)
        tokens, finished = NewTokens(), list(self.take_finished())
        block_size = self.pool.block_size
        for sequence, start, length, samples in zip(
            plan.sequences, plan.starts, plan.lengths, plan.samples, strict=True
        ):
            token_id = next(sampled_ids) if samples else None
            sequence.num_in_flight -= 1
            sequence.num_pending -= samples
            if sequence in self._leaving:
                finished.extend(self._let_go(sequence))
                continue
            end = start + length
            if length > 1 or end % block_size == 0:
                self._prefix_cache.publish(sequence, start, end)
            if token_id is None:
                continue
            sequence.token_ids.append(token_id)
            tokens.sequences.append(sequence)
            tokens.offsets.append(end - sequence.num_prompt_tokens)
            tokens.token_ids.append(token_id)
            if end + 1 == sequence.length_limit or token_id in sequence.stopping.stop_token_ids:
                finished.extend(self._end_after(sequence, token_id))
        return StepOutcome(tokens, tuple(finished))

    def fail(self, plan: StepPlan, error: str) -> StepOutcome:
        """Retires the oldest plan, whose step failed: who was in it ends, and what it wrote is not published."""
        self._land(plan)
        finished = list(self.take_finished())
        for sequence, samples in zip(plan.sequences, plan.samples, strict=True):
            sequence.num_in_flight -= 1
            sequence.num_pending -= samples
            if sequence in self._leaving:
                finished.extend(self._let_go(sequence))
            else:
                finished.append(self._finish(sequence, FinishReason.ERROR, error=error))
        return StepOutcome(NewTokens(), tuple(finished))

    # Leaving.

    def cancel(self, request_id: str, attempt: int, reason: FinishReason) -> FinishEvent | None:
        """Ends a sequence.

        None when this attempt is not held (any more), and when it is in flight: then its end comes out of the
        `update()` of the last step that it is in, and no step in flight yields a token for it.
        """
        sequence = self._gate.find(request_id)
        if sequence is None or sequence.attempt != attempt:
            return None
        return self._end(sequence, reason)

    def take_finished(self) -> tuple[FinishEvent, ...]:
        """The ends that no call has returned yet: those of superseded attempts."""
        finished = tuple(self._superseded)
        self._superseded.clear()
        return finished

    # How it stands.

    @property
    def num_running(self) -> int:
        """Sequences on a seat; one whose last token is on its way counts until somebody has its seat."""
        return min(self._num_boarded, self.limits.max_num_sequences)

    @property
    def num_waiting(self) -> int:
        """Sequences accepted that have no seat yet."""
        return len(self._waiting)

    @property
    def num_held(self) -> int:
        """Sequences that are owed an end."""
        return sum(1 for _ in self.held())

    @property
    def is_idle(self) -> bool:
        """Whether nothing is held and nothing in flight."""
        return not (self._waiting or self._num_boarded or self._leaving)

    @property
    def is_draining(self) -> bool:
        """Whether every offer is refused."""
        return self._gate.is_closed

    @property
    def waiting_prefill_tokens(self) -> int:
        """Tokens to compute until everyone held decodes."""
        return sum(s.num_tokens - s.num_computed for s in chain(self._prefills, self._waiting))

    @property
    def budget_blocks(self) -> int:
        """Blocks that can be promised: all of them, for nobody uses more than was reserved for it."""
        return self.pool.num_blocks

    @property
    def has_prefill(self) -> bool:
        """Whether anybody has still to be computed up to its first token."""
        return bool(self._prefills or self._waiting)

    def prefill_demand(self) -> PrefillDemand:
        """Who waits to be computed, beside whom."""
        num_free_seats = self.limits.max_num_sequences - len(self._decodes) - len(self._prefills)
        first = next(iter(self._prefills), None)
        return PrefillDemand(
            num_decodes=len(self._decodes),
            decode_context=sum(sequence.num_computed for sequence in self._decodes),
            num_behind=len(self._prefills) + min(len(self._waiting), num_free_seats),
            position=first.num_computed if first is not None else 0,
        )

    def held(self) -> Iterator[Sequence]:
        """Everyone who has boarded, then everyone waiting. Who has been told its end is held no more."""
        cancelled = (sequence for sequence, reason in self._leaving.items() if reason is not None)
        return chain(self._decodes, self._prefills, self._ending, cancelled, self._waiting)

    def check(self) -> None:
        """Asserts that the blocks in use are exactly those of who boarded and was not released. Costs time per
        block."""
        boarded = list(chain(self._decodes, self._prefills, self._ending, self._leaving))
        self.pool.check(sequence.block_table for sequence in boarded)
        seats = [sequence.seat for sequence in boarded if sequence.seat is not None]
        assert sorted([*seats, *self._free_seats]) == list(range(self.limits.num_seat_rows)), f"seats: {seats}"

    def check_when_idle(self) -> None:
        """Asserts that an idle scheduler has every block back; does nothing while it is not idle."""
        if self.is_idle:
            self.check()

    # Planning.

    @property
    def _num_boarded(self) -> int:
        return len(self._decodes) + len(self._prefills) + len(self._ending)

    def _decodes_give_way(self) -> bool:
        """Whether the first prompt gets this step instead of the decodes.

        Only without chunks, where a long prompt would otherwise wait until enough decodes have ended; and at most
        every other step, so that the decodes go on.
        """
        gave_way, self._decodes_gave_way = self._decodes_gave_way, False
        if self.limits.enable_chunked_context or gave_way or not self._decodes:
            return False
        first = next(iter(self._prefills), None)
        if first is not None:
            num_tokens_left = self.limits.max_num_tokens - len(self._decodes)
            self._decodes_gave_way = first.num_tokens - first.num_computed > num_tokens_left
        return self._decodes_gave_way

    def _board(self, draft: StepDraft) -> None:
        """Seats who waits, in order of arrival.

        A static batch fills its seats at once, even if its prompts then take several steps. In flight, who would get
        no token now waits on: later it may find more of its prefix cached.
        """
        is_static = self.limits.batching is Batching.STATIC
        num_seated = len(self._decodes) + len(self._prefills)
        if is_static and (num_seated or self._leaving):
            return
        while self._waiting and num_seated < self.limits.max_num_sequences:
            if (draft.is_full and not is_static) or not self._has_blocks_for(next(iter(self._waiting))):
                return
            sequence, _ = self._waiting.popitem(last=False)
            self._prefills[sequence] = None
            num_seated += 1
            sequence.seat = self._free_seats.pop()
            self._prefix_cache.attach(sequence)
            draft.board(sequence)
            draft.add_prefill(sequence)

    def _has_blocks_for(self, sequence: Sequence) -> bool:
        """Whether its reservation fits beside what the others hold or may take until their end. The gate made sure of
        that, but for the blocks of those who are leaving."""
        if not self._leaving:
            return True
        boarded = chain(self._decodes, self._prefills, self._ending)
        num_taken = sum(s.num_reserved_blocks for s in boarded) + sum(len(s.block_table) for s in self._leaving)
        return num_taken + sequence.num_reserved_blocks <= self.pool.num_blocks

    def _launch(self, draft: StepDraft) -> StepPlan:
        """From here on the plan is in flight, and who has its last token in it needs no seat any more."""
        for sequence in draft.prompts_done:
            del self._prefills[sequence]
            self._decodes[sequence] = None
        for sequence in draft.ending:
            del self._decodes[sequence]
            self._ending[sequence] = None
        plan = draft.finish()
        if plan.sequences:
            self._plans.append(plan)
        return plan

    # Retiring.

    def _land(self, plan: StepPlan) -> StepPlan:
        assert self._plans and plan is self._plans[0], "only the oldest plan in flight can be retired"
        return self._plans.popleft()

    def _end_after(self, sequence: Sequence, token_id: int) -> Iterator[FinishEvent]:
        """Ends the sequence if this token, its newest, is its last."""
        stopping = sequence.stopping
        if token_id in stopping.stop_token_ids and sequence.num_output_tokens >= stopping.min_tokens:
            yield self._finish(sequence, FinishReason.STOP_TOKEN, stop_token_id=token_id)
        elif len(sequence.token_ids) == sequence.length_limit:
            yield self._finish(sequence, FinishReason.LENGTH)

    def _end(self, sequence: Sequence, reason: FinishReason) -> FinishEvent | None:
        """Ends a sequence from outside: now, or when the last step that it is in retires."""
        if sequence.num_in_flight == 0:
            return self._finish(sequence, reason)
        self._leave(sequence, reason)
        return None

    def _finish(
        self, sequence: Sequence, reason: FinishReason, *, stop_token_id: int | None = None, error: str = ""
    ) -> FinishEvent:
        """Hands its end out. It is released now, or with the step in flight that still has a row of it."""
        self._leave(sequence, None)
        if sequence.num_in_flight == 0:
            self._release(sequence)
        self.num_held_changes += 1
        return FinishEvent(sequence, reason, stop_token_id, error)

    def _leave(self, sequence: Sequence, reason: FinishReason | None) -> None:
        """Takes the sequence off its seat and its promise back."""
        assert sequence not in self._leaving, f"{sequence.request_id} leaves twice"
        for place in (self._decodes, self._prefills, self._ending, self._waiting):
            place.pop(sequence, None)
        self._gate.leave(sequence)
        self._leaving[sequence] = reason

    def _let_go(self, sequence: Sequence) -> Iterator[FinishEvent]:
        """A step that someone leaving was in has retired: if it was the last, nothing holds its blocks any more."""
        if sequence.num_in_flight > 0:
            return
        reason = self._leaving[sequence]
        self._release(sequence)
        if reason is not None:
            self.num_held_changes += 1
            yield FinishEvent(sequence, reason)

    def _release(self, sequence: Sequence) -> None:
        """The one way out: row of its seat and blocks are given back together."""
        del self._leaving[sequence]
        if sequence.seat is not None:
            self._free_seats.append(sequence.seat)
            sequence.seat = None
        self.pool.release(sequence.block_table)
        sequence.block_table = []
        sequence.num_computed = 0
