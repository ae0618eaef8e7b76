"""Runs of one or several workloads side by side, and what follows from them: medians, ratios, the cost of the stack.

Pure.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from typing import Any

from inflight.bench.measures.run import NO_SLO, Measures, Run, SeatSample, Slo, cost_per_million, ratio
from inflight.bench.report.table import spread_of
from inflight.bench.workloads.plan import Workload

STACK_MODE = "inflight"
BARE_MODE = "engine"


def is_own(mode: str) -> bool:
    """Returns whether a mode is in-flight batching of inflight, with any flags."""
    return mode.partition("-")[0] in (STACK_MODE, BARE_MODE)


@dataclass(frozen=True, slots=True)
class Section:
    """Runs of one workload, by round. `last_arrival_s` is when its last request was sent."""

    workload: str
    num_requests: int
    prompt_tokens: int
    output_tokens: int
    concurrency: int | None
    last_arrival_s: float
    runs: tuple[Run, ...]

    @property
    def modes(self) -> tuple[str, ...]:
        """The modes, in the order of their first run."""
        return tuple(dict.fromkeys(run.mode for run in self.runs))

    @property
    def subject(self) -> str | None:
        """The mode that the others are compared with: ours through the whole stack, ours alone, or the first."""
        return next((mode for mode in (STACK_MODE, BARE_MODE) if mode in self.modes), next(iter(self.modes), None))

    @property
    def title(self) -> str:
        """The workload, with the number of requests under way where it is bounded."""
        return self.workload if self.concurrency is None else f"{self.workload}, {self.concurrency} under way"

    def own_against_peers(self) -> list[tuple[str, str]]:
        """Returns every mode of inflight with every peer."""
        return [(ours, other) for ours in self.modes if is_own(ours) for other in self.modes if not is_own(other)]

    def of(self, mode: str) -> tuple[Run, ...]:
        return tuple(run for run in self.runs if run.mode == mode)

    def ratios(self) -> dict[str, float]:
        """How many times the tokens/s of each other mode the subject gives."""
        if self.subject is None:
            return {}
        pairs = ((mode, ratio(self.runs, self.subject, mode)) for mode in self.modes if mode != self.subject)
        return {mode: value for mode, value in pairs if value is not None}

    def all_tokens_per_s(self, measures: Measures) -> float | None:
        """Prompt and output tokens per second; None if not all of them were computed."""
        if measures.num_failed or not measures.total_s:
            return None
        return (self.prompt_tokens + measures.output_tokens) / measures.total_s


@dataclass(frozen=True, slots=True)
class StackCost:
    """The whole stack against its engine alone: medians of the differences within each round."""

    speed_ratio: float
    added_ttft_ms: float | None
    added_inter_token_ms: float | None


@dataclass(frozen=True, slots=True)
class Report:
    """A section for each workload, and the circumstances (`machine`, `model`, … in words)."""

    circumstances: Mapping[str, str]
    workloads: tuple[Section, ...]
    price_per_hour: float | None = None
    slo: Slo = NO_SLO

    @property
    def title(self) -> str:
        names = list(dict.fromkeys(f"*{section.workload}*" for section in self.workloads))
        return f"Workload {names[0]}" if len(names) == 1 else f"Workloads {', '.join(names)}"

    def cost(self, measures: Measures) -> float | None:
        """Returns the cost of a million output tokens at the machine's price."""
        if self.price_per_hour is None:
            return None
        return cost_per_million(self.price_per_hour, measures.output_tokens_per_s)


def section_of(workload: Workload, runs: Sequence[Run]) -> Section:
    return Section(
        workload.name,
        len(workload.requests),
        workload.prompt_tokens,
        workload.output_tokens,
        workload.concurrency,
        max((request.arrival_s for request in workload.requests), default=0.0),
        tuple(runs),
    )


def stack_cost(section: Section, mode: str = STACK_MODE) -> StackCost | None:
    """Returns what a stack costs over its engine, where both were measured in the same rounds."""
    bare = engine_of(section, mode)
    speed = ratio(section.runs, mode, bare)
    if speed is None:
        return None
    return StackCost(
        speed,
        _added(section, mode, bare, lambda measures: measures.ttft_p50_ms),
        _added(section, mode, bare, lambda measures: measures.inter_token_p50_ms),
    )


def engine_of(section: Section, mode: str) -> str:
    """Returns the engine with the flags of a stack. Its requests may differ, as in the tokens of an event."""
    same = mode.replace(STACK_MODE, BARE_MODE, 1).partition("-interval-")[0]
    return same if same in section.modes else BARE_MODE


def values_of_run(run: Run) -> dict[str, Any]:
    """Returns a run as plain values, its samples as columns, which are much smaller than objects."""
    return asdict(run) | {"samples": _columns(run.samples)}


def _added(section: Section, mode: str, bare_mode: str, figure: Callable[[Measures], float | None]) -> float | None:
    by_round = {name: {run.round: figure(run.measures) for run in section.of(name)} for name in (mode, bare_mode)}
    pairs = [(ours, by_round[bare_mode].get(number)) for number, ours in by_round[mode].items()]
    added = spread_of(ours - bare for ours, bare in pairs if ours is not None and bare is not None)
    return None if added is None else added.median


def _columns(samples: Sequence[SeatSample]) -> dict[str, float | list[float]]:
    """Returns a list for each field, or one number where it never changes."""
    columns = {
        field.name: [round(getattr(sample, field.name), 3) for sample in samples] for field in fields(SeatSample)
    }
    return {name: values[0] if len(set(values)) == 1 else values for name, values in columns.items()}
