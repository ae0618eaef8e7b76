"""A whole system as a target: requests go through the client API to the router, and tokens come back the same way."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from inflight import AsyncClient
from inflight.bench.measures.run import Run, Slo
from inflight.bench.targets.load import run_workload
from inflight.bench.targets.target import OnTokens, TargetError
from inflight.bench.workloads.plan import Workload
from inflight.cli.call_errors import in_words
from inflight.errors import InflightError
from inflight.local.stack import LocalStack


@dataclass(frozen=True, slots=True)
class StackTarget:
    """A router that runs; `sessions` are the process sessions behind it, where they are ours."""

    mode: str
    address: str
    client: AsyncClient
    slo: Slo
    sessions: Mapping[str, int]
    words: dict[str, str]
    stream_interval: int = 1

    def at_intervals(self, intervals: Sequence[int]) -> list[StackTarget]:
        """Returns the same stack once for each number of tokens in an event."""
        return [
            replace(self, mode=self.mode if number == 1 else f"{self.mode}-interval-{number}", stream_interval=number)
            for number in intervals
        ]

    async def run(self, workload: Workload, round_number: int, on_tokens: OnTokens) -> Run:
        """Runs a workload to its end."""
        try:
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


def sessions_of(stack: LocalStack) -> dict[str, int]:
    """Returns the sessions of a local stack's processes, each of which has one of its own."""
    return {child.name: os.getsid(child.pid) for child in [*stack.routers, *stack.executors]}
