"""GroupedLinear: one weight a group of rows.   y[rows of e] = x[rows of e] W[e]^T + b[e] (* probs[row]).

Shapes: x (R, in), weight (E, out, in), bias (E, out), offs (E,) int32 cumulative row ends on x's device, probs (R,)
-> (R, out).
Rows at or beyond offs[-1] are padding: y and dx are zero there, and no gradient takes anything from there.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fuseops import kernels as K
from fuseops.errors import FuseOpsError, ShapeError
from fuseops.recipes import Quantized, gemm

from .linear import check_width, gemm_layouts, saved_operand
from .op import Call, Grads, Op, Out, Shape
from .routing import check_offs, check_probs
from .tiles import tiles_of


class GroupedLinearSaved(NamedTuple):
    x: Tensor | Quantized | None  # (R, in)
    weight: Tensor | None  # the parameter itself
    offs: Tensor | None  # (E,) int32
    bias: Tensor | None  # the parameter itself, where it is scaled
    probs: Tensor | None  # (R,), which scales it


def grouped_linear(
    x: Any,
    weight: Tensor,
    bias: Tensor | None,
    offs: Tensor,
    probs: Tensor | None,
    call: Call,
    index: Tensor | None = None,
) -> Tensor:
    """The grouped product in the precision of the call. index: row r of x is its row index[r]."""
    if isinstance(x, Quantized):
        y = gemm.fprop(x, weight, call.precision.roles.weight)  # type: ignore[arg-type]
    else:
        tiles = tiles_of(call, offs, len(x if index is None else index))
        y = K.grouped_mm(x, call.precision.cast(weight), offs, tiles, index=index)  # type: ignore[arg-type]
    if probs is not None:
        check_probs("GroupedLinear", y, probs)
    return y if bias is None else K.grouped_bias_fwd(y, bias, offs, probs)


def grouped_linear_bwd(
    saved: GroupedLinearSaved,
    dy: Any,
    call: Call,
    x_index: Tensor | None = None,
    dy_index: Tensor | None = None,
) -> Grads:
    """The gradients of `grouped_linear` that `call.needs` names. index: as above, of x and of dy."""
    x, weight, offs, bias, probs = saved
    needs = call.needs
    params: dict[str, Tensor | None] = {}
    side: dict[str, Tensor | None] = {}
    dx: Tensor | None = None
    quantized = isinstance(dy, Quantized)
    if "bias" in needs or "probs" in needs:
        shift = bias if "probs" in needs else None
        high = dy.high if quantized else dy
        if dy_index is not None:
            high = K.gather_rows(high, dy_index, offs)  # type: ignore[arg-type]
        params["bias"], side["probs"] = K.grouped_bias_bwd(high, offs, probs, shift)  # type: ignore[arg-type]
    if "x" in needs:
        if quantized:
            dx = gemm.dgrad(dy, weight, call.precision.roles.weight)  # type: ignore[arg-type]
        else:
            transposed = call.precision.cast(weight).transpose(1, 2)  # type: ignore[union-attr]
            tiles = tiles_of(call, offs, len(dy if dy_index is None else dy_index))  # type: ignore[arg-type]
            dx = K.grouped_mm(dy, transposed, offs, tiles, index=dy_index)  # type: ignore[arg-type]
    if "weight" in needs:
        if quantized:
            params["weight"] = gemm.wgrad(dy, x)  # type: ignore[arg-type]
        else:
            params["weight"] = weight_gradient(dy, x, offs, call, x_index, dy_index)  # type: ignore[arg-type]
    return Grads(dx, params, side)


def weight_gradient(
    dy: Tensor,
    x: Tensor,
    offs: Tensor,
    call: Call,
    x_index: Tensor | None = None,
    dy_index: Tensor | None = None,
) -> Tensor | None:
    """dw (E, out, in) of dy (R, out) and x (R, in)."""
    tiles = tiles_of(call, offs, len(dy if dy_index is None else dy_index))
    return K.grouped_wgrad(dy, x, offs, tiles, dy_index, x_index)


class GroupedLinear(Op[GroupedLinearSaved]):
    """One linear map a group, over rows sorted by group.  weight (num_groups, out_features, in_features).

    Each group is initialised as `torch.nn.Linear` is.  Reads `offs`; pass `fo.Routing` or `offs=`.
    scale_bias: the bias is multiplied by `probs`, one a row, which the op then reads too: an expert's output times its
    probability, where the probability is applied before the bias.
    accumulate_into_main_grad: parameter gradients are added to `parameter.main_grad` (float32 or the parameter's dtype,
    contiguous; overwritten where `parameter.overwrite_main_grad` is set), and `.grad` stays None.
    delay_wgrad: the weight's gradient waits for `Sequential.backward_dw()`; the bias' does not.
    """

    reads: tuple[str, ...] = ("offs",)
    saves_for = {
        "x": ("weight", "offs"),
        "weight": ("x", "offs"),
        "bias": ("offs", "probs"),
        "probs": ("offs", "bias"),
    }
    autocast = True
    granularity = "group"
    live_call = True

    def __init__(
        self,
        num_groups: int,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        scale_bias: bool = False,
        accumulate_into_main_grad: bool = False,
        delay_wgrad: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        for name, size in (
            ("num_groups", num_groups),
            ("in_features", in_features),
            ("out_features", out_features),
        ):
            if size <= 0:
                raise FuseOpsError(f"GroupedLinear: {name} must be positive, got {size}.")
        super().__init__()
        self.num_groups, self.in_features, self.out_features = num_groups, in_features, out_features
        self.scale_bias = scale_bias and bias
        if self.scale_bias:
            self.reads = ("offs", "probs")
        self.accumulate_into_main_grad = accumulate_into_main_grad
        self.delays = ("weight",) if delay_wgrad else ()
        self.weight = nn.Parameter(
            torch.empty(num_groups, out_features, in_features, device=device, dtype=dtype)
        )
        if bias:
            self.bias = nn.Parameter(
                torch.empty(num_groups, out_features, device=device, dtype=dtype)
            )
        else:
            self.register_parameter("bias", None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        bound = 1 / math.sqrt(self.in_features)
        nn.init.uniform_(self.weight, -bound, bound)
        if self.bias is not None:
            nn.init.uniform_(self.bias, -bound, bound)

    def extra_repr(self) -> str:
        return (
            f"num_groups={self.num_groups}, in_features={self.in_features}, "
            f"out_features={self.out_features}, bias={self.bias is not None}"
            + (", scale_bias=True" if self.scale_bias else "")
        )

    def out_shape(self, shape: Shape) -> Shape:
        check_width(self, shape, self.in_features)
        if len(shape) != 2:
            raise ShapeError(
                f"GroupedLinear expects x of shape (rows, {self.in_features}), got {tuple(shape)}."
            )
        return (*shape[:-1], self.out_features)

    def layouts(self, role: str, needs: frozenset[str]) -> frozenset[str]:
        return gemm_layouts(role, needs)

    def fwd(
        self,
        x: Any,
        *,
        weight: Tensor,
        bias: Tensor | None,
        offs: Tensor,
        probs: Tensor | None = None,
        call: Call,
    ) -> Out:
        check_offs(offs, self.num_groups)
        y = grouped_linear(x, weight, bias, offs, probs, call)
        scaled = None if probs is None else bias
        return Out(y, GroupedLinearSaved(saved_operand(x), weight, offs, scaled, probs))

    def bwd(self, saved: GroupedLinearSaved, dy: Any, *, call: Call) -> Grads:
        return grouped_linear_bwd(saved, dy, call)
