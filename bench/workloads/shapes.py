"""The shapes of traffic, one JSON file each; the README of this folder says what the fields mean."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict, NonNegativeInt, PositiveFloat, PositiveInt

from inflight.bench.workloads.plan import parsed, text_of

FOLDER = Path(__file__).parent
NAMES = ("mixed", "short", "long", "prefill", "chat")


def _ascending(bounds: tuple[int, int]) -> tuple[int, int]:
    if bounds[0] > bounds[1]:
        raise ValueError("the first number must not be above the second")
    return bounds


Range = Annotated[tuple[PositiveInt, PositiveInt], AfterValidator(_ascending)]
"""Inclusive, in tokens."""


class Shape(BaseModel):
    """A shape. `arrivals_per_s` None sends everything at once."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    num_requests: PositiveInt
    prompt_tokens: Range
    output_tokens: Range
    group_size: PositiveInt = 1
    shared_prompt_tokens: NonNegativeInt = 0
    arrivals_per_s: PositiveFloat | None = None
    description: str = ""


def read_shape(path: Path) -> Shape:
    """Reads a shape. Raises `WorkloadError` if it is none."""
    return parsed(Shape, text_of(path), f"workload {path}")


SHAPES = {name: read_shape(FOLDER / f"{name}.json") for name in NAMES}
