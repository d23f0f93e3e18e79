"""Bars become an image of their own: an SVG file, in colours that stand on any page."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import NamedTuple

WIDTH, LABEL, BAR, ROW, EDGE = 470, 118, 15, 19, 14
COLORS = {"ours": "#0f766e", "peer": "#8c9bb0", "other": "#c6cfdb"}
STYLE = (
    "text{font:13px system-ui,'Segoe UI',Roboto,'Helvetica Neue',Arial,'DejaVu Sans',sans-serif;fill:#1b2430}"
    ".title{font-size:15px;font-weight:600}.soft{fill:#5d6b7c;font-size:12px}.name{font-weight:600}"
    ".range{stroke:#1b2430;stroke-width:1.5}"
)


class ChartBar(NamedTuple):
    """A `ChartBar` is a bar: what it stands for, its length, what is written at its end, and what was in between."""

    label: str
    value: float
    text: str
    kind: str  # a key of COLORS
    between: tuple[float, float] | None = None  # drawn over it, such as quartiles

    @property
    def reach(self) -> float:
        """The value at which the drawing of the bar ends."""
        return max((self.value, *(self.between or ())))


def bar_chart(
    title: str, note: str, groups: Mapping[str, Sequence[ChartBar]], room: int = 40
) -> str:
    """Groups of bars, one under the other, as the text of an SVG file.

    room: for what is written at the end of the longest bar.
    """
    every = [bar for bars in groups.values() for bar in bars]
    longest = max(bar.reach for bar in every) or 1.0
    scale = (WIDTH - LABEL - room - 2 * EDGE) / longest
    y, parts = 62.0, []
    for group, bars in groups.items():
        parts.append(f'<text class="name" x="{EDGE}" y="{y:.0f}">{escape(group)}</text>')
        y += 8
        for bar in bars:
            parts += _bar(bar, y, scale)
            y += ROW
        y += 22
    return sheet(title, note, WIDTH, y - 18, parts)


def sheet(title: str, note: str, width: int, height: float, parts: Sequence[str]) -> str:
    """What is drawn, on a framed page under its title and note, as the text of an SVG file."""
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


def _bar(bar: ChartBar, y: float, scale: float) -> list[str]:
    left, middle = LABEL + EDGE, y + BAR - 3
    end = left + bar.reach * scale
    parts = [
        f'<text class="soft" x="{left - 8}" y="{middle:.0f}" text-anchor="end">{escape(bar.label)}</text>',
        f'<rect x="{left}" y="{y:.0f}" width="{bar.value * scale:.1f}" height="{BAR}" rx="2" '
        f'fill="{COLORS[bar.kind]}"/>',
        f'<text x="{end + 6:.1f}" y="{middle:.0f}">{escape(bar.text)}</text>',
    ]
    if bar.between is not None:
        low, high = (left + value * scale for value in bar.between)
        at = y + BAR / 2
        parts.append(f'<line class="range" x1="{low:.1f}" x2="{high:.1f}" y1="{at}" y2="{at}"/>')
    return parts
