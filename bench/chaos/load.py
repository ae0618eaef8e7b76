"""The load: clients that each send one request after the other, read it in some way, and note what they saw.

Which request and how it is read is drawn from the seed. Clients are as users' are: the client library, every router
as a target, nothing done by hand when something breaks.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from enum import Enum

import grpc

from bench.chaos.observed import Observed, Verdict, judge
from bench.chaos.requests import Expected, SampleRequest
from common.errors import Reason
from inflight import AsyncClient
from inflight.errors import InflightError
from inflight.v1 import inference_pb2

# Longer than any recovery: a stream that has not ended by then never will.
STREAM_TIMEOUT_S = 120.0
REPEAT_WITHIN_S = 20
MAX_REPEAT_PAUSE_S = 1.0
# Waits where a refusal says when to try again, but not longer than this.
MAX_RETRY_S = 2.0


class Manner(Enum):
    """How a client treats its request. The library gives each request a key, except one that has an id."""

    READ = "read"
    WATCH_QUEUE = "watch-queue"
    CANCEL = "cancel"
    UNKEYED = "unkeyed"
    REPEAT = "repeat"


@dataclass(slots=True)
class Sent:
    """A stream that has ended, how it was read, and what is to be said of it."""

    number: int
    manner: Manner
    observed: Observed
    verdict: Verdict
    refused: bool
    failed: bool


@dataclass(slots=True)
class Load:
    """Everything that was sent. `stop` ends it: requests under way are read to their end."""

    client: AsyncClient
    expected: Mapping[SampleRequest, Expected]
    seed: int
    manners: Sequence[Manner]
    on_end: Callable[[Sent], None] = lambda sent: None
    sent: list[Sent] = field(default_factory=list)
    under_way: set[int] = field(default_factory=set)
    num_begun: int = 0
    is_stopping: bool = False

    @property
    def num_under_way(self) -> int:
        return len(self.under_way)

    @property
    def num_ended(self) -> int:
        return len(self.sent)

    @property
    def num_failed(self) -> int:
        return sum(sent.failed for sent in self.sent)

    async def run(self, num_clients: int) -> None:
        """Sends until `stop`."""
        async with asyncio.TaskGroup() as group:
            for index in range(num_clients):
                group.create_task(self._send_on(random.Random(f"load/{self.seed}/{index}")))

    def stop(self) -> None:
        self.is_stopping = True

    async def _send_on(self, rng: random.Random) -> None:
        choices = list(self.expected)
        while not self.is_stopping:
            sample, manner = rng.choice(choices), rng.choice(list(self.manners))
            sent = await self._send(sample, manner, rng)
            if sent.refused:
                assert sent.observed.error is not None
                await asyncio.sleep(min(sent.observed.error.retry_after_s or 0.0, MAX_RETRY_S))

    async def _send(self, sample: SampleRequest, manner: Manner, rng: random.Random) -> Sent:
        leave_after = rng.randrange(sample.max_tokens) + 1
        key = f"chaos-{self.seed}-{rng.getrandbits(64):016x}"
        match manner:
            case Manner.CANCEL:
                return await self._read(sample, manner, sample.request(), leave_after)
            case Manner.WATCH_QUEUE:
                return await self._read(sample, manner, sample.request(want_queue_events=True))
            case Manner.UNKEYED:
                return await self._read(sample, manner, sample.request(request_id=key))
            case Manner.REPEAT:
                request = sample.request(idempotency_key=key, resume_ttl_s=REPEAT_WITHIN_S)
                first = await self._read(sample, manner, request, leave_after)
                if first.refused:
                    return first
                await asyncio.sleep(rng.uniform(0, MAX_REPEAT_PAUSE_S))
                return await self._read(sample, manner, request)
            case Manner.READ:
                return await self._read(sample, manner, sample.request())

    async def _read(
        self,
        sample: SampleRequest,
        manner: Manner,
        request: inference_pb2.GenerateRequest,
        leave_after: int | None = None,
    ) -> Sent:
        """Sends and reads to the end, or until so many tokens have come."""
        self.num_begun += 1
        number = self.num_begun
        self.under_way.add(number)
        observed = Observed(sample, time.monotonic())
        try:
            async with asyncio.timeout(STREAM_TIMEOUT_S):
                await self._follow(request, observed, leave_after)
        except InflightError as error:
            observed.error = error
        except TimeoutError:
            observed.has_timed_out = True
        finally:
            observed.ended_s = time.monotonic()
            self.under_way.discard(number)
        sent = self._judged(number, manner, observed)
        self.sent.append(sent)
        self.on_end(sent)
        return sent

    async def _follow(
        self, request: inference_pb2.GenerateRequest, observed: Observed, leave_after: int | None
    ) -> None:
        stream = self.client.send(request)
        async with stream, aclosing(stream.events()) as events:
            async for event in events:
                observed.add(event, time.monotonic())
                if leave_after is not None and observed.num_tokens >= leave_after:
                    observed.was_left = True
                    return

    def _judged(self, number: int, manner: Manner, observed: Observed) -> Sent:
        if observed.error is None and not observed.has_timed_out:
            verdict = judge(observed, self.expected[observed.sample])
            return Sent(number, manner, observed, verdict, refused=False, failed=not verdict.is_right)
        if observed.error is not None and is_promised_refusal(observed, manner):
            return Sent(number, manner, observed, Verdict(), refused=True, failed=False)
        # What came before it broke must be right all the same.
        observed.was_left = True
        verdict = judge(observed, self.expected[observed.sample])
        return Sent(number, manner, observed, verdict, refused=False, failed=True)


def is_promised_refusal(observed: Observed, manner: Manner) -> bool:
    """Returns whether new work was refused with a retry time, before anything was accepted.

    It also covers a duplicate id without a key, after its router died before any event: the ledger knows that the id
    was used, and not that the request is the same. And a repeat of a request that has ended, if the executor that kept
    its output died: the client is told that the output is lost.
    """
    error = observed.error
    if error is None or observed.was_accepted or observed.offsets:
        return False
    if manner is Manner.UNKEYED and error.reason == Reason.DUPLICATE_REQUEST_ID.value:
        return True
    if manner is Manner.REPEAT and error.reason == Reason.OUTPUT_LOST.value:
        return True
    return error.code is grpc.StatusCode.UNAVAILABLE and error.retry_after_s is not None
