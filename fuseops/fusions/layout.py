"""What the text and the HTML of a plan have in common: equal plans grouped, rows collapsed, sizes in words."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Hashable, Sequence
from typing import NamedTuple

from .plan import FusionPlan, Miss, SavedTensor, Span

LONG = 24  # rows from which equal ones, of other layers, share a line


class Group(NamedTuple):
    """Plans that say the same under other paths."""

    plan: FusionPlan  # the first
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
    count: int

    @property
    def nbytes(self) -> int:
        return self.tensor.nbytes * self.count


class SpanRow(NamedTuple):
    position: str
    ops: str
    runs: str
    why: str


def size(nbytes: int) -> str:
    """Bytes in the unit that a reader wants."""
    value = float(nbytes)
    for unit in ("B", "KiB", "MiB"):
        if value < 1024:
            return f"{nbytes} B" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.2f} GiB"


def shape_of(tensor: SavedTensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')}[{', '.join(map(str, tensor.shape))}]"


def plural(n: int, word: str) -> str:
    return f"{n} {word}" if n == 1 else f"{n} {word}es" if word.endswith("s") else f"{n} {word}s"


def is_outside(plan: FusionPlan) -> bool:
    """Stands for what was saved outside of every Sequential."""
    return not plan.forward


# --- groups --------------------------------------------------------------------------------------------------------


def glob(path: str) -> str:
    """`path` with every number in it as `*`, as policies write it."""
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", path)


def relative(name: str | None, path: str) -> str:
    """`name` below `path`, or as a glob where it is elsewhere."""
    if name is None:
        return ""
    return name[len(path) + 1 :] if path and name.startswith(f"{path}.") else glob(name) if path else name


def signature(plan: FusionPlan) -> Hashable:
    """Equal for plans that say the same of modules in the same place of repeated layers."""
    return (
        glob(plan.path),
        plan.forward,
        plan.backward,
        plan.misses,
        tuple(
            t._replace(name=relative(t.name, plan.path), shared_with=relative(t.shared_with, plan.path))
            for t in plan.saved
        ),
        plan.edges,
        plan.segments,
        plan.notes,
        plan.temporaries,
        tuple((relative(n.path, plan.path), signature(n)) for n in plan.nested),
    )


def groups(plans: Sequence[FusionPlan]) -> list[Group]:
    """Equal plans together, at the place of the first."""
    found: dict[Hashable, list[FusionPlan]] = {}
    for plan in plans:
        found.setdefault(signature(plan), []).append(plan)
    return [Group(same[0], tuple(p.path for p in same)) for same in found.values()]


# --- rows ----------------------------------------------------------------------------------------------------------


def own_saved(plan: FusionPlan) -> list[SavedTensor]:
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
        return [SavedRow(f"{stem}.{relative(t.name, group.plan.path)}".lstrip("."), t, 1) for t in tensors]
    if len(tensors) < LONG:
        return [SavedRow(t.name, t, 1) for t in tensors]
    same: dict[Hashable, list[SavedTensor]] = {}
    for t in tensors:
        pattern = _pattern(t.name)
        key = (pattern, t.shape, t.dtype, t.nbytes, t.is_param, glob(t.shared_with or ""))
        same.setdefault(key, []).append(t)
    return [
        SavedRow(_pattern(ts[0].name) if len(ts) > 1 else ts[0].name, ts[0], len(ts)) for ts in same.values()
    ]


def _pattern(name: str) -> str:
    path, _, field = name.rpartition(".")
    return f"{glob(path)}.{field}".lstrip(".")


def span_rows(spans: Sequence[Span]) -> list[SpanRow]:
    """A line a span; plain modules of one class that follow each other share one."""
    rows: list[SpanRow] = []
    pending: list[Span] = []

    def flush() -> None:
        if pending:
            first, last = pending[0], pending[-1]
            several = len(pending) > 1
            rows.append(
                SpanRow(
                    _positions(first.start, last.stop),
                    f"{first.ops[0]} .. {last.ops[-1]}" if several else ", ".join(first.ops),
                    first.runs + (f" x {len(pending)}" if several else ""),
                    why(first),
                )
            )
            pending.clear()

    for span in spans:
        if pending and not (span.kind == "module" == pending[-1].kind and span.runs == pending[-1].runs):
            flush()
        pending.append(span)
    flush()
    return rows


def _positions(start: int, stop: int) -> str:
    return str(start) if stop == start + 1 else f"{start}:{stop}"


def place(plan: FusionPlan, miss: Miss) -> str:
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
