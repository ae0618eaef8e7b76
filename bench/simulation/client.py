"""A client of the simulation: what it asks for, what it has seen, and the stream of its output on a modelled router."""

from __future__ import annotations

from inflight.bench.simulation.invariants import Record
from inflight.bench.timeline.timeline import US_PER_S, Timeline
from inflight.bench.timeline.traffic import SimRequest
from inflight.router.lifecycle.lifecycle import Lifecycle
from inflight.router.store.types import Demand, Placement
from inflight.router.stream.request_stream import RequestStream
from inflight.v1 import executor_pb2, types_pb2


class SimClient:
    """One request; what its life cycle knows of it, too (`inflight.router.lifecycle.lifecycle.Output`). `block_size` is
    that of the executors."""

    def __init__(self, request: SimRequest, record: Record, block_size: int, timeline: Timeline) -> None:
        def now_s() -> float:
            return timeline.now_us / US_PER_S

        self.request = request
        self.record = record
        self.stream = RequestStream(_demand(request, block_size), _submit(request), now_s(), now=now_s)
        self.stream.life.output = self

    @property
    def has_progressed(self) -> bool:
        return self.stream.has_progressed

    @property
    def is_complete(self) -> bool:
        return self.stream.is_complete

    @property
    def has_used_reservation(self) -> bool:
        return self.stream.has_used_reservation

    @property
    def has_been_accepted(self) -> bool:
        return self.stream.has_been_accepted

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


def client_of(life: Lifecycle) -> SimClient:
    """Returns the client of a request of a modelled router."""
    assert isinstance(life.output, SimClient)
    return life.output


def _demand(request: SimRequest, block_size: int) -> Demand:
    return Demand(
        request_id=request.request_id,
        priority_class=request.priority_class,
        blocks=request.num_blocks(block_size),
        deadline_ms=request.ledger_deadline_ms,
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
