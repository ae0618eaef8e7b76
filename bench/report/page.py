"""A report as one HTML page with charts: complete in itself, light and dark, readable on a phone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from html import escape
from pathlib import Path

from bench.measures import NUM_QUANTILES, Run, SeatSample
from bench.report.charts import Bar, Line, area, bars, curves, figure, x_axis
from bench.report.figures import Figure, figures, shown_spread
from bench.report.markdown import describe_workload, sentences
from bench.report.report import Report, Section
from bench.report.scale import Scale, even_scale, log_scale

STYLE = Path(__file__).with_suffix(".css")
# Tokens of one frame come together: their distance is 0, which an axis by powers of ten does not have.
LEAST_MS = 0.1

# Titles of `figures` that are drawn as bars, and what is said below them.
BARS = {
    "output tokens/s": ("Throughput", "output tokens per second; more is better"),
    "all tokens/s": ("Throughput with prompts", "prompt and output tokens per second; more is better"),
    "goodput requests/min": ("Goodput", "requests per minute that kept the objectives; more is better"),
    "cost of a million tokens": ("Cost", "of a million output tokens at the given price; less is better"),
    "device busy %": ("Device busy", "percent of the time; the engine's own figure"),
    "cores busy": ("Cores busy", "mean over the run, without the benchmark itself; waiting threads may spin"),
}


def to_html(report: Report) -> str:
    """The whole page."""
    colours = _colours(report)
    sections = "".join(_section(report, section, colours) for section in report.sections)
    facts = "".join(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in report.circumstances.items())
    title = report.title.replace("*", "")
    return document(
        title,
        '<p class="soft">Greedy, end-of-sequence ignored, everything in turn within one run. Bars are medians over the '
        "rounds, the thin line is their range; curves are the median round.</p>\n"
        f"<details open><summary>circumstances</summary><dl>{facts}{_objectives(report)}</dl></details>\n{sections}",
    )


def document(title: str, body: str) -> str:
    """A page of this look; `body` is HTML."""
    return (
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>inflight bench: {escape(title)}</title>\n<style>\n{STYLE.read_text(encoding='utf-8')}</style></head>\n"
        f"<body>\n<h1>{escape(title)}</h1>\n{body}</body></html>\n"
    )


def _colours(report: Report) -> dict[str, int]:
    """Each mode has one colour on the whole page."""
    modes = dict.fromkeys(mode for section in report.sections for mode in section.modes)
    return {mode: index for index, mode in enumerate(modes)}


def _objectives(report: Report) -> str:
    objectives = {
        "objective, TTFT ms": report.slo.ttft_ms,
        "objective, inter-token ms": report.slo.inter_token_ms,
        "price per hour": report.price_per_hour,
    }
    return "".join(f"<dt>{name}</dt><dd>{value:g}</dd>" for name, value in objectives.items() if value is not None)


def _section(report: Report, section: Section, colours: dict[str, int]) -> str:
    known = figures(report, section)
    found = "".join(f"<li>{escape(sentence.replace('**', ''))}</li>" for sentence in sentences(section))
    charts = [_bars(section, shown, colours) for shown in known if shown.title in BARS]
    times = [
        _spread(section, colours, "Time to first token", lambda run: run.distributions.ttft_ms),
        _spread(section, colours, "Between tokens", lambda run: run.distributions.inter_token_ms),
        _seats(section, colours),
    ]
    return (
        f'<section><h2>{escape(section.workload.name)}</h2><p class="soft">{escape(describe_workload(section))}</p>'
        f'<ul class="found">{found}</ul><div class="charts">{"".join(charts)}</div>'
        f'<div class="charts">{"".join(times)}</div>'
        f'<div class="scroll">{_table(section, known)}</div>{_failures(section)}</section>\n'
    )


def _bars(section: Section, shown: Figure, colours: dict[str, int]) -> str:
    title, note = BARS[shown.title]
    rows = [
        Bar(mode, colours[mode], spread, shown_spread(spread, shown.form).partition(" ")[0])
        for mode in section.modes
        if (spread := shown.spread(section, mode)) is not None
    ]
    return figure(title, note, bars(rows))


def _spread(section: Section, colours: dict[str, int], title: str, values: Callable[[Run], Sequence[float]]) -> str:
    """Which share of the times is at most so long."""
    lines = [
        Line(mode, colours[mode], [(max(value, LEAST_MS), float(at)) for at, value in enumerate(values(run))])
        for mode, run in _typical(section).items()
        if values(run)
    ]
    if not lines:
        return ""
    x = log_scale((value for line in lines for value, _ in line.points), LEAST_MS)
    body = curves(lines, x, Scale(0, NUM_QUANTILES), "ms")
    return figure(title, "percent that took at most so long; further left is better", body)


def _seats(section: Section, colours: dict[str, int]) -> str:
    runs = {mode: run for mode, run in _typical(section).items() if run.samples}
    if not runs:
        return ""
    x = even_scale(max(run.measures.total_s for run in runs.values()))
    seats = even_scale(
        max(max(sample.seats_total, sample.seats_used) for run in runs.values() for sample in run.samples)
    )
    panels = "".join(
        area(
            Line(mode, colours[mode], [(sample.at_s, float(sample.seats_used)) for sample in _within(run)]),
            x,
            seats,
            _mean_words(run),
        )
        for mode, run in runs.items()
    )
    chart = figure("Seats in use over time", "the area is work that was done together", panels + x_axis(x, "seconds"))
    return chart.replace("<figure>", '<figure class="wide">', 1)


def _within(run: Run) -> list[SeatSample]:
    return [sample for sample in run.samples if sample.at_s <= run.measures.total_s]


def _mean_words(run: Run) -> str:
    mean = run.measures.mean_seats
    return f"{run.measures.total_s:.1f} s" + ("" if mean is None else f", {mean:.1f} on average")


def _typical(section: Section) -> dict[str, Run]:
    """For each mode the run whose speed is the median of its rounds (the lower one of two)."""
    ordered = {
        mode: sorted(section.of(mode), key=lambda run: run.measures.output_tokens_per_s) for mode in section.modes
    }
    return {mode: runs[(len(runs) - 1) // 2] for mode, runs in ordered.items()}


def _table(section: Section, known: Sequence[Figure]) -> str:
    head = "".join(f"<th>{escape(title)}</th>" for title in ("mode", *(shown.title for shown in known)))
    rows = "".join(
        f"<tr><td>{escape(mode)}</td>"
        + "".join(f"<td>{escape(shown.show_spread(section, mode))}</td>" for shown in known)
        + "</tr>"
        for mode in section.modes
    )
    return f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"


def _failures(section: Section) -> str:
    errors = [f"round {run.round}, {run.mode}: {error}" for run in section.runs for error in run.errors]
    return f"<ul>{''.join(f'<li>{escape(error)}</li>' for error in errors)}</ul>" if errors else ""
