"""An executor: the real loop, scheduler, blocks and prefix cache over a modelled device, and what its service does.

One object is one start of it; a restart is another with a newer generation. What `inflight.executor.serving.service`
and `inflight.executor.serving.router_session` do with streams is done here in their words, without gRPC.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import chain

from inflight.bench.simulation.bounds import StepBound
from inflight.bench.simulation.device import H200, ModelledDevice, StepCost
from inflight.bench.simulation.invariants import InvariantChecker
from inflight.bench.simulation.session import Session
from inflight.bench.timeline.timeline import US_PER_S, Process, Timeline
from inflight.bench.timeline.traffic import STOP_ID, VOCABULARY_SIZE, SimRequest
from inflight.common.kv_size import num_slots
from inflight.common.protocol import PROTOCOL_VERSION
from inflight.executor.engine.engine import Engine
from inflight.executor.engine.output import EngineOutput, EngineStatus
from inflight.executor.engine.prefill_budget import PrefillBudget
from inflight.executor.scheduler.admission import Refusal
from inflight.executor.scheduler.blocks import BlockPool
from inflight.executor.scheduler.limits import InterTokenTargets, StateLimits
from inflight.executor.scheduler.scheduler import Batching, Scheduler, SchedulerLimits, SchedulerPolicy
from inflight.executor.scheduler.sequence import FinishReason, Sampling, Sequence, Stopping
from inflight.executor.serving.report import states_proto
from inflight.v1 import executor_pb2

GREEDY = Sampling(temperature=0.0, top_k=0, top_p=1.0, seed=0)
STOP_IDS = frozenset({STOP_ID})
TARGETS = InterTokenTargets()
MIN_REPORT_US = 50_000
REPORT_US = 1_000_000
# Executors that report at the same moment are read together, which Redis and this process do at the same time.
PHASE_US = 25_000
# A turn of the loop that did nothing is not followed by another at the same time.
IDLE_TURN_US = 1_000


@dataclass(frozen=True, slots=True)
class ExecutorShape:
    """How large an executor is and how fast."""

    num_blocks: int = 2048
    block_size: int = 16
    num_seats: int = 32
    num_standby: int = 2
    max_num_tokens: int = 1024
    context_length: int = 4096
    batching: Batching = Batching.INFLIGHT
    has_prefix_cache: bool = False
    policy: SchedulerPolicy = SchedulerPolicy.GUARANTEED_NO_EVICT
    num_host_blocks: int = 0
    num_checkpoints: int | None = None
    """Of recurrent state, at each `grid_blocks` blocks; None: no layer is recurrent."""
    grid_blocks: int = 1
    num_host_slots: int = 0
    """Of recurrent state, beside host blocks."""
    overlap: bool = True
    max_inter_token_ms: float = 0.0
    cost: StepCost = field(default=H200)

    def limits(self) -> SchedulerLimits:
        """The limits of the scheduler."""
        states = None
        if self.num_checkpoints is not None:
            states = StateLimits(
                num_slots(self.num_seats),
                self.num_checkpoints,
                self.grid_blocks * self.block_size,
                num_host_slots=self.num_host_slots,
            )
        return SchedulerLimits(
            max_num_sequences=self.num_seats,
            num_standby_sequences=self.num_standby,
            max_num_tokens=self.max_num_tokens,
            context_length=self.context_length,
            enable_chunked_context=True,
            batching=self.batching,
            enable_prefix_cache=self.has_prefix_cache,
            policy=self.policy,
            num_host_blocks=self.num_host_blocks,
            states=states,
        )


class SimExecutor:
    """One start of an executor."""

    def __init__(
        self,
        executor_id: str,
        generation: int,
        shape: ExecutorShape,
        timeline: Timeline,
        checker: InvariantChecker,
        seed: int,
    ) -> None:
        self.executor_id = executor_id
        self.generation = generation
        self.shape = shape
        self.process = Process(timeline)
        self.sessions: list[Session] = []
        self._timeline = timeline
        self._checker = checker
        self._random = random.Random(f"{seed}/{executor_id}/{generation}")
        self._requests: dict[str, SimRequest] = {}
        self.device = ModelledDevice(
            shape.cost,
            lambda request_id, offset: self._requests[request_id].token(offset),
            has_recurrent_layers=shape.num_checkpoints is not None,
        )
        self.scheduler = Scheduler(shape.limits(), BlockPool(shape.num_blocks, shape.block_size))
        self.engine = Engine(
            self.scheduler,
            self.device,
            self._publish,
            lambda error: None,
            overlap=shape.overlap,
            prefill_budget=PrefillBudget(shape.max_inter_token_ms),
            clock=lambda: self.device.now_s,
        )
        self.step_bound = StepBound(executor_id, self.engine)
        self.session_of: dict[Sequence, Session] = {}
        self._offered: dict[Sequence, Session] = {}
        self._has_inbox = False
        self._turn_is_due = False
        self._status: EngineStatus | None = None
        self._seq = 0
        self._reported_us = -MIN_REPORT_US
        self._report_is_due = False

    def start(self) -> None:
        """Reports now and from now on."""
        self._report()
        phase_us = PHASE_US * self._random.randrange(REPORT_US // PHASE_US)
        first_us = (self._timeline.now_us // REPORT_US + 1) * REPORT_US + phase_us
        self._timeline.at(first_us, self.process.run, self._heartbeat)

    def describe(self) -> executor_pb2.DescribeResponse:
        """Returns what a router is told of it."""
        limits, policy = self.scheduler.limits, self.shape.policy
        return executor_pb2.DescribeResponse(
            executor_id=self.executor_id,
            generation=self.generation,
            protocol_version=PROTOCOL_VERSION,
            block_size=self.shape.block_size,
            total_blocks=self.shape.num_blocks,
            max_num_sequences=limits.max_num_sequences,
            num_standby_sequences=limits.num_standby_sequences,
            max_num_tokens=limits.max_num_tokens,
            context_length=limits.context_length,
            vocabulary_size=VOCABULARY_SIZE,
            batching=f"BATCHING_MODE_{self.shape.batching.name}",
            scheduler_policy=f"SCHEDULER_POLICY_{policy.name}",
            state_grid_tokens=0 if limits.states is None else limits.states.grid_tokens,
        )

    # What routers send.

    def submit(self, session: Session, submit: executor_pb2.Submit) -> None:
        """A placement, with the output that the request has so far."""
        request = self._requests[submit.request_id] = self._checker.records[submit.request_id].request
        sequence = Sequence(
            request_id=request.request_id,
            attempt=submit.attempt,
            token_ids=[*request.prompt, *submit.prior_output_ids],
            num_prompt_tokens=len(request.prompt),
            sampling=GREEDY,
            stopping=Stopping(request.max_tokens, 0, STOP_IDS),
            num_reserved_blocks=submit.reserved_blocks,
            cache_salt=request.tenant.encode(),
            priority=2 - request.priority_class,
            inter_token_target_ms=TARGETS.of(2 - request.priority_class),
        )
        self._offered[sequence] = session
        self.engine.submit(sequence)
        self._wake()

    def attach(self, session: Session, request_id: str, attempt: int) -> None:
        """A router wants to read a placement of another one: none here reads what another does."""
        session.rejected(request_id, attempt, None)
        session.flush()

    def cancel(self, request_id: str, attempt: int, reason: FinishReason = FinishReason.CANCELLED) -> None:
        """Cancels a sequence."""
        for sequence in self.told():
            if (sequence.request_id, sequence.attempt) == (request_id, attempt):
                self.step_bound.left(sequence)
        self.engine.cancel(request_id, attempt, reason)
        self._wake()

    def told(self) -> Iterator[Sequence]:
        """Yields the placements that its routers have been told of no end."""
        return chain(self.session_of, self._offered)

    def request_of(self, sequence: Sequence) -> SimRequest:
        """Returns the request of a placement."""
        return self._requests[sequence.request_id]

    def join(self, session: Session) -> None:
        """Starts a router's stream."""
        self.sessions.append(session)

    def leave(self, session: Session) -> None:
        """A router's stream broke; no other router can read its tokens."""
        if session not in self.sessions:
            return
        self.sessions.remove(session)
        for sequence, owner in [*self.session_of.items(), *self._offered.items()]:
            if owner is session:
                self.cancel(sequence.request_id, sequence.attempt)

    # The loop.

    def _wake(self) -> None:
        self._has_inbox = True
        if not self._turn_is_due:
            self._turn_is_due = True
            self._timeline.after(0, self.process.run, self._turn)

    def _turn(self) -> None:
        self._turn_is_due = self._has_inbox = False
        self.device.now_s = self._timeline.now_us / US_PER_S
        before = (self.engine.num_steps, self.device.num_launched)
        self.engine.step()
        self.step_bound.check()
        if self.scheduler.is_idle and not self._has_inbox:
            return
        next_us = max(self._timeline.now_us, self.device.read_us)
        if (self.engine.num_steps, self.device.num_launched) == before:
            next_us += IDLE_TURN_US
        self._turn_is_due = True
        self._timeline.at(next_us, self.process.run, self._turn)

    def _publish(self, output: EngineOutput) -> None:
        """Tokens and ends are known when their step has ended, which the loop has waited for."""
        when_us = max(self._timeline.now_us, self.device.read_us)
        if when_us == self._timeline.now_us:
            self._on_output(output)
        else:
            self._timeline.at(when_us, self.process.run, self._on_output, output)

    def _on_output(self, output: EngineOutput) -> None:
        for sequence in output.accepted:
            session = self.session_of[sequence] = self._offered.pop(sequence)
            self._checker.taken(sequence.request_id, sequence.attempt, self.executor_id, self.generation)
            session.accepted(sequence)
        for sequence, refusal in output.rejected:
            self._reject(sequence, refusal)
        for sequence in output.boarded:
            self.session_of[sequence].started(sequence)
        for sequence, offset, token_id in output.tokens:
            self.session_of[sequence].token(sequence, offset, token_id)
        for end in output.finished:
            self.step_bound.left(end.sequence)
            self.session_of.pop(end.sequence).finished(end.sequence, end.reason)
        for session in self.sessions:
            session.flush()
        if output.status is not None:
            self._note(output.status)

    def _reject(self, sequence: Sequence, refusal: Refusal) -> None:
        self._offered.pop(sequence).rejected(sequence.request_id, sequence.attempt, refusal)

    # Reports.

    def _note(self, status: EngineStatus) -> None:
        """A report is due where something changed that the ledger counts."""
        before, self._status = self._status, status
        if before is None or (before.held is not status.held or _budgets(before) != _budgets(status)):
            self._report_soon()

    def _report_soon(self) -> None:
        if not self._report_is_due:
            self._report_is_due = True
            when_us = max(self._timeline.now_us, self._reported_us + MIN_REPORT_US)
            self._timeline.at(when_us, self.process.run, self._report)

    def _heartbeat(self) -> None:
        self._timeline.after(REPORT_US, self.process.run, self._heartbeat)
        if not self._report_is_due:
            self._report()

    def _report(self) -> None:
        self._report_is_due = False
        self._reported_us = self._timeline.now_us
        self._seq += 1
        report = self._newest_report()
        self._checker.reported(self.executor_id, report)
        open_sessions = [session for session in self.sessions if session.is_open]
        if not open_sessions:
            return
        for session in open_sessions:
            if session.router.wants_report(self.executor_id):
                session.report(report)

    def _newest_report(self) -> executor_pb2.Report:
        limits = self.scheduler.limits
        status = self._status
        report = executor_pb2.Report(
            seq=self._seq,
            budget_blocks=self.scheduler.budget_blocks,
            saved_blocks=self.scheduler.num_saved_blocks,
            total_blocks=self.scheduler.pool.num_blocks,
            budget_sequences=status.budget_sequences if status else limits.max_num_sequences,
            draining=self.scheduler.is_draining,
            reserve_quantile=self.scheduler.reserve_quantile,
            step_ms=status.step_ms if status else 0.0,
            prefill_tokens_per_s=status.prefill_tokens_per_s if status else 0.0,
        )
        if self.scheduler.states is not None:
            counts = self.scheduler.states.counts()
            report.states.CopyFrom(states_proto(counts))
            report.checkpoint_names.extend(int.from_bytes(name, "little") for name in counts.names)
        # As `PlacementTable.reported`: only what was published, because the loop is a step ahead of the tokens.
        for one in status.held if status else ():
            report.held.add(request_id=one.request_id, attempt=one.attempt, reserved_blocks=one.reserved_blocks)
        for sequence in self._offered:
            report.held.add(
                request_id=sequence.request_id,
                attempt=sequence.attempt,
                reserved_blocks=sequence.num_reserved_blocks,
            )
        return report


def _budgets(status: EngineStatus) -> tuple[int, int]:
    return status.budget_blocks, status.budget_sequences
