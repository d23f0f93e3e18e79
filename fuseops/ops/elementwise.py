"""ConstantScale and Dropout."""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from fuseops import kernels as K
from fuseops.errors import FuseOpsError

from .op import Call, Grads, Op, Out


class NothingSaved(NamedTuple):
    pass


class ConstantScale(Op[NothingSaved]):
    """y = x * scale, a Python number that has no gradient."""

    saves_for = {"x": ()}

    def __init__(self, scale: float) -> None:
        super().__init__()
        self.scale = float(scale)

    def extra_repr(self) -> str:
        return f"{self.scale}"

    def fwd(self, x: Tensor) -> Out:
        return Out(x * self.scale, NothingSaved())

    def bwd(self, saved: NothingSaved, dy: Tensor) -> Grads:
        return Grads(dy * self.scale)


class DropoutSaved(NamedTuple):
    seed: Tensor | None  # (1,) int64: the mask is drawn again from it


class Dropout(Op[DropoutSaved], nn.Dropout):
    """`torch.nn.Dropout` that saves 8 bytes: the mask is a function of a seed drawn from torch's generator."""

    saves_for = {"x": ("seed",)}

    def __init__(self, p: float = 0.5, inplace: bool = False) -> None:
        if inplace:
            raise FuseOpsError(
                "Dropout(inplace=True): an op never writes its input, which may be saved. Leave it out."
            )
        nn.Dropout.__init__(self, p)

    @property
    def alias(self) -> bool:
        return not self.training or self.p == 0

    def fwd(self, x: Tensor, *, call: Call) -> Out:
        if not call.training or self.p == 0:
            return Out(x)
        seed = torch.randint(2**62, (1,), device=x.device)
        return Out(self._dropped(x, seed), DropoutSaved(seed))

    def bwd(self, saved: DropoutSaved, dy: Tensor, *, call: Call) -> Grads:
        return Grads(dy if saved.seed is None else self._dropped(dy, saved.seed))

    def _dropped(self, x: Tensor, seed: Tensor) -> Tensor:
        scale = 1 / (1 - self.p) if self.p < 1 else 0.0
        return torch.where(K.dropout_mask(seed, x, self.p), x * scale, 0)
