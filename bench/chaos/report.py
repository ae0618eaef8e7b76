"""The report of a chaos run: its JSON values, its page, and the measured gaps in a page of the documentation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from inflight.bench.chaos.gaps import Gaps, Window
from inflight.bench.chaos.tally import Tally
from inflight.bench.fleet.usage import UNREPORTED_S, Costs
from inflight.bench.report.page import Page, Part, facts
from inflight.bench.report.table import UNKNOWN, Table, count_table, shown

KIND = "chaos"
MAX_FAILURES = 50
GAPS_NOTE = """\
The longest pause of each stream between two tokens that overlaps the time from a fault until the system was whole
again. p50 and p99 are of the streams that were resumed or moved, where there are any, else of all that ran; the first
row is of pauses that no fault overlaps."""
USAGE_NOTE = f"""\
Busy time of executors, and what the ledger has of it. What an executor that ended had not reported is missing: what it
used in its last {UNREPORTED_S:g} seconds at most. So is what others had reported before Redis lost its data."""
GAPS_HEADER = (
    "fault", "times", "streams", "interrupted", "p50 s", "p99 s", "longest s", "bound s", "kept", "whole after s",
)  # fmt: skip
BEGIN = "<!-- measured: begin -->\n"
END = "<!-- measured: end -->"


def values_of(tally: Tally, windows: Sequence[Window], began_s: float) -> dict[str, Any]:
    """Everything as plain values, with the faults in order and their times from the beginning of the load."""
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
    gaps = [asdict(one) | {"kind": one.kind and one.kind.value, "holds": one.holds} for one in tally.gaps]
    return {"report": KIND, **asdict(tally), "gaps": gaps, "schedule": faults, "last_line": tally.last_line}


def page(tally: Tally) -> Page:
    parts = [
        Part("Result", table=count_table("what", _counts(tally))),
        Part("Deaths", table=_sorted("process", tally.deaths)),
        Part("Gaps", GAPS_NOTE, table=gap_table(tally.gaps)),
        Part("Requests by how they were read", table=_sorted("manner", tally.manners)),
    ]
    if tally.refusals:
        note = "New requests that were told to try again later, which is allowed while Redis is away."
        if tally.num_adapted:
            note += " Requests whose adapter was removed, or replaced while they waited."
        parts.append(Part("Refused", note, table=_sorted("status", tally.refusals)))
    if tally.costs is not None:
        parts.append(Part("Usage", USAGE_NOTE, table=_usage_table(tally.costs), problems=tally.costs.problems))
    if tally.failures:
        parts.append(Part("Failures", problems=tally.failures[:MAX_FAILURES]))
    return Page("Chaos", tally.circumstances, parts, last_lines=[tally.last_line])


def gap_table(all_gaps: Sequence[Gaps]) -> Table:
    """Gaps by kind of fault, beside their bounds."""
    return Table(GAPS_HEADER, [_gap_row(gaps) for gaps in all_gaps])


def fill(page: Path, tally: Tally) -> None:
    """Puts the measured gaps between the marks of a page. Raises `ValueError` if the page has none."""
    text = page.read_text(encoding="utf-8")
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not (begin and end):
        raise ValueError(f"{page} has no place for what was measured: {BEGIN.strip()} and {END}")
    measured = f"{facts(tally.circumstances)}\n\n{gap_table(tally.gaps).markdown()}\n\n`{tally.last_line}`\n"
    page.write_text(f"{before}{begin}{measured}{end}{after}", encoding="utf-8")


def _counts(tally: Tally) -> dict[str, int]:
    counts = {
        "requests": tally.num_requests,
        "output tokens": tally.num_tokens,
        "resumed streams": tally.num_resumed,
        "migrated streams": tally.num_migrated,
        "lost tokens": tally.lost,
        "duplicated tokens": tally.duplicated,
        "requests that failed and must not": len(tally.failures),
        "faults that the system did not recover from": tally.num_unrecovered,
    }
    if tally.leak is not None:
        counts |= {
            "blocks that executors still hold": tally.leak.used_blocks,
            "blocks that the ledger still promises": tally.leak.reserved_blocks,
            "requests left in the ledger": tally.leak.num_requests,
        }
    if tally.num_adapted:
        counts |= {"requests with an adapter": tally.num_adapted}
    if tally.num_adapted and tally.leak is not None:
        counts |= {
            "placements that pin an adapter in the ledger": tally.leak.num_pins,
            "adapters that executors still hold": tally.leak.num_held_adapters,
        }
    return counts


def _usage_table(costs: Costs) -> Table:
    seconds = {
        "busy, as executors said": costs.busy_ns / 1e9,
        "booked for tenants": costs.tenants_ns / 1e9,
        "booked for the system": costs.system_ns / 1e9,
        "not reported by executors that ended": costs.unreported_ns / 1e9,
        "the longest time without a report before an end": costs.max_unreported_s,
        "lost with Redis": costs.lost_ns / 1e9,
    }
    return Table(("what", "s"), [[what, f"{value:.3f}"] for what, value in seconds.items()])


def _sorted(what: str, counts: Mapping[str, int]) -> Table:
    return count_table(what, dict(sorted(counts.items())))


def _gap_row(gaps: Gaps) -> list[str]:
    return [
        gaps.kind.value if gaps.kind else "none",
        str(gaps.num_faults) if gaps.kind else UNKNOWN,
        str(gaps.num_running),
        str(gaps.num_interrupted),
        *(shown(value, ".2f") for value in (gaps.p50_s, gaps.p99_s, gaps.max_s, gaps.bound_s)),
        {True: "yes", False: "**no**", None: UNKNOWN}[gaps.holds],
        shown(gaps.recovery_max_s, ".2f"),
    ]
