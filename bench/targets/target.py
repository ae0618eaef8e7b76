"""The targets of a benchmark: a whole stack through its client API, or an engine behind its driver."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from inflight.bench.measures.run import Run
from inflight.bench.workloads.plan import Workload

# Called with the number of tokens that came.
OnTokens = Callable[[int], None]


class TargetError(Exception):
    """A target that cannot be started, or that ended in the middle. The text is for the user."""


class Target(Protocol):
    """One thing to measure. Only one works at a time; the others wait without using the processor."""

    @property
    def mode(self) -> str:
        """The name in the report."""
        ...

    @property
    def words(self) -> dict[str, str]:
        """The description for the report."""
        ...

    async def run(self, workload: Workload, round_number: int, on_tokens: OnTokens) -> Run:
        """Runs a workload to its end.

        Raises:
            TargetError: it ended or went silent; what it did so far is lost.
        """
        ...
