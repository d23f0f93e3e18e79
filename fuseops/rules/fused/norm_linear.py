"""A norm and the Linear behind it as one joint op: the normed x is not saved, but recomputed in the backward.

Shapes: x (..., K), y (..., N). Numerics: the kernels are those of the ops alone, and give the same bits.
"""

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fuseops.ops.linear import linear
from fuseops.ops.op import Calls, FusedOp, Grads, MemberTensors, Op, Out, SideGrads

from .gemm_bwd import backward, shaped
from .norm_prologue import NormPrologue


class NormLinearSaved(NamedTuple):
    x: Tensor | None  # (..., K)
    gamma: Tensor | None
    beta: Tensor | None
    mean: Tensor | None
    rstd: Tensor | None
    eps: float | None
    dtypes: tuple[torch.dtype, torch.dtype] | None
    weight: Tensor | None  # the parameter itself


class NormLinear(FusedOp):
    """y = norm(x) W^T + b, with an optional Add and Tap before the norm."""

    Saved = NormLinearSaved
    recipes = True

    def __init__(self, *members: Op[Any]) -> None:
        super().__init__(*members)
        self.prologue, at = NormPrologue(members[:-1]), len(members) - 1
        self.names = {**self.prologue.names(), "weight": f"{at}.weight"}
        self.saves_for = {
            **self.prologue.saves_for(("weight",)),
            f"{at}.weight": self.prologue.recompute_fields,
            f"{at}.bias": (),
        }

    def fwd(self, x: Tensor, t: MemberTensors, calls: Calls, keep: frozenset[str]) -> Out:
        y, saved, side = self.prologue.fwd(x, t, calls[-1])
        weight, bias = t[-1]["weight"], t[-1]["bias"]
        y, _ = linear(y, weight, bias, calls[-1], columns=False)
        return Out(shaped(y, x), NormLinearSaved(*saved, weight), side)

    def bwd(
        self, s: NormLinearSaved, dy: Tensor | None, calls: Calls, dside: SideGrads
    ) -> tuple[Grads, ...]:
        call = calls[-1]
        own, weight_grad = backward(s.weight, dy, call)
        dx, own = [own.x], Grads(None, own.params)
        prologue_grads = self.prologue.bwd(s, dx.pop(), calls[:-1], dside)
        if weight_grad is not None:
            own.params["weight"] = weight_grad(self.prologue.recompute(s, call, columns=True))  # type: ignore[index]
        return *prologue_grads, own
