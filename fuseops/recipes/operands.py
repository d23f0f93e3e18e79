"""From tensors to operands of GEMMs in the format of a `Scaling`."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from fuseops import kernels as K
from fuseops.errors import FuseOpsError

from .numbers import watching
from .quantized import Layout, Quantized
from .scaling import SQUARE, Scaling

Operand = Tensor | Quantized
"""What a GEMM reads: a tensor, or one that is quantized already."""
"""What a GEMM reads: a tensor, or one that is quantized already."""


def quantize(x: Operand, scaling: Scaling, offs: Tensor | None = None) -> Quantized:
    """x in the format of `scaling`, in both layouts.   (..., K) -> Quantized over (R, K)

    offs: (E,) int32 cumulative row ends of groups: columns (and scales a group) begin anew in each.
    With a block of several rows x is a weight, (N, K) or (E, N, K), and its columns are those of its transpose.
    Raises FuseOpsError for an x without floating-point values.
    """
    if isinstance(x, Tensor) and not x.is_floating_point():
        raise FuseOpsError(f"fo.quantize: x is {x.dtype}, expected a floating-point tensor.")
    if scaling.square:
        return weight_operand(x, scaling, row=True, col=True)
    return operand(x, scaling, offs, col=True)


# --- of rows


def operand(
    x: Operand,
    scaling: Scaling,
    offs: Tensor | None = None,
    *,
    row: bool = True,
    col: bool = False,
    index: Tensor | None = None,
) -> Quantized:
    """x as the operand of GEMMs that read these layouts.   (..., K) -> Quantized over (R, K)

    index: row r of the operand is row index[r] of x.  A Quantized is used as it is; columns are made from its rows.
    """
    q = _operand(x, scaling, offs, row, col, index)
    if (seen := watching()) is not None:
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
) -> Quantized:
    if isinstance(x, Quantized):
        return _from_codes(x, scaling, offs, row, col, index)
    x = x.reshape(-1, x.shape[-1])
    if index is not None and scaling.columns == SQUARE:  # tokens once, however many rows they are
        tokens = operand(x, scaling)
        return _from_codes(tokens, scaling, offs, row, col, index)
    if index is not None:
        x = K.gather_rows(x, index, offs)  # type: ignore[arg-type]
    make = _by_format if not scaling.family.codes else _by_vector
    make = _by_tensor if scaling.block is None else make
    rows, columns = make(x, scaling, offs, row, col)
    return Quantized(rows, columns, scaling, offs, x.dtype)


Layouts = tuple[Layout | None, Layout | None]


def _by_vector(x: Tensor, scaling: Scaling, offs: Tensor | None, row: bool, col: bool) -> Layouts:
    if col and scaling.columns == SQUARE:
        parts = K.quantize_operand(x, offs, scaling.data, row)
        return Layout(*parts[:2]) if row else None, Layout(*parts[2:])
    rows: Layout | None = None
    columns: Layout | None = None
    if row:
        data, _, scale, _ = K.quantize_blocks(x, scaling.data, 1, "row", True)
        rows = Layout(data, scale)
    if col:  # from high precision, never from rows
        ends = offs
        if ends is None:
            ends = torch.full((1,), x.shape[0], dtype=torch.int32, device=x.device)
        columns = Layout(*K.quantize_group_blocks(x, ends, scaling.data, True))
    return rows, columns


def _by_tensor(x: Tensor, scaling: Scaling, offs: Tensor | None, row: bool, col: bool) -> Layouts:
    """One scale of the tensor's own, or one a group, for both layouts."""
    data, columns, scale = K.quantize_groups(x, offs, scaling.data, row, col)
    return Layout(data, scale) if row else None, Layout(columns, scale) if col else None


def _by_format(x: Tensor, scaling: Scaling, offs: Tensor | None, row: bool, col: bool) -> Layouts:
    """Both layouts from high precision."""
    columns = _by_matrix(K.turned_in_groups(x, offs), scaling, True) if col else None
    return _by_matrix(x, scaling, row), columns


def _by_matrix(x: Tensor, scaling: Scaling, wanted: bool) -> Layout | None:
    """Matrices in blocks along their last axis."""
    if not wanted:
        return None
    return Layout(*K.quantize_format(x, scaling.data, scaling.scale, scaling.grain))


def _from_codes(
    x: Quantized,
    scaling: Scaling,
    offs: Tensor | None,
    row: bool,
    col: bool,
    index: Tensor | None,
) -> Quantized:
    """What is quantized already: its layouts as they are, columns by the exponent shift of its rows."""
    if replace(x.scaling, columns=scaling.columns) != scaling:
        raise FuseOpsError(f"an operand arrived as {x.scaling}, and this GEMM reads {scaling}.")
    if index is None and (x.row or not row) and (x.col or not col):
        return replace(x, row=x.row if row else None, col=x.col if col else None)
    if x.row is None or not scaling.family.codes or (col and scaling.columns != SQUARE):
        raise FuseOpsError(
            f"an operand arrived as {x.scaling} without a layout that this GEMM reads: quantize both "
            "where the values are (fo.quantize)."
        )
    parts = K.permute_operand(*x.row, index, offs, row and index is not None, col)
    rows = x.row if index is None else Layout(*parts[:2])
    columns = Layout(*parts[2:]) if col else None
    return Quantized(rows if row else None, columns, scaling, offs, x.dtype)


# --- of a weight


def weight_operand(weight: Operand, scaling: Scaling, *, row: bool, col: bool) -> Quantized:
    """A weight (N, K) or (E, N, K) as `row`, which the forward reads, and its transpose as `col`, for dx."""
    if isinstance(weight, Quantized):
        return weight
    matrices = weight.reshape(-1, *weight.shape[-2:])
    rows, columns = _of_matrices(matrices, scaling, row, col)
    if weight.dim() == 2:
        rows, columns = (t and Layout(*[part[0] for part in t]) for t in (rows, columns))
    q = Quantized(rows, columns, scaling, None, weight.dtype)
    if (seen := watching()) is not None:
        seen.quantized(q, weight)
    return q


def _of_matrices(matrices: Tensor, scaling: Scaling, row: bool, col: bool) -> Layouts:
    """Both layouts of a weight (E, N, K)."""
    if not scaling.family.codes:
        return _by_matrix(matrices, scaling, row), _by_matrix(matrices.mT, scaling, col)
    if scaling.block is None:
        data, turned, scale = K.quantize_matrices(matrices, scaling.data, row, col)
        rows, columns = Layout(data, scale), Layout(turned, scale)
    else:
        parts = K.quantize_weight(matrices, scaling.data, row, col)
        rows, columns = Layout(*parts[:2]), Layout(*parts[2:])
    return rows if row else None, columns if col else None
