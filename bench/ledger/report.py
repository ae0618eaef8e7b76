"""The report of the ledger at several sizes of the pool, with charts against the length of the queue. Pure."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

from pydantic import TypeAdapter

from inflight.bench.ledger.figures import (
    AGEING,
    BATCHED,
    CANCEL,
    EXPLAIN,
    PLACED,
    QUEUED,
    REPORT,
    SETTLED,
    Point,
    batched,
    refilled,
)
from inflight.bench.report.charts import Line, curves, figure
from inflight.bench.report.page import Page, Part
from inflight.bench.report.scale import even_scale, log_scale
from inflight.bench.report.table import UNKNOWN, Table, shown

Column = tuple[str, Callable[[Point], str]]

KIND = "admission"
EXPLANATION = """\
Every end frees a seat that a waiting request takes, and for every placed request a new one arrives, so the queue keeps
its length. Each settle carries ends of one executor, as the step frame does that it follows."""
SCRIPTS_NOTE = """\
Boarding is what a settle of 16 costs more, for each end, where waiting requests take the seats. Moving up: a settle of
one end together with about one move of a waiting request to the class above, which each makes at most twice. Worst:
the longest single call of the cell by Redis' slow log, including what else held the core meanwhile."""
RATES_NOTE = """\
Scripts alone: what a core would do that ran nothing but submits and settles of 4. Closed loop: what went through with
all of it, requests, replies, mailboxes, reports, reaping, from one load generator; µs of Redis are its processor time
for each admitted request, which other work on the machine changes least. Latency at the rate and with Redis' core
busy as shown: of a submit its round trip, of a seat the time from an end until the owner of the request that takes the
seat is told. The lateness of the load generator is not included."""
BOUNDS_NOTE = "Shares are of Redis' processor time in the closed loop."
# Charts of what Redis spends on a call.
CALLS = ("submit, placed", "submit, queued", f"settle of {SETTLED[1]}", "boarding", "cancel", "explain", "report")


def script_figures(point: Point) -> dict[str, float | None]:
    """Microseconds by script."""
    named = {
        "submit, placed": PLACED,
        "submit, queued": QUEUED,
        **{f"submits of {num}": batched(num) for num in BATCHED},
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


def values_of(points: Sequence[Point], circumstances: Mapping[str, str]) -> dict[str, Any]:
    return {"report": KIND, "circumstances": circumstances, "cells": [_cell(point) for point in points]}


def page_of(values: Mapping[str, Any]) -> Page:
    """Returns the page of a report that is given as values."""
    points = TypeAdapter(list[Point]).validate_python(values["cells"])
    parts = [
        Part("Microseconds of Redis for a script call", SCRIPTS_NOTE, table=_table(points, _script_columns(points))),
        Part("Requests admitted", RATES_NOTE, table=_table(points, _rate_columns())),
        Part("What bounds it", BOUNDS_NOTE, table=_table(points, _bound_columns())),
    ]
    lines = [point.line for point in points]
    return Page("The admission ledger at scale", values["circumstances"], parts, EXPLANATION, _charts(points), lines)


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
        ("µs of Redis", lambda point: f"{point.saturation.redis_us:.0f}"),
        ("latency at /s", lambda point: f"{point.latency.rate_per_s:,.0f}"),
        ("core busy", lambda point: f"{point.latency.busy:.0%}"),
        ("submit p50 ms", lambda point: f"{point.latency.submit_ms[0]:.2f}"),
        ("p99", lambda point: f"{point.latency.submit_ms[1]:.2f}"),
        ("seat p50 ms", lambda point: f"{point.latency.seat_ms[0]:.2f}"),
        ("p99 of it", lambda point: f"{point.latency.seat_ms[1]:.2f}"),
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


def _table(points: Sequence[Point], columns: Sequence[Column]) -> Table:
    rows = [
        [f"{point.scale.executors:,}", f"{point.scale.queued:,}", *(text(point) for _, text in columns)]
        for point in points
    ]
    return Table(["executors", "queued", *(title for title, _ in columns)], rows)


def _charts(points: Sequence[Point]) -> str:
    less, more = "less is better", "more is better"
    charts = [
        _chart(points, "Admitted per second, closed loop", more, lambda point: point.saturation.admitted_per_wall_s),
        _chart(points, "Admitted per second, scripts alone", more, lambda point: point.scripts_per_s[SETTLED[1]]),
        _chart(points, "Redis' core for an admitted request, µs", less, lambda point: point.saturation.redis_us),
        _chart(points, "Submit, p99 ms at a moderate rate", less, lambda point: point.latency.submit_ms[1]),
        _chart(points, "Seat, p99 ms at a moderate rate", less, lambda point: point.latency.seat_ms[1]),
        *(_chart(points, f"{call}, µs a call", less, partial(_us, call)) for call in CALLS),
        _chart(points, "Worst single call, ms", less, lambda point: point.worst.us / 1000),
        _chart(points, "Redis' memory, MB", less, lambda point: point.memory_bytes / 1e6),
    ]
    return "".join(charts)


def _us(call: str, point: Point) -> float:
    return script_figures(point)[call] or 0.0


def _chart(points: Sequence[Point], title: str, note: str, value: Callable[[Point], float]) -> str:
    """Returns a figure against the length of the queue, with a curve for each number of executors."""
    executors = sorted({point.scale.executors for point in points})
    lines = [
        Line(
            f"{number:,} executors",
            colour,
            sorted((float(point.scale.queued), value(point)) for point in points if point.scale.executors == number),
        )
        for colour, number in enumerate(executors)
    ]
    x = log_scale((float(point.scale.queued) for point in points), 1.0)
    y = even_scale(1.1 * max(value(point) for point in points))
    return figure(title, note, curves(lines, x, y, "requests in the queue"))
