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

from inflight import AsyncClient
from inflight.bench.chaos.adapters import AdapterHistory
from inflight.bench.chaos.observed import Observed, Verdict, judge
from inflight.bench.chaos.requests import Expected, SampleRequest
from inflight.common.errors import Reason
from inflight.errors import InflightError
from inflight.v1 import inference_pb2

# Longer than any recovery: a stream that has not ended by then never will.
STREAM_TIMEOUT_S = 120.0
REPEAT_WITHIN_S = 20
MAX_REPEAT_PAUSE_S = 1.0
# The calls of a hedge, and within which time they begin.
MAX_HEDGES = 4
MAX_HEDGE_PAUSE_S = 0.025
# Waits where a refusal says when to try again, but not longer than this.
MAX_RETRY_S = 2.0
# Of requests, where there are adapters.
ADAPTER_SHARE = 0.6
# What each version of an adapter brings.
Versions = Mapping[int, Expected]


class Manner(Enum):
    """How a client treats its request. The library gives each request a key, except one that has an id."""

    READ = "read"
    WATCH_QUEUE = "watch-queue"
    CANCEL = "cancel"
    UNKEYED = "unkeyed"
    REPEAT = "repeat"
    HEDGE = "hedge"
    """Several calls with one key begin within milliseconds."""


@dataclass(slots=True)
class Sent:
    """A stream that has ended, how it was read, and what is to be said of it."""

    number: int
    manner: Manner
    observed: Observed
    verdict: Verdict
    refused: bool
    failed: bool


@dataclass(frozen=True, slots=True)
class AdapterSamples:
    """Requests with adapters, what each version brings, and which version a request got at a time."""

    expected: Mapping[SampleRequest, Versions]
    history: AdapterHistory

    def versions(self, sample: SampleRequest, since_s: float, until_s: float) -> frozenset[int | None]:
        """Returns the versions that a request got that was admitted in this time; None: it was refused."""
        return self.history.versions(_adapter_of(sample), since_s, until_s)

    def has_changed(self, sample: SampleRequest, since_s: float, until_s: float) -> bool:
        """Returns whether the version of a request may have been replaced or removed in this time."""
        return self.history.has_changed(_adapter_of(sample), since_s, until_s)


def _adapter_of(sample: SampleRequest) -> str:
    return sample.model.rpartition(":")[2]


@dataclass(slots=True)
class Load:
    """Everything that was sent. `stop` ends it: requests under way are read to their end."""

    client: AsyncClient
    expected: Mapping[SampleRequest, Expected]
    seed: int
    manners: Sequence[Manner]
    on_end: Callable[[Sent], None] = lambda sent: None
    adapted: AdapterSamples | None = None
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
        plain = list(self.expected)
        adapted = [] if self.adapted is None else list(self.adapted.expected)
        while not self.is_stopping:
            choices = adapted if adapted and rng.random() < ADAPTER_SHARE else plain
            sample, manner = rng.choice(choices), rng.choice(list(self.manners))
            sent = await self._send(sample, manner, rng)
            if sent.refused and sent.observed.error is not None:
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
                # Where the ledger knows the request, it is the version of the first one.
                return await self._read(sample, manner, request, since_s=first.observed.began_s)
            case Manner.HEDGE:
                return await self._hedge(sample, key, rng)
            case Manner.READ:
                return await self._read(sample, manner, sample.request())

    async def _hedge(self, sample: SampleRequest, key: str, rng: random.Random) -> Sent:
        """Sends one request in several calls that begin together. One of them has to bring everything."""
        request = sample.request(idempotency_key=key, detach=rng.random() < 0.3, **rng.choice(({}, {"best_of": 2})))
        if sample.seed is not None:
            request.best_of = 0  # of two different choices, the better one may not be the expected one

        async def call(pause_s: float) -> Sent:
            await asyncio.sleep(pause_s)
            return await self._read(sample, Manner.HEDGE, request)

        pauses_s = [rng.uniform(0, MAX_HEDGE_PAUSE_S) for _ in range(rng.randint(2, MAX_HEDGES))]
        calls = await asyncio.gather(*(call(pause_s) for pause_s in pauses_s))
        if all(is_displaced(sent.observed) for sent in calls):
            calls[0].failed = True
        return next((sent for sent in calls if not is_displaced(sent.observed)), calls[0])

    async def _read(
        self,
        sample: SampleRequest,
        manner: Manner,
        request: inference_pb2.GenerateRequest,
        leave_after: int | None = None,
        since_s: float | None = None,
    ) -> Sent:
        """Sends and reads to the end, or until so many tokens have come. `since_s`: when the request was first sent."""
        self.num_begun += 1
        number = self.num_begun
        self.under_way.add(number)
        observed = Observed(sample, time.monotonic(), num_choices=max(1, request.best_of))
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
        sent = self.judged(number, manner, observed, observed.began_s if since_s is None else since_s)
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

    def judged(self, number: int, manner: Manner, observed: Observed, since_s: float) -> Sent:
        """Judges a stream that has ended. `since_s`: when its request was first sent."""
        if observed.error is None and not observed.has_timed_out:
            verdict = self._verdict(observed, since_s)
            return Sent(number, manner, observed, verdict, refused=False, failed=not verdict.is_right)
        if observed.error is not None and is_promised_refusal(observed, manner):
            return Sent(number, manner, observed, Verdict(), refused=True, failed=False)
        is_due = self.adapted is not None and is_adapter_gone(observed, self.adapted, since_s)
        is_due = is_due or (manner is Manner.HEDGE and is_displaced(observed))
        # What came before it broke must be right all the same.
        observed.was_left = True
        verdict = self._verdict(observed, since_s) if observed.offsets else Verdict()
        return Sent(number, manner, observed, verdict, refused=is_due, failed=not (is_due and verdict.is_right))

    def _verdict(self, observed: Observed, since_s: float) -> Verdict:
        """Holds a stream against what its sample brings; with an adapter, against the versions that it can have got."""
        sample = observed.sample
        if self.adapted is None or sample not in self.adapted.expected:
            return judge(observed, self.expected[sample])
        until_s = observed.accepted_s if observed.accepted_s is not None else observed.ended_s
        due = self.adapted.versions(sample, since_s, until_s)
        verdicts = {version: judge(observed, expected) for version, expected in self.adapted.expected[sample].items()}
        if any(verdict.is_right for version, verdict in verdicts.items() if version in due):
            return Verdict()
        for version, verdict in verdicts.items():
            if verdict.is_right:
                what = f"its tokens are of version {version} of the adapter, and due was one of {list(due)}"
                return Verdict(problem=what)
        return min(verdicts.values(), key=lambda verdict: verdict.lost + verdict.duplicated)


def is_adapter_gone(observed: Observed, adapted: AdapterSamples, since_s: float) -> bool:
    """Returns whether a request ended as promised because its adapter was not there, or no longer.

    A new request is told that the name is not known. One that waits, or loses its executor, is told that no executor
    serves the version that it was accepted for.
    """
    error, sample = observed.error, observed.sample
    if error is None or sample not in adapted.expected:
        return False
    if error.reason == Reason.UNKNOWN_ADAPTER.value:
        was_absent = None in adapted.versions(sample, since_s, observed.ended_s)
        return was_absent and not observed.was_accepted and not observed.offsets
    return error.reason == Reason.NEVER_FITS.value and adapted.has_changed(sample, since_s, observed.ended_s)


def is_displaced(observed: Observed) -> bool:
    """Returns whether a call ended as promised because another call reads its request."""
    return observed.error is not None and observed.error.reason == Reason.TAKEN_OVER.value


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
    if manner in (Manner.REPEAT, Manner.HEDGE) and error.reason == Reason.OUTPUT_LOST.value:
        return True
    return error.code is grpc.StatusCode.UNAVAILABLE and error.retry_after_s is not None
