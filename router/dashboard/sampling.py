"""Samples for the dashboard's history, taken every five seconds.

Reads the ledger once per sample. Executors are not called: their last reports have the data.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from inflight.router.dashboard.history import (
    EXECUTOR_FIELDS,
    MODEL_FIELDS,
    SAMPLE_S,
    TENANT_FIELDS,
    History,
    ModelSample,
    Row,
    row_of,
)
from inflight.router.dashboard.requests import RequestLog, Tally
from inflight.router.dispatch.pools import ModelPool
from inflight.router.executors.link import ExecutorLink
from inflight.router.ledger.types import Snapshot
from inflight.router.telemetry.latencies import Latencies
from inflight.v1 import executor_pb2

log = logging.getLogger(__name__)

Looks = Callable[[], Awaitable[Sequence[tuple[ModelPool, Snapshot | None]]]]


@dataclass(frozen=True, slots=True)
class Totals:
    """An executor's counters since its start, from its last report."""

    generation: int
    steps: int
    preemptions: int
    busy_s: float | None
    elapsed_s: float | None


@dataclass(frozen=True, slots=True)
class Growth:
    """The increase within a sample. `device_s` and `host_s` are None if not measured."""

    steps: int = 0
    preemptions: int = 0
    device_s: float | None = None
    host_s: float | None = None


def growth_of(before: Totals | None, now: Totals) -> Growth:
    """Returns the increase between two reports; unknown for a generation that is seen for the first time."""
    if before is None or before.generation != now.generation or now.steps < before.steps:
        return Growth()
    device_s = host_s = None
    if None not in (before.busy_s, before.elapsed_s, now.busy_s, now.elapsed_s) and now.steps > before.steps:
        device_s = max(0.0, (now.busy_s or 0.0) - (before.busy_s or 0.0))
        host_s = max(0.0, (now.elapsed_s or 0.0) - (before.elapsed_s or 0.0) - device_s)
    return Growth(now.steps - before.steps, now.preemptions - before.preemptions, device_s, host_s)


class Sampler:
    """Adds samples to the history."""

    def __init__(
        self,
        history: History,
        requests: RequestLog,
        latencies: Latencies,
        looks: Looks,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._history = history
        self._requests = requests
        self._latencies = latencies
        self._looks = looks
        self._clock = clock
        self._sampled_s = clock()
        self._totals: dict[ExecutorLink, Totals] = {}

    async def run(self) -> None:
        """Takes samples until cancelled."""
        while True:
            await asyncio.sleep(max(0.0, self._sampled_s + SAMPLE_S - self._clock()))
            try:
                await self.sample()
            except Exception:
                # A failure of a chart must not stop the router.
                log.exception("a sample of the dashboard's history failed")
                self._sampled_s += SAMPLE_S

    async def sample(self) -> None:
        """Takes one sample now."""
        looks = await self._looks()
        now_s = self._clock()
        seconds, self._sampled_s = now_s - self._sampled_s, now_s
        tallies, refused = self._requests.take()
        models: dict[str, ModelSample] = {}
        totals: dict[ExecutorLink, Totals] = {}
        for pool, snapshot in looks:
            of_model = {tenant: tally for (model, tenant), tally in tallies.items() if model == pool.name}
            models[pool.name] = self._model(pool, snapshot, of_model, refused[pool.name], totals)
        self._totals = totals
        self._history.add(now_s, seconds, models)

    def _model(
        self,
        pool: ModelPool,
        snapshot: Snapshot | None,
        tallies: dict[str, Tally],
        num_refused: int,
        totals: dict[ExecutorLink, Totals],
    ) -> ModelSample:
        reserved = {one.executor_id: one.reserved_blocks for one in snapshot.executors} if snapshot else {}
        links = [(link, link.report) for link in pool.links if link.report is not None]
        growths: dict[str, Growth] = {}
        executors: dict[str, Row[float]] = {}
        for link, report in links:
            totals[link] = totals_of(link, report)
            growth = growths[link.executor_id] = growth_of(self._totals.get(link), totals[link])
            executors[link.executor_id] = _executor_row(report, reserved.get(link.executor_id), growth)
        first, between = self._latencies.by_model[pool.name].recent(SAMPLE_S)
        finished: dict[str, int] = {}
        for tally in tallies.values():
            for outcome, number in tally.ended.items():
                finished[outcome] = finished.get(outcome, 0) + number
        figures = row_of(
            MODEL_FIELDS,
            {
                "waiting": sum(snapshot.num_waiting) if snapshot else None,
                "running": sum(report.num_running for _, report in links),
                "seats": sum(link.description.max_num_sequences for link, _ in links),
                "kvUsed": sum(report.used_blocks for _, report in links),
                "kvReserved": sum(max(0, reserved.get(link.executor_id, 0)) for link, _ in links) if snapshot else None,
                "kvTotal": sum(link.description.total_blocks for link, _ in links),
                "promptTokens": sum(tally.prompt_tokens for tally in tallies.values()),
                "cachedTokens": sum(tally.cached_tokens for tally in tallies.values()),
                "outputTokens": sum(tally.output_tokens for tally in tallies.values()),
                "ttftP50Ms": first[0] if first else None,
                "ttftP99Ms": first[1] if first else None,
                "interTokenP50Ms": between[0] if between else None,
                "interTokenP99Ms": between[1] if between else None,
                "refused": num_refused,
                "moved": sum(tally.num_moved for tally in tallies.values()),
                **_steps(list(growths.values())),
            },
        )
        return ModelSample(figures, finished, _tenant_rows(tallies, snapshot), executors)


def totals_of(link: ExecutorLink, report: executor_pb2.Report) -> Totals:
    """Returns the counters of a report."""
    return Totals(
        link.description.generation,
        report.num_steps,
        report.num_preemptions,
        report.device_busy_s if report.HasField("device_busy_s") else None,
        report.elapsed_s if report.HasField("elapsed_s") else None,
    )


def _steps(growths: Sequence[Growth]) -> dict[str, float | None]:
    """Sums steps and preemptions of several executors, and averages step times, milliseconds."""
    measured = [growth for growth in growths if growth.device_s is not None and growth.host_s is not None]
    num_measured = sum(growth.steps for growth in measured)
    device_s = sum(growth.device_s or 0.0 for growth in measured)
    host_s = sum(growth.host_s or 0.0 for growth in measured)
    return {
        "steps": sum(growth.steps for growth in growths),
        "preemptions": sum(growth.preemptions for growth in growths),
        "deviceMs": 1000 * device_s / num_measured if num_measured else None,
        "hostMs": 1000 * host_s / num_measured if num_measured else None,
    }


def _executor_row(report: executor_pb2.Report, reserved: int | None, growth: Growth) -> Row[float]:
    return row_of(
        EXECUTOR_FIELDS,
        {
            "running": report.num_running,
            "kvUsed": report.used_blocks,
            "kvReserved": None if reserved is None else max(0, reserved),
            **_steps([growth]),
        },
    )


def _tenant_rows(tallies: dict[str, Tally], snapshot: Snapshot | None) -> dict[str, Row[float]]:
    """Returns the tenants of this router's requests, and of the queue that all routers share."""
    waiting: dict[str, int] = {}
    for queue in snapshot.tenant_queues if snapshot else ():
        waiting[queue.tenant] = waiting.get(queue.tenant, 0) + queue.num_requests
    rows: dict[str, Row[float]] = {}
    for tenant in {*tallies, *waiting}:
        tally = tallies.get(tenant, Tally())
        rows[tenant] = row_of(
            TENANT_FIELDS,
            {
                "waiting": waiting.get(tenant, 0),
                "running": tally.num_running,
                "promptTokens": tally.prompt_tokens,
                "outputTokens": tally.output_tokens,
                "ended": tally.ended.total(),
            },
        )
    return rows
