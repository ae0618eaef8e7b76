"""The report of a comparison: its JSON values, its page, and its lines for a terminal. Pure."""

from __future__ import annotations

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
    stack_cost,
    values_of_run,
)
from inflight.bench.measures.run import ratio
from inflight.bench.report.page import Page, Part
from inflight.bench.report.table import Table

KIND = "comparison"
NOTE = """\
Greedy, end-of-sequence ignored, everything in turn within one run; figures are medians over the rounds, with the range
in brackets. Through a stack they are measured at the client, of an engine alone in its process."""


def values_of(report: Report) -> dict[str, Any]:
    """Returns the report as plain values, with what follows from the runs."""
    return {
        "report": KIND,
        "circumstances": dict(report.circumstances),
        "slo": asdict(report.slo),
        "price_per_hour": report.price_per_hour,
        "workloads": [_values_of_section(report, section) for section in report.workloads],
    }


def page(report: Report) -> Page:
    parts = [*pareto_parts(report), *(_part(report, section) for section in report.workloads)]
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


def _objectives(report: Report) -> dict[str, str]:
    objectives = {}
    if report.slo.ttft_ms is not None:
        objectives["objective, first token"] = f"within {report.slo.ttft_ms:g} ms"
    if report.slo.inter_token_ms is not None:
        objectives["objective, inter-token"] = f"at most {report.slo.inter_token_ms:g} ms, mean of a request"
    if report.price_per_hour is not None:
        objectives["price"] = f"{report.price_per_hour:g} per hour; cost of output tokens, prompts included"
    return objectives


def _part(report: Report, section: Section) -> Part:
    known = figures(report, section)
    titles = [figure.title for figure in known]
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
