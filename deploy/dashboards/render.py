"""A renderer of the dashboard: draws its panels from a live Prometheus into one picture, for use without Grafana.

python deploy/dashboards/render.py --prometheus http://127.0.0.1:9090 --minutes 10 --output dashboard.png
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
import time
import urllib.parse
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib import pyplot
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter

DASHBOARD = Path(__file__).with_name("inflight.json")
NUM_COLUMNS = 3
NUM_POINTS = 240
MAX_LABELS = 10


@dataclass(frozen=True, slots=True)
class Series:
    """One line of a panel; minutes are from now, so negative."""

    label: str
    minutes: Sequence[float]
    values: Sequence[float]


def main() -> int:
    """Draws; returns 1 if Prometheus has nothing for any panel."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prometheus", default="http://127.0.0.1:9090", help="where Prometheus answers")
    parser.add_argument("--minutes", type=float, default=10.0, help="how far back")
    parser.add_argument("--interval", default="30s", help="what rates are taken over; four scrapes or more")
    parser.add_argument("--output", type=Path, default=Path("dashboard.png"))
    args = parser.parse_args()
    dashboard = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    until = time.time()
    step_s = max(1.0, args.minutes * 60 / NUM_POINTS)
    rows = [
        (title, [(panel, list(_series(args, panel, until, step_s))) for panel in panels])
        for title, panels in _rows(dashboard["panels"])
    ]
    _draw(rows, args.output)
    empty = [panel["title"] for _, panels in rows for panel, series in panels if not series]
    num_panels = sum(len(panels) for _, panels in rows)
    print(f"{args.output}: {num_panels} panels, {len(empty)} without figures", *empty, sep="\n  ")
    return int(len(empty) == num_panels)


def _rows(panels: Sequence[dict[str, Any]]) -> list[tuple[str, list[dict[str, Any]]]]:
    rows: list[tuple[str, list[dict[str, Any]]]] = []
    for panel in panels:
        if panel["type"] == "row":
            rows.append((panel["title"], []))
        else:
            rows[-1][1].append(panel)
    return rows


def _series(args: argparse.Namespace, panel: dict[str, Any], until: float, step_s: float) -> Iterator[Series]:
    for target in panel["targets"]:
        query = target["expr"].replace("$__rate_interval", args.interval)
        query = re.sub(r"\$(namespace|model)", ".*", query)
        for one in _query_range(args.prometheus, query, until - args.minutes * 60, until, step_s):
            points = [((at - until) / 60, float(value)) for at, value in one["values"]]
            points = [(at, value) for at, value in points if math.isfinite(value)]
            if points:
                minutes, values = zip(*points, strict=True)
                yield Series(_label(target["legendFormat"], one["metric"]), minutes, values)


def _query_range(prometheus: str, query: str, since: float, until: float, step_s: float) -> list[dict[str, Any]]:
    asked = urllib.parse.urlencode({"query": query, "start": since, "end": until, "step": step_s})
    with urllib.request.urlopen(f"{prometheus}/api/v1/query_range?{asked}", timeout=30) as response:
        result: list[dict[str, Any]] = json.load(response)["data"]["result"]
    return result


def _label(template: str, labels: Mapping[str, str]) -> str:
    return re.sub(r"\{\{\s*(\w+)\s*\}\}", lambda match: labels.get(match[1], ""), template)


def _draw(rows: Sequence[tuple[str, list[tuple[dict[str, Any], list[Series]]]]], output: Path) -> None:
    mpl.use("Agg")
    lines = [
        (title if not at else "", panels[at : at + NUM_COLUMNS])
        for title, panels in rows
        for at in range(0, len(panels), NUM_COLUMNS)
    ]
    figure, grid = pyplot.subplots(len(lines), NUM_COLUMNS, figsize=(18, 2.9 * len(lines)), squeeze=False)
    for axes_of_line, (title, panels) in zip(grid, lines, strict=True):
        for axes in axes_of_line[len(panels) :]:
            axes.set_visible(False)
        for axes, (panel, series) in zip(axes_of_line, panels, strict=False):
            _draw_panel(axes, panel, series)
        if title:
            axes_of_line[0].annotate(
                title, (0, 1.22), xycoords="axes fraction", fontsize=13, fontweight="bold", color="#333333"
            )
    figure.tight_layout(h_pad=2.2)
    figure.savefig(output, dpi=75)


def _draw_panel(axes: Axes, panel: dict[str, Any], series: Sequence[Series]) -> None:
    defaults = panel["fieldConfig"]["defaults"]
    axes.set_title(panel["title"], fontsize=10, loc="left")
    axes.tick_params(labelsize=7)
    axes.grid(alpha=0.25)
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: _amount(value, defaults["unit"])))
    for one in series:
        axes.plot(one.minutes, one.values, linewidth=1.2, label=one.label)
    if not series:
        axes.text(0.5, 0.5, "no figures", ha="center", va="center", transform=axes.transAxes, color="#888888")
        return
    axes.set_ylim(bottom=0)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g} min"))
    axes.legend(*(found[:MAX_LABELS] for found in axes.get_legend_handles_labels()), fontsize=7, framealpha=0.6)


def _amount(value: float, unit: str) -> str:
    if unit == "percentunit":
        return f"{value:.0%}"
    if unit == "s":
        return f"{value * 1000:g} ms" if value < 1 else f"{value:g} s"
    return f"{value:g}"


if __name__ == "__main__":
    sys.exit(main())
