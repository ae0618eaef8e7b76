"""History of a router for the dashboard's charts: fifteen minutes in samples of five seconds, a bounded ring.

Figures are kept as single-precision arrays in the order of the `*_FIELDS` below; NaN means unknown. Tenants beyond
`MAX_TENANTS` in a sample are summed up. Times are on the monotonic clock. Pure.
"""

from __future__ import annotations

import math
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

SAMPLE_S = 5
NUM_SAMPLES = 180
MAX_TENANTS = 12
# The executors with the most work are kept separately; totals include all.
MAX_EXECUTORS = 100
# The name of the sum over further tenants.
OTHERS = ""

# Counts cover the sample's interval; fields without a unit are the values at its end.
MODEL_FIELDS = (
    "waiting",
    "running",
    "seats",
    "kvUsed",
    "kvReserved",
    "kvTotal",
    "promptTokens",
    "cachedTokens",
    "outputTokens",
    "ttftP50Ms",
    "ttftP99Ms",
    "interTokenP50Ms",
    "interTokenP99Ms",
    "refused",
    "moved",
    "preemptions",
    "steps",
    "deviceMs",
    "hostMs",
)
EXECUTOR_FIELDS = ("running", "kvUsed", "kvReserved", "steps", "deviceMs", "hostMs")
TENANT_FIELDS = ("waiting", "running", "promptTokens", "outputTokens", "ended")

Row = array  # of "f"


def row_of(fields: Sequence[str], values: Mapping[str, float | None]) -> Row[float]:
    """Returns the figures in the fields' order; missing ones and None are unknown."""
    known = (values.get(name) for name in fields)
    return array("f", (math.nan if value is None else value for value in known))


@dataclass(frozen=True, slots=True)
class ModelSample:
    """One model. `finished` counts ends by reason; `tenants` has `OTHERS` if there are more than `MAX_TENANTS`."""

    figures: Row[float]
    finished: Mapping[str, int] = field(default_factory=dict)
    tenants: Mapping[str, Row[float]] = field(default_factory=dict)
    executors: Mapping[str, Row[float]] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Sample:
    """All models over `seconds` that ended at `at_s`. `number` counts samples from 1."""

    number: int
    at_s: float
    seconds: float
    models: Mapping[str, ModelSample]


class History:
    """The newest samples, oldest first."""

    def __init__(self, num_samples: int = NUM_SAMPLES) -> None:
        self._samples: deque[Sample] = deque(maxlen=num_samples)
        self._number = 0

    @property
    def newest(self) -> int:
        """The number of the newest sample; 0: none."""
        return self._number

    def add(self, at_s: float, seconds: float, models: Mapping[str, ModelSample]) -> None:
        """Adds a sample; drops the oldest at the limit."""
        self._number += 1
        bounded = {name: _bounded(model) for name, model in models.items()}
        self._samples.append(Sample(self._number, at_s, seconds, bounded))

    def since(self, number: int) -> list[Sample]:
        """Returns the samples after that number, oldest first."""
        return [sample for sample in self._samples if sample.number > number]


def _bounded(model: ModelSample) -> ModelSample:
    executors = model.executors
    if len(executors) > MAX_EXECUTORS:
        busiest = sorted(executors, key=lambda name: -_known(executors[name][0]))[:MAX_EXECUTORS]
        executors = {name: executors[name] for name in busiest}
    return ModelSample(model.figures, model.finished, with_others(model.tenants, MAX_TENANTS), executors)


def with_others(
    tenants: Mapping[str, Row[float]], most: int, is_named: Callable[[str], bool] = lambda tenant: True
) -> dict[str, Row[float]]:
    """Returns the tenants with the most tokens, then requests. Tenants that may not be named, and those beyond `most`,
    are summed up as `OTHERS`."""

    def use(tenant: str) -> tuple[float, float]:
        waiting, running, prompt, output, _ = (_known(value) for value in tenants[tenant])
        return prompt + output, waiting + running

    named = [tenant for tenant in tenants if tenant != OTHERS and is_named(tenant)]
    kept = sorted(named, key=use, reverse=True)[:most]
    others = [figures for tenant, figures in tenants.items() if tenant not in kept]
    found = {tenant: tenants[tenant] for tenant in sorted(kept)}
    if others:
        found[OTHERS] = array("f", (sum(_known(value) for value in column) for column in zip(*others, strict=True)))
    return found


def _known(value: float) -> float:
    return 0.0 if math.isnan(value) else value


def sample_as_json(
    sample: Sample, now_s: float, sees: Callable[[str], bool], names_tenant: Callable[[str], bool]
) -> dict[str, Any]:
    """Returns the part of a sample that its reader may see: its models, and the sum over other tenants."""
    models = {
        name: {
            "figures": _plain(model.figures),
            "finished": dict(model.finished),
            "tenants": {
                tenant: _plain(figures)
                for tenant, figures in with_others(model.tenants, MAX_TENANTS, names_tenant).items()
            },
            "executors": {name: _plain(figures) for name, figures in model.executors.items()},
        }
        for name, model in sample.models.items()
        if sees(name)
    }
    return {
        "number": sample.number,
        "ageMs": round((now_s - sample.at_s) * 1000),
        "seconds": round(sample.seconds, 3),
        "models": models,
    }


def _plain(figures: Iterable[float]) -> list[float | None]:
    """Rounds to four digits, more than a chart shows. NaN becomes null."""
    return [None if math.isnan(value) else _short(value) for value in figures]


def _short(value: float) -> float:
    return int(value) if value == int(value) else float(f"{value:.4g}")
