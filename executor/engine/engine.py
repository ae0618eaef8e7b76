"""The engine loop: one thread that owns the scheduler and launches steps on the device.

`step()` is one iteration: execute commands, plan a step, launch it, publish answers and boardings, retire the previous
step. To *retire* a step is to read its tokens and update the scheduler. With overlap, step N + 1 is planned and
launched while the device computes step N, and only then step N is retired. Without overlap, or if a step or the
scheduler does not allow it (`PendingStep.allows_next`, `Scheduler.may_run_ahead`), a step is retired before the next
one is planned.

A step that fails, at launch or when its tokens are read, ends its own sequences only. If the loop cannot continue (a
bug, a lost device, or a device on which every step fails), the thread calls `on_death` and ends. The sequences of a
step whose device is lost do not end with it: routers continue them elsewhere.

All input reaches the loop through its inbox, and all output leaves through `publish`, in order. No other thread touches
the scheduler. An idle engine blocks on the inbox and uses no processor time.
"""

from __future__ import annotations

import logging
import queue
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial

from inflight.common.time_of_day import unix_day
from inflight.executor.device import is_lost
from inflight.executor.engine.accounting import Accounting, AccountTotal
from inflight.executor.engine.deadlines import DeadlineHeap
from inflight.executor.engine.gc import GarbageCollection
from inflight.executor.engine.output import EngineOutput, EngineStatus, HeldSequences, step_record
from inflight.executor.engine.prefill_budget import PrefillBudget
from inflight.executor.engine.runner import DeviceLostError, FailedStep, PendingStep, PoolingStep, StepRunner
from inflight.executor.engine.standby import StandbyDepth
from inflight.executor.engine.step_time import StepLoad
from inflight.executor.engine.timing import LoopParts, Throughput
from inflight.executor.scheduler.scheduler import Batching, Scheduler
from inflight.executor.scheduler.sequence import FinishEvent, FinishReason, Sequence, StepOutcome, StepPlan, StepResult
from inflight.executor.scheduler.step_record import NO_TIMES, DeviceTimes, LoopPart, PlanCounts

log = logging.getLogger(__name__)

# Consecutive failed steps until the device counts as lost. Each failure ends other sequences than the previous one, so
# an impossible prompt or a moment without memory does not reach this number. A GPU whose context is lost ends it sooner
# (`is_lost`).
MAX_FAILURES = 16
# Commands that are executed before a step. A submit takes about 15 µs, so a burst delays the running sequences by at
# most 2 ms per step. It is more than the sequences that most executors hold, which can be cancelled all at once.
MAX_COMMANDS = 128

Command = Callable[[EngineOutput], None]
"""Runs on the engine's thread, and adds its answer to the output of the turn."""


class Engine:
    """The loop and its thread. `submit`, `cancel`, `drain` and `stop` may be called from any thread."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: StepRunner,
        publish: Callable[[EngineOutput], None],
        on_death: Callable[[BaseException], None],
        *,
        overlap: bool = True,
        prefill_budget: PrefillBudget | None = None,
        garbage_collection: GarbageCollection | None = None,
        clock: Callable[[], float] = time.perf_counter,
        today: Callable[[], int] = unix_day,
    ) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self._publish = publish
        self._on_death = on_death
        self._inbox: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._speed = Throughput()
        self._prefill_budget = prefill_budget or PrefillBudget()
        self._deadlines = DeadlineHeap()
        self._standby = StandbyDepth(scheduler.limits.num_standby_sequences)
        self._garbage_collection = garbage_collection
        self._clock = clock
        self._today = today
        self.accounting = Accounting()
        self._parts = LoopParts(clock)
        # Steps since the start. Only the engine's thread writes it.
        self.num_steps = 0
        self._num_output_tokens = 0
        self._num_steps_checked = 0
        self._num_failures = 0
        self._errors_logged: set[str] = set()
        self._stopping = False
        # Steps launched and not retired, oldest first. With overlap one of them may run while the next is planned.
        self._launched: deque[tuple[StepPlan, StepLoad, PlanCounts, PendingStep]] = deque()
        # Expected seconds of the longest of these and the step that is being launched. Only the engine's thread writes
        # it.
        self.expected_step_s = 0.0
        self.overlaps = overlap
        self._held = HeldSequences(scheduler.seating)

    def start(self) -> None:
        """Starts the thread, which first publishes the status of an idle engine."""
        self._thread.start()

    def submit(self, sequence: Sequence, time_left_ms: int | None = None) -> None:
        """Offers a sequence with a deadline `time_left_ms` from now. The answer comes through `publish`."""
        if time_left_ms is not None:
            sequence.deadline_ms = self._now_ms() + time_left_ms
        self._inbox.put(partial(self._offer, sequence))

    def mark_prepared(self, sequence: Sequence, error: str = "") -> None:
        """Makes a submitted sequence eligible to board once its grammar is compiled, or ends it with an error."""
        self._inbox.put(partial(self._mark_prepared, sequence, error))

    def cancel(self, request_id: str, attempt: int, reason: FinishReason = FinishReason.CANCELLED) -> None:
        """Ends a sequence if this attempt is still held. Its end comes through `publish`."""
        self._inbox.put(partial(self._cancel, request_id, attempt, reason))

    def drain(self) -> None:
        """Refuses every further submit."""
        self._inbox.put(self._drain)

    def list_sequences(self) -> None:
        """Requests the list of held sequences, which comes through `publish`."""
        self._inbox.put(self._list_sequences)

    def stop(self, timeout_s: float | None = None) -> bool:
        """Ends the thread after the steps in flight and waits for it at most `timeout_s`. Returns whether it has ended.
        Held sequences get no end: their routers see the streams break and place them elsewhere."""
        self._inbox.put(self._stop)
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def step(self) -> None:
        """Runs one iteration of the loop. Answers and boardings are published before the loop waits for the device,
        because a step may take long."""
        output = self._execute_commands()
        self._expire(output)
        self._parts.end(LoopPart.INBOX)
        plan = self._plan()
        output.finished.extend(self._log_errors(self._scheduler.take_finished()))
        output.preempted, output.boarded = plan.preempted, plan.boarded
        self.accounting.plan(plan, self._now_ns())
        self._parts.end(LoopPart.PLAN)
        num_ahead = 0
        if plan.sequences:
            load = StepLoad.of(plan)
            self._expect(load)
            step = self._launch(plan)
            self._launched.append((plan, load, PlanCounts.of(plan), step))
            num_ahead = int(self.overlaps and step.allows_next and self._scheduler.may_run_ahead)
        self._parts.end(LoopPart.LAUNCH)
        self._publish_answers(output)
        self._parts.end(LoopPart.PUBLISH)
        while len(self._launched) > num_ahead:
            self._retire(*self._launched.popleft())
        self._check_when_idle()
        if self._garbage_collection is not None:
            self._garbage_collection.after_step()

    def _run(self) -> None:
        try:
            self._publish(EngineOutput(0, status=self._status()))
            while not self._stopping or self._launched:
                self.step()
        except BaseException as error:
            log.exception("the engine thread died")
            self._on_death(error)

    def _plan(self) -> StepPlan:
        """Returns the next step, or an empty one once the thread is to end."""
        if self._stopping:
            return StepPlan.of(())
        scheduler = self._scheduler
        budget, allowance, terms, copy_cost = self._prefill_budget, None, None, None
        step_cost = budget.step_cost() if scheduler.bounds_batch else None
        load = scheduler.decode_load()
        if scheduler.has_prefill:
            allowance = budget.allowance(load, scheduler.pool.block_size)
            copy_cost = budget.copy_cost()
        if scheduler.drafts:
            terms = budget.draft_terms(load)
        return scheduler.schedule(allowance, terms, copy_cost, step_cost)

    def _expect(self, load: StepLoad) -> None:
        expect = self._prefill_budget.step_time.expect
        self.expected_step_s = max(expect(load), *(expect(launched) for _, launched, _, _ in self._launched), 0.0)

    def _launch(self, plan: StepPlan) -> PendingStep:
        try:
            return self._runner.launch(plan)
        except Exception as error:
            return FailedStep(error)

    def _check_when_idle(self) -> None:
        """Checks once after each busy period that no block is lost. The check reads the whole pool."""
        if self._num_steps_checked < self.num_steps and self._scheduler.is_idle:
            self._num_steps_checked = self.num_steps
            self._scheduler.check_when_idle()

    def _execute_commands(self) -> EngineOutput:
        """Executes the commands that have come, at most MAX_COMMANDS, in order. The others stay for the next turn."""
        output = EngineOutput(self.num_steps)
        if not self._scheduler.can_run:
            if self._garbage_collection is not None:
                self._garbage_collection.when_idle()
            self._wait(output)
            now_s = self._clock()
            self._speed.wake(now_s)
            self._parts.begin(now_s)
        with suppress(queue.Empty):
            for _ in range(MAX_COMMANDS):
                self._inbox.get_nowait()(output)
        return output

    def _wait(self, output: EngineOutput) -> None:
        """Waits for a command. Sequences that are being prepared may have deadlines."""
        timeout_s = None if self._scheduler.is_idle else self._deadlines.time_left_s(self._clock() * 1000)
        with suppress(queue.Empty):
            self._inbox.get(timeout=timeout_s)(output)

    def _expire(self, output: EngineOutput) -> None:
        """Ends the sequences whose deadline has passed. A sequence that has ended already is not found."""
        if len(self._deadlines):
            for request_id, attempt in self._deadlines.take_due(self._now_ms()):
                self._cancel(request_id, attempt, FinishReason.DEADLINE, output)

    def _now_ms(self) -> int:
        return int(self._clock() * 1000)

    def _now_ns(self) -> int:
        return int(self._clock() * 1e9)

    def _close_accounts(self, finished: Iterable[FinishEvent]) -> tuple[AccountTotal, ...]:
        """Closes the accounts of sequences that have ended. Returns the totals if they are due or the engine is
        idle."""
        now_ns = self._now_ns()
        for event in finished:
            self.accounting.end(event.sequence, now_ns)
        if self._scheduler.is_idle or self.accounting.is_due(now_ns):
            return self.accounting.take(now_ns, self._today())
        return ()

    def _publish_answers(self, output: EngineOutput) -> None:
        self._standby.ended(len(output.finished), self._clock())
        self._held.add(output.accepted)
        self._held.update(output.preempted)
        self._held.update(output.boarded)
        self._held.remove(output.finished)
        if output.accepted or output.rejected or output.preempted or output.boarded or output.finished:
            output.status = self._status()
            output.usage = self._close_accounts(output.finished)
        if output.status is not None or output.sequences is not None:
            self._publish(output)

    def _offer(self, sequence: Sequence, output: EngineOutput) -> None:
        refusal = self._scheduler.offer(sequence)
        output.finished.extend(self._scheduler.take_finished())
        if refusal is None:
            output.accepted.append(sequence)
            self._deadlines.add(sequence, self._scheduler.held())
            self._standby.refilled(self._clock())
            self._make_way(output)
        else:
            output.rejected.append((sequence, refusal))

    def _mark_prepared(self, sequence: Sequence, error: str, output: EngineOutput) -> None:
        event = self._scheduler.mark_prepared(sequence, error)
        if event is not None:
            output.finished.append(event)
        self._held.update((sequence,))

    def _cancel(self, request_id: str, attempt: int, reason: FinishReason, output: EngineOutput) -> None:
        event = self._scheduler.cancel(request_id, attempt, reason)
        if event is not None:
            output.finished.append(event)

    def _drain(self, output: EngineOutput) -> None:
        self._scheduler.drain()
        self._publish(EngineOutput(self.num_steps, status=self._status()))

    def _list_sequences(self, output: EngineOutput) -> None:
        output.sequences = self._scheduler.seating.snapshot()

    def _stop(self, output: EngineOutput) -> None:
        self._stopping = True

    def _make_way(self, output: EngineOutput) -> None:
        """Hands sequences of class batch back to their routers whose seats others wait for."""
        for sequence in self._scheduler.giving_way():
            self._cancel(sequence.request_id, sequence.attempt, FinishReason.PREEMPTED, output)

    def _retire(self, plan: StepPlan, load: StepLoad, counts: PlanCounts, step: PendingStep) -> None:
        """Reads the tokens of a step and publishes its outcome."""
        outcome, times = self._outcome(plan, load, step)
        self.accounting.charge(plan, outcome.tokens, round(times.busy_s * 1e9))
        self.num_steps += 1
        self._num_output_tokens += len(outcome.tokens)
        if outcome.finished:
            self._standby.ended(len(outcome.finished), self._clock())
            self._held.remove(outcome.finished)
        status = self._status()
        self._parts.end(LoopPart.RETIRE)
        self._publish(
            EngineOutput(
                step=self.num_steps,
                scored=outcome.scored,
                tokens=outcome.tokens,
                finished=list(outcome.finished),
                status=status,
                record=step_record(self.num_steps, counts, outcome, times, self._parts, status),
                usage=self._close_accounts(outcome.finished),
            )
        )
        self._parts.end(LoopPart.PUBLISH)

    def _outcome(self, plan: StepPlan, load: StepLoad, step: PendingStep) -> tuple[StepOutcome, DeviceTimes]:
        """Returns the outcome of a step. A failed step ends its own sequences only."""
        try:
            sampled_ids = self._read(plan, step)
        except DeviceLostError:
            raise
        except Exception as error:
            if is_lost(error):
                raise DeviceLostError(str(error).partition("\n")[0]) from error
            log.exception("step %d failed", self.num_steps)
            self._num_failures += 1
            if self._num_failures == MAX_FAILURES:
                raise DeviceLostError(f"{MAX_FAILURES} steps have failed in a row") from error
            return self._scheduler.fail(plan, f"the step failed on the device: {type(error).__name__}"), NO_TIMES
        self._num_failures = 0
        times = self._speed.observe(plan, step)
        self._prefill_budget.copy_time.observe(plan, step.copied_s)
        if not plan.scored:
            # The time of the logits that score a prompt would be attributed to the rows.
            self._prefill_budget.step_time.observe(load, times.busy_s - step.copied_s)
        if self._scheduler.drafts:
            self._prefill_budget.observe_wait(plan, times.exposed_s)
        pooled = step.pooled() if plan.pooled and isinstance(step, PoolingStep) else ()
        outcome = self._scheduler.update(StepResult(plan, sampled_ids, step.logprobs(), pooled))
        self._log_errors(outcome.finished)
        return outcome, times

    def _log_errors(self, finished: Iterable[FinishEvent]) -> Iterable[FinishEvent]:
        """Logs the errors of sequences whose step did not fail, each kind of error once."""
        for event in finished:
            kind = re.sub(r"\d+", "", event.error)
            if event.reason is FinishReason.ERROR and kind not in self._errors_logged:
                self._errors_logged.add(kind)
                log.error("%s ended with an error (logged once per kind): %s", event.sequence.request_id, event.error)
        return finished

    def _read(self, plan: StepPlan, step: PendingStep) -> tuple[int | None, ...]:
        """Returns the tokens of the rows that sample. A wrong number of tokens fails the step, because rows would get
        those of others."""
        try:
            sampled_ids = step.result()
        finally:
            self._parts.end(LoopPart.WAIT)
        if len(sampled_ids) != plan.num_sampled:
            raise RuntimeError(f"{len(sampled_ids)} tokens for {plan.num_sampled} positions")
        return sampled_ids

    def _status(self) -> EngineStatus:
        scheduler = self._scheduler
        return EngineStatus(
            budget_blocks=scheduler.budget_blocks,
            saved_blocks=scheduler.num_saved_blocks,
            total_blocks=scheduler.pool.num_blocks,
            used_blocks=scheduler.pool.num_used,
            cached_blocks=scheduler.pool.num_cached,
            budget_sequences=scheduler.limits.max_num_sequences + self._num_standby(),
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            waiting_prefill_tokens=scheduler.waiting_prefill_tokens,
            held=self._held.all(),
            draining=scheduler.is_draining,
            step_ms=self._speed.step_s * 1000,
            prefill_tokens_per_s=self._speed.prefill_tokens_per_s,
            num_steps=self.num_steps,
            num_output_tokens=self._num_output_tokens,
            exposed_host_ms=self._speed.exposed_host_s * 1000,
            device_busy_fraction=self._speed.device_busy_fraction,
            device_busy_s=self.accounting.busy_ns / 1e9,
            elapsed_s=self._speed.elapsed_s,
            num_preempted=scheduler.num_preempted,
            num_preemptions=scheduler.num_preemptions,
            computed_tokens=scheduler.num_computed_tokens,
            recomputed_tokens=scheduler.num_recomputed_tokens,
            used_host_blocks=scheduler.num_used_host_blocks,
            reserve_quantile=scheduler.reserve_quantile,
            constraint=scheduler.bounds.newest,
            bounds=scheduler.bounds.num_steps,
            kv=scheduler.kv_counts(),
            num_invalid_logits=scheduler.num_invalid_logits,
            drafts=scheduler.draft_counts,
        )

    def _num_standby(self) -> int:
        """Returns the standby limit. A static batch takes its sequences from a full waiting batch."""
        limits = self._scheduler.limits
        return limits.num_standby_sequences if limits.batching is Batching.STATIC else self._standby.depth
