"""Line charts and heat maps as SVG: text that a page embeds, and that costs milliseconds to draw."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from html import escape

WIDTH, HEIGHT = 560, 250
LEFT, RIGHT, TOP, BOTTOM = 56, 12, 28, 40  # margins
LEGEND_ROW = 18
COLOURS = ("#4477aa", "#ee6677", "#228833", "#ccbb44", "#66ccee", "#aa3377", "#8c6d46", "#888888")
MOST_NAMED = len(COLOURS)  # curves up to which the legend has all of them
MOST_MARKED = 40  # points up to which each has a mark
LEVELS = 100

Curve = Sequence[tuple[float, float]]


def line_chart(title: str, xlabel: str, curves: Mapping[str, Curve], share: bool = False) -> str:
    """Curves over steps; values that are not finite are left out.

    Args:
        curves: points by label; more than :data:`MOST_NAMED` are coloured as a sequence.
        share: the vertical axis is 0 to 1.
    """
    finite = {label: [p for p in points if math.isfinite(p[1])] for label, points in curves.items()}
    points = [point for curve in finite.values() for point in curve]
    xs, ys = _ticks([x for x, _ in points], whole=True), [0, 0.2, 0.4, 0.6, 0.8, 1.0]
    if not share:
        ys = _ticks([y for _, y in points])
    named = list(finite) if len(finite) <= MOST_NAMED else [next(iter(finite)), list(finite)[-1]]
    rows = math.ceil(len(named) / 2)
    height, bottom = HEIGHT + rows * LEGEND_ROW, HEIGHT - BOTTOM
    x_scale = (WIDTH - LEFT - RIGHT) / (xs[-1] - xs[0])
    y_scale = (TOP - bottom) / (ys[-1] - ys[0])
    colours = _colours(len(finite))

    def place(x: float, y: float) -> tuple[float, float]:
        return LEFT + (x - xs[0]) * x_scale, bottom + (y - ys[0]) * y_scale

    # what turns a place back into a value: for the line that follows the pointer
    scale = f"{xs[0]} {LEFT} {x_scale} {ys[0]} {bottom} {y_scale}"
    parts = [f'<svg class="chart" viewBox="0 0 {WIDTH} {height}" role="img" data-scale="{scale}">']
    parts.append(f'<text x="{LEFT}" y="16" class="name">{escape(title)}</text>')
    for y in ys:
        at = place(xs[0], y)[1]
        parts.append(f'<path class="grid" d="M{LEFT} {at:.1f}H{WIDTH - RIGHT}"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">{y:.4g}</text>')
    for x in xs:
        parts.append(f'<text x="{place(x, ys[0])[0]:.1f}" y="{bottom + 16}" text-anchor="middle">{x:g}</text>')
    parts.append(f'<text x="{(WIDTH + LEFT) / 2}" y="{bottom + 34}" text-anchor="middle">{escape(xlabel)}</text>')
    for (label, curve), colour in zip(finite.items(), colours, strict=True):
        places = [place(x, min(max(y, ys[0]), ys[-1])) for x, y in curve]
        line = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        parts.append(f'<polyline points="{line}" stroke="{colour}"><title>{escape(label)}</title></polyline>')
        if len(places) <= MOST_MARKED:
            parts += [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.2" fill="{colour}"/>' for x, y in places]
    for number, label in enumerate(named):
        left, row = LEFT + (number % 2) * (WIDTH - LEFT) / 2, HEIGHT + 12 + number // 2 * LEGEND_ROW
        colour = colours[list(finite).index(label)]
        parts.append(f'<rect x="{left:g}" y="{row - 9}" width="14" height="4" fill="{colour}"/>')
        parts.append(f'<text x="{left + 20:g}" y="{row - 3}">{escape(label)}</text>')
    return "\n".join([*parts, "</svg>"])


def heat_map(levels: Sequence[int], layers: int, heads: int) -> str:
    """A cell per KV head, a column per layer; ``levels``: gates in hundredths, layer by layer."""
    cell = min(36, (WIDTH - LEFT - RIGHT) // layers)
    colours, top = palette(), 20
    parts = [f'<svg class="chart heat" viewBox="0 0 {WIDTH} {top + heads * cell + 36}" role="img">']
    for index, level in enumerate(levels):
        layer, head = divmod(index, heads)
        x, y = LEFT + layer * cell, top + head * cell
        parts.append(
            f'<rect x="{x}" y="{y}" width="{cell - 1}" height="{cell - 1}" fill="{colours[level]}">'
            f"<title>layer {layer}, head {head}: {level / LEVELS:.2f}</title></rect>"
        )
    for layer in range(0, layers, 1 if layers <= 16 else 4):
        middle, below = LEFT + (layer + 0.5) * cell, top + heads * cell + 14
        parts.append(f'<text x="{middle:g}" y="{below}" text-anchor="middle">{layer}</text>')
    for head in range(heads):
        parts.append(f'<text x="{LEFT - 6}" y="{top + (head + 0.6) * cell:.1f}" text-anchor="end">{head}</text>')
    parts.append(f'<text x="{LEFT}" y="12">KV head by layer; dark: 0, light: 1</text>')
    return "\n".join([*parts, "</svg>"])


def palette() -> list[str]:
    """A colour for each gate in hundredths, dark to light."""
    from matplotlib import colormaps
    from matplotlib.colors import to_hex

    return [to_hex(colormaps["viridis"](level / LEVELS)) for level in range(LEVELS + 1)]


def _colours(number: int) -> list[str]:
    if number <= MOST_NAMED:
        return list(COLOURS[:number])
    shades = palette()
    return [shades[round(place * 90 / (number - 1))] for place in range(number)]


def _ticks(values: Sequence[float], whole: bool = False) -> list[float]:
    """At least two round numbers from below the smallest to above the largest value."""
    from matplotlib.ticker import MaxNLocator

    low, high = min(values, default=0.0), max(values, default=1.0)
    if low == high:
        low, high = (low - 1, high + 1) if whole else (min(low, 0.0), max(high, 0.0) or 1.0)
    return [float(tick) for tick in MaxNLocator(5, integer=whole).tick_values(low, high)]
