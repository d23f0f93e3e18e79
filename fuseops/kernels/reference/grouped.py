"""Grouped GEMMs as a loop over groups (it reads `offs`), and the scaled GEMM. Accumulation is torch's."""

import torch
from torch import Tensor


def group_of_row(offs: Tensor, rows: int) -> Tensor:
    """Group index of every row; padding rows (at or beyond offs[-1]) get E.   -> (R,) int64"""
    row = torch.arange(rows, device=offs.device, dtype=offs.dtype)
    return torch.searchsorted(offs, row, right=True)


def padding_mask(offs: Tensor, rows: int) -> Tensor:
    """True for rows at or beyond offs[-1].   -> (R, 1) bool"""
    row = torch.arange(rows, device=offs.device, dtype=offs.dtype)
    return (row >= offs[-1]).unsqueeze(-1)


def _bounds(offs: Tensor) -> list[tuple[int, int]]:
    ends = [int(end) for end in offs.tolist()]
    return list(zip([0, *ends[:-1]], ends, strict=True))


def grouped_mm(x: Tensor, weight: Tensor, offs: Tensor) -> Tensor:
    """y[rows of e] = x[rows of e] @ weight[e].T, padding rows zero.   (R, K), (E, N, K), (E,) -> (R, N)"""
    bounds = _bounds(offs)
    parts = [x[start:end] @ weight[e].t() for e, (start, end) in enumerate(bounds)]
    padding = x.new_zeros(x.shape[0] - bounds[-1][1], weight.shape[1])
    return torch.cat([*parts, padding])


def grouped_wgrad(dy: Tensor, x: Tensor, offs: Tensor) -> Tensor:
    """dw[e] = dy[rows of e].T @ x[rows of e], zeros for an empty group.   (R, N), (R, K), (E,) -> (E, N, K)"""
    return torch.stack([dy[start:end].t() @ x[start:end] for start, end in _bounds(offs)])


def scaled_mm(a: Tensor, b: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """(a @ b.T) * scale, accumulated in float32.   fp8 (M, K), (N, K), () -> (M, N)"""
    return (a.to(torch.float32) @ b.to(torch.float32).t() * scale).to(dtype)
