"""The requests of a workload, ready to send. Plain values."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ValidationError

# Most tokens of the request that holds an executor until a workload has arrived; it is cancelled long before.
GATE_TOKENS = 256


class WorkloadError(ValueError):
    """A workload that is not there or not whole. The text is for the user."""


Model = TypeVar("Model", bound=BaseModel)


def text_of(path: Path) -> str:
    """Reads a file of the user."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise WorkloadError(f"{path} cannot be read: {error.strerror}") from None


def parsed(kind: type[Model], text: str, where: str) -> Model:
    """Returns what a JSON text describes. Raises `WorkloadError` with the place and the first thing that is wrong."""
    try:
        return kind.model_validate_json(text)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise WorkloadError(f"{where}: {place}{': ' if place else ''}{first['msg']}") from None


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
