"""The products of a router: logits in float32, and its input gradient added to that of the tokens.

Maths: wide_mm  y = x weight^T, whose accumulator is kept. Products of halves are exact in float32, so this is the
    product of the operands in float32, at the speed and traffic of halves.
    add_mm  y = add + x weight; x is rounded to the dtype of the weight, the sum is float32 with one rounding.
Shapes: x (T, D), weight (E, D) -> y (T, E) float32. add (M, N), x (M, K) float32 or a half, weight (K, N) -> y (M, N)
in the dtype of add. K is the number of experts, so it is the traffic of add and y that counts: `torch.addmm` moves it
twice, since it copies add first.
Layout: of add_mm rows may be strided, columns are contiguous; of wide_mm any strides.
Hardware: wide_mm is cuBLAS's, for halves of one dtype; others are multiplied in the accumulator's. add_mm takes sm_80
and later, halves of one dtype and K up to MAX_K; of larger K `torch.addmm`, others the twin.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fuseops.kernels.configs import Config, Space
from fuseops.kernels.launch import device, launch
from fuseops.kernels.registry import Cases, floats, kernel_op, on_meta
from fuseops.kernels.tiles import accumulator, as_rows, cdiv, pow2, require, upcast

HALVES = (torch.bfloat16, torch.float16)


def _wide_mm(x: Tensor, weight: Tensor) -> Tensor:
    dtype = accumulator(torch.promote_types(x.dtype, weight.dtype))
    return x.to(dtype) @ weight.to(dtype).t()


@kernel_op(twin=_wide_mm, flops=lambda x, weight: 2 * x.numel() * weight.shape[0], min_arch=0)
def wide_mm(x: Tensor, weight: Tensor) -> Tensor:
    """x @ weight.T in float32."""
    if x.dtype == weight.dtype and x.dtype in HALVES:
        return torch.mm(x, weight.t(), out_dtype=torch.float32)
    return _wide_mm(x, weight)


def _add_mm(add: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    product = upcast(x.to(weight.dtype)) @ upcast(weight)
    return (upcast(add) + product).to(add.dtype)


MAX_K = 256


def _candidates(dims: tuple[int, ...], itemsize: int) -> list[Config]:
    """All of K lies in one tile, so more experts leave less room for loads ahead, or wide blocks. The last are for so
    few rows that a program takes one block of columns, or a few.
    """
    k = pow2(dims[0], least=16)
    tiles = [(2, 64, 4), (2, 64, 3), (4, 64, 3)] if k <= 128 else [(2, 32, 4), (2, 64, 2)]
    tiles += [*[(1, 128, 3)] * (k <= 64), (8, 64, 2), (64, 32, 2)]
    fixed = {"BLOCK_M": 64, "BLOCK_K": k, "num_warps": 4}
    return [{"SPLITS": s, "BLOCK_N": n, "STAGES": stages, **fixed} for s, n, stages in tiles]


def _default(rows: int, dims: tuple[int, ...], itemsize: int) -> Config:
    """More programs for each 64 rows where there are few of those."""
    candidates = _candidates(dims, itemsize)
    if rows > 4096:
        return candidates[0]
    most = 4 if rows > 1024 else 8 if rows > 256 else 64
    return next(c for c in candidates if c["SPLITS"] >= most)


ADD_MM = Space("add_mm", _candidates, _default, dims=("k", "n"))


def _cases() -> Cases:
    for dtype in HALVES:
        for experts in (8, 64, 128, 256) if dtype is torch.bfloat16 else (128,):
            add = on_meta(8192, 4096, dtype=dtype)
            x = floats(8192, experts)
            yield add, x, on_meta(experts, 4096, dtype=dtype)


@kernel_op(twin=_add_mm, flops=lambda add, x, weight: 2 * x.numel() * weight.shape[1], cases=_cases)
def add_mm(add: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """add + x @ weight."""
    (m, n), k = add.shape, x.shape[1]
    require(
        x.shape == (m, k) and weight.shape == (k, n),
        f"add is {tuple(add.shape)}, x {tuple(x.shape)}, weight {tuple(weight.shape)}, "
        f"expected (M, N), (M, K), (K, N).",
    )
    if add.dtype != weight.dtype or add.dtype not in HALVES:
        return _add_mm(add, x, weight)
    if k > MAX_K:
        return torch.addmm(add, x.to(weight.dtype), weight)
    add, x, weight = as_rows(add), as_rows(x), as_rows(weight)
    y = torch.empty(m, n, dtype=add.dtype, device=add.device)
    config = ADD_MM.pick(m, (k, n), add)
    launch(
        device("add_mm").add_mm_kernel,
        (cdiv(m, config["BLOCK_M"]) * config["SPLITS"],),
        add, x, weight, y, m, n, k, add.stride(0), x.stride(0), weight.stride(0), **config,
    )  # fmt: skip
    return y
