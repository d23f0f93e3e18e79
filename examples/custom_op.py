"""An op of your own: level 1 is one pure function, level 2 adds the backward by hand. Both are tested.

Run it: python examples/custom_op.py
"""

from typing import NamedTuple

import torch
from torch import Tensor, nn

import fuseops as fo


class Swish(fo.Op):
    """Level 1. y = x * sigmoid(beta * x) * probs, one probability a row.   x (R, D), probs (R,)"""

    reads = ("probs",)  # a side input; its gradient flows back by name

    def __init__(self, features: int) -> None:
        super().__init__()
        self.beta = nn.Parameter(torch.ones(features))

    def fwd(self, x: Tensor, *, beta: Tensor, probs: Tensor) -> Tensor:
        return x * torch.sigmoid(beta * x) * probs[:, None]


class ScaleSaved(NamedTuple):
    x: Tensor | None
    gain: Tensor | None  # the parameter itself: it costs no memory


class Scale(fo.Op[ScaleSaved]):
    """Level 2. y = x * gain.   x (..., D), gain (D,)"""

    saves_for = {"x": ("gain",), "gain": ("x",)}  # frozen gain: x is not saved at all

    def __init__(self, features: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(features))

    def fwd(self, x: Tensor, *, gain: Tensor) -> fo.Out:
        return fo.Out(x * gain, ScaleSaved(x, gain))

    def bwd(self, saved: ScaleSaved, dy: Tensor, *, call: fo.Call) -> fo.Grads:
        x, gain = saved
        dx = dy * gain if gain is not None else None
        dgain = (dy * x).flatten(0, -2).sum(0) if x is not None else None
        return fo.Grads(dx, {"gain": dgain})


x, probs = torch.randn(7, 8), torch.rand(7)
fo.testing.assert_bwd_is_vjp(Swish(8), x, probs=probs)
fo.testing.assert_bwd_is_vjp(Scale(8), x)
model = fo.Sequential(fo.ops.Linear(8, 8), Scale(8), Swish(8))
fo.testing.assert_fused_matches_unfused(model, x, probs=probs)
print(model)
