"""A client of the simulation: what it asks for, what it has seen, and the stream of its output on a router."""

from __future__ import annotations

from collections.abc import Callable

from inflight.bench.simulation.invariants import InvariantChecker, Record
from inflight.bench.timeline.timeline import US_PER_S, Timeline
from inflight.bench.timeline.traffic import SimRequest
from inflight.router.ledger.types import Demand, Placement
from inflight.router.stream.request_stream import RequestStream
from inflight.router.telemetry.events import RequestFacts, RequestRecord
from inflight.v1 import executor_pb2, types_pb2


class SimClient(RequestRecord):
    """One request. It is told what its router records. `block_size` is that of the executors; `asked_us` returns when
    the ledger was asked to admit a request."""

    def __init__(
        self,
        request: SimRequest,
        record: Record,
        block_size: int,
        timeline: Timeline,
        checker: InvariantChecker,
        asked_us: Callable[[str], int] = lambda request_id: 0,
    ) -> None:
        def now_s() -> float:
            return timeline.now_us / US_PER_S

        super().__init__(RequestFacts())
        self.request = request
        self.record = record
        self._timeline = timeline
        self._checker = checker
        self._asked_us = asked_us
        self.stream = RequestStream(
            _demand(request, block_size),
            _submit(request),
            now_s(),
            record=self,
            now=now_s,
        )

    @property
    def has_ended(self) -> bool:
        """Whether its client knows its end."""
        return self.record.outcome is not None

    @property
    def placement(self) -> Placement | None:
        """The current placement."""
        return self.stream.life.placement

    def is_current(self, attempt: int) -> bool:
        """Returns whether this is the placement that counts."""
        return self.stream.life.is_current(attempt)

    def admitted(self) -> None:
        if self.record.accepted_us is None:
            self._checker.accepted(self.record, self._asked_us(self.request.request_id))

    def placed(self, executor_id: str, attempt: int) -> None:
        self.record.num_placements += 1
        if self.record.placed_us is None:
            self.record.placed_us = self._timeline.now_us

    def boarded(self, cached_tokens: int) -> None:
        if not self.has_ended:
            self._checker.boarded(self.record, self._timeline.now_us)


def _demand(request: SimRequest, block_size: int) -> Demand:
    return Demand(
        request_id=request.request_id,
        priority_class=request.priority_class,
        blocks=request.num_blocks(block_size),
        deadline_ms=request.first_token_deadline_ms,
        tenant=request.tenant,
        limits=request.limits,
        prompt_tokens=len(request.prompt),
        max_tokens=request.max_tokens,
        block_size=block_size,
        reservation_tokens=request.reservation_tokens,
        num_bytes=4 * len(request.prompt),
        prefix_hashes=request.prefix_hashes,
    )


def _submit(request: SimRequest) -> executor_pb2.Submit:
    stopping = types_pb2.StoppingParams(max_tokens=request.max_tokens)
    return executor_pb2.Submit(request_id=request.request_id, prompt_ids=request.prompt, stopping=stopping)
