"""A whole system as a target: requests go through the client API to the router, and tokens come back the same way."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace

from inflight import AsyncClient
from inflight.bench.measures.run import Run, Slo
from inflight.bench.targets.load import run_workload
from inflight.bench.targets.target import OnTokens, TargetError
from inflight.bench.workloads.plan import Workload
from inflight.cli.call_errors import in_words
from inflight.errors import InflightError
from inflight.local.stack import LocalStack

RESUME_TIMEOUT_S = 120.0
RESUME_INTERVAL_S = 0.1


@dataclass(frozen=True, slots=True)
class StackTarget:
    """A router that runs; `sessions` are the process sessions behind it, where they are ours.

    The process groups in `paused` are stopped between runs: an idle vLLM waits with a part of a core."""

    mode: str
    address: str
    client: AsyncClient
    slo: Slo
    sessions: Mapping[str, int]
    words: dict[str, str]
    stream_interval: int = 1
    paused: tuple[int, ...] = ()

    def at_intervals(self, intervals: Sequence[int]) -> list[StackTarget]:
        """Returns the same stack once for each number of tokens in an event."""
        return [
            replace(self, mode=self.mode if number == 1 else f"{self.mode}-interval-{number}", stream_interval=number)
            for number in intervals
        ]

    async def run(self, workload: Workload, round_number: int, on_tokens: OnTokens) -> Run:
        """Runs a workload to its end."""
        try:
            async with self.working():
                return await run_workload(
                    self.client,
                    workload,
                    mode=self.mode,
                    round_number=round_number,
                    slo=self.slo,
                    sessions=self.sessions,
                    on_tokens=on_tokens,
                    stream_interval=self.stream_interval,
                )
        except InflightError as error:
            raise TargetError(in_words(error, self.address)) from None

    @asynccontextmanager
    async def working(self) -> AsyncIterator[None]:
        """Lets the executors in `paused` work within."""
        try:
            await self._resume()
            yield
        finally:
            self.signal(signal.SIGSTOP)

    def signal(self, number: signal.Signals) -> None:
        """To the executors that are stopped between runs."""
        for group in self.paused:
            with suppress(ProcessLookupError):
                os.killpg(group, number)

    async def _resume(self) -> None:
        """Returns when the executors that were stopped take work again."""
        if not self.paused:
            return
        self.signal(signal.SIGCONT)
        async with asyncio.timeout(RESUME_TIMEOUT_S):
            while True:
                executors = (await self.client.capacity()).executors
                if sum(one.accepting for one in executors) == len(self.paused):
                    return
                await asyncio.sleep(RESUME_INTERVAL_S)  # the API has no watch


def sessions_of(stack: LocalStack) -> dict[str, int]:
    """Returns the sessions of a local stack's processes, each of which has one of its own."""
    return {child.name: os.getsid(child.pid) for child in [*stack.routers, *stack.executors]}
