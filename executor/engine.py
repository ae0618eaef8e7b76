"""The in-flight loop: one thread that owns the scheduler and the device.

`step()` is its table of contents: take what came in, plan, say who got in and who boarded, run the device, retire.
Everything reaches the loop through its inbox and leaves through `publish`, in order; no other thread touches scheduler
or model. When there is nothing to compute the thread blocks on the inbox and uses no processor time.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from executor.admission import Refusal
from executor.scheduler import Scheduler
from executor.sequence import FinishEvent, FinishReason, Sequence, StepOutcome, StepPlan, StepResult, TokenEvent

log = logging.getLogger(__name__)

# Weight of the newest step in the smoothed speeds: about the last 20 steps count.
SMOOTHING = 0.05


class StepRunner(Protocol):
    """Runs one step on the device."""

    def run(self, plan: StepPlan) -> tuple[int, ...]:
        """Returns the sampled token ids of the rows that sample, in the order of the plan's rows."""
        ...


@dataclass(frozen=True, slots=True)
class Submitted:
    """Inbox: a sequence wants in."""

    sequence: Sequence


@dataclass(frozen=True, slots=True)
class Cancelled:
    """Inbox: a sequence shall end."""

    request_id: str
    attempt: int
    reason: FinishReason


@dataclass(frozen=True, slots=True)
class Draining:
    """Inbox: take no new work."""


@dataclass(frozen=True, slots=True)
class Stopping:
    """Inbox: end the thread. What is held gets no end: its routers see their streams break and place it elsewhere."""


Command = Submitted | Cancelled | Draining | Stopping


@dataclass(frozen=True, slots=True)
class HeldSequence:
    """What a report says of a sequence."""

    request_id: str
    attempt: int
    reserved_blocks: int


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """How the engine stands after a step; blocks and sequences are counts, speeds are smoothed."""

    budget_blocks: int
    total_blocks: int
    used_blocks: int
    cached_blocks: int
    budget_sequences: int
    num_running: int
    num_waiting: int
    waiting_prefill_tokens: int
    held: tuple[HeldSequence, ...]
    draining: bool
    step_ms: float
    output_tokens_per_s: float
    prefill_tokens_per_s: float
    num_steps: int


@dataclass(slots=True)
class EngineOutput:
    """What came in or what a step brought, in this order: acceptances, boardings, tokens, ends."""

    step: int
    accepted: list[Sequence] = field(default_factory=list)
    rejected: list[tuple[Sequence, Refusal]] = field(default_factory=list)
    started: tuple[Sequence, ...] = ()
    tokens: tuple[TokenEvent, ...] = ()
    finished: list[FinishEvent] = field(default_factory=list)
    status: EngineStatus | None = None


class Speed:
    """Smoothed speeds of the loop. Times in seconds, rates per second."""

    def __init__(self) -> None:
        self.step_s = 0.0
        self.output_tokens_per_s = 0.0
        self.prefill_tokens_per_s = 0.0

    def observe(self, plan: StepPlan, elapsed_s: float) -> None:
        """Takes in one step."""
        num_sampled = sum(row.samples for row in plan.rows)
        num_prefill = sum(row.num_tokens for row in plan.rows if row.num_tokens > 1)
        self.step_s = _smooth(self.step_s, elapsed_s)
        self.output_tokens_per_s = _smooth(self.output_tokens_per_s, num_sampled / elapsed_s)
        if num_prefill:
            self.prefill_tokens_per_s = _smooth(self.prefill_tokens_per_s, num_prefill / elapsed_s)


def _smooth(old: float, new: float) -> float:
    return new if old == 0.0 else old + SMOOTHING * (new - old)


class Engine:
    """The loop and its thread. `submit`, `cancel`, `drain` and `stop` may be called from any thread."""

    def __init__(
        self,
        scheduler: Scheduler,
        runner: StepRunner,
        publish: Callable[[EngineOutput], None],
        on_death: Callable[[BaseException], None],
    ) -> None:
        self._scheduler = scheduler
        self._runner = runner
        self._publish = publish
        self._on_death = on_death
        self._inbox: queue.SimpleQueue[Command] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._speed = Speed()
        # Steps since the start. Written by the engine's thread only.
        self.num_steps = 0
        self._num_steps_checked = 0
        self._stopping = False

    def start(self) -> None:
        """Starts the thread; the first thing it publishes is the status of an idle engine."""
        self._thread.start()

    def submit(self, sequence: Sequence) -> None:
        """Offers a sequence; the answer comes by `publish`."""
        self._inbox.put(Submitted(sequence))

    def cancel(self, request_id: str, attempt: int, reason: FinishReason = FinishReason.CANCELLED) -> None:
        """Ends a sequence if it is still held under this attempt; its end comes by `publish`."""
        self._inbox.put(Cancelled(request_id, attempt, reason))

    def drain(self) -> None:
        """Refuses every further submit."""
        self._inbox.put(Draining())

    def stop(self) -> None:
        """Ends the thread after the step in flight and waits for it."""
        self._inbox.put(Stopping())
        self._thread.join()

    def step(self) -> None:
        """One turn of the loop. Answers and boardings leave before the device runs, for a step may take long."""
        output = self._take_inbox()
        plan = self._scheduler.schedule()
        output.started = plan.boarded
        self._publish_answers(output)
        if plan.rows:
            self._publish_outcome(self._run_device(plan))
        else:
            self._check_when_idle()

    def _run(self) -> None:
        try:
            self._publish(EngineOutput(0, status=self._status()))
            while not self._stopping:
                self.step()
        except BaseException as error:
            log.exception("the engine thread died")
            self._on_death(error)

    def _check_when_idle(self) -> None:
        """Checks once after each busy time that every block is back: the check reads the whole pool."""
        if self._num_steps_checked < self.num_steps:
            self._num_steps_checked = self.num_steps
            self._scheduler.check_when_idle()

    def _take_inbox(self) -> EngineOutput:
        output = EngineOutput(self.num_steps)
        if self._scheduler.is_idle:
            self._obey(self._inbox.get(), output)
        while True:
            try:
                self._obey(self._inbox.get_nowait(), output)
            except queue.Empty:
                return output

    def _publish_answers(self, output: EngineOutput) -> None:
        if output.accepted or output.rejected or output.started or output.finished:
            output.status = self._status()
            self._publish(output)

    def _obey(self, command: Command, output: EngineOutput) -> None:
        match command:
            case Submitted(sequence):
                refusal = self._scheduler.offer(sequence)
                output.finished.extend(self._scheduler.take_finished())
                if refusal is None:
                    output.accepted.append(sequence)
                else:
                    output.rejected.append((sequence, refusal))
            case Cancelled(request_id, attempt, reason):
                event = self._scheduler.cancel(request_id, attempt, reason)
                if event is not None:
                    output.finished.append(event)
            case Draining():
                self._scheduler.drain()
                self._publish(EngineOutput(self.num_steps, status=self._status()))
            case Stopping():
                self._stopping = True

    def _run_device(self, plan: StepPlan) -> StepOutcome:
        """Runs a plan; a device failure ends the sequences in it and nothing else."""
        began = time.perf_counter()
        try:
            sampled_ids = self._runner.run(plan)
        except RuntimeError as error:
            log.exception("step %d failed on the device", self.num_steps)
            return self._scheduler.fail(plan, f"the step failed on the device: {type(error).__name__}")
        self._speed.observe(plan, time.perf_counter() - began)
        return self._scheduler.update(StepResult(plan, sampled_ids))

    def _publish_outcome(self, outcome: StepOutcome) -> None:
        self.num_steps += 1
        self._publish(
            EngineOutput(
                step=self.num_steps,
                tokens=outcome.tokens,
                finished=list(outcome.finished),
                status=self._status(),
            )
        )

    def _status(self) -> EngineStatus:
        scheduler = self._scheduler
        return EngineStatus(
            budget_blocks=scheduler.budget_blocks,
            total_blocks=scheduler.pool.num_blocks,
            used_blocks=scheduler.pool.num_used,
            cached_blocks=scheduler.pool.num_cached,
            budget_sequences=scheduler.limits.max_num_sequences + scheduler.limits.num_standby_sequences,
            num_running=scheduler.num_running,
            num_waiting=scheduler.num_waiting,
            waiting_prefill_tokens=scheduler.waiting_prefill_tokens,
            held=tuple(HeldSequence(s.request_id, s.attempt, s.num_reserved_blocks) for s in scheduler.held()),
            draining=scheduler.is_draining,
            step_ms=self._speed.step_s * 1000,
            output_tokens_per_s=self._speed.output_tokens_per_s,
            prefill_tokens_per_s=self._speed.prefill_tokens_per_s,
            num_steps=self.num_steps,
        )
