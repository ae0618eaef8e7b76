"""A recorded trace as a workload: one JSON object per line and request. The README of this folder has the fields."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from inflight.bench.workloads.plan import PlannedRequest, WorkloadError

FIELDS = frozenset({"arrival_s", "prompt_ids", "prompt_tokens", "output_tokens"})


def read_trace(path: Path, make_ids: Callable[[int], tuple[int, ...]], scale: float) -> list[PlannedRequest]:
    """Returns the requests of a trace by arrival. `make_ids` makes so many ids where the trace has only their
    number."""
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise WorkloadError(f"trace {path} cannot be read: {error.strerror}") from None
    requests = [
        _request(f"trace {path}, line {number}", line, make_ids, scale)
        for number, line in enumerate(lines, start=1)
        if line.strip()
    ]
    if not requests:
        raise WorkloadError(f"trace {path} has no requests")
    return sorted(requests, key=lambda request: request.arrival_s)


def _request(where: str, line: str, make_ids: Callable[[int], tuple[int, ...]], scale: float) -> PlannedRequest:
    try:
        values = json.loads(line)
    except ValueError as error:
        raise WorkloadError(f"{where} is not JSON: {error}") from None
    if not isinstance(values, dict) or (values.keys() - FIELDS):
        raise WorkloadError(f"{where} must be an object of {', '.join(sorted(FIELDS))}")
    arrival_s = values.get("arrival_s", 0.0)
    if not isinstance(arrival_s, int | float) or not 0 <= arrival_s < float("inf"):
        raise WorkloadError(f"{where}: arrival_s must be a time in seconds, not {arrival_s!r}")
    output_tokens = max(1, round(_count(where, "output_tokens", values.get("output_tokens")) * scale))
    return PlannedRequest(_prompt(where, values, make_ids, scale), output_tokens, float(arrival_s))


def _prompt(
    where: str, values: dict[str, Any], make_ids: Callable[[int], tuple[int, ...]], scale: float
) -> tuple[int, ...]:
    """Returns the recorded ids, cut to scale, or as many new ones as were recorded."""
    ids = values.get("prompt_ids")
    if ids is None:
        return make_ids(max(1, round(_count(where, "prompt_tokens", values.get("prompt_tokens")) * scale)))
    if not isinstance(ids, list) or not ids or not all(isinstance(one, int) and one >= 0 for one in ids):
        raise WorkloadError(f"{where}: prompt_ids must be a list of token ids")
    return tuple(ids[: max(1, round(len(ids) * scale))])


def _count(where: str, name: str, value: Any) -> int:
    if not isinstance(value, int) or value < 1:
        raise WorkloadError(f"{where}: {name} must be a whole number of at least 1, not {value!r}")
    return value
