"""The in-flight scheduler: who boards, what each step computes, and when a sequence gets off. Pure.

One rule covers decode, chunked prefill, prefix hit and resume: a sequence's `num_computed` chases its `num_tokens`.

Invariants:
- The rows of a step stay within `max_num_tokens`, the sequences on a seat within `max_num_sequences`.
- Under guaranteed_no_evict an allocation cannot fail: the gate admits only reservations that last to the end and whose
  sum fits the pool, and nobody takes more blocks than it reserved. Under max_utilization whoever is inside would fit
  alone, and some are preempted until the others fit. Either way whoever is accepted ends, whatever else happens.
- Each accepted sequence is released once and yields one `FinishEvent`.
- A plan is a transaction. `update` commits it. `fail` ends every sequence that it touched: what the device knows of
  their rows, tables, parameters and KV is not known any more.

Running a step ahead. `schedule()` may be called while the plan before is still in flight; `update()` retires the
oldest. So planning counts what it plans as done: `num_computed` includes the steps in flight, and the tokens they will
yield are counted before anybody knows them. An end that is known beforehand (max_tokens, the context's length) is
planned for: who has its last token in flight is in no further step and has left its seat. An end that is not (a stop
token, a cancel, a failed step) leaves at most one row in flight, whose token is dropped. The sequence is then marked as
leaving. Who is to be preempted pauses until no step in flight has a row of it:

| where        | has a seat | is in further steps | tokens count | blocks                                   |
| ------------ | ---------- | ------------------- | ------------ | ---------------------------------------- |
| `waiting`    | no         | yes                 |              | none                                     |
| `preempted`  | no         | yes, or handed back |              | none, or a copy in host memory           |
| `prefills`   | yes        | yes                 | yes          | its own                                  |
| `decodes`    | yes        | yes                 | yes          | its own                                  |
| `pausing`    | no         | no, or back in line | yes          | its own                                  |
| `ending`     | no         | no                  | yes          | its own                                  |
| `leaving`    | no         | no                  | no           | until its last step retires              |

Its promise is given back at once, its blocks with that step, and nobody boards on blocks that someone leaving holds.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from itertools import chain

from executor.scheduler.admission import Gate, Refusal
from executor.scheduler.blocks import BlockError, BlockPool
from executor.scheduler.kv_policy import GuaranteedNoEvict, KvPolicy
from executor.scheduler.limits import Batching, SchedulerLimits, SchedulerPolicy
from executor.scheduler.max_utilization import MaxUtilization, ReserveController
from executor.scheduler.plan_builder import StepDraft
from executor.scheduler.prefix_cache import PrefixCache
from executor.scheduler.queues import SequenceQueues
from executor.scheduler.seat_view import Seating
from executor.scheduler.sequence import (
    FinishEvent,
    FinishReason,
    NewTokens,
    Sequence,
    StepOutcome,
    StepPlan,
    StepResult,
)
from executor.scheduler.shared_prefixes import PendingPrefixes
from executor.scheduler.step_constraint import PrefillDemand, StepBounds, StepConstraint
from executor.scheduler.step_record import KvCounts


class Boarding:
    """Seats who is in line: the preempted first, then the others by their turn. Only who waits for a twin is passed."""

    def __init__(
        self, limits: SchedulerLimits, queues: SequenceQueues, kv_policy: KvPolicy, pending_prefixes: PendingPrefixes
    ) -> None:
        self._limits = limits
        self._is_static = limits.batching is Batching.STATIC
        self._queues = queues
        self._kv_policy = kv_policy
        self._pending_prefixes = pending_prefixes
        self._decodes_gave_way = False

    def decodes_give_way(self) -> bool:
        """Whether the first prompt gets this step instead of the decodes.

        Only without chunks, where a long prompt would otherwise wait until enough decodes have ended; and at most
        every other step, so that the decodes go on.
        """
        gave_way, self._decodes_gave_way = self._decodes_gave_way, False
        num_decodes = len(self._queues.decodes)
        if self._limits.enable_chunked_context or gave_way or not num_decodes:
            return False
        first = next(iter(self._queues.prefills), None)
        if first is not None:
            num_tokens_left = self._limits.max_num_tokens - num_decodes
            self._decodes_gave_way = first.num_tokens - first.num_computed > num_tokens_left
        return self._decodes_gave_way

    def board(self, draft: StepDraft) -> StepConstraint:
        """Seats who can board now.

        A static batch fills its seats at once, even if its prompts then take several steps. In flight, who would get
        no token now waits on: later it may find more of its prefix cached.
        """
        queues = self._queues
        if not (queues.waiting or queues.preempted):
            return draft.closed_by if draft.is_cut else self._unless_full(StepConstraint.NO_WORK)
        if self._is_static and (queues.num_seated or queues.leaving):
            return StepConstraint.STATIC_BATCH
        end = StepConstraint.NO_WORK
        for sequence in queues.in_line():
            if queues.num_seated >= self._limits.max_num_sequences:
                return StepConstraint.SEATS
            if draft.is_full and not self._is_static:
                return draft.closed_by
            if not self._is_static and self._pending_prefixes.should_wait(sequence):
                end = StepConstraint.TWIN
                continue
            if not self._kv_policy.take(sequence, draft):
                return StepConstraint.BLOCKS
            queues.seat(sequence)
            self._pending_prefixes.begin(sequence)
            draft.board(sequence)
            draft.add_prefill(sequence)
        return draft.closed_by if draft.is_cut else self._unless_full(end)

    def _unless_full(self, constraint: StepConstraint) -> StepConstraint:
        """A full step is bound by seats though nothing waits here: what waits may be in the routers' queue."""
        return StepConstraint.SEATS if self._queues.num_seated >= self._limits.max_num_sequences else constraint


# What a sequence ends with whose row has no logit above -inf, after bans.
INVALID_LOGITS = "the model's logits hold no number"

__all__ = ["Batching", "Refusal", "Scheduler", "SchedulerLimits", "SchedulerPolicy"]


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
            is_overcommitted=limits.is_overcommitted,
        )
        self.prefix_cache = PrefixCache(pool, limits.enable_prefix_cache)
        self._queues = queues = SequenceQueues(limits.num_seat_rows)
        self._kv_policy = kv_policy = _kv_policy_for(limits, pool, self.prefix_cache, queues)
        self._pending_prefixes = pending_prefixes = PendingPrefixes(pool, self.prefix_cache, limits.max_twin_steps)
        self._boarding = Boarding(limits, queues, kv_policy, pending_prefixes)
        self.seating = Seating(queues, limits.max_num_sequences)
        self._reserve = ReserveController() if limits.is_overcommitted else None
        self._plans: deque[StepPlan] = deque()
        # Ends that no call has returned yet.
        self._untold: list[FinishEvent] = []
        self.bounds = StepBounds()
        self._num_arrivals = 0
        self.num_computed_tokens = 0
        # Rows whose logits held no number.
        self.num_invalid_logits = 0
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
                self._untold.append(event)
        refusal = self._gate.enter(sequence, self._kv_policy.num_overrun_blocks)
        if refusal is None:
            sequence.length_limit = min(
                sequence.num_prompt_tokens + sequence.stopping.max_tokens, self.limits.context_length
            )
            self._num_arrivals += 1
            sequence.arrival = self._num_arrivals
            self._queues.waiting[sequence] = None
            self.num_held_changes += 1
        return refusal

    def drain(self) -> None:
        """Refuses every further offer; what is held goes on."""
        self._gate.close()

    # A step.

    def schedule(self, max_prefill_tokens: int | None = None) -> StepPlan:
        """Plans a step: running decodes, then prefills in progress, then boarding. Who was preempted and has waited too
        long for that is handed back.

        Prompts get at most `max_prefill_tokens` of it, if that is given. Without work the plan has no rows; such a plan
        is not in flight, and there is nothing to update.
        """
        if len(self._plans) == 2:
            raise RuntimeError("two plans are in flight: a third would write to rows and blocks that they read")
        draft = StepDraft(self.limits, self.pool, max_prefill_tokens)
        for sequence in self._kv_policy.overdue():
            self._untold.append(self._finish(sequence, FinishReason.PREEMPTED))
        if not self._boarding.decodes_give_way():
            draft.add_decodes(self._kv_policy.decodes(draft))
        for sequence in self._queues.prefills:
            draft.add_prefill(sequence)
        return self._launch(draft, self._boarding.board(draft))

    def update(self, result: StepResult) -> StepOutcome:
        """Retires the oldest plan: appends the sampled tokens, publishes full blocks, decides who gets off.

        A row without a number to choose from ends its sequence, and the others go on.
        """
        plan = self._land(result.plan)
        result.keep_logprobs()
        for restored in plan.restored:
            self.prefix_cache.publish_restored(restored)
        num_sampling = sum(plan.samples)
        assert len(result.sampled_ids) == num_sampling, f"{len(result.sampled_ids)} tokens for {num_sampling} rows"
        sampled_ids = iter(result.sampled_ids)
        tokens, finished = NewTokens(), list(self.take_finished())
        block_size, leaving = self.pool.block_size, self._queues.leaving
        for sequence, start, length, samples in zip(
            plan.sequences, plan.starts, plan.lengths, plan.samples, strict=True
        ):
            token_id = next(sampled_ids) if samples else None
            sequence.num_in_flight -= 1
            sequence.num_pending -= samples
            if sequence in leaving:
                finished.extend(self._let_go(sequence))
                continue
            end = start + length
            if token_id is None and samples:
                finished.append(self._end_without_token(sequence))
                continue
            if (length > 1 or end % block_size == 0) and (error := self._publish(sequence, start, end)):
                finished.append(self._finish(sequence, FinishReason.ERROR, error=error))
                continue
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
        """Retires the oldest plan, whose step failed: every sequence that it touched ends, with or without a row, and
        what it wrote is not published."""
        self._land(plan)
        finished = list(self.take_finished())
        for sequence, samples in zip(plan.sequences, plan.samples, strict=True):
            sequence.num_in_flight -= 1
            sequence.num_pending -= samples
            if sequence in self._queues.leaving:
                finished.extend(self._let_go(sequence))
        finished.extend(self._end_touched(plan, error))
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
        """The ends that no call has returned yet: those of superseded attempts and of who is handed back."""
        finished = tuple(self._untold)
        self._untold.clear()
        return finished

    # How it stands.

    @property
    def num_running(self) -> int:
        """Sequences on a seat; one whose last token is on its way counts until somebody has its seat."""
        return min(self._queues.num_boarded, self.limits.max_num_sequences)

    @property
    def num_waiting(self) -> int:
        """Sequences accepted that have had no seat yet."""
        return len(self._queues.waiting)

    @property
    def num_preempted(self) -> int:
        """Sequences that gave up their seat and wait to board again."""
        return len(self._queues.preempted)

    @property
    def num_held(self) -> int:
        """Sequences that are owed an end."""
        return sum(1 for _ in self.held())

    @property
    def is_idle(self) -> bool:
        """Whether nothing is held and nothing in flight."""
        return self._queues.is_empty

    @property
    def is_draining(self) -> bool:
        """Whether every offer is refused."""
        return self._gate.is_closed

    @property
    def waiting_prefill_tokens(self) -> int:
        """Tokens to compute until everyone held decodes."""
        queues = self._queues
        return sum(s.num_tokens - s.num_computed for s in chain(queues.prefills, queues.preempted, queues.waiting))

    @property
    def budget_blocks(self) -> int:
        """Blocks that can be promised, those included that are."""
        return self._kv_policy.budget_blocks(self._gate.num_reserved_blocks)

    def kv_counts(self) -> KvCounts:
        """The blocks, and what came of looking for prefixes."""
        return KvCounts.of(
            self.pool, self.prefix_cache, self._gate.num_reserved_blocks, self._kv_policy.num_used_host_blocks
        )

    @property
    def reserve_quantile(self) -> float:
        """How likely output should be to stay within what is reserved for it; 1 reserves to the end."""
        return 1.0 if self._reserve is None else self._reserve.quantile

    @property
    def num_preemptions(self) -> int:
        """Preemptions since the start."""
        return self._kv_policy.num_preemptions

    @property
    def num_recomputed_tokens(self) -> int:
        """Tokens computed once more because a sequence was preempted, since the start."""
        return self._kv_policy.num_recomputed_tokens

    @property
    def num_used_host_blocks(self) -> int:
        """Host blocks that preempted sequences are kept in."""
        return self._kv_policy.num_used_host_blocks

    @property
    def has_prefill(self) -> bool:
        """Whether anybody has still to be computed up to its first token."""
        return bool(self._queues.prefills or self._queues.waiting or self._queues.preempted)

    def prefill_demand(self) -> PrefillDemand:
        """Who waits to be computed, beside whom."""
        queues = self._queues
        num_free_seats = self.limits.max_num_sequences - queues.num_seated
        first = next(iter(queues.prefills), None)
        return PrefillDemand(
            num_decodes=len(queues.decodes),
            decode_context=sum(sequence.num_computed for sequence in queues.decodes),
            num_behind=len(queues.prefills) + min(len(queues.waiting) + len(queues.preempted), num_free_seats),
            position=first.num_computed if first is not None else 0,
        )

    def held(self) -> Iterator[Sequence]:
        """Everyone who has boarded, then everyone waiting. Who has been told its end is held no more."""
        queues = self._queues
        cancelled = (sequence for sequence, reason in queues.leaving.items() if reason is not None)
        return chain(queues.boarded(), cancelled, queues.preempted, queues.waiting)

    def check(self) -> None:
        """Asserts that the blocks in use are exactly those of who boarded and was not released. Costs time per
        block."""
        boarded = chain(self._queues.boarded(), self._queues.leaving)
        self.pool.check(sequence.block_table for sequence in boarded)
        self._queues.check()
        self._kv_policy.check()

    def check_when_idle(self) -> None:
        """Asserts that an idle scheduler has every block back; does nothing while it is not idle."""
        if self.is_idle:
            self.check()

    # Launching.

    def _launch(self, draft: StepDraft, constraint: StepConstraint) -> StepPlan:
        """From here on the plan is in flight, and who has its last token in it needs no seat any more."""
        queues = self._queues
        for sequence in draft.prompts_done:
            del queues.prefills[sequence]
            queues.decodes[sequence] = None
        for sequence in draft.ending:
            del queues.decodes[sequence]
            queues.ending[sequence] = None
        plan = draft.finish(constraint)
        for sequence, error in draft.broken.items():
            self._untold.append(self._finish(sequence, FinishReason.ERROR, error=error))
        if not plan.sequences:
            # Without rows there is no step, and nothing that it was to change would reach the device.
            self._untold.extend(self._end_touched(plan, "the step that it was planned for has no rows"))
            return plan
        self._plans.append(plan)
        self._count(draft.num_tokens, plan)
        return plan

    def _count(self, num_tokens: int, plan: StepPlan) -> None:
        self.bounds.note(plan.constraint)
        self.prefix_cache.count(plan.boarded)
        self.num_computed_tokens += num_tokens
        if self._reserve is not None:
            self._reserve.observe(self.num_computed_tokens, self._kv_policy.num_recomputed_tokens)

    # Retiring.

    def _land(self, plan: StepPlan) -> StepPlan:
        if not self._plans or plan is not self._plans[0]:
            raise RuntimeError("only the oldest plan in flight can be retired")
        return self._plans.popleft()

    def _publish(self, sequence: Sequence, start: int, end: int) -> str | None:
        """Lets others find the blocks that computing `[start, end)` has filled. Returns an error if those are not the
        sequence's."""
        try:
            self.prefix_cache.publish(sequence, start, end)
        except BlockError as error:
            return str(error)
        self._pending_prefixes.publish(sequence, start, end)
        return None

    def _end_touched(self, plan: StepPlan, error: str) -> Iterator[FinishEvent]:
        """Ends those whose part of the plan did not take effect, if they have not ended before."""
        for sequence in plan.touched:
            if self._gate.find(sequence.request_id) is sequence:
                yield self._finish(sequence, FinishReason.ERROR, error=error)

    def _end_without_token(self, sequence: Sequence) -> FinishEvent:
        """Ends a sequence whose logits held no number. The KV that they come from is no good for others either."""
        self.num_invalid_logits += 1
        self.prefix_cache.retract(sequence)
        return self._finish(sequence, FinishReason.ERROR, error=INVALID_LOGITS)

    def _end_after(self, sequence: Sequence, token_id: int) -> Iterator[FinishEvent]:
        """Ends the sequence if this token, its newest, is its last."""
        stopping = sequence.stopping
        # The token itself does not count towards min_tokens.
        if token_id in stopping.stop_token_ids and sequence.num_output_tokens > stopping.min_tokens:
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
        self._queues.leave(sequence, reason)
        self._pending_prefixes.forget(sequence)
        self._gate.leave(sequence)

    def _let_go(self, sequence: Sequence) -> Iterator[FinishEvent]:
        """A step that someone leaving was in has retired: if it was the last, nothing holds its blocks any more."""
        if sequence.num_in_flight > 0:
            return
        reason = self._queues.leaving[sequence]
        self._release(sequence)
        if reason is not None:
            self.num_held_changes += 1
            yield FinishEvent(sequence, reason)

    def _release(self, sequence: Sequence) -> None:
        """The one way out: row of its seat and blocks are given back together. If one of the blocks is not its own to
        give back, all of them stay taken, which is safe, and the check of the idle scheduler says so."""
        del self._queues.leaving[sequence]
        self._queues.free_seat(sequence)
        try:
            self._kv_policy.release(sequence)
        except BlockError:
            sequence.block_table = []


def _kv_policy_for(
    limits: SchedulerLimits, pool: BlockPool, prefix_cache: PrefixCache, queues: SequenceQueues
) -> KvPolicy:
    if limits.is_overcommitted:
        return MaxUtilization(limits, pool, prefix_cache, queues)
    return GuaranteedNoEvict(pool, prefix_cache, queues)
