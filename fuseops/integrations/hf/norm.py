"""RMSNorm with the weight of a transformers module: one kernel in the forward and one in the backward."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from fuseops import ops
from fuseops.ops.paths import STAND_IN

from . import stand_ins
from .recognise import norm_of


@stand_ins.owner_parameters("weight")
class LentRMSNorm(ops.RMSNorm):
    """A `LentRMSNorm` is an RMSNorm whose weight belongs to another module."""


def build(module: nn.Module) -> LentRMSNorm | str:
    """The stand-in of a module, or the reason why there is none."""
    weight: Any = module._parameters["weight"]
    if weight is None:
        return "has no weight"
    if (why := stand_ins.quantized_reason(weight)) is not None:
        return why
    found = norm_of(module)
    if found is None:
        return "computes something else than an RMSNorm over the last axis"
    op = LentRMSNorm(
        weight.shape[0], eps=found.eps, device="meta", zero_centered_gamma=found.zero_centered
    )
    stand_ins.bind_parameters(op, module, {"weight": "weight"})
    return op


@stand_ins.only_while_attached
def forward(self: nn.Module, hidden_states: Tensor) -> Tensor:
    """The module's forward; y is rounded once, to the dtype of the input."""
    if stand_ins.is_sharded(self) or not stand_ins.is_current(self):
        return type(self).forward(self, hidden_states)
    return self.__dict__[STAND_IN](hidden_states)
