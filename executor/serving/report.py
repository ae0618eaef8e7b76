"""Reports of an executor to its routers: their content, their rates, and when they are due."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from inflight.executor.engine.output import EngineStatus, ReportedSequence
from inflight.executor.pooling.pooled import Pooling, PoolingKind
from inflight.executor.scheduler.limits import SchedulerLimits
from inflight.executor.scheduler.seat_view import SequencePhase
from inflight.executor.scheduler.states import StateCounts
from inflight.executor.scheduler.step_constraint import StepConstraint
from inflight.v1 import executor_pb2, stats_pb2, types_pb2

WINDOW_S = 10.0
# Minimum distance between readings that are kept; the window is inexact by this much.
GAP_S = 0.1


@dataclass(frozen=True, slots=True)
class Rates:
    """Means over the window."""

    steps_per_s: float
    output_tokens_per_s: float


@dataclass(frozen=True, slots=True)
class _Reading:
    at_s: float
    num_steps: int
    num_output_tokens: int


class RecentRates:
    """Growth of monotonic counters within the window."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        # The first reading is the newest one from before the window.
        self._readings: deque[_Reading] = deque((_Reading(clock(), 0, 0),))

    def observe(self, num_steps: int, num_output_tokens: int) -> None:
        """Adds the current values of the counters."""
        now_s = self._clock()
        readings = self._readings
        if len(readings) > 1 and now_s - readings[-2].at_s < GAP_S:
            readings.pop()
        readings.append(_Reading(now_s, num_steps, num_output_tokens))
        self._forget(now_s)

    def per_second(self) -> Rates:
        """Returns the current rates."""
        self._forget(self._clock())
        first, last = self._readings[0], self._readings[-1]
        return Rates(
            (last.num_steps - first.num_steps) / WINDOW_S,
            (last.num_output_tokens - first.num_output_tokens) / WINDOW_S,
        )

    def _forget(self, now_s: float) -> None:
        while len(self._readings) > 1 and self._readings[1].at_s <= now_s - WINDOW_S:
            self._readings.popleft()


# Between two reports: of changes that decide about admission, of other changes such as counters, and without a change.
MIN_INTERVAL_S = 0.05
QUIET_INTERVAL_S = 0.25
MAX_INTERVAL_S = 1.0


class Reporter:
    """Calls `send(seq, status)` with the newest status whenever a report is due."""

    def __init__(self, send: Callable[[int, EngineStatus], None]) -> None:
        self._send = send
        self._status: EngineStatus | None = None
        self._seq = 0
        self._changed = asyncio.Event()
        self._is_stale = False
        self._reported_s = 0.0

    def update(self, status: EngineStatus, *, is_urgent: bool = True) -> None:
        """Sets the newest status. A change that is not urgent waits for `QUIET_INTERVAL_S`."""
        self._status, self._is_stale = status, True
        if is_urgent:
            self._changed.set()

    def send_now(self) -> None:
        """Makes a report due although nothing changed, because a router has joined."""
        self._changed.set()

    def send_first(self) -> None:
        """Sends a report before anything else that results from the same change."""
        if self._status is not None:
            self._report(self._status)

    async def run(self) -> None:
        """Sends reports until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            # `asyncio.wait_for` would lose a cancellation that arrives together with a change (Python 3.11).
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(QUIET_INTERVAL_S):
                    await self._changed.wait()
            # Without a change the lease must still be renewed every second.
            is_late = loop.time() - self._reported_s >= MAX_INTERVAL_S
            if not (self._changed.is_set() or self._is_stale or is_late):
                continue
            self._changed.clear()
            if self._status is not None:
                self._reported_s = loop.time()
                self._report(self._status)
            await asyncio.sleep(MIN_INTERVAL_S)

    def _report(self, status: EngineStatus) -> None:
        self._is_stale = False
        self._seq += 1
        self._send(self._seq, status)


CONSTRAINT_PROTO: dict[StepConstraint, types_pb2.StepConstraint] = {
    one: getattr(types_pb2, f"STEP_CONSTRAINT_{one.name}") for one in StepConstraint
}

PHASE_PROTO: dict[SequencePhase, stats_pb2.SequencePhase] = {
    one: getattr(stats_pb2, f"SEQUENCE_PHASE_{one.name}") for one in SequencePhase
}


POOLING_PROTO: dict[PoolingKind, types_pb2.PoolingKind] = {
    one: getattr(types_pb2, f"POOLING_KIND_{one.name}") for one in PoolingKind
}


def pooling_proto(pooling: Pooling | None) -> types_pb2.Pooling | None:
    """Returns how a model pools, to announce it."""
    if pooling is None:
        return None
    return types_pb2.Pooling(
        kind=POOLING_PROTO[pooling.kind],
        size=pooling.size,
        is_normalized=pooling.is_normalized,
        is_only=pooling.is_only,
    )


def policy_proto(limits: SchedulerLimits) -> types_pb2.SchedulerPolicy:
    """Returns the policy to announce; a static batch is guaranteed whatever the setting."""
    if limits.is_overcommitted:
        return types_pb2.SCHEDULER_POLICY_MAX_UTILIZATION
    return types_pb2.SCHEDULER_POLICY_GUARANTEED_NO_EVICT


def states_proto(states: StateCounts) -> types_pb2.RecurrentStates:
    return types_pb2.RecurrentStates(
        num_slots=states.slots,
        used_slots=states.used_slots,
        num_checkpoints=states.checkpoints,
        kept_checkpoints=states.kept_checkpoints,
        saved_checkpoints=states.saved,
        loaded_checkpoints=states.loaded,
        dropped_checkpoints=states.dropped,
        kv_tokens=states.kv_tokens,
        usable_tokens=states.usable_tokens,
    )


# The numbers of a status that a report has under the same name.
FIGURES = tuple(
    field.name
    for field in executor_pb2.Report.DESCRIPTOR.fields
    if field.message_type is None and field.enum_type is None and field.name in EngineStatus.__dataclass_fields__
)


def report_of(seq: int, status: EngineStatus, held: Iterable[ReportedSequence], rates: Rates) -> executor_pb2.Report:
    """Makes a report. `held` are the sequences that the ledger should count as held."""
    report = executor_pb2.Report(
        seq=seq,
        output_tokens_per_s=rates.output_tokens_per_s,
        steps_per_s=rates.steps_per_s,
        **{name: getattr(status, name) for name in FIGURES},
        bounds=[
            types_pb2.StepBound(constraint=CONSTRAINT_PROTO[constraint], num_steps=num_steps)
            for constraint, num_steps in status.bounds
        ],
    )
    if status.constraint is not None:
        report.constraint = CONSTRAINT_PROTO[status.constraint]
    if status.drafts.num_drafts:
        report.drafts.num_drafts = status.drafts.num_drafts
        report.drafts.num_verified = status.drafts.num_verified
        report.drafts.num_accepted = status.drafts.num_accepted
    host_prefixes = status.kv.host_prefixes
    if host_prefixes.stored_blocks:
        report.host_prefixes.MergeFrom(types_pb2.HostPrefixes(**host_prefixes._asdict()))
    if (states := status.kv.states) is not None:
        report.states.CopyFrom(states_proto(states))
        report.checkpoint_names.extend(int.from_bytes(name, "little") for name in states.names)
    for one in held:
        report.held.add(
            request_id=one.request_id,
            attempt=one.attempt,
            reserved_blocks=one.reserved_blocks,
            phase=None if one.phase is None else PHASE_PROTO[one.phase],
            adapter_hash=one.adapter_hash.hex(),
        )
    return report
