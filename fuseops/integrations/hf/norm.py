"""RMSNorm over the weight of a module that keeps it: one kernel forward and one backward."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from fuseops import ops
from fuseops.ops.paths import STAND_IN

from . import lent
from .recognise import norm_of


@lent.borrows("weight")
class LentRMSNorm(ops.RMSNorm):
    """A `LentRMSNorm` is an RMSNorm whose weight a module lends."""


def build(module: nn.Module) -> LentRMSNorm | str:
    """The op for this module, or why there is none."""
    weight: Any = module._parameters["weight"]
    if weight is None:
        return "has no weight"
    if (why := lent.quantized(weight)) is not None:
        return why
    found = norm_of(module)
    if found is None:
        return "computes something else than an RMSNorm over the last axis"
    op = LentRMSNorm(
        weight.shape[0], eps=found.eps, device="meta", zero_centered_gamma=found.zero_centered
    )
    lent.lend(op, module, {"weight": "weight"})
    return op


@lent.while_hung
def forward(self: nn.Module, hidden_states: Tensor) -> Tensor:
    """As the module's own; in the dtype of the input, rounded once."""
    if lent.sharded(self) or not lent.stands(self):
        return type(self).forward(self, hidden_states)
    return self.__dict__[STAND_IN](hidden_states)
