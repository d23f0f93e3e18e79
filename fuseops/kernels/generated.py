"""`trace_elementwise` compiles elementwise functions with torch's inductor, once for all numbers of rows.

A function is traced on fake tensors with symbolic leading axes: one graph of the function, and one of its gradients,
which recomputes the function, so that only inputs are saved. Each becomes a kernel at its first call (two, for a
gradient that is summed over rows), for all sizes of the leading axes. Sums are in a fixed order. Values in bfloat16 or
float16 are kept in float32 between ops, and rounded at the store.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fuseops import torch_private
from fuseops.kernels.registry import opaque_call, reference_only

Function = Callable[..., Tensor]
SIZE_HINTS = (1009, 1013, 1019, 1021, 1031, 1033, 1039, 1049)  # of symbolic sizes
A = torch.ops.aten
SHAPE_OPS = frozenset({
    A.alias, A.clone, A.detach, A._to_copy, A.expand, A.full, A.full_like, A.ones_like, A.permute, A.reshape,
    A.scalar_tensor, A.slice, A.split, A.split_with_sizes, A.squeeze, A.transpose, A.t, A.unsqueeze, A.view,
    A._unsafe_view, A.zeros_like,
})  # fmt: skip
"""Ops that only change shapes or fill, which cost a kernel nothing."""


class RefusedError(Exception):
    """A function cannot be one kernel; the message is the reason."""


class TensorSpec(NamedTuple):
    """A `TensorSpec` describes a tensor for any number of rows.

    rows  whether it has the leading axes of x
    rest  its other axes
    """

    rows: bool
    rest: tuple[int, ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, shape: Sequence[int], dtype: torch.dtype, leading: Sequence[int]) -> TensorSpec:
        """The spec of a shape that begins with `leading`, the axes of x before its last; RefusedError for another."""
        n = len(leading)
        if tuple(shape[:n]) != tuple(leading):
            raise RefusedError(
                f"a side input is {tuple(shape)}: it has not the leading axes of x, {tuple(leading)}"
            )
        return cls(True, tuple(shape[n:]), dtype)


class Kernel:
    """A `Kernel` is a graph that is compiled at its first call."""

    def __init__(self, graph: Any, examples: Sequence[Tensor]) -> None:
        self.graph, self.examples = graph, examples
        self.compiled: Callable[..., Any] | None = None
        self.lock = threading.Lock()

    def __call__(self, *tensors: Tensor) -> Sequence[Tensor]:
        """Run the kernel on contiguous tensors with any number of rows."""
        return opaque_call(self._run, *tensors)

    def _run(self, *tensors: Tensor) -> Sequence[Tensor]:
        without_values = any(t.is_meta or torch_private.is_fake(t) for t in tensors)
        if without_values or torch_private.num_dispatch_modes():
            found: Sequence[Tensor] = self.graph(*tensors)
            return found
        if self.compiled is None:
            with self.lock:
                self.compiled = self.compiled or torch_private.inductor_compile(
                    self.graph, self.examples
                )
        found = self.compiled(*tensors)
        return found


class ElementwiseKernels(NamedTuple):
    """`ElementwiseKernels` are the kernels of an elementwise function and of its gradients."""

    forward: Callable[..., Sequence[Tensor]]  # (inputs) -> (y,)
    backward: Callable[..., Sequence[Tensor]] | None  # (dy, the inputs that it reads) -> gradients
    read: tuple[int, ...]  # indices of those inputs


def trace_elementwise(
    function: Function,
    likes: Sequence[TensorSpec],
    axes: int,
    wanted: Sequence[int],
    device: torch.device,
) -> ElementwiseKernels:
    """Trace a function of tensors, the first of which is x, and its gradients.

    axes: the number of leading axes of x.  wanted: inputs that require a gradient.
    Raises RefusedError for a function that is not elementwise, draws random numbers, writes in place, or depends on
    values or on the number of rows.
    """
    widths = {size for like in likes for size in like.rest}
    hints = [size for size in SIZE_HINTS if size not in widths][:axes]
    try:
        with reference_only(), torch_private.quiet_fake_tensors():
            return _traced(function, likes, hints, wanted, device)
    except RefusedError:
        raise
    except Exception as error:
        raise RefusedError(_refusal_reason(error)) from error


def _traced(
    function: Function,
    likes: Sequence[TensorSpec],
    hints: Sequence[int],
    wanted: Sequence[int],
    device: torch.device,
) -> ElementwiseKernels:
    mode, rows = torch_private.symbolic_sizes(hints)
    with mode:
        inputs = [
            torch.empty((*(rows if t.rows else ()), *t.rest), dtype=t.dtype, device=device)
            for t in likes
        ]
        with torch.no_grad():
            graph = torch_private.trace_graph(lambda *t: (function(*t),), inputs)
    _check_elementwise(graph)
    forward = Kernel(graph, inputs)
    read: tuple[int, ...] = ()
    backward = None
    if wanted:
        y = next(node for node in graph.graph.nodes if node.op == "output").args[0][0].meta["val"]
        with mode:
            dy = torch.empty(y.shape, dtype=y.dtype, device=device)
            gradients = functools.partial(vjp, function, wanted)
            graph = torch_private.trace_graph(gradients, [dy, *inputs])
        graph, read = _without_unread(graph)
        backward = Kernel(graph, [dy, *(inputs[k] for k in read)])
    if assumed := torch_private.symbol_constraints(mode):
        raise RefusedError(f"it depends on the number of rows ({assumed[0]})")
    return ElementwiseKernels(forward, backward, read)


def vjp(
    function: Function, wanted: Sequence[int], dy: Tensor, *inputs: Tensor
) -> tuple[Tensor, ...]:
    """The gradients of the inputs in `wanted`."""
    with torch.enable_grad():
        leaves = [t.detach().requires_grad_(k in wanted) for k, t in enumerate(inputs)]
        y = function(*leaves)
        if not y.requires_grad:
            raise RefusedError("no gradient reaches what wants one")
        found = torch.autograd.grad(y, [leaves[k] for k in wanted], dy, allow_unused=True)
    if any(grad is None for grad in found):
        raise RefusedError("no gradient reaches some of what wants one")
    return found


def _check_elementwise(graph: Any) -> None:
    computes = False
    for node in graph.graph.nodes:
        if node.op == "get_attr":
            raise RefusedError("it reads a tensor that does not come by keyword")
        target, value = node.target, node.meta.get("val")
        if node.op != "call_function" or not isinstance(value, Tensor | list | tuple):
            continue  # sizes
        name = str(getattr(target, "overloadpacket", target))
        tags = getattr(target, "tags", ())
        if torch.Tag.nondeterministic_seeded in tags:
            raise RefusedError(f"it draws random numbers ({name})")
        if hasattr(target, "_schema") and target._schema.is_mutable:
            raise RefusedError(f"it writes in place ({name})")
        known = getattr(target, "overloadpacket", None) in SHAPE_OPS or target.__name__ == "getitem"
        computes = computes or torch.Tag.pointwise in tags
        if not known and torch.Tag.pointwise not in tags:
            raise RefusedError(f"{name} is not elementwise")
    if not computes:
        raise RefusedError("it computes nothing")


def _without_unread(graph: Any) -> tuple[Any, tuple[int, ...]]:
    """(graph of gradients without unread inputs, indices of the inputs after dy that it reads)."""
    graph.graph.eliminate_dead_code()
    _, *inputs = [node for node in graph.graph.nodes if node.op == "placeholder"]
    read = tuple(k for k, node in enumerate(inputs) if node.users)
    for node in inputs:
        if not node.users:
            graph.graph.erase_node(node)
    graph.recompile()
    return graph, read


def _refusal_reason(error: Exception) -> str:
    """The reason of a RefusedError for an error of a trace."""
    kind = type(error).__name__
    if kind in (
        "GuardOnDataDependentSymNode",
        "DataDependentOutputException",
        "DynamicOutputShapeException",
    ):
        return "what it does depends on values of tensors"
    return f"it cannot be traced: {kind}: {str(error).strip().splitlines()[0][:120]}"
