"""The drawing of a plan: ops as boxes, forward spans above, backward spans below, misses under
those.  Inline SVG.

Colours are in the style sheet of html.py, so that one drawing is both light and dark.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from html import escape

from fuseops.plan.records import Miss, Planned, Span

from .layout import Column, columns, span_label

GUTTER, GAP, PADDING = 76, 14, 12
BOLD_WIDTH, PLAIN_WIDTH = 7.8, 6.8  # upper bounds of the width of a character
MIN_SCALE = 0.65  # a drawing that is scaled below this is not readable
SPAN, OP, MISS, ROW = 26, 46, 20, 12  # heights; ROW is the space between two rows
Boxes = Sequence[tuple[Column, tuple[float, float]]]
"""Columns, each with its x coordinates (left, right)."""


def svg(plan: Planned) -> str:
    """The drawing, as an <svg> element."""
    boxes = _boxes(columns(plan))
    miss_rows = _assign_rows([m.span for m in plan.not_fused])
    forward_y = 4
    op_y = forward_y + SPAN + ROW
    backward_y = op_y + OP + ROW
    miss_y = backward_y + SPAN + ROW
    rows = max(miss_rows, default=-1) + 1
    height = (miss_y + rows * (MISS + 6) if rows else backward_y + SPAN) + 4
    width = _extent(0, 0, boxes)[1] + 6
    parts = [
        *_label("forward", forward_y + SPAN / 2),
        *_label("backward", backward_y + SPAN / 2),
        *(_label("not fused", miss_y + MISS / 2) if miss_rows else ()),
        *_nodes(plan, boxes, op_y),
        *_arrows(boxes, op_y + OP / 2),
        *(part for cell, edge in boxes for part in _op(cell, edge, op_y)),
        *_spans(plan.forward, boxes, forward_y),
        *_spans(plan.backward, boxes, backward_y),
    ]
    for miss, row in zip(plan.not_fused, miss_rows, strict=True):
        parts += _miss(miss, boxes, miss_y + row * (MISS + 6))
    title = escape(f"{plan.path or plan.kind}: ops and spans")
    min_width = MIN_SCALE * width  # a wide drawing shrinks to this, and then scrolls
    return (
        f'<svg role="img" aria-label="{title}" width="{width:.0f}" height="{height:.0f}" '
        f'style="max-width:max(100%,{min_width:.0f}px);height:auto" '
        f'viewBox="0 0 {width:.0f} {height:.0f}">{"".join(parts)}</svg>'
    )


def _boxes(cells: Sequence[Column]) -> Boxes:
    found, left = [], float(GUTTER)
    for cell in cells:
        letters = max(len(cell.name), len(cell.kind), 8)
        right = left + letters * BOLD_WIDTH + 2 * PADDING
        found.append((cell, (left, right)))
        left = right + GAP
    return found


def _assign_rows(spans: Sequence[tuple[int, int]]) -> list[int]:
    """Assign each span the first row that is free there."""
    ends: list[int] = []
    found = []
    for start, stop in spans:
        row = next((k for k, end in enumerate(ends) if end <= start), len(ends))
        if row == len(ends):
            ends.append(0)
        ends[row] = stop
        found.append(row)
    return found


def _extent(start: int, stop: int, boxes: Boxes) -> tuple[float, float]:
    """The x coordinates (left, right) of positions start:stop, of which several may share a column; of the last column
    where there are none.
    """
    hit = [edge for cell, edge in boxes if cell.start < stop and start < cell.stop]
    if not hit:
        return boxes[-1][1] if boxes else (GUTTER, GUTTER)
    return hit[0][0], hit[-1][1]


def _label(text: str, y: float) -> Iterator[str]:
    yield f'<text class="axis" x="{GUTTER - 14}" y="{y:.1f}">{text}</text>'


def _text(content: str, x: float, y: float, width: float, style: str) -> str:
    letters = max(3, int(width / (BOLD_WIDTH if style in ("name", "inside") else PLAIN_WIDTH)))
    short = content if len(content) <= letters else content[: letters - 1] + "…"
    return f'<text class="{style}" x="{x:.1f}" y="{y:.1f}">{escape(short)}</text>'


def _box(
    style: str, x: tuple[float, float], y: float, height: float, radius: int, hint: str
) -> str:
    left, right = x
    return (
        f'<rect class="{style}" x="{left:.1f}" y="{y:.1f}" width="{right - left:.1f}" '
        f'height="{height}" rx="{radius}"><title>{escape(hint)}</title></rect>'
    )


def _nodes(plan: Planned, boxes: Boxes, y: float) -> Iterator[str]:
    """A band behind the ops of each autograd node."""
    outside = {
        i
        for s in plan.forward
        if s.kind in ("plain", "call", "module")
        for i in range(s.start, s.stop)
    }
    for start, stop in plan.segments:
        if start in outside:
            continue
        left, right = _extent(start, stop, boxes)
        hint = f"one autograd node, ops {start}:{stop}"
        yield _box("node", (left - 5, right + 5), y - 5, OP + 10, 9, hint)


def _arrows(boxes: Boxes, y: float) -> Iterator[str]:
    for (_, (_, right)), (_, (left, _)) in itertools.pairwise(boxes):
        yield f'<path class="arrow" d="M{right:.1f} {y:.1f}H{left - 1:.1f}m-4 -3.5l4 3.5l-4 3.5"/>'


def _op(cell: Column, edge: tuple[float, float], y: float) -> Iterator[str]:
    left, right = edge
    middle, width = (left + right) / 2, right - left - 6
    yield _box(f"op {cell.style}", edge, y, OP, 6, cell.hint)
    yield _text(cell.name, middle, y + 18, width, "name")
    yield _text(cell.kind, middle, y + 34, width, "kind")


def _spans(spans: Sequence[Span], boxes: Boxes, y: float) -> Iterator[str]:
    for span in spans:
        if span.kind == "module":
            continue
        left, right = _extent(span.start, span.stop, boxes)
        if not span.rule:
            hint = ", ".join(filter(None, (f"{span.ops[0]}: {span.runs}", span_label(span))))
            yield _box("span single", (left, right), y + SPAN / 2 - 2, 4, 2, hint)
            continue
        hint = f"{', '.join(span.ops)}: {span.runs}, {span_label(span)}"
        yield _box(f"span {span.kind}", (left, right), y, SPAN, 6, hint)
        width = right - left - 8
        label = f"{span.runs} · {span.rule}"
        label = label if len(label) * BOLD_WIDTH < width else span.runs
        yield _text(label, (left + right) / 2, y + SPAN / 2, width, "inside")


def _miss(miss: Miss, boxes: Boxes, y: float) -> Iterator[str]:
    left, right = _extent(*miss.span, boxes)
    yield _box("miss", (left, right), y, MISS, 5, miss.reason)
    yield _text(miss.rule, (left + right) / 2, y + MISS / 2, right - left - 6, "missed")
