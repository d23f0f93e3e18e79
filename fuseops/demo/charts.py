"""Two charts as inline SVG: curves and bars. Colours come from the page's style."""

import math
from collections.abc import Sequence
from html import escape
from typing import NamedTuple

WIDTH, HEIGHT = 760, 320
LEFT, RIGHT, TOP, BOTTOM = 52, 16, 28, 40
BAR, GAP, LABELS = 26, 16, 190


class Line(NamedTuple):
    """A `Line` goes through (x, y) points; `kind` is its CSS class."""

    label: str
    kind: str
    points: Sequence[tuple[float, float]]


class Bar(NamedTuple):
    label: str
    value: float
    text: str  # what is written beside it


def ticks(low: float, high: float, wanted: int = 5) -> list[float]:
    """Round numbers from low to high, about as many as wanted."""
    span = max(high - low, 1e-9)
    unit = 10.0 ** math.floor(math.log10(span / wanted))
    step = min((unit * m for m in (1, 2, 5, 10)), key=lambda s: abs(span / s - wanted))
    first = math.ceil(low / step - 1e-9)
    return [round(k * step, 10) for k in range(first, math.floor(high / step + 1e-9) + 1)]


def smooth(values: Sequence[float], window: int = 15) -> list[tuple[float, float]]:
    """(step, mean of the last few values): single batches are too noisy to read."""
    points = []
    for k in range(len(values)):
        part = values[max(0, k + 1 - window) : k + 1]
        points.append((k + 1.0, sum(part) / len(part)))
    return points


def curves(lines: Sequence[Line], x_label: str, y_label: str) -> str:
    """Lines over one pair of axes, with a legend."""
    points = [p for line in lines for p in line.points]
    x_high = max(max(x for x, _ in points), 1.0)
    low, high = min(y for _, y in points), max(y for _, y in points)
    pad = 0.05 * max(high - low, 0.1)
    low, high = low - pad, high + pad

    def at(x: float, y: float) -> tuple[float, float]:
        return (
            LEFT + (WIDTH - LEFT - RIGHT) * x / x_high,
            TOP + (HEIGHT - TOP - BOTTOM) * (high - y) / (high - low),
        )

    parts = [*_grid(at, x_high, low, high)]
    for line in lines:
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in (at(*p) for p in line.points))
        parts.append(f'<polyline class="curve {line.kind}" points="{path}"/>')
    parts += [
        f'<text class="label" x="{WIDTH - RIGHT}" y="{HEIGHT - 6}">{escape(x_label)}</text>',
        f'<text class="tick" x="{LEFT + 6}" y="10">{escape(y_label)}</text>',
    ]
    legend = "".join(
        f'<span><i class="{line.kind}"></i>{escape(line.label)}</span>' for line in lines
    )
    return f'{_svg(WIDTH, HEIGHT, parts)}<p class="legend">{legend}</p>'


def _grid(at, x_high: float, low: float, high: float) -> list[str]:
    parts = []
    for y in ticks(low, high):
        _, row = at(0, y)
        parts.append(f'<path class="rule" d="M{LEFT} {row:.1f}H{WIDTH - RIGHT}"/>')
        parts.append(f'<text class="label" x="{LEFT - 8}" y="{row:.1f}">{y:g}</text>')
    for x in ticks(0, x_high):
        column, _ = at(x, low)
        parts.append(
            f'<text class="label" x="{column:.1f}" y="{HEIGHT - BOTTOM + 16}">{x:g}</text>'
        )
    return parts


def bars(rows: Sequence[Bar]) -> str:
    """Horizontal bars from zero, one below the other."""
    height = len(rows) * (BAR + GAP)
    longest = max([row.value for row in rows] + [1e-9])
    room = WIDTH - LABELS - 140
    parts = []
    for k, row in enumerate(rows):
        top = k * (BAR + GAP) + GAP / 2
        middle, length = top + BAR / 2, max(2.0, room * max(row.value, 0) / longest)
        parts += [
            f'<text class="label" x="{LABELS - 12}" y="{middle}">{escape(row.label)}</text>',
            f'<rect class="b{k}" x="{LABELS}" y="{top}" width="{length:.1f}" height="{BAR}"/>',
            f'<text class="tick" x="{LABELS + length + 8:.1f}" y="{middle}">'
            f"{escape(row.text)}</text>",
        ]
    return _svg(WIDTH, height, parts)


def _svg(width: float, height: float, parts: Sequence[str]) -> str:
    return (
        f'<svg class="chart" viewBox="0 0 {width} {height}" width="{width}" role="img">'
        f"{''.join(parts)}</svg>"
    )
