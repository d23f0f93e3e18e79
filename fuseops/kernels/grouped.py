"""Grouped GEMMs. CUDA runs `torch.nn.functional.grouped_mm` where it takes the dtype, otherwise a masked dense product
a group: neither asks the host. The reference loop reads `offs`, so traced code and fake tensors see the registered ops.

Maths: y[rows of e] = x[rows of e] @ weight[e].T;  dw[e] = dy[rows of e].T @ x[rows of e]. Padding rows are zero.
Shapes: x (R, K), weight (E, N, K), dy and y (R, N), dw (E, N, K), offs (E,) int32 row ends on the device.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fuseops.kernels import reference
from fuseops.kernels.reference.grouped import group_of_row, padding_mask
from fuseops.kernels.registry import kernel_op

_CUDA_NATIVE = torch.bfloat16  # the dtype that F.grouped_mm takes on every supported torch


def _mm_fake(x: Tensor, weight: Tensor, offs: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[1])


def _wgrad_fake(dy: Tensor, x: Tensor, offs: Tensor) -> Tensor:
    return x.new_empty(offs.shape[0], dy.shape[1], x.shape[1])


def _mm_flops(x: Any, weight: Any, offs: Any, **_: Any) -> int:
    """Every row counts once, padding too: the counter sees shapes."""
    return int(2 * x[0] * x[1] * weight[1])


def _wgrad_flops(dy: Any, x: Any, offs: Any, **_: Any) -> int:
    return int(2 * x[0] * x[1] * dy[1])


@kernel_op(twin=reference.grouped_mm, fake=_mm_fake, flops=_mm_flops, min_arch=0, traces_twin=False)
def grouped_mm(x: Tensor, weight: Tensor, offs: Tensor) -> Tensor:
    """x[rows of e] @ weight[e].T, padding rows zero.   (R, K), (E, N, K), (E,) int32 -> (R, N)"""
    padding = padding_mask(offs, x.shape[0])
    if _native(x, weight) and weight.shape[1] % 8 == 0:
        y = F.grouped_mm(x.contiguous(), weight.transpose(-2, -1), offs=offs)
        return y.masked_fill(padding, 0)
    member = _members(offs, x.shape[0])
    y = x.new_zeros(x.shape[0], weight.shape[1])
    for e in range(weight.shape[0]):
        y = torch.where(member[:, e : e + 1], x @ weight[e].t(), y)
    return y


@kernel_op(
    twin=reference.grouped_wgrad,
    fake=_wgrad_fake,
    flops=_wgrad_flops,
    min_arch=0,
    traces_twin=False,
)
def grouped_wgrad(dy: Tensor, x: Tensor, offs: Tensor) -> Tensor:
    """dy[rows of e].T @ x[rows of e].   (R, N), (R, K), (E,) int32 -> (E, N, K)"""
    padding = padding_mask(offs, x.shape[0])
    dy, x = dy.masked_fill(padding, 0), x.masked_fill(padding, 0)
    if _native(dy, x):
        return F.grouped_mm(dy.t(), x, offs=offs)
    member = _members(offs, x.shape[0])
    zero = dy.new_zeros(())
    return torch.stack(
        [torch.where(member[:, e : e + 1], dy, zero).t() @ x for e in range(offs.shape[0])]
    )


def scaled_grouped_mm(
    a: Tensor, b: Tensor, scale: Tensor, offs: Tensor, dtype: torch.dtype
) -> Tensor:
    """grouped_mm with one scale a group, accumulated in float32.   fp8 (R, K), (E, N, K), (E,) float32 -> (R, N)"""
    y = grouped_mm(a.to(torch.float32), b.to(torch.float32), offs)
    by_row = torch.cat([scale, scale.new_zeros(1)])[group_of_row(offs, a.shape[0])]
    return (y * by_row.unsqueeze(-1)).to(dtype)


def scaled_grouped_wgrad(
    dy: Tensor, x: Tensor, scale: Tensor, offs: Tensor, dtype: torch.dtype
) -> Tensor:
    """grouped_wgrad with one scale a group.   fp8 (R, N), (R, K), (E,) float32 -> (E, N, K)"""
    dw = grouped_wgrad(dy.to(torch.float32), x.to(torch.float32), offs)
    return (dw * scale[:, None, None]).to(dtype)


def _native(*tensors: Tensor) -> bool:
    """F.grouped_mm wants bf16 and rows of a multiple of 16 bytes."""
    return all(t.dtype is _CUDA_NATIVE and t.shape[-1] % 8 == 0 for t in tensors)


def _members(offs: Tensor, rows: int) -> Tensor:
    group = group_of_row(offs, rows)
    return group.unsqueeze(-1) == torch.arange(offs.shape[0], device=offs.device)
