"""The report of the scheduling benchmarks: JSON with everything, Markdown, and one HTML page with charts."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from html import escape
from pathlib import Path

from bench.measures import NUM_QUANTILES
from bench.report.charts import Bar, Line, bars, curves, figure
from bench.report.figures import UNKNOWN, shown
from bench.report.page import LEAST_MS, STYLE
from bench.report.report import Spread
from bench.report.scale import Scale, log_scale
from bench.simulation.figures import Figures
from bench.simulation.lab import Comparison

NAME = "scheduling"
COLUMNS: dict[str, tuple[Callable[[Figures], float | None], str]] = {
    "requests": (lambda one: float(one.num_requests), ".0f"),
    "output tokens/s": (lambda one: one.output_tokens_per_s, ".0f"),
    "TTFT p50 ms": (lambda one: one.ttft_p50_ms, ".0f"),
    "TTFT p99 ms": (lambda one: one.ttft_p99_ms, ".0f"),
    "inter-token p50 ms": (lambda one: one.inter_token_p50_ms, ".1f"),
    "inter-token p99 ms": (lambda one: one.inter_token_p99_ms, ".1f"),
}


def write_comparisons(
    comparisons: Sequence[Comparison], circumstances: Mapping[str, str], folder: Path
) -> tuple[Path, ...]:
    """Writes the report and returns where."""
    folder.mkdir(parents=True, exist_ok=True)
    contents = {
        folder / f"{NAME}.json": _to_json(comparisons, circumstances),
        folder / f"{NAME}.md": _to_markdown(comparisons, circumstances),
        folder / f"{NAME}.html": _to_html(comparisons, circumstances),
    }
    for path, text in contents.items():
        path.write_text(text, encoding="utf-8")
    return tuple(contents)


def rows_of(comparison: Comparison) -> list[list[str]]:
    """The table of a comparison; the first row is its header."""
    extras = [name for name in comparison.modes[0].figures.extra if _says_something(comparison, name)]
    header = ["mode", *COLUMNS, *extras]
    return [header, *([mode.name, *_cells(mode.figures, extras)] for mode in comparison.modes)]


def _says_something(comparison: Comparison, name: str) -> bool:
    return any(mode.figures.extra.get(name) for mode in comparison.modes)


def _cells(figures: Figures, extras: Sequence[str]) -> list[str]:
    own = [shown(value(figures), form) for value, form in COLUMNS.values()]
    return [*own, *(_shown_extra(figures.extra.get(name)) for name in extras)]


def _shown_extra(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:.0f}" if value >= 100 or value == int(value) else f"{value:.2f}"


def _to_json(comparisons: Sequence[Comparison], circumstances: Mapping[str, str]) -> str:
    values = {"circumstances": circumstances, "comparisons": [asdict(one) for one in comparisons]}
    return json.dumps(values, indent=1) + "\n"


def _to_markdown(comparisons: Sequence[Comparison], circumstances: Mapping[str, str]) -> str:
    lines = ["# Scheduling", "", *(f"- {name}: {text}" for name, text in circumstances.items())]
    lines += [
        "",
        f"With charts: [{NAME}.html]({NAME}.html). What is modelled: "
        "[docs/design/simulation.md](../../docs/design/simulation.md).",
    ]
    for comparison in comparisons:
        header, *rows = rows_of(comparison)
        lines += ["", f"## {comparison.title}", "", comparison.setting[0].upper() + comparison.setting[1:] + ".", ""]
        lines += [f"- {sentence}" for sentence in comparison.found]
        lines += ["", *("| " + " | ".join(row) + " |" for row in (header, ["---"] * len(header), *rows))]
    return "\n".join(lines) + "\n"


def _to_html(comparisons: Sequence[Comparison], circumstances: Mapping[str, str]) -> str:
    facts = "".join(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in circumstances.items())
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>inflight: scheduling</title>\n<style>\n{STYLE.read_text(encoding='utf-8')}</style></head>\n"
        "<body>\n<h1>Scheduling</h1>\n"
        '<p class="soft">All modes of a comparison got the same requests at the same moments.</p>\n'
        f"<details open><summary>circumstances</summary><dl>{facts}</dl></details>\n"
        f"{''.join(_section(comparison) for comparison in comparisons)}</body></html>\n"
    )


def _section(comparison: Comparison) -> str:
    found = "".join(f"<li>{escape(sentence)}</li>" for sentence in comparison.found)
    speeds = _bars(comparison, "Throughput", "output tokens per second; more is better", "output tokens/s")
    waits = _bars(comparison, "Slowest first tokens", "TTFT p99 in milliseconds; less is better", "TTFT p99 ms")
    return (
        f'<section><h2>{escape(comparison.title)}</h2><p class="soft">{escape(comparison.setting)}</p>'
        f'<ul class="found">{found}</ul><div class="charts">{speeds}{waits}{_goodput(comparison)}{_waits(comparison)}'
        f'</div><div class="scroll">{_table(comparison)}</div></section>\n'
    )


def _bars(comparison: Comparison, title: str, note: str, column: str) -> str:
    value, form = COLUMNS[column]
    rows = [
        Bar(mode.name, colour, Spread(number, number, number), shown(number, form))
        for colour, mode in enumerate(comparison.modes)
        if (number := value(mode.figures)) is not None
    ]
    return figure(title, note, bars(rows))


def _goodput(comparison: Comparison) -> str:
    name = "goodput requests/s"
    rows = [
        Bar(mode.name, colour, Spread(number, number, number), f"{number:.1f}")
        for colour, mode in enumerate(comparison.modes)
        if (number := mode.figures.extra.get(name)) is not None
    ]
    return figure("Goodput", "first tokens in time per second; more is better", bars(rows)) if rows else ""


def _waits(comparison: Comparison) -> str:
    lines = [
        Line(mode.name, colour, [(max(value, LEAST_MS), float(at)) for at, value in enumerate(mode.figures.ttft_ms)])
        for colour, mode in enumerate(comparison.modes)
        if mode.figures.ttft_ms
    ]
    if not lines:
        return ""
    x = log_scale((value for line in lines for value, _ in line.points), LEAST_MS)
    body = curves(lines, x, Scale(0, NUM_QUANTILES), "ms")
    return figure("Time to first token", "percent that took at most so long; further left is better", body)


def _table(comparison: Comparison) -> str:
    header, *rows = rows_of(comparison)
    head = "".join(f"<th>{escape(title)}</th>" for title in header)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"
