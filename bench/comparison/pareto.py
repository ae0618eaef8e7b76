"""The Pareto curve of a report that measured one workload at several concurrencies: device against user. Pure."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence

from inflight.bench.comparison.report import Report, Section
from inflight.bench.measures.run import Measures, ratio
from inflight.bench.report.page import Part
from inflight.bench.report.table import Table, shown

NOTE = """\
Output tokens/s of the device, prompts included in its time, against output tokens/s of one user's stream after its \
first token; medians over the rounds. Further up and to the right is better."""


def pareto_parts(report: Report) -> Iterator[Part]:
    """Yields a part for each workload with more than one concurrency."""
    for name in dict.fromkeys(section.workload for section in report.workloads):
        sections = [one for one in report.workloads if one.workload == name and one.concurrency is not None]
        if len(sections) > 1:
            yield _part(name, sections)


def _part(name: str, sections: Sequence[Section]) -> Part:
    modes = list(dict.fromkeys(mode for section in sections for mode in section.modes))
    titles = [f"{mode}, per {whose}" for mode in modes for whose in ("device", "user")]
    rows = [
        [
            str(section.concurrency),
            *(shown(value, ".1f") for mode in modes for value in reversed(_point(section, mode))),
        ]
        for section in sections
    ]
    return Part(
        f"{name}: tokens/s per device against tokens/s per user",
        note=NOTE,
        found=list(_compared(sections)),
        table=Table(["under way", *titles], rows),
    )


def _compared(sections: Sequence[Section]) -> Iterator[str]:
    """Yields the range of the ratio of each mode of inflight to each peer over the concurrencies."""
    for ours, peer in sections[0].own_against_peers():
        ratios = [value for one in sections if (value := ratio(one.runs, ours, peer)) is not None]
        if ratios:
            yield (
                f"**{ours} gives {min(ratios):.2f} to {max(ratios):.2f} times the output tokens/s of {peer}** "
                "at the same concurrency."
            )


def _point(section: Section, mode: str) -> tuple[float | None, float | None]:
    """Returns the medians of tokens/s per user and per device."""
    return (
        _median(section, mode, lambda measures: measures.tokens_per_s_per_user),
        _median(section, mode, lambda measures: measures.output_tokens_per_s),
    )


def _median(section: Section, mode: str, value: Callable[[Measures], float | None]) -> float | None:
    known = [one for run in section.of(mode) if (one := value(run.measures)) is not None]
    return statistics.median(known) if known else None
