"""ConstantScale and Dropout."""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from fuseops import kernels as K
from fuseops.arguments import check_numbers, is_number, shown
from fuseops.errors import FuseOpsError

from .checks import refuse_inplace
from .op import Call, Grads, Op, Out


class ConstantScaleSaved(NamedTuple):
    scale: float | None  # of the forward: the attribute may change before the backward


class ConstantScale(Op[ConstantScaleSaved]):
    """y = x * scale, a Python number that has no gradient."""

    saves_for = {"x": ("scale",)}

    def __init__(self, scale: float) -> None:
        super().__init__()
        check_numbers("ConstantScale", scale=scale)
        self.scale = float(scale)

    def extra_repr(self) -> str:
        return f"{self.scale}"

    def fwd(self, x: Tensor) -> Out:
        return Out(x * self.scale, ConstantScaleSaved(self.scale))

    def bwd(self, saved: ConstantScaleSaved, dy: Tensor) -> Grads:
        return Grads(dy * saved.scale)  # type: ignore[operator]


class DropoutSaved(NamedTuple):
    seed: Tensor | None  # (1,) int64: determines the mask
    p: float | None = None


class Dropout(Op[DropoutSaved], nn.Dropout):
    """`torch.nn.Dropout` that saves 8 bytes: the mask is a function of a seed drawn from torch's generator.

    The backward computes the mask again from the seed. A checkpoint that restores torch's generator repeats the seed; a
    CUDA graph that registers the generator draws a new one in each replay.
    """

    saves_for = {"x": ("seed", "p")}

    def __init__(self, p: float = 0.5, inplace: bool = False) -> None:
        refuse_inplace("Dropout", inplace)
        if not (is_number(p) and 0 <= p <= 1):
            raise FuseOpsError(
                f"Dropout: p is {shown(p)}, expected a probability, a number from 0 to 1."
            )
        nn.Dropout.__init__(self, p)

    @property
    def alias(self) -> bool:
        return not self.training or self.p == 0

    def fwd(self, x: Tensor, *, call: Call) -> Out:
        if not call.training or self.p == 0:
            return Out(x)
        if not 0 < self.p <= 1:  # it may be assigned
            raise FuseOpsError(f"Dropout: p is {self.p!r}, expected a probability, from 0 to 1.")
        seed = torch.randint(2**62, (1,), device=x.device)
        return Out(K.apply_dropout(x, seed, self.p), DropoutSaved(seed, self.p))

    def bwd(self, saved: DropoutSaved, dy: Tensor, *, call: Call) -> Grads:
        seed, p = saved
        return Grads(dy if seed is None or p is None else K.apply_dropout(dy, seed, p))
