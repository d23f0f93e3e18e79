"""A path is the kernel that an FP8 GEMM runs; it is chosen here with its tiles, and the reason against a better one.

Paths, best first:
* cooperative: Gluon, sm_90, K a multiple of 16, N of 8, a tested Triton;
* dequantize: everything else. Codes times scales that are powers of two are exact in bf16, and the kernels of
  `fuseops.kernels.grouped` multiply them; other scales, and results of another dtype than bf16, go through float32.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fuseops.kernels.configs import Config, Space
from fuseops.kernels.formats import E4M3, E5M2
from fuseops.kernels.grouped_paths import GEMM, aligned, choose_path, gluon_refusals
from fuseops.kernels.launch import current_arch
from fuseops.torch_private import is_fake
from fuseops.words import dtype_name

COOPERATIVE = "cooperative"


def _tile(m: int, n: int, stages: int) -> Config:
    """GROUP makes bands of so many rows."""
    return {"BLOCK_M": m, "BLOCK_N": n, "GROUP": 2048 // m, "STAGES": stages}


TALL, WIDE, SQUARE = _tile(256, 128, 3), _tile(128, 256, 3), _tile(128, 128, 5)


def _mm_default(rows: int, dims: tuple[int, ...], itemsize: int) -> Config:
    """Tall tiles waste more at the ends of groups, wide ones at the end of N. On an H200 wide ones were 3 to 6 % faster
    where sums are long.
    """
    groups, n, k = dims
    if 0 < n % 256 <= 128:
        return TALL if rows >= 1024 * groups else SQUARE
    return TALL if rows >= 1024 * groups and k < 8192 else WIDE


def _wgrad_default(rows: int, dims: tuple[int, ...], itemsize: int) -> Config:
    _, n, _ = dims
    return WIDE if 0 < n % 256 <= 128 else TALL


MM = Space("fp8_mm", [TALL, WIDE, SQUARE], _mm_default, GEMM)
MM_FAST = Space("fp8_mm_fast", [_tile(128, 256, 4)], dims=GEMM)
WGRAD = Space("fp8_wgrad", [TALL, WIDE, SQUARE], _wgrad_default, GEMM)
WGRAD_VECTORS = Space("fp8_wgrad_vectors", [TALL], dims=GEMM)
"""With scales of rows and of columns, wide tiles do not fit into registers."""


def path_of(*reasons: str | None) -> str:
    """ "cooperative", or "dequantize" with the first reason, as in "dequantize (K is 72, not a multiple of 16)"."""
    return choose_path(COOPERATIVE, dequantize=reasons).words


def mm_path(x: Tensor, weight: Tensor, dtype: torch.dtype = torch.bfloat16) -> str:
    """The path of `fp8_mm` of x (R, K) and weight (E, N, K) or (N, K), with the reason against a better one."""
    n, k = weight.shape[-2:]
    return path_of(
        *_device(x.device),
        _codes("x", x),
        _codes("the weight", weight),
        _sizes(k, n, dtype),
        "the weight has too many rows" if weight.numel() // max(k, 1) >= 1 << 31 else None,
        None if x.numel() and weight.numel() else "an operand is empty",
    )


def wgrad_path(dy: Tensor, x: Tensor, dtype: torch.dtype = torch.bfloat16) -> str:
    """The path of `fp8_wgrad` of columns dy (N, C) and x (K, C)."""
    return path_of(
        *_device(x.device),
        _codes("dy", dy),
        _codes("x", x),
        _sizes(dy.shape[1], x.shape[0], dtype),
        None if x.numel() and dy.numel() else "an operand is empty",
    )


def act_path(x: Tensor, h: Tensor, *dtypes: torch.dtype) -> str:
    """The kernel that writes operands of SwiGLU (x is h) or of its gradient (x is da): "once" reads each input once,
    "parts" runs everywhere.   dtypes: the formats of the operands
    """
    formats = {*dtypes, *(t.dtype for t in (x, h) if t.itemsize == 1)}
    apart = any(t.itemsize != 1 and t.dtype != torch.bfloat16 for t in (x, h))
    if apart or formats != {E4M3} or any(_device(h.device)):
        return "parts"
    # one instruction loads eight numbers, from aligned addresses only
    return "once" if all(aligned(x, h)) else "parts"


def multiplies_codes(device: torch.device) -> bool:
    """Whether this device has FP8 GEMMs that are faster than those of bf16."""
    return device.type == "cuda" and path_of(*_device(device)) == COOPERATIVE


def _device(device: torch.device) -> tuple[str | None, ...]:
    return gluon_refusals(current_arch(device), COOPERATIVE)


def _codes(name: str, codes: Tensor) -> str | None:
    if codes.dtype not in (E4M3, E5M2):
        return f"{name} is {dtype_name(codes.dtype)}"
    if not is_fake(codes) and codes.data_ptr() % 16:
        return f"{name} is not 16-byte aligned"
    return None


def _sizes(k: int, n: int, dtype: torch.dtype) -> str | None:
    """The reason against sizes.   k: the inner size; n: columns of the result"""
    if k % 16:
        return f"K is {k}, not a multiple of 16"
    if dtype.itemsize == 1 and n % 128:
        return f"rows of codes are {n} numbers, not a multiple of 128"
    if n * dtype.itemsize % 16:
        return f"rows of the result are {n} numbers, not a multiple of {16 // dtype.itemsize}"
    return None
