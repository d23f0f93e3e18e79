"""Second derivatives are refused loudly: the gradients of a node pass through a guard that raises when differentiated.

The guard is tied to every input of its node. `once_differentiable` does not do it: with a residual path beside the node
it gives a wrong second derivative without an error.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from fuseops import torch_private
from fuseops.errors import DoubleBackwardError

LEAVES = frozenset((nn.Parameter, type(None)))  # what is in no graph, by its class


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
    """Makes gradients raise DoubleBackwardError(message) when someone differentiates them."""
    present = [g for g in grads if g is not None]
    guarded = iter(_FirstOrderOnly.apply(message, len(present), *present, *ties))  # type: ignore[no-untyped-call]
    return [None if g is None else next(guarded) for g in grads]


def tie(t: Tensor) -> Tensor:
    """A handle on t's place in the graph that holds none of its memory."""
    return torch.expand_copy(t, (0, *t.shape))  # a copy, since a view would hold its base


def ties_of(
    x: Tensor, inputs: Sequence[Tensor | None], saved: Sequence[Tensor]
) -> Sequence[Tensor]:
    """A tie for every input that is in a graph. Leaves are reached through their AccumulateGrad instead, and what is
    saved as it is through the saved tensor.
    """
    found = [] if x.grad_fn is None else [x]
    if not LEAVES.issuperset(map(type, inputs)):
        known = [t for t in inputs if t is not None and type(t) is not nn.Parameter]
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
