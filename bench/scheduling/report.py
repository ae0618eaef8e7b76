"""The report of the scheduling benchmarks: a page with a table for each comparison. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from inflight.bench.report.page import Page, Part
from inflight.bench.report.table import UNKNOWN, Table, shown
from inflight.bench.scheduling.figures import Figures
from inflight.bench.scheduling.lab import Comparison

KIND = "scheduling"
COLUMNS: dict[str, tuple[Callable[[Figures], float | None], str]] = {
    "requests": (lambda one: float(one.num_requests), ".0f"),
    "output tokens/s": (lambda one: one.output_tokens_per_s, ".0f"),
    "TTFT p50 ms": (lambda one: one.ttft_p50_ms, ".0f"),
    "TTFT p99 ms": (lambda one: one.ttft_p99_ms, ".0f"),
    "inter-token p50 ms": (lambda one: one.inter_token_p50_ms, ".1f"),
    "inter-token p99 ms": (lambda one: one.inter_token_p99_ms, ".1f"),
}


NOTE = "All modes of a comparison got the same requests at the same times."


def values_of(comparisons: Sequence[Comparison], circumstances: Mapping[str, str]) -> dict[str, Any]:
    return {"report": KIND, "circumstances": circumstances, "comparisons": [asdict(one) for one in comparisons]}


def page(comparisons: Sequence[Comparison], circumstances: Mapping[str, str]) -> Page:
    return Page("Scheduling", circumstances, [_part(comparison) for comparison in comparisons], NOTE)


def _part(comparison: Comparison) -> Part:
    setting = comparison.setting[0].upper() + comparison.setting[1:] + "."
    return Part(comparison.title, setting, comparison.found, table=_table(comparison))


def _table(comparison: Comparison) -> Table:
    extras = [name for name in comparison.modes[0].figures.extra if _says_something(comparison, name)]
    rows = [[mode.name, *_cells(mode.figures, extras)] for mode in comparison.modes]
    return Table(["mode", *COLUMNS, *extras], rows)


def _says_something(comparison: Comparison, name: str) -> bool:
    return any(mode.figures.extra.get(name) for mode in comparison.modes)


def _cells(figures: Figures, extras: Sequence[str]) -> list[str]:
    own = [shown(value(figures), form) for value, form in COLUMNS.values()]
    return [*own, *(_shown_extra(figures.extra.get(name)) for name in extras)]


def _shown_extra(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:.0f}" if value >= 100 or value == int(value) else f"{value:.2f}"
