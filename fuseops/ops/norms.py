"""RMSNorm: y = x / sqrt(mean(x^2) + eps) * weight over the last axes."""

from typing import NamedTuple

import torch
from torch import Tensor, nn

from fuseops import kernels as K
from fuseops.errors import ShapeError

from .op import Call, Grads, Op, Out, Shape


class RMSNormSaved(NamedTuple):
    x: Tensor | None  # (..., *normalized_shape)
    weight: Tensor | None  # the parameter itself
    rstd: Tensor | None  # (...) float32


class RMSNorm(Op[RMSNormSaved], nn.RMSNorm):
    """`torch.nn.RMSNorm` as an op. Statistics in float32; y has the dtype of x.

    eps None is the epsilon of the dtype that the statistics are kept in, as in torch (whose documentation says the
    dtype of x).
    """

    saves_for = {"x": ("x", "weight", "rstd"), "weight": ("x", "rstd")}
    cut_before = True
    floats = True

    def out_shape(self, shape: Shape) -> Shape:
        expected = tuple(self.normalized_shape)
        if tuple(shape[-len(expected) :]) != expected:
            raise ShapeError(f"RMSNorm expects x to end in {expected}, got shape {tuple(shape)}.")
        return shape

    def epsilon(self, dtype: torch.dtype) -> float:
        return torch.finfo(K.accumulator(dtype)).eps if self.eps is None else self.eps

    def fwd(self, x: Tensor, *, weight: Tensor | None) -> Out:
        eps, dims = self.epsilon(x.dtype), len(self.normalized_shape)
        y, rstd = K.rmsnorm_fwd(x, weight, eps, dims=dims)
        return Out(y, RMSNormSaved(x, weight, rstd))

    def bwd(self, saved: RMSNormSaved, dy: Tensor, *, call: Call) -> Grads:
        x, weight, rstd = saved
        wanted = "weight" in call.needs
        dx, dweight = K.rmsnorm_bwd(dy, x, weight, rstd, None, wanted)  # type: ignore[arg-type]
        return Grads(dx if "x" in call.needs else None, {"weight": dweight} if wanted else None)
