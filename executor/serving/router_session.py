"""One router's `Serve` stream on the executor's side: slots, frames and flow control.

Engine output collects in one pending response, and a single writer takes it whole whenever the stream can carry it. A
router that keeps up gets one frame per step, or fewer if all its sequences have a stream interval: tokens then wait
until one sequence has as many as its interval, or anything else is to be sent. A slower router gets fewer, larger
frames, and costs the engine only the memory of the token ids. Step frames wait while `max_unacked_steps` of them are
unacknowledged. Acceptances, attachments, refusals and reports never wait. If too many of those or too many tokens
collect because the router does not read, no further requests are read from it. If it acknowledges none while too many
tokens wait, its stream ends. All calls come from the event loop's thread.

Within a frame a slot means one sequence: a freed slot is assigned again only after the frame that says so.
"""

from __future__ import annotations

import asyncio
import heapq
from collections import deque
from collections.abc import Mapping
from collections.abc import Sequence as ReadOnlyList

from inflight.common.errors import Reason, RequestError
from inflight.common.protocol import (
    ATTACH_VERSION,
    MAX_FRAME_PROMPT_LOGPROBS,
    MAX_FRAME_TOKENS,
    MAX_PROMPT_LOGPROB_ROWS,
    PROTOCOL_VERSION,
)
from inflight.executor.scheduler.admission import Refusal
from inflight.executor.scheduler.sequence import FinishEvent, FinishReason, Sequence, TokenLogprobs
from inflight.executor.serving.finished import Ended
from inflight.executor.serving.usage import used_proto
from inflight.v1 import executor_pb2, types_pb2

FINISH_REASON_PROTO: dict[FinishReason, types_pb2.FinishReason] = {
    one: getattr(types_pb2, f"FINISH_REASON_{one.name}") for one in FinishReason
}

REJECT_REASON_PROTO: dict[Refusal, executor_pb2.RejectReason] = {
    one: getattr(executor_pb2, f"REJECT_REASON_{one.name}") for one in Refusal
}

# Most answers that wait for a router that does not read; each has about 100 bytes.
MAX_WAITING_ANSWERS = 1 << 16
# Most tokens that may wait while more requests are read, some 400 MiB: each attach sends tokens again.
MAX_WAITING_TOKENS = 4 * MAX_FRAME_TOKENS
# Weight of a token's log probabilities, with the most tokens that may be reported, in tokens.
LOGPROBS_TOKENS = 20
# Most log probabilities of a prompt in one message of a frame.
SCORES_PER_MESSAGE = MAX_PROMPT_LOGPROB_ROWS


class Session:
    """The sequences of one router, and what has not been sent to it yet."""

    def __init__(
        self, router_id: str, generation: int, max_unacked_steps: int, protocol_version: int = PROTOCOL_VERSION
    ) -> None:
        self.router_id = router_id
        self.knows_attach = protocol_version >= ATTACH_VERSION
        self._generation = generation
        self._max_unacked_steps = max_unacked_steps
        self._slots: dict[Sequence, int] = {}
        self._free_slots: list[int] = []
        self._num_slots = 0
        # Slots whose end is in the pending frame. They are free once that frame is taken, because within a frame a slot
        # means one sequence.
        self._ended_slots: list[int] = []
        self._frame = 0
        self._acked_frame = 0
        self._control = executor_pb2.ServeResponse()
        self._step = executor_pb2.StepFrame()
        # The tokens of the pending frame. Appending to lists costs far less than to the message.
        self._token_slots: list[int] = []
        self._token_offsets: list[int] = []
        self._token_ids: list[int] = []
        # Of slots with a stream interval: the interval, and the tokens that may come before they must be sent.
        self._intervals: dict[int, int] = {}
        self._num_until_due: dict[int, int] = {}
        # Whether the pending frame must be sent; otherwise its tokens wait for more.
        self._is_due = False
        # The log probabilities among them, in their order.
        self._logprobs: deque[executor_pb2.SequenceLogprobs] = deque()
        # Log probabilities of prompts, all of which are sent before any token behind them.
        self._prompt_logprobs: deque[executor_pb2.SequencePromptLogprobs] = deque()
        self._num_prompt_logprobs = 0
        # Numbers of embeddings of the pending frame.
        self._num_pooled = 0
        # Slots without a seat at the end of the pending frame that had one before.
        self._preempted_slots: dict[int, None] = {}
        self._wake = asyncio.Event()
        self._taken = asyncio.Event()
        self._is_closing = False
        self._is_stopped = False

    def accept(self, sequence: Sequence, stream_interval: int = 1) -> None:
        """Tells the router that a placement was accepted, and its slot."""
        slot = self._take_slot()
        self._set_interval(slot, stream_interval)
        self._slots[sequence] = slot
        self._control.accepted.add(request_id=sequence.request_id, attempt=sequence.attempt, slots=[slot])
        self._wake.set()

    def attach(
        self, sequence: Sequence, attached: executor_pb2.SequenceAttached, offset: int, output_ids: ReadOnlyList[int]
    ) -> None:
        """Makes the router the reader of a sequence, in a new slot. `output_ids` begin at `offset`."""
        self._slots[sequence] = self._attach(attached, offset, output_ids, sequence.logprobs)

    def replay(self, attached: executor_pb2.SequenceAttached, offset: int, ended: Ended) -> None:
        """Sends the output of a sequence that has ended, from `offset` on, and its end."""
        slot = self._attach(attached, offset, ended.output_ids[offset:], ended.logprobs)
        scores = ended.prompt_logprobs
        self._score(slot, ended.placed.submit.prompt_ids, scores, 0, len(scores))
        self._end_slot(slot, ended)

    def _attach(
        self,
        attached: executor_pb2.SequenceAttached,
        offset: int,
        output_ids: ReadOnlyList[int],
        logprobs: Mapping[int, TokenLogprobs],
    ) -> int:
        slot = self._take_slot()
        self._set_interval(slot, attached.submit.stream_interval)
        attached.slots.append(slot)
        self._control.attached.append(attached)
        self._token_slots += [slot] * len(output_ids)
        self._token_offsets += range(offset, offset + len(output_ids))
        self._token_ids += output_ids
        if logprobs:
            for each, token_id in enumerate(output_ids, start=offset):
                self._report_logprobs(slot, each, token_id, logprobs.get(each))
        self._make_due()
        return slot

    def _set_interval(self, slot: int, stream_interval: int) -> None:
        """Lets the slot's tokens after the first wait for others; an interval of 0 or 1 does not."""
        if stream_interval > 1:
            self._intervals[slot], self._num_until_due[slot] = stream_interval, 1

    def _make_due(self) -> None:
        """Sends the pending frame as soon as the router's acknowledgements allow it."""
        self._is_due = True
        self._wake.set()

    def detach(self, sequence: Sequence) -> None:
        """Tells the router that another one reads the sequence from now on. A router that does not know Attach is told
        that it was cancelled."""
        if not self.knows_attach:
            self.finish(FinishEvent(sequence, FinishReason.CANCELLED))
            return
        slot = self._slots.pop(sequence)
        self._preempted_slots.pop(slot, None)
        self._free(slot)
        self._step.detached.append(slot)
        self._make_due()

    def reject(self, request_id: str, attempt: int, reason: executor_pb2.RejectReason, detail: str) -> None:
        """Tells the router that a placement was refused."""
        self._control.rejected.add(request_id=request_id, attempt=attempt, reason=reason, detail=detail)
        self._wake.set()

    def report(self, report: executor_pb2.Report) -> None:
        """Sends a report. It replaces one that has not been sent yet."""
        self._control.report.CopyFrom(report)
        self._wake.set()

    def charge(self, usage: executor_pb2.UsageReport) -> None:
        """Sends what accounts have used. It replaces what has not been sent yet: the executor repeats it."""
        self._control.usage.CopyFrom(usage)
        self._wake.set()

    def preempt(self, sequence: Sequence) -> None:
        """Tells the router that a sequence was preempted."""
        self._preempted_slots[self._slots[sequence]] = None
        self._make_due()

    def start(self, sequence: Sequence) -> None:
        """Tells the router that a sequence boarded, for the first time or again."""
        slot = self._slots[sequence]
        # A slot in both lists of a frame has boarded and was then preempted.
        self._preempted_slots.pop(slot, None)
        self._step.started.add(slot=slot, cached_tokens=sequence.num_cached_tokens)
        self._make_due()

    def token(self, sequence: Sequence, offset: int, token_id: int) -> None:
        """Adds a token to the pending frame."""
        slot = self._slots[sequence]
        num_until_due = self._num_until_due.get(slot, 1) - 1
        if num_until_due > 0:
            self._num_until_due[slot] = num_until_due
        elif not self._is_due:
            self._make_due()
        self._token_slots.append(slot)
        self._token_offsets.append(offset)
        self._token_ids.append(token_id)
        if sequence.num_top_logprobs is not None:
            self._report_logprobs(slot, offset, token_id, sequence.logprobs.get(offset))

    def score(self, sequence: Sequence, start: int, end: int) -> None:
        """Adds the log probabilities of the prompt's tokens `[start + 1, end + 1)`."""
        slot = self._slots.get(sequence)
        if slot is not None:
            self._score(slot, sequence.token_ids, sequence.prompt_logprobs, start, end)

    def _score(
        self, slot: int, prompt_ids: ReadOnlyList[int], logprobs: ReadOnlyList[TokenLogprobs], start: int, end: int
    ) -> None:
        for first in range(start, end, SCORES_PER_MESSAGE):
            last = min(end, first + SCORES_PER_MESSAGE)
            rows = zip(prompt_ids[first + 1 : last + 1], logprobs[first:last], strict=True)
            values = [_position_logprobs(token_id, one) for token_id, one in rows]
            message = executor_pb2.SequencePromptLogprobs(slot=slot, position=first + 1, values=values)
            self._prompt_logprobs.append(message)
        self._num_prompt_logprobs += end - start
        self._make_due()

    def _report_logprobs(self, slot: int, offset: int, token_id: int, logprobs: TokenLogprobs | None) -> None:
        """Adds the log probabilities of a token. Output of earlier placements has none here."""
        if logprobs is not None:
            values = _position_logprobs(token_id, logprobs)
            self._logprobs.append(executor_pb2.SequenceLogprobs(slot=slot, offset=offset, values=values))

    def finish(self, event: FinishEvent) -> None:
        """Adds the end of a sequence to the pending frame."""
        slot = self._slots.pop(event.sequence)
        self._preempted_slots.pop(slot, None)
        self._end_slot(slot, event)

    def _end_slot(self, slot: int, end: FinishEvent | Ended) -> None:
        self._free(slot)
        used = end.used if isinstance(end, Ended) else end.sequence.used
        self._step.finished.add(
            slot=slot,
            reason=FINISH_REASON_PROTO[end.reason],
            stop_token_id=end.stop_token_id,
            error=end.error,
            constraint_unfinished=end.constraint_unfinished,
            pooled=end.pooled,
            used=None if used is None else used_proto(used),
        )
        self._num_pooled += len(end.pooled)
        self._make_due()

    def _free(self, slot: int) -> None:
        """Frees a slot with the pending frame."""
        self._ended_slots.append(slot)
        self._intervals.pop(slot, None)
        self._num_until_due.pop(slot, None)

    def end_step(self, step: int) -> None:
        """Sets the number of the step that the pending frame ends with."""
        self._step.step = step

    def acknowledge(self, frame: int) -> None:
        """Records that the router has processed all frames up to this one, at most as many as were sent."""
        self._acked_frame = max(self._acked_frame, min(frame, self._frame))
        self._wake.set()

    async def has_room(self) -> None:
        """Waits until less is queued than the limits allow. Raises `RequestError` STALLED where that would wait for
        acknowledgements, which arrive only with the next requests."""
        while self._num_answers >= MAX_WAITING_ANSWERS or self._has_too_many_tokens:
            if self._has_too_many_tokens and not self._may_send_step:
                text = f"{self._frame - self._acked_frame} unacknowledged frames, and too many tokens wait behind them"
                raise RequestError(Reason.STALLED, text)
            self._taken.clear()
            await self._taken.wait()

    @property
    def _has_too_many_tokens(self) -> bool:
        """Whether the queued tokens exceed the limit. A freed slot and a number of an embedding count as a token, log
        probabilities by their weight."""
        num_tokens = len(self._token_ids) + len(self._ended_slots) + self._num_pooled
        num_logprobs = len(self._logprobs) + self._num_prompt_logprobs
        return num_tokens + LOGPROBS_TOKENS * num_logprobs >= MAX_WAITING_TOKENS

    @property
    def _may_send_step(self) -> bool:
        return self._frame - self._acked_frame < self._max_unacked_steps

    @property
    def _num_answers(self) -> int:
        control = self._control
        return len(control.accepted) + len(control.rejected) + len(control.attached)

    def close(self) -> None:
        """Adds nothing from now on. The stream ends when everything queued has been sent."""
        self._is_closing = True
        self._make_due()

    def stop(self) -> None:
        """Sends nothing from now on: the router has closed its side, or its stream broke."""
        self._is_stopped = True
        self._wake.set()

    async def next_response(self) -> executor_pb2.ServeResponse | None:
        """Waits until something can be sent and takes it. Returns None when the stream is to end."""
        while not self._is_stopped:
            self._wake.clear()
            response = self.take()
            if response is not None:
                return response
            if self._is_closing and not self._has_step:
                return None
            await self._wake.wait()
        return None

    def take(self) -> executor_pb2.ServeResponse | None:
        """Returns what can be sent now, if anything."""
        control = self._control
        has_control = self._num_answers or control.HasField("report") or control.HasField("usage")
        # Waiting tokens leave with any other message: that costs less than a message of their own.
        may_send_step = self._has_step and (self._is_due or has_control) and self._may_send_step
        if not (may_send_step or has_control):
            return None
        response, self._control = control, executor_pb2.ServeResponse()
        self._taken.set()
        response.generation = self._generation
        if may_send_step:
            self._fill_step(response.step)
        return response

    @property
    def _has_step(self) -> bool:
        step = self._step
        has_values = self._token_ids or self._prompt_logprobs
        return bool(has_values or step.started or step.finished or step.detached or self._preempted_slots)

    def _fill_step(self, step: executor_pb2.StepFrame) -> None:
        self._frame += 1
        self._add_prompt_logprobs(step)
        # Tokens are sent with the last of the log probabilities of prompts, or after them.
        count = 0 if self._prompt_logprobs else self._num_tokens_of_frame()
        if self._prompt_logprobs or count < len(self._token_ids):
            self._fill_part(step, count)
            self._is_due = True
            return
        self._is_due = False
        self._step.frame = self._frame
        step.MergeFrom(self._step)
        self._add_tokens(step, count)
        step.paused.extend(self._preempted_slots)
        self._preempted_slots = {}
        self._step = executor_pb2.StepFrame()
        self._num_pooled = 0
        for slot in self._ended_slots:
            heapq.heappush(self._free_slots, slot)
        self._ended_slots.clear()

    def _add_prompt_logprobs(self, step: executor_pb2.StepFrame) -> None:
        """Adds as many log probabilities of prompts as a frame may hold."""
        num_left = MAX_FRAME_PROMPT_LOGPROBS
        while self._prompt_logprobs and (count := len(self._prompt_logprobs[0].values)) <= num_left:
            step.prompt_logprobs.append(self._prompt_logprobs.popleft())
            num_left -= count
        self._num_prompt_logprobs -= MAX_FRAME_PROMPT_LOGPROBS - num_left

    def _num_tokens_of_frame(self) -> int:
        """Returns the number of tokens of the next frame. Log probabilities are sent with their tokens."""
        if LOGPROBS_TOKENS * len(self._logprobs) > MAX_FRAME_TOKENS:
            return min(len(self._token_ids), MAX_FRAME_TOKENS // LOGPROBS_TOKENS)
        return min(len(self._token_ids), MAX_FRAME_TOKENS)

    def _fill_part(self, step: executor_pb2.StepFrame, count: int) -> None:
        """Fills a frame with the first of the tokens. Ends are sent with the last of them."""
        step.frame, step.step = self._frame, self._step.step
        step.started.extend(self._step.started)
        del self._step.started[:]
        self._add_tokens(step, count)

    def _add_tokens(self, step: executor_pb2.StepFrame, count: int) -> None:
        step.slots.extend(self._token_slots[:count])
        step.offsets.extend(self._token_offsets[:count])
        step.token_ids.extend(self._token_ids[:count])
        if self._intervals:
            sent = self._intervals.keys() & step.slots
            self._num_until_due.update((slot, self._intervals[slot]) for slot in sent)
        if self._logprobs:
            taken = set(zip(step.slots, step.offsets, strict=True))
            while self._logprobs and (self._logprobs[0].slot, self._logprobs[0].offset) in taken:
                step.logprobs.append(self._logprobs.popleft())
        del self._token_slots[:count], self._token_offsets[:count], self._token_ids[:count]

    def _take_slot(self) -> int:
        if self._free_slots:
            return heapq.heappop(self._free_slots)
        self._num_slots += 1
        return self._num_slots - 1


def _position_logprobs(token_id: int, logprobs: TokenLogprobs) -> types_pb2.PositionLogprobs:
    values = logprobs.top_logprobs
    top = zip(logprobs.top_ids, values, strict=True)
    return types_pb2.PositionLogprobs(
        chosen=types_pb2.TokenLogprob(token_id=token_id, logprob=logprobs.logprob, rank=logprobs.rank),
        # Equal values have the same rank, as among the whole vocabulary.
        top=[types_pb2.TokenLogprob(token_id=one, logprob=value, rank=values.index(value) + 1) for one, value in top],
    )
