"""Placement on arrival, to compare with: each executor has its own queue, and requests do not move between queues.

Only for runs in which nothing breaks. One object stands for all routers, and where they know all queues, they know them
exactly: real ones know them late.
"""

from __future__ import annotations

import itertools
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum

from inflight.bench.simulation import oracle
from inflight.bench.simulation.client import SimClient
from inflight.bench.simulation.invariants import InvariantChecker, RequestOutcome
from inflight.bench.simulation.session import Frame, Session
from inflight.bench.simulation.sim_router import RouterShape
from inflight.bench.timeline.timeline import US_PER_S, Process, Timeline
from inflight.bench.timeline.traffic import SimRequest
from inflight.v1 import executor_pb2


class PushPolicy(Enum):
    """The queue that a request joins."""

    ROUND_ROBIN = "round robin"
    LEAST_LOADED = "least loaded, all known"
    LEAST_OF_OWN = "least loaded, own known"
    """As several routers do that do not know of each other: the queue with fewest requests of this router."""
    ORACLE = "oracle"
    """The executor where the first tokens of this request and of those that it delays come soonest, by exact knowledge
    of prefixes, remaining prompts and outputs."""


NUM_ROUTERS = 4


@dataclass(slots=True)
class _ExecutorQueue:
    """An executor's queue, and what is reserved there."""

    session: Session
    waiting: deque[SimClient] = field(default_factory=deque)
    num_blocks: int = 0
    num_inside: int = 0
    num_of_router: Counter[int] = field(default_factory=Counter)
    backlog: oracle.ExecutorBacklog = field(init=False)
    """As the oracle knows it."""

    def __post_init__(self) -> None:
        self.backlog = oracle.ExecutorBacklog(self.session.executor)

    @property
    def num_requests(self) -> int:
        """Requests that wait or run here."""
        return self.num_inside + len(self.waiting)


class PushRouter:
    """The routers of such a deployment."""

    def __init__(self, policy: PushPolicy, shape: RouterShape, timeline: Timeline, checker: InvariantChecker) -> None:
        self.router_id = "push"
        self.process = Process(timeline)
        self.streams: dict[str, SimClient] = {}
        self._policy = policy
        self._shape = shape
        self._timeline = timeline
        self._checker = checker
        self._queues: dict[Session, _ExecutorQueue] = {}
        self._queue_of: dict[str, _ExecutorQueue] = {}
        self._turns: Iterator[int] = itertools.count()

    def on_linked(self, session: Session) -> None:
        """Adds an executor."""
        self._queues[session] = _ExecutorQueue(session)

    def on_unlinked(self, session: Session) -> None:
        """Fails: there are no faults here."""
        raise AssertionError("a link broke")

    def die(self) -> None:
        """Fails: there are no faults here."""
        raise AssertionError("a router died")

    def close(self) -> None:
        """Does nothing: nothing is awaited."""

    def on_report(self, session: Session, report: executor_pb2.Report) -> None:
        """Ignores reports: the queues are known without them."""

    def wants_report(self, executor_id: str) -> bool:
        return False

    def arrive(self, request: SimRequest) -> None:
        """Puts a client's request into a queue, where it stays."""
        record = self._checker.submitted(request, "push", self._timeline.now_us)
        stream = SimClient(request, record, self._shape.block_size, self._timeline, self._checker)
        queue = self._choose(request)
        queue.num_of_router[_router_of(request)] += 1
        self.streams[request.request_id], self._queue_of[request.request_id] = stream, queue
        queue.waiting.append(stream)
        self._send(queue)

    def on_frame(self, session: Session, frame: Frame) -> None:
        """What a turn of an executor's loop brought."""
        now_us = self._timeline.now_us
        for request_id, _, _ in frame.rejected:  # it counts sequences that have just ended
            stream, queue = self.streams[request_id], self._queue_of[request_id]
            queue.waiting.appendleft(stream)
            queue.num_inside -= 1
            queue.num_blocks -= self._blocks(stream)
        for request_id, _, cached_tokens in frame.started:
            stream = self.streams[request_id]
            stream.record.cached_tokens += cached_tokens
            self._checker.boarded(stream.record, now_us)
        for request_id, _, offset, token_id in frame.tokens:
            self._checker.delivered(self.streams[request_id].record, offset, token_id, now_us)
            if self._policy is PushPolicy.ORACLE:
                self._queue_of[request_id].backlog.inside[request_id].num_output += 1
        for request_id, _, reason in frame.finished:
            stream, queue = self.streams.pop(request_id), self._queue_of.pop(request_id)
            self._checker.ended(stream.record, RequestOutcome.COMPLETED, now_us, reason.value)
            queue.backlog.inside.pop(request_id, None)
            queue.num_inside -= 1
            queue.num_of_router[_router_of(stream.request)] -= 1
            queue.num_blocks -= self._blocks(stream)
            self._send(queue)

    def _choose(self, request: SimRequest) -> _ExecutorQueue:
        queues = list(self._queues.values())
        if self._policy is PushPolicy.ORACLE:
            return self._best(request, queues)
        if self._policy is PushPolicy.ROUND_ROBIN:
            return queues[next(self._turns) % len(queues)]
        if self._policy is PushPolicy.LEAST_OF_OWN:
            # Ties by turns: else all routers would begin with the same queue.
            first = next(self._turns) % len(queues)
            return min([*queues[first:], *queues[:first]], key=lambda queue: queue.num_of_router[_router_of(request)])
        return min(queues, key=lambda queue: (queue.num_requests, queue.session.executor.executor_id))

    def _best(self, request: SimRequest, queues: list[_ExecutorQueue]) -> _ExecutorQueue:
        hashes = oracle.hashes_of(request, self._shape.block_size)
        now_s = self._timeline.now_us / US_PER_S
        predictions = [(queue, queue.backlog.predict(request, hashes, now_s)) for queue in queues]
        queue, prediction = min(predictions, key=lambda one: (one[1].cost_s, one[0].num_requests))
        queue.backlog.add(request, hashes, prediction)
        return queue

    def _send(self, queue: _ExecutorQueue) -> None:
        """Sends the first in the queue while they fit; standby hides the transfer time."""
        shape = queue.session.executor.shape
        while queue.waiting and queue.num_inside < shape.num_seats + shape.num_standby:
            stream = queue.waiting[0]
            num_blocks = self._blocks(stream)
            if queue.num_blocks + num_blocks > shape.num_blocks:
                return
            queue.waiting.popleft()
            queue.num_inside += 1
            queue.num_blocks += num_blocks
            request_id = stream.request.request_id
            queue.session.submit(executor_pb2.Submit(request_id=request_id, attempt=1, reserved_blocks=num_blocks))

    def _blocks(self, stream: SimClient) -> int:
        return stream.request.num_blocks(self._shape.block_size)


def _router_of(request: SimRequest) -> int:
    return request.number % NUM_ROUTERS
