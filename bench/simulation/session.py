"""The stream between a router and one start of an executor: messages reach the other side later, in order.

A stream that breaks takes everything with it that is under way.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any

from inflight.bench.timeline.timeline import Action, Timeline
from inflight.executor.scheduler.admission import Refusal
from inflight.executor.scheduler.sequence import FinishReason, Sequence
from inflight.executor.serving.router_session import REJECT_REASON_PROTO
from inflight.v1 import executor_pb2, types_pb2

if TYPE_CHECKING:
    from inflight.bench.simulation.sim_executor import SimExecutor
    from inflight.bench.simulation.sim_router import SimRouter

LATENCY_US = 200
# The protocol's reasons, as the executor has them.
TO_EXECUTOR = {types_pb2.FinishReason.Value(f"FINISH_REASON_{reason.name}"): reason for reason in FinishReason}


class Session:
    """One stream. Each side calls methods that the other side's process runs."""

    def __init__(self, router: SimRouter, executor: SimExecutor, timeline: Timeline) -> None:
        self.router = router
        self.executor = executor
        self.is_open = True
        self._timeline = timeline
        self._response: executor_pb2.ServeResponse | None = None
        self._slots: dict[Sequence, int] = {}
        self._slot_numbers, self._frame_numbers = itertools.count(), itertools.count(1)

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
        slot = self._slots[sequence] = next(self._slot_numbers)
        self._pending.accepted.add(request_id=sequence.request_id, attempt=sequence.attempt, slots=[slot])

    def rejected(self, request_id: str, attempt: int, refusal: Refusal | None) -> None:
        """The placement was not taken. `refusal` None: it was to be attached to, and is not held."""
        why = executor_pb2.REJECT_REASON_NOT_HELD if refusal is None else REJECT_REASON_PROTO[refusal]
        self._pending.rejected.add(request_id=request_id, attempt=attempt, reason=why)

    def started(self, sequence: Sequence) -> None:
        """The sequence boarded."""
        self._pending.step.started.add(slot=self._slots[sequence], cached_tokens=sequence.num_cached_tokens)

    def token(self, sequence: Sequence, offset: int, token_id: int) -> None:
        """The sequence got a token."""
        step = self._pending.step
        step.slots.append(self._slots[sequence])
        step.offsets.append(offset)
        step.token_ids.append(token_id)

    def finished(self, sequence: Sequence, reason: FinishReason) -> None:
        """The sequence ended."""
        error = "failed" if reason is FinishReason.ERROR else ""
        slot = self._slots.pop(sequence)
        self._pending.step.finished.add(slot=slot, reason=f"FINISH_REASON_{reason.name}", error=error)

    def flush(self) -> None:
        """Sends what has collected."""
        if self._response is not None:
            response, self._response = self._response, None
            response.step.frame = next(self._frame_numbers)
            self._to_router(self.router.on_response, self, response)

    def report(self, report: executor_pb2.Report) -> None:
        """Sends a report."""
        response = executor_pb2.ServeResponse(generation=self.executor.generation, report=report)
        self._to_router(self.router.on_response, self, response)

    @property
    def _pending(self) -> executor_pb2.ServeResponse:
        if self._response is None:
            self._response = executor_pb2.ServeResponse(generation=self.executor.generation)
        return self._response

    def _to_executor(self, action: Action, *args: Any) -> None:
        self._timeline.after(LATENCY_US, self.executor.process.run, self._if_open, action, *args)

    def _to_router(self, action: Action, *args: Any) -> None:
        self._timeline.after(LATENCY_US, self.router.process.run, self._if_open, action, *args)

    def _if_open(self, action: Action, *args: Any) -> None:
        if self.is_open:
            action(*args)
