"""The stream between a router and one start of an executor: messages reach the other side later, in order.

A stream that breaks takes everything with it that is under way.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from inflight.bench.timeline.timeline import Action, Timeline
from inflight.executor.scheduler.admission import Refusal
from inflight.executor.scheduler.sequence import FinishReason, Sequence
from inflight.v1 import executor_pb2, types_pb2

if TYPE_CHECKING:
    from inflight.bench.simulation.sim_executor import SimExecutor
    from inflight.bench.simulation.sim_router import SimRouter

LATENCY_US = 200
# The protocol's reasons, as the executor has them.
TO_EXECUTOR = {types_pb2.FinishReason.Value(f"FINISH_REASON_{reason.name}"): reason for reason in FinishReason}


@dataclass(slots=True)
class Frame:
    """Each by request and attempt, in the order in which a router must take them in."""

    accepted: list[tuple[str, int]] = field(default_factory=list)
    rejected: list[tuple[str, int, Refusal | None]] = field(default_factory=list)
    """With the reason; None: it was to attach to a placement that it does not hold."""
    started: list[tuple[str, int, int]] = field(default_factory=list)
    """With the number of prompt tokens found cached."""
    tokens: list[tuple[str, int, int, int]] = field(default_factory=list)
    """With offset and token."""
    finished: list[tuple[str, int, FinishReason]] = field(default_factory=list)


class Session:
    """One stream. Each side calls methods that the other side's process runs."""

    def __init__(self, router: SimRouter, executor: SimExecutor, timeline: Timeline) -> None:
        self.router = router
        self.executor = executor
        self.is_open = True
        self._timeline = timeline
        self._frame: Frame | None = None

    # Towards the executor.

    def submit(self, submit: executor_pb2.Submit) -> None:
        """Sends a placement."""
        self._to_executor(self.executor.submit, self, submit)

    async def write(self, request: executor_pb2.ServeRequest) -> None:
        """Sends what a router's link has collected."""
        for submit in request.submits:
            self.submit(submit)
        for cancel in request.cancels:
            self._to_executor(self.executor.cancel, cancel.request_id, cancel.attempt, TO_EXECUTOR[cancel.reason])
        for attach in request.attaches:
            self._to_executor(self.executor.attach, self, attach.request_id, attach.attempt)

    # Towards the router.

    def accepted(self, sequence: Sequence) -> None:
        """The placement was taken."""
        self._pending.accepted.append((sequence.request_id, sequence.attempt))

    def rejected(self, request_id: str, attempt: int, refusal: Refusal | None) -> None:
        """The placement was not taken. `refusal` None: it is not held."""
        self._pending.rejected.append((request_id, attempt, refusal))

    def started(self, sequence: Sequence) -> None:
        """The sequence boarded."""
        self._pending.started.append((sequence.request_id, sequence.attempt, sequence.num_cached_tokens))

    def token(self, sequence: Sequence, offset: int, token_id: int) -> None:
        """The sequence got a token."""
        self._pending.tokens.append((sequence.request_id, sequence.attempt, offset, token_id))

    def finished(self, sequence: Sequence, reason: FinishReason) -> None:
        """The sequence ended."""
        self._pending.finished.append((sequence.request_id, sequence.attempt, reason))

    def flush(self) -> None:
        """Sends what has collected."""
        if self._frame is not None:
            frame, self._frame = self._frame, None
            self._to_router(self.router.on_frame, self, frame)

    def report(self, report: executor_pb2.Report) -> None:
        """Sends a report."""
        self._to_router(self.router.on_report, self, report)

    @property
    def _pending(self) -> Frame:
        if self._frame is None:
            self._frame = Frame()
        return self._frame

    def _to_executor(self, action: Action, *args: Any) -> None:
        self._timeline.after(LATENCY_US, self.executor.process.run, self._if_open, action, *args)

    def _to_router(self, action: Action, *args: Any) -> None:
        self._timeline.after(LATENCY_US, self.router.process.run, self._if_open, action, *args)

    def _if_open(self, action: Action, *args: Any) -> None:
        if self.is_open:
            action(*args)
