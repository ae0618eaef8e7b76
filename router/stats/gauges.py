"""Gauges that are refreshed at each scrape: this router's requests, and a snapshot of the ledger.

The ledger is read at most once a second, at any number of scrapers. While it does not answer, its figures are left out.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Collection

from prometheus_client import CollectorRegistry, Gauge

from inflight.common.errors import RequestError
from inflight.router.dispatch.pools import ModelPool
from inflight.router.ledger.types import Snapshot
from inflight.router.telemetry.events import CLASS_NAMES

MIN_INTERVAL_S = 1.0


class ScrapeGauges:
    """The gauges of `pools`; `refresh` brings them up to date."""

    def __init__(
        self, registry: CollectorRegistry, pools: Collection[ModelPool], clock: Callable[[], float] = time.monotonic
    ) -> None:
        def gauge(name: str, text: str, *more_labels: str) -> Gauge:
            return Gauge(f"inflight_{name}", text, ("model", *more_labels), registry=registry)

        self._pools = pools
        self._clock = clock
        self._turn = asyncio.Lock()
        self._due = clock()
        self._streams = gauge("streams", "Requests that wait or run on this router.")
        self._links = gauge("executor_links", "Executors that this router has a link to.")
        self._queue_requests = gauge("queue_requests", "Requests waiting in the queue.", "class")
        self._queue_tokens = gauge("queue_tokens", "Tokens of waiting requests: prompts and max_tokens.", "class")
        self._accepting = gauge("executors_accepting", "Executors that accept new work.")
        self._blocks = gauge("ledger_blocks", "KV blocks that can be reserved on the accepting executors.")
        self._reserved_blocks = gauge("ledger_reserved_blocks", "Reserved KV blocks of the accepting executors.")
        self._sequences = gauge(
            "ledger_sequences", "Sequences that the accepting executors can hold: seats and standby."
        )
        self._reserved_sequences = gauge("ledger_reserved_sequences", "Reserved sequences of the accepting executors.")
        self._of_ledger = (
            self._queue_requests,
            self._queue_tokens,
            self._accepting,
            self._blocks,
            self._reserved_blocks,
            self._sequences,
            self._reserved_sequences,
        )

    async def refresh(self) -> None:
        """Refreshes all gauges. Never raises: a source that does not answer is left out."""
        for pool in self._pools:
            self._streams.labels(pool.name).set(len(pool.dispatcher.streams))
            self._links.labels(pool.name).set(len(pool.links))
        async with self._turn:
            if self._clock() < self._due:
                return
            looks = await asyncio.gather(*(_look(pool) for pool in self._pools))
            self._due = self._clock() + MIN_INTERVAL_S
            for gauge in self._of_ledger:
                gauge.clear()
            for pool, snapshot in zip(self._pools, looks, strict=True):
                if snapshot is not None:
                    self._show(pool.name, snapshot)

    def _show(self, model: str, snapshot: Snapshot) -> None:
        for priority, name in CLASS_NAMES.items():
            queue = snapshot.queues[priority - 1]
            self._queue_requests.labels(model, name).set(queue.num_requests)
            self._queue_tokens.labels(model, name).set(queue.num_tokens)
        accepting = [executor for executor in snapshot.executors if executor.live and executor.accepting]
        self._accepting.labels(model).set(len(accepting))
        self._blocks.labels(model).set(sum(max(one.total_blocks, one.budget_blocks) for one in accepting))
        self._reserved_blocks.labels(model).set(sum(executor.reserved_blocks for executor in accepting))
        self._sequences.labels(model).set(sum(executor.budget_sequences for executor in accepting))
        self._reserved_sequences.labels(model).set(sum(executor.reserved_sequences for executor in accepting))


async def _look(pool: ModelPool) -> Snapshot | None:
    """Returns a pool's snapshot; None while the ledger does not answer."""
    try:
        return await pool.dispatcher.snapshot()
    except RequestError:
        return None
