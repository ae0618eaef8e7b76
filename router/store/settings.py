"""Settings of the store: its calls of Redis, and the intervals of its periodic work."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StoreSettings:
    """The defaults suit a Redis in the same zone. Leases are constants of `scripts/shared/records.lua`."""

    max_queue_requests: int = 10_000
    """Requests of the pool that may wait."""
    max_queue_tokens: int | None = None
    """Tokens, of prompts and `max_tokens`, that may wait in the pool; None is no limit."""
    max_queue_bytes: int | None = None
    """Bytes of prompts that may wait in the pool; None is no limit."""
    max_bypass: int = 16
    """How often other requests may bypass one that does not fit, before an executor is claimed for it."""
    age_ms: int = 30_000
    """After so long in the queue a request moves up a class."""
    preempt_for_priority: bool = False
    """Running requests of a lower class are preempted for a waiting one that does not fit."""
    tolerated_ttft_ms: int = 2_000
    """A request stays with the executor that holds its prefix while the prompts in front of it there take no longer."""
    remember_ended_ms: int = 75_000
    """How long an ended id is remembered: longer than any report is in transit, and 15 s longer than its output can be
    resumed."""
    call_timeout_ms: int = 2_000
    """Longest wait for one reply."""
    max_connections: int = 16
    """Connections of one router for calls; the mailbox reader has one more."""
    renew_interval_ms: int = 1_500
    """Between renewals of the router's lease of 5 s."""
    reap_interval_ms: int = 400
    """Between reaps, on average; each waits half to one and a half of it, and a lapsed lease may be noticed so late. A
    gap of 3 s would start all leases again."""
    mailbox_block_ms: int = 2_000
    """Longest blocking read of an empty mailbox."""
    min_backoff_ms: int = 50
    """Wait before the first retry of a mailbox read."""
    max_backoff_ms: int = 2_000
    """Wait before the later ones."""
    retry_after_ms: int = 1_000
    """Retry hint for clients after Redis did not answer."""
