"""What a modelled router knows of one request, and how routers are told to behave."""

from __future__ import annotations

from dataclasses import dataclass, field

from bench.simulation.timeline import US_PER_S
from bench.simulation.traffic import SimRequest
from bench.simulation.witness import Record
from router.store.settings import StoreSettings
from router.store.types import Demand, Placement


@dataclass(frozen=True, slots=True)
class RouterShape:
    """How routers behave; `block_size` is that of the executors."""

    block_size: int = 16
    max_attempts: int = 3
    no_executor_grace_us: int = 10 * US_PER_S
    store: StoreSettings = field(default_factory=lambda: StoreSettings(max_queue_requests=1_000_000))


@dataclass(slots=True, eq=False)
class SimStream:
    """What `router.stream.request_stream.RequestStream` knows, and its client's record."""

    request: SimRequest
    record: Record
    output: list[int]
    placement: Placement | None = None
    attempt: int = 0
    cached_tokens: int = 0
    is_abandoned: bool = False
    is_cancelled: bool = False
    is_being_submitted: bool = False
    is_handed_back: bool = False
    is_suspect: bool = False
    num_before_placement: int = 0

    @property
    def has_progressed(self) -> bool:
        """Whether the current placement has brought a token."""
        return len(self.output) > self.num_before_placement

    @property
    def has_ended(self) -> bool:
        """Whether its client knows its end."""
        return self.record.fate is not None

    def is_current(self, attempt: int) -> bool:
        """Whether this is the placement that counts."""
        return self.placement is not None and self.placement.attempt == attempt

    def demand(self, block_size: int) -> Demand:
        """What the ledger is asked for; after earlier placements with the last attempt that is known."""
        request = self.request
        return Demand(
            request_id=request.request_id,
            priority_class=request.priority_class,
            blocks=-(-(len(request.prompt) + request.max_tokens) // block_size),
            deadline_ms=request.ledger_deadline_ms,
            last_attempt=self.attempt,
            tenant=request.tenant,
            limits=request.limits,
            prompt_tokens=len(request.prompt),
            max_tokens=request.max_tokens,
            output_tokens=len(self.output),
            block_size=block_size,
            num_bytes=4 * len(request.prompt),
            prefix_hashes=request.prefix_hashes,
        )
