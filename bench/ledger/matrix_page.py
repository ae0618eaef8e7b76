"""The report of the ledger at several sizes of the pool as one HTML page: figures against the length of the line."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from html import escape

from bench.ledger.figures import SETTLED, Point
from bench.ledger.matrix_text import EXPLANATION, script_figures, tables
from bench.report.charts import Line, curves, figure
from bench.report.page import document
from bench.report.scale import even_scale, log_scale

# Charts of what Redis spends on a call.
CALLS = ("submit, placed", "submit, queued", f"settle of {SETTLED[1]}", "boarding", "cancel", "explain", "report")


def to_html(points: Sequence[Point], words: Mapping[str, str]) -> str:
    """The whole page."""
    facts = "".join(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in words.items())
    sections = "".join(
        f'<section><h2>{escape(title)}</h2><p class="soft">{escape(note)}</p>'
        f'<div class="scroll">{_table(rows)}</div></section>\n'
        for title, note, rows in tables(points)
    )
    return document(
        "The admission ledger at scale",
        f'<p class="soft">{escape(EXPLANATION)}</p>\n'
        f"<details open><summary>circumstances</summary><dl>{facts}</dl></details>\n"
        f'<div class="charts">{"".join(_charts(points))}</div>\n{sections}',
    )


def _charts(points: Sequence[Point]) -> list[str]:
    less, more = "less is better", "more is better"
    return [
        _chart(points, "Admitted per second, closed loop", more, lambda point: point.saturation.admitted_per_wall_s),
        _chart(points, "Admitted per second, scripts alone", more, lambda point: point.scripts_per_s[SETTLED[1]]),
        _chart(points, "Admission, p50 ms at half of the rate", less, lambda point: point.latency.admission_ms[0]),
        _chart(points, "Admission, p99 ms at half of the rate", less, lambda point: point.latency.admission_ms[1]),
        *(_chart(points, f"{call}, µs a call", less, partial(_us, call)) for call in CALLS),
        _chart(points, "Worst single call, ms", less, lambda point: point.worst.us / 1000),
        _chart(points, "Redis' memory, MB", less, lambda point: point.memory_bytes / 1e6),
    ]


def _us(call: str, point: Point) -> float:
    return script_figures(point)[call] or 0.0


def _chart(points: Sequence[Point], title: str, note: str, value: Callable[[Point], float]) -> str:
    """A figure against the length of the line, a curve for each number of executors."""
    executors = sorted({point.scale.executors for point in points})
    lines = [
        Line(
            f"{number:,} executors",
            colour,
            sorted((float(point.scale.queued), value(point)) for point in points if point.scale.executors == number),
        )
        for colour, number in enumerate(executors)
    ]
    x = log_scale((float(point.scale.queued) for point in points), 1.0)
    y = even_scale(1.1 * max(value(point) for point in points))
    return figure(title, note, curves(lines, x, y, "requests in line"))


def _table(rows: Sequence[Sequence[str]]) -> str:
    head, *body = rows
    titles = "".join(f"<th>{escape(title)}</th>" for title in head)
    lines = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in body)
    return f"<table><thead><tr>{titles}</tr></thead><tbody>{lines}</tbody></table>"
