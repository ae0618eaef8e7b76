"""What routers are told of an executor: its status in a report, its policy in a description."""

from __future__ import annotations

from collections.abc import Iterable

from inflight.v1 import executor_pb2, stats_pb2, types_pb2

from executor.engine_output import EngineStatus, HeldSequence
from executor.limits import SchedulerLimits
from executor.recent_rates import Rates
from executor.seating import Phase
from executor.step_bounds import StepConstraint

CONSTRAINT_PROTO: dict[StepConstraint, types_pb2.StepConstraint] = {
    StepConstraint.NO_WORK: types_pb2.STEP_CONSTRAINT_NO_WORK,
    StepConstraint.SEATS: types_pb2.STEP_CONSTRAINT_SEATS,
    StepConstraint.BLOCKS: types_pb2.STEP_CONSTRAINT_BLOCKS,
    StepConstraint.TOKENS: types_pb2.STEP_CONSTRAINT_TOKENS,
    StepConstraint.PACE: types_pb2.STEP_CONSTRAINT_PACE,
    StepConstraint.STATIC_BATCH: types_pb2.STEP_CONSTRAINT_STATIC_BATCH,
    StepConstraint.TWIN: types_pb2.STEP_CONSTRAINT_TWIN,
}

PHASE_PROTO: dict[Phase, stats_pb2.SequencePhase] = {
    Phase.STANDBY: stats_pb2.SEQUENCE_PHASE_STANDBY,
    Phase.PREFILL: stats_pb2.SEQUENCE_PHASE_PREFILL,
    Phase.DECODE: stats_pb2.SEQUENCE_PHASE_DECODE,
    Phase.PREEMPTED: stats_pb2.SEQUENCE_PHASE_PREEMPTED,
}


def policy_proto(limits: SchedulerLimits) -> types_pb2.SchedulerPolicy:
    """What routers are told; a static batch is guaranteed whatever the setting."""
    if limits.is_overcommitted:
        return types_pb2.SCHEDULER_POLICY_MAX_UTILIZATION
    return types_pb2.SCHEDULER_POLICY_GUARANTEED_NO_EVICT


def report_of(seq: int, status: EngineStatus, held: Iterable[HeldSequence], rates: Rates) -> executor_pb2.Report:
    """The report of this number; `held` is what the ledger is to take as held."""
    report = executor_pb2.Report(
        seq=seq,
        budget_blocks=status.budget_blocks,
        total_blocks=status.total_blocks,
        used_blocks=status.used_blocks,
        cached_blocks=status.cached_blocks,
        budget_sequences=status.budget_sequences,
        num_running=status.num_running,
        num_waiting=status.num_waiting,
        waiting_prefill_tokens=status.waiting_prefill_tokens,
        draining=status.draining,
        step_ms=status.step_ms,
        output_tokens_per_s=rates.output_tokens_per_s,
        steps_per_s=rates.steps_per_s,
        prefill_tokens_per_s=status.prefill_tokens_per_s,
        num_steps=status.num_steps,
        exposed_host_ms=status.exposed_host_ms,
        device_busy_fraction=status.device_busy_fraction,
        device_busy_s=status.device_busy_s,
        elapsed_s=status.elapsed_s,
        num_preempted=status.num_preempted,
        num_preemptions=status.num_preemptions,
        computed_tokens=status.computed_tokens,
        recomputed_tokens=status.recomputed_tokens,
        used_host_blocks=status.used_host_blocks,
        reserve_quantile=status.reserve_quantile,
        bounds=[
            types_pb2.StepBound(constraint=CONSTRAINT_PROTO[constraint], num_steps=num_steps)
            for constraint, num_steps in status.bounds
        ],
    )
    if status.constraint is not None:
        report.constraint = CONSTRAINT_PROTO[status.constraint]
    for one in held:
        report.held.add(
            request_id=one.request_id,
            attempt=one.attempt,
            reserved_blocks=one.reserved_blocks,
            phase=None if one.phase is None else PHASE_PROTO[one.phase],
        )
    return report
