"""Driving a batch: its file is checked, its lines are run, its results become an output file and an error file.

One gateway drives a batch, by a lease. Results are written in segments: a content of its own each, which counts from
when the store has it. The store takes it only from the owner of the lease. So a line has one result, whichever gateways
ran it:

    its gateway dies          its lease lapses within 3 s; another one runs the lines that no segment has. Their
                              requests have the same idempotency keys, so those that still run, or ended
                              recently, run once
    its router dies           the client library goes on with another router
    its executor dies         the router goes on with another executor
    the store is away         the driver waits; if it has lost its lease then, the batch goes on elsewhere
    the output is lost        the line runs again under another key
    files are being written   their names follow from the batch; they are written again, with the same content
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import logging
import secrets
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field, replace
from typing import Any

from inflight import AsyncClient
from inflight.errors import InflightError
from inflight.gateway.answers import model_objects
from inflight.gateway.batches.lines import (
    FileCheck,
    Line,
    Problem,
    Result,
    parse_line,
    ranges_of,
    result_not_run,
)
from inflight.gateway.batches.running import RunningLines, metadata_of
from inflight.gateway.errors import ApiError, from_router
from inflight.gateway.files.contents import Contents, blocks, file_name, lines, segment_name
from inflight.gateway.metrics import Metrics
from inflight.gateway.store.batches import Batch, BatchStore, File

log = logging.getLogger(__name__)

# More without a segment in between are a sign that driving this batch ends gateways.
MAX_TIMES_TAKEN = 10
# A segment is written when its results have so many bytes or lines, or after a part of the batch's time: the results
# that are not written yet may have to be computed again, and a long batch should not have many segments.
SEGMENT_BYTES = 4 * 1024 * 1024
SEGMENT_LINES = 1000
MIN_SEGMENT_S = 1.0
MAX_SEGMENT_S = 30.0
SEGMENT_PART = 0.02
# For how long a write is tried again at once while the store is away.
WRITE_TRIES = 20
MAX_BACKOFF_S = 5.0


@dataclass(frozen=True, slots=True)
class DriverLimits:
    """Bounds of input files, and the time of day in seconds."""

    max_lines: int
    max_line_bytes: int
    clock: Callable[[], float]

    def now(self) -> int:
        """Returns the time in whole seconds."""
        return int(self.clock())


class NotOwnedError(Exception):
    """This driver has lost the batch: it was cancelled, another gateway has it, or it has a segment that is not known
    here."""


@dataclass(slots=True)
class Written:
    """What the segments of a batch have: which lines, and of each segment the bytes of its output, which come before
    those of its errors."""

    done: set[int] = field(default_factory=set)
    segments: dict[str, int] = field(default_factory=dict)
    completed: int = 0
    failed: int = 0
    usage: dict[str, Any] = field(default_factory=dict)

    def take(self, segment: str, description: str) -> None:
        """Adds a segment, by its description."""
        said = json.loads(description)
        for first, last in said["lines"]:
            self.done.update(range(first, last + 1))
        self.segments[segment] = said["output_bytes"]
        self.completed += said["completed"]
        self.failed += said["failed"]
        self.usage = summed(self.usage, said["usage"])

    def fields(self) -> dict[str, Any]:
        """Returns the fields of the batch's record that follow from it."""
        return {"completed": self.completed, "failed": self.failed, "usage": json.dumps(self.usage)}


class Driver:
    """One try to drive a batch to its end, as the owner that it names."""

    def __init__(
        self,
        batch: Batch,
        client: AsyncClient,
        store: BatchStore,
        contents: Contents,
        running: RunningLines,
        metrics: Metrics,
        limits: DriverLimits,
    ) -> None:
        self._batch = batch
        self._client = client
        self._store = store
        self._contents = contents
        self._running = running
        self._metrics = metrics
        self._limits = limits
        self._written = Written()

    async def run(self) -> None:
        """Drives the batch to its end. Raises `NotOwnedError`, and `ApiError` 5xx if it cannot go on now."""
        for segment, description in (await self._store.segments(self._batch.batch_id)).items():
            self._written.take(segment, description)
        try:
            await self._run()
        except ApiError as error:
            if error.status >= 500:
                raise
            # Its input file was lost, or its client may call no router any more.
            await self._give_up([Problem(error.code or "failed", error.text)])

    async def _run(self) -> None:
        batch = self._batch
        if batch.outcome:
            await self._finalize(batch.outcome)
        elif batch.cancelled:
            await self._finalize("cancelled")
        elif batch.times_taken > MAX_TIMES_TAKEN:
            text = f"{batch.times_taken} gateways have ended while they ran it"
            await self._finalize("failed", [Problem("attempts_exhausted", text)])
        elif self._limits.clock() >= batch.expires:
            await self._finalize("expired")
        elif batch.status != "validating" or await self._check():
            await self._finalize("completed" if await self._run_lines() else "expired")

    async def _check(self) -> bool:
        """Checks the input file. Returns whether the batch runs."""
        check = FileCheck(self._batch.endpoint, self._limits.max_lines)
        async with aclosing(self._lines()) as found:
            async for number, raw in found:
                if not check.take(number, raw):
                    break
                if not check.total % 64:
                    await asyncio.sleep(0)  # others have their turn
        check.end()
        if not check.problems and not await self._is_served(check.model or ""):
            text = f"there is no model {(check.model or '')[:100]!r}"
            check.problems.append(Problem("model_not_found", text, "body.model"))
        if check.problems:
            await self._fail(check.problems)
            return False
        now = self._limits.now()
        await self._write(
            {"status": "in_progress", "in_progress_at": now, "total": check.total, "model": check.model or ""}
        )
        return True

    async def _is_served(self, model: str) -> bool:
        try:
            served = await self._client.list_models(metadata=metadata_of(self._batch))
        except InflightError as error:
            raise from_router(error, "model") from None
        return any(entry["id"] == model for one in served for entry in model_objects(one, 0))

    async def _run_lines(self) -> bool:
        """Runs the lines that no segment has. Returns False if the batch expired."""
        results: list[Result] = []
        loop = asyncio.get_running_loop()
        began_s = loop.time() - (self._limits.clock() - self._batch.in_progress_at)
        due_s = loop.time() + MIN_SEGMENT_S
        async with (
            aclosing(self._unfinished()) as unfinished,
            aclosing(self._running.run(self._batch, unfinished)) as run,
        ):
            try:
                async for found in run:
                    results += found
                    if self._limits.clock() >= self._batch.expires:
                        await self._write_segment(results)
                        return False
                    num_bytes = sum(len(result.text) for result in results)
                    if loop.time() >= due_s or num_bytes >= SEGMENT_BYTES or len(results) >= SEGMENT_LINES:
                        await self._write_segment(results)
                        results = []
                        now_s = loop.time()
                        due_s = now_s + min(MAX_SEGMENT_S, max(MIN_SEGMENT_S, (now_s - began_s) * SEGMENT_PART))
            except (asyncio.CancelledError, ApiError):
                # The gateway stops, and another one has less to do; or the input file was lost.
                with contextlib.suppress(ApiError, NotOwnedError):
                    await self._write_segment(results, num_tries=1)
                raise
            await self._write_segment(results)
        return True

    async def _unfinished(self) -> AsyncGenerator[Line, None]:
        async with aclosing(self._lines()) as found:
            async for number, raw in found:
                if number not in self._written.done:
                    yield parse_line(number, raw, self._batch.endpoint)

    async def _lines(self) -> AsyncGenerator[tuple[int, bytes | None], None]:
        name = file_name(self._batch.input_file_id)
        async with aclosing(lines(self._contents, name, self._limits.max_line_bytes)) as found:
            async for number, raw in found:
                yield number, raw

    async def _write_segment(self, results: list[Result], num_tries: int = WRITE_TRIES) -> None:
        if not results:
            return
        successes = [result for result in results if result.is_success]
        failures = [result for result in results if not result.is_success]
        usage: dict[str, Any] = {}
        for result in successes:
            usage = summed(usage, result.usage or {})
        output = b"".join(result.text for result in successes)
        description = {
            "lines": ranges_of([result.number for result in results]),
            "output_bytes": len(output),
            "completed": len(successes),
            "failed": len(failures),
            "usage": usage,
        }
        segment, text = secrets.token_hex(8), json.dumps(description, separators=(",", ":"))
        name = segment_name(self._batch.batch_id, segment)
        await self._tried(
            lambda: self._contents.write(name, _parts(output, *(result.text for result in failures))), num_tries
        )
        after = replace(self._written, done=set(self._written.done), segments=dict(self._written.segments))
        after.take(segment, text)
        await self._write(after.fields(), (segment, text), num_tries=num_tries)
        self._written = after
        self._metrics.batch_lines_ended("completed", len(successes))
        self._metrics.batch_lines_ended("failed", len(failures))

    async def _finalize(self, outcome: str, problems: list[Problem] | None = None) -> None:
        """Writes the files, and ends the batch."""
        if not self._batch.outcome:
            fields: dict[str, Any] = {"outcome": outcome, "finalizing_at": self._limits.now()}
            if outcome != "cancelled":
                fields["status"] = "finalizing"
            if problems:
                fields["errors"] = shown_problems(problems)
            await self._write(fields)
        num_not_run = 0

        async def errors() -> AsyncIterator[bytes]:
            nonlocal num_not_run
            num_not_run = 0
            async for block in self._joined(is_output=False):
                yield block
            if outcome != "completed":
                async with aclosing(self._not_run()) as found:
                    async for result in found:
                        num_not_run += 1
                        yield result.text

        output_file_id = await self._write_file("output", self._joined(is_output=True))
        error_file_id = await self._write_file("error", errors())
        fields = {
            "status": outcome,
            f"{outcome}_at": self._limits.now(),
            **self._written.fields(),
            "failed": self._written.failed + num_not_run,
            "output_file_id": output_file_id,
            "error_file_id": error_file_id,
        }
        await self._write(fields, has_ended=True)
        self._metrics.batch_ended(outcome)
        self._metrics.batch_lines_ended(outcome, num_not_run)
        for segment in self._written.segments:
            with contextlib.suppress(ApiError):
                await self._contents.delete(segment_name(self._batch.batch_id, segment))

    async def _not_run(self) -> AsyncGenerator[Result, None]:
        """Yields results of the lines that have none, as far as the file can be read."""
        if not self._batch.total:
            return  # the file was not checked, and may be no batch
        try:
            async with aclosing(self._unfinished()) as found:
                async for line in found:
                    yield result_not_run(self._batch, line)
        except ApiError as error:
            if error.status >= 500:
                raise

    async def _joined(self, *, is_output: bool) -> AsyncGenerator[bytes, None]:
        """Yields the output, or the errors, of all segments."""
        for segment, output_bytes in self._written.segments.items():
            first, end = (0, output_bytes) if is_output else (output_bytes, None)
            name = segment_name(self._batch.batch_id, segment)
            async with aclosing(blocks(self._contents, name, first, end)) as found:
                async for block in found:
                    yield block

    async def _write_file(self, kind: str, parts: AsyncIterator[bytes]) -> str:
        """Writes a file of results, the same whenever it is written. Returns its id; none for one without results."""
        batch = self._batch
        file_id = f"file-{digest_of(batch.batch_id, kind)}"
        name = file_name(file_id)
        num_bytes = await self._contents.write(name, parts)
        if not num_bytes:
            await self._contents.delete(name)
            return ""
        created = batch.finalizing_at
        filename = f"{batch.batch_id}_{kind}.jsonl"
        expires = created + batch.output_ttl_s
        file = File(file_id, batch.tenant, filename, "batch_output", num_bytes, created, expires)
        await self._store.create_file(file, is_result=True)
        return file_id

    async def _give_up(self, problems: list[Problem]) -> None:
        """Ends a batch that cannot go on, with the results that it has, unless these are lost as well."""
        if self._written.segments and not self._batch.outcome:
            try:
                await self._finalize("failed", problems)
                return
            except ApiError as error:
                if error.status >= 500:
                    raise
        await self._fail(problems)

    async def _fail(self, problems: list[Problem]) -> None:
        """Ends a batch whose lines cannot be run."""
        fields = {"status": "failed", "failed_at": self._limits.now(), "errors": shown_problems(problems)}
        await self._write(fields, has_ended=True)
        self._metrics.batch_ended("failed")

    async def _write(
        self,
        fields: Mapping[str, Any],
        segment: tuple[str, str] = ("", ""),
        *,
        has_ended: bool = False,
        num_tries: int = WRITE_TRIES,
    ) -> None:
        """Writes to the store. Raises `NotOwnedError`."""
        is_written = await self._tried(
            lambda: self._store.advance(self._batch, fields, segment, len(self._written.segments), has_ended=has_ended),
            num_tries,
        )
        if not is_written:
            raise NotOwnedError
        self._batch = replace(self._batch, **fields)

    async def _tried(self, call: Callable[[], Any], num_tries: int) -> Any:
        """Returns what a call returns that may be repeated, which it is while the store is away."""
        for number in range(1, num_tries + 1):
            try:
                return await call()
            except ApiError as error:
                if error.status != 503 or number == num_tries:
                    raise
                log.info("%s: %s; again", self._batch.batch_id, error)
            await asyncio.sleep(min(MAX_BACKOFF_S, 0.1 * 2**number))
        raise AssertionError("the last try returns or raises")


def digest_of(batch_id: str, kind: str) -> str:
    """Returns the name of a batch's file of results, which follows from the batch."""
    return hashlib.sha256(f"{batch_id}:{kind}".encode()).hexdigest()[:24]


def shown_problems(problems: Sequence[Problem]) -> str:
    """Returns the `errors` of a batch, as JSON."""
    return json.dumps({"object": "list", "data": [problem.shown() for problem in problems]})


def summed(usage: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the sum of two `usage` of answers, with details."""
    total = dict(usage)
    for name, value in more.items():
        if isinstance(value, Mapping):
            total[name] = summed(total.get(name) or {}, value)
        elif isinstance(value, int):
            total[name] = (total.get(name) or 0) + value
    return total


async def _parts(*parts: bytes) -> AsyncIterator[bytes]:
    for part in parts:
        yield part
