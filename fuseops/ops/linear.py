"""Linear: y = x W^T + b.   Shapes: (..., in) -> (..., out), weight (out, in), bias (out,)."""

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fuseops import kernels as K
from fuseops.recipes import COL, HIGH, ROW, Quantized, gemm

from .checks import check_width
from .op import Call, Grads, Op, Out, Shape


class LinearSaved(NamedTuple):
    x: Tensor | Quantized | None  # (..., in)
    weight: Tensor | None  # the parameter itself


def gemm_layouts(role: str, needs: frozenset[str]) -> frozenset[str]:
    """Layouts that the three GEMMs read: rowwise for fprop and dgrad, columnwise for wgrad."""
    row = {ROW} if role == "input" or "x" in needs else set()
    return frozenset(row | ({COL} if "weight" in needs else set()))


def saved_operand(x: Any, call: Call) -> Any:
    """What of a GEMM's input the weight gradient reads: of a quantized one, one layout alone."""
    if not isinstance(x, Quantized):
        return x
    return x.only(COL if call.precision.roles.columns else ROW)


def linear(x: Any, weight: Tensor, bias: Tensor | None, call: Call) -> Tensor:
    """x W^T + b in the precision of the call."""
    if call.precision.roles is HIGH:
        if call.precision.compute is None:
            return F.linear(x, weight, bias)
        return F.linear(x, call.precision.cast(weight), call.precision.cast(bias))  # type: ignore[arg-type]
    y = gemm.fprop(x, weight, call.precision.roles.weight)
    return y if bias is None else y + bias.to(y.dtype)


def linear_bwd(saved: LinearSaved, dy: Any, call: Call) -> Grads:
    """The gradients of `linear` that `call.needs` names."""
    if call.precision.roles is not HIGH:
        return _quantized_bwd(saved, dy, call)
    x, weight = saved
    needs, compute = call.needs, call.precision.compute
    rows = dy if dy.dim() == 2 else dy.reshape(-1, dy.shape[-1])
    dx: Tensor | None = None
    params = {}
    if "x" in needs:
        dx = torch.mm(rows, weight if compute is None else weight.to(compute))  # type: ignore[union-attr, arg-type]
        if rows is not dy:
            dx = dx.view(*dy.shape[:-1], dx.shape[-1])
    if "weight" in needs:
        params["weight"] = torch.mm(rows.t(), x if x.dim() == 2 else x.reshape(-1, x.shape[-1]))  # type: ignore[union-attr, arg-type]
    if "bias" in needs:
        params["bias"] = K.bias_bwd(rows)
    return Grads(dx, params)


def _quantized_bwd(saved: LinearSaved, dy: Any, call: Call) -> Grads:
    needs, params = call.needs, {}
    dx = gemm.dgrad(dy, saved.weight, call.precision.roles.weight) if "x" in needs else None  # type: ignore[arg-type]
    if "weight" in needs:
        params["weight"] = gemm.wgrad(dy, saved.x)  # type: ignore[arg-type]
    if "bias" in needs:
        high = dy.high if isinstance(dy, Quantized) else dy
        params["bias"] = K.bias_bwd(high.flatten(0, -2))  # type: ignore[union-attr]
    return Grads(dx, params)


class Linear(Op[LinearSaved], nn.Linear):
    """y = x W^T + b.   x (..., in_features) -> (..., out_features), weight (out_features, in_features)

    `torch.nn.Linear` as an op: same constructor, initialisation and state_dict keys. Under autocast x and the
    parameters are cast to its dtype; otherwise they have one dtype. Raises ShapeError for another width.
    """

    saves_for = {"x": ("weight",), "weight": ("x",), "bias": ()}
    floats = True
    autocast = True
    granularity = "tensor"

    def out_shape(self, shape: Shape) -> Shape:
        check_width(self, shape, self.in_features)
        return (*shape[:-1], self.out_features)

    def layouts(self, role: str, needs: frozenset[str]) -> frozenset[str]:
        return gemm_layouts(role, needs)

    def fwd(self, x: Any, *, weight: Tensor, bias: Tensor | None, call: Call) -> Out:
        return Out(linear(x, weight, bias, call), LinearSaved(saved_operand(x, call), weight))

    def bwd(self, saved: LinearSaved, dy: Any, *, call: Call) -> Grads:
        return linear_bwd(saved, dy, call)


class BiasSaved(NamedTuple):
    pass


class Bias(Op[BiasSaved]):
    """y = x + bias.   (..., size) -> (..., size), bias (size,), initialised to zero."""

    saves_for = {"x": (), "bias": ()}
    floats = True

    def __init__(
        self,
        size: int,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.size = size
        self.bias = nn.Parameter(torch.empty(size, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.bias)

    def extra_repr(self) -> str:
        return f"{self.size}"

    def out_shape(self, shape: Shape) -> Shape:
        check_width(self, shape, self.size)
        return shape

    def fwd(self, x: Tensor, *, bias: Tensor) -> Out:
        return Out(K.bias_fwd(x, bias), BiasSaved())

    def bwd(self, saved: BiasSaved, dy: Tensor, *, call: Call) -> Grads:
        return Grads(dy, {"bias": K.bias_bwd(dy)} if "bias" in call.needs else None)
