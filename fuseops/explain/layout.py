"""What text and HTML of a plan share: equal plans grouped, rows collapsed, spans in words."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Hashable, Iterator, Sequence
from typing import NamedTuple

from fuseops.plan.records import Miss, Planned, SavedTensor, Span
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


class Column(NamedTuple):
    """A `Column` is a box of the drawing: an op, or neighbouring modules of one class."""

    start: int
    stop: int
    name: str
    kind: str
    style: str  # "op", "plain", "call" or "module"
    hint: str


class SpanRow(NamedTuple):
    position: str
    ops: str
    runs: str
    why: str


def at_peak(plan: Planned) -> str:
    """What `plan.peak_bytes` is, in words."""
    return "at the peak of a step" if plan.rehearsed else "with the largest temporary"


def shape_of(tensor: SavedTensor) -> str:
    return f"{dtype_name(tensor.dtype)}[{', '.join(map(str, tensor.shape))}]"


def is_outside(plan: Planned) -> bool:
    """Stands for what was saved outside of every Sequential."""
    return not plan.forward


def summary(plans: Sequence[Planned]) -> str:
    """How many, and how much, in one line."""
    every = [p for plan in plans for p in plan.walk()]
    ran = sum(not is_outside(p) for p in every)
    fused = sum(len(p.fused) for p in every)
    misses = sum(len(p.misses) for p in every)
    what = f"{plural(ran, 'Sequential')}, {plural(fused, 'fused span')}, {plural(misses, 'miss')}"
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


def signature(plan: Planned) -> Hashable:
    """Equal for plans that say the same of modules in the same place of repeated layers."""
    return (
        glob(plan.path),
        plan.forward,
        plan.backward,
        plan.misses,
        tuple(
            t._replace(
                name=relative(t.name, plan.path), shared_with=relative(t.shared_with, plan.path)
            )
            for t in plan.saved
        ),
        plan.operands,
        plan.weights,
        plan.segments,
        plan.notes,
        plan.temporaries,
        tuple((relative(n.path, plan.path), signature(n)) for n in plan.nested),
    )


def groups(plans: Sequence[Planned]) -> list[Group]:
    """Equal plans together, at the place of the first."""
    found: dict[Hashable, list[Planned]] = {}
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


def span_rows(spans: Sequence[Span]) -> list[SpanRow]:
    """A line a span; in a long plan equal layers that follow each other share theirs."""
    lines, rows, at = _runs_of_modules(spans), [], 0
    for period, times in _repeats(lines):
        for same in lines[at : at + period]:
            first, last, n = same[0], same[-1], len(same)
            ops = ", ".join(first.ops) if n == 1 else f"{first.ops[0]} .. {last.ops[-1]}"
            runs = first.runs if n == 1 else f"{first.runs} x {n}"
            rows.append(SpanRow(_positions(first.start, last.stop), ops, runs, why(first)))
        begin, at = at + period, at + period * times
        if times > 1:
            first, last = lines[begin][0], lines[at - 1][-1]
            again = f"the same {plural(times - 1, 'time')} more"
            ops = f"{first.ops[0]} .. {last.ops[-1]}"
            rows.append(SpanRow(_positions(first.start, last.stop), ops, again, ""))
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
    """Rule, place and reason of every miss; those of equal layers share a line."""
    same: dict[Hashable, list[Miss]] = {}
    for miss in plan.misses:
        long = len(plan.misses) >= LONG
        key = (miss.rule, re.sub(r"\d+", "*", miss.reason)) if long else miss
        same.setdefault(key, []).append(miss)
    return [
        (ms[0].rule, f"{place(plan, ms[0])}{_more(len(ms) - 1)}", ms[0].reason)
        for ms in same.values()
    ]


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
