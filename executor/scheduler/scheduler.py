"""The in-flight scheduler. It decides which sequences board, what each step computes, and when a sequence ends. Pure.

One rule covers decode, chunked prefill, prefix hit and resume: the scheduler advances a sequence's `num_computed` until
it reaches `num_tokens`.

Invariants:
- The rows of a step stay within `max_num_tokens`, the sequences on a seat within `max_num_sequences`.
- Under guaranteed_no_evict an allocation cannot fail: the reservations of all sequences on seats fit the pool, where
  shared blocks count once, and no sequence takes more blocks than it reserved. One that needs more ends as preempted
  when its reservation is used up, and its router places it again. Under max_utilization every accepted sequence would
  fit alone, and some are preempted until the others fit. Under both policies every accepted sequence ends.
- Each accepted sequence is released once and yields one `FinishEvent`.
- A plan is a transaction. `update` commits it. `fail` ends every sequence that it touched, because the device's state
  of their rows, tables, parameters and KV is then unknown.

Running one step ahead. `schedule()` may be called while the previous plan is still in flight; `update()` retires the
oldest. Planning therefore counts planned work as done: `num_computed` includes the steps in flight, and `num_tokens`
includes the tokens that they will yield. An end that is known beforehand (max_tokens, the context's or reservation's
length) is planned for: a sequence whose last token is in flight is in no further step and has left its seat. An end
that is not known beforehand (a stop token, a cancel, a failed step) leaves at most one row in flight, whose token is
dropped. The sequence is then `leaving`. A sequence to be preempted is `pausing` until no step in flight has a row of
it:

| where        | has a seat | is in further steps | tokens count | blocks                                   |
| ------------ | ---------- | ------------------- | ------------ | ---------------------------------------- |
| `preparing`  | no         | no, until prepared  |              | none                                     |
| `waiting`    | no         | yes                 |              | none                                     |
| `preempted`  | no         | yes, or handed back |              | none, or a copy in host memory           |
| `prefills`   | yes        | yes                 | yes          | its own; some may come back from the host |
| `decodes`    | yes        | yes                 | yes          | its own                                  |
| `pausing`    | no         | no, unless resumed  | yes          | its own                                  |
| `ending`     | no         | no                  | yes          | its own                                  |
| `leaving`    | no         | no                  | no           | its own, until its last step retires     |

The reservation of a leaving sequence is given back at once, its blocks when its last step retires. Until then no
sequence boards on those blocks.

Drafts. A row may compute drafted tokens behind the known ones, and yields a token at each of its positions. Those up to
the first that is not equal to its draft count. While the step is in flight, `num_computed` and `num_tokens` include one
token of the row; `update` adds what was accepted. The KV of drafts that were not accepted is behind `num_computed`, in
blocks of the sequence, is not published, and is overwritten. See `inflight.executor.scheduler.drafting`.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace
from itertools import chain

from inflight.executor.pooling.pooled import PooledOutput
from inflight.executor.scheduler.admission import Gate, Refusal
from inflight.executor.scheduler.blocks import BlockError, BlockPool, HostBlocks, WindowPool
from inflight.executor.scheduler.drafting import Drafting
from inflight.executor.scheduler.kv_policy import GuaranteedNoEvict, KvPolicy
from inflight.executor.scheduler.limits import Batching, SchedulerLimits, SchedulerPolicy
from inflight.executor.scheduler.max_utilization import MaxUtilization, ReserveController
from inflight.executor.scheduler.plan_builder import PrefillOrder, StepBuilder
from inflight.executor.scheduler.prefix_cache import PendingPrefixes, PrefixCache
from inflight.executor.scheduler.queues import BatchShare, SequenceQueues
from inflight.executor.scheduler.seat_view import Seating
from inflight.executor.scheduler.sequence import (
    ALL_EXCLUDED,
    FinishEvent,
    FinishReason,
    NewTokens,
    Sequence,
    StepOutcome,
    StepPlan,
    StepResult,
    TokenLogprobs,
    accepted_ids,
)
from inflight.executor.scheduler.states import StatePool
from inflight.executor.scheduler.step_constraint import (
    CopyCost,
    DecodeLoad,
    DraftTerms,
    PrefillAllowance,
    StepBounds,
    StepConstraint,
    StepCost,
)
from inflight.executor.scheduler.step_record import KvCounts
from inflight.executor.speculation.counts import NO_DRAFT_COUNTS, DraftCounts


class Boarding:
    """Gives prompts their tokens and seats waiting sequences: first the preempted ones, then the others in boarding
    order. A sequence is skipped only while it waits for a prefix that another one is computing, or for rows of logits
    that its prompt log probabilities need."""

    def __init__(
        self, limits: SchedulerLimits, queues: SequenceQueues, kv_policy: KvPolicy, pending_prefixes: PendingPrefixes
    ) -> None:
        self._limits = limits
        self._is_static = limits.batching is Batching.STATIC
        self._queues = queues
        self._kv_policy = kv_policy
        self._pending_prefixes = pending_prefixes
        # Whether the newest step left out decodes, which gave way to a prompt or waited for the step before.
        self._has_left_out = False

    @property
    def must_take_all_decodes(self) -> bool:
        """Whether the next step must leave out no decode: the step before left out some, and the one after it is to
        give way to the first prompt."""
        return self._has_left_out and self._is_first_too_long()

    def decodes_give_way(self, has_waiting: bool) -> bool:
        """Decides whether the first prompt gets this step instead of the decodes.

        This happens only without chunked prefill, where a long prompt would otherwise wait until enough decodes have
        ended, and only if the step before left out no decode, so that none is left out twice in a row. `has_waiting`
        says whether some decodes are not to be in this step because they wait for the step in flight.
        """
        gives_way = not self._has_left_out and self._is_first_too_long()
        self._has_left_out = gives_way or has_waiting
        return gives_way

    def _is_first_too_long(self) -> bool:
        """Returns whether the first prompt does not fit beside the decodes."""
        first = next(iter(self._queues.prefills), None)
        num_decodes = len(self._queues.decodes)
        if self._limits.enable_chunked_context or first is None or not num_decodes:
            return False
        return first.num_uncomputed > self._limits.max_num_tokens - num_decodes

    def fill(self, builder: StepBuilder) -> StepConstraint:
        """Gives the prompts their tokens and seats the sequences that can board now. Returns the constraint that kept
        out the next one."""
        is_ordered_by_length = self._limits.enable_chunked_context and not self._is_static
        order = PrefillOrder(self._queues.prefills, may_pass=is_ordered_by_length)
        constraint = self._board(builder, order)
        order.compute(builder)
        if constraint in (StepConstraint.NO_WORK, StepConstraint.TWIN):
            return builder.closed_by if builder.is_cut else self._unless_full(constraint)
        return constraint

    def _board(self, builder: StepBuilder, order: PrefillOrder) -> StepConstraint:
        """Seats sequences in boarding order. A sequence that overtakes a seated prompt is inserted before it. The
        others get the tokens that the seated prompts leave.

        A static batch fills all its seats at once, even if its prompts then take several steps. With in-flight
        batching, a sequence that would get no token in this step keeps waiting: later it may find more of its prefix
        cached.
        """
        queues = self._queues
        if not (queues.waiting or queues.preempted):
            return StepConstraint.NO_WORK
        if self._is_static and (queues.num_seated or queues.leaving):
            return StepConstraint.STATIC_BATCH
        if queues.num_seated >= self._limits.max_num_sequences:
            return StepConstraint.SEATS
        end = StepConstraint.NO_WORK
        for sequence in queues.boarding_order():
            if queues.num_seated >= self._limits.max_num_sequences:
                return StepConstraint.SEATS
            if not order.is_passed_by(sequence, builder):
                order.compute(builder)
            if builder.is_full and not self._is_static:
                return builder.closed_by
            if not self._is_static and self._pending_prefixes.should_wait(sequence):
                end = StepConstraint.TWIN
                continue
            if not (self._is_static or (builder.may_score(sequence) and builder.may_join(sequence))):
                builder.is_cut = True
                continue
            if not self._kv_policy.take(sequence, builder):
                return StepConstraint.BLOCKS
            queues.seat(sequence)
            self._pending_prefixes.begin(sequence)
            builder.board(sequence)
            order.add(sequence, builder)
        return end

    def _unless_full(self, constraint: StepConstraint) -> StepConstraint:
        """Returns SEATS for a full batch. No sequence waits here then, but requests may wait in the routers' queue."""
        return StepConstraint.SEATS if self._queues.num_seated >= self._limits.max_num_sequences else constraint


# The errors of a sequence whose row has no logit above -inf: from the model, or after the request's bans.
INVALID_STATES = "the model returned hidden states that are not finite (NaN or infinite)"
INVALID_LOGITS = "the model returned no usable logits (NaN or -inf only)"
NOTHING_ALLOWED = "no token is allowed: constraint, allowed ids, bad words, n-grams and min_tokens exclude all of them"

__all__ = ["Batching", "Refusal", "Scheduler", "SchedulerLimits", "SchedulerPolicy"]


class Scheduler:
    """Turns offered sequences into step plans, and step results into tokens and finish events."""

    def __init__(self, limits: SchedulerLimits, pool: BlockPool, drafting: Drafting | None = None) -> None:
        self.limits = limits
        self._drafting = drafting
        self.pool = pool
        self._gate = Gate(
            num_blocks=pool.num_blocks,
            block_size=pool.block_size,
            max_accepted=limits.max_num_sequences + limits.num_standby_sequences,
            context_length=limits.context_length,
        )
        self.host = HostBlocks(limits.num_host_blocks)
        window = limits.kv_window
        self.windows: WindowPool | None = None
        if window is not None:
            self.windows = WindowPool(window.num_blocks, pool.block_size, window.num_tokens, window.max_sequences)
        self.states = None if limits.states is None else StatePool(limits.states, pool.block_size)
        self.prefix_cache = PrefixCache(pool, self.host, limits.enable_prefix_cache, self.windows, self.states)
        self._queues = queues = SequenceQueues(limits.num_seat_rows)
        self._kv_policy = kv_policy = _kv_policy_for(limits, pool, self.host, self.prefix_cache, queues)
        self._pending_prefixes = pending_prefixes = PendingPrefixes(
            pool, self.prefix_cache, limits.max_prefix_wait_steps
        )
        self._boarding = Boarding(limits, queues, kv_policy, pending_prefixes)
        self._batch_share = BatchShare(queues, is_static=limits.batching is Batching.STATIC)
        self.seating = Seating(queues, limits.max_num_sequences)
        self._reserve = ReserveController() if limits.is_overcommitted else None
        self._plans: deque[StepPlan] = deque()
        # Finish events that no call has returned yet.
        self._unreturned: list[FinishEvent] = []
        self.bounds = StepBounds()
        self._num_arrivals = 0
        self.num_computed_tokens = 0
        # Rows without a usable logit.
        self.num_invalid_logits = 0

    # Admission.

    def offer(self, sequence: Sequence) -> Refusal | None:
        """Accepts the sequence, or returns the reason of the refusal.

        A newer attempt ends an older one that is held, even when it is refused itself: the routers have given the older
        one up. `take_finished()` or the next `update()` returns that end.
        """
        assert not sequence.block_table, f"{sequence.request_id} was offered before"
        if self._gate.is_stale(sequence):
            return Refusal.STALE_ATTEMPT
        older = self._gate.find(sequence.request_id)
        if older is not None:
            event = self._end(older, FinishReason.CANCELLED)
            if event is not None:
                self._unreturned.append(event)
        policy = self._kv_policy
        refusal = self._gate.enter(sequence, policy.num_overrun_blocks, policy.num_saved_blocks)
        if refusal is None:
            sequence.length_limit = self._gate.max_total_tokens(sequence)
            if not self.limits.is_overcommitted:
                num_reserved_tokens = sequence.num_reserved_blocks * self.pool.block_size
                sequence.length_limit = min(sequence.length_limit, num_reserved_tokens)
            self._num_arrivals += 1
            sequence.arrival = self._num_arrivals
            self._queues.accept(sequence)
        return refusal

    def mark_prepared(self, sequence: Sequence, error: str = "") -> FinishEvent | None:
        """Makes a sequence eligible to board that was offered before its grammar was compiled. It keeps its place in
        the order of arrival. With an error it ends instead. A sequence that has ended meanwhile is ignored."""
        if sequence not in self._queues.preparing:
            return None
        if error:
            return self._finish(sequence, FinishReason.ERROR, error=error)
        assert sequence.is_ready, f"{sequence.request_id} has no compiled grammar"
        self._queues.mark_prepared(sequence)
        return None

    def drain(self) -> None:
        """Refuses every further offer. Accepted sequences go on."""
        self._gate.close()

    # Steps.

    def schedule(
        self,
        allowance: PrefillAllowance | None = None,
        terms: DraftTerms | None = None,
        copy_cost: CopyCost | None = None,
        step_cost: StepCost | None = None,
    ) -> StepPlan:
        """Plans a step: running decodes, then prefills in progress and boarding, in the order of `PrefillOrder`.
        Sequences that have been preempted for too long are handed back.

        `allowance` bounds the prompt tokens of the step; None means no bound. Without `terms` no tokens are drafted.
        `copy_cost` decides whether prefixes are copied back from host memory or computed; without it they are copied.
        `step_cost` bounds class batch (`BatchShare`); without it nothing does.
        Without work, or while all sequences wait for the steps in flight, the plan has no rows. Such a plan is not in
        flight and must not be passed to `update()`.
        """
        if len(self._plans) == 2:
            raise RuntimeError("two plans are in flight: a third would write to rows and blocks that they read")
        is_bounded = step_cost is not None and self.bounds_batch
        if terms is not None and is_bounded:
            terms = replace(terms, drafts_batch=False)
        waiting: Collection[Sequence] = ()
        if terms is not None and self._drafting is not None and self._plans:
            waiting = self._drafting.waiting(self._queues.decodes, self._plans, terms)
            if waiting and self._should_wait(len(waiting), self._drafting.num_ahead_per_waiting):
                return StepPlan.of(())
        left_out: Collection[Sequence] = ()
        batch: PrefillAllowance | None = None
        if step_cost is not None and is_bounded:
            left_out, batch = self._batch_share.begin(step_cost, self.pool.block_size)
        self.host.begin_plan()
        builder = StepBuilder(self.limits, self.pool, allowance, copy_cost, self.windows, batch)
        for sequence in self._kv_policy.overdue():
            self._unreturned.append(self._finish(sequence, FinishReason.PREEMPTED))
        if not self._boarding.decodes_give_way(bool(waiting)):
            decodes = self._kv_policy.decodes(builder)
            is_all = not (waiting or left_out)
            builder.add_decodes(decodes if is_all else [s for s in decodes if s not in waiting and s not in left_out])
        constraint = self._boarding.fill(builder)
        self._batch_share.end()
        if terms is not None and self._drafting is not None:
            self._drafting.add_drafts(builder, self._kv_policy.num_draft_blocks, self.pool.block_size, terms)
        return self._launch(builder, constraint)

    def _should_wait(self, num_waiting: int, num_ahead_per_waiting: int) -> bool:
        """Returns whether the whole step should wait with the decodes that wait for the steps in flight, because few
        other sequences could go ahead. It always waits if blocks are scarce: otherwise those others might all be
        preempted, and the step would have no rows. It also waits if it must take all decodes."""
        if self._kv_policy.is_scarce or self._boarding.must_take_all_decodes:
            return True
        num_ahead = self._queues.num_seated - num_waiting
        return num_ahead <= num_ahead_per_waiting * num_waiting

    def update(self, result: StepResult) -> StepOutcome:
        """Retires the oldest plan: appends the sampled tokens, publishes full blocks and ends sequences.

        A row without a token ends its own sequence only.
        """
        plan = self._take_oldest_plan(result.plan)
        leaving = self._queues.leaving
        result.keep_prompt_logprobs(leaving)
        result.keep_pooled(leaving)
        scored = tuple(rows for rows in plan.scored if rows.sequence not in leaving)
        self._publish_restored(plan)
        self.prefix_cache.keep_states(plan, leaving)
        assert len(result.sampled_ids) == plan.num_sampled, f"{len(result.sampled_ids)} ids for {plan.num_sampled}"
        tokens, finished = NewTokens(), list(self.take_finished())
        has_drafts = bool(plan.drafts) or (self._drafting is not None and self._drafting.has_drafts)
        is_plain = not (has_drafts or result.logprobs)
        num_read = 0
        for row, (sequence, start, length, samples) in enumerate(
            zip(plan.sequences, plan.starts, plan.lengths, plan.samples, strict=True)
        ):
            drafts = plan.drafts.get(row, ()) if plan.drafts else ()
            first_read, num_read = num_read, num_read + samples + len(drafts)
            sequence.num_in_flight -= 1
            sequence.num_pending -= samples
            if sequence in leaving:
                finished.extend(self._release_leaving(sequence))
                continue
            end = start + length - len(drafts)
            if not samples:
                if error := self._publish(sequence, start, end):
                    finished.append(self._finish(sequence, FinishReason.ERROR, error=error))
                elif sequence.pooled is not None and end == sequence.num_prompt_tokens:
                    finished.append(self._end_pooled(sequence, sequence.pooled))
                self.prefix_cache.pass_window(sequence, end)
                continue
            if is_plain:
                event = self._append(sequence, start, end, result.sampled_ids[first_read], None, tokens)
            else:
                event = self._append_verified(sequence, start, end, drafts, result, first_read, tokens)
            if event:
                finished.append(event)
            if self.windows is not None:
                self.prefix_cache.pass_window(sequence, end)
        self._gate.observe_saved(self._kv_policy.num_saved_blocks)
        return StepOutcome(tokens, tuple(finished), scored)

    def fail(self, plan: StepPlan, error: str) -> StepOutcome:
        """Retires the oldest plan, whose step failed. Every sequence that the plan touched ends, with or without a row,
        and what the step wrote is not published. So do sequences that get blocks back which the step was to copy to
        host memory."""
        self._take_oldest_plan(plan)
        self.prefix_cache.drop_states(plan)
        finished = list(self.take_finished())
        for sequence, samples in zip(plan.sequences, plan.samples, strict=True):
            sequence.num_in_flight -= 1
            sequence.num_pending -= samples
            if sequence in self._queues.leaving:
                finished.extend(self._release_leaving(sequence))
        finished.extend(self._end_touched(plan.touched, error))
        finished.extend(self._end_touched(self._readers_of(plan.stored), error))
        return StepOutcome(NewTokens(), tuple(finished))

    # Ending.

    def cancel(self, request_id: str, attempt: int, reason: FinishReason) -> FinishEvent | None:
        """Ends a sequence.

        Returns None when this attempt is not held, and when it is in flight. In the second case the `update()` of its
        last step returns the end, and no step in flight yields a token for it.
        """
        sequence = self._gate.find(request_id)
        if sequence is None or sequence.attempt != attempt:
            return None
        return self._end(sequence, reason)

    def giving_way(self) -> list[Sequence]:
        """Returns the sequences of class batch on seats that sequences of other classes wait for: the newest, one for
        each seat that is missing. The ledger places such a request beyond the seats, and it is not to wait for the end
        of a batch's. A static batch runs to its end, and so does a sequence that was placed often."""
        queues = self._queues
        unseated = chain(queues.waiting, queues.preparing, queues.preempted)
        num_missing = sum(not sequence.is_batch for sequence in unseated)
        num_missing -= self.limits.max_num_sequences - queues.num_seated - len(queues.pausing)
        if num_missing <= 0 or self.limits.batching is Batching.STATIC:
            return []
        seated = (one for one in chain(queues.decodes, queues.prefills) if one.gives_way)
        return sorted(seated, key=lambda one: one.arrival, reverse=True)[:num_missing]

    def take_finished(self) -> tuple[FinishEvent, ...]:
        """Returns the ends that no call has returned yet: those of superseded attempts and of handed-back sequences."""
        finished = tuple(self._unreturned)
        self._unreturned.clear()
        return finished

    # State.

    @property
    def num_running(self) -> int:
        """Sequences on a seat. One whose last token is in flight counts until another sequence has its seat."""
        return min(self._queues.num_boarded, self.limits.max_num_sequences)

    @property
    def num_waiting(self) -> int:
        """Accepted sequences that have had no seat yet."""
        return len(self._queues.waiting) + len(self._queues.preparing)

    @property
    def num_preempted(self) -> int:
        """Sequences that lost their seat and wait to board again."""
        return len(self._queues.preempted)

    @property
    def num_held(self) -> int:
        """Accepted sequences whose end has not been returned."""
        return sum(1 for _ in self.held())

    @property
    def is_idle(self) -> bool:
        """Whether no sequence is held and no step is in flight."""
        return self._queues.is_empty

    @property
    def can_run(self) -> bool:
        """Whether there is anything to do before the next command: a sequence that runs or may board."""
        return self._queues.can_run

    @property
    def is_draining(self) -> bool:
        return self._gate.is_closed

    @property
    def waiting_prefill_tokens(self) -> int:
        """Tokens to compute until every held sequence decodes."""
        queues = self._queues
        return queues.num_unseated_tokens + sum(s.num_uncomputed for s in queues.prefills)

    @property
    def budget_blocks(self) -> int:
        """Blocks that routers may reserve in all, including those reserved now."""
        return self._kv_policy.budget_blocks(self._gate.num_reserved_blocks)

    @property
    def num_saved_blocks(self) -> int:
        """Blocks that routers may reserve beyond `budget_blocks`, because sequences share so many."""
        return self._kv_policy.num_saved_blocks

    @property
    def drafts(self) -> bool:
        """Whether it plans drafted tokens (speculative decoding)."""
        return self._drafting is not None

    @property
    def draft_counts(self) -> DraftCounts:
        """Drafted tokens that were verified and accepted since the start."""
        return NO_DRAFT_COUNTS if self._drafting is None else self._drafting.tally.counts

    def kv_counts(self) -> KvCounts:
        counts = KvCounts.of(self.pool, self.host, self.prefix_cache, self._gate.num_reserved_blocks, self.windows)
        return counts if self.states is None else counts._replace(states=self.states.counts())

    @property
    def reserve_quantile(self) -> float:
        """Likelihood with which output should stay within its reservation; 1 reserves to the end."""
        return 1.0 if self._reserve is None else self._reserve.quantile

    @property
    def num_preemptions(self) -> int:
        """Preemptions since the start."""
        return self._kv_policy.num_preemptions

    @property
    def num_recomputed_tokens(self) -> int:
        """Tokens computed again because of preemption, since the start."""
        return self._kv_policy.num_recomputed_tokens

    @property
    def num_used_host_blocks(self) -> int:
        """Host blocks that hold KV of preempted sequences."""
        return self.host.num_in_copies

    @property
    def has_prefill(self) -> bool:
        """Whether any sequence still has to be computed up to its first token."""
        return bool(self._queues.prefills or self._queues.waiting or self._queues.preempted)

    @property
    def bounds_batch(self) -> bool:
        """Whether class batch is bounded in the next step."""
        return self._batch_share.is_shared or self._batch_share.expects_others

    @property
    def may_run_ahead(self) -> bool:
        """Whether the next step may be planned before the newest one has retired. It may not where class batch is alone
        and others are expected: one that comes would wait for the end of both."""
        return not self._batch_share.expects_others

    def decode_load(self) -> DecodeLoad:
        """Returns the decodes of the next step, if it is shared without those of class batch."""
        if self._batch_share.is_shared:
            return self._batch_share.others_load()
        queues = self._queues
        num_decodes = len(queues.decodes)
        # Each decode reads the KV of its input token as well.
        return DecodeLoad(num_decodes, queues.decode_context + num_decodes, queues.smallest_target_ms)

    def held(self) -> Iterator[Sequence]:
        """Yields the sequences that have boarded, then those that wait. A sequence whose end has been returned is not
        held."""
        queues = self._queues
        cancelled = (sequence for sequence, reason in queues.leaving.items() if reason is not None)
        return chain(queues.boarded(), cancelled, queues.preempted, queues.waiting, queues.preparing)

    def check(self) -> None:
        """Asserts that exactly the blocks of sequences that boarded and were not released are in use. The cost grows
        with the number of blocks."""
        boarded = [*self._queues.boarded(), *self._queues.leaving]
        self.pool.check(sequence.block_table for sequence in boarded)
        if self.windows is not None:
            self.windows.check(s.window_table for s in boarded if s.window_table is not None)
        copies = [one.host_copy for one in self._queues.preempted if one.host_copy is not None]
        if self.states is not None:
            host_slots = [copy.host_slot for copy in copies if copy.host_slot is not None]
            self.states.check(boarded, chain.from_iterable(plan.state_saves for plan in self._plans), host_slots)
        self._queues.check()
        held = (sequence.host_prefix for sequence in boarded)
        self.host.check(
            [copy.host_blocks for copy in copies],
            [prefix.host_blocks for prefix in held if prefix is not None],
        )

    def check_when_idle(self) -> None:
        """Asserts that every block is free or cached once the scheduler is idle. Does nothing while it is not idle."""
        if self.is_idle:
            self.check()

    # Launching.

    def _launch(self, builder: StepBuilder, constraint: StepConstraint) -> StepPlan:
        """Finishes the plan and puts it in flight. Sequences whose last token is in it leave their seats."""
        self._queues.launch(builder)
        self.prefix_cache.store_evicted(builder)
        self.prefix_cache.plan_states(builder)
        plan = builder.finish(constraint)
        for restored in plan.restored:
            self.prefix_cache.planned(restored)
        for sequence, error in builder.broken.items():
            self._unreturned.append(self._finish(sequence, FinishReason.ERROR, error=error))
        if not plan.sequences:
            # A plan without rows is not launched, so none of its changes would reach the device.
            self.host.forget(plan.stored)
            self._unreturned.extend(self._end_touched(plan.touched, "the step that it was planned for has no rows"))
            return plan
        self._plans.append(plan)
        self._count(builder.num_tokens, plan)
        return plan

    def _count(self, num_tokens: int, plan: StepPlan) -> None:
        self.bounds.count(plan.constraint)
        self.prefix_cache.count(plan.boarded)
        self.num_computed_tokens += num_tokens
        if self._reserve is not None:
            self._reserve.observe(self.num_computed_tokens, self._kv_policy.num_recomputed_tokens)

    # Retiring.

    def _take_oldest_plan(self, plan: StepPlan) -> StepPlan:
        if not self._plans or plan is not self._plans[0]:
            raise RuntimeError("only the oldest plan in flight can be retired")
        return self._plans.popleft()

    def _publish(self, sequence: Sequence, start: int, end: int) -> str | None:
        """Makes the blocks that computing `[start, end)` has filled findable. Returns an error if they do not belong to
        the sequence."""
        try:
            self.prefix_cache.publish(sequence, start, end)
        except BlockError as error:
            return str(error)
        self._pending_prefixes.publish(sequence, start, end)
        return None

    def _publish_restored(self, plan: StepPlan) -> None:
        """Makes the blocks that came back from host memory findable, except those of sequences that have ended."""
        for restored in plan.restored:
            if restored.sequence not in self._queues.leaving:
                self.prefix_cache.publish_restored(restored)
                self._pending_prefixes.publish(restored.sequence, restored.start, restored.end)

    def _readers_of(self, stored: tuple[bytes, ...]) -> list[Sequence]:
        """Forgets these blocks in host memory, which were not copied. Returns the sequences that get them back."""
        host_blocks = set(self.host.forget(stored))
        if not host_blocks:
            return []
        lost = {block for plan in self._plans for host, block in plan.swaps_in if host in host_blocks}
        planned = (restored for plan in self._plans for restored in plan.restored)
        readers = [restored.sequence for restored in planned if not lost.isdisjoint(restored.blocks)]
        for sequence in self._queues.boarded():
            prefix = sequence.host_prefix
            if prefix is not None and not host_blocks.isdisjoint(prefix.host_blocks):
                readers.append(sequence)
        return readers

    def _end_touched(self, touched: Iterable[Sequence], error: str) -> Iterator[FinishEvent]:
        """Ends the sequences whose part of a plan did not take effect and that have not ended before."""
        for sequence in touched:
            if self._gate.find(sequence.request_id) is sequence:
                yield self._finish(sequence, FinishReason.ERROR, error=error)

    def _append_verified(
        self,
        sequence: Sequence,
        start: int,
        end: int,
        drafts: tuple[int, ...],
        result: StepResult,
        first_read: int,
        tokens: NewTokens,
    ) -> FinishEvent | None:
        """Appends the tokens that a row yields, whose sampled ids begin at `first_read`: the first after computing
        `[start, end)`, each further one after computing one position more. Returns the sequence's end if one of them
        is its last."""
        new_ids = accepted_ids(drafts, result.sampled_ids[first_read : first_read + 1 + len(drafts)])
        num_known = len(sequence.token_ids)
        if drafts and self._drafting is not None:
            self._drafting.tally.record(len(drafts), len(new_ids) - 1)
        for number, token_id in enumerate(new_ids):
            if number > 0:
                start, end = end, end + 1
                self._queues.advance(sequence)
            logprobs = result.logprobs.get(first_read + number)
            if event := self._append(sequence, start, end, token_id, logprobs, tokens):
                return event
        if self._drafting is not None:
            self._drafting.follow(sequence, sequence.token_ids[num_known:])
        return None

    def _append(
        self,
        sequence: Sequence,
        start: int,
        end: int,
        token_id: int | None,
        logprobs: TokenLogprobs | None,
        tokens: NewTokens,
    ) -> FinishEvent | None:
        """Appends a token that was sampled after computing `[start, end)`. Returns the sequence's end if it has one."""
        if token_id is None or token_id == ALL_EXCLUDED:
            return self._end_without_token(sequence, token_id)
        is_full = end - start > 1 or end % self.pool.block_size == 0
        if is_full and (error := self._publish(sequence, start, end)):
            return self._finish(sequence, FinishReason.ERROR, error=error)
        offset = end - sequence.num_prompt_tokens
        if logprobs is not None:
            sequence.logprobs[offset] = logprobs
        sequence.token_ids.append(token_id)
        tokens.sequences.append(sequence)
        tokens.offsets.append(offset)
        tokens.token_ids.append(token_id)
        is_last = end + 1 == sequence.length_limit or token_id in sequence.stopping.stop_token_ids
        return self._end_after(sequence, token_id) if is_last else None

    def _end_pooled(self, sequence: Sequence, pooled: PooledOutput) -> FinishEvent:
        """Ends a sequence whose result is complete."""
        if pooled.is_finite:
            return self._finish(sequence, FinishReason.LENGTH)
        self.num_invalid_logits += 1
        self.prefix_cache.retract(sequence)
        return self._finish(sequence, FinishReason.ERROR, error=INVALID_STATES)

    def _end_without_token(self, sequence: Sequence, token_id: int | None) -> FinishEvent:
        """Ends a sequence that excludes every token, or has no usable logit. In that case its KV is withdrawn from the
        prefix cache, since it may be corrupt."""
        constraint = sequence.constraint
        if constraint is not None and (error := constraint.errors.get(sequence.num_output_tokens)):
            return self._finish(sequence, FinishReason.ERROR, error=error)
        if token_id == ALL_EXCLUDED:
            return self._finish(sequence, FinishReason.ERROR, error=NOTHING_ALLOWED)
        self.num_invalid_logits += 1
        self.prefix_cache.retract(sequence)
        return self._finish(sequence, FinishReason.ERROR, error=INVALID_LOGITS)

    def _end_after(self, sequence: Sequence, token_id: int) -> FinishEvent | None:
        """Ends the sequence if this token, its newest, is its last. The end of a constrained output comes before
        min_tokens where the grammar allows nothing else."""
        stopping, constraint = sequence.stopping, sequence.constraint
        is_complete = constraint is not None and token_id in constraint.eos_token_ids
        # The token itself does not count towards min_tokens.
        has_enough = sequence.num_output_tokens > stopping.min_tokens
        if is_complete or (token_id in stopping.stop_token_ids and has_enough):
            return self._finish(sequence, FinishReason.STOP_TOKEN, stop_token_id=token_id)
        if len(sequence.token_ids) == sequence.length_limit:
            is_whole = sequence.length_limit == self._gate.max_total_tokens(sequence)
            return self._finish(sequence, FinishReason.LENGTH if is_whole else FinishReason.PREEMPTED)
        return None

    def _end(self, sequence: Sequence, reason: FinishReason) -> FinishEvent | None:
        """Ends a sequence from outside: now, or when its last step in flight retires."""
        if sequence.num_in_flight == 0:
            return self._finish(sequence, reason)
        self._leave(sequence, reason)
        return None

    def _finish(
        self, sequence: Sequence, reason: FinishReason, *, stop_token_id: int | None = None, error: str = ""
    ) -> FinishEvent:
        """Makes the finish event. The sequence is released now, or when its last step in flight retires."""
        self._leave(sequence, None)
        if sequence.num_in_flight == 0:
            self._release(sequence)
        return FinishEvent.of(sequence, reason, stop_token_id, error)

    def _leave(self, sequence: Sequence, reason: FinishReason | None) -> None:
        """Takes the sequence off its seat and cancels its reservation."""
        self._queues.leave(sequence, reason)
        self._pending_prefixes.forget(sequence)
        self._gate.leave(sequence)
        if self._drafting is not None:
            self._drafting.forget(sequence)

    def _release_leaving(self, sequence: Sequence) -> Iterator[FinishEvent]:
        """Releases a leaving sequence once its last step has retired."""
        if sequence.num_in_flight > 0:
            return
        reason = self._queues.leaving[sequence]
        self._release(sequence)
        if reason is not None:
            yield FinishEvent.of(sequence, reason)

    def _release(self, sequence: Sequence) -> None:
        """Gives back the sequence's seat row and blocks; every sequence ends here. If a block is not its own, all its
        blocks stay allocated, which is safe, and the check of the idle scheduler fails."""
        del self._queues.leaving[sequence]
        self._queues.free_seat(sequence)
        try:
            self._kv_policy.release(sequence)
        except BlockError:
            sequence.block_table = []
            sequence.window_table = None


def _kv_policy_for(
    limits: SchedulerLimits, pool: BlockPool, host: HostBlocks, prefix_cache: PrefixCache, queues: SequenceQueues
) -> KvPolicy:
    if limits.is_overcommitted:
        return MaxUtilization(limits, pool, host, prefix_cache, queues)
    return GuaranteedNoEvict(pool, prefix_cache, queues)
