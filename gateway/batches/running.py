"""Lines of batches under way at a gateway, of which there are few at a time.

Lines wait in their files, not in the queues of routers: a line is sent only while few of its batch wait for a seat. A
router that refuses one for now is obeyed: no line of the batch is sent before the time that it says.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

from inflight import AsyncClient
from inflight.gateway.answers import encoded
from inflight.gateway.batches.endpoints import ENDPOINTS, Call
from inflight.gateway.batches.lines import Line, Result, idempotency_key, request_name, result_of
from inflight.gateway.choices import Source
from inflight.gateway.conversion import Defaults
from inflight.gateway.errors import ApiError
from inflight.gateway.metrics import Metrics
from inflight.gateway.store.batches import Batch

log = logging.getLogger(__name__)

# Of a batch, in the queue of a router. Seats that become free at one step are taken at the next.
MAX_WAITING = 16
# For how often the output of a line may be lost, or its request be taken over, until that is its result.
MAX_RUNS = 8
TICK_S = 1.0
MIN_BACKOFF_S = 0.2
MAX_BACKOFF_S = 10.0
# Codes of errors after which a request must have another key to run again.
_ANOTHER_KEY = frozenset({"output_lost", "cancelled", "idempotency_key_reused"})


class RunningLines:
    """The lines of all batches that this gateway drives."""

    def __init__(
        self, client: AsyncClient, defaults: Defaults, metrics: Metrics, max_running: int, max_per_batch: int
    ) -> None:
        self._client = client
        self._defaults = defaults
        self._metrics = metrics
        self._max_per_batch = max_per_batch
        self._slots = asyncio.Semaphore(max_running)

    async def run(self, batch: Batch, lines: AsyncIterator[Line]) -> AsyncGenerator[list[Result], None]:
        """Runs lines. Yields the results that have come, at least once a second. Closing it cancels the lines that run:
        their requests end soon, if no other gateway repeats them."""
        running = _OfBatch(batch)
        tasks: set[asyncio.Task[None]] = set()
        has_more = True
        try:
            while has_more or tasks or running.results:
                while has_more and len(tasks) < self._max_per_batch and running.may_send():
                    line = await anext(lines, None)
                    if line is None:
                        has_more = False
                        break
                    running.waits(line)
                    tasks.add(task := asyncio.create_task(self._run(running, line)))
                    task.add_done_callback(tasks.discard)
                if has_more or tasks:
                    await running.news()
                yield running.taken()
        finally:
            for task in tuple(tasks):
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self, running: _OfBatch, line: Line) -> None:
        try:
            result = await self._result(running, line)
        finally:
            running.began(line)
        running.add(result)

    async def _result(self, running: _OfBatch, line: Line) -> Result:
        run, tries, num_lost, raw = 0, 0, 0, encoded(line.body)
        while True:
            try:
                return result_of(running.batch, line, await self._answered(running, line, raw, run))
            except ApiError as error:
                is_again = error.status in (429, 503) and error.may_retry
                is_lost = error.code in _ANOTHER_KEY or error.code == "taken_over"
                if not is_again and not (is_lost and num_lost < MAX_RUNS):
                    return result_of(running.batch, line, error)
                run += error.code in _ANOTHER_KEY
                num_lost += not is_again
                tries += 1
                delay_s = max(error.retry_after_s or 0.0, min(MAX_BACKOFF_S, MIN_BACKOFF_S * 2 ** min(tries, 10)))
                log.debug("%s line %d: %s; again in %.1f s", running.batch.batch_id, line.number, error, delay_s)
                if is_again:
                    running.pause(delay_s)
            except Exception:
                log.exception("%s line %d failed", running.batch.batch_id, line.number)
                failed = ApiError(500, "the gateway failed", "server_error", code="internal")
                return result_of(running.batch, line, failed)
            running.waits(line)
            await asyncio.sleep(delay_s)

    async def _answered(self, running: _OfBatch, line: Line, raw: bytes, run: int) -> dict[str, Any]:
        batch = running.batch
        async with self._slots:
            with self._metrics.batch_line_running():
                source = Source(self._client, metadata_of(batch), self._metrics, lambda: running.began(line))
                key = idempotency_key(batch, line.number, run)
                call = Call(key, request_name(batch, line.number), batch.in_progress_at, source, self._defaults)
                return await ENDPOINTS[batch.endpoint](raw, call)


class _OfBatch:
    """The lines of one batch: which wait for a seat, the results that have come, and until when none is sent."""

    def __init__(self, batch: Batch) -> None:
        self.batch = batch
        self.results: list[Result] = []
        self._waiting: set[int] = set()
        self._paused_until_s = 0.0
        self._changed = asyncio.Event()

    def may_send(self) -> bool:
        return len(self._waiting) < MAX_WAITING and asyncio.get_running_loop().time() >= self._paused_until_s

    def waits(self, line: Line) -> None:
        self._waiting.add(line.number)

    def began(self, line: Line) -> None:
        if line.number in self._waiting:
            self._waiting.discard(line.number)
            self._changed.set()

    def pause(self, delay_s: float) -> None:
        self._paused_until_s = max(self._paused_until_s, asyncio.get_running_loop().time() + delay_s)

    def add(self, result: Result) -> None:
        self.results.append(result)
        self._changed.set()

    def taken(self) -> list[Result]:
        results, self.results = self.results, []
        return results

    async def news(self) -> None:
        """Waits until more may be sent or has come, for at most a second."""
        paused_s = self._paused_until_s - asyncio.get_running_loop().time()
        timeout_s = min(TICK_S, paused_s) if paused_s > 0 else TICK_S
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()
        self._changed.clear()


def metadata_of(batch: Batch) -> dict[str, str]:
    """Returns the metadata of calls of routers for a batch."""
    return {"authorization": batch.authorization} if batch.authorization else {}
