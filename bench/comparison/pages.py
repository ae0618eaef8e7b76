"""The report of a comparison: its JSON values, its page with charts, and its lines for a terminal. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from inflight.bench.comparison.figures import SHORT_TITLES, SPEED, Figure, figures
from inflight.bench.comparison.pareto import pareto_parts
from inflight.bench.comparison.report import (
    BARE_MODE,
    STACK_MODE,
    Report,
    Section,
    StackCost,
    engine_of,
    is_own,
    read_report,
    stack_cost,
    values_of_run,
)
from inflight.bench.measures.run import Run, ratio
from inflight.bench.report.charts import Bar, Line, area, bars, figure, percentile_curves, x_axis
from inflight.bench.report.page import Page, Part
from inflight.bench.report.scale import even_scale
from inflight.bench.report.table import Table, shown_spread

KIND = "comparison"
NOTE = """\
Greedy, end-of-sequence ignored, everything in turn within one run; figures are medians over the rounds, with the range
in brackets. Through a stack they are measured at the client, of an engine alone in its process. In charts, bars are
medians, the thin line is their range, and curves are the median round."""

# Titles of `figures` that are drawn as bars, and what is said below them.
BARS = {
    SPEED: ("Throughput", "output tokens per second; more is better"),
    "all tokens/s": ("Throughput with prompts", "prompt and output tokens per second; more is better"),
    "goodput requests/min": ("Goodput", "requests per minute that kept the objectives; more is better"),
    "cost of a million tokens": ("Cost", "of a million output tokens at the given price; less is better"),
    "device busy %": ("Device busy", "percent of the time; the engine's own figure"),
    "cores busy": ("Cores busy", "mean over the run, without the benchmark itself; waiting threads may spin"),
}


def values_of(report: Report) -> dict[str, Any]:
    """Returns the report as plain values, with what follows from the runs."""
    return {
        "report": KIND,
        "circumstances": dict(report.circumstances),
        "slo": asdict(report.slo),
        "price_per_hour": report.price_per_hour,
        "workloads": [_values_of_section(report, section) for section in report.workloads],
    }


def page_of(values: Mapping[str, Any]) -> Page:
    """Returns the page of a report that is given as values."""
    return page(read_report(values))


def page(report: Report) -> Page:
    colours = {mode: index for index, mode in enumerate(dict.fromkeys(_modes(report)))}
    parts = [*pareto_parts(report, colours), *(_part(report, section, colours) for section in report.workloads)]
    return Page(report.title, {**report.circumstances, **_objectives(report)}, parts, NOTE)


def terminal_lines(report: Report) -> list[str]:
    """Returns a table and the conclusions for each workload."""
    lines = []
    for section in report.workloads:
        known = [figure for figure in figures(report, section) if figure.title in SHORT_TITLES]
        header = [f"{section.title} (times in ms)", *(SHORT_TITLES[figure.title] for figure in known)]
        rows = [[mode, *(_short(figure, section, mode) for figure in known)] for mode in section.modes]
        lines += [Table(header, rows).text(), *(sentence.replace("**", "") for sentence in sentences(section))]
    return lines


def sentences(section: Section) -> list[str]:
    """Returns the subject against each other mode, and the cost of the stack."""
    subject = section.subject
    said = [
        f"**{subject} gives {value:.2f} times the output tokens/s of {mode}** (median over the rounds)."
        for mode, value in section.ratios().items()
        if not (subject == STACK_MODE and is_own(mode))
    ]
    said += [
        f"**{mode} gives {value:.2f} times the output tokens/s of {peer}**."
        for mode, peer in section.own_against_peers()
        if mode not in (STACK_MODE, BARE_MODE) and (value := ratio(section.runs, mode, peer)) is not None
    ]
    for mode in section.modes:
        if is_own(mode) and mode.startswith(STACK_MODE) and (cost := stack_cost(section, mode)) is not None:
            said.append(_cost_sentence(section, mode, cost))
    return said


def _cost_sentence(section: Section, mode: str, cost: StackCost) -> str:
    stack, bare = ("The whole stack", "the engine") if mode == STACK_MODE else (mode, engine_of(section, mode))
    added = "" if cost.added_ttft_ms is None else f"; its TTFT (p50) differs by {cost.added_ttft_ms:+.1f} ms"
    return f"**{stack} keeps {100 * cost.speed_ratio:.1f} % of {bare}'s tokens/s**{added}."


def _values_of_section(report: Report, section: Section) -> dict[str, Any]:
    cost = stack_cost(section)
    spreads = {
        mode: {known.title: known.spread(section, mode) for known in figures(report, section)} for mode in section.modes
    }
    return {
        "workload": section.workload,
        "num_requests": section.num_requests,
        "prompt_tokens": section.prompt_tokens,
        "output_tokens": section.output_tokens,
        "concurrency": section.concurrency,
        "last_arrival_s": section.last_arrival_s,
        "compared": section.subject,
        "ratios": section.ratios(),
        "stack_cost": None if cost is None else asdict(cost),
        "summary": {
            mode: {title: asdict(spread) for title, spread in of_mode.items() if spread is not None}
            for mode, of_mode in spreads.items()
        },
        "runs": [values_of_run(run) for run in section.runs],
    }


def _modes(report: Report) -> list[str]:
    return [mode for section in report.workloads for mode in section.modes]


def _objectives(report: Report) -> dict[str, str]:
    objectives = {}
    if report.slo.ttft_ms is not None:
        objectives["objective, first token"] = f"within {report.slo.ttft_ms:g} ms"
    if report.slo.inter_token_ms is not None:
        objectives["objective, inter-token"] = f"at most {report.slo.inter_token_ms:g} ms, mean of a request"
    if report.price_per_hour is not None:
        objectives["price"] = f"{report.price_per_hour:g} per hour; cost of output tokens, prompts included"
    return objectives


def _part(report: Report, section: Section, colours: Mapping[str, int]) -> Part:
    known = figures(report, section)
    titles = [figure.title for figure in known]
    charts = [
        *(_bars(section, one, colours) for one in known if one.title in BARS),
        _times(section, colours, "Time to first token", lambda run: run.distributions.ttft_ms),
        _times(section, colours, "Between tokens", lambda run: run.distributions.inter_token_ms),
        _seats(section, colours),
    ]
    return Part(
        section.title,
        note=_described(section),
        found=sentences(section),
        table=Table(
            ["mode", *titles], [[mode, *(one.show_spread(section, mode) for one in known)] for mode in section.modes]
        ),
        details=Table(
            ["round", "mode", *titles],
            [[str(run.round), run.mode, *(one.show(run) for one in known)] for run in section.runs],
        ),
        problems=[f"round {run.round}, {run.mode}: {error}" for run in section.runs for error in run.errors],
        charts="".join(charts),
    )


def _described(section: Section) -> str:
    tokens = f"{section.prompt_tokens} prompt tokens, {section.output_tokens} output tokens"
    sent = f"{section.num_requests} requests, {tokens}"
    if section.concurrency is not None:
        return f"{sent}, {section.concurrency} under way at any time."
    if section.last_arrival_s:
        return f"{sent}, arriving over {section.last_arrival_s:.0f} s."
    return (
        f"{sent}, all at once. For static batching a request of the benchmark's own holds each executor until its "
        "first batch can leave full."
    )


def _short(figure: Figure, section: Section, mode: str) -> str:
    """Returns the range of the speed, the median of the rest."""
    text = figure.show_spread(section, mode)
    return text if figure.title == SPEED else text.partition(" ")[0]


def _bars(section: Section, known: Figure, colours: Mapping[str, int]) -> str:
    title, note = BARS[known.title]
    rows = [
        Bar(mode, colours[mode], spread, shown_spread(spread, known.form).partition(" ")[0])
        for mode in section.modes
        if (spread := known.spread(section, mode)) is not None
    ]
    return figure(title, note, bars(rows))


def _times(section: Section, colours: Mapping[str, int], title: str, values: Callable[[Run], Sequence[float]]) -> str:
    lines = [Line(mode, colours[mode], list(enumerate(values(run)))) for mode, run in _typical(section).items()]
    return percentile_curves(title, lines)


def _seats(section: Section, colours: Mapping[str, int]) -> str:
    runs = {mode: run for mode, run in _typical(section).items() if run.samples}
    if not runs:
        return ""
    x = even_scale(max(run.measures.total_s for run in runs.values()))
    seats = even_scale(
        max(max(sample.seats_total, sample.seats_used) for run in runs.values() for sample in run.samples)
    )
    panels = "".join(area(Line(mode, colours[mode], _used(run)), x, seats, _mean(run)) for mode, run in runs.items())
    note = "the area is work that was done together"
    return figure("Seats in use over time", note, panels + x_axis(x, "seconds"), is_wide=True)


def _used(run: Run) -> list[tuple[float, float]]:
    return [(one.at_s, float(one.seats_used)) for one in run.samples if one.at_s <= run.measures.total_s]


def _mean(run: Run) -> str:
    mean = run.measures.mean_seats
    return f"{run.measures.total_s:.1f} s" + ("" if mean is None else f", {mean:.1f} on average")


def _typical(section: Section) -> dict[str, Run]:
    """For each mode the run whose speed is the median of its rounds (the lower one of two)."""
    ordered = {
        mode: sorted(section.of(mode), key=lambda run: run.measures.output_tokens_per_s) for mode in section.modes
    }
    return {mode: runs[(len(runs) - 1) // 2] for mode, runs in ordered.items()}
