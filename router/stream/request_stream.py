"""The output of one request, from its admission until some time after its end.

`RequestStream` collects the tokens that executors send, by offset, and gives them to one `Reader`, which writes to the
client. A later reader gets all output from the beginning, and the previous reader fails with TAKEN_OVER. The life cycle
(`inflight.router.lifecycle`) tracks the state of the request. A stream never uses Redis or gRPC. Invariants:
`output_ids[i]` is the token at offset i and never changes; no output arrives after the end.
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum, IntEnum, auto
from typing import TypeVar

from inflight.common.errors import Reason, RequestError
from inflight.router.ledger.types import FIGURES, Demand, Ending, Placement, Queued, TakenOver
from inflight.router.lifecycle.events import End, LifecycleState, ReaderEnded, RequeueReason, Submit
from inflight.router.lifecycle.lifecycle import Lifecycle
from inflight.router.request.delivery import Delivery
from inflight.router.request.errors import taken_over
from inflight.router.request.executor_context import FrameError, context_of
from inflight.router.telemetry.events import CANCELLED, NO_OBSERVERS, RequestFacts, RequestRecord, outcome_of
from inflight.v1 import executor_pb2, types_pb2

Result = TypeVar("Result")

OWN_ENDS = frozenset({types_pb2.FINISH_REASON_STOP_TOKEN, types_pb2.FINISH_REASON_LENGTH})

# Names of requeue reasons in metrics and traces.
REQUEUE_REASON_NAMES = {
    RequeueReason.LOST: "executor_lost",
    RequeueReason.REJECTED: "rejected",
    RequeueReason.STALLED: "stood_still",
    RequeueReason.PREEMPTED: "preempted",
    RequeueReason.HANDED_BACK: "preempted",
    RequeueReason.WITHDRAWN: "withdrawn",
}
# The executor ends the placement as planned. If the request returns to the same executor, it has not moved.
PLANNED_REASONS = frozenset({RequeueReason.PREEMPTED, RequeueReason.HANDED_BACK, RequeueReason.EXTENDED})

# Bytes of a token id in a list, and of the other objects of a request.
BYTES_PER_TOKEN = 8
FIXED_BYTES = 4096
# Bytes of a token's log probabilities, and of each top token in them.
FIXED_LOGPROBS_BYTES = 250
TOP_LOGPROB_BYTES = 50


# The weight of a prompt token with log probabilities in its tenant's usage. It costs as much as an output token,
# because it needs the same logits.
SCORED_WEIGHT = 2

# Flags of the changes that the reader has not taken yet.
ACCEPTED, BOARDED, PREEMPTED = 1, 2, 4
UNKNOWN_LOGPROBS = types_pb2.PositionLogprobs()


class Reached(IntEnum):
    """The furthest state that a request has reached on any executor."""

    NONE = 0
    ACCEPTED = 1
    BOARDED = 2


class Seat(Enum):
    """Whether the request has a seat on the executor of its current placement."""

    NONE = auto()
    """Not yet."""
    HELD = auto()
    PREEMPTED = auto()
    """It had a seat and waits for another, on this or another executor."""


@dataclass(slots=True)
class News:
    """The changes since the reader last took news. `token_ids` begin at `offset`. `prompt_logprobs` are all known log
    probabilities of the prompt, from its second token on."""

    accepted: bool
    boarded: bool
    preempted: bool
    queued: Queued | None
    offset: int
    token_ids: list[int]
    prompt_logprobs: list[types_pb2.PositionLogprobs]
    end: End | None
    error: RequestError | None


@dataclass(slots=True)
class Clock:
    """Times of a request, in seconds of `time.monotonic`; None: not reached."""

    arrived: float
    boarded: float | None = None
    first_token: float | None = None
    last_token: float | None = None


class Reader:
    """A call that reads a request: all its choices. It is taken before the call first waits.

    `number` orders the calls of this router: a later call has a greater one. Once a later call, on this or another
    router, reads any choice, this one is displaced from all of them and ends with TAKEN_OVER. So one call gets all
    choices, however the steps of several calls are mixed.
    """

    def __init__(self, number: int = 0) -> None:
        self.number = number
        self._displaced: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    @property
    def is_displaced(self) -> bool:
        return self._displaced.done()

    def displace(self) -> None:
        """Ends the reading. Safe to repeat."""
        if not self._displaced.done():
            self._displaced.set_result(None)

    async def await_unless_displaced(self, answer: asyncio.Future[Result]) -> Result:
        """Waits for an answer that other calls may wait for, too. Raises `RequestError` TAKEN_OVER as soon as this
        reader is displaced."""
        await asyncio.wait((answer, self._displaced), return_when=asyncio.FIRST_COMPLETED)
        if self._displaced.done():
            raise taken_over()
        return answer.result()


class RequestStream:
    """The output of one request.

    Producers call `place`, `attach`, `accept`, `board`, `tokens`, `logprobs`, `prompt_logprobs`, `preempt`, `extend`
    and `move`. The reader calls `next`, or `changed` and `take`. `deadline` is the time by which the request must end,
    on the clock of `arrived`. `prior_ids` are output tokens that the client sent with the request. `delivery` says how
    a client reads the output; None: no client can read it.
    """

    def __init__(
        self,
        demand: Demand,
        submit: executor_pb2.Submit,
        arrived: float,
        deadline: float | None = None,
        prior_ids: Sequence[int] = (),
        delivery: Delivery | None = None,
        record: RequestRecord | None = None,
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self.request_id = demand.request_id
        self._now = now
        self.delivery = delivery
        self.life = Lifecycle(demand.request_id, self, deadline, is_repeatable=bool(self.digest))
        self.record = record or NO_OBSERVERS.follow(RequestFacts())
        self._demand = demand
        # The message for an executor, without the attempt and the output so far.
        self._submit = submit
        self._max_tokens = submit.stopping.max_tokens or math.inf
        self.output_ids: list[int] = list(prior_ids)
        self._logprobs: dict[int, types_pb2.PositionLogprobs] = {}
        self._prompt_logprobs: list[types_pb2.PositionLogprobs] = []
        # The embedding or the score; set with the end of a request that asks for one.
        self.pooled: Sequence[float] = ()
        self.num_cached_tokens = 0
        self.num_migrations = 0
        # What its placements have used, as far as executors told this router; None: nothing yet.
        self.used: types_pb2.ResourceUsage | None = None
        self.clock = Clock(arrived)
        # The request already ran when this router adopted it. The time of its first token is unknown, and this router
        # may not have received all output that the client already has.
        self.was_adopted = False
        # The one that may take news. None: no call has read the request here yet.
        self.reader: Reader | None = None
        self._reached = Reached.NONE
        self._seat = Seat.NONE
        self._num_placements = 0
        self._num_before_placement = 0
        # The executor that ended the last placement as planned, until the next placement.
        self._left_executor_id = ""
        self._unreported = 0
        self._queued: Queued | None = None
        self._num_taken = 0
        self._changed = asyncio.Event()
        # If set, called for new tokens instead of waking the reader, unless there is other news. Set while the reader
        # waits.
        self.on_output: Callable[[], None] | None = None
        # Set when this router no longer serves the request.
        self.forgotten = asyncio.Event()

    @property
    def digest(self) -> bytes:
        """The digest of the request; empty if the request cannot be repeated."""
        return b"" if self.delivery is None else self.delivery.digest

    @property
    def has_ended(self) -> bool:
        """Whether its end or its error is known."""
        return self.life.has_ended

    @property
    def end(self) -> End | None:
        """The end of the request, unless it failed."""
        return self.life.end

    @property
    def error(self) -> RequestError | None:
        """The error with which the request failed; None if it has not failed."""
        return self.life.error

    @property
    def has_been_accepted(self) -> bool:
        """Whether an executor has ever accepted it."""
        return self._reached >= Reached.ACCEPTED

    @property
    def stands_by(self) -> bool:
        """Whether it is placed on an executor and has no seat there."""
        return self.life.placement is not None and self._seat is not Seat.HELD

    @property
    def is_preempted(self) -> bool:
        """Whether it gave up its seat and waits for another."""
        return self._seat is Seat.PREEMPTED

    @property
    def has_progressed(self) -> bool:
        """Whether the current placement has produced a token."""
        return len(self.output_ids) > self._num_before_placement

    @property
    def is_short(self) -> bool:
        """Whether it has fewer tokens than an end by length requires, so that a token is missing."""
        return len(self.output_ids) < self._max_tokens < math.inf

    @property
    def is_complete(self) -> bool:
        """Whether the output has reached `max_tokens`."""
        return len(self.output_ids) >= self._max_tokens

    @property
    def placement_blocks(self) -> int:
        """Blocks of the next placement, on an executor that ends it when its reservation is used up."""
        return self._demand.blocks_after(len(self.output_ids))

    @property
    def has_used_reservation(self) -> bool:
        """Whether the output fills the reservation of the current placement, so that another placement follows."""
        demand, placement = self._demand, self.life.placement
        if placement is None or demand.reservation_tokens is None:
            return False
        return demand.prompt_tokens + len(self.output_ids) == placement.blocks * demand.block_size

    @property
    def num_bytes(self) -> int:
        """Approximate memory of the request, in bytes."""
        logprobs_bytes = len(self._logprobs) * (
            FIXED_LOGPROBS_BYTES + TOP_LOGPROB_BYTES * self._submit.num_top_logprobs
        )
        scores_bytes = len(self._prompt_logprobs) * (
            FIXED_LOGPROBS_BYTES + TOP_LOGPROB_BYTES * self._submit.num_prompt_logprobs
        )
        ids_bytes = BYTES_PER_TOKEN * len(self.output_ids)
        return self._submit.ByteSize() + ids_bytes + logprobs_bytes + scores_bytes + FIXED_BYTES

    def demand(self, *, is_served: bool = False) -> Demand:
        """Returns the demand for the ledger.

        After a placement it has the last known attempt. After the first token it has no first-token deadline. Output
        that the client sent with the request does not count as output of an earlier placement. With `is_served` the
        deadlines are the times that are left of them now.
        """
        has_run = self.life.attempt > 0
        deadline_ms, total_ms = self._demand.deadline_ms, self._demand.total_ms
        if has_run and self.output_ids:
            deadline_ms = None
        if is_served:
            elapsed_ms = round((self._now() - self.clock.arrived) * 1000)
            deadline_ms = None if deadline_ms is None else max(1, deadline_ms - elapsed_ms)
            total_ms = None if total_ms is None else max(1, total_ms - elapsed_ms)
        return dataclasses.replace(
            self._demand,
            last_attempt=self.life.attempt,
            output_tokens=len(self.output_ids) if has_run else 0,
            placement_blocks=self.placement_blocks,
            deadline_ms=deadline_ms,
            total_ms=total_ms,
            is_served=is_served,
        )

    def ending(self, attempt: int) -> Ending:
        """Returns the end of one of its placements, with the usage of the request."""
        life = self.life
        return Ending(
            self.request_id,
            attempt,
            computed_tokens=self._num_computed_tokens,
            output_tokens=len(self.output_ids),
            by_itself=self._yields_tokens
            and (life.has_matched_stop or (life.end is not None and life.end.reason in OWN_ENDS)),
            cancelled=life.was_cancelled,
        )

    @property
    def num_prompt_tokens(self) -> int:
        return len(self._submit.prompt_ids)

    @property
    def _yields_tokens(self) -> bool:
        """Whether it generates, and does not ask for an embedding or a score."""
        return not self._submit.HasField("pooled")

    def pool(self, values: Sequence[float]) -> None:
        """Sets the embedding or the score, before the end. Raises `FrameError` if the request asks for none, or gets
        none."""
        if self._yields_tokens == bool(values):
            raise FrameError(f"{len(values)} numbers of an embedding for {self.request_id}")
        self.pooled = values

    @property
    def _num_computed_tokens(self) -> int:
        if self._reached is not Reached.BOARDED:
            return 0
        num_computed = len(self._submit.prompt_ids) - self.num_cached_tokens
        return SCORED_WEIGHT * num_computed if self._submit.HasField("num_prompt_logprobs") else num_computed

    def is_repeat_of(self, attached: executor_pb2.SequenceAttached) -> bool:
        """Returns whether the sequence on the executor has the digest of this request. True if this request has no
        digest. Raises `FrameError` if the context that the executor returned is invalid."""
        return not self.digest or context_of(attached).digest == self.digest

    def place(self, placement: Placement) -> executor_pb2.Submit:
        """Makes a placement the current one. Returns the message for its executor."""
        if self._num_placements and self.output_ids and placement.executor_id != self._left_executor_id:
            self.num_migrations += 1
        self._left_executor_id = ""
        self._leave_seat(len(self.output_ids))
        self.record.placed(placement.executor_id, placement.attempt)
        self._keep_adapter(placement)
        submit = executor_pb2.Submit()
        submit.CopyFrom(self._submit)
        submit.attempt = placement.attempt
        submit.traceparent = self.record.traceparent
        submit.reserved_blocks = placement.blocks or self._demand.blocks
        if self.life.deadline is not None:
            submit.deadline_ms = max(1, round((self.life.deadline - self._now()) * 1000))
        submit.prior_output_ids.extend(self.output_ids)
        return submit

    def _keep_adapter(self, placement: Placement) -> None:
        """Uses the adapter that the request got when it was admitted. Another router may have admitted it and chosen
        another content for the adapter's name."""
        if placement.adapter and placement.adapter != self._submit.adapter_hash:
            self._submit.adapter_hash = placement.adapter
            self._demand = dataclasses.replace(self._demand, adapter=placement.adapter)

    def attach(self, *, has_started: bool, num_cached_tokens: int) -> None:
        """Prepares for the output of the current placement, which already ran on the executor. The executor sends it
        from the first token on."""
        if self.life.placement is not None:
            self._keep_adapter(self.life.placement)
        self._leave_seat(0)
        if not self.has_ended:  # tokens after the end are dropped
            self.output_ids.clear()
        self.was_adopted = has_started
        self.record.adopted(has_started)
        self.accept()
        if has_started:
            self._reached, self._seat = Reached.BOARDED, Seat.HELD
            self._unreported |= BOARDED
            self.num_cached_tokens = min(num_cached_tokens, len(self._submit.prompt_ids))

    def _leave_seat(self, num_before_placement: int) -> None:
        self._num_placements += 1
        self._num_before_placement = num_before_placement
        if self._seat is Seat.HELD:
            self._seat = Seat.NONE

    def attend(self, reader: Reader) -> None:
        """Gives all news from the beginning to a reader and displaces the previous one. Raises `RequestError`
        TAKEN_OVER if the reader is displaced already, or a later call reads the request."""
        current = self.reader
        if reader.is_displaced or (current is not None and current.number > reader.number):
            reader.displace()
            raise taken_over()
        if current is not None and current is not reader:
            current.displace()
        self._begin_reading(reader)

    def drain(self) -> Reader:
        """Replaces a reader that has left by one that has no client, until a call attends. Returns it."""
        reader = Reader(0 if self.reader is None else self.reader.number)
        self._begin_reading(reader)
        return reader

    def _begin_reading(self, reader: Reader) -> None:
        self.reader = reader
        self.on_output = None
        self._unreported = (0, ACCEPTED, ACCEPTED | BOARDED)[self._reached]
        self._num_taken = 0
        self._changed.set()  # also for the previous reader, which may wait

    def accept(self) -> None:
        """Records that the executor accepted the placement."""
        self._reached = max(self._reached, Reached.ACCEPTED)
        self._unreported |= ACCEPTED
        self._changed.set()

    def add_used(self, used: types_pb2.ResourceUsage) -> None:
        """Adds what a placement has used, which has ended."""
        self.used = sum_of_used([used] if self.used is None else [self.used, used])

    def board(self, num_cached_tokens: int) -> None:
        """Records that the sequence boarded."""
        if self._reached < Reached.BOARDED:
            self._reached = Reached.BOARDED
            self.clock.boarded = self._now()
            self.num_cached_tokens = min(num_cached_tokens, len(self._submit.prompt_ids))
            self.record.boarded(self.num_cached_tokens)
        else:
            self.record.boarded_again()
        self._seat = Seat.HELD
        self._unreported |= BOARDED
        self._changed.set()

    def tokens(self, offset: int, token_ids: Sequence[int]) -> bool:
        """Adds tokens, the first of which is at `offset`. Drops those that are already known, and all if the request
        has ended. Returns False if a token before them is missing. Raises `FrameError` for a token beyond
        `max_tokens`, because sending it again cannot correct that."""
        if self.life.has_ended:
            return True
        last = offset + len(token_ids) - 1
        if last >= self._max_tokens:
            raise FrameError(f"token {last} of {self.request_id} is beyond the {self._max_tokens} that it may have")
        expected = len(self.output_ids)
        if offset > expected:
            return False
        if last >= expected:
            now = self._now()
            if self.clock.first_token is None and not self.was_adopted:
                self.clock.first_token = now
            self.clock.last_token = now
            self._seat = Seat.HELD
            self.output_ids.extend(token_ids[expected - offset :])
        return True

    def publish_output(self) -> None:
        """Tells the reader that there are new tokens. Called once for all tokens of a frame."""
        if self._num_taken >= len(self.output_ids):
            return
        if self.on_output is None or self._changed.is_set():
            self._changed.set()
        else:
            self.on_output()

    def take_output(self, reader: Reader | None) -> tuple[int, list[int]]:
        """Returns the tokens that the reader has not taken, and the offset of the first. Raises `RequestError`
        TAKEN_OVER if another reader replaced this one."""
        self.check_reader(reader)
        offset, self._num_taken = self._num_taken, len(self.output_ids)
        return offset, self.output_ids[offset:]

    def logprobs_of(self, first: int, last: int) -> list[types_pb2.PositionLogprobs]:
        """Returns the log probabilities of the tokens `[first, last)`; an empty message for each unknown one."""
        return [self._logprobs.get(offset, UNKNOWN_LOGPROBS) for offset in range(first, last)]

    def logprobs(self, offset: int, values: types_pb2.PositionLogprobs) -> None:
        """Adds the log probabilities of a token that is already known."""
        if offset < len(self.output_ids):
            self._logprobs.setdefault(offset, values)

    def mean_logprob(self, num_tokens: int) -> float | None:
        """Returns the mean log probability of the first `num_tokens` tokens. None if one of them is unknown, minus
        infinity if there are no tokens."""
        known = [self._logprobs[offset].chosen.logprob for offset in range(num_tokens) if offset in self._logprobs]
        if len(known) < num_tokens:
            return None
        return sum(known) / num_tokens if num_tokens else -math.inf

    def prompt_logprobs(self, position: int, values: Sequence[types_pb2.PositionLogprobs]) -> None:
        """Adds the log probabilities of the prompt's tokens from `position` on. Drops those that are already known,
        which an executor sends again after a failure. Raises `FrameError` if earlier ones are missing, if they belong
        to another prompt, or if they were not requested."""
        prompt_ids, first = self._submit.prompt_ids, len(self._prompt_logprobs) + 1
        is_own = [one.chosen.token_id for one in values] == list(prompt_ids[position : position + len(values)])
        if not 1 <= position <= first or not is_own or not self._submit.HasField("num_prompt_logprobs"):
            raise FrameError(f"{len(values)} log probabilities from prompt token {position} of {self.request_id}")
        self._prompt_logprobs.extend(values[first - position :])
        self._changed.set()

    def preempt(self) -> None:
        """Records that the request gave up its seat and waits for another. No effect before an executor has accepted
        it."""
        if self.has_been_accepted and self._seat is not Seat.PREEMPTED:
            self._seat = Seat.PREEMPTED
            self._unreported |= PREEMPTED
            self._changed.set()

    def requeue(self, why: RequeueReason) -> None:
        """Records that the placement has ended and that another one is to follow. The reader is told, unless the
        placement has used its reservation."""
        if why in PLANNED_REASONS:
            self._left_executor_id = self.life.executor_id
        if why is RequeueReason.EXTENDED:
            self.record.extended()
        else:
            self.preempt()
            self.record.moved(REQUEUE_REASON_NAMES[why])

    def move(self, queued: Queued) -> None:
        """Records the new position in the queue."""
        self._queued = queued
        self._changed.set()

    def stop(self) -> None:
        """Ends the request at a stop that its reader found. Executors do not match stop strings."""
        self.finish(End(types_pb2.FINISH_REASON_STOP_STRING, None))

    def finish(self, end: End) -> None:
        """Ends the request because its reader has determined this end. No effect if it has already ended."""
        if self.life.handle(ReaderEnded(end)):
            self.publish_end()

    def publish_end(self) -> None:
        """Tells the reader that the end or the error of the request is known, and records it."""
        self._changed.set()
        if self.life.error is not None and self.life.error.reason is Reason.TAKEN_OVER and self.reader is not None:
            self.reader.displace()  # another router reads this choice, and will read the others
        if self.life.end is not None:
            self._record_end(outcome_of(self.life.end.reason))
        elif self.life.state is LifecycleState.LEFT:
            self.record.left()
        elif self.life.error is not None:
            self._record_end(self.life.error.reason.value, is_error=True)

    def forget(self) -> None:
        """Records that this router no longer serves the request. If it has no end, its client left while it waited."""
        self.forgotten.set()
        if not self.has_ended:
            self._record_end(CANCELLED)

    def _record_end(self, outcome: str, *, is_error: bool = False) -> None:
        first, last = self.clock.first_token, self.clock.last_token
        decode_s = None if first is None or last is None else last - first
        self.record.ended(outcome, len(self.output_ids), decode_s, is_error=is_error)

    async def end_on_executor(self, timeout_s: float) -> None:
        """Waits until a request with an end has ended on its executor, too, so that `used` is complete; at most
        `timeout_s` seconds."""
        with suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self.forgotten.wait()

    async def next(self, reader: Reader | None = None) -> News:
        """Waits for news and takes all of it. Raises `RequestError` TAKEN_OVER if another reader replaced this one."""
        await self.changed(reader)
        return self.take(reader)

    async def changed(self, reader: Reader | None) -> None:
        """Waits for news. Returns at once for a reader that another one has replaced: the news is not for it."""
        if reader is self.reader:
            await self._changed.wait()

    def listen(self, reader: Reader | None, on_output: Callable[[], None] | None) -> None:
        """Sets `on_output`, unless another reader replaced this one."""
        if reader is self.reader:
            self.on_output = on_output

    def wake(self) -> None:
        """Wakes the reader."""
        self._changed.set()

    def check_reader(self, reader: Reader | None) -> None:
        """Raises `RequestError` TAKEN_OVER if another reader replaced this one."""
        if reader is not self.reader:
            raise taken_over()

    def take(self, reader: Reader | None) -> News:
        """Takes all news. Raises `RequestError` TAKEN_OVER if another reader replaced this one."""
        self.check_reader(reader)
        self._changed.clear()
        news = News(
            bool(self._unreported & ACCEPTED),
            bool(self._unreported & BOARDED),
            bool(self._unreported & PREEMPTED),
            self._queued,
            self._num_taken,
            self.output_ids[self._num_taken :],
            self._prompt_logprobs,
            self.life.end,
            self.life.error,
        )
        self._unreported = 0
        self._queued = None
        self._num_taken = max(self._num_taken, len(self.output_ids))
        return news


def sum_of_used(parts: Iterable[types_pb2.ResourceUsage]) -> types_pb2.ResourceUsage:
    """Returns what several placements or choices have used together."""
    total = types_pb2.ResourceUsage()
    for used in parts:
        for name in FIGURES:
            setattr(total, name, getattr(total, name) + getattr(used, name))
    return total


def unread_stream(request_id: str) -> RequestStream:
    """Returns a placeholder for a request that no client reads here, so that frames can name its slot."""
    stream = RequestStream(Demand(request_id, 1, 1), executor_pb2.Submit(), 0.0)
    stream.life.handle(Submit())
    stream.life.handle(TakenOver(request_id))
    return stream
