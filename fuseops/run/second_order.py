"""Second derivatives raise an error: the gradients of a node pass through a guard that raises when differentiated.

The guard depends on every input of its node, through ties. `once_differentiable` is not enough: with a residual path
around the node it gives a wrong second derivative without an error.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor

from fuseops import torch_private
from fuseops.errors import DoubleBackwardError
from fuseops.plain import PARAMETERS

LEAVES = PARAMETERS | {type(None)}  # types of inputs that have no grad_fn


class _FirstOrderOnly(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, message: str, count: int, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.message = message
        return tuple(t.view_as(t) for t in tensors[:count])

    @staticmethod
    def backward(ctx: Any, *_: Any) -> Any:
        raise DoubleBackwardError(ctx.message)


def guard(
    grads: Sequence[Tensor | None], ties: Iterable[Tensor], message: str
) -> list[Tensor | None]:
    """Make gradients raise DoubleBackwardError(message) when they are differentiated."""
    present = [g for g in grads if g is not None]
    guarded = iter(_FirstOrderOnly.apply(message, len(present), *present, *ties))  # type: ignore[no-untyped-call]
    return [None if g is None else next(guarded) for g in grads]


def tie(t: Tensor) -> Tensor:
    """A tensor of no elements with t's place in the graph, to depend on t without holding its memory."""
    return torch.expand_copy(t, (0, *t.shape))  # a copy, since a view would hold its base


def ties_of(
    x: Tensor, inputs: Sequence[Tensor | None], saved: Sequence[Tensor]
) -> Sequence[Tensor]:
    """A tie for every input with a grad_fn. Leaves are found by their AccumulateGrad nodes instead (`leaves`), and an
    input that is saved unchanged needs no tie.
    """
    found = [] if x.grad_fn is None else [x]
    if not LEAVES.issuperset(map(type, inputs)):
        known = [t for t in inputs if t is not None and type(t) not in LEAVES]
        found += [t for t in known if t.grad_fn is not None]
    if not found:
        return ()
    if torch_private.top_saved_tensor_hooks() is None:  # which may give back another tensor
        own = {*map(id, saved)}
        found = [t for t in found if id(t) not in own]
    with torch.enable_grad():
        return [tie(t) for t in found]


def leaves(node: Any) -> list[Tensor]:
    """The leaf tensors among a backward node's inputs."""
    return [edge.variable for edge, _ in node.next_functions if hasattr(edge, "variable")]
