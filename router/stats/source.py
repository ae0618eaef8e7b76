"""Statistics for `GetStats` and the dashboard, as a stream of messages.

Merges data of links, the ledger, executors' steps and this router's latencies. Executors' steps are subscribed to only
while there is a watcher, once for all watchers. The ledger is read then, once for all watchers, and for each sample of
the dashboard's history. Each message is made on request, so a slow watcher gets the newest one.

An operator sees everything. Any other caller sees other tenants' requests without names, and their queues summed up.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterable, Iterator, Sequence
from contextlib import suppress

from inflight.common.errors import FieldViolation, RequestError, invalid
from inflight.common.protocol import DEFAULT_STATS_INTERVAL_MS, MIN_STATS_INTERVAL_MS
from inflight.common.time_of_day import unix_ms
from inflight.router.auth.caller import Caller
from inflight.router.dispatch.pools import ModelPool, ModelPools
from inflight.router.executors.step_feed import StepFeeds, Subscription, Wants
from inflight.router.ledger.types import Snapshot, TenantQueue
from inflight.router.request.ids import client_id, tenant_of
from inflight.router.stats.capacity import executor_capacities
from inflight.router.telemetry.latencies import Latencies
from inflight.v1 import inference_pb2, stats_pb2, types_pb2

MIN_AGE_S = 0.25
MAX_TENANT_QUEUES = 100


class SnapshotCache:
    """A cached snapshot of one pool. `ask` gets the number of tenants' queues to return."""

    def __init__(self, ask: Callable[[int], Awaitable[Snapshot]], clock: Callable[[], float] = time.monotonic) -> None:
        self._ask = ask
        self._clock = clock
        self._snapshot: Snapshot | None = None
        self._asked_s: float | None = None
        self._asking: asyncio.Task[None] | None = None

    async def newest(self, max_age_s: float) -> Snapshot | None:
        """Returns a snapshot that is at most so old, a quarter of a second at least. If a new one takes longer than
        that, returns the previous one; None if the ledger does not answer."""
        max_age_s = max(max_age_s, MIN_AGE_S)
        is_old = self._asked_s is None or self._clock() - self._asked_s >= max_age_s
        if self._asking is None and is_old:
            self._asked_s = self._clock()
            self._asking = asyncio.create_task(self._look(), name="look at the ledger")
        if self._asking is not None:
            await asyncio.wait((self._asking,), timeout=max_age_s)
        return self._snapshot

    async def _look(self) -> None:
        try:
            self._snapshot = await self._ask(MAX_TENANT_QUEUES)
        except RequestError:
            self._snapshot = None  # the ledger is away; its log says so
        finally:
            self._asking = None


MAX_INTERVAL_MS = 60_000
# How long the first message waits for the first data of executors.
BEGIN_S = 0.5
# Share of the loop's time for making messages, for all watchers together: streams of tokens have priority.
SHARE = 0.1
NOTHING_KNOWN = Snapshot((), ())


class StatsSource:
    """All watchers. `close` ends their streams."""

    def __init__(self, pools: ModelPools, router_id: str, latencies: Latencies) -> None:
        self._pools = pools
        self._router_id = router_id
        self._latencies = latencies
        self._looks = {name: SnapshotCache(pool.dispatcher.snapshot) for name, pool in pools.by_name.items()}
        self._feeds = StepFeeds()
        self._intervals_ms: Counter[int] = Counter()
        self._closing = asyncio.Event()

    @property
    def num_watchers(self) -> int:
        """The callers of all watchers."""
        return self._intervals_ms.total()

    def close(self) -> None:
        """Ends all streams."""
        self._closing.set()

    async def looks(self, max_age_s: float) -> list[tuple[ModelPool, Snapshot | None]]:
        """Returns each pool's snapshot, at most so old; None if the ledger does not answer."""
        pools = list(self._pools.by_name.values())
        found = await asyncio.gather(*(self._looks[pool.name].newest(max_age_s) for pool in pools))
        return list(zip(pools, found, strict=True))

    async def watch(
        self, request: inference_pb2.GetStatsRequest, caller: Caller
    ) -> AsyncGenerator[inference_pb2.GetStatsResponse]:
        """Yields the statistics that the caller may see, at once and then once per interval. Close it at the end
        (`contextlib.aclosing`). Raises `RequestError`."""
        interval_ms = _interval_ms(request)
        pools = self._pools.seen_by(caller, request.model)
        wants = Wants(interval_ms, request.want_sequences)
        subscription = Subscription(self._feeds, wants)
        wants_steps = request.want_iterations or request.want_sequences
        self._intervals_ms[interval_ms] += 1
        try:
            if wants_steps:
                subscription.follow([link for pool in pools for link in pool.links])
                await subscription.begun(min(BEGIN_S, interval_ms / 1000))
            while not self._closing.is_set():
                snapshots = await self._look(pools)
                if wants_steps:
                    subscription.follow([link for pool in pools for link in pool.links])
                began_s = time.thread_time()
                response = self._response(request, pools, snapshots, subscription, caller)
                took_s = time.thread_time() - began_s
                yield response
                pause_s = pause_after(took_s, interval_ms / 1000, self.num_watchers)
                with suppress(TimeoutError):
                    async with asyncio.timeout(pause_s):
                        await self._closing.wait()
        finally:
            subscription.close()
            self._intervals_ms[interval_ms] -= 1
            self._intervals_ms += Counter()

    async def _look(self, pools: Sequence[ModelPool]) -> list[Snapshot]:
        """Returns the ledgers' snapshots, an empty one for a ledger that does not answer."""
        max_age_s = min(self._intervals_ms) / 1000
        found = await asyncio.gather(*(self._looks[pool.name].newest(max_age_s) for pool in pools))
        return [snapshot or NOTHING_KNOWN for snapshot in found]

    def _response(
        self,
        request: inference_pb2.GetStatsRequest,
        pools: Sequence[ModelPool],
        snapshots: Sequence[Snapshot],
        subscription: Subscription,
        caller: Caller,
    ) -> inference_pb2.GetStatsResponse:
        response = inference_pb2.GetStatsResponse(router_id=self._router_id, timestamp_ms=unix_ms())
        for pool, snapshot in zip(pools, snapshots, strict=True):
            for link, capacity in executor_capacities(pool, snapshot):
                iterations, held = subscription.of(link)
                response.executors.add(
                    capacity=capacity,
                    iterations=iterations if request.want_iterations else (),
                    sequences=[seen_sequence(one, caller) for one in held] if request.want_sequences else (),
                )
            response.queues.extend(seen_queues(pool.name, snapshot, caller))
            response.latencies.append(self._latencies.by_model[pool.name].to_proto(pool.name))
        return response


def pause_after(took_s: float, interval_s: float, num_watchers: int) -> float:
    """Returns how long a watcher waits for its next message, given the time that making the last one took."""
    return max(interval_s, took_s * num_watchers / SHARE)


def _interval_ms(request: inference_pb2.GetStatsRequest) -> int:
    interval_ms = request.interval_ms if request.HasField("interval_ms") else DEFAULT_STATS_INTERVAL_MS
    if not MIN_STATS_INTERVAL_MS <= interval_ms <= MAX_INTERVAL_MS:
        raise invalid(FieldViolation("interval_ms", f"must be from {MIN_STATS_INTERVAL_MS} to {MAX_INTERVAL_MS}"))
    return interval_ms


def seen_sequence(held: stats_pb2.SequenceStats, caller: Caller) -> stats_pb2.SequenceStats:
    """Returns the visible part of a sequence, which the executor knows by its id in the ledger."""
    seen = stats_pb2.SequenceStats()
    seen.CopyFrom(held)
    tenant = tenant_of(held.request_id)
    is_known = caller.is_operator or tenant == caller.tenant
    seen.tenant = tenant if is_known else ""
    seen.request_id = client_id(held.request_id) if is_known else ""
    return seen


def seen_queues(model: str, snapshot: Snapshot, caller: Caller) -> Iterator[inference_pb2.TenantQueue]:
    """Returns the waiting requests by class and tenant. Tenants that the caller may not see are summed up without a
    name."""
    for number, queue in enumerate(snapshot.queues, start=1):
        of_class = [one for one in snapshot.tenant_queues if one.priority_class == number]
        visible = [one for one in of_class if caller.is_operator or one.tenant == caller.tenant]
        num_requests = queue.num_requests - sum(one.num_requests for one in visible)
        if num_requests > 0:
            num_tokens = queue.num_tokens - sum(one.num_tokens for one in visible)
            longest_ms = max((one.wait_ms for one in of_class if one not in visible), default=0)
            visible.insert(0, TenantQueue(number, "", num_requests, num_tokens, longest_ms))
        yield from _protos(model, visible)


def _protos(model: str, queues: Iterable[TenantQueue]) -> Iterator[inference_pb2.TenantQueue]:
    for queue in queues:
        yield inference_pb2.TenantQueue(
            model=model,
            tenant=queue.tenant,
            priority=types_pb2.PriorityClass.Name(queue.priority_class),
            num_requests=queue.num_requests,
            num_tokens=queue.num_tokens,
            longest_wait_ms=queue.wait_ms,
        )
