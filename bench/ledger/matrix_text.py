"""The report of the ledger at several sizes of the pool, as JSON and as Markdown. Pure."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from bench.ledger.figures import AGEING, CANCEL, EXPLAIN, PLACED, QUEUED, REPORT, SETTLED, Point, refilled
from bench.report.figures import UNKNOWN, shown

Column = tuple[str, Callable[[Point], str]]

EXPLANATION = """\
Every end frees a seat that somebody who waits takes, and for everybody seated somebody new comes: the line keeps its
length. Each settle carries ends of one executor, as the step frame does that it follows."""
SCRIPTS = "Microseconds of Redis for a script call"
SCRIPTS_NOTE = """\
Boarding is what a settle of 16 costs more, for each end, where the seats are taken by others who wait. Moving up: a
settle of one end together with about one move of a waiting request to the class above, which each makes at most twice.
Worst: the longest single call of the cell by Redis' slow log, with whatever else held the core meanwhile."""
RATES = "Requests admitted"
RATES_NOTE = """\
Scripts alone: what a core would do that ran nothing but submits and settles of 4. Closed loop: what went through with
all of it, requests, replies, mailboxes, reports, reaping, from one load generator. Latency at half of that, Redis' core
busy as said: the round trip of a submit and from an end until the owner of the request that takes the seat knows of it,
together; lateness of the load generator is not in it."""
BOUNDS = "What bounds it"
BOUNDS_NOTE = "Shares are of Redis' processor time in the closed loop."


def script_figures(point: Point) -> dict[str, float | None]:
    """Microseconds by what was called."""
    named = {
        "submit, placed": PLACED,
        "submit, queued": QUEUED,
        **{f"settle of {num}": refilled(num) for num in SETTLED},
        "report": REPORT,
        "cancel": CANCEL,
        "explain": EXPLAIN,
        "moving up": AGEING,
    }
    found: dict[str, float | None] = {
        title: point.costs[name].us if name in point.costs else None for title, name in named.items()
    }
    return {**found, "boarding": point.boarding_us}


def to_json(points: Sequence[Point], words: Mapping[str, str]) -> str:
    """Everything, a line for each cell."""
    rows = ",\n".join(f"  {json.dumps(_cell(point))}" for point in points)
    return f'{{\n "circumstances": {json.dumps(words)},\n "cells": [\n{rows}\n ]\n}}\n'


def to_markdown(points: Sequence[Point], words: Mapping[str, str], *, page: str) -> str:
    """The report for people; `page` is the file with the charts."""
    parts = [
        "# The admission ledger at scale",
        EXPLANATION,
        f"Charts: [{page}]({page})",
        "\n".join(f"- {name}: {text}" for name, text in words.items()),
    ]
    for title, note, rows in tables(points):
        parts += [f"## {title}", note, _table(rows)]
    parts += ["## The lines", "```\n" + "\n".join(point.line for point in points) + "\n```"]
    return "\n\n".join(parts) + "\n"


def tables(points: Sequence[Point]) -> list[tuple[str, str, list[list[str]]]]:
    """Title, note and rows of each table; the first row is the header."""
    return [
        (SCRIPTS, SCRIPTS_NOTE, _rows(points, _script_columns(points))),
        (RATES, RATES_NOTE, _rows(points, _rate_columns())),
        (BOUNDS, BOUNDS_NOTE, _rows(points, _bound_columns())),
    ]


def _cell(point: Point) -> dict[str, Any]:
    return {
        "line": point.line,
        **asdict(point),
        "script_us": script_figures(point),
        "scripts_alone_per_s": point.scripts_per_s,
        "closed_loop_per_s": point.saturation.admitted_per_wall_s,
        "per_core_s": point.saturation.admitted_per_core_s,
        "shares": point.saturation.shares,
        "bound_by": point.saturation.bound_by,
    }


def _script_columns(points: Sequence[Point]) -> list[Column]:
    titles = list(script_figures(points[0]))
    return [
        *((title, lambda point, title=title: shown(script_figures(point)[title], ".0f")) for title in titles),
        ("worst ms", lambda point: f"{point.worst.us / 1000:.1f} ({point.worst.script or UNKNOWN})"),
    ]


def _rate_columns() -> list[Column]:
    return [
        ("scripts alone /s", lambda point: f"{point.scripts_per_s[SETTLED[1]]:,.0f}"),
        ("closed loop /s", lambda point: f"{point.saturation.admitted_per_wall_s:,.0f}"),
        ("per core of Redis /s", lambda point: f"{point.saturation.admitted_per_core_s:,.0f}"),
        ("latency at /s", lambda point: f"{point.latency.rate_per_s:,.0f}"),
        ("core busy", lambda point: f"{point.latency.busy:.0%}"),
        ("p50 ms", lambda point: f"{point.latency.admission_ms[0]:.2f}"),
        ("p99 ms", lambda point: f"{point.latency.admission_ms[1]:.2f}"),
        ("bytes per waiting", lambda point: f"{point.bytes_per_waiting:,.0f}"),
        ("filled in s", lambda point: f"{point.fill_s:.1f}"),
    ]


def _bound_columns() -> list[Column]:
    names = ("scripts", "reports", "mailboxes", "network")
    return [
        ("Redis busy", lambda point: f"{point.saturation.busy:.0%}"),
        ("load busy", lambda point: f"{point.saturation.load_busy:.0%}"),
        *((name, lambda point, name=name: f"{point.saturation.shares[name]:.0%}") for name in names),
        ("bound by", lambda point: point.saturation.bound_by),
    ]


def _rows(points: Sequence[Point], columns: Sequence[Column]) -> list[list[str]]:
    head = ["executors", "queued", *(title for title, _ in columns)]
    return [
        head,
        *(
            [f"{point.scale.executors:,}", f"{point.scale.queued:,}", *(text(point) for _, text in columns)]
            for point in points
        ),
    ]


def _table(rows: Sequence[Sequence[str]]) -> str:
    head, *body = rows
    return "\n".join("| " + " | ".join(row) + " |" for row in (head, ["---"] * len(head), *body))
