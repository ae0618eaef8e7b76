"""What the router knows of one request between its admission and its end, and for a while after.

`RequestStream` collects what executors send, keyed by absolute offset, and hands it to the one reader that writes to
the client; a reader that comes later is told everything from the beginning, and the one before it that it was taken
over. It never touches Redis or gRPC. Invariants: `output_ids[i]` is the token at offset i and never changes; nothing is
taken from a placement that is not current; after the end nothing more comes.
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass

from common.errors import RequestError
from inflight.v1 import executor_pb2, types_pb2
from router.request.delivery import Delivery
from router.request.errors import taken_over
from router.request.executor_context import FrameError, context_of
from router.store.types import Adopted, Demand, Dropped, Ending, Placement, Queued
from router.telemetry.events import CANCELLED, NO_OBSERVERS, RequestFacts, RequestRecord, outcome_of

OWN_ENDS = frozenset({types_pb2.FINISH_REASON_STOP_TOKEN, types_pb2.FINISH_REASON_LENGTH})

# Of a list of ints, and of the objects around it.
BYTES_PER_TOKEN = 8
FIXED_BYTES = 4096
# Of a token's log probabilities, and of each of the likeliest tokens in it.
FIXED_LOGPROBS_BYTES = 250
TOP_LOGPROB_BYTES = 50


@dataclass(frozen=True, slots=True)
class End:
    """The end that the executor reported (a value of `FinishReason` of the protocol)."""

    reason: int
    stop_token_id: int | None


@dataclass(slots=True)
class News:
    """What is new since the consumer last asked. `token_ids` begin at `offset`; `logprobs` are all that are known, by
    offset."""

    accepted: bool
    started: bool
    paused: bool
    queued: Queued | None
    offset: int
    token_ids: list[int]
    logprobs: dict[int, types_pb2.PositionLogprobs]
    end: End | None
    error: RequestError | None


@dataclass(slots=True)
class Clock:
    """When things happened, in seconds of `time.monotonic`; None: not yet."""

    arrived: float
    boarded: float | None = None
    first_token: float | None = None
    last_token: float | None = None


class RequestStream:
    """One request. Producers call `place`, `accept`, `start`, `token`, `pause`, `move`, `finish`, `fail`; the reader
    calls `next`. `deadline` is when it must have ended, on the clock of `arrived`; `prior_ids` is output that its
    client brought. Without a `reading` nobody can read it again."""

    def __init__(
        self,
        demand: Demand,
        submit: executor_pb2.Submit,
        arrived: float,
        deadline: float | None = None,
        prior_ids: Sequence[int] = (),
        reading: Delivery | None = None,
        record: RequestRecord | None = None,
    ) -> None:
        self.request_id = demand.request_id
        self.record = record or NO_OBSERVERS.follow(RequestFacts())
        self.reading = reading
        self.deadline = deadline
        self._demand = demand
        # What an executor is told, but for the attempt and the output so far.
        self._submit = submit
        self._max_tokens = submit.stopping.max_tokens or math.inf
        self.output_ids: list[int] = list(prior_ids)
        self._logprobs: dict[int, types_pb2.PositionLogprobs] = {}
        self.placement: Placement | None = None
        # Of the newest placement, the current or the last; 0 and empty before the first.
        self.attempt = 0
        self.executor_id = ""
        self.num_cached_tokens = 0
        self.num_migrations = 0
        self.clock = Clock(arrived)
        # The client is gone, or has what it wanted: nobody listens any more.
        self.is_abandoned = False
        # Somebody asked to cancel it: whatever comes next, it ends.
        self.is_cancelled = False
        # Another router, or nobody for now, serves it: nothing of it is settled or cancelled from here.
        self.is_let_go = False
        self.is_being_submitted = False
        self.admitted: Placement | Queued | Dropped | Adopted | None = None  # the newest answer that is no refusal
        # It has ended on its executor, which sends it once more.
        self.is_over = False
        # For all that the ledger knows, it ended otherwise than by a cancel.
        self.is_uncancelled = False
        # An executor died under it before its next token.
        self.is_suspect = False
        # How often in a row it was preempted before its next token.
        self.num_fruitless = 0
        # Its stop text came, which executors know nothing of.
        self.has_matched_stop = False
        self.reader = 0  # who may call `next`; counts up
        self._end: End | None = None
        self._error: RequestError | None = None
        self._has_been_accepted = False
        self._has_boarded = False
        self._is_paused = self._has_seat = False  # on the executor of the current placement
        # It ran before this router had it: when its first token came is not known.
        self._has_unknown_past = False
        self._num_before_placement = 0
        self._accepted = self._started = self._paused = False
        self._queued: Queued | None = None
        self._num_taken = 0
        self._changed = asyncio.Event()
        # Set when this router serves it no longer.
        self.forgotten = asyncio.Event()

    @property
    def is_wanted(self) -> bool:
        """Whether somebody waits for more of it."""
        return not (self.is_abandoned or self.is_cancelled or self.is_over or self.has_ended)

    @property
    def has_ended(self) -> bool:
        """Whether its end or its error is known."""
        return self._end is not None or self._error is not None

    @property
    def end(self) -> End | None:
        """How it ended, where it did not fail."""
        return self._end

    @property
    def error(self) -> RequestError | None:
        """What it failed with."""
        return self._error

    @property
    def has_been_accepted(self) -> bool:
        """Whether an executor has taken it, once."""
        return self._has_been_accepted

    @property
    def stands_by(self) -> bool:
        """Whether it is on an executor and has no seat there, or none any more."""
        return self.placement is not None and not self._has_seat

    @property
    def is_paused(self) -> bool:
        """Whether it gave up its seat and waits for another."""
        return self._is_paused

    @property
    def has_unknown_past(self) -> bool:
        """Whether it ran before this router had it: output that its client knows may be on the way here."""
        return self._has_unknown_past

    @property
    def has_progressed(self) -> bool:
        """Whether the current placement has brought a token."""
        return len(self.output_ids) > self._num_before_placement

    @property
    def is_short(self) -> bool:
        """Whether fewer tokens have come than an end for want of more allows."""
        return len(self.output_ids) < self._max_tokens < math.inf

    @property
    def is_complete(self) -> bool:
        """Whether it has all the tokens that it may have."""
        return len(self.output_ids) >= self._max_tokens

    @property
    def was_cancelled(self) -> bool:
        """Whether it ended by its client or for want of one."""
        if self.has_matched_stop:
            return False
        if self._end is not None:
            return self._end.reason == types_pb2.FINISH_REASON_CANCELLED
        return self.is_cancelled or self.is_abandoned

    @property
    def num_bytes(self) -> int:
        """About what it takes of memory."""
        logprobs_bytes = len(self._logprobs) * (
            FIXED_LOGPROBS_BYTES + TOP_LOGPROB_BYTES * self._submit.num_top_logprobs
        )
        return self._submit.ByteSize() + BYTES_PER_TOKEN * len(self.output_ids) + logprobs_bytes + FIXED_BYTES

    def demand(self) -> Demand:
        """What the ledger is asked for: after earlier placements with the last attempt that is known, and after the
        first token without a deadline for it. Output that the client brought makes it no older."""
        has_run = self.attempt > 0
        return dataclasses.replace(
            self._demand,
            last_attempt=self.attempt,
            output_tokens=len(self.output_ids) if has_run else 0,
            deadline_ms=None if has_run and self.output_ids else self._demand.deadline_ms,
        )

    def ending(self, attempt: int) -> Ending:
        """The end of one of its placements, with what it has used."""
        by_itself = self.has_matched_stop or (self._end is not None and self._end.reason in OWN_ENDS)
        return Ending(
            self.request_id,
            attempt,
            computed_tokens=len(self._submit.prompt_ids) - self.num_cached_tokens if self._has_boarded else 0,
            output_tokens=len(self.output_ids),
            by_itself=by_itself,
            cancelled=self.was_cancelled,
        )

    def is_repeat_of(self, attached: executor_pb2.SequenceAttached) -> bool:
        """Whether what an executor was told is this request, for all that its digest says. Raises `FrameError`."""
        digest = b"" if self.reading is None else self.reading.digest
        return not digest or context_of(attached).digest == digest

    def place(self, placement: Placement) -> executor_pb2.Submit:
        """Makes a placement the current one and returns what its executor is to be told."""
        if self.attempt and self.output_ids:
            self.num_migrations += 1
        self._make_current(placement)
        self._num_before_placement = len(self.output_ids)
        self.record.placed(placement.executor_id, placement.attempt)
        submit = executor_pb2.Submit()
        submit.CopyFrom(self._submit)
        submit.attempt = placement.attempt
        submit.traceparent = self.record.traceparent
        submit.reserved_blocks = placement.blocks or self._demand.blocks
        if self.deadline is not None:
            submit.deadline_ms = max(1, round((self.deadline - time.monotonic()) * 1000))
        submit.prior_output_ids.extend(self.output_ids)
        return submit

    def attach(self, placement: Placement, has_started: bool, num_cached_tokens: int) -> None:
        """Makes a placement the current one that the executor has known for a while, and sends from its first token
        on."""
        self._make_current(placement)
        self._num_before_placement = 0
        if not self.has_ended:  # what comes behind the end is dropped
            self.output_ids.clear()
        self._has_unknown_past = has_started
        self.record.adopted(has_started)
        self.accept()
        if has_started:
            self._has_boarded = self._started = self._has_seat = True
            self.num_cached_tokens = min(num_cached_tokens, len(self._submit.prompt_ids))

    def _make_current(self, placement: Placement) -> None:
        self.placement = placement
        self.attempt = placement.attempt
        self.executor_id = placement.executor_id
        self._has_seat = False

    def displace(self) -> None:
        """The current placement is void; another one follows or the request fails."""
        self.placement = None

    def let_go(self, error: RequestError) -> None:
        """It goes on without this router; whoever reads it here is told so."""
        self.is_let_go = True
        self.displace()
        self.fail(error)

    def attend(self) -> int:
        """A reader takes over and is told everything from the beginning. The number that it gives to `next`."""
        self.reader += 1
        self._accepted = self._has_been_accepted
        self._started = self._has_boarded
        self._paused = False
        self._num_taken = 0
        self._changed.set()
        return self.reader

    def accept(self) -> None:
        """The executor took the placement."""
        self._has_been_accepted = self._accepted = True
        self._changed.set()

    def start(self, num_cached_tokens: int) -> None:
        """The sequence boarded."""
        if not self._has_boarded:
            self._has_boarded = True
            self.clock.boarded = time.monotonic()
            self.num_cached_tokens = min(num_cached_tokens, len(self._submit.prompt_ids))
            self.record.boarded(self.num_cached_tokens)
        else:
            self.record.boarded_again()
        self._is_paused = False
        self._started = self._has_seat = True
        self._changed.set()

    def token(self, offset: int, token_id: int) -> bool:
        """Takes a token. One that is known, or behind the end, is dropped; returns False where one is missing before
        it. Raises `FrameError` for one more than was asked for: no asking makes that come right."""
        if self.has_ended:
            return True
        if offset >= self._max_tokens:
            raise FrameError(f"token {offset} of {self.request_id} is beyond the {self._max_tokens} that it may have")
        expected = len(self.output_ids)
        if offset > expected:
            return False
        if offset == expected:
            now = time.monotonic()
            if self.clock.first_token is None and not self._has_unknown_past:
                self.clock.first_token = now
            self.clock.last_token = now
            self._is_paused, self._has_seat = False, True
            self.output_ids.append(token_id)
            self._changed.set()
        return True

    def logprobs(self, offset: int, values: types_pb2.PositionLogprobs) -> None:
        """Takes the log probabilities of a token that came before."""
        if offset < len(self.output_ids):
            self._logprobs.setdefault(offset, values)

    def pause(self) -> None:
        """It gave up its seat and waits for another. Of one that had none there is nothing to tell."""
        if self._has_been_accepted and not self._is_paused:
            self._is_paused = self._paused = True
            self._has_seat = False
            self._changed.set()

    def move(self, queued: Queued) -> None:
        """Its place in line is another one now."""
        self._queued = queued
        self._changed.set()

    def stop(self) -> None:
        """Its text has come to a stop that executors know nothing of."""
        self.has_matched_stop = True
        self.finish(End(types_pb2.FINISH_REASON_STOP_STRING, None))

    def finish(self, end: End) -> None:
        """The executor says it is over."""
        if not self.has_ended:
            self._end = end
            self._changed.set()
            self._record_end(outcome_of(end.reason))

    def fail(self, error: RequestError) -> None:
        """The request cannot go on."""
        if not self.has_ended:
            self._error = error
            self._changed.set()
            if self.is_let_go:
                self.record.left()
            else:
                self._record_end(error.reason.value, is_error=True)

    def forget(self) -> None:
        """This router serves it no longer. Without an end it is one that its client gave up while it waited."""
        self.forgotten.set()
        if not self.has_ended:
            self._record_end(CANCELLED)

    def _record_end(self, outcome: str, *, is_error: bool = False) -> None:
        first, last = self.clock.first_token, self.clock.last_token
        decode_s = None if first is None or last is None else last - first
        self.record.ended(outcome, len(self.output_ids), decode_s, is_error=is_error)

    async def next(self, reader: int = 0) -> News:
        """Waits for news and takes them all. Raises `RequestError` TAKEN_OVER where another reader came."""
        await self._changed.wait()
        if reader != self.reader:
            raise taken_over()
        self._changed.clear()
        news = News(
            self._accepted,
            self._started,
            self._paused,
            self._queued,
            self._num_taken,
            self.output_ids[self._num_taken :],
            self._logprobs,
            self._end,
            self._error,
        )
        self._accepted = self._started = self._paused = False
        self._queued = None
        self._num_taken = max(self._num_taken, len(self.output_ids))
        return news


def unread_stream(request_id: str) -> RequestStream:
    """Stands for a request that nobody reads here, so that frames can name it."""
    stream = RequestStream(Demand(request_id, 1, 1), executor_pb2.Submit(), 0.0)
    stream.let_go(taken_over())
    return stream
