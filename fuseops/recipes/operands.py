"""Quantizes tensors and weights into operands of GEMMs, in the format of a `Scaling`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache, partial
from types import NoneType
from typing import cast

import torch
from torch import Tensor

from fuseops import kernels as K
from fuseops.arguments import instance_of, shown
from fuseops.errors import FuseOpsError
from fuseops.kernels.groups import check_ends, check_offs, padded_columns
from fuseops.kernels.scales import RowTransform
from fuseops.plain import PLAIN
from fuseops.torch_private import is_fake

from .carrier import carrier_of
from .numerics import QuantizationStats, active_stats
from .quantized import Layout, Quantized, token_axis, unswizzle
from .scales import ScaleFn
from .scaling import COLUMN, E4M3, SQUARE, VECTOR, Scaling

Operand = Tensor | Quantized
"""An input of a GEMM, in high precision or quantized."""


def quantize(
    x: Operand,
    scaling: Scaling,
    offs: Tensor | None = None,
    *,
    row: bool = True,
    col: bool = True,
) -> Quantized:
    """x quantized to the format `scaling`, as a value that a Sequential takes.   (..., K) -> Quantized over R rows

    Its gradient goes to x unchanged, in high precision.
    offs: (E,) int32 cumulative row ends of groups; no block of a column, and no scale of a group, spans two of them.
    row, col: the layouts to make. The forward and the input gradient read rows, a weight gradient reads columns; rows
    are enough in a format whose columns follow from them (`columns_follow`).
    With a block of several rows x is a weight, (N, K) or (E, N, K), and its columns are those of its transpose.
    Raises FuseOpsError for an x without floating-point rows, a `scaling` that is no `Scaling` (a recipe has one for
    each role), groups of a weight, and if neither layout is wanted; ShapeError for `offs` that are not int32 (E,) and,
    on the CPU, for ends that fall or lie beyond the rows.
    """
    if not isinstance(scaling, Scaling):
        raise FuseOpsError(
            f"fo.quantize: scaling is {shown(scaling)}, expected a Scaling, such as recipe.roles().input."
        )
    if not isinstance(x, Tensor | Quantized):
        raise FuseOpsError(f"fo.quantize: x is of type {type(x).__name__}, expected a tensor.")
    if isinstance(x, Tensor) and (not x.is_floating_point() or x.itemsize < 2 or x.dim() == 0):
        raise FuseOpsError(
            f"fo.quantize: x is {x.dtype} of shape {tuple(x.shape)}, expected floating-point rows (..., K)."
        )
    _check_groups(x, scaling, offs)
    if not isinstance(row, bool) or not isinstance(col, bool):
        raise FuseOpsError(
            f"fo.quantize: row is {shown(row)} and col {shown(col)}, expected bools."
        )
    if not (row or col):
        raise FuseOpsError("fo.quantize: neither rows nor columns are asked for.")
    source = x.carrier if isinstance(x, Quantized) else x
    with torch.no_grad():
        x = x.detach()
        if scaling.is_square:
            q = weight_operand(x, scaling, row=row, col=col)
        else:
            q = unswizzle(operand(x, scaling, offs, row=row, col=col))
    return q if source is None else replace(q, carrier=carrier_of(source))


def _check_groups(x: Operand, scaling: Scaling, offs: Tensor | None) -> None:
    """Raise an error for what are no ends of groups of the rows of x."""
    if offs is None:
        return
    if not isinstance(offs, Tensor):
        raise FuseOpsError(f"fo.quantize: offs is {shown(offs)}, expected a tensor or None.")
    if scaling.is_square:
        raise FuseOpsError(
            f"fo.quantize: {scaling} is a format of weights, and offs are ends of rows of tokens: leave offs out, or "
            "take the format of inputs, recipe.roles().input."
        )
    check_offs(offs, x.device if isinstance(x, Tensor) else offs.device)
    if type(offs) in PLAIN and offs.device.type == "cpu" and not torch.compiler.is_compiling():
        check_ends(offs, math.prod(x.shape[:-1]))


def columns_follow(scaling: Scaling) -> bool:
    """Whether columns are made from the codes of rows: shifted to one exponent a square, or under the same scale."""
    if not isinstance(scaling, Scaling):
        _check_scaling("columns_follow", scaling)
    return scaling.colwise is None and (scaling.block is None or scaling.columns == SQUARE)


_OPERAND, _TENSOR = (
    (Tensor, Quantized),
    (Tensor, NoneType),
)  # `operand` runs in every step: tuples are made once


def _check_scaling(caller: str, scaling: object) -> None:
    expected = "a Scaling, such as recipe.roles().input"
    instance_of(scaling, Scaling, f"recipes.{caller}(scaling=...)", expected)


def _check_operand(
    caller: str,
    source: Mapping[str, object],
    scaling: object,
    row: object,
    col: object,
    scale_fn: object,
    tensors: Mapping[str, object] = {},
) -> None:
    """Raise FuseOpsError for the argument of `operand` or `weight_operand` that is of another type."""
    for name, given in source.items():
        expected = "rows (..., K)" if name == "x" else "matrices (N, K) or (E, N, K)"
        what = f"recipes.{caller}({name}=...)"
        instance_of(given, _OPERAND, what, f"{expected}, a tensor or a Quantized")
        if isinstance(given, Tensor) and given.dim() < (1 if name == "x" else 2):
            raise FuseOpsError(f"{what} expects {expected}, got shape {tuple(given.shape)}.")
    _check_scaling(caller, scaling)
    for name, given in (("row", row), ("col", col)):
        instance_of(given, bool, f"recipes.{caller}({name}=...)", "True or False")
    expected = "a function of the amax, or None"
    instance_of(scale_fn, (Callable, NoneType), f"recipes.{caller}(scale_fn=...)", expected)
    for name, given in tensors.items():
        instance_of(given, _TENSOR, f"recipes.{caller}({name}=...)", "a tensor or None")
    if tensors.get("index") is not None and tensors.get("offs") is None:
        raise FuseOpsError(
            f"recipes.{caller}(index=...) expects offs too, the ends of the groups that its rows are of, got None."
        )


# --- rows of tokens


def operand(
    x: Operand,
    scaling: Scaling,
    offs: Tensor | None = None,
    *,
    row: bool = True,
    col: bool = False,
    index: Tensor | None = None,
    seed: Tensor | None = None,
    scale_fn: ScaleFn | None = None,
    inv: Tensor | None = None,
) -> Quantized:
    """x as an operand with these layouts.   (..., K) -> Quantized over (R, K)

    A Quantized keeps its codes; columns may be made from its rows.
    index: row r of the operand is row index[r] of x.
    seed: (1,) int64, for a format with stochastic rounding; drawn by default.
    scale_fn: gives the scale of the tensor or the groups for their amax, as of delayed scaling.
    inv: the inverse scale of the whole rows, if x is a slice of their features: see `inv_scale_of_rows`.
    Raises FuseOpsError for arguments of another type. What the tensors hold is not looked at: `quantize` does.
    """
    rows = x.dim() > 0 if isinstance(x, Tensor) else isinstance(x, Quantized)
    tensors = rows and isinstance(offs, _TENSOR) and (index is None or isinstance(index, Tensor))
    options = isinstance(row, bool) and isinstance(col, bool) and isinstance(seed, _TENSOR)
    scales = (scale_fn is None or callable(scale_fn)) and isinstance(inv, _TENSOR)
    grouped = index is None or offs is not None
    if not (tensors and options and scales and grouped and isinstance(scaling, Scaling)):
        given = {"offs": offs, "index": index, "seed": seed, "inv": inv}
        _check_operand("operand", {"x": x}, scaling, row, col, scale_fn, given)
    if scaling.rounds_at_random and seed is None and isinstance(x, Tensor):
        seed = torch.randint(2**62, (1,), device=x.device)
    q = _operand(x, scaling, offs, row, col, index, seed, scale_fn, inv)
    if QuantizationStats.active and (stats := active_stats()):
        source = stats.original_of(x)
        if source is not None and index is not None:
            source = K.gather_rows(source.reshape(-1, source.shape[-1]), index, offs)  # type: ignore[arg-type]
        stats.record_quantized(q, source)
    return q


def _operand(
    x: Operand,
    scaling: Scaling,
    offs: Tensor | None,
    row: bool,
    col: bool,
    index: Tensor | None,
    seed: Tensor | None,
    scale_fn: ScaleFn | None,
    inv: Tensor | None = None,
) -> Quantized:
    if isinstance(x, Quantized):
        return _from_codes(x, scaling, offs, row, col, index)
    x = x.reshape(-1, x.shape[-1])
    # quantize each token once, however many rows copy it
    if index is not None and columns_follow(scaling) and scaling.block is not None:
        tokens = operand(x, scaling)
        return _from_codes(tokens, scaling, offs, row, col, index)
    if scaling.block is None and scaling.colwise is None:
        if inv is None and (scale_fn is not None or not scaling.has_defaults):
            inv = (scale_fn or partial(_inv_scale, scaling))(K.group_amax(x, offs, index))
        data, codes_t, scale = K.quantize_groups(x, offs, scaling.data, row, col, index, inv)
        columns = Layout(codes_t, scale) if col else None
        return Quantized(Layout(data, scale) if row else None, columns, scaling, offs, x.dtype)
    if index is not None:
        x = K.gather_rows(x, index, offs)  # type: ignore[arg-type]
    if scaling.colwise is not None:
        rowwise = replace(scaling, colwise=None)
        by_row = _operand(x, rowwise, offs, True, False, None, seed, scale_fn)
        by_col = _operand(x, scaling.colwise, offs, False, True, None, seed, scale_fn)
        odd = by_row.odd if row else by_col.odd
        found = by_row.row if row else None, by_col.col if col else None
        return Quantized(*found, scaling, offs, x.dtype, odd=odd)
    if scaling.block is not None and not (scaling.family.has_gemm and scaling.has_defaults):
        return _quantize_blocks(x, scaling, offs, row, col, seed)
    rows, columns = _quantize_vectors(x, scaling, offs, row, col)
    return Quantized(rows, columns, scaling, offs, x.dtype)


Layouts = tuple[Layout | None, Layout | None]


def _quantize_vectors(
    x: Tensor, scaling: Scaling, offs: Tensor | None, row: bool, col: bool
) -> Layouts:
    if col and scaling.columns == SQUARE:
        parts = K.quantize_operand(x, offs, scaling.data, row)
        return Layout(*parts[:2]) if row else None, Layout(*parts[2:])
    rows: Layout | None = None
    columns: Layout | None = None
    if row:
        data, scale = K.quantize_vectors(x, scaling.data)
        rows = Layout(data, scale)
    if col:  # from high precision, not from rows
        ends = offs
        if ends is None:
            ends, _ = K.one_group(x.shape[0], x)
        columns = Layout(*K.quantize_group_blocks(x, ends, scaling.data))
    return rows, columns


def inv_scale_of_rows(x: Tensor, scaling: Scaling, offs: Tensor, index: Tensor) -> Tensor | None:
    """The inverse scales of groups of rows of x by index, for slices of their features; None with blocks.   -> (E,)"""
    return None if scaling.block is not None else _inv_scale(scaling, K.group_amax(x, offs, index))


def _quantize_blocks(
    x: Tensor,
    scaling: Scaling,
    offs: Tensor | None,
    row: bool,
    col: bool,
    seed: Tensor | None,
) -> Quantized:
    """Both layouts in blocks, with global scales where the format has them. Columns use other random numbers."""
    rows, columns = None, None
    from_rows, hadamard = col and columns_follow(scaling), scaling.hadamard
    seed = seed if scaling.stochastic else None
    small = scaling.is_micro and not scaling.stochastic  # a kernel writes it, unless transformed
    needs_amax = row or from_rows or (small and not hadamard)
    amax = _amax_of_groups(x, scaling, offs, 1) if needs_amax else None
    if small and row:
        rows = _quantize_micro(x, scaling, "row", offs, amax)
    elif row or from_rows:
        rows = _quantize_last(x, scaling, _broadcast_amax(amax, offs, 1, len(x), scaling), seed)
    if from_rows:
        parts = K.permute_operand(*cast("Layout", rows)[:2], None, offs, False, True)
        columns = Layout(*parts[2:])
    elif col and small and not hadamard:
        columns = _quantize_micro(x, scaling, "col", offs, amax)
    elif col:
        columns = _quantize_columns(x, scaling, offs, seed)
    odd = ("row",) if x.shape[-1] % scaling.codes_per_byte else ()
    return Quantized(rows if row else None, columns, scaling, offs, x.dtype, odd=odd)


def _quantize_micro(
    x: Tensor, scaling: Scaling, layout: str, offs: Tensor | None, amax: Tensor | None
) -> Layout:
    """One layout in micro blocks, rounded to nearest. Rows without global scales do not depend on the groups."""
    swizzle = K.multiplies(x)
    ends = offs if layout == "col" or amax is not None or swizzle else None
    codes, scale = K.quantize_micro(x, scaling.data, layout, ends, amax, swizzle)
    whole = None if amax is None else 1 / K.whole_inverse(amax)
    return Layout(codes, scale.view(scaling.scale), whole)


def _quantize_columns(
    x: Tensor, scaling: Scaling, offs: Tensor | None, seed: Tensor | None
) -> Layout:
    """The columns, transposed and Hadamard-transformed for one chunk of features at a time."""
    ends = None if offs is None else K.column_offs(offs)
    if offs is None and scaling.family.has_gemm:  # padded as one group, as kernels do
        offs, _ = K.one_group(len(x), x)

    def to_columns(features: Tensor) -> Tensor:
        columns = K.transpose_in_groups(features.t(), offs)
        return K.random_hadamard(columns) if scaling.hadamard else columns

    rows, transform = x.t(), cast("RowTransform | None", to_columns)
    if len(K.pieces(rows)) == 1:  # else each pass transposes again
        rows, transform = to_columns(rows), None
    amax = _amax_of_groups(rows, scaling, ends, 0, transform)
    tokens = padded_columns(len(x), K.num_groups(offs))
    whole = _broadcast_amax(amax, ends, 0, tokens, scaling)
    return _quantize_last(rows, scaling, whole, None if seed is None else seed + 1, transform)


def _inv_scale(scaling: Scaling, amax: Tensor) -> Tensor:
    """The factor that brings a tensor, or groups, of this amax into the range of the format."""
    amax = amax.clamp(min=scaling.epsilon) if scaling.epsilon else amax
    return K.inverse_scale(amax, scaling.data, bool(scaling.powers))


def _amax_of_groups(
    x: Tensor,
    scaling: Scaling,
    ends: Tensor | None,
    axis: int,
    transform: RowTransform | None = None,
) -> Tensor | None:
    """The amax of the tensor, or of each group, for a format with a global scale.   axis: of features"""
    if scaling.scale is not E4M3:
        return None
    return K.amax_of_groups(K.amax_of_tokens(x, axis, transform), ends)


# the amax of a tensor or of groups, broadcastable with the blocks, and as it is
BroadcastAmax = tuple[Tensor, Tensor]


def _broadcast_amax(
    amax: Tensor | None, ends: Tensor | None, axis: int, tokens: int, scaling: Scaling
) -> BroadcastAmax | None:
    """An amax of the tensor, or of groups over this many tokens, in both forms.   axis: of features"""
    if amax is None:
        return None
    spread = K.spread_over_groups(amax, ends, tokens)
    return K.whole_of_blocks(spread, scaling.code_block[1], not axis), amax


def _quantize_last(
    x: Tensor,
    scaling: Scaling,
    whole: BroadcastAmax | None = None,
    seed: Tensor | None = None,
    transform: RowTransform | None = None,
) -> Layout:
    """Matrices in blocks along their last axis, by plain torch.   transform: as in `K.quantize_format`"""
    spread, amax = (None, None) if whole is None else whole
    form = K.Format(
        scaling.data, scaling.scale, scaling.code_block, bool(scaling.powers), scaling.epsilon
    )
    codes, scale = K.quantize_format(x, form, spread, seed, transform)
    if scaling.family.has_gemm and not scaling.is_square:  # as kernels read them
        scale = scale.mT.contiguous()
    return Layout(codes, scale, None if amax is None else 1 / K.whole_inverse(amax))


def _from_codes(
    x: Quantized,
    scaling: Scaling,
    offs: Tensor | None,
    row: bool,
    col: bool,
    index: Tensor | None,
) -> Quantized:
    """An operand from one that is quantized: layouts that fit stay, columns are made from rows."""
    may_be_swizzled = x.scaling.gemm_kind is None or x.scaling.colwise is not None
    if may_be_swizzled and (index is not None or (offs is None) != (x.offs is None)):
        x = unswizzle(x)
    check_codes(x, scaling, offs, row, col, index is not None)
    if index is None and (col or _has_group_scale(x)):
        x = _check_split(x, offs)
    as_given = index is None and (not col or columns_match(x, scaling, offs))
    if as_given and (scaling.block is not None or scaling.colwise is not None):
        return x.only(row, col)
    if scaling.block is None:
        return _from_tensor_scaled_codes(x, scaling, offs, row, col, index)
    if not scaling.family.has_gemm:  # check_codes lets only rows through
        gathered = _gather_codes(x, cast("Tensor", index), offs)
        return Quantized(gathered, None, scaling, offs, x.dtype, odd=x.odd)
    codes = cast("Layout", x.row)[:2]
    parts = K.permute_operand(*codes, index, offs, row and index is not None, col)
    rows = x.row if index is None else Layout(*parts[:2])
    columns = Layout(*parts[2:]) if col else None
    return Quantized(rows if row else None, columns, scaling, offs, x.dtype)


def _from_tensor_scaled_codes(
    x: Quantized, scaling: Scaling, offs: Tensor | None, row: bool, col: bool, index: Tensor | None
) -> Quantized:
    """`_from_codes` for a format with one scale a tensor or a group, which both layouts share."""
    scale = cast("Layout", x.row or x.col).scale
    if offs is not None and scale.dim() == 0:
        scale = scale.expand(len(offs)).contiguous()
    rows = None if x.row is None else x.row.data
    if rows is not None and index is not None:
        rows = _gather_codes(x, index, offs).data
    columns = (
        x.col.data
        if x.col is not None and index is None and columns_match(x, scaling, offs)
        else None
    )
    if col and columns is None:
        columns = K.columns_in_groups(rows, offs)  # type: ignore[arg-type]
    return Quantized(
        Layout(rows, scale) if row else None,  # type: ignore[arg-type]
        Layout(columns, scale) if col else None,  # type: ignore[arg-type]
        scaling,
        offs,
        x.dtype,
    )


def _gather_codes(x: Quantized, index: Tensor, offs: Tensor | None) -> Layout:
    """The codes of rows by index, with their block scales; padding is zero."""
    ends = offs if offs is not None else index.new_full((1,), len(index), dtype=torch.int32)
    data, scale, whole = cast("Layout", x.row)
    codes = K.gather_rows.twin(data.view(torch.uint8), index, ends).view(data.dtype)
    if x.scaling.block is None:
        return Layout(codes, scale)
    axis, _ = token_axis(x.scaling, "row")
    by_row = scale.transpose(0, axis)
    raw = by_row.view(torch.uint8) if scale.itemsize == 1 else by_row
    gathered_scale = K.gather_rows.twin(raw, index, ends).view(scale.dtype)
    return Layout(codes, gathered_scale.transpose(0, axis).contiguous(), whole)


def columns_match(x: Quantized, scaling: Scaling, offs: Tensor | None) -> bool:
    """Whether x has the columns that a weight gradient over these groups reads."""
    if x.col is None or x.scaling.columns != scaling.columns:
        return False
    return (x.offs is None) == (offs is None) and (offs is None or len(offs) == len(x.offs))  # type: ignore[arg-type]


def _has_group_scale(x: Quantized) -> bool:
    """Whether a scale spans a whole tensor, or a whole group."""
    return x.scaling.block is None or x.scaling.scale is E4M3


def _check_split(x: Quantized, offs: Tensor | None) -> Quantized:
    """x, checked to have been quantized over groups with these ends.

    Raises FuseOpsError for other ends on the CPU; on a GPU, which is not waited for, the scales become NaN.
    """
    own_offs = x.offs
    if own_offs is None or offs is None or own_offs is offs or is_fake(offs):
        return x
    if len(own_offs) != len(offs):
        return x
    if own_offs.device.type == "meta" or own_offs.data_ptr() == offs.data_ptr():
        return x
    same = (own_offs == offs).all()
    if not same.is_cuda:
        if not same:
            raise FuseOpsError(
                f"an operand arrived as {x}, which end at {own_offs.tolist()}; those of this GEMM end at "
                f"{offs.tolist()}: quantize it with the same offs (fo.quantize)."
            )
        return x
    row = x.row if x.row is None or not _has_group_scale(x) else _nan_unless(same, x.row)
    return replace(x, row=row, col=None if x.col is None else _nan_unless(same, x.col))


def _nan_unless(condition: Tensor, layout: Layout) -> Layout:
    """The layout with all scales NaN unless a condition on the device holds."""
    raw = layout.scale.view(torch.uint8 if layout.scale.itemsize == 1 else torch.int32)
    nan = torch.full_like(raw, 255 if raw.dtype is torch.uint8 else -1)
    return layout._replace(scale=torch.where(condition, raw, nan).view(layout.scale.dtype))


def check_codes(
    x: Quantized, scaling: Scaling, offs: Tensor | None, row: bool, col: bool, by_index: bool
) -> None:
    """Raise FuseOpsError unless x has these layouts in this format over these groups, or they follow from its rows.

    by_index: the operand gathers rows of x.
    """
    alike = x.scaling is scaling or x.scaling.matches(scaling)
    by_group = x.offs is not None and _has_group_scale(x)
    alone = by_group and (by_index or offs is None)
    missing = row and x.row is None
    if by_group and offs is not None:
        missing = missing or len(offs) != len(x.offs)  # type: ignore[arg-type]
    if col and (by_index or not columns_match(x, scaling, offs)):
        missing = missing or x.row is None or not columns_follow(scaling)
    if alike and not (alone or missing):
        return
    wanted = [name for name, asked in (("row", row), ("col", col)) if asked]
    groups = "" if offs is None else f" of {len(offs)} groups"
    given = (
        f"an operand arrived as {x}; this GEMM reads {scaling} by {' and '.join(wanted)}{groups}"
    )
    if alike and col and x.scaling.columns != scaling.columns:
        given += f" in blocks of {scaling.columns}, not {x.scaling.columns}"
    if not alike:
        raise FuseOpsError(f"{given}: quantize it in that format.")
    if alone:
        how = "and its rows by index" if by_index else "without groups"
        raise FuseOpsError(f"{given}, {how}: quantize the tokens without groups.")
    raise FuseOpsError(
        f"{given}, which does not follow from it: quantize both layouts where the values are, with the same offs "
        "(fo.quantize)" + (", and after they are permuted." if by_index else ".")
    )


# --- weights


def weight_operand(
    weight: Operand, scaling: Scaling, *, row: bool, col: bool, scale_fn: ScaleFn | None = None
) -> Quantized:
    """A quantized weight (N, K) or (E, N, K): `row`, which the forward reads, and `col`, its transpose, for dx.

    scale_fn: as in `operand`.
    Raises FuseOpsError for arguments of another type.
    """
    matrices = weight.dim() > 1 if isinstance(weight, Tensor) else isinstance(weight, Quantized)
    options = isinstance(row, bool) and isinstance(col, bool)
    scales = scale_fn is None or callable(scale_fn)
    if not (matrices and isinstance(scaling, Scaling) and options and scales):
        _check_operand("weight_operand", {"weight": weight}, scaling, row, col, scale_fn)
    if isinstance(weight, Quantized):
        return replace(weight, row=weight.row if row else None, col=weight.col if col else None)
    if scaling.block == VECTOR or scaling.colwise is not None:
        scaling = _of_weight(scaling)
    rows, columns = _quantize_weight(
        weight, scaling, row, col and scaling.colwise is None, scale_fn
    )
    if col and scaling.colwise is not None:
        _, columns = _quantize_weight(weight, scaling.colwise, False, True, scale_fn)
    odd = layouts_with_odd_width(weight, scaling)
    q = Quantized(rows, columns, scaling, None, weight.dtype, odd=odd)
    if QuantizationStats.active and (stats := active_stats()):
        stats.record_quantized(q, weight)
    return q


@cache
def _of_weight(scaling: Scaling) -> Scaling:
    """The format that a weight has for this one: vectors in both directions share no codes."""
    if scaling.colwise is not None:
        return replace(scaling, colwise=_of_weight(scaling.colwise))
    shared = scaling.block == VECTOR and scaling.columns == SQUARE
    return replace(scaling, columns=COLUMN) if shared else scaling


def layouts_with_odd_width(weight: Tensor, scaling: Scaling) -> tuple[str, ...]:
    """`Quantized.odd` of a weight (..., N, K)."""
    if scaling.family.has_gemm and scaling.colwise is None:  # one code a byte
        return ()
    n, k = weight.shape[-2:]
    widths = (("row", k), ("col", n))
    return tuple([name for name, width in widths if width % scaling.of(name).codes_per_byte])


def _quantize_weight(
    weight: Tensor, scaling: Scaling, row: bool, col: bool, scale_fn: ScaleFn | None
) -> Layouts:
    """The layouts of a weight (N, K) or (E, N, K), without those of `colwise`."""
    if scaling.colwise is not None:
        scaling = replace(scaling, colwise=None)
    if scaling.block is None:
        inv = None
        if scale_fn is not None or not scaling.has_defaults:
            inv = (scale_fn or partial(_inv_scale, scaling))(K.matrix_amax(weight))
        data, codes_t, scale = K.quantize_matrices(weight, scaling.data, row, col, inv)
        return Layout(data, scale) if row else None, Layout(codes_t, scale) if col else None
    if scaling.family.has_gemm and scaling.has_defaults and scaling.block != VECTOR:
        parts = K.quantize_weight(weight, scaling.data, row, col)
        return Layout(*parts[:2]) if row else None, Layout(*parts[2:]) if col else None
    rows, columns = _quantize_matrices(weight.reshape(-1, *weight.shape[-2:]), scaling, row, col)
    if weight.dim() == 2:
        rows, columns = (
            t and Layout(*[part if part is None else part[0] for part in t])  # type: ignore[arg-type]
            for t in (rows, columns)
        )
    return rows, columns


def _quantize_matrices(matrices: Tensor, scaling: Scaling, row: bool, col: bool) -> Layouts:
    """The layouts of matrices (E, N, K) in blocks, by plain torch."""
    whole = None
    if scaling.scale is E4M3:
        amax = K.amax_of_matrices(matrices)
        whole = amax[:, None, None], amax
    both = (matrices, row), (matrices.mT, col)
    rows, columns = (_quantize_last(t, scaling, whole) if wanted else None for t, wanted in both)
    return rows, columns
