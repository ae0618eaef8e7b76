"""One router's `Serve` stream on the executor's side: slots, frames and credits.

What the engine publishes collects in one pending response; a single writer takes it whole whenever the stream can carry
it. A router that keeps up gets one frame per step; one that does not gets fewer, larger frames, and costs the engine
nothing but the memory of the token ids. Step frames wait when `max_unacked_steps` of them are unacknowledged;
acceptances, refusals and reports never wait. All calls come from the event loop's thread.
"""

from __future__ import annotations

import asyncio
import heapq

from inflight.v1 import executor_pb2, types_pb2

from executor.admission import Refusal
from executor.sequence import FinishEvent, FinishReason, Sequence

FINISH_REASON_PROTO: dict[FinishReason, types_pb2.FinishReason] = {
    FinishReason.STOP_TOKEN: types_pb2.FINISH_REASON_STOP_TOKEN,
    FinishReason.STOP_STRING: types_pb2.FINISH_REASON_STOP_STRING,
    FinishReason.LENGTH: types_pb2.FINISH_REASON_LENGTH,
    FinishReason.CANCELLED: types_pb2.FINISH_REASON_CANCELLED,
    FinishReason.DEADLINE: types_pb2.FINISH_REASON_DEADLINE,
    FinishReason.PREEMPTED: types_pb2.FINISH_REASON_PREEMPTED,
    FinishReason.ERROR: types_pb2.FINISH_REASON_ERROR,
}

REJECT_REASON_PROTO: dict[Refusal, executor_pb2.RejectReason] = {
    Refusal.NO_CAPACITY: executor_pb2.REJECT_REASON_NO_CAPACITY,
    Refusal.STALE_ATTEMPT: executor_pb2.REJECT_REASON_STALE_ATTEMPT,
    Refusal.DRAINING: executor_pb2.REJECT_REASON_DRAINING,
    Refusal.INVALID: executor_pb2.REJECT_REASON_INVALID,
}


class Session:
    """The sequences of one router and what it has not been sent yet."""

    def __init__(self, router_id: str, generation: int, max_unacked_steps: int) -> None:
        self.router_id = router_id
        self._generation = generation
        self._max_unacked_steps = max_unacked_steps
        self._slots: dict[Sequence, int] = {}
        self._free_slots: list[int] = []
        self._num_slots = 0
        # Slots whose end is in the pending frame. They are free once that frame is taken: inside one frame a slot
        # must mean one sequence.
        self._ended_slots: list[int] = []
        self._frame = 0
        self._acked_frame = 0
        self._control = executor_pb2.ServeResponse()
        self._step = executor_pb2.StepFrame()
        # The tokens of the pending frame: appending to lists costs far less than to the message.
        self._token_slots: list[int] = []
        self._token_offsets: list[int] = []
        self._token_ids: list[int] = []
        # Slots that have no seat at the end of the pending frame, and had one.
        self._paused_slots: dict[int, None] = {}
        self._wake = asyncio.Event()

    @property
    def sequences(self) -> tuple[Sequence, ...]:
        """The sequences accepted on this stream that have not ended."""
        return tuple(self._slots)

    def accept(self, sequence: Sequence) -> None:
        """Tells the router that a placement was taken, and its slot."""
        slot = self._take_slot()
        self._slots[sequence] = slot
        self._control.accepted.add(request_id=sequence.request_id, attempt=sequence.attempt, slots=[slot])
        self._wake.set()

    def reject(self, request_id: str, attempt: int, reason: executor_pb2.RejectReason, detail: str) -> None:
        """Tells the router that a placement was not taken."""
        self._control.rejected.add(request_id=request_id, attempt=attempt, reason=reason, detail=detail)
        self._wake.set()

    def report(self, report: executor_pb2.Report) -> None:
        """Sends a report; a newer one replaces one not sent yet."""
        self._control.report.CopyFrom(report)
        self._wake.set()

    def pause(self, sequence: Sequence) -> None:
        """Tells the router that a sequence gave up its seat."""
        self._paused_slots[self._slots[sequence]] = None
        self._wake.set()

    def start(self, sequence: Sequence) -> None:
        """Tells the router that a sequence boarded, for the first time or again."""
        slot = self._slots[sequence]
        # Who is in both lists of a frame has boarded and then given up its seat.
        self._paused_slots.pop(slot, None)
        self._step.started.add(slot=slot, cached_tokens=sequence.num_cached_tokens)
        self._wake.set()

    def token(self, sequence: Sequence, offset: int, token_id: int) -> None:
        """Adds a token to the pending frame."""
        self._token_slots.append(self._slots[sequence])
        self._token_offsets.append(offset)
        self._token_ids.append(token_id)
        self._wake.set()

    def finish(self, event: FinishEvent) -> None:
        """Adds the end of a sequence to the pending frame."""
        slot = self._slots.pop(event.sequence)
        self._paused_slots.pop(slot, None)
        self._ended_slots.append(slot)
        self._step.finished.add(
            slot=slot,
            reason=FINISH_REASON_PROTO[event.reason],
            stop_token_id=event.stop_token_id,
            error=event.error,
        )
        self._wake.set()

    def end_step(self, step: int) -> None:
        """Stamps the pending frame with the step that it ends with."""
        self._step.step = step

    def acknowledge(self, frame: int) -> None:
        """The router dealt with all frames up to this one. It cannot have dealt with more than were sent."""
        self._acked_frame = max(self._acked_frame, min(frame, self._frame))
        self._wake.set()

    async def next_response(self) -> executor_pb2.ServeResponse:
        """Waits until something can be sent and takes it."""
        while True:
            self._wake.clear()
            response = self.take()
            if response is not None:
                return response
            await self._wake.wait()

    def take(self) -> executor_pb2.ServeResponse | None:
        """What can be sent now, if anything."""
        may_send_step = self._frame - self._acked_frame < self._max_unacked_steps and (
            self._token_ids or self._step.started or self._step.finished or self._paused_slots
        )
        has_control = self._control.accepted or self._control.rejected or self._control.HasField("report")
        if not (may_send_step or has_control):
            return None
        response, self._control = self._control, executor_pb2.ServeResponse()
        response.generation = self._generation
        if may_send_step:
            self._fill_step(response.step)
        return response

    def _fill_step(self, step: executor_pb2.StepFrame) -> None:
        self._frame += 1
        self._step.frame = self._frame
        step.CopyFrom(self._step)
        step.slots.extend(self._token_slots)
        step.offsets.extend(self._token_offsets)
        step.token_ids.extend(self._token_ids)
        step.paused.extend(self._paused_slots)
        self._paused_slots = {}
        self._step = executor_pb2.StepFrame()
        self._token_slots, self._token_offsets, self._token_ids = [], [], []
        for slot in self._ended_slots:
            heapq.heappush(self._free_slots, slot)
        self._ended_slots.clear()

    def _take_slot(self) -> int:
        if self._free_slots:
            return heapq.heappop(self._free_slots)
        self._num_slots += 1
        return self._num_slots - 1
