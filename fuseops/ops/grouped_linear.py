"""GroupedLinear: one weight a group of rows.   y[rows of e] = x[rows of e] W[e]^T + b[e] (* probs[row]).

With `low_rank` the weight is W[e] + up[e] down[e], which is never materialised: x down[e]^T up[e]^T is added to y.
Shapes: x (R, in), weight (E, out, in), bias (E, out), offs (E,) int32 cumulative row ends on x's device, probs (R,),
down (E, r, in), up (E, out, r) -> (R, out).
Rows at or beyond offs[-1] are padding: y and dx are zero there, and no gradient takes anything from there.
"""

import math
from functools import partial
from typing import Any, NamedTuple, Self, cast

import torch
from torch import Tensor, nn

from fuseops import kernels as K
from fuseops.arguments import check_flags, check_integers
from fuseops.errors import ShapeError
from fuseops.recipes import Operand, Quantized, gemm

from .checks import check_offs, check_probs, check_width
from .grouped_state_dict import load_packed_or_parts
from .linear import (
    columns_of,
    flat,
    grad_operand,
    input_operand,
    saved_operand,
    to_high_precision,
    weight_columns,
    weight_rows,
)
from .op import Call, Grads, Op, Out, Shape
from .packing import packed, repack
from .splits import check_splits
from .tiles import tiles_of, tiles_of_columns

PACKED = ("weight", "bias")
LowRank = tuple[Tensor | None, Tensor | None]  # down and up


class GroupedLinearSaved(NamedTuple):
    x: Operand | None  # (R, in)
    weight: Tensor | None  # the parameter itself
    offs: Tensor | None  # (E,) int32
    bias: Tensor | None  # the parameter itself, where it is scaled
    probs: Tensor | None  # (R,), which scales it
    down: Tensor | None = None  # parameters themselves
    up: Tensor | None = None


def grouped_linear(
    x: Operand,
    weight: Tensor,
    bias: Tensor | None,
    offs: Tensor,
    probs: Tensor | None,
    call: Call,
    index: Tensor | None = None,
    out: Tensor | None = None,
    low_rank: LowRank = (None, None),
    columns: bool = True,
) -> tuple[Tensor, Operand]:
    """-> y = x W^T + b by groups in the precision of the call, and the form of x that the weight gradient reads.

    index: row r of the product reads row index[r] of x.
    out: (R, out), receives y if no other kernel runs after the product.
    low_rank: (down, up), whose product is added.
    columns: False where the backward recomputes x, and quantizes its columns then.
    """
    rows = index.shape[0] if index is not None else rows_of(x)
    check_splits(offs, rows, offs.device)
    tiles, (down, up) = tiles_of(call, offs, rows), low_rank
    roles, kept, in_epilogue = call.precision.roles, x, False
    if roles is not None:
        q = input_operand(x, call, offs, index, columns)
        y = gemm.fprop(q, weight_rows(weight, call), offs, tiles, call.name)
        kept = saved_operand(x, q, call, row=down is not None)
    else:
        x = cast("Tensor", x)
        w: Tensor = call.precision.cast(weight)  # type: ignore[assignment]
        b, scale = call.precision.cast(bias), None if bias is None else probs
        in_epilogue = (b is None or b.dtype is x.dtype) and (
            scale is None or (scale.shape == (rows,) and scale.dtype is torch.float32)
        )
        end = (b, index, scale) if in_epilogue else (None, index)
        if not in_epilogue or out is None or out.dtype is not x.dtype:
            y = K.grouped_mm(x, w, offs, tiles, *end)
        else:
            K.grouped_mm_into(out, x, w, offs, tiles, *end)
            y = out
    if not in_epilogue and probs is not None:
        check_probs("GroupedLinear", y, probs)
    if not in_epilogue and bias is not None:
        y = K.grouped_bias_fwd(y, bias, offs, probs)
    if down is not None and up is not None:
        # x as it was given: y must not depend on what the backward reads
        through = _project_down(x, down, offs, tiles, call, index)
        y = _accumulate(y, K.grouped_mm(through, _cast_factor(up, through, call), offs, tiles))
    return y, kept


def grouped_linear_bwd(
    saved: GroupedLinearSaved,
    dy: Operand,
    call: Call,
    x_index: Tensor | None = None,
    dy_index: Tensor | None = None,
    needs: frozenset[str] | None = None,
) -> Grads:
    """The gradients of `grouped_linear` that `needs` names, by default `call.needs`.

    x_index, dy_index: as `index` of `grouped_linear`, for x and for dy.
    """
    x, weight, offs, bias, probs = cast("tuple[Operand, Tensor, Tensor, Tensor, Tensor]", saved[:5])
    needs, roles = call.needs if needs is None else needs, call.precision.roles
    params: dict[str, Tensor | None] = {}
    side: dict[str, Tensor | None] = {}
    dx: Tensor | None = None
    if "bias" in needs or "probs" in needs:
        rows = to_high_precision(dy)
        if dy_index is not None:
            rows = K.gather_rows(rows, dy_index, offs)
        scaled = bias if "probs" in needs else None
        params["bias"], side["probs"] = K.grouped_bias_bwd(rows, offs, probs, scaled)
    q, index = dy, dy_index
    if roles is not None:
        q, index = grad_operand(dy, call, needs, offs, dy_index), None
    if "x" in needs:
        dx = input_gradient(q, weight, offs, call, index)
    if "weight" in needs:
        if roles is not None and roles.high_wgrad:
            q, index = dy, dy_index
        params["weight"] = weight_gradient(q, x, offs, call, x_index, index)
    if saved.down is not None or saved.up is not None:
        part, made = _low_rank_bwd(saved, to_high_precision(dy), call, needs, x_index, dy_index)
        params |= made
        dx = dx if dx is None or part is None else _accumulate(dx, part)
    return Grads(dx, params, side)


def _low_rank_bwd(
    saved: GroupedLinearSaved,
    dy: Tensor,
    call: Call,
    needs: frozenset[str],
    x_index: Tensor | None,
    dy_index: Tensor | None,
) -> tuple[Tensor | None, dict[str, Tensor | None]]:
    """-> the part of dx that goes through down and up, and their gradients."""
    params: dict[str, Tensor | None] = {}
    offs: Tensor = saved.offs  # type: ignore[assignment]
    tiles = tiles_of(call, offs, (dy if dy_index is None else dy_index).shape[0])
    if "up" in needs:
        through = _project_down(saved.x, saved.down, offs, tiles, call, x_index)  # type: ignore[arg-type]
        params["up"] = K.grouped_wgrad(dy, through, offs, tiles, dy_index)
    if needs.isdisjoint(("x", "down")):
        return None, params
    up: Tensor = saved.up  # type: ignore[assignment]
    back = K.grouped_mm(dy, _cast_factor(up, dy, call).transpose(1, 2), offs, tiles, index=dy_index)
    if "down" in needs:
        x = to_high_precision(saved.x)  # type: ignore[arg-type]
        params["down"] = K.grouped_wgrad(back, x, offs, tiles, None, x_index)
    if "x" not in needs:
        return None, params
    down = _cast_factor(saved.down, dy, call).transpose(1, 2)  # type: ignore[arg-type]
    return K.grouped_mm(back, down, offs, tiles), params


def _project_down(
    x: Operand, down: Tensor, offs: Tensor, tiles: Tensor | None, call: Call, index: Tensor | None
) -> Tensor:
    """x down^T, (R, r)."""
    rows = to_high_precision(x)
    return K.grouped_mm(rows, _cast_factor(down, rows, call), offs, tiles, index=index)


def _cast_factor(factor: Tensor, x: Tensor, call: Call) -> Tensor:
    """Down or up in the dtype of x: adapters are often kept in float32."""
    return call.precision.cast(factor).to(x.dtype)  # type: ignore[union-attr]


def _accumulate(y: Tensor, part: Tensor) -> Tensor:
    """y + part, in place unless autograd records."""
    return y + part if torch.is_grad_enabled() else y.add_(part)


def input_gradient(
    dy: Operand, weight: Tensor, offs: Tensor, call: Call, index: Tensor | None = None
) -> Tensor:
    """dx (R, in), in the caller's buffer where it gave one of dy's dtype.   index: of dy"""
    rows = index.shape[0] if index is not None else rows_of(dy)
    tiles, roles = tiles_of(call, offs, rows), call.precision.roles
    if roles is not None:
        return gemm.dgrad(dy, weight_columns(weight, call), offs, tiles, call.name)
    dy = cast("Tensor", dy)
    transposed = call.precision.cast(weight).transpose(1, 2)  # type: ignore[union-attr]
    dx = (call.out or {}).get("dx")
    if dx is None or dx.dtype is not dy.dtype:
        return K.grouped_mm(dy, transposed, offs, tiles, None, index)
    K.grouped_mm_into(flat(dx), dy, transposed, offs, tiles, None, index)
    return dx


def weight_gradient(
    dy: Operand,
    x: Operand,
    offs: Tensor,
    call: Call,
    x_index: Tensor | None = None,
    dy_index: Tensor | None = None,
) -> Tensor | None:
    """dw (E, out, in) of dy (R, out) and x (R, in), or None where it is accumulated into the `main_grad` of the call.

    A float32 `main_grad` receives the float32 sums, which are not rounded to another dtype before.
    """
    buffer = (call.out or {}).get("weight")
    unrounded = buffer is not None and buffer.dtype is torch.float32
    add = "weight" not in call.overwrite
    roles = call.precision.roles
    if roles is not None and not roles.high_wgrad:
        columns, tables = columns_of(x, call, offs, x_index), partial(tiles_of_columns, call)
        if not unrounded:
            return gemm.wgrad(dy, columns, dy.dtype, offs, call.name, tables)
        gemm.wgrad_into(buffer, dy, columns, offs, add, call.name, tables)  # type: ignore[arg-type]
        return None
    dy, x = to_high_precision(dy), to_high_precision(x)
    tiles = tiles_of(call, offs, (dy if dy_index is None else dy_index).shape[0])
    if not unrounded or x.dtype is torch.float64:
        return K.grouped_wgrad(dy, x, offs, tiles, dy_index, x_index)
    K.grouped_wgrad_into(buffer, dy, x, offs, tiles, add, dy_index, x_index)  # type: ignore[arg-type]
    return None


def rows_of(x: Operand) -> int:
    """The number of rows that an operand has."""
    if not isinstance(x, Quantized):
        return x.shape[0]
    return x.row.data.shape[0] if x.row is not None else x.col.data.shape[1]  # type: ignore[union-attr]


class GroupedLinear(Op[GroupedLinearSaved]):
    """y = x W_g^T + b_g for the rows of group g, sorted by group.  weight (num_groups, out_features, in_features)

    Each group is initialised as `torch.nn.Linear` is.  Reads `offs`; pass `fo.Routing` or `offs=`. Axes before the last
    are rows, in order; y keeps them.
    scale_bias: the bias is multiplied by the side input `probs`, one a row: as if the probability, which an activation
    before this op applies, scaled the whole output.
    accumulate_into_main_grad: parameter gradients are added to `parameter.main_grad` (float32 or the parameter's dtype,
    contiguous; overwritten where `parameter.overwrite_main_grad` is set), and `.grad` stays None, or gets zeros where
    the parameter has `grad_added_to_main_grad`.
    delay_wgrad: the weight's gradient waits for `backward_dw()`, of the op or of a Sequential; the bias' does not.
    packed: False keeps one Parameter a group, `weight0` (out, in) and `bias0` (out,) to the last, over one storage:
    `weight` is then (num_groups, out, in) without a copy. `.to`, `deepcopy` and loading separate them; the op then
    packs them again, and counts that in `repacks`. torch.compile copies them in each call.
    low_rank: the rank r of a LoRA update of each weight (arXiv 2106.09685), `down` (num_groups, r, in_features) and
    `up` (num_groups, out_features, r), zero at first. Recipes do not quantize them.
    offs, probs: names of the side inputs, where two ops of one Sequential read different ones.

    A state_dict of either form loads into either, TransformerEngine's too.
    """

    reads: tuple[str, ...] = ("offs",)
    saves_for = {
        "x": ("weight", "offs"),
        "weight": ("x", "offs"),
        "bias": ("offs", "probs"),
        "probs": ("offs", "bias"),
    }
    _saves_for_low_rank = {
        **saves_for,
        "x": ("weight", "offs", "down", "up"),
        "down": ("x", "offs", "up"),
        "up": ("x", "offs", "down"),
    }
    autocast = True
    multiplies = True
    takes_quantized = True
    live_call = True
    floats = True
    weight: Tensor
    bias: Tensor | None

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
        packed: bool = True,
        low_rank: int | None = None,
        offs: str = "offs",
        probs: str = "probs",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        sizes = {"num_groups": num_groups, "in_features": in_features, "out_features": out_features}
        check_integers("GroupedLinear", 1, **sizes, low_rank=1 if low_rank is None else low_rank)
        flags = {
            "bias": bias,
            "scale_bias": scale_bias,
            "packed": packed,
            "delay_wgrad": delay_wgrad,
        }
        into = accumulate_into_main_grad
        check_flags("GroupedLinear", **flags, accumulate_into_main_grad=into)
        super().__init__()
        self.num_groups, self.in_features, self.out_features = num_groups, in_features, out_features
        self.scale_bias = scale_bias and bias
        self.rename(offs=offs, probs=probs)
        self.accumulate_into_main_grad = into
        self.delays = ("weight",) if delay_wgrad else ()
        self._packed, self.repacks = packed, 0
        weight = torch.empty(num_groups, out_features, in_features, device=device, dtype=dtype)
        self._register("weight", weight)
        for key in self.registered("weight") if delay_wgrad else ():
            # Megatron then hooks its reduction to this op's `backward_dw`, not to the backward
            self._parameters[key].skip_backward_post_hook = True  # type: ignore[union-attr]
        self._register("bias", weight.new_empty(num_groups, out_features) if bias else None)
        if low_rank is not None:
            self.down = nn.Parameter(weight.new_empty(num_groups, low_rank, in_features))
            self.up = nn.Parameter(weight.new_empty(num_groups, out_features, low_rank))
            self.saves_for = self._saves_for_low_rank
        self.reset_parameters()

    @property
    def scale_bias(self) -> bool:
        return "probs" in self.reads

    @scale_bias.setter
    def scale_bias(self, scaled: bool) -> None:
        self.reads = ("offs", "probs") if scaled else ("offs",)

    def _register(self, name: str, whole: Tensor | None) -> None:
        if whole is None or self.packed:
            self.register_parameter(name, None if whole is None else nn.Parameter(whole))
            return
        for key, part in zip(self.registered(name), whole, strict=True):
            self.register_parameter(key, nn.Parameter(part))

    def reset_parameters(self) -> None:
        with torch.no_grad():
            bound = 1 / math.sqrt(self.weight.shape[-1])  # of all ranks together
            self.weight.uniform_(-bound, bound)
            if self.bias is not None:
                self.bias.uniform_(-bound, bound)
            if "down" in self._parameters:
                self.down.uniform_(-bound, bound)
                self.up.zero_()

    # --- one Parameter a group

    def registered(self, name: str) -> tuple[str, ...]:
        if self.packed or name not in PACKED or name in self._parameters:
            return (name,)
        return tuple([f"{name}{e}" for e in range(self.num_groups)])

    def sample(self, name: str) -> Any:
        parts = [getattr(self, key) for key in self.registered(name)]
        return next((part for part in parts if part is not None and part.requires_grad), parts[0])

    def __getattr__(self, name: str) -> Any:
        if name in PACKED and name not in self._parameters and not self.packed:
            return packed({key: getattr(self, key) for key in self.registered(name)})
        return super().__getattr__(name)

    def repack(self) -> bool:
        """Move the Parameters of the groups back into one storage, unless they are there.   -> whether they moved"""
        names = [name for name in PACKED if name not in self.registered(name)]
        moved = [repack([getattr(self, key) for key in self.registered(name)]) for name in names]
        self.repacks += any(moved)
        return any(moved)

    def _apply(self, fn: Any, recurse: bool = True) -> Self:
        super()._apply(fn, recurse)
        self.repack()
        return self

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.repack()

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any, **keywords: Any
    ) -> None:
        load_packed_or_parts(
            self, super()._load_from_state_dict, state_dict, prefix, *args, **keywords
        )
        self.repack()

    @property
    def packed(self) -> bool:
        """Whether the groups are one Parameter. Fixed when the op is made: its parameters follow from it."""
        return self._packed

    def extra_repr(self) -> str:
        return (
            f"num_groups={self.num_groups}, in_features={self.in_features}, "
            f"out_features={self.out_features}, bias={self.bias is not None}"
            + (", scale_bias=True" if self.scale_bias else "")
            + ("" if self.packed else ", packed=False")
            + (f", low_rank={self.down.shape[1]}" if "down" in self._parameters else "")
            + "".join(f", {name}" for name in self.renamed())
        )

    def out_shape(self, shape: Shape) -> Shape:
        check_width(self, shape, self.in_features)
        if len(shape) < 2:
            raise ShapeError(
                f"GroupedLinear expects x of shape (..., rows, {self.in_features}), got {tuple(shape)}."
            )
        return (*shape[:-1], self.out_features)

    def fwd(
        self,
        x: Operand,
        *,
        weight: Tensor,
        bias: Tensor | None,
        offs: Tensor,
        probs: Tensor | None = None,
        down: Tensor | None = None,
        up: Tensor | None = None,
        call: Call,
    ) -> Out:
        check_offs(offs, self.num_groups)
        lead, scaled = x.shape[:-1], None
        if probs is not None:
            check_probs("GroupedLinear", x, probs)
            probs, scaled = probs.reshape(-1), bias
        rows = flat(x)
        buffer = (call.out or {}).get("y")
        out = None if buffer is None else flat(buffer)
        y, kept = grouped_linear(
            rows, weight, bias, offs, probs, call, out=out, low_rank=(down, up)
        )
        saved = GroupedLinearSaved(kept, weight, offs, scaled, probs, down, up)
        if buffer is not None and y is out:
            return Out(buffer, saved)
        return Out(y if len(lead) == 1 else y.view(*lead, y.shape[-1]), saved)

    def bwd(self, saved: GroupedLinearSaved, dy: Tensor, *, call: Call) -> Grads:
        rows = flat(dy)
        grads = grouped_linear_bwd(saved, rows, call)
        if rows is dy:
            return grads
        lead, dx = dy.shape[:-1], grads.x
        if dx is not None and dx.dim() == 2:
            dx = dx.view(*lead, dx.shape[-1])
        dprobs = (grads.side or {}).get("probs") if "probs" in call.needs else None
        return Grads(dx, grads.params, {"probs": None if dprobs is None else dprobs.view(lead)})
