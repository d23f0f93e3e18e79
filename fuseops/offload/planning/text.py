"""Plans as text and as plain data."""

from __future__ import annotations

import textwrap
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import asdict
from itertools import groupby
from typing import Any, NamedTuple

from fuseops.offload.codes import BOUND
from fuseops.offload.schedule import DISPATCH, KEEP, OFFLOAD, QUANTIZE, RECOMPUTE, REGENERATED
from fuseops.words import size

from .plan_data import PlanData, PlannedTensor
from .simulate import Simulation

SCHEMA_VERSION = 1
ORDER = (OFFLOAD, QUANTIZE, RECOMPUTE, DISPATCH, KEEP)
TIMES = ("out ms", "back ms", "slack ms")


class TableRow(NamedTuple):
    """A `TableRow` lists tensors of equal place in their layers with equal decisions."""

    name: str
    tensors: tuple[PlannedTensor, ...]

    def line(self) -> tuple[str, ...]:
        """Name, bytes together, and TIMES: on the way out and back, of the first tensor that moves, and the least slack
        of all; empty where none moves.
        """
        count = len(self.tensors)
        nbytes = f"{_total(self.tensors)}{'' if count == 1 else f' ({count})'}"
        windows = [t.window for t in self.tensors if t.window is not None]
        if not windows:
            return self.name, nbytes, "", "", ""
        slack = f"{min(w.slack for w in windows) * 1e3:.2f}"
        return self.name, nbytes, _ms(windows[0].out), _ms(windows[0].back), slack


def _total(tensors: Iterable[PlannedTensor]) -> str:
    return size(sum(t.nbytes for t in tensors))


def _ms(span: tuple[float, float]) -> str:
    return f"{span[0] * 1e3:.2f}-{span[1] * 1e3:.2f}"


def rows(plan: PlanData, every: bool = False) -> list[TableRow]:
    """The rows of the table, most bytes first; tensors without bytes are left out."""
    found: dict[tuple[str, ...], list[PlannedTensor]] = defaultdict(list)
    for tensor in plan.tensors:
        if tensor.nbytes:
            place = tensor.name if every else _without_layer(tensor)
            reason = "" if tensor.decision in REGENERATED else tensor.reason
            found[place, tensor.decision, reason].append(tensor)
    listed = [
        TableRow(_title(place, tensors), tuple(tensors)) for (place, *_), tensors in found.items()
    ]
    if every:
        return listed
    return sorted(listed, key=lambda row: -sum(t.nbytes for t in row.tensors))


def _without_layer(tensor: PlannedTensor) -> str:
    prefix = f"{tensor.layer}."
    inside = tensor.layer and tensor.name.startswith(prefix)
    return f"\0{tensor.name.removeprefix(prefix)}" if inside else tensor.name


def _title(place: str, tensors: Sequence[PlannedTensor]) -> str:
    """The name, with the layers that it stands for."""
    if not place.startswith("\0") or len(tensors) == 1:
        return tensors[0].name
    layers = list(dict.fromkeys(t.layer for t in tensors))
    stems = {layer.rpartition(".")[0] for layer in layers}
    numbers = [layer.rpartition(".")[2] for layer in layers]
    if len(layers) > 1 and len(stems) == 1 and all(n.isdigit() for n in numbers):
        stem = next(iter(stems))
        shown = f"{{{_ranges(sorted(map(int, numbers)))}}}"
        return f"{stem}.{shown}.{place[1:]}".lstrip(".")
    return f"{layers[0]}{'' if len(layers) == 1 else ', ...'}.{place[1:]}"


def _ranges(numbers: Sequence[int]) -> str:
    """0, 1, 2, 5 -> 0-2,5"""
    runs = [[n for _, n in run] for _, run in groupby(enumerate(numbers), lambda at: at[1] - at[0])]
    return ",".join(str(r[0]) if len(r) == 1 else f"{r[0]}-{r[-1]}" for r in runs)


def facts(plan: PlanData) -> Iterator[tuple[str, str]]:
    """The head of a report: the budget and the prediction."""
    before, after = plan.before, plan.after
    peak, host = plan.limits.peak, plan.limits.host
    yield "model", f"{plan.profile.model}, one step, {plan.profile.kind}"
    yield "hardware", f"{plan.hardware.name} ({plan.hardware.source})"
    budget = "none: what leaves without a stall" if peak is None else size(peak)
    yield "budget", f"{budget}; host {'without limit' if host is None else size(host)}"
    yield "peak", f"{size(before.peak)} {plan.owner(before)}, nothing moved"
    if plan.lean:
        yield "", f"{size(plan.lean)}, nothing moved, after fo.configure(model, prefer='memory')"
    yield "", f"{size(after.peak)} {plan.owner(after)}, by this plan"
    slower = (after.seconds / before.seconds - 1) * 100 if before.seconds else 0.0
    yield (
        "step",
        f"{before.seconds * 1e3:.2f} ms -> {after.seconds * 1e3:.2f} ms ({slower:+.2f} %): stalls "
        f"{after.stall * 1e3:.2f} ms, recomputation {after.recompute * 1e3:.2f} ms",
    )
    if plan.profile.network:
        sent = f"{plan.profile.network * 1e3:.2f} ms of transfers between ranks"
        yield "network", f"{sent}, {after.network * 1e3:.2f} ms of them beside no compute"
    lag = f"are let go {plan.settings.lag} layers later, {size(after.host)} of host memory"
    yield "offload", f"{size(after.moved)} leave and {lag}" if after.moved else "nothing leaves"
    if plan.bytes_of(QUANTIZE):
        took = f"made and read in {after.coding * 1e3:.2f} ms"
        yield "rounded", f"{size(plan.bytes_of(QUANTIZE))} leave as float8 codes, {took}: {BOUND}"
    rates = f"{plan.hardware.d2h.peak:.1f} GB/s out, {plan.hardware.h2d.peak:.1f} GB/s back"
    yield "", f"{size(plan.free)} can leave without a stall: {rates}"


def report(plan: PlanData, every: bool, wide: bool, width: int) -> str:
    """Head, warnings and assumptions, folded to so many columns; then the tensors of each decision and reason."""
    lines = []
    notes = [("WARNING", text) for text in plan.warnings] + [("assumed", t) for t in plan.assumed]
    for title, text in (*facts(plan), *notes):
        first, *more = textwrap.wrap(text, max(width - 10, 40), break_long_words=False)
        lines += [f"{title:9} {first}", *(f"{'':9} {line}" for line in more)]
    sections = _sections(plan, every)
    table = [row.line() for listed in sections.values() for row in listed]
    names, *widths = [
        max(map(len, column)) for column in zip(("", "", *TIMES), *table, strict=True)
    ]
    for (decision, reason), listed in sections.items():
        title = f"{decision} {_total(t for row in listed for t in row.tensors)}: {reason}"
        times = TIMES if wide and decision in (OFFLOAD, QUANTIZE) else ()
        lines += ["", _line(title, names + 4 + widths[0], times, widths[1:])]
        for name, *numbers in (row.line() for row in listed):
            lines.append(f"  {_line(name, names, numbers if wide else numbers[:1], widths)}")
    return "\n".join(lines)


def _line(left: str, width: int, numbers: Sequence[str], widths: Sequence[int]) -> str:
    aligned = [number.rjust(w) for number, w in zip(numbers, widths, strict=False)]
    return "  ".join([left.ljust(width), *aligned]).rstrip()


def _sections(plan: PlanData, every: bool) -> dict[tuple[str, str], list[TableRow]]:
    """The rows by decision and reason; reasons of recomputation are cut before their time."""
    found: dict[tuple[str, str], list[TableRow]] = defaultdict(list)
    for row in rows(plan, every):
        decision, reason = row.tensors[0].decision, row.tensors[0].reason
        found[decision, reason.split(",")[0] if decision in REGENERATED else reason].append(row)
    return {key: found[key] for key in sorted(found, key=lambda key: ORDER.index(key[0]))}


def ranks(plans: Sequence[PlanData]) -> list[tuple[str, ...]]:
    """The table of the ranks of a pipeline, below its titles."""
    found: list[tuple[str, ...]] = [
        ("rank", "peak", "planned", "where", "leaves", "waits ms", "step ms")
    ]
    for rank, plan in enumerate(plans):
        before, after = plan.before, plan.after
        sizes = size(before.peak), size(after.peak), plan.owner(after), size(after.moved)
        times = f"{after.stall * 1e3:.2f}", f"{after.seconds * 1e3:.2f}"
        found.append((str(rank), *sizes, *times))
    return found


def as_json(plan: PlanData) -> dict[str, Any]:
    """Plain data with a schema_version."""
    return {
        "schema_version": SCHEMA_VERSION,
        "model": plan.profile.model,
        "profile": plan.profile.kind,
        "hardware": plan.hardware.to_json(),
        "settings": plan.settings._asdict(),
        "limits": asdict(plan.limits),
        "fits": plan.fits,
        "free_bytes": plan.free,
        "lean_peak_bytes": plan.lean,
        "before": _outcome(plan, plan.before),
        "after": _outcome(plan, plan.after),
        "layers": list(plan.layers),
        "recomputed": list(plan.recomputed),
        "warnings": list(plan.warnings),
        "assumed": list(plan.assumed),
        "tensors": [
            {**t._asdict(), "window": None if t.window is None else t.window._asdict()}
            for t in plan.tensors
        ],
    }


def _outcome(plan: PlanData, simulation: Simulation) -> dict[str, Any]:
    return {
        "seconds": simulation.seconds,
        "stall_seconds": simulation.stall,
        "recompute_seconds": simulation.recompute,
        "coding_seconds": simulation.coding,
        "network_seconds": simulation.network,
        "peak_bytes": simulation.peak,
        "peak_owner": plan.owner(simulation),
        "moved_bytes": simulation.moved,
        "host_bytes": simulation.host,
        "stalls": [
            {"seconds": [w.start, w.end], "for": w.what, "lane": w.on} for w in simulation.stalls
        ],
    }
