"""Plans as plain text, for terminals and logs."""

from __future__ import annotations

from collections.abc import Sequence

from fuseops.plan.records import Planned, Span
from fuseops.words import size

from .layout import (
    Group,
    SavedRow,
    at_peak,
    groups,
    is_outside,
    miss_rows,
    saved_rows,
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
    if plan.misses:
        lines.append("  not fused")
        lines += _table([[rule, f"at {where}", why] for rule, where, why in miss_rows(plan)])
    if plan.operands:
        lines.append("  formats of operands")
        lines += _table([[o.op, o.role, o.format] for o in plan.operands])
    if plan.weights:
        lines.append(f"  quantized weights: {size(plan.kept_bytes)} kept beside the saved tensors")
        lines += _table([[w.name, w.policy, size(w.nbytes)] for w in plan.weights], right=(2,))
    lines += _saved(group)
    lines += [f"  note: {note}" for note in plan.notes]
    for nested in groups(plan.nested):
        lines += ["", *(f"  {line}".rstrip() for line in _group(nested))]
    return lines


def _spans(direction: str, spans: Sequence[Span]) -> list[str]:
    return [f"  {direction}", *_table([list(row) for row in span_rows(spans)])]


def _saved(group: Group) -> list[str]:
    plan, rows = group.plan, saved_rows(group)
    each = " each" if len(group.paths) > 1 else ""
    lines = [f"  saved: {size(plan.saved_bytes)}{each}"]
    if plan.forward:
        lines[0] += f"; {size(plan.peak_bytes)} {at_peak(plan)}"
    inside = sum(p.saved_bytes for p in plan.nested)
    if inside:
        lines[0] += f"; {size(inside)} of it in the Sequentials below"
    table = [[_times(r), shape_of(r.tensor), _bytes(r), _shared(r)] for r in rows]
    return lines + _table(table, right=(2,))


def _times(row: SavedRow) -> str:
    return row.name if row.times == 1 else f"{row.name} ({row.times} times)"


def _bytes(row: SavedRow) -> str:
    if row.tensor.is_param and not row.tensor.nbytes:
        return "parameter"
    return "shared" if row.tensor.shared_with and not row.tensor.nbytes else size(row.nbytes)


def _shared(row: SavedRow) -> str:
    if row.tensor.shared_with is None or row.times > 1:
        return ""
    return f"{'view of' if row.tensor.is_param else 'with'} {row.tensor.shared_with}"


def _table(rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> list[str]:
    """Columns two spaces apart, under an indent; `right` says which are aligned right."""
    if not rows:
        return []
    widths = [max(len(row[k]) for row in rows) for k in range(len(rows[0]))]
    return [
        "    "
        + "  ".join(
            cell.rjust(w) if k in right else cell.ljust(w)
            for k, (cell, w) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
