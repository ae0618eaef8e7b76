"""Placement on arrival, to compare with: each executor has its own queue, and requests do not move between queues.

Only for runs in which nothing breaks. One object stands for all routers, and where they know all lines they know them
exactly: real ones know them late.
"""

from __future__ import annotations

import itertools
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from enum import Enum

from bench.simulation import oracle
from bench.simulation.client import SimClient
from bench.simulation.invariants import InvariantChecker, RequestOutcome
from bench.simulation.session import Frame, Session
from bench.simulation.virtual_router import RouterShape
from bench.timeline.timeline import US_PER_S, Process, Timeline
from bench.timeline.traffic import SimRequest
from router.store.types import ExecutorReport, Placement


class PushPolicy(Enum):
    """The queue that a request joins."""

    ROUND_ROBIN = "round robin"
    LEAST_LOADED = "least loaded, all known"
    LEAST_OF_OWN = "least loaded, own known"
    """As several routers do that do not know of each other: the line with fewest requests of one's own."""
    ORACLE = "oracle"
    """The executor where the first tokens of this request and of those that it delays come soonest, by exact knowledge
    of prefixes, remaining prompts and outputs."""


NUM_ROUTERS = 4


@dataclass(slots=True)
class _Line:
    """An executor's line, and what is reserved there."""

    session: Session
    waiting: deque[SimClient] = field(default_factory=deque)
    num_blocks: int = 0
    num_inside: int = 0
    num_of_router: Counter[int] = field(default_factory=Counter)
    known: oracle.Line = field(init=False)
    """As the oracle knows it."""

    def __post_init__(self) -> None:
        self.known = oracle.Line(self.session.executor)

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
        self._lines: dict[Session, _Line] = {}
        self._line_of: dict[str, _Line] = {}
        self._turns: Iterator[int] = itertools.count()

    def on_linked(self, session: Session) -> None:
        """Adds an executor."""
        self._lines[session] = _Line(session)

    def on_unlinked(self, session: Session) -> None:
        """Fails: there are no faults here."""
        raise AssertionError("a link broke")

    def die(self) -> None:
        """Fails: there are no faults here."""
        raise AssertionError("a router died")

    def on_report(self, session: Session, report: ExecutorReport) -> None:
        """Ignores reports: the queues are known without them."""

    def wants_report(self, executor_id: str) -> bool:
        return False

    def arrive(self, request: SimRequest) -> None:
        """Puts a client's request into a queue, where it stays."""
        record = self._checker.submitted(request, "push", self._timeline.now_us)
        stream = SimClient(request, record, self._shape.block_size, self._timeline)
        line = self._choose(request)
        line.num_of_router[_router_of(request)] += 1
        self.streams[request.request_id], self._line_of[request.request_id] = stream, line
        line.waiting.append(stream)
        self._send(line)

    def on_frame(self, session: Session, frame: Frame) -> None:
        """What a turn of an executor's loop brought."""
        now_us = self._timeline.now_us
        for request_id, _, _ in frame.rejected:  # it counts sequences that have just ended
            stream, line = self.streams[request_id], self._line_of[request_id]
            line.waiting.appendleft(stream)
            line.num_inside -= 1
            line.num_blocks -= self._blocks(stream)
        for request_id, _, cached_tokens in frame.started:
            stream = self.streams[request_id]
            stream.record.cached_tokens += cached_tokens
            self._checker.boarded(stream.record, now_us)
        for request_id, _, offset, token_id in frame.tokens:
            self._checker.delivered(self.streams[request_id].record, offset, token_id, now_us)
            if self._policy is PushPolicy.ORACLE:
                self._line_of[request_id].known.inside[request_id].num_output += 1
        for request_id, _, reason in frame.finished:
            stream, line = self.streams.pop(request_id), self._line_of.pop(request_id)
            self._checker.ended(stream.record, RequestOutcome.COMPLETED, now_us, reason.value)
            line.known.inside.pop(request_id, None)
            line.num_inside -= 1
            line.num_of_router[_router_of(stream.request)] -= 1
            line.num_blocks -= self._blocks(stream)
            self._send(line)

    def _choose(self, request: SimRequest) -> _Line:
        lines = list(self._lines.values())
        if self._policy is PushPolicy.ORACLE:
            return self._best(request, lines)
        if self._policy is PushPolicy.ROUND_ROBIN:
            return lines[next(self._turns) % len(lines)]
        if self._policy is PushPolicy.LEAST_OF_OWN:
            # Ties by turns: else all routers would begin with the same line.
            first = next(self._turns) % len(lines)
            return min([*lines[first:], *lines[:first]], key=lambda line: line.num_of_router[_router_of(request)])
        return min(lines, key=lambda line: (line.num_requests, line.session.executor.executor_id))

    def _best(self, request: SimRequest, lines: list[_Line]) -> _Line:
        hashes = oracle.hashes_of(request, self._shape.block_size)
        now_s = self._timeline.now_us / US_PER_S
        predictions = [(line, line.known.predict(request, hashes, now_s)) for line in lines]
        line, prediction = min(predictions, key=lambda one: (one[1].cost_s, one[0].num_requests))
        line.known.add(request, hashes, prediction)
        return line

    def _send(self, line: _Line) -> None:
        """Sends the first in the queue while they fit; standby hides the transfer time."""
        shape = line.session.executor.shape
        while line.waiting and line.num_inside < shape.num_seats + shape.num_standby:
            stream = line.waiting[0]
            num_blocks = self._blocks(stream)
            if line.num_blocks + num_blocks > shape.num_blocks:
                return
            line.waiting.popleft()
            line.num_inside += 1
            line.num_blocks += num_blocks
            executor = line.session.executor
            placement = Placement(stream.request.request_id, 1, executor.executor_id, executor.generation, num_blocks)
            line.session.submit(stream.request, placement, (), num_blocks)

    def _blocks(self, stream: SimClient) -> int:
        return stream.request.num_blocks(self._shape.block_size)


def _router_of(request: SimRequest) -> int:
    return request.number % NUM_ROUTERS
