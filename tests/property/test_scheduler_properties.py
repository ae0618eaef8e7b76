"""What holds for the scheduler whatever is offered, cancelled, superseded or fails, and whenever.

The machine plays the engine with a `FakeDevice`, which asserts that every row reads the KV it should and writes only
blocks of its own. With overlap a second plan is made before the first is retired, and the device runs a plan at any
time in between. Next to it stands a model of the promises: who was accepted, what is reserved, who boards next.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from executor.blocks import BlockPool
from executor.scheduler import Batching, Refusal, Scheduler, SchedulerLimits
from executor.sequence import (
    FinishEvent,
    FinishReason,
    NewTokens,
    Sequence,
    StepOutcome,
    StepPlan,
    StepResult,
)
from tests.fake_device import FakeDevice, solo_output
from tests.property.scheduler_model import Expectation, Promises, limits_strategy, sequence_strategy

CANCEL_REASONS = (FinishReason.CANCELLED, FinishReason.DEADLINE, FinishReason.STOP_STRING)


@dataclass(slots=True)
class Launched:
    """A plan in flight, and what the device sampled if it has run it."""

    plan: StepPlan
    sampled_ids: tuple[int, ...] | None = None


class SchedulerMachine(RuleBasedStateMachine):
    """Offers, cancels, steps and device failures in any order."""

    @initialize(
        limits=limits_strategy(),
        num_tokens=st.integers(20, 120),
        block_size=st.integers(1, 4),
        overlap=st.booleans(),
        max_prefill_tokens=st.none() | st.integers(1, 6),
    )
    def build(
        self, limits: SchedulerLimits, num_tokens: int, block_size: int, overlap: bool, max_prefill_tokens: int | None
    ) -> None:
        self.most_plans = 2 if overlap else 1
        self.max_prefill_tokens = max_prefill_tokens
        self.limits = limits
        num_blocks = num_tokens // block_size
        self.pool = BlockPool(num_blocks, block_size)
        self.scheduler = Scheduler(limits, self.pool)
        self.device = FakeDevice(self.pool)
        max_held = limits.max_num_sequences + limits.num_standby_sequences
        self.promises = Promises(num_blocks, block_size, max_held, limits.context_length)
        self.expectations: dict[Sequence, Expectation] = {}
        self.launched: list[Launched] = []
        # Who decodes from then on.
        self.sampled: set[Sequence] = set()
        self.decodes_skipped: set[Sequence] = set()
        self.head_skipped: list[Sequence] = []
        self.num_offers = 0

    # Rules.

    @rule(choice=st.data(), count=st.integers(1, 4))
    def offer_new_requests(self, choice: st.DataObject, count: int) -> None:
        for _ in range(count):
            self.num_offers += 1
            request_id = f"r{self.num_offers}"
            self._offer(choice.draw(sequence_strategy(self.pool.block_size, request_id, 1)))

    @precondition(lambda self: self.promises.newest_attempt)
    @rule(choice=st.data(), newer=st.integers(-1, 2))
    def offer_another_attempt(self, choice: st.DataObject, newer: int) -> None:
        request_id, attempt = choice.draw(st.sampled_from(sorted(self.promises.newest_attempt.items())))
        self._offer(choice.draw(sequence_strategy(self.pool.block_size, request_id, attempt + newer)))

    @precondition(lambda self: self.promises.held)
    @rule(choice=st.data(), reason=st.sampled_from(CANCEL_REASONS))
    def cancel(self, choice: st.DataObject, reason: FinishReason) -> None:
        self._cancel(choice.draw(st.sampled_from(self.promises.held)), reason)

    @precondition(lambda self: self.promises.held)
    @rule(choice=st.data(), reason=st.sampled_from(CANCEL_REASONS), supersede=st.booleans(), spared=st.integers(0, 3))
    def end_in_flight(self, choice: st.DataObject, reason: FinishReason, supersede: bool, spared: int) -> None:
        if not self.launched:
            self._schedule()
        in_flight = [sequence for sequence in self.promises.held if self._is_in_flight(sequence)]
        for sequence in in_flight[:1]:
            if supersede:
                request_id, attempt = sequence.request_id, sequence.attempt
                self._offer(choice.draw(sequence_strategy(self.pool.block_size, request_id, attempt + 1)))
            else:
                self._cancel(sequence, reason)
        if not spared and self.launched:
            self._fail()

    @precondition(lambda self: self.promises.newest_attempt)
    @rule(choice=st.data(), older=st.integers(0, 1))
    def cancel_what_is_not_held(self, choice: st.DataObject, older: int) -> None:
        request_id, newest = choice.draw(st.sampled_from(sorted(self.promises.newest_attempt.items())))
        sequence = self.promises.find(request_id)
        if sequence is None or sequence.attempt != newest - older:
            assert self.scheduler.cancel(request_id, newest - older, FinishReason.CANCELLED) is None

    @precondition(lambda self: len(self.launched) < self.most_plans)
    @rule()
    def schedule(self) -> None:
        self._schedule()

    @precondition(lambda self: self.launched)
    @rule()
    def device_runs(self) -> None:
        self._run_device(len(self.launched))

    @precondition(lambda self: self.launched)
    @rule()
    def retire(self) -> None:
        self._retire()

    @precondition(lambda self: self.promises.held)
    @rule(num_steps=st.integers(1, 12))
    def run_whole_steps(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self._step()

    @precondition(lambda self: self.promises.held)
    @rule()
    def run_until_the_next_one_boards(self) -> None:
        num_waiting = self.scheduler.num_waiting
        while self.promises.held and self.scheduler.num_waiting >= num_waiting:
            self._step()

    @precondition(lambda self: self.num_offers > 20)
    @rule()
    def drain(self) -> None:
        self.scheduler.drain()
        self.promises.is_draining = True

    # Always.

    @invariant()
    def blocks_are_conserved_and_nobody_owns_anothers(self) -> None:
        self.scheduler.check()
        self.scheduler.check_when_idle()
        assert self.pool.num_free + self.pool.num_cached + self.pool.num_used == self.pool.num_blocks

    @invariant()
    def who_is_in_flight_keeps_its_seat_and_blocks(self) -> None:
        in_flight = {sequence for launched in self.launched for sequence in launched.plan.sequences}
        assert all(sequence.seat is not None and sequence.block_table for sequence in in_flight)
        assert len({sequence.seat for sequence in in_flight}) == len(in_flight)

    @invariant()
    def promises_are_kept(self) -> None:
        promises = self.promises
        assert sum(sequence.num_reserved_blocks for sequence in promises.held) <= self.pool.num_blocks
        assert len(promises.held) <= promises.max_held
        assert set(promises.held) <= set(self.scheduler.held())
        assert self.scheduler.num_running <= self.limits.max_num_sequences
        assert self.scheduler.budget_blocks == self.pool.num_blocks
        for sequence in self.scheduler.held():
            assert len(sequence.block_table) <= sequence.num_reserved_blocks

    def teardown(self) -> None:
        """Without further offers everyone ends: each step computes at least one token of somebody, none twice."""
        if not hasattr(self, "scheduler"):
            return
        most_steps = sum(s.num_prompt_tokens + s.stopping.max_tokens for s in self.scheduler.held()) + 1
        while not self.scheduler.is_idle:
            self._step()
            most_steps -= 1
            assert most_steps >= 0, "someone starves"
        self._receive(StepOutcome(NewTokens(), self.scheduler.take_finished()))
        assert not self.launched
        self.scheduler.check_when_idle()
        assert self.pool.num_used == 0
        assert all(expectation.finished for expectation in self.expectations.values())

    # How the rules do it.

    def _schedule(self) -> None:
        seated = [s for s in self.promises.held if s.seat is not None and s.num_tokens < s.length_limit]
        arrivals = [sequence for sequence in self.promises.held if sequence.seat is None]
        decodes = {sequence for sequence in seated if sequence in self.sampled}
        plan = self.scheduler.schedule(self.max_prefill_tokens)
        assert plan.rows or self.launched or not self.promises.held, "held sequences but nothing to do"
        assert not plan.rows or self.promises.held
        self._check_rows(plan)
        self._check_boarding(plan, arrivals, len(seated), decodes)
        self._check_decodes(plan, decodes)
        self._check_line_of_prefills(plan, seated, decodes)
        if plan.rows:
            self.launched.append(Launched(plan))
            self.sampled.update(row.sequence for row in plan.rows if row.samples)

    def _run_device(self, num_plans: int) -> None:
        for launched in self.launched[:num_plans]:
            if launched.sampled_ids is None:
                launched.sampled_ids = self.device.run(launched.plan)

    def _retire(self) -> None:
        self._run_device(1)
        launched = self.launched.pop(0)
        assert launched.sampled_ids is not None
        self._receive(self.scheduler.update(StepResult(launched.plan, launched.sampled_ids)))

    def _step(self) -> None:
        """A turn of the loop."""
        while len(self.launched) < self.most_plans:
            num_launched = len(self.launched)
            self._schedule()
            if len(self.launched) == num_launched:
                break
        if self.launched:
            self._retire()

    def _fail(self) -> None:
        plan = self.launched.pop(0).plan
        self.device.corrupt(plan)
        ended = {sequence for sequence in plan.sequences if not self.expectations[sequence].is_over}
        outcome = self.scheduler.fail(plan, "lost")
        assert ended <= {event.sequence for event in outcome.finished}
        self._receive(outcome)

    def _cancel(self, sequence: Sequence, reason: FinishReason) -> None:
        event = self.scheduler.cancel(sequence.request_id, sequence.attempt, reason)
        assert (event is None) == self._is_in_flight(sequence)
        self._expect_cancelled(sequence, reason)
        self._receive(StepOutcome(NewTokens(), (event,) if event else ()))

    def _offer(self, sequence: Sequence) -> None:
        expected = self.promises.answer(sequence)
        superseded = self.promises.find(sequence.request_id)
        received = sequence.token_ids[sequence.num_prompt_tokens :]
        assert self.scheduler.offer(sequence) is expected
        if expected is Refusal.STALE_ATTEMPT:
            return
        self.promises.newest_attempt[sequence.request_id] = sequence.attempt
        if superseded is not None:
            self._expect_cancelled(superseded, FinishReason.CANCELLED)
        if expected is None:
            output, reason = solo_output(sequence, self.limits.context_length)
            self.expectations[sequence] = Expectation(sequence, output, reason, received)
            self.promises.held.append(sequence)

    def _expect_cancelled(self, sequence: Sequence, reason: FinishReason) -> None:
        self.promises.held.remove(sequence)
        self.expectations[sequence].cancel_reason = reason

    def _is_in_flight(self, sequence: Sequence) -> bool:
        return any(sequence in launched.plan.sequences for launched in self.launched)

    def _check_rows(self, plan: StepPlan) -> None:
        is_alone = len(plan.rows) == 1 and not self.limits.enable_chunked_context
        assert plan.num_tokens <= self.limits.max_num_tokens or is_alone
        assert len({row.sequence for row in plan.rows}) == len(plan.rows) <= self.limits.max_num_sequences
        for row in plan.rows:
            sequence = row.sequence
            end = row.start + row.num_tokens
            assert row.num_tokens > 0
            assert end == sequence.num_computed < sequence.length_limit, "a step behind the last token"
            assert row.samples == (end == sequence.num_tokens - row.samples)
            assert row.samples or self.limits.enable_chunked_context
            assert row.carries == (row.start >= len(sequence.token_ids))
            assert len(sequence.block_table) == math.ceil(end / self.pool.block_size)

    def _check_boarding(
        self, plan: StepPlan, arrivals: list[Sequence], num_seated: int, decodes: set[Sequence]
    ) -> None:
        assert list(plan.boarded) == arrivals[: len(plan.boarded)], "boarding is not in order of arrival"
        num_free_seats = self.limits.max_num_sequences - num_seated
        most_boarding = min(len(arrivals), num_free_seats)
        in_flight = {sequence for launched in self.launched for sequence in launched.plan.sequences}
        has_leaving = not in_flight <= set(self.promises.held)
        if self.limits.batching is Batching.STATIC:
            expected = 0 if num_seated or has_leaving else most_boarding
            assert len(plan.boarded) == expected, "a static batch was not boarded as one"
            return
        rows = {row.sequence for row in plan.rows}
        without_row = [sequence for sequence in plan.boarded if sequence not in rows]
        # Without chunks the last one may find that it does not fit.
        assert without_row in ([], [] if self.limits.enable_chunked_context else list(plan.boarded[-1:]))
        if self._has_room(plan, decodes) and self.limits.enable_chunked_context and not has_leaving:
            assert len(plan.boarded) == most_boarding, "a seat and tokens were left unused"

    def _has_room(self, plan: StepPlan, decodes: set[Sequence]) -> bool:
        """Whether a prompt could have had more of this step."""
        num_left = self.limits.max_num_tokens - plan.num_tokens
        if self.max_prefill_tokens is not None:
            num_prefill = sum(row.num_tokens for row in plan.rows if row.sequence not in decodes)
            num_left = min(num_left, self.max_prefill_tokens - num_prefill)
        return num_left > 0

    def _check_decodes(self, plan: StepPlan, decodes: set[Sequence]) -> None:
        """Decodes are in every step; without chunks they may give way to a long prompt, but not twice in a row."""
        skipped = decodes - {row.sequence for row in plan.rows}
        assert not skipped or not self.limits.enable_chunked_context
        assert not skipped & self.decodes_skipped
        self.decodes_skipped = skipped

    def _check_line_of_prefills(self, plan: StepPlan, seated: list[Sequence], decodes: set[Sequence]) -> None:
        """Prompts are computed in order of boarding. The first that gets nothing does not fit, and not for long."""
        rows = {row.sequence for row in plan.rows}
        line = [sequence for sequence in (*seated, *plan.boarded) if sequence not in decodes]
        skipped = [sequence for sequence in line if sequence not in rows]
        assert line[len(line) - len(skipped) :] == skipped, "a prompt was overtaken"
        if self.limits.enable_chunked_context:
            assert not skipped or not self._has_room(plan, decodes)
            return
        for sequence in skipped[:1]:
            num_behind = sequence.num_tokens - sequence.num_computed
            assert plan.num_tokens + num_behind > self.limits.max_num_tokens, "a prompt that fits was left out"
        self.head_skipped = [*self.head_skipped, *skipped[:1]] if skipped[:1] == self.head_skipped[:1] else skipped[:1]
        assert len(self.head_skipped) <= 2, "the first prompt in line is kept waiting"

    def _receive(self, outcome: StepOutcome) -> None:
        for sequence, offset, token_id in outcome.tokens:
            self._receive_token(self.expectations[sequence], offset, token_id)
        for event in outcome.finished:
            self._finish(event)

    def _receive_token(self, expectation: Expectation, offset: int, token_id: int) -> None:
        assert expectation.cancel_reason is None, "a token of a cancelled sequence"
        assert expectation.finished is None, "a token after the end"
        assert offset == len(expectation.received)
        expectation.received.append(token_id)

    def _finish(self, event: FinishEvent) -> None:
        expectation = self.expectations[event.sequence]
        assert expectation.finished is None, "a second end"
        expectation.finished = event
        assert expectation.received == event.sequence.token_ids[event.sequence.num_prompt_tokens :]
        assert expectation.received == expectation.output[: len(expectation.received)], "not the output of a solo run"
        assert event.sequence.block_table == [] or self._is_in_flight(event.sequence)
        if expectation.cancel_reason is not None:
            assert event.reason is expectation.cancel_reason
            return
        self.promises.held.remove(event.sequence)
        if event.reason is FinishReason.ERROR:
            assert event.error == "lost"
            return
        assert (expectation.received, event.reason) == (expectation.output, expectation.reason)
        stopped = event.reason is FinishReason.STOP_TOKEN
        assert event.stop_token_id == (expectation.output[-1] if stopped else None)


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(max_examples=150, stateful_step_count=40, deadline=None)


@pytest.mark.parametrize("overlap", [False, True])
@settings(max_examples=60, deadline=None)
@given(limits=limits_strategy(), num_extra_blocks=st.integers(0, 30), choice=st.data())
def test_every_request_gets_its_solo_output_however_small_the_pool(
    overlap: bool, limits: SchedulerLimits, num_extra_blocks: int, choice: st.DataObject
) -> None:
    """Requests come back with a new attempt until they are taken, as routers do."""
    # Given a crowd, and a pool that just holds the largest of it.
    block_size = choice.draw(st.integers(1, 4))
    crowd = [choice.draw(sequence_strategy(block_size, f"r{i}", 1)) for i in range(choice.draw(st.integers(1, 12)))]
    waiting = [s for s in crowd if _is_valid(s, limits, block_size)]
    expected = {
        s.request_id: solo_output(_again(s, 1), limits.context_length) for s in waiting if s.cache_salt is not None
    }
    pool = BlockPool(max([1, *(s.num_reserved_blocks for s in waiting)]) + num_extra_blocks, block_size)
    scheduler, device = Scheduler(limits, pool), FakeDevice(pool)

    # When it is offered until everyone has been taken, and run until everyone has ended.
    ends: dict[str, tuple[list[int], FinishReason]] = {}
    most_steps = 2 * sum(s.num_prompt_tokens + s.stopping.max_tokens for s in waiting)
    launched: list[StepPlan] = []
    while waiting or not scheduler.is_idle:
        refused = [s for s in waiting if scheduler.offer(s) is not None]
        waiting = [_again(s, s.attempt + 1) for s in refused]
        plan = scheduler.schedule()
        scheduler.check()
        launched += [plan] if plan.rows else []
        if len(launched) > (1 if overlap and plan.rows else 0):
            result = StepResult(launched[0], device.run(launched.pop(0)))
            for event in scheduler.update(result).finished:
                sequence = event.sequence
                ends[sequence.request_id] = (sequence.token_ids[sequence.num_prompt_tokens :], event.reason)
        most_steps -= 1
        assert most_steps >= 0

    # Then each got what it would have got alone.
    assert {request_id: ends[request_id] for request_id in expected} == expected
    scheduler.check_when_idle()


def _again(sequence: Sequence, attempt: int) -> Sequence:
    return Sequence(
        request_id=sequence.request_id,
        attempt=attempt,
        token_ids=list(sequence.token_ids),
        num_prompt_tokens=sequence.num_prompt_tokens,
        sampling=sequence.sampling,
        stopping=sequence.stopping,
        num_reserved_blocks=sequence.num_reserved_blocks,
        cache_salt=sequence.cache_salt,
    )


def _is_valid(sequence: Sequence, limits: SchedulerLimits, block_size: int) -> bool:
    most_tokens = min(sequence.num_prompt_tokens + sequence.stopping.max_tokens, limits.context_length)
    return sequence.num_tokens < most_tokens and sequence.num_reserved_blocks * block_size >= most_tokens
