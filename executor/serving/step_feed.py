"""`WatchSteps`: the watchers of steps, and the messages that they get.

Without watchers it costs the loop one record per step. The list of held sequences is requested through the loop's
inbox, once for all watchers that want it at that moment; a loop in the middle of a long step answers after it.
Everything here runs on the event loop's thread.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress
from itertools import islice

from inflight.common.errors import FieldViolation, invalid
from inflight.common.protocol import DEFAULT_STATS_INTERVAL_MS, MIN_STATS_INTERVAL_MS
from inflight.executor.engine.output import EngineOutput
from inflight.executor.scheduler.seat_view import SequenceSnapshot
from inflight.executor.scheduler.step_record import PART_NAMES, KvCounts, PlanCounts, StepRecord
from inflight.executor.serving.report import CONSTRAINT_PROTO, PHASE_PROTO
from inflight.v1 import executor_pb2, stats_pb2


def iteration_stats(
    record: StepRecord, description: executor_pb2.DescribeResponse, clock_began_s: float
) -> stats_pb2.IterationStats:
    """Makes the message of a step. The loop's clock began at `clock_began_s`, in seconds since 1970."""
    exposed_s, busy_s = record.times
    return stats_pb2.IterationStats(
        iter=record.step,
        timestamp_ms=max(0, round((clock_began_s + record.ended_s) * 1000)),
        iter_latency_ms=(exposed_s + busy_s) * 1000,
        device_ms=busy_s * 1000,
        exposed_host_ms=exposed_s * 1000,
        parts=[
            stats_pb2.StepPart(name=name, ms=seconds * 1000)
            for name, seconds in zip(PART_NAMES, record.part_s, strict=False)
        ],
        num_active_requests=record.num_active,
        num_queued_requests=record.num_queued,
        max_num_active_requests=description.max_num_sequences,
        kv_cache_stats=_kv_stats(record.kv, description),
        inflight_batching_stats=_batching_stats(record.plan, record),
        constraint=CONSTRAINT_PROTO[record.plan.constraint],
    )


def _kv_stats(kv: KvCounts, description: executor_pb2.DescribeResponse) -> stats_pb2.KvCacheStats:
    return stats_pb2.KvCacheStats(
        max_num_blocks=description.total_blocks,
        free_num_blocks=kv.free_blocks,
        used_num_blocks=kv.used_blocks,
        evictable_num_blocks=kv.evictable_blocks,
        reserved_num_blocks=kv.reserved_blocks,
        tokens_per_block=description.block_size,
        prefix_query_tokens=kv.query_tokens,
        prefix_hit_tokens=kv.hit_tokens,
        cache_hit_rate=kv.hit_tokens / kv.query_tokens if kv.query_tokens else 0.0,
        used_host_blocks=kv.used_host_blocks,
    )


def _batching_stats(plan: PlanCounts, record: StepRecord) -> stats_pb2.InflightBatchingStats:
    return stats_pb2.InflightBatchingStats(
        num_scheduled_requests=plan.num_decodes + plan.num_prefills,
        num_context_requests=plan.num_prefills,
        num_gen_requests=plan.num_decodes,
        num_paused_requests=plan.num_paused,
        num_boarded_requests=plan.num_boarded,
        num_completed_requests=record.num_finished,
        num_ctx_tokens=plan.prefill_tokens,
        num_gen_tokens=record.num_new_tokens,
    )


def sequence_stats(snapshot: SequenceSnapshot) -> stats_pb2.SequenceStats:
    return stats_pb2.SequenceStats(
        request_id=snapshot.request_id,
        phase=PHASE_PROTO[snapshot.phase],
        seat=snapshot.seat,
        prompt_tokens=snapshot.prompt_tokens,
        computed_tokens=snapshot.computed_tokens,
        output_tokens=snapshot.output_tokens,
        num_blocks=snapshot.num_blocks,
        reserved_blocks=snapshot.reserved_blocks,
    )


NUM_KEPT = 1000


class StepHistory:
    """The newest `num_kept` records, in order and without gaps."""

    def __init__(self, num_kept: int = NUM_KEPT) -> None:
        self._records: deque[StepRecord] = deque(maxlen=num_kept)

    def add(self, record: StepRecord) -> None:
        """Adds the next record and drops the oldest if there are too many."""
        self._records.append(record)

    @property
    def newest_step(self) -> int:
        """The number of the newest step; 0 before the first."""
        return self._records[-1].step if self._records else 0

    def after(self, step: int) -> list[StepRecord]:
        """Returns the kept records after this step, oldest first."""
        num_wanted = min(self.newest_step - step, len(self._records))
        newest_first = islice(reversed(self._records), num_wanted)
        return list(newest_first)[::-1]


Snapshots = tuple[SequenceSnapshot, ...]


class StepWatch:
    """Collects what the loop publishes and streams it to watchers.

    `ask` requests the list of held sequences from the loop; `has_work` says whether there are any. `on_record` is
    called with each step's record.
    """

    def __init__(
        self, description: executor_pb2.DescribeResponse, ask: Callable[[], None], has_work: Callable[[], bool]
    ) -> None:
        self._description = description
        self._ask = ask
        self._has_work = has_work
        self.on_record: Callable[[StepRecord], None] | None = None
        self._history = StepHistory()
        self._snapshots: Snapshots = ()
        self._asked: asyncio.Future[None] | None = None
        self._closing = asyncio.Event()
        self.num_watchers = 0

    def take(self, output: EngineOutput) -> None:
        """Takes the output of one iteration of the loop."""
        if output.record is not None:
            self._history.add(output.record)
            if self.on_record is not None:
                self.on_record(output.record)
        if output.sequences is not None:
            self._snapshots = output.sequences
            if self._asked is not None and not self._asked.done():
                self._asked.set_result(None)
            self._asked = None

    def close(self) -> None:
        """Ends the streams of all watchers."""
        self._closing.set()

    async def watch(self, request: executor_pb2.WatchStepsRequest) -> AsyncGenerator[executor_pb2.WatchStepsResponse]:
        """Yields the current state, and then repeatedly what happened since. Raises `RequestError`."""
        interval_s = interval_ms_of(request) / 1000
        step = self._history.newest_step
        if request.HasField("after_iter"):
            step = min(step, request.after_iter)
        self.num_watchers += 1
        try:
            while not self._closing.is_set():
                snapshots = await self._list(interval_s) if request.want_sequences else ()
                records = self._history.after(step)
                step = self._history.newest_step
                yield self._response(records, snapshots)
                with suppress(TimeoutError):
                    async with asyncio.timeout(interval_s):
                        await self._closing.wait()
        finally:
            self.num_watchers -= 1

    async def _list(self, timeout_s: float) -> Snapshots:
        """Returns the held sequences as the loop lists them within the timeout, or else its previous list."""
        if not self._has_work():
            return ()
        if self._asked is None:
            self._asked = asyncio.get_running_loop().create_future()
            self._ask()
        await asyncio.wait((self._asked,), timeout=timeout_s)
        return self._snapshots

    def _response(self, records: list[StepRecord], snapshots: Snapshots) -> executor_pb2.WatchStepsResponse:
        clock_began_s = time.time() - time.perf_counter()
        return executor_pb2.WatchStepsResponse(
            generation=self._description.generation,
            iterations=[iteration_stats(record, self._description, clock_began_s) for record in records],
            sequences=[sequence_stats(snapshot) for snapshot in snapshots],
        )


def interval_ms_of(request: executor_pb2.WatchStepsRequest) -> int:
    """Returns the interval between messages. Raises `RequestError` where it is too short."""
    interval_ms = request.interval_ms if request.HasField("interval_ms") else DEFAULT_STATS_INTERVAL_MS
    if interval_ms < MIN_STATS_INTERVAL_MS:
        raise invalid(FieldViolation("interval_ms", f"must be at least {MIN_STATS_INTERVAL_MS}"))
    return interval_ms
