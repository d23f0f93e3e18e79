"""Plans as plain text, for terminals and logs."""

from __future__ import annotations

from collections.abc import Sequence

from fuseops.plan.records import Planned, Span
from fuseops.words import aligned, size

from .layout import (
    Group,
    SavedRow,
    groups,
    is_outside,
    peak_label,
    saved_rows,
    sections,
    shape_of,
    span_rows,
    summary,
)


def text(plan: Planned) -> str:
    """One plan, with those nested in it."""
    return "\n".join(_group(Group(plan, (plan.path,))))


def report(plans: Sequence[Planned]) -> str:
    """All plans of a model; equal ones share a section."""
    sections = ["\n".join(_group(group)) for group in groups(plans)]
    return "\n\n".join([summary(plans), *sections])


def _group(group: Group) -> list[str]:
    plan = group.plan
    lines = ["outside of every Sequential" if is_outside(plan) else group.title]
    if plan.forward:
        lines += _spans("forward", plan.forward)
        lines += (
            ["  backward: the same spans"]
            if plan.backward == plan.forward
            else _spans("backward", plan.backward)
        )
    for title, styles, rows in sections(plan):
        numbers = [k for k, style in enumerate(styles) if style == "number"]
        lines += [f"  {title}", *_table(rows, numbers)]
    lines += _saved(group)
    lines += [f"  note: {note}" for note in plan.notes]
    for nested in groups(plan.nested):
        lines += ["", *(f"  {line}".rstrip() for line in _group(nested))]
    return lines


def _spans(direction: str, spans: Sequence[Span]) -> list[str]:
    return [f"  {direction}", *_table(span_rows(spans))]


def _saved(group: Group) -> list[str]:
    plan, rows = group.plan, saved_rows(group)
    each = " each" if len(group.paths) > 1 else ""
    lines = [f"  saved: {size(plan.saved_bytes)}{each}"]
    if plan.forward:
        lines[0] += f"; {size(plan.peak_bytes)} {peak_label(plan)}"
    inside = sum(p.saved_bytes for p in plan.nested)
    if inside:
        lines[0] += f"; {size(inside)} of it in the Sequentials below"
    table = [[_times(r), shape_of(r.tensor), r.amount, _shared(r)] for r in rows]
    return lines + _table(table, right=(2,))


def _times(row: SavedRow) -> str:
    return row.name if row.times == 1 else f"{row.name} ({row.times} times)"


def _shared(row: SavedRow) -> str:
    if row.tensor.shared_with is None or row.times > 1:
        return ""
    return f"{'view of' if row.tensor.is_param else 'with'} {row.tensor.shared_with}"


def _table(rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> list[str]:
    return [f"    {line}" for line in aligned(rows, right)]
