"""What is put under overload: a stack with vLLM executors, and `vllm serve` with its own limit of its queue.

Each is asked by a client that waits until the deadline and no longer. The processes of the one that does not work are
stopped, because an idle vLLM waits with a part of a core.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import AsyncIterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

import grpc

from inflight.bench.targets.stack import StackTarget
from inflight.bench.workloads.plan import PlannedRequest
from inflight.errors import InflightError

PREFIX = b"data: "
DONE = b"[DONE]"
HTTP_OK = 200
# What `vllm serve` answers where its queue is full.
HTTP_FULL = 503


class End(StrEnum):
    """How a request ended: with all of its tokens in time, refused at once, without all of them in time, or failed."""

    COMPLETED = "completed"
    REFUSED = "refused"
    LATE = "late"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Ending:
    """The end of a tenant's request. Times are seconds since it was sent."""

    tenant: str
    end: End
    num_tokens: int
    first_token_s: float | None
    elapsed_s: float
    error: str = ""


class Side(Protocol):
    """One of the systems."""

    @property
    def name(self) -> str:
        """Its name in the table."""
        ...

    def working(self) -> AbstractAsyncContextManager[None]:
        """Lets its processes work within."""
        ...

    async def send(self, planned: PlannedRequest, tenant: str) -> Ending:
        """Sends a request and reads it to its end."""
        ...


@dataclass(frozen=True, slots=True)
class Patience:
    """Seconds that a client waits for all tokens and for the first one. Only routers are told the latter."""

    deadline_s: float
    first_token_s: float


class Reading:
    """A request that is being read."""

    def __init__(self, tenant: str, num_expected: int) -> None:
        self._tenant, self._num_expected = tenant, num_expected
        self._began_s = time.perf_counter()
        self._first_token_s: float | None = None
        self.num_tokens = 0

    def take(self, num_tokens: int) -> None:
        """Takes the number of tokens that have come by now."""
        if num_tokens and self._first_token_s is None:
            self._first_token_s = time.perf_counter() - self._began_s
        self.num_tokens = num_tokens

    def ended(self, end: End | None = None, error: str = "") -> Ending:
        """Returns the end. Without one given, it is that of a request that was not refused."""
        whole = End.COMPLETED if self.num_tokens == self._num_expected else End.LATE
        elapsed_s = time.perf_counter() - self._began_s
        return Ending(self._tenant, end or whole, self.num_tokens, self._first_token_s, elapsed_s, error)


@dataclass(frozen=True, slots=True)
class StackSide:
    """A router with executors, asked through the Python client."""

    target: StackTarget
    patience: Patience

    @property
    def name(self) -> str:
        return self.target.mode

    def working(self) -> AbstractAsyncContextManager[None]:
        return self.target.working()

    async def send(self, planned: PlannedRequest, tenant: str) -> Ending:
        reading = Reading(tenant, planned.output_tokens)
        try:
            async for delta in self.target.client.generate(
                token_ids=planned.prompt_ids,
                max_tokens=planned.output_tokens,
                ignore_eos=True,
                temperature=0.0,
                tenant=tenant,
                deadline_s=self.patience.deadline_s,
                first_token_deadline_s=self.patience.first_token_s,
            ):
                reading.take(reading.num_tokens + delta.num_tokens)
        except InflightError as error:
            match error.code:
                case grpc.StatusCode.RESOURCE_EXHAUSTED if not reading.num_tokens:
                    return reading.ended(End.REFUSED)
                case grpc.StatusCode.DEADLINE_EXCEEDED:
                    return reading.ended(End.LATE)
            return reading.ended(End.FAILED, str(error))
        return reading.ended()


@dataclass(frozen=True, slots=True)
class ServeSide:
    """A `vllm serve`, asked over HTTP. It knows no tenants and no deadlines: a client leaves at its deadline."""

    address: str
    group: int
    patience: Patience
    name: str = "vllm-serve"

    @asynccontextmanager
    async def working(self) -> AsyncIterator[None]:
        self.signal(signal.SIGCONT)
        try:
            yield
        finally:
            self.signal(signal.SIGSTOP)

    def signal(self, number: signal.Signals) -> None:
        """To all of its processes."""
        with suppress(ProcessLookupError):
            os.killpg(self.group, number)

    async def send(self, planned: PlannedRequest, tenant: str) -> Ending:
        reading = Reading(tenant, planned.output_tokens)
        try:
            async with asyncio.timeout(self.patience.deadline_s):
                status = await self._read(planned, reading)
        except TimeoutError:
            return reading.ended(End.LATE)
        except OSError as error:
            return reading.ended(End.FAILED, str(error))
        if status == HTTP_OK:
            return reading.ended()
        return reading.ended(End.REFUSED if status == HTTP_FULL else End.FAILED, f"status {status}")

    async def _read(self, planned: PlannedRequest, reading: Reading) -> int:
        """Reads the answer. Each event tells how many tokens there are by then. Returns the status."""
        host, _, port = self.address.rpartition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        try:
            writer.write(request_of(planned, self.address))
            status = int((await reader.readline()).split()[1])
            async for line in reader:
                if status == HTTP_OK and line.startswith(PREFIX) and not line.startswith(PREFIX + DONE):
                    event = json.loads(line[len(PREFIX) :])
                    if "error" in event:  # the stream had begun
                        return int(event["error"]["code"])
                    reading.take(int(event["usage"]["completion_tokens"]))
            return status
        finally:
            writer.close()


def request_of(planned: PlannedRequest, address: str) -> bytes:
    """Returns the request. An answer of HTTP/1.0 has no chunks, and ends with its connection."""
    body = {
        "model": "model",
        "prompt": planned.prompt_ids,
        "max_tokens": planned.output_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    }
    content = json.dumps(body).encode()
    head = f"POST /v1/completions HTTP/1.0\r\nHost: {address}\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content
