"""The report of a run: JSON with everything, Markdown and one HTML page. Pure but for writing the files."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from html import escape
from pathlib import Path

from bench.chaos.gaps import Gaps, Window
from bench.chaos.tally import Tally
from bench.report.page import document

TITLE = "Chaos"
MAX_FAILURES = 50
Table = Sequence[Sequence[str]]


def write_report(tally: Tally, windows: Sequence[Window], began_s: float, folder: Path) -> tuple[Path, ...]:
    """Writes chaos.json, .md and .html into a folder and returns the paths."""
    folder.mkdir(parents=True, exist_ok=True)
    contents = {
        folder / "chaos.json": to_json(tally, windows, began_s),
        folder / "chaos.md": to_markdown(tally),
        folder / "chaos.html": to_html(tally),
    }
    for path, text in contents.items():
        path.write_text(text, encoding="utf-8")
    return tuple(contents)


def to_json(tally: Tally, windows: Sequence[Window], began_s: float) -> str:
    """Everything, with the faults in order and their times from the beginning of the load."""
    faults = [
        {
            "number": window.fault.number,
            "kind": window.fault.kind.value,
            "target": window.fault.target,
            "began_s": round(window.began_s - began_s, 3),
            "over_s": round(window.over_s - began_s, 3),
            "whole_s": None if window.whole_s is None else round(window.whole_s - began_s, 3),
        }
        for window in windows
    ]
    values = asdict(tally) | {"schedule": faults, "last_line": tally.last_line}
    values["gaps"] = [asdict(gaps) | {"kind": _kind(gaps), "holds": gaps.holds} for gaps in tally.gaps]
    return json.dumps(values, indent=1) + "\n"


def to_markdown(tally: Tally) -> str:
    """The report for people."""
    parts = [f"# {TITLE}", "\n".join(f"- {name}: {text}" for name, text in tally.circumstances.items())]
    for title, remark, table in _sections(tally):
        parts += [f"## {title}", *([remark] if remark else []), markdown_table(table)]
    if tally.failures:
        parts += ["## What failed", "\n".join(f"- {failure}" for failure in tally.failures[:MAX_FAILURES])]
    return "\n\n".join([*parts, f"`{tally.last_line}`"]) + "\n"


def to_html(tally: Tally) -> str:
    """The same as a page."""
    facts = "".join(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in tally.circumstances.items())
    sections = "".join(
        f'<section><h2>{escape(title)}</h2><p class="soft">{escape(remark)}</p>'
        f'<div class="scroll">{_html_table(table)}</div></section>\n'
        for title, remark, table in _sections(tally)
    )
    failures = "".join(f"<li>{escape(failure)}</li>" for failure in tally.failures[:MAX_FAILURES])
    failed = f"<section><h2>What failed</h2><ul>{failures}</ul></section>" if failures else ""
    last = f"<p><code>{escape(tally.last_line)}</code></p>"
    return document(
        TITLE, f"<details open><summary>circumstances</summary><dl>{facts}</dl></details>\n{sections}{failed}{last}"
    )


def gap_table(all_gaps: Sequence[Gaps]) -> Table:
    """Gaps by kind of fault, held against their bounds."""
    head = [
        "fault",
        "times",
        "streams",
        "interrupted",
        "p50 s",
        "p99 s",
        "longest s",
        "bound s",
        "kept",
        "whole after s",
    ]
    return [head, *(_gap_row(gaps) for gaps in all_gaps)]


def _sections(tally: Tally) -> list[tuple[str, str, Table]]:
    counts = {
        "requests": tally.num_requests,
        "output tokens": tally.num_tokens,
        "resumed streams": tally.num_resumed,
        "migrated streams": tally.num_migrated,
        "lost tokens": tally.lost,
        "duplicated tokens": tally.duplicated,
        "requests that failed and must not": len(tally.failures),
        "faults that the system did not recover from": tally.num_unrecovered,
        **_leaks(tally),
    }
    sections: list[tuple[str, str, Table]] = [
        ("What came of it", "", _count_table("what", counts)),
        ("Deaths", "", _count_table("process", tally.deaths)),
        (
            "Gaps",
            "The longest pause of each stream between two tokens that overlaps the time from a fault until the system "
            "was whole again. p50 and p99 are of the streams that were resumed or moved, where there are any, else of "
            "all that ran; the first row is of pauses that no fault overlaps.",
            gap_table(tally.gaps),
        ),
        ("Requests by how they were read", "", _count_table("manner", tally.manners)),
    ]
    if tally.refusals:
        remark = "New work that was told to come again, which is promised while Redis is away."
        sections.append(("Refused", remark, _count_table("status", tally.refusals)))
    return sections


def _leaks(tally: Tally) -> dict[str, int]:
    if tally.leak is None:
        return {}
    return {
        "blocks that executors still hold": tally.leak.used_blocks,
        "blocks that the ledger still promises": tally.leak.reserved_blocks,
        "requests left in the ledger": tally.leak.num_requests,
    }


def _count_table(what: str, counts: Mapping[str, int]) -> Table:
    return [[what, "number"], *([name, str(number)] for name, number in sorted(counts.items(), key=lambda kv: kv[0]))]


def _gap_row(gaps: Gaps) -> list[str]:
    kept = {True: "yes", False: "**no**", None: "–"}[gaps.holds]
    times = [gaps.p50_s, gaps.p99_s, gaps.max_s, gaps.bound_s]
    return [
        _kind(gaps),
        str(gaps.num_faults) if gaps.kind else "–",
        str(gaps.num_running),
        str(gaps.num_interrupted),
        *(_seconds(value) for value in times),
        kept,
        _seconds(gaps.recovery_max_s),
    ]


def _kind(gaps: Gaps) -> str:
    return "none" if gaps.kind is None else gaps.kind.value


def _seconds(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"


def markdown_table(table: Table) -> str:
    """Rows of text as Markdown; the first is the header."""
    header, *body = table
    return "\n".join("| " + " | ".join(row) + " |" for row in (header, ["---"] * len(header), *body))


def _html_table(table: Table) -> str:
    header, *body = table
    head = "".join(f"<th>{escape(cell)}</th>" for cell in header)
    rows = "".join("<tr>" + "".join(f"<td>{escape(cell.strip('*'))}</td>" for cell in row) + "</tr>" for row in body)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table>"
