"""A recorded trace as a workload: one JSON object per line and request. The README of this folder has the fields."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveInt, model_validator

from inflight.bench.workloads.plan import PlannedRequest, WorkloadError, parsed, text_of


class _Line(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)

    output_tokens: PositiveInt
    arrival_s: Annotated[float, Field(ge=0, allow_inf_nan=False)] = 0.0
    prompt_ids: Annotated[tuple[NonNegativeInt, ...], Field(min_length=1)] | None = None
    prompt_tokens: PositiveInt | None = None

    @model_validator(mode="after")
    def _has_prompt(self) -> _Line:
        if self.prompt_ids is None and self.prompt_tokens is None:
            raise ValueError("prompt_ids or prompt_tokens is missing")
        return self


def read_trace(path: Path, make_ids: Callable[[int], tuple[int, ...]], scale: float) -> list[PlannedRequest]:
    """Returns the requests of a trace by arrival. `make_ids` makes so many ids where the trace has only their
    number."""
    requests = [
        _request(parsed(_Line, line, f"trace {path}, line {number}"), make_ids, scale)
        for number, line in enumerate(text_of(path).splitlines(), start=1)
        if line.strip()
    ]
    if not requests:
        raise WorkloadError(f"trace {path} has no requests")
    return sorted(requests, key=lambda request: request.arrival_s)


def _request(line: _Line, make_ids: Callable[[int], tuple[int, ...]], scale: float) -> PlannedRequest:
    """Returns the recorded ids, cut to scale, or as many new ones as were recorded."""
    num_prompt_tokens = max(1, round((len(line.prompt_ids or ()) or line.prompt_tokens or 0) * scale))
    ids = make_ids(num_prompt_tokens) if line.prompt_ids is None else line.prompt_ids[:num_prompt_tokens]
    return PlannedRequest(ids, max(1, round(line.output_tokens * scale)), line.arrival_s)
