"""What a soak came to, as JSON, Markdown and the last line. Pure."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

from bench.soak.flatness import Trend, trend
from bench.soak.readings import Series


@dataclass(frozen=True, slots=True)
class Outcome:
    """A soak that has ended. `left` is what was still held when nobody asked for anything any more."""

    circumstances: Mapping[str, str]
    seconds: float
    num_requests: int
    num_cancelled: int
    num_vanished: int
    num_tokens: int
    num_failed: int
    errors: Sequence[str]
    left: Mapping[str, int]
    trends: Sequence[Trend]
    too_few: Sequence[str]

    @property
    def is_flat(self) -> bool:
        """Whether nothing grows and nothing is left."""
        return bool(self.trends) and all(one.is_flat for one in self.trends) and not any(self.left.values())

    @property
    def last_line(self) -> str:
        """The line for machines."""
        flat = "yes" if self.is_flat else "no"
        return f"soak: seconds={self.seconds:.0f} requests={self.num_requests} failed={self.num_failed} flat={flat}"


def trends_of(series: Series) -> tuple[list[Trend], list[str]]:
    """A trend for each process and figure, and the names of those with too few readings for one."""
    trends, too_few = [], []
    for (process, figure), readings in series.items():
        found = trend(process, figure, readings)
        if found is None:
            too_few.append(f"{process} {figure}")
        else:
            trends.append(found)
    return trends, too_few


def to_json(outcome: Outcome, at_s: Sequence[float], series: Series) -> str:
    """Everything, with every reading."""
    readings = {f"{process} {figure}": values for (process, figure), values in series.items()}
    values = asdict(outcome) | {"last_line": outcome.last_line, "at_s": at_s, "readings": readings}
    return json.dumps(values) + "\n"


def to_markdown(outcome: Outcome) -> str:
    """The report for people."""
    facts = "\n".join(f"- {name}: {text}" for name, text in outcome.circumstances.items())
    counts = {
        "requests": outcome.num_requests,
        "of these cancelled by their client": outcome.num_cancelled,
        "of these left by a connection that went away": outcome.num_vanished,
        "output tokens": outcome.num_tokens,
        "failed": outcome.num_failed,
        **{f"{name} at the end": number for name, number in outcome.left.items()},
    }
    rows = [
        ["process", "figure", "early", "late", "least", "most", "flat"],
        *(
            [one.process, one.figure, *map(_number, (one.early, one.late, one.least, one.most)), _verdict(one)]
            for one in outcome.trends
        ),
    ]
    parts = ["# Soak", facts, table([["what", "number"], *([name, str(n)] for name, n in counts.items())])]
    parts += [
        "## What the processes held",
        "Medians of the first and of the last third of the readings after the warm-up.",
        table(rows),
    ]
    if outcome.errors:
        parts += ["## What failed", "\n".join(f"- {error}" for error in outcome.errors)]
    return "\n\n".join([*parts, f"`{outcome.last_line}`"]) + "\n"


def table(rows: Sequence[Sequence[str]]) -> str:
    """Rows of text as Markdown; the first is the header."""
    header, *body = rows
    return "\n".join("| " + " | ".join(row) + " |" for row in (header, ["---"] * len(header), *body))


def _number(value: float) -> str:
    return f"{value:.1f}".removesuffix(".0")


def _verdict(one: Trend) -> str:
    return "yes" if one.is_flat else "**no**"
