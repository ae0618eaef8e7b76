"""What the router knows of one request between its admission and its end.

`RequestStream` collects what executors send, keyed by absolute offset, and hands it to the one consumer that writes to
the client. It never touches Redis or gRPC. Invariants: `output_ids[i]` is the token at offset i and never changes;
nothing is taken from a placement that is not current; after the end nothing more comes.
"""

from __future__ import annotations

import asyncio
import dataclasses
import math
import time
from dataclasses import dataclass

from inflight.v1 import executor_pb2, types_pb2

from common.errors import RequestError
from router.store.types import Demand, Ending, Placement, Queued

OWN_ENDS = frozenset({types_pb2.FINISH_REASON_STOP_TOKEN, types_pb2.FINISH_REASON_LENGTH})


@dataclass(frozen=True, slots=True)
class End:
    """The end that the executor reported (a value of `FinishReason` of the protocol)."""

    reason: int
    stop_token_id: int | None


@dataclass(slots=True)
class News:
    """What is new since the consumer last asked. `token_ids` begin at `offset`."""

    accepted: bool
    started: bool
    paused: bool
    queued: Queued | None
    offset: int
    token_ids: list[int]
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
    """One request. Producers call `place`, `accept`, `start`, `token`, `pause`, `move`, `finish`, `fail`; the consumer
    calls `next`. `deadline` is when it must have ended, on the clock of `arrived`."""

    def __init__(
        self, demand: Demand, submit: executor_pb2.Submit, arrived: float, deadline: float | None = None
    ) -> None:
        self.request_id = demand.request_id
        self._demand = demand
        # What an executor is told, but for the attempt and the output so far.
        self._submit = submit
        self._max_tokens = submit.stopping.max_tokens or math.inf
        self._deadline = deadline
        self.output_ids: list[int] = []
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
        self.is_being_submitted = False
        # Its stop text came, which executors know nothing of.
        self.has_matched_stop = False
        self._end: End | None = None
        self._error: RequestError | None = None
        self._has_been_accepted = False
        self._is_paused = False
        self._accepted = False
        self._started = False
        self._paused = False
        self._queued: Queued | None = None
        self._num_taken = 0
        self._changed = asyncio.Event()

    @property
    def is_wanted(self) -> bool:
        """Whether somebody waits for more of it."""
        return not (self.is_abandoned or self.is_cancelled or self.has_ended)

    @property
    def has_ended(self) -> bool:
        """Whether its end or its error is known."""
        return self._end is not None or self._error is not None

    def demand(self) -> Demand:
        """What the ledger is asked for: after earlier placements with the last attempt that is known, and after the
        first token without a deadline for it."""
        return dataclasses.replace(
            self._demand,
            last_attempt=self.attempt,
            output_tokens=len(self.output_ids),
            deadline_ms=None if self.output_ids else self._demand.deadline_ms,
        )

    def ending(self, attempt: int) -> Ending:
        """The end of one of its placements, with what it has used."""
        by_itself = self.has_matched_stop or (self._end is not None and self._end.reason in OWN_ENDS)
        has_computed = self.clock.boarded is not None
        return Ending(
            self.request_id,
            attempt,
            computed_tokens=len(self._submit.prompt_ids) - self.num_cached_tokens if has_computed else 0,
            output_tokens=len(self.output_ids),
            by_itself=by_itself,
        )

    def place(self, placement: Placement) -> executor_pb2.Submit:
        """Makes a placement the current one and returns what its executor is to be told."""
        if self.output_ids:
            self.num_migrations += 1
        self.placement = placement
        self.attempt = placement.attempt
        self.executor_id = placement.executor_id
        submit = executor_pb2.Submit()
        submit.CopyFrom(self._submit)
        submit.attempt = placement.attempt
        submit.reserved_blocks = placement.blocks or self._demand.blocks
        if self._deadline is not None:
            submit.deadline_ms = max(1, round((self._deadline - time.monotonic()) * 1000))
        submit.prior_output_ids.extend(self.output_ids)
        return submit

    def displace(self) -> None:
        """The current placement is void; another one follows or the request fails."""
        self.placement = None

    def accept(self) -> None:
        """The executor took the placement."""
        self._has_been_accepted = self._accepted = True
        self._changed.set()

    def start(self, num_cached_tokens: int) -> None:
        """The sequence boarded."""
        if self.clock.boarded is None:
            self.clock.boarded = time.monotonic()
            self.num_cached_tokens = min(num_cached_tokens, len(self._submit.prompt_ids))
        self._is_paused = False
        self._started = True
        self._changed.set()

    def token(self, offset: int, token_id: int) -> bool:
        """Takes a token. One that is known is dropped; returns False where one is missing before it, or it is one more
        than was asked for."""
        expected = len(self.output_ids)
        if offset > expected or offset >= self._max_tokens:
            return False
        if offset == expected:
            now = time.monotonic()
            if self.clock.first_token is None:
                self.clock.first_token = now
            self.clock.last_token = now
            self._is_paused = False
            self.output_ids.append(token_id)
            self._changed.set()
        return True

    def pause(self) -> None:
        """It gave up its seat and waits for another. Of one that had none there is nothing to tell."""
        if self._has_been_accepted and not self._is_paused:
            self._is_paused = self._paused = True
            self._changed.set()

    def move(self, queued: Queued) -> None:
        """Its place in line is another one now."""
        self._queued = queued
        self._changed.set()

    def finish(self, end: End) -> None:
        """The executor says it is over."""
        if not self.has_ended:
            self._end = end
            self._changed.set()

    def fail(self, error: RequestError) -> None:
        """The request cannot go on."""
        if not self.has_ended:
            self._error = error
            self._changed.set()

    async def next(self) -> News:
        """Waits for news and takes them all."""
        await self._changed.wait()
        self._changed.clear()
        news = News(
            self._accepted,
            self._started,
            self._paused,
            self._queued,
            self._num_taken,
            self.output_ids[self._num_taken :],
            self._end,
            self._error,
        )
        self._accepted = self._started = self._paused = False
        self._queued = None
        self._num_taken = len(self.output_ids)
        return news
