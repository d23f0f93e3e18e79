"""The one autograd Function: runs the steps of a segment forward, saves what is kept, runs them backward."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fuseops import torch_private
from fuseops.errors import FuseOpsError
from fuseops.kernels import registry
from fuseops.ops import names
from fuseops.ops.op import Call, Grads, Out
from fuseops.plan.segment import BackwardStep, ForwardStep, Segment, Step
from fuseops.recipes import Quantized

from . import buffers, checks, pure, second_order, weight_grads
from .buffers import Buffers
from .checks import describe
from .first import FirstCall
from .saving import pack, saved_names, unpack
from .traced import TABLE, distinct

new = tuple.__new__
OUT = Call._fields.index("out")  # `scratch` is the last field
Saved = Sequence[Any] | Mapping[int, Any]  # by index of the op in the segment


class Once(NamedTuple):
    """What lives for one call only."""

    scratch: dict[str, dict[str, Any]] | None = None  # by the Sequential that an op was written in
    out: Buffers | None = None  # the caller's, of an op that runs alone
    look: FirstCall | None = None  # looks at the first forward and the first backward of a segment
    seed: Tensor | None = None  # (1,) int64, of a backward that rounds at random


class Live:
    """What a node needs at run time only: where it is, what lives for its call, names to publish, ties for second
    derivatives; while it is applied, the quantized tensor whose carrier crosses its border.
    """

    __slots__ = ("crossing", "frame", "once", "path", "ties")

    def __init__(self, path: str, once: Once) -> None:
        self.path = path
        self.once = once
        self.ties: Sequence[Tensor] = ()
        self.crossing: Quantized | None = None
        self.frame: names.Frame | None = None


# --- forward -------------------------------------------------------------------------------------------------------


def run_forward(
    seg: Segment,
    x: Any,
    t: list[Any],
    once: Once,
) -> tuple[Any, list[Any], list[torch.dtype | None]]:
    """Run the steps. Published side tensors are appended to `t`.   -> y, Saved by op, input dtype by op"""
    saved: list[Any] = [None] * len(seg.ops)
    entered: list[torch.dtype | None] = [None] * len(seg.ops)
    look = once.look
    for step in seg.forward:
        first = step.first
        entered[first] = x.dtype
        if type(x) is Quantized and not step.codes:
            x = x.dequantize()
        if look is not None:
            look.before_fwd(step, x, t)
        if step.plain:  # most are: no call between here and there
            keywords = {**step.keywords}
            for name, position in step.args[0]:
                keywords[name] = t[position]
            out = step.target.fwd(x, **keywords)
            if type(out) is not Out:
                out = checks.bare(step, out)
            if look is not None:
                look.after_fwd(step, out)
            saved[first] = out.saved
            x = out.y
            continue
        if step.cast is not None:
            x = x.to(step.cast)
        if step.kind == "op":
            keywords = {name: t[position] for name, position in step.args[0]}
            if step.keywords:
                keywords["call"] = _calls(step, once)[0] if step.live else step.calls[0]
            if step.pure:
                out = pure.run_fwd(step, x, keywords, seg.needs_grad, once.scratch)
            else:
                out = step.target.fwd(x, **keywords)
            if type(out) is not Out:
                out = checks.bare(step, out)
            saved[first] = pure.inputs_saved(step, x, keywords) if step.pure else out.saved
        else:
            if step.kind == "forward" and seg.needs_grad:
                pure.keep_states(step.target.members, step.at, once.scratch)
            out = _run_fused(step, x, t, once)
        if look is not None:
            look.after_fwd(step, out)
        if step.kind != "op":
            for i, member in zip(
                step.members, (out.saved,) if step.kind == "joint" else out.saved, strict=False
            ):
                saved[i] = member
        x = out.y
        for name, _ in step.writes:
            try:
                t.append(out.side[name])  # type: ignore[index]
            except (TypeError, KeyError):
                raise checks.unpublished(step, name, out.side) from None
    if look is not None:
        seg.checked_forward = True
    if once.out is not None and "y" in once.out:
        x = buffers.put("y", once.out["y"], x).detach()
    return x, saved, entered


def _calls(
    step: Step, once: Once, main: Sequence[weight_grads.Destinations] | None = None
) -> Sequence[Any]:
    """The calls of a step with what lives for one call only."""
    shared, out = once.scratch, once.out
    if shared is not None:
        for scope in step.scopes:
            if scope not in shared:
                shared[scope] = {}
    calls: list[Any] = [
        # `_replace`, without a call for each
        new(
            Call, (*call[:OUT], out, *call[OUT + 1 : -1], None if shared is None else shared[scope])
        )
        for call, scope in zip(step.calls, step.scopes, strict=True)
    ]
    if once.seed is not None:  # numbers of its own for each op, and each of its two layouts
        first = 2 * step.at
        calls = [c._replace(seed=once.seed + first + 2 * k) for k, c in enumerate(calls)]
    return tuple(calls) if main is None else weight_grads.with_buffers(calls, main)


def _run_fused(step: ForwardStep, x: Any, t: list[Any], once: Once) -> Out:
    members = tuple([{name: t[position] for name, position in args} for args in step.args])
    calls = _calls(step, once) if step.live else step.calls
    if step.kind == "joint":
        out: Out = step.target.fwd(x, members, calls, step.keep)
    else:
        out = step.target.fwd(x, members, calls)
        if type(out) is not Out or out.saved is None or len(out.saved) != len(members):
            raise checks.wrong_saved(step, out)
    return out


# --- backward ------------------------------------------------------------------------------------------------------


def run_backward(
    seg: Segment,
    saved: list[Any],
    dy: Any,
    dsides: Sequence[Tensor | None],
    entered: Sequence[torch.dtype | None],
    once: Once,
) -> list[Any]:
    """Run the backward steps.   -> gradient of x and of every input of the node, None where nobody wants one

    Each op gets dy in the dtype of its y. The gradients that leave the node are cast by autograd itself.
    What an op saved leaves `saved` as the op takes it, so that it lives no longer than it is read.
    """
    look = once.look
    grads: list[Any] = [None] * seg.size
    for position, d in zip(seg.export_positions, dsides, strict=True):
        grads[position] = d
    if once.out is not None:
        buffers.check_dy(once.out, dy)
    for step in seg.backward:
        first, partly = step.first, False
        if step.plain:
            if dy is None:
                continue
            if look is not None:
                look.before_bwd(step, saved, dy, None)
            own, saved[first] = saved[first] or step.empty[0], None
            results: Sequence[Grads] = (step.target.bwd(own, dy, **step.keywords),)
            own = None
        else:
            dside = {name: grads[position] for name, position in step.writes} or None
            if dy is None and (dside is None or all(d is None for d in dside.values())):
                continue
            partly = dside is not None and (dy is None or any(d is None for d in dside.values()))
            if look is not None:
                look.before_bwd(step, saved, dy, dside)
            results = _run_step(seg, step, saved, dy, dside, once)
        try:
            missing = False
            for member, name, position in step.params:
                grads[position] = given = results[member].params[name]  # type: ignore[index]
                missing = missing or given is None
            for member, name, position in step.sides:
                given = results[member].side[name]  # type: ignore[index]
                grads[position] = _add(grads[position], given)
                missing = missing or given is None
            dy = results[0].x
            if missing or (dy is None and step.dx):
                checks.check_complete(step, results, partly)
        except (TypeError, KeyError, AttributeError, IndexError):
            raise checks.wrong_grads(step, results) from None
        if look is not None:
            look.after_bwd(step, results)
        dtype = entered[first]
        if dy is not None and dtype is not None and dy.dtype is not dtype:
            dy = dy.to(dtype)
    if look is not None:
        seg.checked_backward = True
    if dy is not None and once.out is not None and "dx" in once.out:
        dy = buffers.put("dx", once.out["dx"], dy)
    return [dy, *grads[: seg.inputs]]


def _run_step(
    seg: Segment,
    step: BackwardStep,
    saved: Saved,
    dy: Any,
    dside: dict[str, Any] | None,
    once: Once,
) -> Sequence[Grads]:
    """`_results`, and parameter gradients that do not go through autograd put where they belong."""
    if step.later is None and not step.main:
        return _results(step, None, saved, dy, dside, once)
    # what waits for backward_dw holds what this step saved, and no more
    mine = saved if step.later is None else {i: saved[i] for i in step.members}
    run = partial(_results, saved=mine, dy=dy, dside=dside, once=once)
    return weight_grads.elsewhere(step, [seg.ops[i] for i in step.members], run, mine, dy)


def _results(
    step: BackwardStep,
    out: Sequence[weight_grads.Destinations] | None,
    saved: Saved,
    dy: Any,
    dside: dict[str, Any] | None,
    once: Once,
) -> Sequence[Grads]:
    """The Grads of every member of a step."""
    if step.kind == "op":
        return (_op_bwd(step, _taken(saved, step.members[0]), dy, dside, once, out),)
    return _fused_bwd(step, saved, dy, dside or {}, once, out)


def _taken(saved: Saved, i: int) -> Any:
    """What op i saved; the caller's list lets go of it."""
    own = saved[i]
    if type(saved) is list:
        saved[i] = None
    return own


def _op_bwd(
    step: BackwardStep, saved: Any, dy: Any, dside: dict[str, Any] | None, once: Once, out: Any
) -> Grads:
    if step.pure:
        first = once.look is not None
        return pure.bwd_by_autograd(step, saved, dy, dside or {}, first, once.scratch)
    keywords = step.keywords
    if step.takes_dside:
        keywords = {**keywords, "dside": dside or {}}
    if step.live:
        keywords = {**keywords, "call": _calls(step, once, out)[0]}
    grads: Grads = step.target.bwd(saved or step.empty[0], dy, **keywords)
    return grads


def _add(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    return b if a is None else a if b is None else a + b


def _fused_bwd(
    step: BackwardStep, saved: Saved, dy: Any, dside: dict[str, Any], once: Once, out: Any
) -> Sequence[Grads]:
    calls = _calls(step, once, out) if step.live else step.calls
    bwd: Callable[..., Sequence[Grads]] = step.target.bwd
    if step.kind == "joint" and step.target.takes_saved:
        return bwd([_taken(saved, step.members[0]) or step.empty[0]], dy, calls, dside)
    if step.kind == "joint":
        return bwd(_taken(saved, step.members[0]) or step.empty[0], dy, calls, dside)
    mine = [_taken(saved, i) or none for i, none in zip(step.members, step.empty, strict=True)]
    return bwd(tuple(mine), dy, calls, dside)


# --- the Function --------------------------------------------------------------------------------------------------


class Node(torch.autograd.Function):
    """One segment in the autograd graph."""

    @staticmethod
    def forward(ctx: Any, which: Segment | int, live: Live | None, x: Any, *inputs: Any) -> Any:
        # traced code passes a constant that stands for the segment
        seg: Segment = TABLE[which] if isinstance(which, int) else which
        t = list(inputs)
        if live is None:
            y, saved, ctx.entered = run_forward(seg, x, t, Once())
            y = y.dequantize() if type(y) is Quantized else y
            # torch 2.11 drops the gradient of a traced output that a no-op `.to` gave
            y = y.view_as(y)
        else:
            if not seg.checked_backward:
                live.once = live.once._replace(look=FirstCall(seg, inputs))
            here = registry.thread
            before, here.unseen = here.unseen, seg.quiet and registry.unseen()
            arrived, live.crossing = live.crossing, None
            try:
                y, saved, ctx.entered = run_forward(seg, arrived or x, t, live.once)
            finally:
                here.unseen = before
            if type(y) is Quantized:
                live.crossing, y = y, y.carrier
        flat, ctx.rows = pack(seg, saved, traced=live is None)
        ctx.save_for_backward(*flat)
        if live is not None:
            live.ties = second_order.ties_of(x, inputs, flat)
        ctx.set_materialize_grads(False)
        ctx.seg, ctx.live = seg, live
        # drawn here: a backward that runs twice, or after a recomputation, rounds alike
        ctx.seed = torch.randint(2**62, (1,), device=x.device) if seg.random else None
        if seg.elsewhere:
            weight_grads.note(seg)
            ctx.given = [i is not None for i in inputs]
        if live is not None and live.frame is not None:
            live.frame.fill(
                saved_names(seg, ctx.rows, flat, live.path, inputs[len(seg.reads) :]), flat
            )
        if not seg.exports:
            return y
        exported = [t[position] for position in seg.export_positions]
        integers = [e for e in exported if not (e.is_floating_point() or e.is_complex())]
        if integers:
            ctx.mark_non_differentiable(*integers)
        return (y, *exported)

    @staticmethod
    def backward(ctx: Any, dy: Any, *dsides: Any) -> Any:
        seg, live = ctx.seg, ctx.live
        if seg.elsewhere:
            seg = weight_grads.as_asked(seg, ctx.given, ctx.next_functions)
        tensors = ctx.saved_tensors
        saved = unpack(seg, ctx.rows, tensors)
        if not torch.is_grad_enabled():
            del tensors
            if live is not None:
                torch_private.release_saved(ctx)
            return (None, None, *_backward_in(seg, saved, dy, dsides, ctx, live))
        with torch.no_grad():
            grads = _backward_in(seg, saved, dy, dsides, ctx, live)
        ties = [*live.ties, *second_order.leaves(ctx), *(d for d in (dy, *dsides) if d is not None)]
        ties += [t for t in tensors if t.requires_grad]
        return (None, None, *second_order.guard(grads, ties, _no_second_derivative(seg, live)))


def _backward_in(
    seg: Segment, saved: list[Any], dy: Any, dsides: Any, ctx: Any, live: Live | None
) -> list[Any]:
    """`run_backward` with autocast off, and with a note on any error that says where it happened."""
    entered = ctx.entered
    once = Once() if live is None else live.once
    if ctx.seed is not None:
        once = once._replace(seed=ctx.seed)
    if live is None:
        if torch.compiler.is_dynamo_compiling():  # torch 2.11 cannot trace what sets the flag
            return run_backward(seg, saved, dy, dsides, entered, once)
        with torch_private.compiling():
            return run_backward(seg, saved, dy, dsides, entered, once)
    here = registry.thread
    before, here.unseen = here.unseen, seg.quiet and registry.unseen()
    try:
        if seg.device != "meta" and torch.is_autocast_enabled(seg.device):
            with torch.autocast(seg.device, enabled=False):
                return run_backward(seg, saved, dy, dsides, entered, once)
        return run_backward(seg, saved, dy, dsides, entered, once)
    except Exception as error:
        unsaved = checks.unsaved(checks.failing_step(error, run_backward.__code__))
        error.add_note(
            f"in the backward of fuseops {where(seg, live.path, error)}; dy {describe(dy)}{unsaved}"
        )
        raise
    finally:
        here.unseen = before


_apply = torch_private.direct_apply(Node)


def run_node(seg: Segment, live: Live, x: Any, inputs: Sequence[Any]) -> Any:
    """Apply the Function. Names are published only while somebody observes.

    Raises FuseOpsError inside a `torch.func` transform and for tangents, which need plain differentiable torch.
    """
    if torch_private.inside_functorch():
        raise _not_transformed("torch.func", seg, live)
    if type(x) is Quantized:
        live.crossing, x = x.detach(), x.carrier
    if torch_private.forward_ad._current_level >= 0 and any(
        map(torch_private.has_tangent, (x, *inputs))
    ):
        raise _not_transformed("forward-mode AD", seg, live)
    if not names.thread.observers:
        y = _apply(seg, live, x, *inputs)
        return y if live.crossing is None else _crossed(live, y)
    here = names.thread
    before, live.frame = here.frame, names.Frame()
    here.frame = live.frame
    try:
        y = _apply(seg, live, x, *inputs)
    finally:
        here.frame, live.frame = before, None
    return y if live.crossing is None else _crossed(live, y)


def _crossed(live: Live, y: Any) -> Any:
    """What a node gives whose y is quantized: autograd knows of its carrier."""
    q, live.crossing = live.crossing, None
    if isinstance(y, tuple):
        return replace(q, carrier=y[0]), *y[1:]  # type: ignore[type-var]
    return replace(q, carrier=y)  # type: ignore[type-var]


def run_traced_node(number: int, x: Any, inputs: Sequence[Any]) -> Any:
    """`run_node` as dynamo traces it; names, ties and messages are eager."""
    return Node.apply(number, None, x, *distinct(x, inputs))  # type: ignore[no-untyped-call]


# --- messages ------------------------------------------------------------------------------------------------------


def where(seg: Segment, path: str, step: Step | BaseException | None = None) -> str:
    """A segment, or one step of it (that which raised an error), in words: its path, and the ops in it."""
    if isinstance(step, BaseException):
        step = checks.failing_step(step, run_forward.__code__, run_backward.__code__)
    members = range(len(seg.ops)) if step is None else step.members
    names = [seg.names[i] for i in members]
    inner = names[0] if len(names) == 1 else f"{names[0]}..{names[-1]}"
    classes = dict.fromkeys(type(seg.ops[i]).__name__ for i in members)
    return f"'{path}{inner}' ({', '.join(classes)})"


def _not_transformed(what: str, seg: Segment, live: Live) -> FuseOpsError:
    return FuseOpsError(
        f"{what} over fuseops {where(seg, live.path)}: run it under `fuseops.reference()`."
    )


def _no_second_derivative(seg: Segment, live: Live) -> str:
    return (
        f"second derivative through {where(seg, live.path)}: fuseops ops have a first derivative by hand. "
        "Run the forward under `with fuseops.reference():` to differentiate twice."
    )
