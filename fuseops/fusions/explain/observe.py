"""Which module runs: follows one real forward through global module hooks and the watchers of
run.py.

Hooks of torch's own table, not hooks on the ops: an op with a hook of its own would be planned
differently.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from typing import Any, NamedTuple

from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from fuseops.fusions.build import RunPlan
from fuseops.fusions.plan import Edge, Miss, SavedTensor, Span
from fuseops.fusions.run import Run
from fuseops.fusions.runner import Composed, runner_of
from fuseops.ops import scopes
from fuseops.ops.op import Op

from .fusion_plan import FusionPlan
from .saved import Where


class Seen(NamedTuple):
    """What is remembered of a tensor."""

    shape: tuple[int, ...]
    itemsize: int


class Call:
    """One call of a Sequential."""

    def __init__(self, module: Composed, path: str, parent: Call | None) -> None:
        self.module, self.path, self.parent = module, path, parent
        self.pieces: Sequence[tuple[str, Run | nn.Module]] = tuple(runner_of(module).pieces)
        self.wanted = sum(isinstance(piece, Run) for _, piece in self.pieces)
        self.runs: list[tuple[RunPlan, Seen | None]] = []
        self.nested: list[Call] = []
        self.packed = 0
        self.gemms: list[str] = []  # what ran, in words
        self.x: Seen | None = None

    def starts_with(self, op: Any) -> bool:
        """Is the next run of this call the one that begins with `op`?"""
        runs = [piece for _, piece in self.pieces if isinstance(piece, Run)]
        return len(self.runs) < len(runs) and runs[len(self.runs)].ops[0] is op


class _Frame(NamedTuple):
    module: nn.Module
    path: str
    call: Call | None


class Observer:
    """The calls of Sequentials during one forward, as a tree."""

    def __init__(self, root: nn.Module, paths: Mapping[int, str]) -> None:
        self.paths = paths
        self.calls: list[Call] = []  # those inside no other
        self.alone: dict[str, Op[Any]] = {}  # ops called outside of any Sequential
        self._frames: list[_Frame] = []
        self._running: Call | None = None  # whose run of ops began last
        self._thread = threading.get_ident()
        self._owners = {
            id(piece.ops[0]): module
            for module in root.modules()
            if isinstance(module, Composed)
            for _, piece in runner_of(module).pieces
            if isinstance(piece, Run)
        }

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Follow what runs in this thread; nothing stays installed."""
        handles = [
            register_module_forward_pre_hook(self._enter),
            register_module_forward_hook(self._leave, always_call=True),
        ]
        try:
            with scopes.watching(self._watch):
                yield
        finally:
            for handle in handles:
                handle.remove()

    def where(self, by_node: bool) -> Where:
        """For the ledger: whose tensor is packed right now. by_node: by a node of fuseops."""
        if not self._frames:
            return Where(None, "", None)
        module, path, call = self._frames[-1]
        if by_node and not isinstance(module, Op):
            call = self._running
        if call is not None:
            call.packed += 1
        if not isinstance(module, Op):
            return Where(call, path, None)
        ((name, _),) = module._planned()
        return Where(call, path, f"{module.__dict__.get('_prefix', '')}{name}.")

    def ran(self, gemm: str) -> None:
        """For `Launches`: the run that began last launched a grouped GEMM."""
        if self._running is not None:
            self._running.gemms.append(gemm)

    # --- hooks

    def _enter(self, module: nn.Module, args: Any) -> None:
        if threading.get_ident() != self._thread:
            return
        outer = self._frames[-1] if self._frames else _Frame(module, "", None)
        path = self.paths.get(id(module), outer.path)
        call = outer.call
        if isinstance(module, Composed):
            call = self._called(module, path, outer.call)
            call.x = _seen(args[0]) if args else None
        self._frames.append(_Frame(module, path, call))

    def _leave(self, module: nn.Module, args: Any, output: Any) -> None:
        if threading.get_ident() != self._thread or all(
            f.module is not module for f in self._frames
        ):
            return
        while self._frames.pop().module is not module:
            pass
        frame = self._frames[-1] if self._frames else _Frame(module, "", None)
        called = frame.call is not None and frame.module is frame.call.module
        if called and module in frame.module.children():  # not the parametrization of an op
            frame.call.x = _seen(output)  # type: ignore[union-attr]

    def _called(self, module: Composed, path: str, parent: Call | None) -> Call:
        call = Call(module, path, parent)
        (self.calls if parent is None else parent.nested).append(call)
        return call

    def _watch(self, plan: RunPlan) -> None:
        """A run of ops begins."""
        op = plan.segments[0].ops[0]
        module, path, call = self._frames[-1] if self._frames else _Frame(op, "", None)
        if isinstance(module, Op):
            if call is None:
                self.alone[path] = module
            return
        if call is None or not call.starts_with(op):
            call = self._unannounced(op, call)
        self._running = call
        if call is not None:
            call.runs.append((plan, call.x))

    def _unannounced(self, op: Any, call: Call | None) -> Call | None:
        """The call of a Sequential whose `forward` was called as a method, which no hook sees."""
        siblings = self.calls if call is None else call.nested
        if siblings and siblings[-1].starts_with(op):
            return siblings[-1]
        owner = self._owners.get(id(op))
        return None if owner is None else self._called(owner, self.paths.get(id(owner), ""), call)


def _seen(x: Any) -> Seen | None:
    x = x[0] if isinstance(x, tuple) and x else x
    return Seen(tuple(x.shape), x.element_size()) if isinstance(x, Tensor) else None


# --- from a call to its plan ----------------------------------------------------------------------


class _Part(NamedTuple):
    """What one piece of a Sequential, a run of ops or a module, adds to its plan."""

    forward: Sequence[Span]
    backward: Sequence[Span]
    misses: Sequence[Miss] = ()
    edges: Sequence[Edge] = ()
    segments: Sequence[tuple[int, int]] = ()
    notes: Sequence[str] = ()
    temporaries: int = 0


def plan_from(call: Call, saved: Sequence[tuple[Any, SavedTensor]]) -> FusionPlan:
    """The public plan of a call."""
    mine = tuple(t for owner, t in saved if _within(owner, call))
    parts = list(_parts(call, {t.name for t in mine}))

    def every(field: str) -> tuple[Any, ...]:
        return tuple(chain.from_iterable(getattr(part, field) for part in parts))

    return FusionPlan(
        path=call.path,
        forward=every("forward"),
        backward=every("backward"),
        misses=every("misses"),
        saved=mine,
        edges=every("edges"),
        segments=every("segments"),
        notes=(*dict.fromkeys(every("notes")), *dict.fromkeys(call.gemms), *_notes_on(call)),
        temporaries=max((part.temporaries for part in parts), default=0),
        nested=tuple(plan_from(inner, saved) for inner in call.nested),
    )


def _parts(call: Call, kept: set[str]) -> Iterator[_Part]:
    offset, runs = 0, iter(call.runs)
    for name, piece in call.pieces:
        if not isinstance(piece, Run):
            yield _of_module(name, piece, offset)
            offset += 1
            continue
        plan, x = next(runs, (None, None))
        if plan is not None:
            yield _of_run(piece, plan, _largest_output(piece, plan, x, call.path, kept))
        offset += len(piece.ops)


def _of_module(name: str, module: nn.Module, at: int) -> _Part:
    what = "a Sequential of its own" if isinstance(module, Composed) else "plain module"
    cls = type(module).__name__
    span = Span(at, at + 1, (name,), cls, None, "module", what, (cls,))
    return _Part([span], [span])


def _of_run(run: Run, plan: RunPlan, temporaries: int) -> _Part:
    return _Part(
        forward=[_typed(s, run) for s in plan.forward],
        backward=[_typed(s, run) for s in plan.backward],
        misses=plan.misses,
        edges=plan.edges,
        segments=[(s.start + run.offset, s.stop + run.offset) for s in plan.segments],
        notes=list(_notes_of(plan)),
        temporaries=temporaries,
    )


def _within(owner: Call | None, call: Call) -> bool:
    while owner is not None and owner is not call:
        owner = owner.parent
    return owner is call


def _typed(span: Span, run: Run) -> Span:
    ops = run.ops[span.start - run.offset : span.stop - run.offset]
    return span._replace(types=tuple(type(op).__name__ for op in ops))


_RUNS = {"call": "is called through its own __call__", "plain": "runs as plain torch"}


def _notes_of(plan: RunPlan) -> Iterator[str]:
    if plan.forward and all(s.note == "reference" for s in plan.forward):
        yield "fuseops.reference(): every op runs as plain torch, and no rule is tried"
        return
    for span in plan.forward:
        if span.kind in _RUNS and span.note != "alias":
            how = f"{_RUNS[span.kind]}, and no rule matches it: {span.note}"
            yield f"{span.ops[0]} ({span.runs}) {how}"
    if plan.edges:
        yield "GEMMs multiply what quantized operands stand for: no kernel uses FP8 tensor cores yet"


def _notes_on(call: Call) -> Iterator[str]:
    nodes = [seg for plan, _ in call.runs for seg in plan.segments if seg.kind == "node"]
    settings = scopes.resolve(call.module._settings)
    for name, child in call.module.named_children():
        if isinstance(child, Op) and child._settings:
            own = scopes.resolve(child._settings).difference(settings)
            if own:
                which = f"{name} ({type(child).__name__}) was configured by itself"
                yield f"{which}, which holds only where it is called alone: {'; '.join(own)} here"
    if len(call.runs) < call.wanted:
        ran = f"{len(call.runs)} of its {call.wanted} runs of ops ran"
        yield f"{ran}: forward is overridden, or was left early"
    if nodes and not any(seg.needs_grad for seg in nodes):
        yield "no gradient is wanted: nothing is saved"
    elif not call.packed and any(seg.needs_grad and seg.slots for seg in nodes):
        yield "a saved-tensors hook of the model took what this saves (a checkpoint, or a scope)"


def _largest_output(run: Run, plan: RunPlan, x: Seen | None, path: str, kept: set[str]) -> int:
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
        if f"{prefix}{following}.x" not in kept and not run.ops[stop - 1].alias:
            size = itemsize
            for n in shape:
                size *= n
            largest = max(largest, size)
    return largest
