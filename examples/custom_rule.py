"""A rule of your own: which ops, which fused op, and when not, with the reason that explain() gives.

Run it: python examples/custom_rule.py
"""

from collections.abc import Mapping
from typing import Any, cast

import torch
from torch import Tensor

import fuseops as fo


class ScaledAct(fo.FusedOp):
    """y = scale * silu(x) in one pass, where the ops alone write silu(x) to memory and read it."""

    def fwd(
        self, x: Tensor, t: tuple[Mapping[str, Tensor], ...], calls: tuple[fo.Call, ...]
    ) -> fo.Out:
        act, scale = self.members[0], cast(fo.ops.ConstantScale, self.members[1])
        y = (x.float() * torch.sigmoid(x.float()) * scale.scale).to(x.dtype)  # a kernel goes here
        return fo.Out(y, (act.Saved(x), scale.Saved(scale.scale)))


def even_width(ops: tuple[fo.Op[Any], ...], c: fo.Conditions) -> str | None:
    """A condition answers None, or why the rule may not fire. It sees shapes, never values."""
    return fo.require(c.k % 2 == 0, f"the width {c.k} is odd")


rule = fo.Rule(
    "scaled_act", (fo.ops.SiLU, fo.ops.ConstantScale), ScaledAct, "forward", (even_width,)
)
fo.testing.assert_no_rule_is_shadowed([rule])


def model_of(width: int) -> fo.Sequential:
    ops = (fo.ops.RMSNorm(width), fo.ops.SiLU(), fo.ops.ConstantScale(0.5))
    model = fo.Sequential(*ops, fo.ops.Linear(width, width))
    fo.configure(model, rules=[rule])  # the rule belongs to this model, in every thread
    return model


for width in (8, 9):
    model, x = model_of(width), torch.randn(4, width)
    fired = fo.testing.assert_fused_matches_unfused(model, x)
    print(f"width {width}: {fired or 'nothing'} fired")
    print(model.explain(x))
