"""What the loop tells the others: how it stands, and what a turn of it brought."""

from __future__ import annotations

from dataclasses import dataclass, field

from executor.engine.timing import LoopParts
from executor.scheduler.admission import Refusal
from executor.scheduler.seat_view import SequencePhase, SequenceStanding
from executor.scheduler.sequence import FinishEvent, NewTokens, Sequence, StepOutcome
from executor.scheduler.step_constraint import StepConstraint
from executor.scheduler.step_record import DeviceTimes, KvCounts, PlanCounts, StepRecord


@dataclass(frozen=True, slots=True)
class ReportedSequence:
    """What a report says of a sequence; `phase` is set where it has no seat."""

    request_id: str
    attempt: int
    reserved_blocks: int
    phase: SequencePhase | None = None


@dataclass(frozen=True, slots=True)
class EngineStatus:
    """How the engine stands after a step; blocks and sequences are counts, speeds are smoothed.

    `exposed_host_ms` is how long the device waits for the host between two steps, `device_busy_fraction` its share of
    the time in which there is work; `device_busy_s` of `elapsed_s` are the totals since the start. `constraint` bound
    the newest step, `bounds` counts the steps of each. `kv` says more of the blocks. `num_invalid_logits` counts the
    sequences that ended because the logits of a row of theirs held no number.
    """

    budget_blocks: int
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
    exposed_host_ms: float
    device_busy_fraction: float
    device_busy_s: float
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


@dataclass(slots=True)
class EngineOutput:
    """What came in or what a step brought, in this order: acceptances, seats given up, boardings, tokens, ends.

    `record` is of the step that was retired, `sequences` is who is held, where somebody asked."""

    step: int
    accepted: list[Sequence] = field(default_factory=list)
    rejected: list[tuple[Sequence, Refusal]] = field(default_factory=list)
    paused: tuple[Sequence, ...] = ()
    started: tuple[Sequence, ...] = ()
    tokens: NewTokens = field(default_factory=NewTokens)
    finished: list[FinishEvent] = field(default_factory=list)
    status: EngineStatus | None = None
    record: StepRecord | None = None
    sequences: tuple[SequenceStanding, ...] | None = None


def step_record(
    step: int, plan: PlanCounts, outcome: StepOutcome, times: DeviceTimes, parts: LoopParts, status: EngineStatus
) -> StepRecord:
    """The record of a step that is being retired. What the loop's parts took until now goes into it."""
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
