"""Who looks on at the steps, and what they are told: `WatchSteps`.

Costs the loop nothing while nobody looks on: what steps leave is a record each. Who is held the loop is asked, by its
inbox, once for all that want to know at the moment; one that is in the middle of a long step answers behind it. All on
the event loop's thread.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, Callable
from contextlib import suppress

from inflight.v1 import executor_pb2

from common.errors import FieldViolation, invalid
from executor.engine_output import EngineOutput
from executor.seating import SequenceStanding
from executor.step_history import StepHistory
from executor.step_record import StepRecord
from executor.step_stats import iteration_stats, sequence_stats

DEFAULT_INTERVAL_MS = 1000
MIN_INTERVAL_MS = 50

Standings = tuple[SequenceStanding, ...]


class StepWatch:
    """Takes in what the loop publishes, and tells it to who looks on.

    `ask` has the loop list who is held; `has_work` says whether anybody is. `on_record` is told of each step.
    """

    def __init__(
        self, description: executor_pb2.DescribeResponse, ask: Callable[[], None], has_work: Callable[[], bool]
    ) -> None:
        self._description = description
        self._ask = ask
        self._has_work = has_work
        self.on_record: Callable[[StepRecord], None] | None = None
        self._history = StepHistory()
        self._standings: Standings = ()
        self._asked: asyncio.Future[None] | None = None
        self._closing = asyncio.Event()
        self.num_watchers = 0

    def take(self, output: EngineOutput) -> None:
        """Takes in one turn of the loop."""
        if output.record is not None:
            self._history.add(output.record)
            if self.on_record is not None:
                self.on_record(output.record)
        if output.sequences is not None:
            self._standings = output.sequences
            if self._asked is not None and not self._asked.done():
                self._asked.set_result(None)
            self._asked = None

    def close(self) -> None:
        """Ends everybody's stream."""
        self._closing.set()

    async def watch(self, request: executor_pb2.WatchStepsRequest) -> AsyncGenerator[executor_pb2.WatchStepsResponse]:
        """How it is now, and then again and again what was since. Raises `RequestError`."""
        interval_s = interval_ms_of(request) / 1000
        step = self._history.newest_step
        if request.HasField("after_iter"):
            step = min(step, request.after_iter)
        self.num_watchers += 1
        try:
            while not self._closing.is_set():
                standings = await self._list(interval_s) if request.want_sequences else ()
                records = self._history.after(step)
                step = self._history.newest_step
                yield self._response(records, standings)
                with suppress(TimeoutError):
                    async with asyncio.timeout(interval_s):
                        await self._closing.wait()
        finally:
            self.num_watchers -= 1

    async def _list(self, timeout_s: float) -> Standings:
        """Who is held: what the loop says by then, or what it said last."""
        if not self._has_work():
            return ()
        if self._asked is None:
            self._asked = asyncio.get_running_loop().create_future()
            self._ask()
        await asyncio.wait((self._asked,), timeout=timeout_s)
        return self._standings

    def _response(self, records: list[StepRecord], standings: Standings) -> executor_pb2.WatchStepsResponse:
        clock_began_s = time.time() - time.perf_counter()
        return executor_pb2.WatchStepsResponse(
            generation=self._description.generation,
            iterations=[iteration_stats(record, self._description, clock_began_s) for record in records],
            sequences=[sequence_stats(standing) for standing in standings],
        )


def interval_ms_of(request: executor_pb2.WatchStepsRequest) -> int:
    """How often to tell. Raises `RequestError` where that is too often."""
    interval_ms = request.interval_ms if request.HasField("interval_ms") else DEFAULT_INTERVAL_MS
    if interval_ms < MIN_INTERVAL_MS:
        raise invalid(FieldViolation("interval_ms", f"must be at least {MIN_INTERVAL_MS}"))
    return interval_ms
