"""RMSNorm whose result is an FP8 operand: rows for the GEMM behind it, columns for that GEMM's weight gradient.

Maths: of `fuseops.kernels.norm`, then of `fuseops.kernels.operands`. The normed x is rounded as its tensor would be
before it is quantized, so that codes are those of the two one after the other; columns are the codes of the rows at one
exponent a square, made again from x and rstd.
Shapes: x, residual (..., N), R rows in all, weight (N,) or None -> rows (R, N), scales (ceil(N/128), R); rstd (...)
float32; columns (N, C), scales (ceil(N/128), C/128), C = ceil(R/128) * 128.
Hardware: sm_89 and later convert; older ones run the twin, as rows wider than MAX_WIDTH, and widths and strides
that 16 does not divide do.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fuseops.kernels.configs import Config, Space
from fuseops.kernels.formats import E4M3, E5M2, LARGEST
from fuseops.kernels.groups import BLOCK
from fuseops.kernels.launch import device, launch, pdl_overlap
from fuseops.kernels.norm import MAX_WIDTH, RMS_FWD, add_rmsnorm_fwd, rmsnorm_fwd
from fuseops.kernels.operands import is_unaligned, quantize_operand
from fuseops.kernels.quantize import fp8_op, quantize_vectors
from fuseops.kernels.registry import Cases, floats, on_meta, tensor_bytes
from fuseops.kernels.tiles import as_rows, cdiv, check_shape, pointers, require, upcast


def _rmsnorm_operand(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    eps: float,
    dtype: torch.dtype,
    weight_offset: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    if residual is None:
        h = x.new_empty(0)
        y, rstd = rmsnorm_fwd.twin(x, weight, eps, weight_offset)
    else:
        y, h, rstd = add_rmsnorm_fwd.twin(x, residual, weight, eps, weight_offset)
    data, scale = quantize_vectors.twin(y.reshape(-1, y.shape[-1]), dtype)
    return data, scale, h, rstd


def _rmsnorm_columns(
    x: Tensor, weight: Tensor | None, rstd: Tensor, dtype: torch.dtype, weight_offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    y = upcast(x) * rstd[..., None]
    if weight is not None:
        y = y * (weight.to(y.dtype) + weight_offset)
    rows = y.to(x.dtype).reshape(-1, x.shape[-1])
    return quantize_operand.twin(rows, None, dtype, False)[2:]


COLUMNS = Space(
    "rmsnorm_columns", [{"BLOCK_R": BLOCK, "BLOCK_N": BLOCK, "num_warps": w} for w in (8, 16)]
)


def _config(rows: int, n: int, x: Tensor) -> Config:
    """That of the norm alone, so that rstd is the same to the last bit, over a vector at least."""
    config = dict(RMS_FWD.pick(rows, (n,), x))
    return {**config, "BLOCK_N": max(config["BLOCK_N"], BLOCK)}


def _cases(*, columns: bool = False) -> Cases:
    for dtype, n, fmt in (
        (torch.bfloat16, 4096, E4M3),
        (torch.bfloat16, 2048, E5M2),
        (torch.bfloat16, 7168, E4M3),
        (torch.float32, 4096, E4M3),
    ):
        x, weight = (on_meta(*size, n, dtype=dtype) for size in ((8190,), ()))
        if columns:
            yield x, weight, floats(8190), fmt, 0.0
            continue
        for residual in (None, x):
            yield x, residual, weight, 1e-6, fmt, 0.0


@fp8_op(
    twin=_rmsnorm_operand,
    cases=_cases,
    nbytes=lambda x, residual, *_: x.numel() + tensor_bytes((x, residual)) * (1 + (residual is not None)),
)  # fmt: skip
def rmsnorm_operand(
    x: Tensor,
    residual: Tensor | None,
    weight: Tensor | None,
    eps: float,
    dtype: torch.dtype,
    weight_offset: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(rows, their scales, h, rstd) of x normed, or of h = x + residual, which is empty without one."""
    n = x.shape[-1]
    check_shape("weight", weight, x.shape[-1:])
    check_shape("residual", residual, x.shape)
    x2 = as_rows(x)
    added = x2 if residual is None else as_rows(residual)
    if not x.numel() or n > MAX_WIDTH or is_unaligned(n, x2, added):
        return _rmsnorm_operand(x, residual, weight, eps, dtype, weight_offset)
    rows = len(x2)
    data = x.new_empty(rows, n, dtype=dtype)
    scale = x.new_empty(cdiv(n, BLOCK), rows, dtype=torch.float32)
    h = x.new_empty(0 if residual is None else x.shape)
    rstd = x.new_empty(x.shape[:-1], dtype=torch.float32)
    config = _config(rows, n, x)
    launch(
        device("norm_operand").rmsnorm_operand_kernel, (cdiv(rows, config["BLOCK_R"]),),
        x2, added, *pointers(x2, weight), data, scale, h, rstd,
        rows, n, x2.stride(0), added.stride(0), float(eps), float(weight_offset), SHIFT=LARGEST[dtype],
        HAS_RESIDUAL=residual is not None, HAS_WEIGHT=weight is not None, **pdl_overlap(x.device), **config,
    )  # fmt: skip
    return data, scale, h, rstd


@fp8_op(twin=_rmsnorm_columns, cases=lambda: _cases(columns=True))
def rmsnorm_columns(
    x: Tensor, weight: Tensor | None, rstd: Tensor, dtype: torch.dtype, weight_offset: float = 0.0
) -> tuple[Tensor, Tensor]:
    """(columns, their scales) of the codes that `rmsnorm_operand` made rows of."""
    n = x.shape[-1]
    check_shape("weight", weight, x.shape[-1:])
    require(
        rstd.shape == x.shape[:-1],
        f"rstd is {tuple(rstd.shape)}, expected the leading axes of {tuple(x.shape)}.",
    )
    x2 = as_rows(x)
    if not x.numel() or is_unaligned(n, x2):
        return _rmsnorm_columns(x, weight, rstd, dtype, weight_offset)
    rows, blocks = len(x2), (cdiv(len(x2), BLOCK), cdiv(n, BLOCK))
    columns = x.new_empty(n, blocks[0] * BLOCK, dtype=dtype)
    squares = x.new_empty(blocks[1], blocks[0], dtype=torch.float32)
    launch(
        device("norm_operand").rmsnorm_columns_kernel, (blocks[0] * blocks[1],),
        x2, *pointers(x2, rstd, weight), columns, squares,
        rows, n, x2.stride(0), float(weight_offset), SHIFT=LARGEST[dtype], HAS_WEIGHT=weight is not None,
        **pdl_overlap(x.device), **COLUMNS.pick(rows, (n,), x),
    )  # fmt: skip
    return columns, squares
