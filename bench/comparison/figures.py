"""The figures that a comparison shows, with their order and number of digits."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from inflight.bench.comparison.report import Report, Section
from inflight.bench.measures.processes import THIS_BENCH
from inflight.bench.measures.run import Measures, Run
from inflight.bench.report.table import Spread, shown, shown_spread, spread_of

# What the terminal shows of them, and under which names; everything is in the report's files.
SPEED = "output tokens/s"
USER_SPEED = "tokens/s per user"
SHORT_TITLES = {
    SPEED: "tokens/s",
    "TTFT p50 ms": "TTFT p50",
    "TTFT p99 ms": "TTFT p99",
    "inter-token p50 ms": "ITL p50",
    "inter-token p99 ms": "ITL p99",
    "goodput requests/min": "goodput",
    "cost of a million tokens": "cost/M",
    "failed": "failed",
}


@dataclass(frozen=True, slots=True)
class Figure:
    """One column: its title, how it comes from a run, and its format."""

    title: str
    value: Callable[[Run], float | None]
    form: str

    def show(self, run: Run) -> str:
        return shown(self.value(run), self.form)

    def show_spread(self, section: Section, mode: str) -> str:
        return shown_spread(self.spread(section, mode), self.form)

    def spread(self, section: Section, mode: str) -> Spread | None:
        """Median and range over the rounds."""
        return spread_of(self.value(run) for run in section.of(mode))


def figures(report: Report, section: Section) -> list[Figure]:
    """What is known of at least one run of a section."""
    return [figure for figure in _all(report, section) if any(figure.value(run) is not None for run in section.runs)]


def _all(report: Report, section: Section) -> list[Figure]:
    return [
        Figure("total s", _of(lambda m: m.total_s), ".1f"),
        Figure("requests/min", _of(lambda m: m.requests_per_min), ".1f"),
        Figure(SPEED, _of(lambda m: m.output_tokens_per_s), ".1f"),
        Figure("all tokens/s", _of(section.all_tokens_per_s), ".0f"),
        Figure("TTFT p50 ms", _of(lambda m: m.ttft_p50_ms), ".0f"),
        Figure("TTFT p99 ms", _of(lambda m: m.ttft_p99_ms), ".0f"),
        Figure("inter-token p50 ms", _of(lambda m: m.inter_token_p50_ms), ".1f"),
        Figure("inter-token p99 ms", _of(lambda m: m.inter_token_p99_ms), ".1f"),
        Figure(USER_SPEED, _of(lambda m: m.tokens_per_s_per_user), ".1f"),
        Figure("tokens/step", _of(lambda m: m.tokens_per_step), ".2f"),
        Figure("mean seats", _of(lambda m: m.mean_seats), ".2f"),
        Figure("goodput requests/min", _of(lambda m: m.goodput_requests_per_min), ".1f"),
        Figure("within objectives %", _of(lambda m: None if m.slo_fraction is None else 100 * m.slo_fraction), ".0f"),
        Figure("device busy %", _busy_percent, ".0f"),
        Figure("exposed host ms", lambda run: run.figures.get("exposed_host_ms"), ".2f"),
        Figure("cores busy", _cores, ".2f"),
        Figure("cost of a million tokens", _of(report.cost), ".3f"),
        Figure("failed", _of(lambda m: m.num_failed or None), ".0f"),
    ]


def _of(figure: Callable[[Measures], float | None]) -> Callable[[Run], float | None]:
    return lambda run: figure(run.measures)


def _busy_percent(run: Run) -> float | None:
    fraction = run.figures.get("device_busy_fraction")
    return None if fraction is None else 100 * fraction


def _cores(run: Run) -> float | None:
    """Processor time of everything but the benchmark itself."""
    parts = [cores for part, cores in run.cores.items() if part != THIS_BENCH]
    return sum(parts) if parts else None
