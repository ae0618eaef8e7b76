"""Draws the time line of the seats: one panel for each run, all on one time axis."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from bench.measures import Run

_COLOURS = {"inflight": "#2a7f62", "static": "#b3541e"}
_OTHER_COLOUR = "#3f5f8a"


def draw_seats(runs: Sequence[Run], title: str, path: Path) -> None:
    """Writes a PNG. matplotlib is imported here: nothing but the report needs it."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure
    from matplotlib.ticker import MaxNLocator

    figure = Figure(figsize=(10, 1.2 + 2.2 * len(runs)), layout="constrained")
    FigureCanvasAgg(figure)
    figure.suptitle(title)
    panels = figure.subplots(len(runs), 1, sharex=True, sharey=True, squeeze=False)
    for panel, run in zip(panels[:, 0], runs, strict=True):
        colour = _COLOURS.get(run.mode, _OTHER_COLOUR)
        seats = max((sample.seats_total for sample in run.samples), default=0)
        times = [sample.at_s for sample in run.samples]
        panel.fill_between(times, [sample.seats_used for sample in run.samples], step="post", color=colour, alpha=0.85)
        panel.axhline(seats, color="grey", linewidth=0.8, linestyle="--")
        panel.set_ylabel("seats in use")
        panel.set_title(_caption(run, seats), loc="left", fontsize="medium")
    panels[-1, 0].set_xlabel("seconds since the first request")
    panels[-1, 0].set_xlim(left=0)
    panels[-1, 0].set_ylim(bottom=0)
    panels[-1, 0].yaxis.set_major_locator(MaxNLocator(integer=True))
    figure.savefig(path, dpi=120)


def _caption(run: Run, seats: int) -> str:
    measures = run.measures
    mean = "" if measures.mean_seats is None else f", {measures.mean_seats:.1f} of {seats} seats in use on average"
    return f"{run.mode}: {measures.total_s:.1f} s, {measures.output_tokens_per_s:.1f} output tokens/s{mean}"
