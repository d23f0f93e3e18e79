"""Quantization to FP8 with one scale a group of rows, or one a matrix of a weight, from its own amax.

Maths: inv = limit / amax, correctly rounded, 1 for an amax of 0; q = saturate(x * inv) rounded to nearest even; scale =
1 / inv. NaN stays NaN and does not count in amax; infinities become the ends of the range.
Shapes: x (R, N) -> rows (R, N), columns (N, C), scale (E,). With `offs` the columns of each group begin at a multiple
of 128, C = (R//128 + E) * 128, and what belongs to no row is zero; without it C = ceil(R/128) * 128, scale (). Rows of
padding (at or beyond offs[-1]) are not written.  A weight (E, N, K) -> (E, N, K), (E, K, N), scale (E,);
of (N, K) the same without E.
What is not wanted is empty.
Rows by index are read in place, without a copy.
x is read twice, for amax by integer maxima of bits, which do not depend on the order, and for the codes; once where the
inverse scales are given, as for some of the features of a tensor with scales of the whole.
Hardware: sm_89 and later convert; older ones run the twin, as sizes and strides beyond 2^24 do.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fuseops.kernels import tiles
from fuseops.kernels.configs import Config, Space
from fuseops.kernels.groups import BLOCK, num_groups, padded_columns
from fuseops.kernels.launch import device, launch, pdl_overlap
from fuseops.kernels.permute import gather_rows
from fuseops.kernels.quantize import (
    FORMATS,
    check_format,
    fp8_op,
    fp8_rows,
    matrix_shape,
    too_large,
)
from fuseops.kernels.registry import Cases, floats, ints, kernel_op, on_meta, tensor_bytes
from fuseops.kernels.scales import (
    amax_of_groups,
    amax_of_matrices,
    amax_of_tokens,
    codes_of_matrices,
    codes_of_rows,
    columns_in_groups,
    inverse_scale,
)
from fuseops.kernels.tiles import as_rows, cdiv, check_shape, check_spec, pointers

Three = tuple[Tensor, Tensor, Tensor]


def _rows(x: Tensor, index: Tensor | None, offs: Tensor | None) -> Tensor:
    """Rows by index, padding as zeros; all of them without one."""
    if index is None:
        return x
    return x[index] if offs is None else gather_rows.twin(x, index, offs)


def _group_amax(x: Tensor, offs: Tensor | None, index: Tensor | None = None) -> Tensor:
    if index is None:
        return amax_of_groups(amax_of_tokens(x, 1), offs)
    return amax_of_groups(_rows(amax_of_tokens(x, 1)[:, None], index, offs)[:, 0], offs)


def _quantize_groups(
    x: Tensor,
    offs: Tensor | None,
    dtype: torch.dtype,
    row: bool = True,
    col: bool = False,
    index: Tensor | None = None,
    inv_scale: Tensor | None = None,
) -> Three:
    if inv_scale is None:
        inv_scale = inverse_scale(_group_amax(x, offs, index), dtype, False)
    data = codes_of_rows(_rows(x, index, offs), inv_scale, offs, dtype)
    columns = columns_in_groups(data, offs) if col else data.new_empty(0)
    return data if row else data.new_empty(0), columns, 1 / inv_scale


def _quantize_matrices(
    weight: Tensor,
    dtype: torch.dtype,
    row: bool = True,
    col: bool = True,
    inv_scale: Tensor | None = None,
) -> Three:
    if inv_scale is None:
        inv_scale = inverse_scale(amax_of_matrices(weight), dtype, False)
    data = codes_of_matrices(weight, inv_scale, dtype)
    turned = data.mT.contiguous() if col else data.new_empty(0)
    return data if row else data.new_empty(0), turned, 1 / inv_scale


SPAN = 1024


def _tile(warps: int, **more: int) -> Config:
    """Lines of 128 bytes on both sides: 64 columns of two bytes, 128 rows of one."""
    return {"BLOCK_R": BLOCK, "BLOCK_N": 64, "num_warps": warps, **more}


AMAX = Space("group_amax", [_tile(8), _tile(4)])
QUANTIZE = Space("quantize_groups", [_tile(4, maxnreg=128), _tile(8)])


def _group_cases() -> Cases:
    for dtype, fmt in ((torch.bfloat16, 0), (torch.bfloat16, 1), (torch.float32, 0)):
        for offs in (None, ints(64)):
            yield on_meta(8190, 4096, dtype=dtype), offs, FORMATS[fmt], True, True
    x, index = on_meta(8190, 4096), on_meta(65530, dtype=torch.int64)
    for inv_scale in (None, floats(64)):
        yield x, ints(64), FORMATS[1], True, inv_scale is None, index, inv_scale


def _weight_cases() -> Cases:
    for dtype in (torch.bfloat16, torch.float32):
        yield on_meta(8, 1024, 4096, dtype=dtype), FORMATS[0], True, True


def _amax_cases() -> Cases:
    x, offs = on_meta(8190, 4096), ints(64)
    yield x, None
    yield x, offs
    yield x, offs, on_meta(65530, dtype=torch.int64)


def _matrix_cases() -> Cases:
    yield (on_meta(8, 1024, 4096),)


@dataclass(frozen=True)
class _ScaleGroups:
    """`_ScaleGroups` are parts with one scale each: a tensor, groups of its rows, or matrices of a weight.

    size   E, or the rows of a matrix
    count  how many scales there are
    """

    x: Tensor
    form: str
    blocks: int
    rows: int
    size: int
    count: int
    offs: Tensor | None = None
    index: Tensor | None = None

    def operands(self) -> tuple[Tensor, ...]:
        """(x, index, offs) for kernels, with x in place of None."""
        return self.x, *pointers(self.x, self.index, self.offs)

    def sizes(self) -> tuple[int, int, int, int]:
        return self.rows, self.x.shape[1], self.size, self.x.stride(0)

    def constants(self) -> dict[str, Any]:
        wide = tiles.pow2(self.count, least=32)
        has = {"FORM": self.form, "INDEX": self.index is not None, "BLOCK_E": wide}
        return has | pdl_overlap(self.x.device)


def _of_matrices(weight: Tensor) -> _ScaleGroups | None:
    """None for what the twin has to do."""
    *lead, n, k = matrix_shape(weight)
    count = math.prod(lead)
    x = as_rows(weight.reshape(count * n, k)).contiguous()
    if not x.numel() or max(n, k) >= 1 << 24 or n % 16:
        return None
    return _ScaleGroups(x, "matrices", count * cdiv(n, BLOCK), count * n, n, count)


def _of_tensor(x: Tensor, offs: Tensor | None, index: Tensor | None) -> _ScaleGroups | None:
    """None for what the twin has to do."""
    x = as_rows(x)
    rows = x.shape[0] if index is None else index.shape[0]
    if not x.numel() or not rows or too_large(x) or rows >= 1 << 24:
        return None
    groups = num_groups(offs)
    blocks = padded_columns(rows, groups) // BLOCK
    if offs is None:
        return _ScaleGroups(x, "one", blocks, rows, 0, 1, None, index)
    return _ScaleGroups(x, "groups", blocks, rows, groups, groups, offs, index)


def _amax(of: _ScaleGroups, shape: Sequence[int]) -> Tensor:
    """The amax of each part, in this shape."""
    amax = of.x.new_zeros(shape, dtype=torch.float32)
    launch(
        device("amax").group_amax_kernel, (of.blocks, cdiv(of.x.shape[1], SPAN)), *of.operands(), amax, *of.sizes(),
        SPAN=SPAN, **of.constants(), **AMAX.pick(of.rows, (of.x.shape[1],), of.x),
    )  # fmt: skip
    return amax


def _codes(
    of: _ScaleGroups,
    out: Three,
    row: bool,
    col: bool,
    inv_scale: Tensor | None,
    align: int = BLOCK,
) -> Three:
    """Launch the kernel that writes codes and scales to `out`."""
    n, scale = of.x.shape[1], out[2]
    if inv_scale is not None:
        axes = "(E,)" if scale.dim() else "()"
        check_spec({"inv_scale": inv_scale}, f"inv_scale {axes} float32", E=scale.numel())
    amax_or_inv = _amax(of, scale.shape) if inv_scale is None else inv_scale.contiguous()
    config = QUANTIZE.pick(of.rows, (n,), of.x)
    launch(
        device("amax").quantize_groups_kernel, (of.blocks * cdiv(n, config["BLOCK_N"]),),
        *of.operands(), amax_or_inv, *out, *of.sizes(),
        LIMIT=torch.finfo(out[0].dtype).max, HAS_INV_SCALE=inv_scale is not None, ROW=row, COL=col, ALIGN=align,
        **of.constants(), **config,
    )  # fmt: skip
    return out


@kernel_op(twin=_group_amax, cases=_amax_cases)
def group_amax(x: Tensor, offs: Tensor | None, index: Tensor | None = None) -> Tensor:
    """The largest magnitude of x, or of each group of its rows, or of rows index[r].   (R, N) -> () or (E,) float32"""
    check_spec({"x": x}, "x (R, N)")
    of = _of_tensor(x, offs, index)
    if of is None:
        return _group_amax(x, offs, index)
    return _amax(of, () if offs is None else offs.shape)


@kernel_op(twin=amax_of_matrices, cases=_matrix_cases)
def matrix_amax(weight: Tensor) -> Tensor:
    """The largest magnitude of each matrix.   (N, K) or (E, N, K) -> () or (E,) float32"""
    of = _of_matrices(weight)
    return amax_of_matrices(weight) if of is None else _amax(of, weight.shape[:-2])


def _delayed_inverse(
    scales: Tensor,
    amaxes: Tensor,
    amax: Tensor,
    role: int,
    dtype: torch.dtype,
    factor: float,
    record: bool,
) -> Tensor:
    own = inverse_scale(amax, dtype, factor=factor)
    if record:
        amaxes[role].copy_(torch.maximum(amaxes[role], amax.reshape(-1)))
    given = scales[role].view(amax.shape)
    return torch.where(given == 0, own, given)


def _delayed_cases() -> Cases:
    for groups in ((), (64,)):
        state = floats(3, *groups or (1,))
        for record in (True, False):
            yield state, state, floats(*groups), 0, FORMATS[0], 1.0, record


@kernel_op(twin=_delayed_inverse, cases=_delayed_cases, mutates=("amaxes",), announces=False)
def delayed_inverse(
    scales: Tensor,
    amaxes: Tensor,
    amax: Tensor,
    role: int,
    dtype: torch.dtype,
    factor: float,
    record: bool,
) -> Tensor:
    """What an operand is multiplied by before it is rounded, under scales of earlier steps.   () or (E,) float32

    amax: of the operand, or its groups, () or (E,).  scales: (3, E), of which row `role` holds those of this operand; 0
    where there is none yet, and the operand's own is taken, times `factor`.  amaxes: (3, E), raised to amax with
    `record`. All float32.
    """
    groups = amax.numel()
    check_shape("scales", scales, (3, groups))
    check_shape("amaxes", amaxes, (3, groups))
    if not amaxes.is_contiguous():
        return _delayed_inverse(scales, amaxes, amax, role, dtype, factor, record)
    amax = amax.contiguous()
    inv = torch.empty_like(amax)
    launch(
        device("amax").delayed_inverse_kernel, (1,), amax, *pointers(amax, scales, amaxes), inv, role, groups,
        LIMIT=torch.finfo(dtype).max, FACTOR=factor, RECORD=record, BLOCK_E=tiles.pow2(groups, least=32),
        **pdl_overlap(amax.device), num_warps=1,
    )  # fmt: skip
    return inv


def _bytes(x: Tensor, count: int, row: bool, col: bool, inv_scale: Tensor | None) -> int:
    """The bytes of quantizing to `count` codes a layout; without `inv_scale` x is read for its amax too."""
    return (1 + (inv_scale is None)) * tensor_bytes(x) + count * (row + col)


def _group_bytes(
    x: Tensor,
    offs: Tensor | None,
    dtype: torch.dtype,
    row: bool = True,
    col: bool = False,
    index: Tensor | None = None,
    inv_scale: Tensor | None = None,
) -> int:
    return _bytes(x, x.numel() if index is None else len(index) * x.shape[1], row, col, inv_scale)


@fp8_op(twin=_quantize_groups, cases=_group_cases, nbytes=_group_bytes)
def quantize_groups(
    x: Tensor,
    offs: Tensor | None,
    dtype: torch.dtype,
    row: bool = True,
    col: bool = False,
    index: Tensor | None = None,
    inv_scale: Tensor | None = None,
) -> Three:
    """(rows, columns, scale) of x, or of its rows index[r], one scale a group, or one for all.

    inv_scale: (E,), or (), float32, what the numbers of a group are multiplied by; found from its amax if not given.
    """
    of = _of_tensor(fp8_rows(x, dtype), offs, index)
    if of is None:
        return _quantize_groups(x, offs, dtype, row, col, index, inv_scale)
    n = x.shape[1]
    out = (
        x.new_empty((of.rows, n) if row else 0, dtype=dtype),
        x.new_empty((n, of.blocks * BLOCK) if col else 0, dtype=dtype),
        x.new_empty(() if offs is None else len(offs), dtype=torch.float32),
    )
    return _codes(of, out, row, col, inv_scale)


@fp8_op(
    twin=_quantize_matrices,
    cases=_weight_cases,
    nbytes=lambda weight, dtype, row=True, col=True, inv_scale=None: _bytes(
        weight, weight.numel(), row, col, inv_scale
    ),
)
def quantize_matrices(
    weight: Tensor,
    dtype: torch.dtype,
    row: bool = True,
    col: bool = True,
    inv_scale: Tensor | None = None,
) -> Three:
    """(codes, codes transposed, scale) with one scale a matrix.   (N, K) or (E, N, K)

    inv_scale: (E,), or (), float32, what the numbers of a matrix are multiplied by; found from its amax if not given.
    """
    *lead, n, k = matrix_shape(weight)
    check_format(dtype)
    of = _of_matrices(weight)
    if of is None:
        return _quantize_matrices(weight, dtype, row, col, inv_scale)
    out = (
        of.x.new_empty((*lead, n, k) if row else 0, dtype=dtype),
        of.x.new_empty((*lead, k, n) if col else 0, dtype=dtype),
        of.x.new_empty(lead, dtype=torch.float32),
    )
    return _codes(of, out, row, col, inv_scale, 16)
