"""Makes the public plan of an observed call: spans, misses, notes, and the largest temporary."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from typing import Any

from torch import nn

from fuseops.observe.observer import OpsAlone, SeenTensor, SequentialCall
from fuseops.ops import scopes
from fuseops.ops.op import Op, numel
from fuseops.plan.build import RunPlan
from fuseops.plan.records import HIGH, SavedTensor, Span
from fuseops.recipes.gain import Gain
from fuseops.rules.builtin_rules import POINTWISE
from fuseops.run.composed import Composed
from fuseops.run.run import Run
from fuseops.run.runner import runner_of
from fuseops.run.splice import border_reason
from fuseops.words import size

from .explanation import FusionPlan


def plan_from(call: SequentialCall, saved: Sequence[tuple[Any, SavedTensor]]) -> FusionPlan:
    """The public plan of a call."""
    own = tuple(t for owner, t in saved if _is_inside(owner, call))
    parts = list(_parts(call, {t.name for t in own}))

    def every(field: str) -> tuple[Any, ...]:
        return tuple(chain.from_iterable(getattr(part, field) for part in parts))

    return FusionPlan(
        path=call.path,
        forward=every("forward"),
        backward=every("backward"),
        misses=every("misses"),
        saved=own,
        operands=every("operands"),
        weights=every("weights"),
        segments=every("segments"),
        notes=(
            *dict.fromkeys(every("notes")),
            *dict.fromkeys(call.gemms),
            *_call_notes(call),
            *notes_alone(call.alone),
        ),
        temporaries=max((part.temporaries for part in parts), default=0),
        nested=tuple(plan_from(inner, saved) for inner in call.nested),
        kind=type(call.module).__name__,
    )


def _parts(call: SequentialCall, saved_names: set[str]) -> Iterator[FusionPlan]:
    """A plan for each piece of the call: a run of ops, or a plain module."""
    offset, runs = 0, iter(call.runs)
    for name, piece in call.pieces:
        if not isinstance(piece, Run):
            span = _module_span(name, piece, offset, call.module)
            yield FusionPlan(call.path, (span,), (span,))
            offset += 1
            continue
        plan, x = next(runs, (None, None))
        if plan is not None:
            yield _run_plan(piece, plan, x, call.path, saved_names)
        offset += len(piece.ops)


def _module_span(name: str, module: nn.Module, at: int, outer: Composed) -> Span:
    what = "plain module"
    if isinstance(module, Composed):
        what = f"a Sequential of its own: {border_reason(module, outer._settings)}"
    cls = type(module).__name__
    return Span(at, at + 1, (name,), cls, None, "module", what, (cls,))


def _run_plan(
    run: Run, plan: RunPlan, x: SeenTensor | None, path: str, saved_names: set[str]
) -> FusionPlan:
    remarks = ((name, op.across_ranks.note) for name, op in zip(run.names, run.ops, strict=True))
    op_notes = (f"{name}: {note}" for name, note in remarks if note)
    return FusionPlan(
        path,
        forward=tuple(_with_types(s, run) for s in plan.forward),
        backward=tuple(_with_types(s, run) for s in plan.backward),
        misses=plan.misses,
        operands=plan.operands,
        weights=plan.weights,
        segments=tuple((s.start + run.offset, s.stop + run.offset) for s in plan.segments),
        notes=(*_run_notes(plan), *op_notes, *_dispatch_notes(run, plan, path, saved_names)),
        temporaries=_largest_output(run, plan, x, path, saved_names),
    )


def _is_inside(owner: SequentialCall | None, call: SequentialCall) -> bool:
    while owner is not None and owner is not call:
        owner = owner.parent
    return owner is call


def _dispatch_notes(run: Run, plan: RunPlan, path: str, saved_names: set[str]) -> Iterator[str]:
    """Notes on fused ops that do not save the tokens from other ranks, but dispatch them again."""
    for step in (step for seg in plan.segments for step in seg.forward if step.kind == "joint"):
        names = [step.target.names[field] for field in step.target.again]
        for member, _, field in (name.partition(".") for name in names[:1]):
            of = run.names[step.at - run.offset + int(member)]
            if f"{path}.{of}.{field}".lstrip(".") in saved_names:
                yield f"{of}: tokens that arrive from other ranks are not saved, but dispatched again in the backward"


def _with_types(span: Span, run: Run) -> Span:
    ops = run.ops[span.start - run.offset : span.stop - run.offset]
    return span._replace(types=tuple(type(op).__name__ for op in ops))


_HOW_CALLED = {"call": "is called through its own __call__", "plain": "runs as plain torch"}


def _run_notes(plan: RunPlan) -> Iterator[str]:
    notes = [s.note.partition("; ") for s in plan.forward]
    if notes and all(why == "reference" for why, _, _ in notes):
        yield "fuseops.reference(): every op runs as plain torch, and no rule is tried"
        yield from dict.fromkeys(ignored for _, _, ignored in notes if ignored)
        return
    for span in plan.forward:
        if span.kind in _HOW_CALLED and span.note != "alias":
            how = f"{_HOW_CALLED[span.kind]}, and no rule matches it: {span.note}"
            yield f"{span.ops[0]} ({span.runs}) {how}"
    yield from (f"{each.op} ({each.type}): {each.note}" for each in plan.high)
    yield from map(_gain_note, plan.gains)
    if any(operand.kernels for operand in plan.operands):
        yield "FP8 tensor cores multiply quantized operands on Hopper; elsewhere GEMMs multiply what they stand for"
    others = dict.fromkeys(o.format for o in plan.operands if not o.kernels and o.format != HIGH)
    if others:
        names = ", ".join(others)
        yield f"{names}: GEMMs multiply what such codes stand for, exactly; small blocks as they are on Blackwell"


def _gain_note(gain: Gain) -> str:
    """The note of the predicted gain of a recipe, and whether it is used."""
    ops, moved = ", ".join(gain.ops), size(gain.nbytes)
    said = (
        f"a step in FP8 is predicted to be {gain.speedup:.2f} times as fast over {gain.rows} rows"
    )
    if gain.used:
        always = (
            "; any number is quantized: ranks send their rows in one format" if gain.sent else ""
        )
        return f"{ops}: {said}; the passes that quantize move {moved} of it{always}"
    until = "with no number of rows" if gain.min_rows is None else f"from {gain.min_rows} rows on"
    return (
        f"{ops}: high precision: {said}, since the passes that quantize would move {moved}; it pays {until}. "
        "fo.recipe(..., strict=True) quantizes all the same"
    )


def _call_notes(call: SequentialCall) -> Iterator[str]:
    for (op, why), kernels in call.twins.items():
        yield f"{op} runs as plain torch instead of {', '.join(kernels)}: {why}"
    nodes = [seg for plan, _ in call.runs for seg in plan.segments if seg.kind == "node"]
    pure = [type(step.target).__name__ for seg in nodes for step in seg.forward if step.pure]
    settings = scopes.resolve(call.module._settings)
    for name, child, *_ in runner_of(call.module).planned:
        if isinstance(child, Op) and child._settings:
            own = scopes.resolve(child._settings).difference(settings)
            if own:
                which = f"{name} ({type(child).__name__}) was configured by itself"
                yield f"{which}, which holds only where it is called alone: {'; '.join(own)} here"
    here = scopes.tokens(call.module._settings)
    if pure and (now := scopes.resolve(*here)).fusion and POINTWISE not in now.rules:
        which = ", ".join(dict.fromkeys(pure))
        yield f"{which}: a pure fwd runs as plain torch; rule {POINTWISE.name} makes one kernel of what is elementwise"
    if len(call.runs) < len(call.expected):
        ran = f"{len(call.runs)} of its {len(call.expected)} runs of ops ran"
        yield f"{ran}: forward is overridden, or was left early"
    if nodes and not any(seg.needs_grad for seg in nodes):
        yield "no gradient is wanted: nothing is saved"
    elif not call.num_saved and any(any(seg.saved_names.values()) for seg in nodes):
        yield "a saved-tensors hook of the model took what this saves (a checkpoint, or a scope)"


def _largest_output(
    run: Run, plan: RunPlan, x: SeenTensor | None, path: str, saved_names: set[str]
) -> int:
    """Bytes of the largest output of a forward span that the next op does not save as its x."""
    if x is None:
        return 0
    prefix, largest, itemsize = f"{path}." if path else "", 0, x.itemsize
    casts = [step.cast for seg in plan.segments for step in seg.forward]
    shape = x.shape
    for span, cast in zip(plan.forward, casts, strict=False):
        itemsize = itemsize if cast is None else cast.itemsize
        stop = span.stop - run.offset
        for op in run.ops[span.start - run.offset : stop]:
            shape = op.out_shape(shape)
        following = run.names[stop] if stop < len(run.names) else None
        if f"{prefix}{following}.x" not in saved_names and not run.ops[stop - 1].alias:
            largest = max(largest, itemsize * numel(shape))
    return largest


def notes_alone(found: OpsAlone) -> Iterator[str]:
    """Notes on ops that are called by themselves."""
    alone: dict[str, list[str]] = {}
    high: dict[str, dict[str, list[str]]] = {}
    for at, (op, plan) in found.items():
        kind = type(op).__name__
        alone.setdefault(kind, []).append(at)
        for each in plan.high:
            high.setdefault(each.note, {}).setdefault(kind, []).append(at)
    if alone:
        yield f"{_counted(alone)}: called alone; rules match only inside a fuseops.Sequential"
    yield from (f"{_counted(ops)}: {note}" for note, ops in high.items())


def _counted(ops: Mapping[str, list[str]]) -> str:
    """Ops by class: the path of one, the number of many."""
    return ", ".join(
        f"{at[0]} ({kind})".strip() if len(at) == 1 else f"{len(at)} {kind}"
        for kind, at in ops.items()
    )
