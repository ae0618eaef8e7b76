"""The in-flight scheduler: who boards, what each step computes, and when a sequence gets off. Pure.

One rule covers decode, chunked prefill, prefix hit and resume: a sequence's `num_computed` chases its `num_tokens`.

Invariants:
- The rows of a step stay within `max_num_tokens`, the sequences on a seat within `max_num_sequences`.
- An allocation cannot fail: the gate admits only reservations that last to the end and whose sum fits the pool, and
  nobody takes more blocks than it reserved. Hence whoever is accepted ends, whatever else happens.
- Each accepted sequence is released once and yields one `FinishEvent`.

For now `schedule()` and `update()` alternate strictly. Running a step ahead (plan N+1 before update N) changes two
things: `num_computed` and the output index must count the step in flight, and nobody may board on blocks that a
sequence in `_leaving` still holds: cancelled, it gives its reservation back at once but its blocks with the step.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from itertools import chain

from executor.admission import Gate, Refusal
from executor.blocks import BlockPool
from executor.limits import Batching, SchedulerLimits
from executor.prefix_cache import PrefixCache
from executor.sequence import (
    FinishEvent,
    FinishReason,
    PlanRow,
    Sequence,
    StepOutcome,
    StepPlan,
    StepResult,
    TokenEvent,
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
        # Both in order of arrival, because sequences board in that order.
        self._waiting: OrderedDict[Sequence, None] = OrderedDict()
        self._running: dict[Sequence, None] = {}
        self._plan_in_flight: StepPlan | None = None
        self._in_flight: frozenset[Sequence] = frozenset()
        # Cancelled while in flight: released when the step retires.
        self._leaving: dict[Sequence, FinishReason] = {}
        self._superseded: list[FinishEvent] = []
        self._decodes_gave_way = False

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
            self._waiting[sequence] = None
        return refusal

    def drain(self) -> None:
        """Refuses every further offer; what is held goes on."""
        self._gate.close()

    # A step.

    def schedule(self) -> StepPlan:
        """Plans a step: running decodes, then prefills in progress, then boarding.

        Without work the plan has no rows; such a plan is not in flight, and there is nothing to update.
        """
        assert self._plan_in_flight is None, "the last plan was not retired"
        draft = StepDraft(self.limits, self.pool)
        decodes, prefills = self._split_running()
        if not self._decodes_give_way(decodes, prefills):
            for sequence in decodes:
                draft.add_decode(sequence)
        for sequence in prefills:
            draft.add_prefill(sequence)
        self._board(draft)
        return self._launch(draft.finish())

    def update(self, result: StepResult) -> StepOutcome:
        """Retires the plan in flight: appends the sampled tokens, publishes full blocks, decides who gets off."""
        self._land(result.plan)
        num_sampling = sum(row.samples for row in result.plan.rows)
        assert len(result.sampled_ids) == num_sampling, f"{len(result.sampled_ids)} tokens for {num_sampling} rows"
        sampled_ids = iter(result.sampled_ids)
        tokens: list[TokenEvent] = []
        finished = list(self.take_finished())
        for row in result.plan.rows:
            token_id = next(sampled_ids) if row.samples else None
            self._advance(row)
            event: FinishEvent | None = None
            if row.sequence in self._leaving:
                event = self._release(row.sequence, self._leaving.pop(row.sequence))
            elif token_id is not None:
                row.sequence.token_ids.append(token_id)
                tokens.append(TokenEvent(row.sequence, row.output_index, token_id))
                event = self._end_after(row.sequence, token_id)
            if event is not None:
                finished.append(event)
        return StepOutcome(tuple(tokens), tuple(finished))

    def fail(self, plan: StepPlan, error: str) -> StepOutcome:
        """Retires a plan whose step failed: who was in it ends, and what it wrote is not published."""
        self._land(plan)
        finished = list(self.take_finished())
        for row in plan.rows:
            reason = self._leaving.pop(row.sequence, FinishReason.ERROR)
            text = error if reason is FinishReason.ERROR else ""
            finished.append(self._release(row.sequence, reason, error=text))
        return StepOutcome((), tuple(finished))

    # Leaving.

    def cancel(self, request_id: str, attempt: int, reason: FinishReason) -> FinishEvent | None:
        """Ends a sequence.

        None when this attempt is not held (any more), and when it is in flight: then its end comes out of the
        `update()` of that step, which yields no token for it.
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
        """Sequences on a seat."""
        return len(self._running)

    @property
    def num_waiting(self) -> int:
        """Sequences accepted that have no seat yet."""
        return len(self._waiting)

    @property
    def num_held(self) -> int:
        """Sequences on a seat or waiting for one."""
        return len(self._running) + len(self._waiting)

    @property
    def is_idle(self) -> bool:
        """Whether nothing is held."""
        return not self._running and not self._waiting

    @property
    def is_draining(self) -> bool:
        """Whether every offer is refused."""
        return self._gate.is_closed

    @property
    def waiting_prefill_tokens(self) -> int:
        """Tokens to compute until everyone held decodes."""
        behind = (sequence.num_tokens - sequence.num_computed for sequence in self.held())
        return sum(num_tokens for num_tokens in behind if num_tokens > 1)

    @property
    def budget_blocks(self) -> int:
        """Blocks that can be promised: all, less what running sequences use beyond their reservations."""
        overrun = sum(max(0, len(s.block_table) - s.num_reserved_blocks) for s in self._running)
        return self.pool.num_blocks - overrun

    def held(self) -> Iterator[Sequence]:
        """Everyone on a seat, then everyone waiting."""
        return chain(self._running, self._waiting)

    def check(self) -> None:
        """Asserts that the blocks in use are exactly those of the sequences on a seat. Costs time per block."""
        self.pool.check(sequence.block_table for sequence in self._running)

    def check_when_idle(self) -> None:
        """Asserts that an idle scheduler has every block back; does nothing while it is not idle."""
        if self.is_idle:
            self.check()

    # Planning.

    def _split_running(self) -> tuple[list[Sequence], list[Sequence]]:
        decodes: list[Sequence] = []
        prefills: list[Sequence] = []
        for sequence in self._running:
            is_decode = sequence.num_tokens - sequence.num_computed == 1
            (decodes if is_decode else prefills).append(sequence)
        return decodes, prefills

    def _decodes_give_way(self, decodes: list[Sequence], prefills: list[Sequence]) -> bool:
        """Whether the first prompt gets this step instead of the decodes.

        Only without chunks, where a long prompt would otherwise wait until enough decodes have ended; and at most
        every other step, so that the decodes go on.
        """
        self._decodes_gave_way = (
            not self.limits.enable_chunked_context
            and not self._decodes_gave_way
            and bool(decodes and prefills)
            and prefills[0].num_tokens - prefills[0].num_computed > self.limits.max_num_tokens - len(decodes)
        )
        return self._decodes_gave_way

    def _board(self, draft: StepDraft) -> None:
        """Seats who waits, in order of arrival.

        A static batch fills its seats at once, even if its prompts then take several steps. In flight, who would get
        no token now waits on: later it may find more of its prefix cached.
        """
        is_static = self.limits.batching is Batching.STATIC
        if is_static and self._running:
            return
        while self._waiting and len(self._running) < self.limits.max_num_sequences:
            if draft.is_full and not is_static:
                return
            sequence, _ = self._waiting.popitem(last=False)
            self._running[sequence] = None
            self._prefix_cache.attach(sequence)
            draft.board(sequence)
            draft.add_prefill(sequence)

    def _launch(self, plan: StepPlan) -> StepPlan:
        if plan.rows:
            self._plan_in_flight = plan
            self._in_flight = frozenset(row.sequence for row in plan.rows)
        return plan

    # Retiring.

    def _land(self, plan: StepPlan) -> None:
        assert plan is self._plan_in_flight, "only the plan in flight can be retired"
        self._plan_in_flight = None
        self._in_flight = frozenset()

    def _advance(self, row: PlanRow) -> None:
        row.sequence.num_computed = row.start + row.num_tokens
        self._prefix_cache.publish(row.sequence, row.start)

    def _end_after(self, sequence: Sequence, token_id: int) -> FinishEvent | None:
        """Ends the sequence if this token, its newest, is its last."""
        stopping = sequence.stopping
        num_output_tokens = sequence.num_output_tokens
        if token_id in stopping.stop_token_ids and num_output_tokens >= stopping.min_tokens:
            return self._release(sequence, FinishReason.STOP_TOKEN, stop_token_id=token_id)
        if num_output_tokens >= stopping.max_tokens or sequence.num_tokens >= self.limits.context_length:
            return self._release(sequence, FinishReason.LENGTH)
        return None

    def _end(self, sequence: Sequence, reason: FinishReason) -> FinishEvent | None:
        """Ends a sequence from outside: now, or when the step that it is in retires."""
        if sequence not in self._in_flight:
            return self._release(sequence, reason)
        self._gate.leave(sequence)
        self._leaving[sequence] = reason
        return None

    def _release(
        self, sequence: Sequence, reason: FinishReason, *, stop_token_id: int | None = None, error: str = ""
    ) -> FinishEvent:
        """The one way out: seat, promise and blocks are given back together."""
        assert sequence in self._running or sequence in self._waiting, f"{sequence.request_id} is released twice"
        self._running.pop(sequence, None)
        self._waiting.pop(sequence, None)
        self._gate.leave(sequence)
        self.pool.release(sequence.block_table)
        sequence.block_table = []
        sequence.num_computed = 0
        return FinishEvent(sequence, reason, stop_token_id, error)
