"""A report as Markdown, for people and for the repository."""

from __future__ import annotations

from collections.abc import Sequence

from bench.report.figures import figures
from bench.report.report import BARE_MODE, STACK_MODE, Report, Section, stack_cost


def to_markdown(report: Report, *, page: str) -> str:
    """The report; `page` is the file with the charts."""
    lines = [
        f"# {report.title}",
        "",
        "Greedy, end-of-sequence ignored, everything in turn within one run; figures are medians over the rounds, with "
        "the range in brackets. Through a stack they are measured at the client, of an engine alone in its process.",
        f"Charts: [{page}]({page})",
        "",
        *(f"- {name}: {plain(text)}" for name, text in report.circumstances.items()),
        *_objectives(report),
        "",
        *(line for section in report.sections for line in _section(report, section)),
    ]
    return "\n".join(lines).rstrip() + "\n"


def plain(text: str) -> str:
    """Text that breaks no table and opens no tag."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


def sentences(section: Section) -> list[str]:
    """What the section says in words: the subject against each other mode, and the cost of the stack."""
    subject = section.subject
    said = [
        f"**{subject} gives {value:.2f} times the output tokens/s of {mode}** (median over the rounds)."
        for mode, value in section.ratios().items()
        if (subject, mode) != (STACK_MODE, BARE_MODE)
    ]
    cost = stack_cost(section)
    if cost is not None:
        added = "" if cost.added_ttft_ms is None else f"; its TTFT (p50) differs by {cost.added_ttft_ms:+.1f} ms"
        said.append(f"**The whole stack keeps {100 * cost.speed_ratio:.1f} % of the engine's tokens/s**{added}.")
    return said


def _objectives(report: Report) -> list[str]:
    lines = []
    if report.slo.ttft_ms is not None:
        lines.append(f"- objective: first token within {report.slo.ttft_ms:g} ms")
    if report.slo.inter_token_ms is not None:
        lines.append(f"- objective: at most {report.slo.inter_token_ms:g} ms between tokens, mean of a request")
    if report.price_per_hour is not None:
        lines.append(f"- price: {report.price_per_hour:g} per hour; cost of output tokens, prompts included")
    return lines


def _section(report: Report, section: Section) -> list[str]:
    return [
        f"## {section.workload.name}",
        "",
        describe_workload(section),
        "",
        *(line for sentence in sentences(section) for line in (sentence, "")),
        *_summary(report, section),
        "",
        "<details><summary>every run</summary>",
        "",
        *_runs(report, section),
        "",
        "</details>",
        "",
        *_failures(section),
    ]


def describe_workload(section: Section) -> str:
    """What was sent."""
    workload = section.workload
    tokens = f"{workload.prompt_tokens} prompt tokens, {workload.output_tokens} output tokens"
    sent = f"{len(workload.requests)} requests, {tokens}"
    if workload.concurrency is not None:
        return f"{sent}, {workload.concurrency} under way at any time."
    if not workload.arrives_at_once:
        return f"{sent}, arriving over {max(request.arrival_s for request in workload.requests):.0f} s."
    return (
        f"{sent}, all at once. For static batching a request of the benchmark's own holds each executor until its "
        "first batch can leave full."
    )


def _summary(report: Report, section: Section) -> list[str]:
    shown = figures(report, section)
    rows = [[mode, *(figure.show_spread(section, mode) for figure in shown)] for mode in section.modes]
    return _table(["mode", *(figure.title for figure in shown)], rows)


def _runs(report: Report, section: Section) -> list[str]:
    shown = figures(report, section)
    rows = [[str(run.round), run.mode, *(figure.show(run) for figure in shown)] for run in section.runs]
    return _table(["round", "mode", *(figure.title for figure in shown)], rows)


def _table(titles: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = [titles, ["---"] * len(titles), *([plain(cell) for cell in row] for row in rows)]
    return ["| " + " | ".join(line) + " |" for line in lines]


def _failures(section: Section) -> list[str]:
    lines = [f"- round {run.round}, {run.mode}: {plain(error)}" for run in section.runs for error in run.errors]
    return [*lines, ""] if lines else []
