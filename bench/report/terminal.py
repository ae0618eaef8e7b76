"""A report in the terminal: a line for each mode with the figures that decide."""

from __future__ import annotations

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from bench.report.figures import Figure, figures
from bench.report.markdown import sentences
from bench.report.report import Report, Section

# What fits into a terminal; everything is in the report's files.
SPEED = "output tokens/s"
TITLES = {
    SPEED: "tokens/s",
    "TTFT p50 ms": "TTFT p50",
    "TTFT p99 ms": "TTFT p99",
    "inter-token p50 ms": "ITL p50",
    "inter-token p99 ms": "ITL p99",
    "goodput requests/min": "goodput",
    "cost of a million tokens": "cost/M",
    "failed": "failed",
}


def print_report(report: Report, console: Console) -> None:
    """Prints a table and the conclusions for each workload."""
    for section in report.sections:
        console.print(_table(report, section))
        for sentence in sentences(section):
            console.print(escape(sentence.replace("**", "")), highlight=False, soft_wrap=True)


def _table(report: Report, section: Section) -> Table:
    table = Table(title=f"{escape(section.workload.name)} (times in ms)", title_justify="left")
    table.add_column("mode", no_wrap=True)
    shown = [figure for figure in figures(report, section) if figure.title in TITLES]
    for figure in shown:
        table.add_column(TITLES[figure.title], justify="right", overflow="fold")
    for mode in section.modes:
        table.add_row(escape(mode), *(_cell(figure, section, mode) for figure in shown))
    return table


def _cell(figure: Figure, section: Section, mode: str) -> str:
    """The range of what decides, the median of the rest."""
    text = figure.show_spread(section, mode)
    return text if figure.title == SPEED else text.partition(" ")[0]
