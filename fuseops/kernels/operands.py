"""FP8 operands of GEMMs in blocks of 128: rows, and columns that are the codes of the rows at one exponent a square.

Maths: a token's 128 features share a power of two, scale = 1 / inv, inv = limit / amax rounded down, at most 2^63;
codes = saturate(x * inv).  The columns of a square of 128 tokens by 128 features take the largest of its tokens' scales
and the codes times scale / largest, rounded where they fall below the format's normal numbers.
Shapes: x (R, K) -> rows (R, K), scales (ceil(K/128), R); columns (K, C), scales (ceil(K/128), C/128). With `offs` the
tokens of each group begin at a multiple of 128, C = (R//128 + E) * 128, and what belongs to no row is zero; without it
C = ceil(R/128) * 128.  What is not wanted is empty. Rows of padding (at or beyond offs[-1]) are not written.
Layout: rows of what is read may be strided. Widths and strides that 16 does not divide run the twin.
Hardware: sm_89 and later convert; older ones run the twin, as sizes and strides beyond 2^24 do.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from fuseops.kernels import fp8_paths, tiles
from fuseops.kernels.activation import act_fwd, scaled_act_bwd, scaled_act_fwd
from fuseops.kernels.bias import row_factors, sum_partials
from fuseops.kernels.configs import Config, Space
from fuseops.kernels.formats import LARGEST, Format, quantize_format
from fuseops.kernels.fp8 import dequantize
from fuseops.kernels.groups import BLOCK, column_of_row, num_groups, padded_columns, padding_mask
from fuseops.kernels.launch import device, launch, pdl_overlap
from fuseops.kernels.quantize import (
    FORMATS,
    fp8_op,
    fp8_rows,
    matrix_shape,
    quantize_vectors,
    too_large,
)
from fuseops.kernels.records import of_fields
from fuseops.kernels.registry import Cases, floats, ints, on_meta, tensor_bytes
from fuseops.kernels.scales import SMALLEST, saturate
from fuseops.kernels.tiles import cdiv, check_shape, pointers, require

RowsAndColumns = tuple[Tensor, Tensor, Tensor, Tensor]


def _quantize_operand(
    x: Tensor, offs: Tensor | None, dtype: torch.dtype, row: bool = True
) -> RowsAndColumns:
    data, scale = quantize_vectors.twin(x, dtype)
    col, col_scale = _columns(data, scale, offs)
    if not row:
        data, scale = data.new_empty(0), scale.new_empty(0)
    return data, scale, col, col_scale


def _permute_operand(
    data: Tensor,
    scale: Tensor,
    index: Tensor | None,
    offs: Tensor | None,
    row: bool = True,
    col: bool = True,
) -> RowsAndColumns:
    if index is not None:
        rows = index.shape[0]
        padding = padding_mask(offs, rows)[:, 0]  # type: ignore[arg-type]
        at = index.long().masked_fill(padding, 0)
        raw = data.view(torch.uint8)[at].masked_fill(padding[:, None], 0)
        data, scale = raw.view(data.dtype), scale[:, at].masked_fill(padding, SMALLEST)
    rows_of = (data.contiguous(), scale.contiguous()) if row else _empty_pair(data, data.dtype)
    return *rows_of, *(_columns(data, scale, offs) if col else _empty_pair(data, data.dtype))


def _columns(data: Tensor, scale: Tensor, offs: Tensor | None) -> tuple[Tensor, Tensor]:
    """(codes, scales) of columns, by shifting exponents of row codes."""
    rows, k = data.shape
    width = padded_columns(rows, num_groups(offs))
    place = column_of_row(offs, rows, data)
    codes = data.new_zeros(width + 1, k, dtype=torch.float32).index_copy(0, place, data.float())
    scales = scale.new_zeros(len(scale), width + 1).index_copy(1, place, scale)[:, :width]
    square = scales.unflatten(1, (width // BLOCK, BLOCK)).amax(2).clamp(min=SMALLEST)
    shift = scales / square.repeat_interleave(BLOCK, 1)
    shifted = codes[:width] * shift.repeat_interleave(BLOCK, 0)[:k].t()
    return saturate(shifted, data.dtype).t().contiguous(), square


def _quantize_weight(
    weight: Tensor, dtype: torch.dtype, row: bool = True, col: bool = True
) -> RowsAndColumns:
    data, scale = quantize_format(weight, Format(dtype, torch.float32, (BLOCK, BLOCK), True))
    turned = (t.mT.clone(memory_format=torch.contiguous_format) for t in (data, scale))
    return (
        *((data, scale) if row else _empty_pair(weight, dtype)),
        *(turned if col else _empty_pair(weight, dtype)),
    )


def _empty_pair(like: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Empty codes and scales, of a layout that is not needed."""
    return like.new_empty(0, dtype=dtype), like.new_empty(0, dtype=torch.float32)


def _values(h: Tensor, scale: Tensor | None) -> Tensor:
    return h if scale is None else dequantize(h, scale, "block", torch.bfloat16)


class HiddenOperand(NamedTuple):
    """A `HiddenOperand` has the arguments of an operand swiglu(h) (* probs).

    h_scale  (ceil(2F/128), R) of an h that is codes, and stands for bfloat16 values
    """

    h: Tensor
    probs: Tensor | None
    offs: Tensor | None
    dtype: torch.dtype
    row: bool = True
    col: bool = False
    h_scale: Tensor | None = None


def _swiglu_operand(p: HiddenOperand) -> RowsAndColumns:
    h, probs, offs, dtype, row, col, h_scale = p
    h = _values(h, h_scale)
    a = act_fwd.twin(h, "swiglu") if probs is None else scaled_act_fwd.twin(h, probs, "swiglu")
    if col:
        return _quantize_operand(a, offs, dtype, row)
    data, scale = quantize_vectors.twin(a, dtype)
    return data, scale, data.new_empty(0), scale.new_empty(0)


class GradientOperands(NamedTuple):
    """`GradientOperands` are the arguments of the operands dh and a, of a = swiglu(h) (* probs).

    h_scale  (2F/128, R) of an h that is codes, and stands for bfloat16 values
    """

    da: Tensor
    h: Tensor
    probs: Tensor | None
    offs: Tensor | None
    dtype: torch.dtype
    a_dtype: torch.dtype
    row: bool = True
    col: bool = True
    act: bool = True
    h_scale: Tensor | None = None


def _dswiglu_operand(
    p: GradientOperands,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    da, h, probs, offs, dtype, a_dtype, row, col, act, h_scale = p
    h = _values(h, h_scale)
    by = torch.ones(h.shape[0], device=h.device) if probs is None else probs
    dh, dprobs, a = scaled_act_bwd.twin(da, h, by, "swiglu", probs is not None, True)
    rows = _quantize_operand(dh, offs, dtype, row) if row or col else None
    first = _empty_pair(h, dtype) if rows is None else rows[:2]
    second = rows[2:] if rows is not None and col else _empty_pair(h, dtype)
    columns = _quantize_operand(a, offs, a_dtype, False)[2:] if act else _empty_pair(h, a_dtype)
    if probs is not None and offs is not None:
        dprobs = dprobs.masked_fill(padding_mask(offs, h.shape[0])[:, 0], 0.0)
    return *first, *second, *columns, dprobs


def _tile(warps: int, rows: int = BLOCK, **more: int) -> Config:
    """A tile with columns is a square; on an H200 the first choice was the faster one. `maxnreg` says how many
    registers are worth having: left alone, ptxas may settle for fewer, and loads wait for each other.
    """
    return {"BLOCK_R": rows, "BLOCK_N": BLOCK, "num_warps": warps, **more}


QUANTIZE = Space("quantize_operand", [_tile(8, maxnreg=128), _tile(16)])
PERMUTE = Space(
    "permute_operand",
    [
        _tile(4, CHUNK=chunk, BESIDE=beside, maxnreg=96)
        for chunk, beside in ((2, 4), (4, 1), (64, 1))
    ],
)
SWIGLU = Space("swiglu_operand", [_tile(8), _tile(16)])
SWIGLU_ROWS = Space("swiglu_operand_rows", [_tile(4, 64), _tile(8, 64)])
SWIGLU_ONCE = Space("swiglu_operand_once", [{"SLICES": 4}, {"SLICES": 2}])
DSWIGLU = Space("dswiglu_operand", [_tile(16)])


def _dswiglu_default(rows: int, dims: tuple[int, ...], itemsize: int) -> Config:
    """Two programs run on a multiprocessor: one works while the other waits."""
    if rows * dims[0] < 1 << 24:
        return {"SPAN": 1, "BESIDE": 2}
    return {"SPAN": 4 if itemsize == 1 else 2, "BESIDE": 8}


DSWIGLU_ONCE = Space(
    "dswiglu_operand_once",
    [{"SPAN": span, "BESIDE": beside} for span in (1, 2, 4, 8) for beside in (2, 8)],
    _dswiglu_default,
)


def _weight_candidates(dims: tuple[int, ...], itemsize: int) -> list[Config]:
    """A square of float32 needs more registers than the 128 that are best for bfloat16."""
    return [_tile(4, maxnreg=128) if itemsize == 2 else _tile(4), _tile(8)]


WEIGHT = Space("quantize_weight", _weight_candidates)

_SIZES = ((torch.bfloat16, 0), (torch.bfloat16, 1), (torch.float32, 0))  # and the format


def _quantize_cases() -> Cases:
    for dtype, fmt in _SIZES:
        for offs in (None, ints(64)):
            yield on_meta(8190, 4096, dtype=dtype), offs, FORMATS[fmt], True


def _permute_cases() -> Cases:
    data, scale = on_meta(8190, 4096, dtype=FORMATS[0]), floats(32, 8190)
    index = ints(65530)
    for by, row, col in ((index, True, True), (index, True, False), (None, False, True)):
        yield data, scale, by, ints(64), row, col


def _swiglu_cases() -> Cases:
    for dtype, fmt in _SIZES:
        h, probs = on_meta(8190, 8192, dtype=dtype), floats(8190)
        yield h, probs, None, FORMATS[fmt], True, False
        yield h, None, ints(64), FORMATS[fmt], True, True
    codes = on_meta(8190, 8192, dtype=FORMATS[0])
    yield codes, probs, None, FORMATS[0], True, False, floats(64, 8190)


def _dswiglu_cases() -> Cases:
    da, h, probs = on_meta(8190, 4096), on_meta(8190, 8192), floats(8190)
    for fmt in FORMATS:
        yield da, h, probs, ints(64), fmt, FORMATS[0]
    yield da, h, None, None, FORMATS[0], FORMATS[0]
    scale, codes = floats(64, 8190), on_meta(8190, 8192, dtype=FORMATS[0])
    yield da, codes, probs, ints(64), FORMATS[0], FORMATS[0], True, True, True, scale


def _weight_cases() -> Cases:
    for dtype, fmt in _SIZES:
        for row in (True, False):
            yield on_meta(8, 1024, 4096, dtype=dtype), FORMATS[fmt], row, True


@fp8_op(twin=_quantize_operand, cases=_quantize_cases)
def quantize_operand(
    x: Tensor, offs: Tensor | None, dtype: torch.dtype, row: bool = True
) -> RowsAndColumns:
    """(rows, their scales, columns, their scales) of x."""
    x = fp8_rows(x, dtype)
    rows, n = x.shape
    if not x.numel() or is_unaligned(n, x):
        return _quantize_operand(x, offs, dtype, row)
    out, blocks = _outputs(x, rows, n, offs, dtype, row, True)
    launch(
        device("operands").quantize_operand_kernel, (blocks * cdiv(n, BLOCK),),
        x, *pointers(x, offs), *out, rows, n, num_groups(offs), x.stride(0),
        SHIFT=LARGEST[dtype], ROW=row, **_by_group(offs), **pdl_overlap(x.device), **QUANTIZE.pick(rows, (n,), x),
    )  # fmt: skip
    return out


@fp8_op(
    twin=_permute_operand,
    cases=_permute_cases,
    nbytes=lambda data, scale, index, offs, row=True, col=True: _permute_bytes(
        data, index, row, col
    ),
)
def permute_operand(
    data: Tensor,
    scale: Tensor,
    index: Tensor | None,
    offs: Tensor | None,
    row: bool = True,
    col: bool = True,
) -> RowsAndColumns:
    """(rows, their scales, columns, their scales) of rows index[r] of an operand: of all, in order, without one."""
    data = fp8_rows(data, data.dtype)
    tokens, n = data.shape
    rows = tokens if index is None else index.shape[0]
    check_shape("scale", scale, (cdiv(n, BLOCK), tokens))
    if not (data.numel() and rows and (row or col)) or is_unaligned(n, data):
        return _permute_operand(data, scale, index, offs, row, col)
    out, blocks = _outputs(data, rows, n, offs, data.dtype, row, col)
    groups = num_groups(offs) or 1
    config = dict(PERMUTE.pick(rows, (n,), data))
    parts, beside = _parts(blocks, groups, config.pop("BESIDE"))
    launch(
        device("operands").permute_operand_kernel, (parts * groups * cdiv(n, BLOCK),),
        data, *pointers(data, scale, index, offs), *out,
        rows, tokens, n, groups, parts, data.stride(0), config.pop("CHUNK"), beside, ROW=row, COL=col,
        INDEX=index is not None, GROUPS=offs is not None, **pdl_overlap(data.device), **config,
    )  # fmt: skip
    return out


@fp8_op(twin=_swiglu_operand, cases=_swiglu_cases)
@of_fields(HiddenOperand)
def swiglu_operand(p: HiddenOperand) -> RowsAndColumns:
    """`quantize_operand` of swiglu(h) (* probs), rounded as h is.   (R, 2F), (R,) -> over (R, F)"""
    h, probs, offs, dtype, row, col, h_scale = p
    h = fp8_rows(h, dtype)
    rows, n = h.shape[0], h.shape[1] // 2
    if not h.numel() or not (row or col) or is_unaligned(n, h) or not _split(h, h_scale):
        return _swiglu_operand(p)
    out, blocks = _outputs(h, rows, n, offs, dtype, row, col)
    if not col and n % BLOCK == 0 and fp8_paths.act_path(h, h, dtype) == "once":
        config = SWIGLU_ONCE.pick(rows, (n,), h)
        launch(
            device("fp8_dswiglu").fp8_swiglu_kernel, (cdiv(rows, 8 * config["SLICES"]) * (n // BLOCK),),
            h, *pointers(h, h_scale, row_factors(probs, h)), *out[:2], rows, n, h.stride(0),
            SCALED=probs is not None, **config, num_warps=4,
        )  # fmt: skip
        return out
    config = (SWIGLU if col else SWIGLU_ROWS).pick(rows, (n,), h)
    if not col:  # rows alone: no group begins a tile of its own
        offs, blocks = None, cdiv(rows, config["BLOCK_R"])
    launch(
        device("fp8_swiglu").swiglu_operand_kernel, (blocks * cdiv(n, BLOCK),),
        h, *pointers(h, h_scale, row_factors(probs, h), offs), *out,
        rows, n, num_groups(offs), h.stride(0), SHIFT=LARGEST[dtype], SCALED=probs is not None, ROW=row, COL=col,
        **_by_group(offs), **pdl_overlap(h.device), **config,
    )  # fmt: skip
    return out


@fp8_op(twin=_dswiglu_operand, cases=_dswiglu_cases)
@of_fields(GradientOperands)
def dswiglu_operand(
    p: GradientOperands,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(`quantize_operand` of dh, columns of a with their scales, dprobs) of a = swiglu(h) (* probs)."""
    da, h, probs, offs, dtype, a_dtype, row, col, act, h_scale = p
    da, h = fp8_rows(da, dtype), fp8_rows(h, a_dtype)
    rows, n = da.shape
    check_shape("h", h, (rows, 2 * n))
    if (
        not h.numel() or n % BLOCK or da.itemsize != 2 or h.itemsize > 2
        or is_unaligned(n, h, da) or not _split(h, h_scale)
    ):  # a square lies in one half  # fmt: skip
        return _dswiglu_operand(p)
    out, blocks = _outputs(h, rows, 2 * n, offs, dtype, row, col)
    (_, _, a, a_scale), _ = _outputs(h, rows, n, offs, a_dtype, False, act)
    partial = h.new_empty(0 if probs is None else (n // BLOCK, rows), dtype=torch.float32)
    operands = da, h, *pointers(h, h_scale, row_factors(probs, h), offs)
    flags = {
        "SCALED": probs is not None,
        "ROW": row,
        "COL": col,
        "ACT": act,
        "GROUPS": offs is not None,
    }
    if fp8_paths.act_path(da, h, dtype, a_dtype) == "once":
        groups, config = num_groups(offs) or 1, DSWIGLU_ONCE.pick(rows, (n,), h)
        parts, beside = _parts(blocks, groups, config["BESIDE"])
        span = config["SPAN"]
        launch(
            device("fp8_dswiglu").fp8_dswiglu_kernel, (parts * groups * cdiv(n // BLOCK, span),),
            *operands, *out, a, a_scale, partial, rows, n, groups, parts, da.stride(0), h.stride(0), span, beside,
            **flags, STAGES=2 if h.itemsize == 2 else 3, num_warps=8, maxnreg=128,  # two programs fit
        )  # fmt: skip
    else:
        launch(
            device("fp8_swiglu").dswiglu_operand_kernel, (blocks * (n // BLOCK) * (2 + act),),
            *operands, *out, a, a_scale, partial, rows, n, num_groups(offs), da.stride(0), h.stride(0),
            SHIFT=LARGEST[dtype], A_SHIFT=LARGEST[a_dtype], BLOCK_E=tiles.pow2(num_groups(offs), least=32), **flags,
            **pdl_overlap(h.device), **DSWIGLU.pick(rows, (n,), h),
        )  # fmt: skip
    return *out, a, a_scale, partial if probs is None else sum_partials(partial, offs=offs)


@fp8_op(
    twin=_quantize_weight,
    cases=_weight_cases,
    nbytes=lambda w, dtype, row=True, col=True: tensor_bytes(w) + w.numel() * (row + col),
)
def quantize_weight(
    weight: Tensor, dtype: torch.dtype, row: bool = True, col: bool = True
) -> RowsAndColumns:
    """(codes, scales, codes transposed, scales) in squares of 128 x 128 of each matrix.   (N, K) or (E, N, K)"""
    *lead, n, k = matrix_shape(weight)
    if not weight.numel() or max(n, k) >= 1 << 24 or n % 16 or k % 16 or not (row or col):
        return _quantize_weight(weight, dtype, row, col)
    weight = weight.contiguous()
    blocks = cdiv(n, BLOCK), cdiv(k, BLOCK)
    data = weight.new_empty((*lead, n, k) if row else 0, dtype=dtype)
    scale = weight.new_empty((*lead, *blocks) if row else 0, dtype=torch.float32)
    transposed = weight.new_empty((*lead, k, n) if col else 0, dtype=dtype)
    transposed_scale = weight.new_empty((*lead, *blocks[::-1]) if col else 0, dtype=torch.float32)
    launch(
        device("operands").quantize_weight_kernel, (math.prod(lead) * blocks[0] * blocks[1],),
        weight, data, scale, transposed, transposed_scale, n, k, SHIFT=LARGEST[dtype], ROW=row, COL=col,
        ALIGN=16, **pdl_overlap(weight.device), **WEIGHT.pick(n, (k,), weight),
    )  # fmt: skip
    return data, scale, transposed, transposed_scale


def _outputs(
    like: Tensor,
    rows: int,
    n: int,
    offs: Tensor | None,
    dtype: torch.dtype,
    row: bool,
    col: bool,
) -> tuple[RowsAndColumns, int]:
    """(rows, scales, columns, scales), and the number of blocks of tokens."""
    blocks = padded_columns(rows, num_groups(offs)) // BLOCK
    features = cdiv(n, BLOCK)
    data = like.new_empty((rows, n) if row else 0, dtype=dtype)
    scale = like.new_empty((features, rows) if row else 0, dtype=torch.float32)
    columns = like.new_empty((n, blocks * BLOCK) if col else 0, dtype=dtype)
    squares = like.new_empty((features, blocks) if col else 0, dtype=torch.float32)
    return (data, scale, columns, squares), blocks


def _parts(blocks: int, groups: int, beside: int) -> tuple[int, int]:
    """(the parts that each group's blocks of tokens are split into, how many neighbours run together)."""
    each = cdiv(blocks, groups)
    beside = min(beside, each)
    return cdiv(each, beside) * beside, beside


def _by_group(offs: Tensor | None) -> dict[str, int | bool]:
    return {"GROUPS": offs is not None, "BLOCK_E": tiles.pow2(num_groups(offs), least=32)}


def _split(h: Tensor, h_scale: Tensor | None) -> bool:
    """Whether no scale of codes h is shared by gate and up columns; True for an h that is not codes."""
    if h_scale is None:
        require(h.itemsize > 1, f"h is {h.dtype} without h_scale.")
        return True
    expected = cdiv(h.shape[1], BLOCK), len(h)
    require(
        h.dtype in FORMATS and h_scale.shape == expected,
        f"h is {h.dtype} and h_scale {tuple(h_scale.shape)}, expected FP8 and {expected}.",
    )
    return h.shape[1] % (2 * BLOCK) == 0


def is_unaligned(n: int, *tensors: Tensor) -> bool:
    """Whether rows are no multiple of 16 elements, which GEMMs need too, or offsets in a tile exceed 32 bits."""
    return n % 16 != 0 or any(x.stride(0) % 16 or too_large(x) for x in tensors)


def _permute_bytes(data: Tensor, index: Tensor | None, row: bool, col: bool) -> int:
    rows, n = len(data) if index is None else len(index), data.shape[1]
    return n * (len(data) + rows * (row + col)) if index is not None else n * rows * (1 + row + col)
