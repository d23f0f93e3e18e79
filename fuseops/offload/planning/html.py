"""A plan as HTML: bytes on the device, the lanes on one clock, and the table. One self-contained
page, without a script.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from html import escape

from fuseops.explain.charts import ticks
from fuseops.explain.html import STYLE, breakable, cell, document, table, tiles
from fuseops.words import size

from .plan_data import PlanData
from .simulate import Level
from .text import TIMES, facts, ranks, rows
from .trace import intervals

WIDTH, LEFT, CHART, LANE = 1020, 76, 180, 26
LEAST = 640  # narrower, the drawing scrolls
MORE_STYLE = """
.fuseops .plan text{text-anchor:start}
.fuseops .plan .tick{text-anchor:middle;fill:var(--soft);font-size:11px}
.fuseops .plan .label{text-anchor:end;fill:var(--soft);font-size:11px}
.fuseops .plan .grid{stroke:var(--line)}
.fuseops .plan .before{fill:var(--node);stroke:var(--soft);stroke-dasharray:3 3}
.fuseops .plan .after{fill:var(--bar);fill-opacity:.55;stroke:var(--forward)}
.fuseops .plan .budget{stroke:var(--miss);stroke-width:1.5;stroke-dasharray:6 3}
.fuseops .plan .peak{fill:var(--miss)}
.fuseops .plan .f{fill:var(--forward)}
.fuseops .plan .b{fill:var(--backward)}
.fuseops .plan .d2h{fill:var(--joint)}
.fuseops .plan .h2d{fill:var(--bar)}
.fuseops .plan .stall{fill:var(--miss)}
.fuseops .key{font-size:12px;color:var(--soft);margin:8px 0 0}
.fuseops .key i{display:inline-block;width:10px;height:10px;border-radius:2px;margin:0 5px 0 14px}
.fuseops .decided :is(td,th){padding-right:14px}
.fuseops .decided :is(td,th):last-child{padding-right:0}
.fuseops .decided .mono{overflow-wrap:break-word}
.fuseops .decided td:nth-child(4){min-width:12em}
@media(max-width:760px){
.fuseops .decided :is(td,th):nth-child(n+5){display:none}
.fuseops .decided :is(td,th){padding-right:8px}
.fuseops .decided .mono{overflow-wrap:anywhere;min-width:7em}
.fuseops .decided :is(td,th):nth-child(4){min-width:0;padding-right:0}
}
@media(max-width:560px){
.fuseops .decided thead{display:none}
.fuseops .decided tr{display:grid;grid-template-columns:1fr auto;padding:6px 0;border-top:1px solid var(--line)}
.fuseops .decided td{padding:0;border:0}
.fuseops .decided td:nth-child(odd){grid-column:1}
.fuseops .decided td:is(:nth-child(1),:nth-child(4)){grid-column:1/-1}
.fuseops .decided td.number{grid-row:2;grid-column:2}
.fuseops .decided td:nth-child(3){grid-row:2}
}
.fuseops th{text-align:left;font-weight:600;color:var(--soft);padding:0 18px 6px 0}
.fuseops th.number{text-align:right}
.fuseops .wide{overflow-x:auto}
.fuseops details{margin:0 0 16px}
.fuseops summary{cursor:pointer;margin:0 0 10px}
.fuseops summary h2{display:inline}
.fuseops a{color:var(--forward)}
.fuseops .offload{color:var(--joint);font-weight:600}
.fuseops .recompute,.fuseops .dispatch{color:var(--backward);font-weight:600}
.fuseops .warning{color:var(--miss);background:var(--missback);border:1px solid var(--miss);
border-radius:8px;padding:8px 12px;margin:0 0 12px}
"""


def page(plan: PlanData) -> str:
    """A whole document."""
    return document(f"Offload plan of {plan.profile.model}", "".join(_body(plan)), MORE_STYLE)


def page_of_ranks(plans: Sequence[PlanData]) -> str:
    """A whole document for the ranks of a pipeline: a line each that leads to its plan."""
    titles, *lines = ranks(plans)
    rows, parts = [], []
    for plan, (rank, *cells) in zip(plans, lines, strict=True):
        numbers = "".join(cell(text, "number") for text in cells)
        rows.append(f'<td><a href="#rank{rank}">{rank}</a></td>{numbers}')
        shown = " open" if rank == "0" else ""
        parts.append(
            f'<details id="rank{rank}"{shown}><summary><h2>Rank {rank}</h2></summary>{"".join(_body(plan))}</details>'
        )
    head = "".join(cell(title, kind="th") for title in titles)
    overview = f'<section><div class="wide">{table(rows, head=head)}</div></section>'
    model = plans[0].profile.model.partition(", rank ")[0]
    return document(
        f"Offload plans of {model}, {len(plans)} ranks", overview + "".join(parts), MORE_STYLE
    )


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.2f} ms"


def _numbers(plan: PlanData) -> str:
    """Peak and time: what a plan is about."""
    before, after = plan.before, plan.after
    less = 100 * (1 - after.peak / before.peak) if before.peak else 0.0
    slower = 100 * (after.seconds / before.seconds - 1) if before.seconds else 0.0
    return tiles(
        [
            (
                f"{size(before.peak)} \u2192 {size(after.peak)}",
                f"peak of a step, {less:.1f} % less",
            ),
            (
                f"{_ms(before.seconds)} \u2192 {_ms(after.seconds)}",
                f"time of a step, {slower:+.1f} %",
            ),
        ]
    )


def fragment(plan: PlanData) -> str:
    """The same, to be put into any page."""
    return f'<div class="fuseops"><style>{STYLE}{MORE_STYLE}</style>{"".join(_body(plan))}</div>'


def _body(plan: PlanData) -> Iterator[str]:
    yield f"<p>{escape(plan.profile.kind)} of one step on {escape(plan.hardware.name)}</p>"
    yield _numbers(plan)
    for warning in plan.warnings:
        yield f'<div class="warning">{escape(warning)}</div>'
    lines = table(cell(title, "quiet") + cell(text) for title, text in facts(plan))
    yield f"<section>{lines}</section>"
    yield f'<section><h3>Timeline</h3><div class="draw">{_drawing(plan)}</div>{_KEY}</section>'
    yield f'<section><h3>Saved tensors</h3><div class="wide">{_table(plan)}</div>{_BRACES}</section>'
    if plan.assumed:
        notes = "".join(f"<li>{escape(text)}</li>" for text in plan.assumed)
        yield f"<section><h3>Assumed</h3><ul>{notes}</ul></section>"


_KEY = (
    '<p class="key">'
    + "".join(
        f'<i style="background:var(--{color})"></i>{text}'
        for color, text in (
            ("node", "bytes on the device, nothing moved"),
            ("bar", "bytes by this plan; H2D, back from the host"),
            ("forward", "forward"),
            ("backward", "backward"),
            ("joint", "D2H, to the host"),
            ("miss", "budget, peak, stalls"),
        )
    )
    + "</p>"
)


_BRACES = '<p class="key">{0-2,9} in a name stands for the layers 0, 1, 2 and 9, which are decided alike.</p>'


def _table(plan: PlanData) -> str:
    names = ("tensor", "bytes", "decision", "reason", *TIMES)
    words = ("tensor", "decision", "reason")
    head = "".join(cell(name, "" if name in words else "number", "th") for name in names)
    body = []
    for row in rows(plan):
        (name, nbytes, *times), first = row.line(), row.tensors[0]
        decided = cell(first.decision, first.decision) + cell(first.reason)
        numbers = "".join(cell(time, "number") for time in times)
        body.append(
            f'<td class="mono">{breakable(name)}</td>{cell(nbytes, "number")}{decided}{numbers}'
        )
    return table(body, "decided", head)


class _Scale:
    """A `_Scale` turns seconds into x and bytes into y of a chart."""

    def __init__(self, seconds: float, nbytes: int) -> None:
        self.seconds, self.nbytes = max(seconds, 1e-9), max(nbytes, 1)

    def x(self, seconds: float) -> float:
        return LEFT + (WIDTH - LEFT - 28) * seconds / self.seconds

    def y(self, nbytes: float) -> float:
        return 10 + CHART * (1 - nbytes / self.nbytes)


def _drawing(plan: PlanData) -> str:
    after, before = plan.after, plan.before
    tallest = max(before.peak, after.peak, plan.limits.peak or 0)
    scale = _Scale(max(before.seconds, after.seconds), int(tallest * 1.05))
    parts = [*_axes(scale), _area(scale, before.levels, before.seconds, "before")]
    parts.append(_area(scale, after.levels, after.seconds, "after"))
    if plan.limits.peak is not None:
        y = scale.y(plan.limits.peak)
        parts.append(
            f'<line class="budget" x1="{LEFT}" x2="{WIDTH - 28}" y1="{y:.1f}" y2="{y:.1f}"/>'
        )
    top = after.levels[after.peak_position] if after.levels else None
    if top is not None:
        tip = escape(f"peak {size(after.peak)} {plan.owner(after)}")
        parts.append(
            f'<circle class="peak" r="4" cx="{scale.x(top.seconds):.1f}" '
            f'cy="{scale.y(top.nbytes):.1f}"><title>{tip}</title></circle>'
        )
    parts += _lanes(plan, scale)
    height = CHART + 44 + len(_titles(plan)) * LANE
    return (
        f'<svg class="plan" width="{WIDTH}" height="{height}" viewBox="0 0 {WIDTH} {height}" '
        f'style="max-width:max(100%,{LEAST}px);height:auto" role="img">{"".join(parts)}</svg>'
    )


def _axes(scale: _Scale) -> Iterator[str]:
    unit = 1024 ** int(math.log(scale.nbytes, 1024))
    for nbytes in (unit * k for k in ticks(0, scale.nbytes / unit)):
        y = scale.y(nbytes)
        yield f'<line class="grid" x1="{LEFT}" x2="{WIDTH - 28}" y1="{y:.1f}" y2="{y:.1f}"/>'
        yield f'<text class="label" x="{LEFT - 8}" y="{y:.1f}">{size(int(nbytes))}</text>'
    for ms in ticks(0, scale.seconds * 1e3, 9):
        yield f'<text class="tick" x="{scale.x(ms / 1e3):.1f}" y="{CHART + 22}">{ms:.4g} ms</text>'


def _area(scale: _Scale, levels: Sequence[Level], seconds: float, style: str) -> str:
    """A step curve; of what falls on one pixel, the highest."""
    highest: dict[int, float] = {}
    for level in levels:
        x = round(scale.x(level.seconds))
        highest[x] = max(highest.get(x, 0.0), level.nbytes)
    points, y = [f"M{LEFT},{scale.y(0):.1f}"], scale.y(0)
    for x, nbytes in sorted(highest.items()):
        y = scale.y(nbytes)
        points.append(f"H{x}V{y:.1f}")
    points.append(f"H{scale.x(seconds):.0f}V{scale.y(0):.1f}Z")
    return f'<path class="{style}" d="{"".join(points)}"/>'


def _titles(plan: PlanData) -> dict[str, str]:
    """The titles of the lanes below the chart."""
    titles = {"layers": "layers", "stalls": "stalls", "d2h": "D2H", "h2d": "H2D"}
    return titles | ({"network": "network"} if plan.profile.network else {})


def _lanes(plan: PlanData, scale: _Scale) -> Iterator[str]:
    tops = {}
    for k, (lane, title) in enumerate(_titles(plan).items()):
        top = tops[lane] = CHART + 38 + k * LANE
        y = top + LANE / 2 - 3
        yield f'<text class="label" x="{LEFT - 8}" y="{y:.1f}">{title}</text>'
        yield f'<line class="grid" x1="{LEFT}" x2="{WIDTH - 28}" y1="{top + LANE - 3}" y2="{top + LANE - 3}"/>'
    styles = {"stalls": "stall", "d2h": "d2h", "h2d": "h2d", "network": "h2d"}
    for piece in intervals(plan):
        if piece.lane in tops:
            tip = f"{piece.name}, {size(piece.nbytes)}" if piece.nbytes else piece.name
            style = styles.get(piece.lane, piece.name[0])  # f and b of the ways of layers
            yield _bar(scale, tops[piece.lane], piece.start, piece.end, style, tip)


def _bar(scale: _Scale, top: float, start: float, end: float, style: str, tip: str) -> str:
    x = scale.x(start)
    width = max(scale.x(end) - x - 0.5, 0.5)
    tip = escape(f"{tip}: {start * 1e3:.2f} to {end * 1e3:.2f} ms")
    return (
        f'<rect class="{style}" x="{x:.1f}" y="{top}" width="{width:.1f}" height="{LANE - 6}">'
        f"<title>{tip}</title></rect>"
    )
