"""The requests of a workload, ready to send. Plain values."""

from __future__ import annotations

from dataclasses import dataclass

# Most tokens of the request that holds an executor until a workload has arrived; it is cancelled long before.
GATE_TOKENS = 256


class WorkloadError(ValueError):
    """A workload that is not there or not whole. The text is for the user."""


@dataclass(frozen=True, slots=True)
class PlannedRequest:
    """One request: what is sent, when after the start, and how many tokens come back."""

    prompt_ids: tuple[int, ...]
    output_tokens: int
    arrival_s: float


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests in order of arrival. With `concurrency`, a request is sent when fewer than that many are under way."""

    name: str
    requests: tuple[PlannedRequest, ...]
    concurrency: int | None = None

    @property
    def output_tokens(self) -> int:
        return sum(request.output_tokens for request in self.requests)

    @property
    def arrives_at_once(self) -> bool:
        """Whether every request is sent at the start."""
        return self.concurrency is None and all(request.arrival_s == 0 for request in self.requests)

    @property
    def max_request_tokens(self) -> int:
        """Prompt and output tokens of the longest request."""
        return max(len(request.prompt_ids) + request.output_tokens for request in self.requests)

    @property
    def prompt_tokens(self) -> int:
        return sum(len(request.prompt_ids) for request in self.requests)
