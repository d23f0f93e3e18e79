"""The one autograd Function: runs the steps of a segment, saves the kept fields, and runs the backward steps."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from fuseops import torch_private
from fuseops.errors import FuseOpsError, InPlaceError
from fuseops.ops import names
from fuseops.ops.object_table import TABLE, dedupe_inputs
from fuseops.plan.segment import Segment, Step
from fuseops.recipes import Quantized
from fuseops.torch_private import dict_version

from . import checks, data_parallel, outside, repeats, second_order, weight_grads
from .checks import describe
from .contract import ContractCheck
from .repeats import GradsIn
from .saving import name_of, pack, saved_names, unpack
from .steps import CallContext, write_backward, write_forward


class NodeState:
    """A `NodeState` holds the run-time state of an autograd node: its path, its call, the frame of saved names, ties
    for second derivatives, saved tensors that no recomputation replaces (number, tensor, version), constants that its
    backward reads elsewhere; and, while it is applied, the quantized tensor of which autograd sees the carrier only.
    """

    __slots__ = ("context", "frame", "held", "noted", "path", "quantized", "ties")

    def __init__(self, path: str, context: CallContext) -> None:
        self.path = path
        self.context = context
        self.ties: Sequence[Tensor] = ()
        self.held: Sequence[tuple[int, Tensor, int]] = ()
        self.noted: Sequence[outside.Noted] = ()
        self.quantized: Quantized | None = None
        self.frame: names.Frame | None = None


# --- the Function --------------------------------------------------------------------------------------------------


class Node(torch.autograd.Function):
    """A `Node` is the autograd node of one segment."""

    @staticmethod
    def forward(
        ctx: Any, segment: Segment | int, state: NodeState | None, x: Any, *inputs: Any
    ) -> Any:
        # traced code passes a constant that stands for the segment
        seg: Segment = TABLE[segment] if isinstance(segment, int) else segment
        rows: Sequence[Any]
        t = list(inputs)
        if state is None:
            y, kept, x_dtypes = (seg.fwd or write_forward(seg))(x, t, CallContext())
            y = y.dequantize() if type(y) is Quantized else y
            y = _traced_output(y, kept)
            flat, rows = pack(seg, kept, traced=True)
        else:
            if [*map(dict_version, seg.op_dicts)] != seg.versions:
                seg.forget()
            if not seg.checked_backward:
                state.context = state.context._replace(contract=ContractCheck(seg, inputs))
            quantized_x, state.quantized = state.quantized, None
            y, flat, rows, x_dtypes = repeats.forward(seg, quantized_x or x, t, state.context)
            if type(y) is Quantized:
                state.quantized, y = y, y.carrier
            elif type(y) is Tensor and y._base is not None and torch_private.is_only_view(y):
                # a GEMM's rows in the shape of x, say: torch forbids writes to views that leave a Function
                y = torch_private.unsafe_view(y, y.shape)
        ctx.save_for_backward(*flat)
        if state is not None:
            state.ties = second_order.ties_of(x, inputs, flat)
            if not seg.builtin:
                state.noted = outside.note(seg)
            if seg.held:
                own = [inputs[at] for at in seg.held]
                found = [(k, t) for k, t in enumerate(flat) if any(t is o for o in own)]
                state.held = [(k, t, torch_private.version(t)) for k, t in found]
        ctx.set_materialize_grads(False)
        # drawn in the forward: a backward that runs twice, or after a recomputation, rounds identically
        seed = torch.randint(2**62, (1,), device=x.device) if seg.random else None
        ctx.state = seg, state, rows, x_dtypes, seed
        if seg.bypasses_autograd:
            data_parallel.remember_wrappers(seg.ops)
            ctx.has_input = [i is not None for i in inputs]
        if state is not None and state.frame is not None:
            state.frame.fill(
                saved_names(seg, rows, flat, state.path, inputs[len(seg.reads) :]), flat
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
        seg, state, rows, x_dtypes, seed = ctx.state
        if seg.bypasses_autograd:
            seg = weight_grads.segment_for_backward(seg, ctx.has_input, ctx.next_functions)
        context = CallContext() if state is None else state.context
        if state is not None:
            if [*map(dict_version, seg.op_dicts)] != seg.versions:
                seg.forget()
            if context.contract is None and not seg.checked_backward:
                # written to since the forward: the shapes are left to autograd
                context = context._replace(contract=ContractCheck(seg, [None] * seg.inputs))
        given = dy, dsides, x_dtypes, context if seed is None else context._replace(seed=seed)
        try:
            tensors = ctx.saved_tensors
        except RuntimeError as error:
            _name_written(error, ctx, seg, state)
            raise
        saved = [*tensors]
        if state is not None and state.held:
            _restore_held(saved, seg, state)
        if not torch.is_grad_enabled():
            del tensors
            if state is not None:
                torch_private.release_saved(ctx)
            return _run_backward(seg, state, rows, saved, given)
        with torch.no_grad():
            grads = _run_backward(seg, state, rows, saved, given)
        ties = [
            *state.ties,
            *second_order.leaves(ctx),
            *(d for d in (dy, *dsides) if d is not None),
        ]
        ties += [t for t in tensors if t.requires_grad]
        return tuple(second_order.guard(grads, ties, _second_derivative_message(seg, state)))


def _name_written(error: Exception, ctx: Any, seg: Segment, state: NodeState | None) -> None:
    """Raise InPlaceError with the names of the saved tensor that was written in place, if that is torch's error."""
    written = torch_private.written_of(error, ctx)
    if state is None or not written or isinstance(error, FuseOpsError):
        return
    names = [name_of(seg, ctx.state[2], number, state.path) for number in written]
    said = " or ".join(f"{name!r} of {op}" for name, op in names)
    raise InPlaceError(
        f"saved tensor {said} was modified in place before its backward ran. The gradient would be wrong. Write out of "
        f"place, or into a clone of it. By torch: {str(error).partition(' Hint: ')[0]}"
    ) from error


def _restore_held(saved: list[Tensor], seg: Segment, state: NodeState) -> None:
    """Put the tensors that a node holds among the saved ones.  Raises InPlaceError for one that was written since."""
    for number, t, version in state.held:
        if torch_private.version(t) != version:
            raise InPlaceError(
                f"a tensor {describe(t)} that the backward of fuseops {where(seg, state.path)} reads was written in "
                "place since its forward: assign a new one instead."
            )
        saved[number] = t


def _traced_output(y: Any, kept: Sequence[Any]) -> Any:
    """y of compiled code: another tensor, since torch 2.11 drops the gradient of one that a no-op `.to` gave. It is a
    view, to which torch forbids writes, only where the backward reads y: a backend that runs the graph as it is would
    not notice them.
    """
    for saved in kept:
        if saved is y:
            return y.view_as(y)
    traced = torch.compiler.is_dynamo_compiling() or type(y) is not Tensor
    if traced or (y._base is not None and torch_private.is_only_view(y)):
        return torch_private.unsafe_view(y, y.shape)
    return y


def _run_backward(
    seg: Segment, state: NodeState | None, rows: Any, saved: list[Tensor], given: GradsIn
) -> tuple[Any, ...]:
    """Run the backward of a segment with autocast off. An error gets a note that names the op.

    saved: the saved tensors; the list is emptied.
    """
    if seg.device != "meta" and torch.is_autocast_enabled(seg.device):
        with torch.autocast(seg.device, enabled=False):
            return _run_backward(seg, state, rows, saved, given)
    if state is None:
        backward, kept = seg.bwd or write_backward(seg), unpack(rows, saved)
        if torch.compiler.is_dynamo_compiling():  # torch 2.11 cannot trace what sets the flag
            return backward(kept, *given)
        with torch_private.compiling():
            return backward(kept, *given)
    try:
        grads = repeats.backward(seg, rows, saved, given)
        outside.check(state.noted)  # after what the contract says of the ops as they are now
        return grads
    except Exception as error:
        step = checks.failing_step(error)
        about = f"dy {describe(given[0])}{checks.unsaved_fields(step)}"
        error.add_note(f"in the backward of fuseops {where(seg, state.path, step)}; {about}")
        raise


_apply = torch_private.direct_apply(Node)


def run_node(seg: Segment, state: NodeState, x: Any, inputs: Sequence[Any]) -> Any:
    """Apply the Function. Names of saved tensors are published only while there are observers.

    Raises FuseOpsError inside a `torch.func` transform and for tangents, which need plain differentiable torch.
    """
    if torch_private.inside_functorch():
        raise _transform_error("torch.func", seg, state)
    if type(x) is Quantized:
        state.quantized, x = x.detach(), x.carrier
    if torch_private.forward_level() >= 0 and any(map(torch_private.has_tangent, (x, *inputs))):
        raise _transform_error("forward-mode AD", seg, state)
    if not names.thread.observers:
        y = _apply(seg, state, x, *inputs)
        return y if state.quantized is None else _with_carrier(state, y)
    thread = names.thread
    before, frame = thread.frame, names.Frame()
    thread.frame = state.frame = frame
    try:
        y = _apply(seg, state, x, *inputs)
    finally:
        frame.close()
        thread.frame, state.frame = before, None
    return y if state.quantized is None else _with_carrier(state, y)


def _with_carrier(state: NodeState, y: Any) -> Any:
    """The results of a node whose y is quantized: its carrier is the tensor that autograd returned."""
    q, state.quantized = state.quantized, None
    if isinstance(y, tuple):
        return replace(q, carrier=y[0]), *y[1:]  # type: ignore[type-var]
    return replace(q, carrier=y)  # type: ignore[type-var]


def run_traced_node(number: int, x: Any, inputs: Sequence[Any]) -> Any:
    """`run_node` as dynamo traces it; names, ties and messages are eager."""
    return Node.apply(number, None, x, *dedupe_inputs(x, inputs))  # type: ignore[no-untyped-call]


# --- messages ------------------------------------------------------------------------------------------------------


def where(seg: Segment, path: str, step: Step | None = None) -> str:
    """Describe a segment, or one step of it, for a message: path and classes of its ops."""
    members = range(len(seg.ops)) if step is None else step.members
    names = [seg.names[i] for i in members]
    inner = names[0] if len(names) == 1 else f"{names[0]}..{names[-1]}"
    classes = dict.fromkeys(type(seg.ops[i]).__name__ for i in members)
    return f"'{path}{inner}' ({', '.join(classes)})"


def _transform_error(what: str, seg: Segment, state: NodeState) -> FuseOpsError:
    return FuseOpsError(
        f"{what} over fuseops {where(seg, state.path)}: run it under `fuseops.reference()`."
    )


def _second_derivative_message(seg: Segment, state: NodeState) -> str:
    return (
        f"second derivative through {where(seg, state.path)}: fuseops ops have a first derivative by hand. "
        "Run the forward under `with fuseops.reference():` to differentiate twice."
    )
