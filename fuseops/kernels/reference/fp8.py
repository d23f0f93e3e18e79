"""FP8 GEMMs: the operands' numbers in float32, then the GEMM of them. See `fuseops.kernels.fp8`."""

from __future__ import annotations

import torch
from torch import Tensor

from .grouped import _bounds, group_of_row, grouped_mm
from .quantize import BLOCK, quantize_vectors


def dequantize(
    codes: Tensor, scale: Tensor, scaling: str, dtype: torch.dtype = torch.float32
) -> Tensor:
    """codes (..., R, K) times their scales: of a "block" (ceil(K/128), R), of a "square" (..., ceil(R/128),
    ceil(K/128)), of a "row" (..., R), or of a "tensor", one or one for each of the leading axis. In bf16 this is
    exact for scales that are powers of two.
    """
    rows, k = codes.shape[-2:]
    scale = scale.to(dtype)
    if scaling == "block":
        scale = scale.t().repeat_interleave(BLOCK, 1)[:, :k]
    elif scaling == "square":
        scale = scale.repeat_interleave(BLOCK, -2)[..., :rows, :]
        scale = scale.repeat_interleave(BLOCK, -1)[..., :k]
    elif scaling == "row":
        scale = scale.unsqueeze(-1)
    elif scale.numel() > 1:
        scale = scale[:, None, None]
    return codes.to(dtype) * scale


def dequantized_rows(
    x: Tensor,
    scale: Tensor,
    scaling: str,
    offs: Tensor | None,
    dtype: torch.dtype = torch.float32,
) -> Tensor:
    """The rows (R, K) of `fp8_mm`; of "tensor" one scale, or one a group."""
    if scaling == "tensor" and scale.numel() > 1 and offs is not None:
        by_group = torch.cat([scale, scale.new_ones(1)])
        scale, scaling = by_group[group_of_row(offs, x.shape[0])], "row"
    return dequantize(x, scale, scaling, dtype)


def weight_scaling(scaling: str) -> str:
    """How the weight of `fp8_mm` is scaled where the rows are scaled like that."""
    return "square" if scaling == "block" else scaling


def fp8_mm(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    scaling: str,
    offs: Tensor | None = None,
    tiles: Tensor | None = None,
    bias: Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16,
    fast: bool = False,
) -> Tensor:
    """x[rows of e] @ weight[e].T (+ bias[e]) of dequantized operands, padding rows zero."""
    left = dequantized_rows(x, x_scale, scaling, offs)
    right = dequantize(weight, weight_scale, weight_scaling(scaling))
    bias = None if bias is None else bias.float()
    if offs is None:
        y = left @ right.t()
        return (y if bias is None else y + bias).to(dtype)
    return grouped_mm(left, right, offs, None, bias).to(dtype)


def fp8_mm_operand(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    scaling: str,
    offs: Tensor | None = None,
    tiles: Tensor | None = None,
    bias: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """`fp8_mm`, in bf16, as e4m3 codes (R, N) and scales (ceil(N/128), R)."""
    y = fp8_mm(x, x_scale, weight, weight_scale, scaling, offs, tiles, bias)
    data, scale = quantize_vectors(y, torch.float8_e4m3fn)
    return data, scale


def column_bounds(offs: Tensor) -> list[tuple[int, int]]:
    """Where the columns of each group lie: from (offs[g-1] // 128 + g) * 128, in whole blocks of 128."""
    begins = [(start // BLOCK + g) * BLOCK for g, (start, _) in enumerate(_bounds(offs))]
    sizes = [-(-(end - start) // BLOCK) * BLOCK for start, end in _bounds(offs)]
    return [(begin, begin + size) for begin, size in zip(begins, sizes, strict=True)]


def fp8_wgrad(
    dy: Tensor,
    dy_scale: Tensor,
    x: Tensor,
    x_scale: Tensor,
    scaling: str,
    offs: Tensor | None = None,
    tiles: Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """dy[:, columns of e] @ x[:, columns of e].T of dequantized operands, zeros for an empty group."""
    by_tensor = scaling == "tensor"
    left = dy.float() if by_tensor else dequantize(dy, dy_scale, scaling)
    right = x.float() if by_tensor else dequantize(x, x_scale, scaling)
    if offs is None:
        dw = left @ right.t()
        return (dw * dy_scale * x_scale if by_tensor else dw).to(dtype)
    dw = torch.stack([left[:, a:b] @ right[:, a:b].t() for a, b in column_bounds(offs)])
    if by_tensor:
        dw *= (dy_scale * x_scale).reshape(-1, 1, 1)
    return dw.to(dtype)


def fp8_wgrad_into(
    main_grad: Tensor,
    dy: Tensor,
    dy_scale: Tensor,
    x: Tensor,
    x_scale: Tensor,
    scaling: str,
    offs: Tensor | None = None,
    tiles: Tensor | None = None,
    accumulate: bool = True,
) -> None:
    """main_grad (+)= fp8_wgrad, unrounded."""
    dw = fp8_wgrad(dy, dy_scale, x, x_scale, scaling, offs, None, torch.float32)
    if accumulate:
        main_grad += dw
    else:
        main_grad.copy_(dw)
