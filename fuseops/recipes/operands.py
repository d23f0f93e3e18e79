"""Tensors become operands of GEMMs in the format of a `Scaling`."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import cast

import torch
from torch import Tensor

from fuseops import kernels as K
from fuseops.errors import FuseOpsError
from fuseops.kernels.groups import padded_columns
from fuseops.kernels.scales import RowTransform
from fuseops.torch_private import is_fake

from .carrier import carrier_of
from .numbers import Measuring, watching
from .quantized import Layout, Quantized, in_order, layout_of, tokens_of
from .scales import See
from .scaling import COLUMN, E4M3, SQUARE, VECTOR, Scaling

Operand = Tensor | Quantized
"""What a GEMM reads: a tensor, or one that is quantized already."""


def quantize(
    x: Operand,
    scaling: Scaling,
    offs: Tensor | None = None,
    *,
    row: bool = True,
    col: bool = True,
) -> Quantized:
    """x in the format of `scaling`: a value that a Sequential takes for x.   (..., K) -> Quantized over R rows

    Its gradient goes to x as it comes, in high precision.
    offs: (E,) int32 cumulative row ends of groups: columns (and scales a group) begin anew in each.
    row, col: which layouts are made. Rows are what forward and input gradient read, columns what a weight gradient
    does; where its columns follow from rows (`columns_follow`), rows are enough.
    With a block of several rows x is a weight, (N, K) or (E, N, K), and its columns are those of its transpose.
    Raises FuseOpsError for an x without rows of floating-point values, for what is no `Scaling` (a recipe is not: it
    has one for each role), and where no layout is asked for.
    """
    if not isinstance(scaling, Scaling):
        raise FuseOpsError(
            f"fo.quantize: scaling is {scaling!r:.80}, expected a Scaling, such as recipe.roles().input."
        )
    if not isinstance(x, Tensor | Quantized):
        raise FuseOpsError(f"fo.quantize: x is of type {type(x).__name__}, expected a tensor.")
    if isinstance(x, Tensor) and (not x.is_floating_point() or x.itemsize < 2 or x.dim() == 0):
        raise FuseOpsError(
            f"fo.quantize: x is {x.dtype} of shape {tuple(x.shape)}, expected floating-point rows (..., K)."
        )
    if not isinstance(offs, Tensor | None):
        raise FuseOpsError(f"fo.quantize: offs is {offs!r:.80}, expected a tensor or None.")
    if not isinstance(row, bool) or not isinstance(col, bool):
        raise FuseOpsError(f"fo.quantize: row is {row!r:.80} and col {col!r:.80}, expected bools.")
    if not (row or col):
        raise FuseOpsError("fo.quantize: neither rows nor columns are asked for.")
    source = x.carrier if isinstance(x, Quantized) else x
    with torch.no_grad():
        x = x.detach()
        if scaling.square:
            q = weight_operand(x, scaling, row=row, col=col)
        else:
            q = in_order(operand(x, scaling, offs, row=row, col=col))
    return q if source is None else replace(q, carrier=carrier_of(source))


def columns_follow(scaling: Scaling) -> bool:
    """Whether columns are made of the codes of rows: shifted to one exponent a square, or with the rows' one scale."""
    return scaling.colwise is None and (scaling.block is None or scaling.columns == SQUARE)


# --- of rows


def operand(
    x: Operand,
    scaling: Scaling,
    offs: Tensor | None = None,
    *,
    row: bool = True,
    col: bool = False,
    index: Tensor | None = None,
    seed: Tensor | None = None,
    see: See | None = None,
    up: Tensor | None = None,
) -> Quantized:
    """x as the operand of GEMMs that read these layouts.   (..., K) -> Quantized over (R, K)

    index: row r of the operand is row index[r] of x.  A Quantized is used as it is; columns are made from its rows.
    seed: (1,) int64, of a format that rounds at random; drawn where it is not given.
    see: what gives the one scale of a tensor or of groups for its amax, where that is not its own.
    up: what a tensor or groups that x is some features of are multiplied by, as `up_of_rows` finds it.
    """
    if scaling.rounds_at_random and seed is None and isinstance(x, Tensor):
        seed = torch.randint(2**62, (1,), device=x.device)
    q = _operand(x, scaling, offs, row, col, index, seed, see, up)
    if Measuring.numbers and (seen := watching()):
        source = seen.original(x)
        if source is not None and index is not None:
            source = K.gather_rows(source.reshape(-1, source.shape[-1]), index, offs)  # type: ignore[arg-type]
        seen.quantized(q, source)
    return q


def _operand(
    x: Operand,
    scaling: Scaling,
    offs: Tensor | None,
    row: bool,
    col: bool,
    index: Tensor | None,
    seed: Tensor | None,
    see: See | None,
    up: Tensor | None = None,
) -> Quantized:
    if isinstance(x, Quantized):
        return _from_codes(x, scaling, offs, row, col, index)
    x = x.reshape(-1, x.shape[-1])
    # tokens once, however many rows they are
    if index is not None and columns_follow(scaling) and scaling.block is not None:
        tokens = operand(x, scaling)
        return _from_codes(tokens, scaling, offs, row, col, index)
    if scaling.block is None and scaling.colwise is None:
        if up is None and (see is not None or not scaling.plain):
            up = (see or partial(_up, scaling))(K.group_amax(x, offs, index))
        data, turned, scale = K.quantize_groups(x, offs, scaling.data, row, col, index, up)
        rows, columns = Layout(data, scale) if row else None, Layout(turned, scale) if col else None
        return Quantized(rows, columns, scaling, offs, x.dtype)
    if index is not None:
        x = K.gather_rows(x, index, offs)  # type: ignore[arg-type]
    if scaling.colwise is not None:
        mine = _operand(x, replace(scaling, colwise=None), offs, True, False, None, seed, see)
        other = _operand(x, scaling.colwise, offs, False, True, None, seed, see)
        odd = mine.odd if row else other.odd
        found = mine.row if row else None, other.col if col else None
        return Quantized(*found, scaling, offs, x.dtype, odd=odd)
    if scaling.block is not None and not (scaling.family.codes and scaling.plain):
        return _by_format(x, scaling, offs, row, col, seed)
    rows, columns = _by_vector(x, scaling, offs, row, col)
    return Quantized(rows, columns, scaling, offs, x.dtype)


Layouts = tuple[Layout | None, Layout | None]


def _by_vector(x: Tensor, scaling: Scaling, offs: Tensor | None, row: bool, col: bool) -> Layouts:
    if col and scaling.columns == SQUARE:
        parts = K.quantize_operand(x, offs, scaling.data, row)
        return Layout(*parts[:2]) if row else None, Layout(*parts[2:])
    rows: Layout | None = None
    columns: Layout | None = None
    if row:
        data, scale = K.quantize_vectors(x, scaling.data)
        rows = Layout(data, scale)
    if col:  # from high precision, never from rows
        ends = offs
        if ends is None:
            ends, _ = K.one_group(x.shape[0], x)
        columns = Layout(*K.quantize_group_blocks(x, ends, scaling.data))
    return rows, columns


def up_of_rows(x: Tensor, scaling: Scaling, offs: Tensor, index: Tensor) -> Tensor | None:
    """What groups of rows of x by index are multiplied by, where they have one scale: some features need that of all.
    -> (E,)
    """
    return None if scaling.block is not None else _up(scaling, K.group_amax(x, offs, index))


def _by_format(
    x: Tensor,
    scaling: Scaling,
    offs: Tensor | None,
    row: bool,
    col: bool,
    seed: Tensor | None,
) -> Quantized:
    """Both layouts from high precision. Each has random numbers of its own, and amaxes of the groups."""
    rows, columns = None, None
    shifted, turn = col and columns_follow(scaling), scaling.hadamard
    seed = seed if scaling.stochastic else None
    small = scaling.small and not scaling.stochastic  # what a kernel writes, unless turned
    amax = _amax_of_groups(x, scaling, offs, 1) if row or shifted or (small and not turn) else None
    if small and row:
        rows = _small(x, scaling, "row", offs, amax)
    elif row or shifted:
        rows = _coded(x, scaling, _spread(amax, offs, 1, len(x), scaling), seed)
    if shifted:
        columns = Layout(*K.permute_operand(*cast("Layout", rows), None, offs, False, True)[2:])
    elif col and small and not turn:
        columns = _small(x, scaling, "col", offs, amax)
    elif col:
        columns = _turned(x, scaling, offs, seed)
    odd = ("row",) if x.shape[-1] % scaling.packs else ()
    return Quantized(rows if row else None, columns, scaling, offs, x.dtype, odd=odd)


def _small(
    x: Tensor, scaling: Scaling, layout: str, offs: Tensor | None, amax: Tensor | None
) -> Layout:
    """One layout in small blocks, rounded to nearest: those of rows, without an amax, know of no groups."""
    swizzle = K.multiplies(x)
    ends = offs if layout == "col" or amax is not None or swizzle else None
    codes, scale = K.quantize_micro(x, scaling.data, layout, ends, amax, swizzle)
    whole = None if amax is None else 1 / K.whole_inverse(amax)
    found: Layout = layout_of(codes, scale.view(scaling.scale), whole)
    return found


def _turned(x: Tensor, scaling: Scaling, offs: Tensor | None, seed: Tensor | None) -> Layout:
    """Columns by way of a transpose, of some features at a time, which the Hadamard transform may turn."""
    ends = None if offs is None else K.column_offs(offs)
    if offs is None and scaling.family.codes:  # one group, as kernels lay it
        offs, _ = K.one_group(len(x), x)

    def laid(features: Tensor) -> Tensor:
        columns = K.transpose_in_groups(features.t(), offs)
        return K.random_hadamard(columns) if scaling.hadamard else columns

    rows, transform = x.t(), cast("RowTransform | None", laid)  # once for the amax, and once more
    if len(K.pieces(rows)) == 1:
        rows, transform = laid(rows), None
    amax = _amax_of_groups(rows, scaling, ends, 0, transform)
    tokens = padded_columns(len(x), None if offs is None else len(offs))
    whole = _spread(amax, ends, 0, tokens, scaling)
    return _coded(rows, scaling, whole, None if seed is None else seed + 1, transform)


def _up(scaling: Scaling, amax: Tensor) -> Tensor:
    """What brings a tensor, or groups, of this amax into the range of its format."""
    amax = amax.clamp(min=scaling.epsilon) if scaling.epsilon else amax
    return K.inverse_scale(amax, scaling.data, bool(scaling.powers))


def _amax_of_groups(
    x: Tensor,
    scaling: Scaling,
    ends: Tensor | None,
    axis: int,
    transform: RowTransform | None = None,
) -> Tensor | None:
    """amax of the whole tensor, or of each group of tokens, where scales stand over one.   axis: that of features"""
    if scaling.scale is not E4M3:
        return None
    return K.amax_of_groups(K.amax_of_tokens(x, axis, transform), ends)


# amax of a tensor, or of groups: as blocks broadcast with it, and as it is
Whole = tuple[Tensor, Tensor]


def _spread(
    amax: Tensor | None, ends: Tensor | None, axis: int, tokens: int, scaling: Scaling
) -> Whole | None:
    """An amax of the tensor, or of groups of so many tokens.   axis: that of features"""
    if amax is None:
        return None
    spread = K.spread_over_groups(amax, ends, tokens)
    return K.whole_of_blocks(spread, scaling.grain[1], not axis), amax


def _coded(
    x: Tensor,
    scaling: Scaling,
    whole: Whole | None = None,
    seed: Tensor | None = None,
    transform: RowTransform | None = None,
) -> Layout:
    """Matrices in blocks along their last axis.   lay: as of `K.quantize_format`"""
    spread, amax = (None, None) if whole is None else whole
    form = K.Format(
        scaling.data, scaling.scale, scaling.grain, bool(scaling.powers), scaling.epsilon
    )
    codes, scale = K.quantize_format(x, form, spread, seed, transform)
    if scaling.family.codes and not scaling.square:  # as kernels read them
        scale = scale.mT.contiguous()
    found: Layout = layout_of(codes, scale, None if amax is None else 1 / K.whole_inverse(amax))
    return found


def _from_codes(
    x: Quantized,
    scaling: Scaling,
    offs: Tensor | None,
    row: bool,
    col: bool,
    index: Tensor | None,
) -> Quantized:
    """What is quantized already: its layouts as they are, columns from its rows."""
    small = x.scaling.kernel is None or x.scaling.colwise is not None
    if small and (index is not None or (offs is None) != (x.offs is None)):
        x = in_order(x)
    check_codes(x, scaling, offs, row, col, index is not None)
    if index is None and (col or _one_a_group(x)):
        x = _of_this_split(x, offs)
    as_given = index is None and (not col or columns_fit(x, scaling, offs))
    if as_given and (scaling.block is not None or scaling.colwise is not None):
        return x.only(row, col)
    if scaling.block is None:
        return _by_scale(x, scaling, offs, row, col, index)
    if not scaling.family.codes:  # rows alone, by check_codes
        taken = _rows_at(x, cast("Tensor", index), offs)
        return Quantized(taken, None, scaling, offs, x.dtype, odd=x.odd)
    parts = K.permute_operand(*cast("Layout", x.row), index, offs, row and index is not None, col)
    rows = x.row if index is None else Layout(*parts[:2])
    columns = Layout(*parts[2:]) if col else None
    return Quantized(rows if row else None, columns, scaling, offs, x.dtype)


def _by_scale(
    x: Quantized, scaling: Scaling, offs: Tensor | None, row: bool, col: bool, index: Tensor | None
) -> Quantized:
    """Of one scale a tensor or a group, which all layouts share."""
    _, scale = cast("Layout", x.row or x.col)
    if offs is not None and scale.dim() == 0:
        scale = scale.expand(len(offs)).contiguous()
    rows = None if x.row is None else x.row.data
    if rows is not None and index is not None:
        rows = _rows_at(x, index, offs).data
    columns = (
        x.col.data
        if x.col is not None and index is None and columns_fit(x, scaling, offs)
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


def _rows_at(x: Quantized, index: Tensor, offs: Tensor | None) -> Layout:
    """Rows of codes by index, with their scales where each row has its own; padding is zeros."""
    ends = offs if offs is not None else index.new_full((1,), len(index), dtype=torch.int32)
    layout = cast("Layout", x.row)
    (data, scale), whole = layout[:2], cast("tuple[Tensor, ...]", layout[2:])
    codes = K.gather_rows.twin(data.view(torch.uint8), index, ends).view(data.dtype)
    if x.scaling.block is None:
        return Layout(codes, scale)
    axis, _ = tokens_of(x.scaling, "row")
    by_row = scale.transpose(0, axis)
    raw = by_row.view(torch.uint8) if scale.itemsize == 1 else by_row
    taken = K.gather_rows.twin(raw, index, ends).view(scale.dtype)
    found: Layout = layout_of(codes, taken.transpose(0, axis).contiguous(), *whole)
    return found


def columns_fit(x: Quantized, scaling: Scaling, offs: Tensor | None) -> bool:
    """Whether the columns of x are those that a weight gradient over these groups reads."""
    if x.col is None or x.scaling.columns != scaling.columns:
        return False
    return (x.offs is None) == (offs is None) and (offs is None or len(offs) == len(x.offs))  # type: ignore[arg-type]


def _one_a_group(x: Quantized) -> bool:
    """Whether a scale goes over a whole tensor, or a whole group."""
    return x.scaling.block is None or x.scaling.scale is E4M3


def _of_this_split(x: Quantized, offs: Tensor | None) -> Quantized:
    """x, whose columns, and scales of groups, are those of groups that end where offs says.

    For other groups of as many an error, and on a device, whose numbers nobody waits for, NaN.
    """
    mine = x.offs
    if mine is None or offs is None or mine is offs or len(mine) != len(offs) or is_fake(offs):
        return x
    if mine.device.type == "meta" or mine.data_ptr() == offs.data_ptr():
        return x
    alike = (mine == offs).all()
    if not alike.is_cuda:
        if not alike:
            raise FuseOpsError(
                f"an operand arrived as {x}, which end at {mine.tolist()}; those of this GEMM end at "
                f"{offs.tolist()}: quantize it with the same offs (fo.quantize)."
            )
        return x
    row = x.row if x.row is None or not _one_a_group(x) else _lost_unless(alike, x.row)
    return replace(x, row=row, col=None if x.col is None else _lost_unless(alike, x.col))


def _lost_unless(alike: Tensor, layout: Layout) -> Layout:
    """The same with scales that are NaN unless a number on the device is true: all bits of one."""
    raw = layout.scale.view(torch.uint8 if layout.scale.itemsize == 1 else torch.int32)
    nan = torch.full_like(raw, 255 if raw.dtype is torch.uint8 else -1)
    return layout._replace(scale=torch.where(alike, raw, nan).view(layout.scale.dtype))


def check_codes(
    x: Quantized, scaling: Scaling, offs: Tensor | None, row: bool, col: bool, by_index: bool
) -> None:
    """Raise FuseOpsError unless these layouts of x, in this format and over these groups, can be had.

    by_index: of other rows than those of x, in another order.
    """
    alike = x.scaling is scaling or x.scaling.like(scaling)
    by_group = x.offs is not None and _one_a_group(x)
    alone = by_group and (by_index or offs is None)
    missing = row and x.row is None
    if by_group and offs is not None:
        missing = missing or len(offs) != len(x.offs)  # type: ignore[arg-type]
    if col and (by_index or not columns_fit(x, scaling, offs)):
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


# --- of a weight


def weight_operand(
    weight: Operand, scaling: Scaling, *, row: bool, col: bool, see: See | None = None
) -> Quantized:
    """A weight (N, K) or (E, N, K) as `row`, which the forward reads, and its transpose as `col`, for dx.

    see: as of `operand`.
    """
    if isinstance(weight, Quantized):
        return replace(weight, row=weight.row if row else None, col=weight.col if col else None)
    if scaling.block == VECTOR and scaling.columns == SQUARE and scaling.colwise is None:
        scaling = replace(scaling, columns=COLUMN)  # vectors both ways: squares alone are shared
    rows, columns = _of_weight(weight, scaling, row, col and scaling.colwise is None, see)
    if col and scaling.colwise is not None:
        _, columns = _of_weight(weight, scaling.colwise, False, True, see)
    odd = odd_layouts(weight, scaling)
    q = Quantized(rows, columns, scaling, None, weight.dtype, odd=odd)
    if Measuring.numbers and (seen := watching()):
        seen.quantized(q, weight)
    return q


def odd_layouts(weight: Tensor, scaling: Scaling) -> tuple[str, ...]:
    """`Quantized.odd` of a weight (..., N, K)."""
    if scaling.family.codes and scaling.colwise is None:  # one code a byte
        return ()
    n, k = weight.shape[-2:]
    widths = (("row", k), ("col", n))
    return tuple([name for name, width in widths if width % scaling.of(name).packs])


def _of_weight(weight: Tensor, scaling: Scaling, row: bool, col: bool, see: See | None) -> Layouts:
    """Both layouts of a weight (N, K) or (E, N, K)."""
    if scaling.colwise is not None:
        scaling = replace(scaling, colwise=None)
    if scaling.block is None:
        up = None
        if see is not None or not scaling.plain:
            up = (see or partial(_up, scaling))(K.matrix_amax(weight))
        data, turned, scale = K.quantize_matrices(weight, scaling.data, row, col, up)
        return Layout(data, scale) if row else None, Layout(turned, scale) if col else None
    if scaling.family.codes and scaling.plain and scaling.block != VECTOR:
        parts = K.quantize_weight(weight, scaling.data, row, col)
        return Layout(*parts[:2]) if row else None, Layout(*parts[2:]) if col else None
    rows, columns = _coded_matrices(weight.reshape(-1, *weight.shape[-2:]), scaling, row, col)
    if weight.dim() == 2:
        rows, columns = (t and layout_of(*[part[0] for part in t]) for t in (rows, columns))
    return rows, columns


def _coded_matrices(matrices: Tensor, scaling: Scaling, row: bool, col: bool) -> Layouts:
    """Both layouts of (E, N, K) in blocks, by torch."""
    whole = None
    if scaling.scale is E4M3:
        amax = K.amax_of_matrices(matrices)
        whole = amax[:, None, None], amax
    both = (matrices, row), (matrices.mT, col)
    rows, columns = (_coded(t, scaling, whole) if wanted else None for t, wanted in both)
    return rows, columns
