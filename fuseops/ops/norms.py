"""Norms normalise over the last axes, with statistics in float32 (for float64 inputs in float64).

RMSNorm    y = x / sqrt(mean(x^2) + eps) * weight
LayerNorm  y = (x - mean(x)) / sqrt(var(x) + eps) * weight + bias
L2Norm     y = x / sqrt(sum(x^2) + eps)
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fuseops import kernels as K
from fuseops.arguments import check_flags, check_integers, check_numbers, several
from fuseops.errors import ShapeError

from .op import Call, Grads, Op, Out, Shape

Params = Mapping[str, Tensor | None]


class Normed(NamedTuple):
    """A `Normed` is the result of a norm of x, or of x and a residual in one pass."""

    y: Tensor
    h: Tensor  # the input of the norm: x + residual as it is stored, or x
    mean: Tensor | None  # (...) float32, where the norm subtracts it
    rstd: Tensor  # (...) float32


def _check_axes(op: str, normalized_shape: object) -> None:
    """Raise FuseOpsError for sizes of the last axes that are no integers."""
    sizes: Any = normalized_shape if isinstance(normalized_shape, Iterable) else (normalized_shape,)
    for size in several(sizes, object, f"{op}(normalized_shape=...)", "an integer, or several"):
        check_integers(op, 0, normalized_shape=size)


class _Norm:
    """A `_Norm` is a norm over the last axes; with zero_centered_gamma it multiplies by 1 + weight."""

    cut_before = True
    floats = True
    _weight_offset: float  # added to the weight: 1 where it is zero-centered
    normalized_shape: Any
    eps: Any
    grads: Callable[..., Grads]

    def out_shape(self, shape: Shape) -> Shape:
        expected = tuple(self.normalized_shape)
        if tuple(shape[-len(expected) :]) != expected:
            raise ShapeError(
                f"{type(self).__name__} expects x to end in {expected}, got shape {tuple(shape)}."
            )
        return shape

    def bwd(self, saved: Any, dy: Tensor, *, call: Call) -> Grads:
        found = self.grads(saved, dy, call.needs)
        # some kernels compute it anyway
        return found if "x" in call.needs else found._replace(x=None)

    @property
    def zero_centered_gamma(self) -> bool:
        """Whether 1 is added to the weight. Read-only: a pending backward reads it."""
        return bool(self._weight_offset)

    def epsilon(self, dtype: torch.dtype) -> float:
        """The eps for an x of `dtype`."""
        if self.eps is not None:
            return self.eps
        return torch.finfo(torch.float64 if dtype is torch.float64 else torch.float32).eps

    def reset_parameters(self) -> None:
        super().reset_parameters()  # type: ignore[misc]
        weight: Tensor | None = self.weight  # type: ignore[attr-defined]
        if self.zero_centered_gamma and weight is not None:
            nn.init.zeros_(weight)

    def extra_repr(self) -> str:
        said: str = super().extra_repr()  # type: ignore[misc]
        return said + (", zero_centered_gamma=True" if self.zero_centered_gamma else "")


class RMSNormSaved(NamedTuple):
    x: Tensor | None  # (..., *normalized_shape)
    weight: Tensor | None  # the parameter itself
    rstd: Tensor | None  # (...) float32


class RMSNorm(_Norm, Op[RMSNormSaved], nn.RMSNorm):
    """y = x / sqrt(mean(x^2) + eps) * weight, the mean over the last axes.   x (..., *normalized_shape) -> the same

    `torch.nn.RMSNorm` as an op (arXiv 1910.07467): same constructor and state_dict keys. Statistics in float32; y has
    the dtype of x. eps None is the epsilon of the dtype that the statistics are kept in, as in torch (whose
    documentation says the dtype of x). zero_centered_gamma: the multiplier is 1 + weight, in float32, and the weight
    begins at 0. Of heads, (..., H, D) with normalized_shape D, x may be a strided view.
    Raises ShapeError for other last axes.
    """

    saves_for = {"x": ("x", "weight", "rstd"), "weight": ("x", "rstd")}

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float | None = None,
        elementwise_affine: bool = True,
        device: Any = None,
        dtype: Any = None,
        *,
        zero_centered_gamma: bool = False,
    ) -> None:
        _check_axes("RMSNorm", normalized_shape)
        check_numbers("RMSNorm", 0, eps=0 if eps is None else eps)
        flags = {"elementwise_affine": elementwise_affine}
        check_flags("RMSNorm", **flags, zero_centered_gamma=zero_centered_gamma)
        self._weight_offset = float(zero_centered_gamma)
        nn.RMSNorm.__init__(self, normalized_shape, eps, elementwise_affine, device, dtype)

    def fwd(self, x: Tensor, *, weight: Tensor | None) -> Out:
        shape = tuple(self.normalized_shape)
        found = self.normed(x, {"weight": weight}, self.epsilon(x.dtype), None, len(shape))
        return Out(found.y, self.saved_of(found, weight, shape))

    def normed(
        self, x: Tensor, params: Params, eps: float, residual: Tensor | None = None, dims: int = 1
    ) -> Normed:
        """The norm of x over its last `dims` axes, or over the last of x + residual."""
        weight, offset = params["weight"], self._weight_offset
        if residual is None:
            y, rstd = K.rmsnorm_fwd(x, weight, eps, offset, dims)
            return Normed(y, x, None, rstd)
        y, h, rstd = K.add_rmsnorm_fwd(x, residual, weight, eps, offset)
        return Normed(y, h, None, rstd)

    def saved_of(self, found: Normed, weight: Tensor | None, shape: Shape) -> RMSNormSaved:
        """What `grads` reads of a norm over axes of that shape."""
        return RMSNormSaved(found.h, weight, found.rstd)

    def grads(
        self, saved: RMSNormSaved, dy: Tensor, needs: frozenset[str], dres: Tensor | None = None
    ) -> Grads:
        """Of the parameters that are needed, and dx, to which `dres` is added in the same pass."""
        x, weight, rstd = saved
        wanted = "weight" in needs
        dtype = None if weight is None else weight.dtype
        given: Any = dy, x, weight, rstd, dres, wanted, self._weight_offset, dtype
        dx, dweight = K.rmsnorm_bwd(*given)
        return Grads(dx, {"weight": dweight} if wanted else None)


class L2NormSaved(NamedTuple):
    x: Tensor | None  # (..., D)
    rstd: Tensor | None  # (...) float32


class L2Norm(Op[L2NormSaved]):
    """y = x / sqrt(sum(x^2) + eps), the sum over the last axis: x over its length.   x (..., D) -> the same

    TransformerEngine's L2Normalization; computed in float32, rounded once. Of heads, (..., H, D), x may be a strided
    view.
    """

    saves_for = {"x": ("x", "rstd")}
    cut_before = True
    floats = True

    def __init__(self, eps: float = 1e-6) -> None:
        super().__init__()
        check_numbers("L2Norm", 0, eps=eps)
        self.eps = eps

    def extra_repr(self) -> str:
        return f"eps={self.eps}"

    def out_shape(self, shape: Shape) -> Shape:
        if not shape:
            raise ShapeError("L2Norm expects x of shape (..., D), got a number.")
        return shape

    def fwd(self, x: Tensor) -> Out:
        y, rstd = K.rmsnorm_fwd(x, None, self.eps, 0.0, 1, False)
        return Out(y, L2NormSaved(x, rstd))

    def bwd(self, saved: L2NormSaved, dy: Tensor) -> Grads:
        x, rstd = saved
        dx, _ = K.rmsnorm_bwd(dy, x, None, rstd, None, False, 0.0, None, False)  # type: ignore[arg-type]
        return Grads(dx)


class LayerNormSaved(NamedTuple):
    x: Tensor | None  # (..., *normalized_shape)
    weight: Tensor | None  # the parameter itself
    mean: Tensor | None  # (...) float32
    rstd: Tensor | None  # (...) float32
    shape: tuple[int, ...] | None  # normalized_shape, of the forward


class LayerNorm(_Norm, Op[LayerNormSaved], nn.LayerNorm):
    """y = (x - mean(x)) / sqrt(var(x) + eps) * weight + bias.   x (..., *normalized_shape) -> the same

    `torch.nn.LayerNorm` as an op (arXiv 1607.06450): same constructor and state_dict keys. Statistics in float32; y has
    the dtype of x, and wider parameters are not rounded to it. zero_centered_gamma and strided heads as of RMSNorm.
    Raises ShapeError for other last axes.
    """

    saves_for = {
        "x": ("x", "weight", "mean", "rstd"),
        "weight": ("x", "mean", "rstd"),
        "bias": ("shape",),
    }

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        bias: bool = True,
        device: Any = None,
        dtype: Any = None,
        *,
        zero_centered_gamma: bool = False,
    ) -> None:
        _check_axes("LayerNorm", normalized_shape)
        check_numbers("LayerNorm", 0, eps=eps)
        flags = {"elementwise_affine": elementwise_affine, "bias": bias}
        check_flags("LayerNorm", **flags, zero_centered_gamma=zero_centered_gamma)
        self._weight_offset = float(zero_centered_gamma)
        nn.LayerNorm.__init__(self, normalized_shape, eps, elementwise_affine, bias, device, dtype)

    def fwd(self, x: Tensor, *, weight: Tensor | None, bias: Tensor | None) -> Out:
        shape, params = tuple(self.normalized_shape), {"weight": weight, "bias": bias}
        found = self.normed(x, params, self.eps, None, len(shape))
        return Out(found.y, self.saved_of(found, weight, shape))

    def normed(
        self, x: Tensor, params: Params, eps: float, residual: Tensor | None = None, dims: int = 1
    ) -> Normed:
        """The norm of x over its last `dims` axes, or over the last of x + residual."""
        own = params["weight"], params["bias"], eps, self._weight_offset
        if residual is None:
            y, mean, rstd = K.layernorm_fwd(x, *own, dims)
            return Normed(y, x, mean, rstd)
        return Normed(*K.add_layernorm_fwd(x, residual, *own))

    def saved_of(self, found: Normed, weight: Tensor | None, shape: Shape) -> LayerNormSaved:
        """What `grads` reads of a norm over axes of that shape."""
        return LayerNormSaved(found.h, weight, found.mean, found.rstd, shape)

    def grads(
        self, saved: LayerNormSaved, dy: Tensor, needs: frozenset[str], dres: Tensor | None = None
    ) -> Grads:
        """Of the parameters that are needed, and dx, to which `dres` is added in the same pass."""
        x, weight, mean, rstd, shape = saved
        if rstd is None:  # for the bias alone; x may be saved for a GEMM
            rows = dy.reshape(-1, math.prod(shape))  # type: ignore[arg-type]
            return Grads(None, {"bias": K.bias_bwd(rows).view(shape)})  # type: ignore[arg-type]
        wanted = "weight" in needs, "bias" in needs
        dtype = None if weight is None else weight.dtype
        given: Any = dy, x, weight, mean, rstd, dres, *wanted, self._weight_offset, dtype
        dx, *made = K.layernorm_bwd(*given)
        params = {n: t for n, t in zip(("weight", "bias"), made, strict=True) if n in needs}
        return Grads(dx, params)
