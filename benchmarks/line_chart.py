"""Lines as an image of their own, in the manner of the bars of `fuseops.explain.charts`."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape
from typing import NamedTuple

from fuseops.explain.charts import sheet

PANEL, HEIGHT, TOP, EDGE, LEGEND = 320, 190, 60, 44, 18
COLORS = {
    "other": "#9aa7b6",
    "fp8_square": "#0f766e",
    "float8_block": "#0f766e",
    "fp8_block": "#c2670c",
    "float8_current": "#c2670c",
    "fp8_bf16_wgrad": "#6d4bc3",
    "float8_delayed": "#b4487c",
    "mxfp8": "#6d4bc3",
    "nvfp4": "#4f7a1f",
}


class Line(NamedTuple):
    """A line, and its name in the legend, "" where another line of its colour has it."""

    label: str
    points: Sequence[tuple[float, float]]
    kind: str  # a key of COLORS


def line_chart(title: str, note: str, panels: Sequence[Sequence[Line]]) -> str:
    """Panels of lines side by side, each with axes of its own, as the text of an SVG file."""
    parts: list[str] = []
    for number, lines in enumerate(panels):
        parts += _panel(lines, EDGE + number * (PANEL + EDGE))
    width = len(panels) * (PANEL + EDGE) + 14
    height = TOP + HEIGHT + 34 + LEGEND * max(sum(bool(line.label) for line in p) for p in panels)
    return sheet(title, note, width, height, parts)


def _panel(lines: Sequence[Line], left: float) -> list[str]:
    xs = [x for line in lines for x, _ in line.points]
    ys = [y for line in lines for _, y in line.points]
    low, high, bottom = min(ys), max(ys), TOP + HEIGHT
    wide, tall = (PANEL - 30) / (max(xs) - min(xs)), HEIGHT / (high - low)
    parts = []
    for value in (low, (low + high) / 2, high):
        y = bottom - (value - low) * tall
        parts += [
            f'<line x1="{left}" x2="{left + PANEL - 30}" y1="{y:.1f}" y2="{y:.1f}" stroke="#e4e9ef"/>',
            f'<text class="soft" x="{left - 6}" y="{y + 4:.1f}" text-anchor="end">{value:.2f}</text>',
        ]
    for value, anchor in ((min(xs), "start"), (max(xs), "end")):
        x = left + (value - min(xs)) * wide
        text = f"step {value:.0f}"
        parts.append(
            f'<text class="soft" x="{x:.1f}" y="{bottom + 17}" text-anchor="{anchor}">{text}</text>'
        )
    legend = bottom + 36
    for line in lines:
        color = COLORS[line.kind]
        at = " ".join(
            f"{left + (x - min(xs)) * wide:.1f},{bottom - (y - low) * tall:.1f}"
            for x, y in line.points
        )
        parts.append(f'<polyline points="{at}" fill="none" stroke="{color}" stroke-width="1.5"/>')
        if line.label:
            parts += [
                f'<rect x="{left}" y="{legend - 8}" width="18" height="4" fill="{color}"/>',
                f'<text class="soft" x="{left + 25}" y="{legend}">{escape(line.label)}</text>',
            ]
            legend += LEGEND
    return parts
