"""Output of the engine loop: its status, and the results of one iteration."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from inflight.executor.engine.accounting import AccountTotal
from inflight.executor.engine.timing import LoopParts
from inflight.executor.scheduler.admission import Refusal
from inflight.executor.scheduler.seat_view import Seating, SequencePhase, SequenceSnapshot
from inflight.executor.scheduler.sequence import FinishEvent, NewTokens, ScoredRows, Sequence, StepOutcome
from inflight.executor.scheduler.step_constraint import StepConstraint
from inflight.executor.scheduler.step_record import DeviceTimes, KvCounts, PlanCounts, StepRecord
from inflight.executor.speculation.counts import NO_DRAFT_COUNTS, DraftCounts


@dataclass(frozen=True, slots=True)
class ReportedSequence:
    """A sequence as reports list it. `phase` is set only without a seat."""

    request_id: str
    attempt: int
    reserved_blocks: int
    phase: SequencePhase | None = None
    adapter_hash: bytes = b""


class HeldSequences:
    """The held sequences as reports list them, in order of acceptance. Only what changes is made again."""

    def __init__(self, seating: Seating) -> None:
        self._seating = seating
        self._reported: dict[Sequence, ReportedSequence] = {}
        self._all: tuple[ReportedSequence, ...] | None = ()

    def all(self) -> tuple[ReportedSequence, ...]:
        """Returns them; the same tuple until something has changed."""
        if self._all is None:
            self._all = tuple(self._reported.values())
        return self._all

    def add(self, sequences: Iterable[Sequence]) -> None:
        """Adds accepted sequences."""
        for sequence in sequences:
            self._note(sequence)

    def update(self, sequences: Iterable[Sequence]) -> None:
        """Updates the phase of those that are held."""
        for sequence in sequences:
            if sequence in self._reported:
                self._note(sequence)

    def remove(self, events: Iterable[FinishEvent]) -> None:
        """Removes the sequences that have ended."""
        for event in events:
            self._reported.pop(event.sequence, None)
            self._all = None

    def _note(self, sequence: Sequence) -> None:
        phase = self._seating.waiting_phase(sequence)
        self._reported[sequence] = ReportedSequence(
            sequence.request_id, sequence.attempt, sequence.num_reserved_blocks, phase, sequence.adapter_hash
        )
        self._all = None


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """State of the engine after a step. Blocks and sequences are counts, speeds are smoothed.

    Routers may reserve `budget_blocks` and, because sequences share so many blocks, `saved_blocks` more.

    `exposed_host_ms` is how long the device waits for the host between two steps; `device_busy_fraction` is the busy
    share of the time in which there is work. `device_busy_s` and `elapsed_s` are totals since the start. Those of the
    device are None if the engine does not measure them. `constraint` is that of the newest step, `bounds` counts the
    steps by constraint. `kv` has details of the blocks.
    `num_invalid_logits` counts the sequences that ended because a row of theirs had no usable logit.
    `drafts` counts the drafted tokens since the start.
    """

    budget_blocks: int
    saved_blocks: int
    total_blocks: int
    used_blocks: int
    cached_blocks: int
    budget_sequences: int
    num_running: int
    num_waiting: int
    waiting_prefill_tokens: int
    held: tuple[ReportedSequence, ...]
    draining: bool
    step_ms: float
    prefill_tokens_per_s: float
    num_steps: int
    num_output_tokens: int
    exposed_host_ms: float | None
    device_busy_fraction: float | None
    device_busy_s: float | None
    elapsed_s: float
    num_preempted: int
    num_preemptions: int
    computed_tokens: int
    recomputed_tokens: int
    used_host_blocks: int
    reserve_quantile: float
    constraint: StepConstraint | None
    bounds: tuple[tuple[StepConstraint, int], ...]
    kv: KvCounts
    num_invalid_logits: int = 0
    drafts: DraftCounts = NO_DRAFT_COUNTS


@dataclass(slots=True)
class EngineOutput:
    """Results of one iteration, in this order: acceptances, preemptions, boardings, log probabilities of prompts,
    tokens, ends.

    `record` describes the step that was retired. `sequences` lists the held sequences if they were requested. `usage`
    has the accounts that have changed, about once a second.
    """

    step: int
    accepted: list[Sequence] = field(default_factory=list)
    rejected: list[tuple[Sequence, Refusal]] = field(default_factory=list)
    preempted: tuple[Sequence, ...] = ()
    boarded: tuple[Sequence, ...] = ()
    scored: tuple[ScoredRows, ...] = ()
    tokens: NewTokens = field(default_factory=NewTokens)
    finished: list[FinishEvent] = field(default_factory=list)
    status: EngineStatus | None = None
    record: StepRecord | None = None
    sequences: tuple[SequenceSnapshot, ...] | None = None
    usage: tuple[AccountTotal, ...] = ()


def step_record(
    step: int, plan: PlanCounts, outcome: StepOutcome, times: DeviceTimes, parts: LoopParts, status: EngineStatus
) -> StepRecord:
    """Makes the record of a step that is being retired. It takes the times of the loop's parts up to now."""
    return StepRecord(
        step,
        parts.read_s,
        parts.take(),
        times,
        plan,
        len(outcome.tokens),
        len(outcome.finished),
        status.num_running,
        status.num_waiting + status.num_preempted,
        status.kv,
    )
