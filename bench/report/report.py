"""What a benchmark found and what follows: medians, ranges, ratios, the stack's cost. Pure; measures nothing."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from bench.measures import NO_SLO, Measures, Run, Slo, cost_per_million, ratio
from bench.workloads.plan import Workload

STACK_MODE = "inflight"
BARE_MODE = "engine"


@dataclass(frozen=True, slots=True)
class Spread:
    """A figure over the rounds."""

    median: float
    least: float
    most: float


@dataclass(frozen=True, slots=True)
class Section:
    """Runs of one workload, by round."""

    workload: Workload
    runs: tuple[Run, ...]

    @property
    def modes(self) -> tuple[str, ...]:
        """The modes, in the order of their first run."""
        return tuple(dict.fromkeys(run.mode for run in self.runs))

    @property
    def subject(self) -> str | None:
        """The mode that the others are compared with: ours through the whole stack, ours alone, or the first."""
        return next((mode for mode in (STACK_MODE, BARE_MODE) if mode in self.modes), next(iter(self.modes), None))

    def of(self, mode: str) -> tuple[Run, ...]:
        """The runs of a mode."""
        return tuple(run for run in self.runs if run.mode == mode)

    def spread(self, mode: str, figure: Callable[[Measures], float | None]) -> Spread | None:
        """A figure of a mode over its rounds; None where no round has it."""
        return spread_of([figure(run.measures) for run in self.of(mode)])

    def ratios(self) -> dict[str, float]:
        """How many times the tokens/s of each other mode the subject gives."""
        if self.subject is None:
            return {}
        pairs = ((mode, ratio(self.runs, self.subject, mode)) for mode in self.modes if mode != self.subject)
        return {mode: value for mode, value in pairs if value is not None}

    def all_tokens_per_s(self, measures: Measures) -> float | None:
        """Prompt and output tokens per second; None where not all of them were computed."""
        if measures.num_failed or not measures.total_s:
            return None
        return (self.workload.prompt_tokens + measures.output_tokens) / measures.total_s


@dataclass(frozen=True, slots=True)
class StackCost:
    """The whole stack against its engine alone: medians of the rounds' own differences."""

    speed_ratio: float
    added_ttft_ms: float | None
    added_inter_token_ms: float | None


@dataclass(frozen=True, slots=True)
class Report:
    """A section for each workload, and the circumstances (`machine`, `model`, … in words)."""

    circumstances: Mapping[str, str]
    sections: tuple[Section, ...]
    price_per_hour: float | None = None
    slo: Slo = NO_SLO

    @property
    def title(self) -> str:
        """What was measured."""
        names = [f"*{section.workload.name}*" for section in self.sections]
        return f"Workload {names[0]}" if len(names) == 1 else f"Workloads {', '.join(names)}"

    def cost(self, measures: Measures) -> float | None:
        """A million output tokens at the machine's price."""
        if self.price_per_hour is None:
            return None
        return cost_per_million(self.price_per_hour, measures.output_tokens_per_s)


def spread_of(values: Sequence[float | None]) -> Spread | None:
    """Median, least and most of the values that are known."""
    known = [value for value in values if value is not None]
    return Spread(statistics.median(known), min(known), max(known)) if known else None


def stack_cost(section: Section) -> StackCost | None:
    """What the stack costs, where both were measured in the same rounds."""
    speed = ratio(section.runs, STACK_MODE, BARE_MODE)
    if speed is None:
        return None
    return StackCost(
        speed,
        _added(section, lambda measures: measures.ttft_p50_ms),
        _added(section, lambda measures: measures.inter_token_p50_ms),
    )


def _added(section: Section, figure: Callable[[Measures], float | None]) -> float | None:
    by_round = {mode: {run.round: figure(run.measures) for run in section.of(mode)} for mode in (STACK_MODE, BARE_MODE)}
    pairs = [(ours, by_round[BARE_MODE].get(number)) for number, ours in by_round[STACK_MODE].items()]
    added = [ours - bare for ours, bare in pairs if ours is not None and bare is not None]
    return statistics.median(added) if added else None
