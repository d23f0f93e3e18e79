"""The one autograd Function runs the steps of a segment forward, saves what is kept, runs them backward."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fuseops import torch_private
from fuseops.errors import FuseOpsError
from fuseops.kernels import registry
from fuseops.ops import names
from fuseops.plan.segment import Segment, Step
from fuseops.recipes import Quantized

from . import checks, repeats, second_order, weight_grads
from .checks import describe
from .first import FirstCall
from .saving import pack, saved_names, unpack
from .steps import Once, write_backward, write_forward
from .traced import TABLE, distinct


class Live:
    """A `Live` holds what an autograd node needs at run time only: where it is, what lives for its call, names to
    publish, ties for second derivatives; while it is applied, the quantized tensor whose carrier crosses its border.
    """

    __slots__ = ("crossing", "frame", "once", "path", "ties")

    def __init__(self, path: str, once: Once) -> None:
        self.path = path
        self.once = once
        self.ties: Sequence[Tensor] = ()
        self.crossing: Quantized | None = None
        self.frame: names.Frame | None = None


# --- the Function --------------------------------------------------------------------------------------------------


class Node(torch.autograd.Function):
    """A `Node` is the autograd node of one segment."""

    @staticmethod
    def forward(ctx: Any, which: Segment | int, live: Live | None, x: Any, *inputs: Any) -> Any:
        # traced code passes a constant that stands for the segment
        seg: Segment = TABLE[which] if isinstance(which, int) else which
        rows: Sequence[Any]
        t, forward = list(inputs), seg.fwd or write_forward(seg)
        if live is None:
            y, kept, entered = forward(x, t, Once())
            y = y.dequantize() if type(y) is Quantized else y
            # torch 2.11 drops the gradient of a traced output that a no-op `.to` gave
            y = y.view_as(y)
            flat, rows = pack(seg, kept, traced=True)
        else:
            if not seg.checked_backward:
                live.once = live.once._replace(look=FirstCall(seg, inputs))
            here = registry.thread
            before, unseen = here.replay_mode, registry.may_replay()
            here.replay_mode = seg.quiet and unseen
            arrived, live.crossing = live.crossing, None
            try:
                y, flat, rows, entered = repeats.forward(
                    seg, forward, arrived or x, t, live.once, unseen
                )
            finally:
                here.replay_mode = before
            if type(y) is Quantized:
                live.crossing, y = y, y.carrier
            elif type(y) is Tensor and y._base is not None and torch_private.is_only_view(y):
                # a GEMM's rows in the shape of x, say: torch forbids writes to views that leave a Function
                y = torch_private.unsafe_view(y, y.shape)
        ctx.save_for_backward(*flat)
        if live is not None:
            live.ties = second_order.ties_of(x, inputs, flat)
        ctx.set_materialize_grads(False)
        # drawn here: a backward that runs twice, or after a recomputation, rounds alike
        seed = torch.randint(2**62, (1,), device=x.device) if seg.random else None
        ctx.own = seg, live, rows, entered, seed
        if seg.elsewhere:
            weight_grads.note(seg)
            ctx.given = [i is not None for i in inputs]
        if live is not None and live.frame is not None:
            live.frame.fill(saved_names(seg, rows, flat, live.path, inputs[len(seg.reads) :]), flat)
        if not seg.exports:
            return y
        exported = [t[position] for position in seg.export_positions]
        integers = [e for e in exported if not (e.is_floating_point() or e.is_complex())]
        if integers:
            ctx.mark_non_differentiable(*integers)
        return (y, *exported)

    @staticmethod
    def backward(ctx: Any, dy: Any, *dsides: Any) -> Any:
        seg, live, rows, entered, seed = ctx.own
        if seg.elsewhere:
            seg = weight_grads.as_asked(seg, ctx.given, ctx.next_functions)
        tensors = ctx.saved_tensors
        saved = [*tensors]
        if not torch.is_grad_enabled():
            del tensors
            if live is not None:
                torch_private.release_saved(ctx)
            return _backward_in(seg, live, rows, saved, dy, dsides, entered, seed)
        with torch.no_grad():
            grads = _backward_in(seg, live, rows, saved, dy, dsides, entered, seed)
        ties = [*live.ties, *second_order.leaves(ctx), *(d for d in (dy, *dsides) if d is not None)]
        ties += [t for t in tensors if t.requires_grad]
        return tuple(second_order.guard(grads, ties, _no_second_derivative(seg, live)))


def _backward_in(
    seg: Segment,
    live: Live | None,
    rows: Any,
    saved: list[Tensor],
    dy: Any,
    dsides: Any,
    entered: Any,
    seed: Any,
) -> tuple[Any, ...]:
    """The backward of a segment with autocast off, and with a note on any error that says where it happened.

    saved: what autograd gives back, which is taken out of the list
    """
    if seg.device != "meta" and torch.is_autocast_enabled(seg.device):
        with torch.autocast(seg.device, enabled=False):
            return _backward_in(seg, live, rows, saved, dy, dsides, entered, seed)
    backward = seg.bwd or write_backward(seg)
    once = Once() if live is None else live.once
    if seed is not None:
        once = once._replace(seed=seed)
    if live is None:
        kept = unpack(rows, saved)
        if torch.compiler.is_dynamo_compiling():  # torch 2.11 cannot trace what sets the flag
            return backward(kept, dy, dsides, entered, once)
        with torch_private.compiling():
            return backward(kept, dy, dsides, entered, once)
    here = registry.thread
    before, unseen = here.replay_mode, registry.may_replay()
    here.replay_mode = seg.quiet and unseen
    given = dy, dsides, entered
    try:
        return repeats.backward(seg, backward, rows, saved, given, once, unseen)
    except Exception as error:
        unsaved = checks.unsaved(checks.failing_step(error))
        error.add_note(
            f"in the backward of fuseops {where(seg, live.path, error)}; dy {describe(dy)}{unsaved}"
        )
        raise
    finally:
        here.replay_mode = before


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
        step = checks.failing_step(step)
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
