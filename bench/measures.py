"""What a run of a workload measured, from the times at which things reached the client. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Outcome:
    """How one request went. Times are seconds since the run's start; `gaps_ms` lie between consecutive tokens.

    A delta of several tokens counts as that many tokens at equal distances.
    """

    sent_s: float
    first_token_s: float | None
    ended_s: float
    output_tokens: int
    gaps_ms: tuple[float, ...]
    error: str | None = None


@dataclass(frozen=True, slots=True)
class SeatSample:
    """What the executors held at one moment, added up."""

    at_s: float
    num_executors: int
    seats_total: int
    seats_used: int
    num_queued: int
    blocks_used: int
    num_steps: int


@dataclass(frozen=True, slots=True)
class Measures:
    """One run in figures. None is what could not be measured."""

    num_requests: int
    num_failed: int
    total_s: float
    requests_per_min: float
    output_tokens: int
    output_tokens_per_s: float
    ttft_p50_ms: float | None
    ttft_p99_ms: float | None
    inter_token_p50_ms: float | None
    inter_token_p99_ms: float | None
    tokens_per_step: float | None
    mean_seats: float | None


@dataclass(frozen=True, slots=True)
class Run:
    """One run of one mode: what came out and the time line of the seats."""

    mode: str
    round: int
    measures: Measures
    samples: tuple[SeatSample, ...]
    errors: tuple[str, ...]


def percentile(values: Sequence[float], fraction: float) -> float | None:
    """The smallest of the values that at least this fraction of them do not exceed (nearest rank)."""
    if not values:
        return None
    rank = math.ceil(fraction * len(values))
    return sorted(values)[max(rank, 1) - 1]


def measure(outcomes: Sequence[Outcome], samples: Sequence[SeatSample], num_steps: int | None) -> Measures:
    """The figures of a run. `num_steps` are the executors' steps during it."""
    good = [outcome for outcome in outcomes if outcome.error is None]
    total_s = max((outcome.ended_s for outcome in outcomes), default=0.0) - min(
        (outcome.sent_s for outcome in outcomes), default=0.0
    )
    tokens = sum(outcome.output_tokens for outcome in outcomes)
    waits_ms = [(o.first_token_s - o.sent_s) * 1e3 for o in good if o.first_token_s is not None]
    gaps_ms = [gap for outcome in good for gap in outcome.gaps_ms]
    return Measures(
        num_requests=len(outcomes),
        num_failed=len(outcomes) - len(good),
        total_s=total_s,
        requests_per_min=60 * len(good) / total_s if total_s else 0.0,
        output_tokens=tokens,
        output_tokens_per_s=tokens / total_s if total_s else 0.0,
        ttft_p50_ms=percentile(waits_ms, 0.5),
        ttft_p99_ms=percentile(waits_ms, 0.99),
        inter_token_p50_ms=percentile(gaps_ms, 0.5),
        inter_token_p99_ms=percentile(gaps_ms, 0.99),
        tokens_per_step=tokens / num_steps if num_steps else None,
        mean_seats=mean_seats(samples, total_s),
    )


def mean_seats(samples: Sequence[SeatSample], until_s: float) -> float | None:
    """Seats in use, averaged over time; each sample holds until the next one."""
    within = [sample for sample in samples if sample.at_s < until_s]
    if not within:
        return None
    ends = [*(sample.at_s for sample in within[1:]), until_s]
    held = sum(sample.seats_used * (end - sample.at_s) for sample, end in zip(within, ends, strict=True))
    return held / (until_s - within[0].at_s)


def ratio(runs: Sequence[Run], mode: str, baseline: str) -> float | None:
    """How many times the output tokens/s of `baseline` a mode gives: the median over the rounds, each in itself."""
    speeds = {(run.mode, run.round): run.measures.output_tokens_per_s for run in runs}
    rounds = sorted({run.round for run in runs})
    pairs = [(speeds.get((mode, number)), speeds.get((baseline, number))) for number in rounds]
    ratios = [ours / theirs for ours, theirs in pairs if ours and theirs]
    return statistics.median(ratios) if ratios else None
