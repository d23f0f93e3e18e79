"""The layout that text and HTML of plans share: groups of equal plans, collapsed rows, spans in words."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import replace
from itertools import groupby
from typing import NamedTuple

from fuseops.plan.records import Miss, Overlap, Planned, SavedTensor, Span
from fuseops.words import dtype_name, plural, size

COLLAPSE_FROM = 24  # the number of rows from which equal ones of several layers share a line


class Group(NamedTuple):
    """A `Group` is plans that are equal but for their paths."""

    plan: Planned  # the first
    paths: tuple[str, ...]  # of all, in order; one that ran twice is there twice

    @property
    def title(self) -> str:
        first, last, n = self.paths[0], self.paths[-1], len(self.paths)
        if n == 1:
            return first or self.plan.kind
        where = f"{first} .. {last}" if first != last else first or self.plan.kind
        return f"{where} ({n} times)"


class SavedRow(NamedTuple):
    name: str
    tensor: SavedTensor
    times: int

    @property
    def nbytes(self) -> int:
        return self.tensor.nbytes * self.times

    @property
    def amount(self) -> str:
        """Its bytes, or "parameter" or "shared" where it has none of its own."""
        if self.nbytes or not (self.tensor.is_param or self.tensor.shared_with):
            return size(self.nbytes)
        return "parameter" if self.tensor.is_param else "shared"


class Column(NamedTuple):
    """A `Column` is a box of the drawing: an op, or neighbouring modules of one class."""

    start: int
    stop: int
    name: str
    kind: str
    style: str  # "op", "plain", "call" or "module"
    hint: str


class Section(NamedTuple):
    """A `Section` is a table of a plan, with the style of every column."""

    title: str
    styles: tuple[str, ...]  # "rule", "mono", "number" or ""
    rows: Sequence[tuple[str, ...]]


def peak_label(plan: Planned) -> str:
    """A description of `plan.peak_bytes`."""
    return "at the peak of a step" if plan.rehearsed else "with the largest temporary"


def shape_of(tensor: SavedTensor) -> str:
    return f"{dtype_name(tensor.dtype)}[{', '.join(map(str, tensor.shape))}]"


def is_outside(plan: Planned) -> bool:
    """Whether the plan is of tensors that are saved outside of every Sequential."""
    return not plan.forward


def fused_and_missed(plans: Sequence[Planned]) -> tuple[int, int]:
    """The numbers of fused spans and of misses in all plans."""
    every = [p for plan in plans for p in plan.walk()]
    return sum(len(p.fused) for p in every), sum(len(p.not_fused) for p in every)


def summary(plans: Sequence[Planned]) -> str:
    """The numbers of Sequentials, fused spans and misses, and the saved bytes, in one line."""
    ran = sum(not is_outside(p) for plan in plans for p in plan.walk())
    fused, missed = fused_and_missed(plans)
    what = f"{plural(ran, 'Sequential')}, {plural(fused, 'fused span')}, {plural(missed, 'miss')}"
    if not ran:
        what = "no fuseops.Sequential ran, so no rule could fire"
    return (
        f"{what}; {size(sum(p.saved_bytes for p in plans))} saved for the backward beyond the "
        "parameters"
    )


# --- groups ---------------------------------------------------------------------------------------


def glob(path: str) -> str:
    """`path` with `*` for every number, as in policies."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", path)


def relative(name: str | None, path: str) -> str:
    """`name` below `path`, or as a glob where it is elsewhere."""
    if name is None:
        return ""
    if not path:
        return name
    below = name.removeprefix(f"{path}.")
    return below if below != name else glob(name)


def signature(plan: Planned) -> Planned:
    """The plan with relative names, which is equal for equal modules of repeated layers."""
    saved = tuple(
        t._replace(name=relative(t.name, plan.path), shared_with=relative(t.shared_with, plan.path))
        for t in plan.saved
    )
    nested = tuple(
        replace(signature(inner), path=relative(inner.path, plan.path)) for inner in plan.nested
    )
    return replace(plan, path=glob(plan.path), saved=saved, nested=nested)


def groups(plans: Sequence[Planned]) -> list[Group]:
    """Groups of equal plans, in the order of the first of each."""
    found: dict[Planned, list[Planned]] = {}
    for plan in plans:
        found.setdefault(signature(plan), []).append(plan)
    return [Group(same[0], tuple(p.path for p in same)) for same in found.values()]


# --- rows -----------------------------------------------------------------------------------------


def own_saved(plan: Planned) -> list[SavedTensor]:
    """The saved tensors of the plan that are not of nested Sequentials."""
    below = Counter(t for nested in plan.nested for t in nested.saved)
    rows = []
    for t in plan.saved:
        if below[t]:
            below[t] -= 1
        else:
            rows.append(t)
    return rows


def saved_rows(group: Group) -> list[SavedRow]:
    """Rows of the plan's own saved tensors; the name is a glob where a row is of several tensors."""
    tensors = own_saved(group.plan)
    if len(group.paths) > 1:
        stem = glob(group.plan.path)
        return [
            SavedRow(f"{stem}.{relative(t.name, group.plan.path)}".lstrip("."), t, 1)
            for t in tensors
        ]
    if len(tensors) < COLLAPSE_FROM:
        return [SavedRow(t.name, t, 1) for t in tensors]
    same: dict[Hashable, list[SavedTensor]] = {}
    for t in tensors:
        pattern = _pattern(t.name)
        key = (pattern, t.shape, t.dtype, t.nbytes, t.is_param, glob(t.shared_with or ""))
        same.setdefault(key, []).append(t)
    return [
        SavedRow(_pattern(ts[0].name) if len(ts) > 1 else ts[0].name, ts[0], len(ts))
        for ts in same.values()
    ]


def _pattern(name: str) -> str:
    path, _, field = name.rpartition(".")
    return f"{glob(path)}.{field}".lstrip(".")


def _runs_of_modules(spans: Sequence[Span]) -> list[list[Span]]:
    """Groups of consecutive modules of one class; other spans are single."""
    found = groupby(spans, lambda span: span.runs if span.kind == "module" else id(span))
    return [list(same) for _, same in found]


def span_rows(spans: Sequence[Span]) -> list[tuple[str, ...]]:
    """A row for each span: position, ops, what runs them, why. In a long plan consecutive equal layers share rows."""
    lines, rows, at = _runs_of_modules(spans), list[tuple[str, ...]](), 0
    for period, times in _repeats(lines):
        for same in lines[at : at + period]:
            first, last, n = same[0], same[-1], len(same)
            ops = ", ".join(first.ops) if n == 1 else f"{first.ops[0]} .. {last.ops[-1]}"
            runs = first.runs if n == 1 else f"{first.runs} x {n}"
            rows.append((_positions(first.start, last.stop), ops, runs, span_label(first)))
        begin, at = at + period, at + period * times
        if times > 1:
            first, last = lines[begin][0], lines[at - 1][-1]
            again = f"the same {plural(times - 1, 'time')} more"
            ops = f"{first.ops[0]} .. {last.ops[-1]}"
            rows.append((_positions(first.start, last.stop), ops, again, ""))
    return rows


def _repeats(lines: Sequence[Sequence[Span]]) -> Iterator[tuple[int, int]]:
    """(number of lines, times) of consecutive repeats, in order: the lines of one of several equal layers."""
    spans = [same[0] for same in lines]
    keys = [(tuple(map(glob, s.ops)), s.runs, s.rule, s.kind, s.note) for s in spans]
    at, size = 0, len(keys)
    while at < size:
        period = times = 1
        for p in range(1, (size - at) // 2 + 1 if size >= COLLAPSE_FROM else 0):
            n = 1
            while keys[at : at + p] == keys[at + n * p : at + (n + 1) * p]:
                n += 1
            if n > 1 and n * p > period * times:
                period, times = p, n
        yield period, times
        at += period * times


def miss_rows(plan: Planned) -> list[tuple[str, str, str]]:
    """Rows (rules, place, reason) of the misses without overlaps. Misses with one place and reason share a row, and so
    do those of equal layers in a long plan.
    """
    same: dict[Hashable, list[Miss]] = {}
    for miss in plan.not_fused:
        long = len(plan.not_fused) >= COLLAPSE_FROM
        key = re.sub(r"\d+", "*", miss.reason) if long else (miss.span, miss.reason)
        same.setdefault(key, []).append(miss)
    return [
        (_rules(ms), f"{place(plan, ms[0])}{_more(len({m.span for m in ms}) - 1)}", ms[0].reason)
        for ms in same.values()
    ]


def overlap_rows(plan: Planned) -> list[tuple[str, str]]:
    """Rows (rules, reason) of rules whose ops another rule took, one for all places where that rule fired."""
    same: dict[str, list[Miss]] = {}
    for miss in (m for m in plan.misses if isinstance(m, Overlap)):
        same.setdefault(re.sub(r"\d+:\d+", "*", miss.reason), []).append(miss)
    return [
        (_rules(ms), f"{ms[0].reason}{_more(len({m.reason for m in ms}) - 1)}")
        for ms in same.values()
    ]


def _rules(misses: Sequence[Miss]) -> str:
    return ", ".join(dict.fromkeys(m.rule for m in misses))


def sections(plan: Planned) -> list[Section]:
    """The tables of a plan besides its spans and saved tensors."""
    misses = [(rule, f"at {where}", reason) for rule, where, reason in miss_rows(plan)]
    kept = f"quantized weights: {size(plan.kept_bytes)} kept beside the saved tensors"
    formats = [(o.op, o.role, o.format) for o in plan.operands]
    weights = [(w.name, w.policy, size(w.nbytes)) for w in plan.weights]
    every = (
        Section("not fused", ("rule lost", "mono", ""), misses),
        Section("passed over", ("rule", ""), overlap_rows(plan)),
        Section("formats of operands", ("mono", "", "mono"), formats),
        Section(kept, ("mono", "", "number"), weights),
    )
    return [section for section in every if section.rows]


def _more(others: int) -> str:
    return f" and {plural(others, 'place')} more" if others else ""


def columns(plan: Planned) -> list[Column]:
    """The columns of the drawing, left to right."""
    found = []
    for same in _runs_of_modules(plan.forward):
        first, last, n = same[0], same[-1], len(same)
        if n > 1:
            name = f"{first.ops[0]} .. {last.ops[-1]}"
            found.append(
                Column(first.start, last.stop, name, f"{first.runs} x {n}", "module", first.note)
            )
            continue
        style = first.kind if first.kind in ("module", "plain", "call") else "op"
        for at, (op, kind) in enumerate(zip(first.ops, first.types, strict=True), first.start):
            hint = f"{op}: {kind}" + (f", {span_label(first)}" if style != "op" else "")
            found.append(Column(at, at + 1, op, kind, style, hint))
    return found


def _positions(start: int, stop: int) -> str:
    return str(start) if stop == start + 1 else f"{start}:{stop}"


def place(plan: Planned, miss: Miss) -> str:
    """The position and names of the ops of a miss."""
    start, stop = miss.span
    names = [name for span in plan.forward for name in span.ops][start:stop]
    return f"{_positions(start, stop)} ({', '.join(names)})"


def span_label(span: Span) -> str:
    """What made a span, in words."""
    if span.rule:
        return f"rule {span.rule} ({span.kind})"
    if span.kind == "module":
        return span.note
    if span.note == "alias":
        return "alias, outside the node"
    words = {"call": "through its own __call__", "plain": "plain torch"}.get(span.kind, "")
    return f"{words}: {span.note}" if words and span.note else words
