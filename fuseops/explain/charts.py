"""Charts of bars and of lines as SVG files, in colours that suit any page."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import NamedTuple
from urllib.parse import quote

LABEL, BAR, ROW, EDGE = 118, 15, 19, 14
BARS, LINES = 470, 742  # widths of a page
AXIS, PANEL_HEIGHT, TOP, LEGEND = 44, 190, 60, 18  # beside, in and above a panel, and a row below
COLORS = {"ours": "#0f766e", "peer": "#8c9bb0", "other": "#c6cfdb"}
LINE_COLORS = ("#0f766e", "#c2670c", "#6d4bc3", "#b4487c", "#4f7a1f")
MUTED_COLOR = "#9aa7b6"
STYLE = (
    "text{font:13px system-ui,'Segoe UI',Roboto,'Helvetica Neue',Arial,'DejaVu Sans',sans-serif;fill:#1b2430}"
    ".title{font-size:15px;font-weight:600}.soft{fill:#5d6b7c;font-size:12px}.name{font-weight:600}"
    ".range{stroke:#1b2430;stroke-width:1.5}"
)


class ChartBar(NamedTuple):
    """A `ChartBar` is a bar: its label, its length, the text at its end, and an interval that is drawn over it."""

    label: str
    value: float
    text: str
    kind: str  # a key of COLORS
    interval: tuple[float, float] | None = None  # such as quartiles

    @property
    def extent(self) -> float:
        """The value at which the drawing of the bar ends."""
        return max((self.value, *(self.interval or ())))


class ChartLine(NamedTuple):
    """A `ChartLine` goes through (x, y) points.

    label  its name in the legend; "" for none
    muted  it is grey; others have colours
    """

    label: str
    points: Sequence[tuple[float, float]]
    muted: bool = False


def bar_chart(
    title: str, note: str, groups: Mapping[str, Sequence[ChartBar]], label_width: int = 40
) -> str:
    """Groups of bars, one under the other, as the text of an SVG file.

    label_width: of the text at the end of the longest bar.
    """
    every = [bar for bars in groups.values() for bar in bars]
    longest = max(bar.extent for bar in every) or 1.0
    scale = (BARS - LABEL - label_width - 2 * EDGE) / longest
    y, parts = 62.0, []
    for group, bars in groups.items():
        parts.append(f'<text class="name" x="{EDGE}" y="{y:.0f}">{escape(group)}</text>')
        y += 8
        for bar in bars:
            parts += _bar(bar, y, scale)
            y += ROW
        y += 22
    return sheet(title, note, BARS, y - 18, parts)


def line_chart(title: str, note: str, panels: Sequence[Sequence[ChartLine]]) -> str:
    """Panels of lines side by side, each with axes of its own, as the text of an SVG file."""
    slot = (LINES - EDGE) / len(panels)
    parts = [p for k, lines in enumerate(panels) for p in _panel(lines, AXIS + k * slot, slot)]
    rows = max(sum(bool(line.label) for line in lines) for lines in panels)
    return sheet(title, note, LINES, TOP + PANEL_HEIGHT + 34 + LEGEND * rows, parts)


def sheet(title: str, note: str, width: int, height: float, parts: Sequence[str]) -> str:
    """SVG elements on a framed page with a title and a note, as the text of an SVG file."""
    head = (
        f'<text class="title" x="{EDGE}" y="24">{escape(title)}</text>'
        f'<text class="soft" x="{EDGE}" y="42">{escape(note)}</text>'
    )
    frame = f'width="{width - 1}" height="{height - 1:.0f}" rx="8" fill="#fff" stroke="#d5dce4"'
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" role="img" width="{width}" height="{height:.0f}" '
        f'viewBox="0 0 {width} {height:.0f}"><title>{escape(f"{title}: {note}")}</title><style>{STYLE}</style>'
        f'<rect x="0.5" y="0.5" {frame}/>{head}{"".join(parts)}</svg>\n'
    )


def image(svg: str) -> str:
    """An SVG file inside of an HTML page, whose styles do not apply to it."""
    return f'<img alt="" style="max-width:100%" src="data:image/svg+xml,{quote(svg)}">'


def ticks(low: float, high: float, count: int = 5) -> list[float]:
    """About `count` round numbers from low to high."""
    span = max(high - low, 1e-9)
    unit = 10.0 ** math.floor(math.log10(span / count))
    step = min((unit * m for m in (1, 2, 5, 10)), key=lambda s: abs(span / s - count))
    first = math.ceil(low / step - 1e-9)
    return [round(k * step, 10) for k in range(first, math.floor(high / step + 1e-9) + 1)]


def _bar(bar: ChartBar, y: float, scale: float) -> list[str]:
    left, middle = LABEL + EDGE, y + BAR - 3
    end = left + bar.extent * scale
    parts = [
        f'<text class="soft" x="{left - 8}" y="{middle:.0f}" text-anchor="end">{escape(bar.label)}</text>',
        f'<rect x="{left}" y="{y:.0f}" width="{bar.value * scale:.1f}" height="{BAR}" rx="2" '
        f'fill="{COLORS[bar.kind]}"/>',
        f'<text x="{end + 6:.1f}" y="{middle:.0f}">{escape(bar.text)}</text>',
    ]
    if bar.interval is not None:
        low, high = (left + value * scale for value in bar.interval)
        at = y + BAR / 2
        parts.append(f'<line class="range" x1="{low:.1f}" x2="{high:.1f}" y1="{at}" y2="{at}"/>')
    return parts


def _panel(lines: Sequence[ChartLine], left: float, slot: float) -> Iterator[str]:
    """One panel of lines: axes, lines, and the legend below.   slot: its width with the axis"""
    xs, ys = zip(*(point for line in lines for point in line.points), strict=True)
    wide, bottom, low = slot - AXIS - 30, TOP + PANEL_HEIGHT, min(ys)
    across, up = wide / (max(xs) - min(xs) or 1), PANEL_HEIGHT / (max(ys) - low or 1)

    def at(x: float, y: float) -> tuple[float, float]:
        return left + (x - min(xs)) * across, bottom - (y - low) * up

    for value in ticks(low, max(ys)):
        _, y = at(0, value)
        yield f'<path d="M{left:.0f} {y:.1f}h{wide:.0f}" stroke="#e4e9ef"/>'
        yield f'<text class="soft" x="{left - 6:.0f}" y="{y + 4:.1f}" text-anchor="end">{value:g}</text>'
    for value in ticks(min(xs), max(xs)):
        x, _ = at(value, 0)
        yield f'<text class="soft" x="{x:.1f}" y="{bottom + 17}" text-anchor="middle">{value:g}</text>'
    legend, colors = bottom + 36, iter(LINE_COLORS)
    for line in lines:
        color = MUTED_COLOR if line.muted else next(colors)
        points = " ".join(f"{x:.1f},{y:.1f}" for x, y in (at(*point) for point in line.points))
        yield f'<polyline points="{points}" fill="none" stroke="{color}" stroke-width="1.5"/>'
        if line.label:
            yield f'<rect x="{left:.0f}" y="{legend - 8}" width="18" height="4" fill="{color}"/>'
            yield f'<text class="soft" x="{left + 25:.0f}" y="{legend}">{escape(line.label)}</text>'
            legend += LEGEND
