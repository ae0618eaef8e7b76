"""The scheduler as an engine drives it, in any order that Hypothesis generates."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from inflight.executor.scheduler.blocks import BlockPool
from inflight.executor.scheduler.queues import turn
from inflight.executor.scheduler.scheduler import INVALID_LOGITS, NOTHING_ALLOWED, Refusal, Scheduler, SchedulerLimits
from inflight.executor.scheduler.sequence import (
    FinishEvent,
    FinishReason,
    NewTokens,
    Sequence,
    StepOutcome,
    StepPlan,
    StepResult,
)
from inflight.executor.scheduler.step_constraint import CopyCost, PrefillAllowance, PrefillCost
from tests.property.scheduler_checks import OvercommittedChecks, ReservedChecks, Standing
from tests.property.scheduler_model import (
    STATES,
    WINDOWS,
    Expectation,
    Promises,
    limits_strategy,
    num_saved_by,
    sequence_strategy,
    with_states,
    with_window,
)
from tests.support.device.fake_device import FakeDevice, block_contents, logprobs_of, solo_output, token_logprobs
from tests.support.scheduler.drafting import CHEAP, PROPOSERS, AnyTokens, eager

CANCEL_REASONS = (FinishReason.CANCELLED, FinishReason.DEADLINE, FinishReason.STOP_STRING, FinishReason.PREEMPTED)


@dataclass(slots=True)
class Launched:
    """A plan in flight, and what the device sampled if it has run it."""

    plan: StepPlan
    sampled_ids: tuple[int | None, ...] | None = None


def check_scores(sequence: Sequence) -> None:
    """Asserts that each position of the prompt was scored at most once, in order."""
    scores, num_top = sequence.prompt_logprobs, sequence.num_prompt_logprobs
    assert not scores or num_top is not None
    prompt = sequence.token_ids[1 : sequence.num_prompt_tokens]
    assert scores == [token_logprobs(token_id, num_top or 0) for token_id in prompt[: len(scores)]]


class SchedulerMachine(RuleBasedStateMachine):
    """Offers, cancels, steps and device failures in any order."""

    @initialize(
        limits=limits_strategy(),
        num_tokens=st.integers(20, 120),
        block_size=st.integers(1, 4),
        overlap=st.booleans(),
        max_prefill_tokens=st.none() | st.integers(1, 6),
        drafts=st.none() | st.sampled_from(sorted(PROPOSERS)),
        num_ahead=st.sampled_from((0, 1, 8)),
        window_tokens=WINDOWS,
        states=STATES,
        copy_s=st.sampled_from((0.0, 1.0)),
        copy_cost=st.sampled_from((None, None, CopyCost(1.0, PrefillCost(1.5)), CopyCost(9.0, PrefillCost(1.0)))),
    )
    def build(
        self,
        limits: SchedulerLimits,
        num_tokens: int,
        block_size: int,
        overlap: bool,
        max_prefill_tokens: int | None,
        drafts: str | None,
        num_ahead: int,
        window_tokens: int | None,
        states: tuple[int, int, int] | None,
        copy_s: float,
        copy_cost: CopyCost | None,
    ) -> None:
        self.most_plans = 2 if overlap else 1
        self.max_prefill_tokens = max_prefill_tokens
        self.copy_s, self.copy_cost = copy_s, copy_cost
        self.limits = limits = with_states(with_window(limits, window_tokens, block_size), states, block_size)
        # Overcommitted, a pool that a few of them fill.
        num_blocks = (35 + num_tokens // 4 if limits.is_overcommitted else num_tokens) // block_size
        self.pool = BlockPool(num_blocks, block_size)
        self.scheduler = Scheduler(limits, self.pool, eager(PROPOSERS[drafts], num_ahead) if drafts else None)
        self.device = FakeDevice(self.pool, self.scheduler.windows, window_tokens or 0)
        max_held = limits.max_num_sequences + limits.num_standby_sequences
        self.promises = Promises(num_blocks, block_size, max_held, limits.context_length)
        self.expectations: dict[Sequence, Expectation] = {}
        self.launched: list[Launched] = []
        checks = OvercommittedChecks if limits.is_overcommitted else ReservedChecks
        self.checks = checks(limits, block_size, max_prefill_tokens)
        self.num_tokens_received = 0
        # Who decodes from then on.
        self.sampled: set[Sequence] = set()
        # Everyone who ever boarded, with a number that grows.
        self.boardings: dict[Sequence, int] = {}
        self.num_boardings = 0
        self.num_offers = 0
        # The content of each block that a sequence could have filled, by hash.
        self.contents: dict[bytes, list[int]] = {}

    # Rules.

    @rule(choice=st.data(), count=st.integers(1, 6))
    def offer_new_requests(self, choice: st.DataObject, count: int) -> None:
        for _ in range(count):
            self.num_offers += 1
            request_id = f"r{self.num_offers}"
            self._offer(choice.draw(self._sequences(request_id, 1)))

    @precondition(lambda self: self.promises.newest_attempt)
    @rule(choice=st.data(), newer=st.integers(-1, 2))
    def offer_another_attempt(self, choice: st.DataObject, newer: int) -> None:
        request_id, attempt = choice.draw(st.sampled_from(sorted(self.promises.newest_attempt.items())))
        self._offer(choice.draw(self._sequences(request_id, attempt + newer)))

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
                self._offer(choice.draw(self._sequences(request_id, attempt + 1)))
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

    @precondition(lambda self: self.launched)
    @rule(number=st.integers(0, 4))
    def one_row_has_no_number(self, number: int) -> None:
        self._run_device(1)
        launched = self.launched[0]
        assert launched.sampled_ids is not None
        launched.sampled_ids = tuple(
            None if row == number else token_id for row, token_id in enumerate(launched.sampled_ids)
        )
        self._retire()

    @precondition(lambda self: self.promises.held)
    @rule(num_steps=st.integers(1, 12) | st.integers(12, 40))
    def run_whole_steps(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self._step()

    @precondition(lambda self: self.promises.held and self.limits.is_overcommitted)
    @rule()
    def run_until_the_next_one_is_preempted(self) -> None:
        num_preemptions = self.scheduler.num_preemptions
        while self._has_ready and self.scheduler.num_preemptions == num_preemptions:
            self._step()

    @precondition(lambda self: self.scheduler.num_preempted)
    @rule(choice=st.data(), reason=st.sampled_from(CANCEL_REASONS))
    def cancel_while_preempted(self, choice: st.DataObject, reason: FinishReason) -> None:
        away = [sequence for sequence in self.promises.held if sequence.seat is None and sequence.num_preemptions]
        self._cancel(choice.draw(st.sampled_from(away)), reason)

    @precondition(lambda self: self.promises.held)
    @rule()
    def run_until_the_next_one_boards(self) -> None:
        num_waiting = self.scheduler.num_waiting
        while self._has_ready and self.scheduler.num_waiting >= num_waiting:
            self._step()

    @precondition(lambda self: self._unready())
    @rule(choice=st.data(), is_broken=st.booleans())
    def grammar_is_compiled(self, choice: st.DataObject, is_broken: bool) -> None:
        self._prepare(choice.draw(st.sampled_from(self._unready())), "lost" if is_broken else "")

    @precondition(lambda self: self.expectations)
    @rule(choice=st.data(), error=st.sampled_from(("", "lost")))
    def grammar_comes_too_late(self, choice: st.DataObject, error: str) -> None:
        sequence = choice.draw(st.sampled_from(list(self.expectations)))
        if sequence not in self._unready():
            assert self.scheduler.mark_prepared(sequence, error) is None

    @precondition(lambda self: self.num_offers > 20)
    @rule()
    def drain(self) -> None:
        self.scheduler.drain()
        self.promises.is_draining = True

    # Always.

    @invariant()
    def blocks_are_conserved_and_owned_once(self) -> None:
        self.scheduler.check()
        self.scheduler.check_when_idle()
        assert self.pool.num_free + self.pool.num_cached + self.pool.num_used == self.pool.num_blocks

    @invariant()
    def host_blocks_hold_what_their_names_say(self) -> None:
        written = {
            host for launched in self.launched if launched.sampled_ids is None for _, host in launched.plan.swaps_out
        }
        for host_block, block_hash in self.scheduler.host.content_names().items():
            if host_block not in written:
                assert self.device.host_content(host_block) == self.contents[block_hash]

    @invariant()
    def who_is_in_flight_keeps_its_seat_and_blocks(self) -> None:
        in_flight = {sequence for launched in self.launched for sequence in launched.plan.sequences}
        assert all(sequence.seat is not None and sequence.block_table for sequence in in_flight)
        assert len({sequence.seat for sequence in in_flight}) == len(in_flight)

    @invariant()
    def seats_are_numbered_for_who_looks_on(self) -> None:
        standings = self.scheduler.seating.snapshot()
        held = {sequence.request_id for sequence in self.scheduler.held()}
        assert {one.request_id for one in standings} <= held
        seats = [one.seat for one in standings if one.seat is not None]
        assert seats == sorted(set(seats))
        num_seats = self.scheduler.limits.max_num_sequences
        assert all(0 <= seat < num_seats for seat in seats)
        assert len(seats) >= min(num_seats, self.scheduler.num_running)
        assert len(standings) == len({one.request_id for one in standings})

    @invariant()
    def sequence_that_is_not_ready_has_nothing_and_keeps_no_other_from_running(self) -> None:
        unready = self._unready()
        assert all(sequence.seat is None and not sequence.block_table for sequence in unready)
        in_flight = any(self._is_in_flight(sequence) for sequence in self.expectations)
        assert self.scheduler.can_run == (self._has_ready or in_flight)
        assert self.scheduler.num_waiting >= len(unready)

    @invariant()
    def promises_are_kept(self) -> None:
        promises = self.promises
        num_saved = num_saved_by(self.expectations)
        assert self.scheduler.num_saved_blocks in ((num_saved, 0) if self.limits.is_overcommitted else (num_saved,))
        assert len(promises.held) <= promises.max_held
        assert set(promises.held) <= set(self.scheduler.held())
        assert self.scheduler.num_running <= self.limits.max_num_sequences
        assert 0 <= self.scheduler.budget_blocks <= self.pool.num_blocks
        if self.limits.is_overcommitted:
            return
        assert self.scheduler.budget_blocks == self.pool.num_blocks
        on_seats = [sequence for sequence in self.expectations if sequence.block_table]
        num_reserved = sum(
            one.num_reserved_blocks if one in promises.held else len(one.block_table) for one in on_seats
        )
        assert num_reserved - num_saved <= self.pool.num_blocks
        for sequence in self.scheduler.held():
            assert len(sequence.block_table) <= sequence.num_reserved_blocks

    @invariant()
    def no_sequence_is_preempted_without_blocks_of_tokens_in_between(self) -> None:
        most = len(self.expectations) + self.num_tokens_received / self.pool.block_size
        assert self.scheduler.num_preemptions <= most, "ping-pong"

    def teardown(self) -> None:
        """Runs to the end without further offers: each step computes at least one token, and no token twice."""
        if not hasattr(self, "scheduler"):
            return
        most_steps = sum(s.num_prompt_tokens + s.stopping.max_tokens for s in self.scheduler.held()) + 1
        if self.limits.is_overcommitted or self.limits.max_prefix_wait_steps:
            # Some of it twice, some of it while others wait.
            most_steps = 4 * most_steps + 20
        for sequence in self._unready():
            self._prepare(sequence, "")
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

    def _unready(self) -> list[Sequence]:
        return [sequence for sequence in self.promises.held if not sequence.is_ready]

    @property
    def _has_ready(self) -> bool:
        return any(sequence.is_ready for sequence in self.promises.held)

    def _prepare(self, sequence: Sequence, error: str) -> None:
        assert sequence.constraint is not None
        if not error:
            sequence.constraint.compiled = AnyTokens()
        event = self.scheduler.mark_prepared(sequence, error)
        assert (event is not None) == bool(error)
        self._receive(StepOutcome(NewTokens(), (event,) if event else ()))

    def _sequences(self, request_id: str, attempt: int) -> st.SearchStrategy[Sequence]:
        return sequence_strategy(
            self.pool.block_size, request_id, attempt, self.limits.is_overcommitted, may_be_unready=True
        )

    def _schedule(self) -> None:
        held = self.promises.held
        on_seats = [s for s in held if s.seat is not None and s.num_tokens < s.length_limit]
        seated = sorted(on_seats, key=lambda sequence: self.boardings[sequence])
        in_flight = {sequence for launched in self.launched for sequence in launched.plan.sequences}
        standing = Standing(
            seated=seated,
            arrivals=sorted((s for s in held if s.seat is None and not s.num_preemptions and s.is_ready), key=turn),
            preempted=[s for s in held if s.seat is None and s.num_preemptions],
            decodes={sequence for sequence in seated if sequence in self.sampled},
            has_leaving=not in_flight <= set(held),
        )
        allowance = None
        if self.max_prefill_tokens is not None:
            allowance = PrefillAllowance(self.max_prefill_tokens, copy_s=self.copy_s)
        plan = self.scheduler.schedule(allowance, CHEAP, self.copy_cost)
        self.promises.most_saved = max(self.promises.most_saved, self.scheduler.num_saved_blocks)
        self._receive(StepOutcome(NewTokens(), self.scheduler.take_finished()))
        # Some of them may just have been handed back.
        standing.preempted[:] = [sequence for sequence in standing.preempted if sequence in held]
        for sequence in plan.boarded:
            self.num_boardings += 1
            self.boardings[sequence] = self.num_boardings
        assert plan.rows or self.launched or not self._has_ready, "held sequences but nothing to do"
        assert not plan.rows or held
        waits = self.scheduler.drafts and bool(self.launched)
        if plan.rows:
            # Before the checks: after one that fails, `teardown` still has to retire this plan. Its error would
            # otherwise hide that of the check.
            self.launched.append(Launched(plan))
            self.sampled.update(row.sequence for row in plan.rows if row.samples)
        if plan.rows or not waits:
            self.checks.check(plan, standing, waits)

    def _run_device(self, num_plans: int) -> None:
        for launched in self.launched[:num_plans]:
            if launched.sampled_ids is None:
                launched.sampled_ids = self.device.run(launched.plan)

    def _retire(self) -> None:
        self._run_device(1)
        launched = self.launched.pop(0)
        assert launched.sampled_ids is not None
        logprobs = logprobs_of(launched.plan, launched.sampled_ids)
        self._receive(self.scheduler.update(StepResult(launched.plan, launched.sampled_ids, logprobs)))
        for sequence in launched.plan.sequences:
            check_scores(sequence)

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
        ended = {sequence for sequence in plan.touched if not self.expectations[sequence].is_over}
        outcome = self.scheduler.fail(plan, "lost")
        assert ended <= {event.sequence for event in outcome.finished}
        self._receive(outcome)

    def _cancel(self, sequence: Sequence, reason: FinishReason) -> None:
        event = self.scheduler.cancel(sequence.request_id, sequence.attempt, reason)
        assert (event is None) == self._is_in_flight(sequence)
        self._expect_cancelled(sequence, reason)
        self._receive(StepOutcome(NewTokens(), (event,) if event else ()))

    def _offer(self, sequence: Sequence) -> None:
        superseded = self.promises.find(sequence.request_id)
        others = [other for other in self.expectations if other is not superseded]
        # While no new sequence may board, blocks in excess of the pool are not offered.
        num_saved = num_saved_by(others) if self.scheduler.num_saved_blocks else 0
        expected = self.promises.answers(sequence, num_saved)
        received = sequence.token_ids[sequence.num_prompt_tokens :]
        answer = self.scheduler.offer(sequence)
        assert answer in expected
        if answer is Refusal.STALE_ATTEMPT:
            return
        self.promises.newest_attempt[sequence.request_id] = sequence.attempt
        if superseded is not None:
            self._expect_cancelled(superseded, FinishReason.CANCELLED)
        if answer is None:
            output, reason = solo_output(sequence, self.limits.context_length)
            self.expectations[sequence] = Expectation(sequence, output, reason, received)
            self.contents.update(block_contents(sequence, output, self.pool.block_size))
            self.promises.held.append(sequence)

    def _expect_cancelled(self, sequence: Sequence, reason: FinishReason) -> None:
        self.promises.held.remove(sequence)
        self.expectations[sequence].cancel_reason = reason

    def _is_in_flight(self, sequence: Sequence) -> bool:
        return any(sequence in launched.plan.sequences for launched in self.launched)

    def _receive(self, outcome: StepOutcome) -> None:
        for sequence, offset, token_id in outcome.tokens:
            is_scored = sequence.num_prompt_logprobs is not None
            assert len(sequence.prompt_logprobs) == (sequence.num_prompt_tokens - 1) * is_scored
            self._receive_token(self.expectations[sequence], offset, token_id)
        for event in outcome.finished:
            self._finish(event)

    def _receive_token(self, expectation: Expectation, offset: int, token_id: int) -> None:
        assert expectation.cancel_reason is None, "a token of a cancelled sequence"
        assert expectation.finished is None, "a token after the end"
        assert offset == len(expectation.received)
        expectation.received.append(token_id)
        self.num_tokens_received += 1

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
            assert event.error in ("lost", INVALID_LOGITS, NOTHING_ALLOWED)
            return
        if event.reason is FinishReason.PREEMPTED:
            num_reserved_tokens = event.sequence.num_reserved_blocks * self.pool.block_size
            has_used_reservation = not self.limits.is_overcommitted and event.sequence.num_tokens == num_reserved_tokens
            assert event.sequence.num_preemptions > 0 or has_used_reservation
            return
        assert (expectation.received, event.reason) == (expectation.output, expectation.reason)
        stopped = event.reason is FinishReason.STOP_TOKEN
        assert event.stop_token_id == (expectation.output[-1] if stopped else None)
