"""The shapes of traffic, one JSON file each; the README of this folder says what the fields mean."""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from inflight.bench.workloads.plan import WorkloadError

FOLDER = Path(__file__).parent
NAMES = ("mixed", "short", "long", "prefill", "chat")
RANGES = ("prompt_tokens", "output_tokens")


@dataclass(frozen=True, slots=True)
class Shape:
    """Ranges are inclusive, in tokens. `arrivals_per_s` None sends everything at once."""

    num_requests: int
    prompt_tokens: tuple[int, int]
    output_tokens: tuple[int, int]
    group_size: int = 1
    shared_prompt_tokens: int = 0
    arrivals_per_s: float | None = None
    description: str = ""


def read_shape(path: Path) -> Shape:
    """Reads a shape and refuses what would make no workload."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise WorkloadError(f"workload {path} cannot be read: {error.strerror}") from None
    except ValueError as error:
        raise WorkloadError(f"workload {path} is not JSON: {error}") from None
    if not isinstance(values, dict):
        raise WorkloadError(f"workload {path} is not one JSON object")
    known = {field.name for field in fields(Shape)}
    if unknown := sorted(values.keys() - known):
        raise WorkloadError(f"workload {path}: {unknown[0]!r} is not one of {', '.join(sorted(known))}")
    for name in ("num_requests", *RANGES):
        if name not in values:
            raise WorkloadError(f"workload {path}: {name} is missing")
    ranges = {name: _range(path, name, values[name]) for name in RANGES}
    for name in ("num_requests", "group_size"):
        _at_least(path, name, values.get(name, 1), 1)
    _at_least(path, "shared_prompt_tokens", values.get("shared_prompt_tokens", 0), 0)
    rate = values.get("arrivals_per_s")
    if rate is not None and not (isinstance(rate, int | float) and rate > 0):
        raise WorkloadError(f"workload {path}: arrivals_per_s must be above 0 or null, not {rate!r}")
    return Shape(**{**values, **ranges})


def _range(path: Path, name: str, value: Any) -> tuple[int, int]:
    match value:
        case [int(low), int(high)] if 1 <= low <= high:
            return low, high
        case _:
            raise WorkloadError(f"workload {path}: {name} must be [least, most], both at least 1, not {value!r}")


def _at_least(path: Path, name: str, value: Any, least: int) -> None:
    if not isinstance(value, int) or value < least:
        raise WorkloadError(f"workload {path}: {name} must be a whole number of at least {least}, not {value!r}")


SHAPES = {name: read_shape(FOLDER / f"{name}.json") for name in NAMES}
