"""Charts as HTML.

Words and numbers are HTML, so that they keep their size on a phone. Only lines and areas are SVG, which stretches with
its box. All text is escaped here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

from inflight.bench.report.scale import Scale, log_scale
from inflight.bench.report.table import Spread

# Units of an SVG's own; the box on the page decides how large they are.
WIDTH, HEIGHT = 1000, 300
NUM_COLOURS = 8
# Tokens of one frame arrive together. Their distance is 0, which an axis by powers of ten does not have.
LEAST_MS = 0.1


@dataclass(frozen=True, slots=True)
class Bar:
    """One bar: `colour` is the index of its mode, `text` what stands at its end."""

    name: str
    colour: int
    spread: Spread
    text: str


@dataclass(frozen=True, slots=True)
class Line:
    """One curve: points (x, y) by x."""

    name: str
    colour: int
    points: Sequence[tuple[float, float]]


def figure(title: str, note: str, body: str, *, is_wide: bool = False) -> str:
    """Returns a chart with its title and a note of what it shows."""
    caption = f'<b>{escape(title)}</b><span class="note">{escape(note)}</span>'
    return f"<figure{' class=wide' if is_wide else ''}><figcaption>{caption}</figcaption>{body}</figure>"


def bars(rows: Sequence[Bar]) -> str:
    """Horizontal bars from 0 to the median, with a line over the range."""
    most = max((row.spread.most for row in rows), default=0.0) or 1.0
    return f'<div class="bars">{"".join(_bar(row, most) for row in rows)}</div>'


def _bar(row: Bar, most: float) -> str:
    median, least, high = (100 * value / most for value in (row.spread.median, row.spread.least, row.spread.most))
    colour = f"var(--c{row.colour % NUM_COLOURS})"
    span = f'<i class="range" style="left:{least:.2f}%;width:{high - least:.2f}%"></i>' if high > least else ""
    return (
        f'<div class="row"><span class="name">{escape(row.name)}</span>'
        f'<span class="track"><i class="bar" style="width:{median:.2f}%;background:{colour}"></i>'
        f"{span}</span>"
        f'<span class="value">{escape(row.text)}</span></div>'
    )


def curves(lines: Sequence[Line], x: Scale, y: Scale, unit: str) -> str:
    """Lines over two axes, with a legend."""
    drawn = "".join(_curve(line, x, y) for line in lines)
    plot = f"{_y_labels(y, y.ticks())}{_svg(_grid(x, y, y.ticks()) + drawn)}"
    return f'{legend([(line.name, line.colour) for line in lines])}<div class="plot">{plot}</div>{_x_labels(x, unit)}'


def percentile_curves(title: str, percentiles: Sequence[Line]) -> str:
    """Returns the share of the times that is at most so long. Points of the lines are (percent, milliseconds)."""
    lines = [
        Line(line.name, line.colour, [(max(ms, LEAST_MS), percent) for percent, ms in line.points])
        for line in percentiles
        if line.points
    ]
    if not lines:
        return ""
    x = log_scale((ms for line in lines for ms, _ in line.points), LEAST_MS)
    note = "percent that took at most so long; further left is better"
    return figure(title, note, curves(lines, x, Scale(0, 100), "ms"))


def area(line: Line, x: Scale, y: Scale, caption: str) -> str:
    """One filled step curve, for a column of them over one axis."""
    corners = _steps(line.points)
    if not corners:
        return ""
    ends = (y.low, y.high)
    inside = " ".join(_point(point, x, y) for point in corners)
    first, last = _across(corners[0][0], x), _across(corners[-1][0], x)
    colour = f"var(--c{line.colour % NUM_COLOURS})"
    shape = f'<polygon points="{first},{HEIGHT} {inside} {last},{HEIGHT}" fill="{colour}"/>'
    name = f'<i class="swatch" style="background:{colour}"></i><b>{escape(line.name)}</b>'
    return (
        f'<p class="panel">{name} {escape(caption)}</p>'
        f'<div class="plot low">{_y_labels(y, ends)}{_svg(_grid(x, y, ends) + shape)}</div>'
    )


def x_axis(x: Scale, unit: str) -> str:
    """Returns the labels below a column of areas."""
    return _x_labels(x, unit)


def legend(names: Sequence[tuple[str, int]]) -> str:
    """Returns the colour of each name."""
    entries = "".join(
        f'<span><i class="swatch" style="background:var(--c{colour % NUM_COLOURS})"></i>{escape(name)}</span>'
        for name, colour in names
    )
    return f'<div class="legend">{entries}</div>'


def _svg(body: str) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" preserveAspectRatio="none" role="img">{body}</svg>'


def _curve(line: Line, x: Scale, y: Scale) -> str:
    points = " ".join(_point(point, x, y) for point in line.points)
    dashes = ' stroke-dasharray="6 3"' if line.colour % 2 else ""
    return (
        f'<polyline points="{points}" fill="none" stroke="var(--c{line.colour % NUM_COLOURS})"{dashes}>'
        f"<title>{escape(line.name)}</title></polyline>"
    )


def _steps(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """Returns the corners of a curve that holds each value until the next one."""
    corners: list[tuple[float, float]] = []
    for at, value in points:
        if corners and corners[-1][1] != value:
            corners.append((at, corners[-1][1]))
        if not corners or corners[-1][1] != value:
            corners.append((at, value))
    if points and corners[-1][0] != points[-1][0]:
        corners.append(points[-1])
    return corners


def _point(point: tuple[float, float], x: Scale, y: Scale) -> str:
    return f"{_across(point[0], x)},{round(HEIGHT * (1 - y.at(point[1])), 1):g}"


def _across(value: float, x: Scale) -> str:
    return f"{round(WIDTH * x.at(value), 1):g}"


def _grid(x: Scale, y: Scale, levels: Iterable[float]) -> str:
    across = "".join(f'<path d="M0 {HEIGHT * (1 - y.at(tick)):.1f}H{WIDTH}"/>' for tick in levels)
    along = "".join(f'<path d="M{WIDTH * x.at(tick):.1f} 0V{HEIGHT}"/>' for tick in x.ticks())
    return f'<g class="grid">{across}{along}</g>'


def _y_labels(y: Scale, levels: Iterable[float]) -> str:
    labels = "".join(f'<span style="bottom:{100 * y.at(tick):.2f}%">{tick:g}</span>' for tick in levels)
    return f'<div class="y">{labels}</div>'


def _x_labels(x: Scale, unit: str) -> str:
    labels = "".join(f'<span style="left:{100 * x.at(tick):.2f}%">{tick:g}</span>' for tick in x.ticks())
    return f'<div class="x">{labels}</div><div class="unit">{escape(unit)}</div>'
