"""Settings of the ledger: queue bounds, calls of Redis, and intervals of periodic work."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LedgerSettings:
    """The defaults suit a Redis in the same zone. Lease durations are constants of `scripts/shared/records.lua`."""

    max_queue_requests: int = 10_000
    """Most requests that may wait in the pool."""
    max_queue_tokens: int | None = None
    """Most tokens (prompt and `max_tokens`) of the pool's waiting requests; None is no limit."""
    max_queue_bytes: int | None = None
    """Most bytes of the prompts of the pool's waiting requests; None is no limit."""
    max_bypass: int = 16
    """How often other requests may bypass a request that does not fit before an executor is claimed for it."""
    age_ms: int = 30_000
    """Time in the queue after which a request moves up a class."""
    preempt_for_priority: bool = False
    """Whether running requests of a lower class are preempted for a waiting request that does not fit."""
    tolerated_ttft_ms: int = 2_000
    """A request prefers the executor that holds its prefix while the prompts ahead of it there take at most this long
    to compute."""
    remember_ended_ms: int = 75_000
    """How long the id of an ended request is remembered: longer than any report is in transit, and 15 s longer than its
    output can be resumed."""
    call_timeout_ms: int = 2_000
    """Longest wait for one reply."""
    max_connections: int = 16
    """Connections of one router for calls; the mailbox reader has one more."""
    renew_interval_ms: int = 1_500
    """Interval of the renewals of the router's lease, which lasts 5 s."""
    reap_interval_ms: int = 400
    """Mean interval of reaps. Each interval is 0.5 to 1.5 times as long, and a lapsed lease is noticed that much later.
    A gap of more than 3 s between reaps of all routers restarts all leases."""
    mailbox_block_ms: int = 2_000
    """Longest blocking read of an empty mailbox."""
    min_backoff_ms: int = 50
    """Shortest wait before a retry of a mailbox read. The wait doubles with every failure."""
    max_backoff_ms: int = 2_000
    """Longest wait before a retry of a mailbox read."""
    retry_after_ms: int = 1_000
    """Retry delay that clients are told if Redis does not answer."""
