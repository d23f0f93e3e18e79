"""Linear: y = x W^T + b.   Shapes: (..., in) -> (..., out), weight (out, in), bias (out,)."""

import math
from dataclasses import replace
from typing import Any, NamedTuple, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fuseops import kernels as K
from fuseops import torch_private
from fuseops.arguments import check_flags, check_integers
from fuseops.kernels.registry import opaque_call
from fuseops.recipes import (
    Operand,
    Quantized,
    Roles,
    Scaling,
    columns_follow,
    gemm,
    operand,
    weight_operand,
)
from fuseops.recipes.numerics import QuantizationStats, active_stats
from fuseops.recipes.operands import check_codes, columns_match
from fuseops.recipes.scales import ScaleFn

from .checks import check_width
from .op import Call, Grads, NothingSaved, Op, Out, Shape, make_tuple

X, WEIGHT = frozenset({"x"}), frozenset({"weight"})


class LinearSaved(NamedTuple):
    x: Operand | None  # (..., in)
    weight: Tensor | None  # the parameter itself


def linear(
    x: Operand, weight: Tensor, bias: Tensor | None, call: Call, columns: bool = True
) -> tuple[Tensor, Operand]:
    """-> y = x W^T + b in the precision of the call, and the form of x that the weight gradient reads, to be saved.

    columns: False where the backward recomputes x, and quantizes its columns then.
    """
    compute, roles = call.precision
    if roles is not None:
        return _quantized(x, weight, bias, call, columns)
    if compute is None:
        return F.linear(x, weight, bias), x  # type: ignore[arg-type]
    return F.linear(x, call.precision.cast(weight), call.precision.cast(bias)), x  # type: ignore[arg-type]


def linear_bwd(
    saved: LinearSaved, dy: Operand, call: Call, needs: frozenset[str] | None = None
) -> Grads:
    """The gradients of `linear` that `needs` names, by default `call.needs`."""
    compute, roles = call.precision
    needs = call.needs if needs is None else needs
    if roles is not None:
        return _quantized_bwd(saved, dy, call, needs, roles)
    x, weight = saved
    rows = dy if dy.dim() == 2 else dy.reshape(-1, dy.shape[-1])  # type: ignore[union-attr]
    dx: Tensor | None = None
    params = {}
    if "x" in needs:
        dx = torch.mm(rows, weight if compute is None else weight.to(compute))  # type: ignore[arg-type, union-attr]
        if rows is not dy:
            dx = dx.view(*dy.shape[:-1], dx.shape[-1])
    if "weight" in needs:
        # `plain_weight_gradient`, inlined
        params["weight"] = torch.mm(rows.mT, x if x.dim() == 2 else x.reshape(-1, x.shape[-1]))  # type: ignore[arg-type, union-attr]
    if "bias" in needs:
        # in the dtype of dy, except under autocast
        params["bias"] = K.bias_bwd(rows, None if compute is not None else dy.dtype)  # type: ignore[arg-type]
    return make_tuple(Grads, (dx, params, None))


def plain_weight_gradient(dy: Operand, x: Operand) -> Tensor:
    """dw (out, in) in high precision; leading axes of dy and x are rows."""
    return torch.mm(flat(dy).mT, flat(x))


# --- over quantized operands


def _quantized(
    x: Operand, weight: Tensor, bias: Tensor | None, call: Call, columns: bool
) -> tuple[Tensor, Operand]:
    q = input_operand(x, call, columns=columns)
    y = gemm.fprop(q, weight_rows(weight, call), name=call.name, bias=bias)
    if x.dim() != 2:  # no view: FSDP2 warns of views that leave its modules
        y = torch_private.unsafe_view(y, (*x.shape[:-1], y.shape[-1]))
    return y, saved_operand(x, q, call) if columns else x


def _quantized_bwd(
    saved: LinearSaved, dy: Operand, call: Call, needs: frozenset[str], roles: Roles
) -> Grads:
    dx: Tensor | None = None
    params = {}
    q = grad_operand(dy, call, needs)
    if "x" in needs:
        dx = input_gradient(q, saved.weight, call)  # type: ignore[arg-type]
        if isinstance(dy, Tensor) and dy.dim() != 2:
            dx = dx.view(*dy.shape[:-1], dx.shape[-1])
    if "weight" in needs:
        params["weight"] = weight_gradient(dy if roles.high_wgrad else q, saved.x, call)  # type: ignore[arg-type]
    if "bias" in needs:
        params["bias"] = bias_gradient(dy)
    return make_tuple(Grads, (dx, params, None))


def input_gradient(dy: Operand, weight: Tensor, call: Call) -> Tensor:
    """dx (R, in) of a dy from `grad_operand`."""
    return gemm.dgrad(dy, weight_columns(weight, call), name=call.name)


def weight_gradient(dy: Operand, x: Operand, call: Call) -> Tensor:
    """dw of x and a dy from `grad_operand`, or of dy itself where the recipe keeps this product in high precision."""
    if call.precision.roles.high_wgrad:  # type: ignore[union-attr]
        return plain_weight_gradient(to_high_precision(dy), to_high_precision(x))
    return gemm.wgrad(dy, columns_of(x, call), dy.dtype, name=call.name)


def bias_gradient(dy: Operand) -> Tensor:
    """The sum of dy in high precision."""
    return K.bias_bwd(flat(to_high_precision(dy)))


def input_operand(
    x: Operand,
    call: Call,
    offs: Tensor | None = None,
    index: Tensor | None = None,
    columns: bool = True,
) -> Operand:
    """x as the operand of the forward, (..., K) -> (R, K), with columns for the weight gradient where they are needed.

    Columns are not made of rows by index, which outnumber those of x.   columns: as of `linear`.
    """
    roles: Roles = call.precision.roles  # type: ignore[assignment]
    col = columns and "weight" in call.needs and index is None and roles.columns
    q = _operand(x, call, "input", offs, True, col, index)
    if QuantizationStats.active and (stats := active_stats()):
        stats.record_operand(call.name, "input", q)
    return q


def grad_operand(
    dy: Operand,
    call: Call,
    needs: frozenset[str],
    offs: Tensor | None = None,
    index: Tensor | None = None,
) -> Operand:
    """dy quantized once in the layouts that dx and dw read; unchanged where neither is needed."""
    roles: Roles = call.precision.roles  # type: ignore[assignment]
    wgrad = "weight" in needs and not roles.high_wgrad
    row, col = "x" in needs or (wgrad and not roles.columns), wgrad and roles.columns
    if not (row or col):
        return dy
    q = _operand(dy, call, "grad_output", offs, row, col, index)
    if QuantizationStats.active and (stats := active_stats()):
        stats.record_operand(call.name, "grad_output", q)
    return q


Indexed = tuple[Operand, Tensor | None]
"""(operand, index of its rows, or None for all in order)"""


def staged_grad_operands(
    dy: Operand,
    call: Call,
    offs: Tensor | None = None,
    index: Tensor | None = None,
    stays: bool = False,
    by_token: bool = False,
) -> tuple[Operand, Indexed]:
    """-> the operand of dx, and an `Indexed` from which `grad_operand` makes the operand of dw after dx is computed.

    by_token: of a dy by index whose columns derive from codes, keep the codes of its tokens, which are fewer.
    stays: dy stays alive until then. Columns that need high precision are then made later, of dy; otherwise both
    layouts are made at once. Columns that derive from codes are made later where dy is freed, of its row codes, so that
    one layout is alive instead of two.
    """
    needs = call.needs
    roles: Roles = call.precision.roles  # type: ignore[assignment]
    if roles.high_wgrad or needs.isdisjoint(("x", "weight")):
        return grad_operand(dy, call, needs, offs, index), (dy, index)
    follow = columns_from_codes(roles.grad_output)
    if by_token and index is not None and follow and roles.columns and "x" in needs:
        tokens = operand(dy, cast("Scaling", roles.grad_output))
        return grad_operand(tokens, call, X, offs, index), (tokens, index)
    if roles.columns and "x" in needs and follow is not stays:
        q = grad_operand(dy, call, X, offs, index)
        return q, (q, None) if follow else (dy, index)
    q = grad_operand(dy, call, needs, offs, index)
    columns = isinstance(q, Quantized) and q.col is not None
    return q, (q.only(False, True) if columns else q, None)  # type: ignore[union-attr]


def columns_from_codes(scaling: Scaling | None) -> bool:
    """Whether the columns of a format derive from row codes, as with one exponent a square."""
    return scaling is not None and scaling.block is not None and columns_follow(scaling)


def columns_of(
    x: Operand, call: Call, offs: Tensor | None = None, index: Tensor | None = None
) -> Operand:
    """x as the operand of the weight gradient."""
    columns: bool = call.precision.roles.columns  # type: ignore[union-attr]
    return _operand(x, call, "input", offs, not columns, columns, index)


def wgrad_input(x: Tensor, call: Call, offs: Tensor | None = None) -> Operand:
    """The form of an x to keep for the weight gradient, so that x itself can be freed."""
    return x if call.precision.roles.high_wgrad else columns_of(x, call, offs)  # type: ignore[union-attr]


def _operand(
    x: Operand,
    call: Call,
    role: str,
    offs: Tensor | None,
    row: bool,
    col: bool,
    index: Tensor | None,
) -> Operand:
    scaling: Scaling | None = getattr(call.precision.roles, role)
    if isinstance(x, Quantized) and x.scaling is scaling and x.offs is offs and index is None:
        has_layouts = (x.row is not None or not row) and (x.col is not None or not col)
        if has_layouts and (offs is None or scaling.block is not None):
            return x.only(row, col)  # quantized in this op, for this GEMM
    if scaling is not None:
        scale_fn = None if call.scales is None else _scale_source(call, role)
        seed = call.seed if role == "grad_output" else None
        return operand(
            x, scaling, offs, row=row, col=col, index=index, seed=seed, scale_fn=scale_fn
        )
    rows = flat(to_high_precision(x))
    return rows if index is None else K.gather_rows(rows, index, offs)  # type: ignore[arg-type]


def _scale_source(call: Call, role: str) -> ScaleFn:
    """The source of an operand's scale under a recipe with a state, which also records its amax in training."""
    return call.scales.scale_fn(call.precision.roles.delayed, role, call.training)  # type: ignore[union-attr]


def weight_rows(weight: Tensor, call: Call) -> Operand:
    """A weight as the operand of the forward, from the store of the call where it has one."""
    roles: Roles = call.precision.roles  # type: ignore[assignment]
    return _weight(weight, call, "row", "x" in call.needs and roles.backward is None)


def weight_columns(weight: Tensor, call: Call) -> Operand:
    """A weight as the operand of the input gradient, from the store of the call where it has one."""
    roles: Roles = call.precision.roles  # type: ignore[assignment]
    if roles.backward == "high_precision":
        return call.precision.cast(weight)  # type: ignore[return-value]
    return _weight(weight, call, "row" if roles.backward == "dequantized" else "col", False)


def _weight(weight: Tensor, call: Call, layout: str, both: bool) -> Operand:
    roles: Roles = call.precision.roles  # type: ignore[assignment]
    if roles.weight is None:
        return call.precision.cast(weight)  # type: ignore[return-value]
    stats = QuantizationStats.active and active_stats()
    scale_fn = None if call.scales is None else _scale_source(call, "weight")
    if call.store is None or stats is not None:
        row, col = layout == "row", layout == "col"
        q = weight_operand(weight, roles.weight, row=row, col=col, scale_fn=scale_fn)
    if call.store is not None:
        how = roles, layout, both, scale_fn
        kept = opaque_call(call.store.read, weight, *how, tensors_of=Quantized.tensors)
        if stats is None:
            return kept
        stats.record_stale_weight(call.name, kept, q)
    if stats is not None:
        stats.record_operand(call.name, "weight", q)
    return q


def saved_operand(x: Operand, q: Operand, call: Call, row: bool = False) -> Operand:
    """The form of x that the weight gradient reads: one layout of q, or x itself.

    row: keep the rows too, which adapters read.
    """
    roles: Roles = call.precision.roles  # type: ignore[assignment]
    if roles.high_wgrad or not isinstance(q, Quantized):
        return replace(x, col=None) if isinstance(x, Quantized) else x
    if not roles.columns:
        return q
    return x if q.col is None else q if row else q.only(False, True)


def saved_input(
    x: Operand, call: Call, offs: Tensor | None = None, by_index: bool = False, again: bool = False
) -> Operand:
    """The form of x that a fused op saves whose backward makes the columns: x, or the layouts of a `Quantized` it
    reads.

    by_index: the op reads rows of x by an index.  again: the backward recomputes the forward product.
    Raises FuseOpsError for codes that the backward could not read.
    """
    if not isinstance(x, Quantized):
        return x
    roles = cast("Roles", call.precision.roles)
    scaling = cast("Scaling", roles.input)
    columns = "weight" in call.needs and roles.columns
    check_codes(x, scaling, offs, True, columns, by_index)
    given = columns and not by_index and columns_match(x, scaling, offs)
    row = again or not given
    col = given and not (row and columns_follow(scaling))
    return replace(x, row=x.row if row else None, col=x.col if col else None)


def to_high_precision(x: Operand) -> Tensor:
    """The tensor of an operand, dequantized."""
    return x.dequantize() if isinstance(x, Quantized) else x


def flat(x: Any) -> Any:
    """An operand of two axes; a `Quantized` always has two."""
    return x if x.dim() == 2 or isinstance(x, Quantized) else x.reshape(-1, x.shape[-1])


class Linear(Op[LinearSaved], nn.Linear):
    """y = x W^T + b.   x (..., in_features) -> (..., out_features), weight (out_features, in_features)

    `torch.nn.Linear` as an op: same constructor, initialisation and state_dict keys. Under autocast x and the
    parameters are cast to its dtype; otherwise they have one dtype. Raises ShapeError for another width.
    """

    saves_for = {"x": ("weight",), "weight": ("x",), "bias": ()}
    floats = True
    autocast = True
    multiplies = True
    takes_quantized = True

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        check_integers("Linear", 0, in_features=in_features, out_features=out_features)
        check_flags("Linear", bias=bias)
        nn.Linear.__init__(self, in_features, out_features, bias, device, dtype)

    def reset_parameters(self) -> None:
        """Initialise as `torch.nn.Linear` does, with the fan-in of the whole weight where it is sharded or in
        halves.
        """
        if not self._local:
            super().reset_parameters()
            return
        bound = 1 / math.sqrt(self.weight.shape[-1])
        nn.init.uniform_(self.weight, -bound, bound)
        if self.bias is not None:
            nn.init.uniform_(self.bias, -bound, bound)

    def out_shape(self, shape: Shape) -> Shape:
        check_width(self, shape, self.in_features)
        return (*shape[:-1], self.out_features)

    def fwd(self, x: Operand, *, weight: Tensor, bias: Tensor | None, call: Call) -> Out:
        y, kept = linear(x, weight, bias, call)
        return make_tuple(Out, (y, make_tuple(LinearSaved, (kept, weight)), None))

    def bwd(self, saved: LinearSaved, dy: Tensor, *, call: Call) -> Grads:
        return linear_bwd(saved, dy, call)


class Bias(Op[NothingSaved]):
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
        check_integers("Bias", 0, size=size)
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
        return Out(K.bias_fwd(x, bias), NothingSaved())

    def bwd(self, saved: NothingSaved, dy: Tensor, *, call: Call) -> Grads:
        return Grads(dy, {"bias": K.bias_bwd(dy)} if "bias" in call.needs else None)
