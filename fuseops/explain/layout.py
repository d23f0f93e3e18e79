"""What text and HTML of a plan share: equal plans grouped, rows collapsed, spans in words."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from fuseops.plan.records import Miss, Overlap, Planned, SavedTensor, Span
from fuseops.words import dtype_name, plural, size

LONG = 24  # rows from which equal ones, of other layers, share a line


class Group(NamedTuple):
    """A `Group` holds plans that say the same under other paths."""

    plan: Planned  # the first
    paths: tuple[str, ...]  # of all, in order; a path twice is a Sequential that ran twice

    @property
    def title(self) -> str:
        first, last, n = self.paths[0], self.paths[-1], len(self.paths)
        if n == 1:
            return first or "Sequential"
        where = f"{first} .. {last}" if first != last else first or "Sequential"
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
        """Its bytes, or why it has none of its own."""
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


def at_peak(plan: Planned) -> str:
    """What `plan.peak_bytes` is, in words."""
    return "at the peak of a step" if plan.rehearsed else "with the largest temporary"


def shape_of(tensor: SavedTensor) -> str:
    return f"{dtype_name(tensor.dtype)}[{', '.join(map(str, tensor.shape))}]"


def is_outside(plan: Planned) -> bool:
    """Stands for what was saved outside of every Sequential."""
    return not plan.forward


def fused_and_missed(plans: Sequence[Planned]) -> tuple[int, int]:
    """How many spans rules made in all of them, and how many misses there are."""
    every = [p for plan in plans for p in plan.walk()]
    return sum(len(p.fused) for p in every), sum(len(p.not_fused) for p in every)


def summary(plans: Sequence[Planned]) -> str:
    """How many, and how much, in one line."""
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
    """`path` with every number in it as `*`, as policies write it."""
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
    """The plan under relative names: equal where modules in the same place of repeated layers are planned alike."""
    saved = tuple(
        t._replace(name=relative(t.name, plan.path), shared_with=relative(t.shared_with, plan.path))
        for t in plan.saved
    )
    nested = tuple(
        replace(signature(inner), path=relative(inner.path, plan.path)) for inner in plan.nested
    )
    return replace(plan, path=glob(plan.path), saved=saved, nested=nested)


def groups(plans: Sequence[Planned]) -> list[Group]:
    """Equal plans together, at the place of the first."""
    found: dict[Planned, list[Planned]] = {}
    for plan in plans:
        found.setdefault(signature(plan), []).append(plan)
    return [Group(same[0], tuple(p.path for p in same)) for same in found.values()]


# --- rows -----------------------------------------------------------------------------------------


def own_saved(plan: Planned) -> list[SavedTensor]:
    """What the plan saves besides the Sequentials nested in it."""
    below = Counter(t for nested in plan.nested for t in nested.saved)
    rows = []
    for t in plan.saved:
        if below[t]:
            below[t] -= 1
        else:
            rows.append(t)
    return rows


def saved_rows(group: Group) -> list[SavedRow]:
    """The plan's own saved tensors; names are globs where one line stands for several tensors."""
    tensors = own_saved(group.plan)
    if len(group.paths) > 1:
        stem = glob(group.plan.path)
        return [
            SavedRow(f"{stem}.{relative(t.name, group.plan.path)}".lstrip("."), t, 1)
            for t in tensors
        ]
    if len(tensors) < LONG:
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
    """Modules of one class that follow each other together, every other span by itself."""
    found: list[list[Span]] = []
    for span in spans:
        last = found[-1][-1] if found else None
        if last and last.kind == span.kind == "module" and last.runs == span.runs:
            found[-1].append(span)
        else:
            found.append([span])
    return found


def span_rows(spans: Sequence[Span]) -> list[tuple[str, ...]]:
    """A line a span: position, ops, what runs them, why. In a long plan equal layers that follow each other share
    theirs.
    """
    lines, rows, at = _runs_of_modules(spans), list[tuple[str, ...]](), 0
    for period, times in _repeats(lines):
        for same in lines[at : at + period]:
            first, last, n = same[0], same[-1], len(same)
            ops = ", ".join(first.ops) if n == 1 else f"{first.ops[0]} .. {last.ops[-1]}"
            runs = first.runs if n == 1 else f"{first.runs} x {n}"
            rows.append((_positions(first.start, last.stop), ops, runs, why(first)))
        begin, at = at + period, at + period * times
        if times > 1:
            first, last = lines[begin][0], lines[at - 1][-1]
            again = f"the same {plural(times - 1, 'time')} more"
            ops = f"{first.ops[0]} .. {last.ops[-1]}"
            rows.append((_positions(first.start, last.stop), ops, again, ""))
    return rows


def _repeats(lines: Sequence[Sequence[Span]]) -> Iterator[tuple[int, int]]:
    """(lines, times) of what follows each other, in order: of equal layers the lines of one."""
    spans = [same[0] for same in lines]
    keys = [(tuple(map(glob, s.ops)), s.runs, s.rule, s.kind, s.note) for s in spans]
    at, size = 0, len(keys)
    while at < size:
        period = times = 1
        for p in range(1, (size - at) // 2 + 1 if size >= LONG else 0):
            n = 1
            while keys[at : at + p] == keys[at + n * p : at + (n + 1) * p]:
                n += 1
            if n > 1 and n * p > period * times:
                period, times = p, n
        yield period, times
        at += period * times


def miss_rows(plan: Planned) -> list[tuple[str, str, str]]:
    """Rules, place and reason of every miss but overlaps; what is said alike of one place, and in a long plan of equal
    layers, shares a line.
    """
    same: dict[Hashable, list[Miss]] = {}
    for miss in plan.not_fused:
        long = len(plan.not_fused) >= LONG
        key = re.sub(r"\d+", "*", miss.reason) if long else (miss.span, miss.reason)
        same.setdefault(key, []).append(miss)
    return [
        (_rules(ms), f"{place(plan, ms[0])}{_more(len({m.span for m in ms}) - 1)}", ms[0].reason)
        for ms in same.values()
    ]


def overlap_rows(plan: Planned) -> list[tuple[str, str]]:
    """Rules that a rule left no room for, and the reason; wherever that rule fired, on one line."""
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
    """What there is to say of a plan besides its spans and what it saves."""
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
    """The boxes of the drawing, left to right."""
    found = []
    for same in _runs_of_modules(plan.forward):
        first, last, n = same[0], same[-1], len(same)
        if n > 1:
            name = f"{first.ops[0]} .. {last.ops[-1]}"
            found.append(
                Column(first.start, last.stop, name, f"{first.runs} x {n}", "module", why(first))
            )
            continue
        style = first.kind if first.kind in ("module", "plain", "call") else "op"
        for at, (op, kind) in enumerate(zip(first.ops, first.types, strict=True), first.start):
            hint = f"{op}: {kind}" + (f", {why(first)}" if style != "op" else "")
            found.append(Column(at, at + 1, op, kind, style, hint))
    return found


def _positions(start: int, stop: int) -> str:
    return str(start) if stop == start + 1 else f"{start}:{stop}"


def place(plan: Planned, miss: Miss) -> str:
    """The ops that a miss is about, by position and name."""
    start, stop = miss.span
    names = [name for span in plan.forward for name in span.ops][start:stop]
    return f"{_positions(start, stop)} ({', '.join(names)})"


def why(span: Span) -> str:
    """How a span came to be, in words."""
    if span.rule:
        return f"rule {span.rule} ({span.kind})"
    if span.kind == "module":
        return span.note
    if span.note == "alias":
        return "alias, outside the node"
    words = {"call": "through its own __call__", "plain": "plain torch"}.get(span.kind, "")
    return f"{words}: {span.note}" if words and span.note else words
