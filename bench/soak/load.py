"""The load of a soak: more clients than seats. Some cancel their requests, some vanish, some send a request twice."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from inflight import AsyncClient
from inflight.aio_stream import AsyncStream
from inflight.bench.workloads.plan import PlannedRequest
from inflight.common.errors import Reason
from inflight.errors import InflightError

# The rest is read to its end.
CANCEL_SHARE = 0.2
VANISH_SHARE = 0.1
HEDGE_SHARE = 0.1
MAX_HEDGE_PAUSE_S = 0.025
MAX_ERRORS_KEPT = 20


@dataclass(slots=True)
class SoakLoad:
    """Clients that each send one request after the other, until `is_stopping`."""

    client: AsyncClient
    addresses: Sequence[str]
    requests: Sequence[PlannedRequest]
    seed: int
    num_sent: int = 0
    num_cancelled: int = 0
    num_vanished: int = 0
    num_failed: int = 0
    num_tokens: int = 0
    errors: list[str] = field(default_factory=list)
    is_stopping: bool = False

    async def run(self, num_clients: int) -> None:
        """Sends until the end, and reads the requests under way then to their end."""
        async with asyncio.TaskGroup() as group:
            for index in range(num_clients):
                group.create_task(self._send_on(random.Random(f"soak/{self.seed}/{index}")))

    async def _send_on(self, rng: random.Random) -> None:
        while not self.is_stopping:
            planned, choice = rng.choice(self.requests), rng.random()
            self.num_sent += 1
            try:
                if choice < CANCEL_SHARE:
                    await self._cancel(planned, rng)
                elif choice < CANCEL_SHARE + VANISH_SHARE:
                    await self._vanish(planned, rng)
                elif choice < CANCEL_SHARE + VANISH_SHARE + HEDGE_SHARE:
                    await self._hedge(planned, rng)
                else:
                    await self._read(planned)
            except InflightError as error:
                self._fail(str(error))

    async def _read(self, planned: PlannedRequest) -> None:
        num_tokens = await self._follow(_stream(self.client, planned), None)
        if num_tokens != planned.output_tokens:
            self._fail(f"{num_tokens} of {planned.output_tokens} tokens")

    async def _cancel(self, planned: PlannedRequest, rng: random.Random) -> None:
        self.num_cancelled += 1
        async with _stream(self.client, planned) as stream:
            await self._follow(stream, rng.randrange(planned.output_tokens) + 1)

    async def _vanish(self, planned: PlannedRequest, rng: random.Random) -> None:
        """Closes the client's connection in the middle of the stream."""
        self.num_vanished += 1
        async with AsyncClient(rng.choice(self.addresses), resume=False) as client:
            await self._follow(_stream(client, planned), rng.randrange(planned.output_tokens) + 1)

    async def _hedge(self, planned: PlannedRequest, rng: random.Random) -> None:
        """Sends a request in two calls that begin within milliseconds. At least one brings all tokens, and the other
        may be told that it does."""
        key = f"soak-{self.seed}-{rng.getrandbits(64):016x}"

        async def call(pause_s: float) -> bool:
            await asyncio.sleep(pause_s)
            try:
                num_tokens = await self._follow(_stream(self.client, planned, key), None)
            except InflightError as error:
                if error.reason != Reason.TAKEN_OVER.value:
                    raise
                return False
            if num_tokens != planned.output_tokens:
                self._fail(f"{num_tokens} of {planned.output_tokens} tokens")
            return True

        answers = await asyncio.gather(*(call(rng.uniform(0, MAX_HEDGE_PAUSE_S)) for _ in range(2)))
        if not any(answers):
            self._fail("both calls of a request were told that the other one reads it")

    async def _follow(self, stream: AsyncStream, leave_after: int | None) -> int:
        num_tokens = 0
        async with aclosing(stream.events()) as events:
            async for event in events:
                num_tokens += getattr(event, "num_tokens", 0)
                if leave_after is not None and num_tokens >= leave_after:
                    break
        self.num_tokens += num_tokens
        return num_tokens

    def _fail(self, error: str) -> None:
        self.num_failed += 1
        if len(self.errors) < MAX_ERRORS_KEPT:
            self.errors.append(error)


def _stream(client: AsyncClient, planned: PlannedRequest, key: str | None = None) -> AsyncStream:
    options: dict[str, Any] = {} if key is None else {"idempotency_key": key}
    return client.generate(
        token_ids=planned.prompt_ids,
        max_tokens=planned.output_tokens,
        ignore_eos=True,
        temperature=0.0,
        **options,
    )
