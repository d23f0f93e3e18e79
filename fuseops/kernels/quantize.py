"""Quantization to FP8 (e4m3, e5m2) in vectors of 128, whose scales are powers of two.

Maths: inv = limit / amax, rounded down to a power of two;  q = saturate(x * inv) rounded to nearest even;  scale =
1 / inv, so that x is about q * scale. NaN stays NaN and does not count in amax; infinities become the ends of the
range; a block of zeros has scale 2^-63, the smallest that there is.
Shapes: x (R, N) -> rowwise q (R, N), scale (ceil(N/128), R), or by groups, of vectors of 128 rows that begin anew in
each group: columnwise q (N, (R//128 + E) * 128), which is the transpose, scale (R//128 + E, N). One read each.
Layout: rows of x may be strided.
Hardware: sm_89 and later convert; older ones run the twin, as sizes and strides beyond 2^24 do.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from fuseops.kernels import tiles
from fuseops.kernels.configs import Config, Space
from fuseops.kernels.formats import E4M3, E5M2, Format, quantize_format, transpose_in_groups
from fuseops.kernels.groups import BLOCK, padded_columns
from fuseops.kernels.launch import device, launch, pdl_overlap
from fuseops.kernels.registry import Cases, ints, kernel_op, on_meta
from fuseops.kernels.tiles import as_rows, cdiv, check_spec, pow2, require


def _quantize_vectors(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    codes, scale = quantize_format(x, Format(dtype, torch.float32, (1, BLOCK), True))
    return codes, scale.t().clone(memory_format=torch.contiguous_format)


def _quantize_group_blocks(x: Tensor, offs: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return _quantize_vectors(transpose_in_groups(x, offs), dtype)


FORMATS = (E4M3, E5M2)
SM_89 = 89


def _vector_candidates(dims: tuple[int, ...], itemsize: int) -> list[Config]:
    n = pow2(dims[-1], most=512, least=128)
    forms = ((4, 4096), (4, 2048), (8, 8192), (8, 16384))
    return [{"BLOCK_R": tile // n, "BLOCK_N": n, "num_warps": warps} for warps, tile in forms]


def _group_candidates(dims: tuple[int, ...], itemsize: int) -> list[Config]:
    """Few warps, where they can hold a tile (rows that are aligned, of two bytes an element): what a program does once
    is done by few threads.
    """
    fits = dims[-1] % 16 == 0 and itemsize == 2
    return [{"BLOCK_R": 128, "BLOCK_N": 64, "num_warps": 2 if fits else 4}]


VECTORS = Space("quantize_vectors", _vector_candidates)
GROUP_BLOCKS = Space("quantize_group_blocks", _group_candidates)


def _cases() -> Cases:
    sizes = [
        (torch.bfloat16, 4096),
        (torch.bfloat16, 100),
        (torch.float16, 4096),
        (torch.float32, 4096),
    ]
    for dtype, n in sizes:
        for fmt in FORMATS if dtype == torch.bfloat16 else FORMATS[:1]:
            yield on_meta(8192 - (n == 100), n, dtype=dtype), fmt


def _group_cases() -> Cases:
    for x, fmt in _cases():
        yield x, ints(64), fmt


fp8_op = functools.partial(kernel_op, min_arch=SM_89)


@fp8_op(twin=_quantize_vectors, cases=_cases)
def quantize_vectors(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(q (R, N), scale (ceil(N/128), R)), vectors of 128 along a row."""
    x = fp8_rows(x, dtype)
    if too_large(x):
        return _quantize_vectors(x, dtype)
    rows, n = x.shape
    row = x.new_empty(x.shape, dtype=dtype)
    scale = x.new_empty(cdiv(n, 128), rows, dtype=torch.float32)
    config = VECTORS.pick(rows, (n,), x)
    launch(
        device("quantize").quantize_vectors_kernel, tiles.tile_grid(rows, n, config),
        x, row, scale, rows, n, x.stride(0), LIMIT=torch.finfo(dtype).max, POW2=True, **config,
    )  # fmt: skip
    return row, scale


@fp8_op(twin=_quantize_group_blocks, cases=_group_cases)
def quantize_group_blocks(x: Tensor, offs: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(q (N, (R // 128 + E) * 128), scale (R // 128 + E, N)): columnwise vectors of 128 rows that begin anew in each
    group, as a weight gradient reads them.

    Columns of group g begin at (offs[g-1] // 128 + g) * 128: a box of 128 tokens never reads those of the next group,
    and no look at the counts is taken. Columns of no row, padding rows among them, are zeros, so q is an operand of
    groups that end at ``column_offs(offs)``; scales that nothing uses are those of zeros.
    """
    x = fp8_rows(x, dtype)
    rows, n = x.shape
    require(offs.dim() == 1 and len(offs) > 0, f"offs is {tuple(offs.shape)}, expected (E,).")
    if too_large(x):
        return _quantize_group_blocks(x, offs, dtype)
    blocks = padded_columns(rows, len(offs)) // BLOCK
    col = x.new_empty(n, blocks * BLOCK, dtype=dtype)
    scale = x.new_empty(blocks, n, dtype=torch.float32)
    config = GROUP_BLOCKS.pick(rows, (n,), x)
    launch(
        device("quantize_columns").quantize_group_blocks_kernel, (blocks * cdiv(n, config["BLOCK_N"]),),
        x, offs.contiguous(), col, scale, rows, n, len(offs), x.stride(0),
        LIMIT=torch.finfo(dtype).max, POW2=True, BLOCK_E=tiles.pow2(len(offs), least=32),
        **pdl_overlap(x.device), **config,
    )  # fmt: skip
    return col, scale


def fp8_rows(x: Tensor, dtype: torch.dtype) -> Tensor:
    """x (R, N) with contiguous columns.  Raises FuseOpsError for another shape, or a format that is not FP8."""
    check_spec({"x": x}, "x (R, N)")
    check_format(dtype)
    return as_rows(x)


def check_format(dtype: torch.dtype) -> None:
    """Raise FuseOpsError for a format that is not FP8."""
    require(dtype in FORMATS, f"dtype is {dtype}, expected one of {', '.join(map(str, FORMATS))}.")


def matrix_shape(weight: Tensor) -> torch.Size:
    """The shape of a weight, (N, K) or (E, N, K).  Raises FuseOpsError for another one."""
    shape = weight.shape
    require(len(shape) in (2, 3), f"weight is {tuple(shape)}, expected (N, K) or (E, N, K).")
    return shape


def too_large(x: Tensor) -> bool:
    """Whether offsets within a tile of x would exceed 32 bits."""
    return max(*x.shape, x.stride(0)) >= 1 << 24
