"""How the ledger has a pool at one moment. Plain data."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ExecutorStanding:
    """How the ledger has an executor. `live`: it reported within the last 2 s."""

    executor_id: str
    generation: int
    budget_blocks: int
    total_blocks: int
    budget_sequences: int
    reserved_blocks: int
    reserved_sequences: int
    accepting: bool
    live: bool


@dataclass(frozen=True, slots=True)
class ClassQueue:
    """What waits in one class."""

    num_requests: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class TenantLine:
    """What a tenant has waiting in a class. `wait_ms` is how long the first in line has waited."""

    priority_class: int
    tenant: str
    num_requests: int
    num_tokens: int
    wait_ms: int


@dataclass(frozen=True, slots=True)
class EstimateQuality:
    """How well waits were foretold: the mean relative error, and what raw estimates are multiplied by."""

    num_estimates: int
    mean_error: float
    correction: float


@dataclass(frozen=True, slots=True)
class Snapshot:
    """The pool at one moment: executors by id, and what waits per class, first class first; and, as far as asked for,
    per class and tenant, in this order."""

    executors: tuple[ExecutorStanding, ...]
    queues: tuple[ClassQueue, ...]
    estimates: EstimateQuality = EstimateQuality(0, 0.0, 1.0)
    lines: tuple[TenantLine, ...] = ()

    @property
    def num_waiting(self) -> tuple[int, ...]:
        """Requests that wait, per class."""
        return tuple(queue.num_requests for queue in self.queues)
