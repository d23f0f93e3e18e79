"""Norms over the last axes, with statistics in float32 (of float64: in float64).

RMSNorm    y = x / sqrt(mean(x^2) + eps) * weight
LayerNorm  y = (x - mean(x)) / sqrt(var(x) + eps) * weight + bias
"""

import functools
import math
from typing import NamedTuple

import torch
from torch import Tensor, nn

from fuseops import kernels as K
from fuseops.errors import ShapeError

from .op import Call, Grads, Op, Out, Shape


def check_last_axes(norm: nn.RMSNorm | nn.LayerNorm, shape: Shape) -> None:
    """Raise ShapeError unless a shape ends in the `normalized_shape` of the norm."""
    expected = tuple(norm.normalized_shape)
    if tuple(shape[-len(expected) :]) != expected:
        raise ShapeError(
            f"{type(norm).__name__} expects x to end in {expected}, got shape {tuple(shape)}."
        )


class RMSNormSaved(NamedTuple):
    x: Tensor | None  # (..., *normalized_shape)
    weight: Tensor | None  # the parameter itself
    rstd: Tensor | None  # (...) float32


class RMSNorm(Op[RMSNormSaved], nn.RMSNorm):
    """y = x / sqrt(mean(x^2) + eps) * weight, the mean over the last axes.   x (..., *normalized_shape) -> the same

    `torch.nn.RMSNorm` as an op (arXiv 1910.07467): same constructor and state_dict keys. Statistics in float32; y has
    the dtype of x. eps None is the epsilon of the dtype that the statistics are kept in, as in torch (whose
    documentation says the dtype of x). Raises ShapeError for other last axes.
    """

    saves_for = {"x": ("x", "weight", "rstd"), "weight": ("x", "rstd")}
    cut_before = True
    floats = True

    def out_shape(self, shape: Shape) -> Shape:
        check_last_axes(self, shape)
        return shape

    def epsilon(self, dtype: torch.dtype) -> float:
        """The eps that an x of `dtype` gets."""
        if self.eps is not None:
            return self.eps
        return torch.finfo(torch.float64 if dtype is torch.float64 else torch.float32).eps

    def fwd(self, x: Tensor, *, weight: Tensor | None) -> Out:
        eps, dims = self.epsilon(x.dtype), len(self.normalized_shape)
        y, rstd = K.rmsnorm_fwd(x, weight, eps, 0.0, dims)
        return Out(y, RMSNormSaved(x, weight, rstd))

    def bwd(self, saved: RMSNormSaved, dy: Tensor, *, call: Call) -> Grads:
        x, weight, rstd = saved
        wanted = "weight" in call.needs
        dtype = None if weight is None else weight.dtype
        dx, dweight = K.rmsnorm_bwd(dy, x, weight, rstd, None, wanted, 0.0, dtype)  # type: ignore[arg-type]
        return Grads(dx if "x" in call.needs else None, {"weight": dweight} if wanted else None)


class LayerNormSaved(NamedTuple):
    x: Tensor | None  # (..., *normalized_shape)
    weight: Tensor | None  # the parameter itself
    mean: Tensor | None  # (..., 1 for each normalized axis) float32
    rstd: Tensor | None  # the same
    shape: tuple[int, ...] | None  # normalized_shape, of the forward


class LayerNorm(Op[LayerNormSaved], nn.LayerNorm):
    """y = (x - mean(x)) / sqrt(var(x) + eps) * weight + bias.   x (..., *normalized_shape) -> the same

    `torch.nn.LayerNorm` as an op (arXiv 1607.06450): same constructor and state_dict keys, and torch's kernels. y has
    the dtype of x; wider parameters are not rounded to it. No rule fuses it.
    Raises ShapeError for other last axes.
    """

    saves_for = {
        "x": ("x", "weight", "mean", "rstd", "shape"),
        "weight": ("x", "mean", "rstd", "shape"),
        "bias": ("shape",),
    }
    cut_before = True
    floats = True

    def out_shape(self, shape: Shape) -> Shape:
        check_last_axes(self, shape)
        return shape

    def fwd(self, x: Tensor, *, weight: Tensor | None, bias: Tensor | None) -> Out:
        h, w, b = _alike(x, weight, bias)
        y, mean, rstd = torch.native_layer_norm(h, self.normalized_shape, w, b, self.eps)  # type: ignore[arg-type]
        shape = tuple(self.normalized_shape)
        return Out(y.to(x.dtype), LayerNormSaved(x, weight, mean, rstd, shape))

    def bwd(self, saved: LayerNormSaved, dy: Tensor, *, call: Call) -> Grads:
        x, weight, mean, rstd, normalized = saved
        shape: tuple[int, ...] = normalized  # type: ignore[assignment]
        needs = call.needs
        params: dict[str, Tensor | None] = {}
        if "bias" in needs:
            params["bias"] = K.bias_bwd(dy.reshape(-1, math.prod(shape))).view(shape)
        if x is None:
            return Grads(None, params)
        wanted = ["x" in needs, "weight" in needs, False]
        if weight is None and wanted[1]:
            weight = x.new_ones(shape)  # not saved, since only dx depends on it; torch asks for one
        d, h, w = _alike(dy, x, weight)
        dx, params["weight"], _ = torch.ops.aten.native_layer_norm_backward(
            d, h, shape, mean, rstd, w, None, wanted
        )
        return Grads(dx.to(x.dtype) if wanted[0] else None, params)


def _alike(x: Tensor, *others: Tensor | None) -> list[Tensor | None]:
    """In one dtype in which torch keeps statistics in float32: their own on CUDA if it is one, else the widest, or
    float32 for halves.
    """
    dtypes = {t.dtype for t in (x, *others) if t is not None}
    if x.is_cuda and len(dtypes) == 1:
        return [x, *others]
    dtype = functools.reduce(torch.promote_types, dtypes, torch.float32)
    return [t if t is None else t.to(dtype) for t in (x, *others)]
