"""Puts the gaps that were measured into a page that has a place for them."""

from __future__ import annotations

from pathlib import Path

from bench.chaos.report import gap_table, markdown_table
from bench.chaos.tally import Tally

BEGIN = "<!-- measured: begin -->\n"
END = "<!-- measured: end -->"


def fill(page: Path, tally: Tally) -> None:
    """Replaces what is between the marks. Raises `ValueError` where the page has none."""
    text = page.read_text(encoding="utf-8")
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"{page} has no place for what was measured: {BEGIN.strip()} and {END}")
    facts = "\n".join(f"- {name}: {text}" for name, text in tally.circumstances.items())
    table = markdown_table(gap_table(tally.gaps))
    filled = f"{before}{begin}{facts}\n\n{table}\n\n`{tally.last_line}`\n{end}{after}"
    page.write_text(filled, encoding="utf-8")
