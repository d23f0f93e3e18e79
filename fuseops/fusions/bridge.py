"""The one autograd Function: runs a segment forward, saves plain component tensors under names, runs it backward.

A `Saved` is stored as a row of slots into a flat tuple of tensors: one slot a tensor, however many fields hold it.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..errors import DoubleBackwardError
from ..ops import names
from ..ops.op import Grads, Out
from ..recipes import Quantized, gemm
from .segment import Segment, Step

SEGMENTS: dict[int, Segment] = {}  # a Function takes an int, which torch.compile treats as a constant


class _Const(NamedTuple):
    """A Saved field that is not a tensor (a shape); it costs no memory and is kept as it is."""

    value: Any


class _Parts(NamedTuple):
    """A quantized tensor in a row: its shell and the slot of every component."""

    shell: Quantized
    slots: tuple[tuple[str, int], ...]


Row = tuple[Any, ...]  # int slots, None, _Const or _Parts


# --- forward -------------------------------------------------------------------------------------------------------


def _call_of(step: Step, k: int, scratch: dict[str, Any] | None) -> Any:
    return step.calls[k]._replace(scratch=scratch) if step.live else step.calls[k]


def _run_op(step: Step, x: Any, t: list[Any], scratch: dict[str, Any] | None) -> Out:
    keywords = {name: t[position] for name, position in step.args[0]}
    if step.takes_call:
        keywords["call"] = _call_of(step, 0, scratch)
    out = step.target.fwd(x, **keywords)
    return out if type(out) is Out else Out(out, (x, *(keywords.get(n) for n in step.target.signature.keywords)))


def _run_fused(step: Step, x: Any, t: list[Any], scratch: dict[str, Any] | None) -> Out:
    members = tuple({name: t[position] for name, position in args} for args in step.args)
    calls = tuple(_call_of(step, k, scratch) for k in range(len(step.calls)))
    if step.kind == "joint":
        out: Out = step.target.fwd(x, members, calls, step.keep)
    else:
        out = step.target.fwd(x, members, calls)
    return out


def run_forward(
    seg: Segment, x: Any, t: list[Any], scratch: dict[str, Any] | None, quantize: bool = True
) -> tuple[Any, list[Any], list[torch.dtype]]:
    """Run the steps. Published side tensors are appended to `t`.   -> y, Saved by op, input dtypes of casts"""
    saved: list[Any] = [None] * len(seg.ops)
    casts: list[torch.dtype] = []
    for step in seg.forward:
        if step.cast is not None:
            casts.append(x.dtype)
            x = x.to(step.cast)
        if step.form is not None and quantize:
            x = gemm.quantize(x, step.form, None if step.offs is None else t[step.offs])
        out = _run_op(step, x, t, scratch) if step.kind == "op" else _run_fused(step, x, t, scratch)
        x = out.y
        if step.kind == "forward":
            for i, member in zip(step.members, out.saved, strict=True):
                saved[i] = member
        else:
            saved[step.members[0]] = out.saved
        for name, _ in step.writes:
            t.append((out.side or {})[name])
    return x, saved, casts


# --- saving --------------------------------------------------------------------------------------------------------


def _pack(seg: Segment, saved: list[Any]) -> tuple[list[Tensor], list[Row | None]]:
    """Flatten what is kept: every Saved field outside `keep` is dropped here."""
    flat: list[Tensor] = []
    slots: dict[int, int] = {}
    rows: list[Row | None] = [None] * len(seg.ops)
    for slot in seg.slots:
        values = saved[slot.owner]
        if values is None:
            continue
        row: list[Any] = [None] * len(slot.names)
        for k in slot.kept:
            row[k] = _place(values[k], flat, slots)
        rows[slot.owner] = tuple(row)
    return flat, rows


def _place(value: Any, flat: list[Tensor], slots: dict[int, int]) -> Any:
    if value is None:
        return None
    if isinstance(value, Tensor):
        key = id(value)
        if key not in slots:
            slots[key] = len(flat)
            flat.append(value)
        return slots[key]
    if isinstance(value, Quantized):
        parts = tuple((name, _place(c, flat, slots)) for name, c in value.components().items())
        return _Parts(value.rebuilt({}), parts)
    return _Const(value)


def _unpack(seg: Segment, rows: Sequence[Row | None], tensors: Sequence[Tensor]) -> list[Any]:
    saved: list[Any] = [None] * len(seg.ops)
    for slot in seg.slots:
        row = rows[slot.owner]
        if row is not None:
            saved[slot.owner] = slot.cls._make([tensors[e] if type(e) is int else _restore(e, tensors) for e in row])  # type: ignore[attr-defined]
    return saved


def _restore(entry: Any, tensors: Sequence[Tensor]) -> Any:
    if isinstance(entry, _Const):
        return entry.value
    if isinstance(entry, _Parts):
        return entry.shell.rebuilt({name: tensors[slot] for name, slot in entry.slots})
    return None


def _saved_names(seg: Segment, rows: Sequence[Row | None], flat: Sequence[Tensor], prefix: str, params: Sequence[Any]) -> list[names.SavedName]:
    found: list[list[str]] = [[] for _ in flat]
    ops: list[str] = ["" for _ in flat]
    own = {id(p) for p in params if p is not None}
    for slot in seg.slots:
        for name, entry in zip(slot.names, rows[slot.owner] or (), strict=False):
            parts = entry.slots if isinstance(entry, _Parts) else (("", entry),) if type(entry) is int else ()
            for component, position in parts:
                found[position].append(prefix + name + (f".{component}" if component else ""))
                ops[position] = slot.op
    return [
        names.SavedName(tuple(n), id(t) in own, op) for n, t, op in zip(found, flat, ops, strict=True)
    ]


# --- backward ------------------------------------------------------------------------------------------------------


def _add(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    return b if a is None else a if b is None else a + b


def _bwd(step: Step, saved: list[Any], dy: Any, dside: dict[str, Any], scratch: dict[str, Any] | None) -> tuple[Grads, ...]:
    if step.kind == "op":
        mine = saved[step.members[0]]
        op = step.target
        if op.pure:
            return (bwd_by_autograd(op, mine, dy, dside, step.calls[0]),)
        keywords: dict[str, Any] = {}
        if step.takes_call:
            keywords["call"] = _call_of(step, 0, scratch)
        if step.takes_dside:
            keywords["dside"] = dside
        return (op.bwd(mine if mine is not None else _empty(op.Saved), dy, **keywords),)
    calls = tuple(_call_of(step, k, scratch) for k in range(len(step.calls)))
    if step.kind == "joint":
        mine = saved[step.members[0]]
    else:
        mine = tuple(saved[i] if saved[i] is not None else _empty(op.Saved) for i, op in zip(step.members, step.target.members, strict=True))
    grads: tuple[Grads, ...] = step.target.bwd(mine, dy, calls, dside)
    return grads


def _empty(saved: Any) -> Any:
    return saved._make([None] * len(saved._fields))


def run_backward(
    seg: Segment, saved: list[Any], dy: Any, dsides: Sequence[Tensor | None], casts: Sequence[torch.dtype], scratch: dict[str, Any] | None
) -> list[Any]:
    """Run the backward steps.   -> gradient of x and of every input of the node, None where nobody wants one"""
    grads: list[Any] = [None] * seg.size
    for position, d in zip(seg.export_positions, dsides, strict=True):
        grads[position] = d
    cast_of = {step.members[0]: dtype for step, dtype in zip([s for s in seg.forward if s.cast is not None], casts, strict=True)}
    for step in seg.backward:
        dside = {name: grads[position] for name, position in step.writes}
        if dy is None and all(d is None for d in dside.values()):
            continue
        if step.form is not None and dy is not None:
            dy = gemm.quantize(dy, step.form, getattr(saved[step.members[-1]], "offs", None))
        results = _bwd(step, saved, dy, dside, scratch)
        for result, params, sides in zip(results, step.params, step.sides, strict=True):
            for name, position in params:
                grads[position] = (result.params or {}).get(name)
            for name, position in sides:
                grads[position] = _add(grads[position], (result.side or {}).get(name))
        dy = results[0].x
        if dy is not None and step.members[0] in cast_of:
            dy = dy.to(cast_of[step.members[0]])
    return [dy, *grads[: seg.inputs]]


def bwd_by_autograd(op: Any, saved: Any, dy: Any, dside: dict[str, Any], call: Any) -> Grads:
    """Backward of a level-1 op: autograd over its `fwd`, in the autocast state of the forward."""
    fields = ("x", *op.signature.keywords)
    with torch.enable_grad():
        tensors = {
            name: value.detach().requires_grad_(name in call.needs) if isinstance(value, Tensor) else value
            for name, value in zip(fields, saved, strict=True)
        }
        keywords = {n: v for n, v in tensors.items() if n != "x" and (v is not None or n not in op.signature.optional)}
        if op.signature.fwd_call:
            keywords["call"] = call
        out = op.fwd(tensors["x"], **keywords)
        out = out if isinstance(out, Out) else Out(out)
        pairs = [(out.y, dy), *((t, dside.get(name)) for name, t in (out.side or {}).items())]
        pairs = [(y, d) for y, d in pairs if d is not None and y.requires_grad]
        wanted = {n: tensors[n] for n in fields if n in call.needs and tensors[n] is not None}
        if not pairs or not wanted:
            return Grads()
        found = torch.autograd.grad([y for y, _ in pairs], list(wanted.values()), [d for _, d in pairs], allow_unused=True)
    by_name = dict(zip(wanted, found, strict=True))
    dx = by_name.pop("x", None)
    return Grads(dx, by_name, by_name)


# --- second derivatives ---------------------------------------------------------------------------------------------


class _FirstOrderOnly(torch.autograd.Function):
    """Passes gradients through, tied to every input of their node; raises when it is itself differentiated."""

    @staticmethod
    def forward(ctx: Any, message: str, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.message = message
        return tuple(t.view_as(t) for t in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise DoubleBackwardError(ctx.message)


def _first_order_only(seg: Segment, grads: list[Any], ties: Sequence[Tensor], message: str) -> list[Any]:
    where = [i for i, g in enumerate(grads) if g is not None]
    guarded = _FirstOrderOnly.apply(message, len(where), *(grads[i] for i in where), *ties)
    for i, g in zip(where, guarded, strict=True):
        grads[i] = g
    return grads


def _tie(t: Tensor) -> Tensor:
    """A handle on t's place in the graph that holds none of its memory."""
    handle = t.view_as(t)
    handle.data = torch.empty(0, dtype=t.dtype, device=t.device)
    return handle


# --- the Function --------------------------------------------------------------------------------------------------


class Live:
    """What a node needs at run time only: names to publish, ties for second derivatives, scratch, where it is."""

    __slots__ = ("frame", "path", "scratch", "ties")

    def __init__(self, path: str = "", scratch: dict[str, Any] | None = None) -> None:
        self.path = path
        self.scratch = scratch
        self.ties: list[Tensor] = []
        self.frame: names.Frame | None = None


class Node(torch.autograd.Function):
    """One segment in the autograd graph."""

    @staticmethod
    def forward(ctx: Any, seg_id: int, live: Live | None, x: Any, *inputs: Any) -> Any:
        seg = SEGMENTS[seg_id]
        t = list(inputs)
        scratch = None if live is None else live.scratch
        y, saved, ctx.casts = run_forward(seg, x, t, scratch)
        flat, ctx.rows = _pack(seg, saved)
        ctx.save_for_backward(*flat)
        ctx.set_materialize_grads(False)
        ctx.seg, ctx.live = seg, live
        if live is not None and live.frame is not None:
            live.frame.fill(_saved_names(seg, ctx.rows, flat, live.path, (*inputs,)[len(seg.reads) :]), flat)
        exported = [t[position] for position in seg.export_positions]
        integers = [e for e in exported if not (e.is_floating_point() or e.is_complex())]
        if integers:
            ctx.mark_non_differentiable(*integers)
        return (y, *exported) if exported else y

    @staticmethod
    def backward(ctx: Any, dy: Any, *dsides: Any) -> Any:
        seg: Segment = ctx.seg
        saved = _unpack(seg, ctx.rows, ctx.saved_tensors)
        scratch = None if ctx.live is None else ctx.live.scratch
        if not torch.is_grad_enabled():
            return (None, None, *_backward_in(seg, saved, dy, dsides, ctx.casts, scratch, ctx.live))
        with torch.no_grad():
            grads = _backward_in(seg, saved, dy, dsides, ctx.casts, scratch, ctx.live)
        ties = [*ctx.live.ties, *_leaves(ctx), *(d for d in (dy, *dsides) if d is not None)]
        ties += [t for t in ctx.saved_tensors if t.requires_grad]
        return (None, None, *_first_order_only(seg, grads, ties, _no_second_derivative(seg, ctx.live)))


def _leaves(ctx: Any) -> list[Tensor]:
    return [node.variable for node, _ in ctx.next_functions if hasattr(node, "variable")]


def _where(seg: Segment, live: Live | None) -> str:
    prefix = "" if live is None else live.path
    inner = seg.names[0] if len(seg.names) == 1 else f"{seg.names[0]}..{seg.names[-1]}"
    return f"'{prefix}{inner}' ({', '.join(dict.fromkeys(type(op).__name__ for op in seg.ops))})"


def _no_second_derivative(seg: Segment, live: Live | None) -> str:
    return (
        f"second derivative through {_where(seg, live)}: fuseops ops have a first derivative by hand. "
        "Run the forward under `with fuseops.reference():` to differentiate twice."
    )


def _backward_in(
    seg: Segment, saved: list[Any], dy: Any, dsides: Any, casts: Any, scratch: Any, live: Live | None
) -> list[Any]:
    """`run_backward` with autocast off, and with a note on any error that says where it happened."""
    if torch.compiler.is_compiling():
        return run_backward(seg, saved, dy, dsides, casts, scratch)
    run: Callable[[], list[Any]] = lambda: run_backward(seg, saved, dy, dsides, casts, scratch)  # noqa: E731
    try:
        if seg.autocast is None:
            return run()
        with torch.autocast(seg.autocast, enabled=False):
            return run()
    except Exception as error:
        error.add_note(f"in the backward of fuseops {_where(seg, live)}; dy {describe(dy)}")
        raise


def describe(t: Any) -> str:
    """Dtype, shape and device of a tensor, for messages."""
    if isinstance(t, Tensor):
        return f"{str(t.dtype).removeprefix('torch.')}{list(t.shape)} on {t.device}"
    return type(t).__name__


def run_node(seg: Segment, live: Live, x: Any, inputs: Sequence[Any]) -> Any:
    """Apply the Function; ties and names are made only where somebody can ask for them."""
    live.ties = [_tie(t) for t in (x, *inputs) if t is not None and t.requires_grad and t.grad_fn is not None]
    if x.requires_grad and x.is_leaf:
        live.ties.append(_tie(x))
    if not names.thread.observers:
        return Node.apply(seg.id, live, x, *inputs)
    live.frame = names.Frame()
    with names.published(live.frame):
        try:
            return Node.apply(seg.id, live, x, *inputs)
        finally:
            live.frame = None

