"""Latencies and rates of each model on this router over the last minute: a `RequestObserver`.

Times are counted in buckets of 2 % width, per second, so that the memory of a minute does not depend on the load.
"""

from __future__ import annotations

import math
import time
from collections import Counter, deque
from collections.abc import Callable, Iterable, Mapping

from inflight.common.errors import Reason
from inflight.router.telemetry.events import RequestEnd, RequestFacts, RequestRecorder
from inflight.v1 import inference_pb2

MINUTE_S = 60
RATE_S = 10
_LOG_WIDTH = math.log(1.02)
_LEAST_MS = 0.01


class RollingCount:
    """A count over a sliding window."""

    def __init__(self, window_s: int) -> None:
        self._window_s = window_s
        self._seconds: deque[tuple[int, int]] = deque()
        self._total = 0

    def add(self, now_s: float, count: int = 1) -> None:
        second = int(now_s)
        if self._seconds and self._seconds[-1][0] == second:
            self._seconds[-1] = (second, self._seconds[-1][1] + count)
        else:
            self._seconds.append((second, count))
        self._total += count
        self._forget(second)

    def total(self, now_s: float) -> int:
        """Returns the count within the window."""
        self._forget(int(now_s))
        return self._total

    def _forget(self, second: int) -> None:
        while self._seconds and self._seconds[0][0] <= second - self._window_s:
            self._total -= self._seconds.popleft()[1]


class RollingTimes:
    """Durations in milliseconds within the last minute."""

    def __init__(self) -> None:
        self._seconds: deque[tuple[int, Counter[int]]] = deque()

    def add(self, now_s: float, ms: float) -> None:
        """Adds a duration."""
        second = int(now_s)
        if not self._seconds or self._seconds[-1][0] != second:
            self._seconds.append((second, Counter()))
            self._forget(second)
        self._seconds[-1][1][round(math.log(max(ms, _LEAST_MS)) / _LOG_WIDTH)] += 1

    def percentiles(self, now_s: float, fractions: Iterable[float], within_s: int = MINUTE_S) -> list[float] | None:
        """Returns the quantile of each fraction, exact to 1 %; None without values. `within_s`: over the last so many
        seconds, at most a minute."""
        self._forget(int(now_s))
        counts: Counter[int] = Counter()
        for second, counted in self._seconds:
            if second > int(now_s) - within_s:
                counts.update(counted)
        if not counts:
            return None
        ordered = sorted(counts.items())
        return [_percentile(ordered, math.ceil(counts.total() * fraction)) for fraction in fractions]

    def _forget(self, second: int) -> None:
        while self._seconds and self._seconds[0][0] <= second - MINUTE_S:
            self._seconds.popleft()


def _percentile(ordered: list[tuple[int, int]], rank: int) -> float:
    for number, count in ordered:
        rank -= count
        if rank <= 0:
            return math.exp(number * _LOG_WIDTH)
    raise AssertionError("there are fewer than that")


class ModelLatencies(RequestRecorder):
    """One model, and the recorder of all its requests."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._ended = RollingCount(MINUTE_S)
        self._refused = RollingCount(MINUTE_S)
        self._tokens = RollingCount(RATE_S)
        self._first_token_ms = RollingTimes()
        self._inter_token_ms = RollingTimes()

    def refused(self) -> None:
        """A request was refused."""
        self._refused.add(self._clock())

    def first_sent(self, after_s: float) -> None:
        self._first_token_ms.add(self._clock(), after_s * 1000)

    def sent(self, num_tokens: int, interval_s: float | None) -> None:
        now_s = self._clock()
        self._tokens.add(now_s, num_tokens)
        if interval_s is not None:
            self._inter_token_ms.add(now_s, interval_s * 1000 / num_tokens)

    def ended(self, end: RequestEnd) -> None:
        self._ended.add(self._clock())

    def recent(self, within_s: int) -> tuple[list[float] | None, list[float] | None]:
        """Returns the median and 99th percentile of TTFT and inter-token latency, milliseconds, over the last so many
        seconds; None without values."""
        now_s = self._clock()
        fractions = (0.5, 0.99)
        return (
            self._first_token_ms.percentiles(now_s, fractions, within_s),
            self._inter_token_ms.percentiles(now_s, fractions, within_s),
        )

    def to_proto(self, model: str) -> inference_pb2.ModelLatency:
        """Returns the current figures."""
        now_s = self._clock()
        latency = inference_pb2.ModelLatency(
            model=model,
            num_ended=self._ended.total(now_s),
            num_refused=self._refused.total(now_s),
            output_tokens_per_s=self._tokens.total(now_s) / RATE_S,
        )
        if first := self._first_token_ms.percentiles(now_s, (0.5, 0.99)):
            latency.ttft_p50_ms, latency.ttft_p99_ms = first
        if between := self._inter_token_ms.percentiles(now_s, (0.5, 0.99)):
            latency.inter_token_p50_ms, latency.inter_token_p99_ms = between
        return latency


class Latencies:
    """The latencies of all models of a router. Implements `RequestObserver`."""

    def __init__(self, models: Iterable[str], clock: Callable[[], float] = time.monotonic) -> None:
        self.by_model: Mapping[str, ModelLatencies] = {model: ModelLatencies(clock) for model in models}

    def follow(self, facts: RequestFacts) -> ModelLatencies:
        return self.by_model[facts.model]

    def refused(self, model: str, priority_class: str, reason: Reason) -> None:
        if model in self.by_model:
            self.by_model[model].refused()
