"""Measures of one run of a workload, from the times at which tokens reached the client and an engine's totals. Pure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Slo:
    """What a request must keep to count as goodput: time to first token, and mean time between its tokens."""

    ttft_ms: float | None = None
    inter_token_ms: float | None = None

    @property
    def is_set(self) -> bool:
        """Whether there is an objective."""
        return self.ttft_ms is not None or self.inter_token_ms is not None


NO_SLO = Slo()


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
    """One run in figures. None is what could not be measured.

    Tokens/s of a user are those of its stream after the first token, in the mean over all tokens.
    """

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
    slo_fraction: float | None = None
    goodput_requests_per_min: float | None = None
    tokens_per_s_per_user: float | None = None


@dataclass(frozen=True, slots=True)
class Run:
    """One run of one mode: what came out and the time line of the seats.

    `cores` is the processor time of each part over the run's time; `figures` is what the engine says of itself.
    """

    mode: str
    round: int
    measures: Measures
    samples: tuple[SeatSample, ...]
    errors: tuple[str, ...]
    cores: Mapping[str, float] = field(default_factory=dict)
    figures: Mapping[str, float] = field(default_factory=dict)


def percentile(values: Sequence[float], fraction: float) -> float | None:
    """Returns the smallest of the values that at least this fraction of them do not exceed (nearest rank)."""
    if not values:
        return None
    rank = math.ceil(fraction * len(values))
    return sorted(values)[max(rank, 1) - 1]


def measure(
    outcomes: Sequence[Outcome], samples: Sequence[SeatSample], num_steps: int | None, slo: Slo = NO_SLO
) -> Measures:
    """Returns the figures of a run. `num_steps` are the executors' steps during it."""
    good = [outcome for outcome in outcomes if outcome.error is None]
    kept = [outcome for outcome in good if keeps(outcome, slo)] if slo.is_set else None
    total_s = max((outcome.ended_s for outcome in outcomes), default=0.0) - min(
        (outcome.sent_s for outcome in outcomes), default=0.0
    )
    tokens = sum(outcome.output_tokens for outcome in outcomes)
    waits_ms, gaps_ms = ttfts_ms(good), inter_token_ms(good)
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
        slo_fraction=len(kept) / len(outcomes) if kept is not None and outcomes else None,
        goodput_requests_per_min=60 * len(kept) / total_s if kept is not None and total_s else None,
        tokens_per_s_per_user=1e3 * len(gaps_ms) / sum(gaps_ms) if sum(gaps_ms) else None,
    )


def keeps(outcome: Outcome, slo: Slo) -> bool:
    """Returns whether a request kept the objectives; one that never began kept none."""
    if outcome.first_token_s is None:
        return False
    ttft_ms = (outcome.first_token_s - outcome.sent_s) * 1e3
    mean_gap_ms = sum(outcome.gaps_ms) / len(outcome.gaps_ms) if outcome.gaps_ms else 0.0
    return (slo.ttft_ms is None or ttft_ms <= slo.ttft_ms) and (
        slo.inter_token_ms is None or mean_gap_ms <= slo.inter_token_ms
    )


def ttfts_ms(outcomes: Sequence[Outcome]) -> list[float]:
    """Times from sending to the first token."""
    return [(o.first_token_s - o.sent_s) * 1e3 for o in outcomes if o.first_token_s is not None]


def inter_token_ms(outcomes: Sequence[Outcome]) -> list[float]:
    """Times between consecutive tokens of one request."""
    return [gap for outcome in outcomes for gap in outcome.gaps_ms]


def cost_per_million(price_per_hour: float, output_tokens_per_s: float) -> float | None:
    """What a million output tokens cost on a machine of this price; None if none came."""
    return price_per_hour / (output_tokens_per_s * 3600) * 1e6 if output_tokens_per_s else None


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


class TokenTimes:
    """Arrival times of one request's tokens. Tokens that arrive together count as arriving at equal distances."""

    def __init__(self, sent_s: float) -> None:
        self._sent_s = sent_s
        self._first_s: float | None = None
        self._last_s = sent_s
        self._gaps_ms: list[float] = []
        self.num_tokens = 0

    @property
    def first_s(self) -> float | None:
        """When the first token came."""
        return self._first_s

    @property
    def last_s(self) -> float:
        """When the newest token came; before the first one, when the request was sent."""
        return self._last_s

    def take(self, now_s: float, number: int) -> None:
        """Notes `number` tokens that arrive now."""
        if number == 0:
            return
        if self._first_s is None:
            self._first_s = now_s
            self._gaps_ms += [0.0] * (number - 1)
        else:
            self._gaps_ms += [(now_s - self._last_s) * 1e3 / number] * number
        self._last_s = now_s
        self.num_tokens += number

    def outcome(self, ended_s: float, error: str | None = None) -> Outcome:
        return Outcome(self._sent_s, self._first_s, ended_s, self.num_tokens, tuple(self._gaps_ms), error)


@dataclass(frozen=True, slots=True)
class DeviceTimes:
    """Totals since an engine's start; None if it does not measure them. `elapsed_s` is time with work to do."""

    num_steps: int = 0
    busy_s: float | None = None
    elapsed_s: float | None = None


def added_up(times: Sequence[DeviceTimes]) -> DeviceTimes:
    """Returns the totals of several engines."""
    busy_s = [one.busy_s for one in times if one.busy_s is not None]
    elapsed_s = [one.elapsed_s for one in times if one.elapsed_s is not None]
    complete = bool(times) and len(busy_s) == len(elapsed_s) == len(times)
    return DeviceTimes(
        sum(one.num_steps for one in times), sum(busy_s) if complete else None, sum(elapsed_s) if complete else None
    )


def device_figures(before: DeviceTimes, after: DeviceTimes) -> dict[str, float]:
    """Returns the device's share of the time, and how long it waited for the host at each step; nothing where not
    measured."""
    if before.busy_s is None or before.elapsed_s is None or after.busy_s is None or after.elapsed_s is None:
        return {}
    num_steps, elapsed_s = after.num_steps - before.num_steps, after.elapsed_s - before.elapsed_s
    if num_steps <= 0 or elapsed_s <= 0:
        return {}
    busy_s = after.busy_s - before.busy_s
    return {
        "device_busy_fraction": round(busy_s / elapsed_s, 4),
        "exposed_host_ms": round(1e3 * (elapsed_s - busy_s) / num_steps, 4),
    }
