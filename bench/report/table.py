"""Tables of benchmark figures as Markdown and aligned text, and the format of single figures."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import zip_longest

UNKNOWN = "–"


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of text under a header. Every form escapes what it must; `**` around a cell is emphasis in Markdown."""

    header: Sequence[str]
    rows: Sequence[Sequence[str]]

    def markdown(self) -> str:
        lines = [self.header, ["---"] * len(self.header), *([plain(cell) for cell in row] for row in self.rows)]
        return "\n".join("| " + " | ".join(line) + " |" for line in lines)

    def text(self) -> str:
        """Aligned columns for a terminal: the first to the left, the others to the right."""
        lines = [self.header, *self.rows]
        widths = [max(map(len, column)) for column in zip_longest(*lines, fillvalue="")]
        return "\n".join(
            "  ".join(
                f"{cell:{'>' if place else '<'}{width}}"
                for place, (cell, width) in enumerate(zip(line, widths, strict=True))
            ).rstrip()
            for line in lines
        )


def count_table(what: str, counts: Mapping[str, int]) -> Table:
    """Returns a row for each count, in the order given."""
    return Table([what, "number"], [[name, str(number)] for name, number in counts.items()])


def plain(text: str) -> str:
    """Text that breaks no Markdown table and opens no HTML tag."""
    return " ".join(text.split()).replace("|", "\\|").replace("<", "&lt;")


@dataclass(frozen=True, slots=True)
class Spread:
    """A figure over several runs."""

    median: float
    least: float
    most: float


def spread_of(values: Iterable[float | None]) -> Spread | None:
    """Median, least and most of the values that are known."""
    known = [value for value in values if value is not None]
    return Spread(statistics.median(known), min(known), max(known)) if known else None


def shown(value: float | None, form: str) -> str:
    """Returns a figure in a format, or a dash."""
    return UNKNOWN if value is None else format(value, form)


def shown_spread(spread: Spread | None, form: str) -> str:
    """`12.5 (11.9–13.0)`; the median alone where there is no range."""
    if spread is None:
        return UNKNOWN
    median, least, most = (format(value, form) for value in (spread.median, spread.least, spread.most))
    return median if least == most else f"{median} ({least}–{most})"
