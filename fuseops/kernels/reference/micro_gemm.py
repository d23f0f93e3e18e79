"""Products of codes in small blocks: see `fuseops.kernels.micro_gemm`."""

import torch
from torch import Tensor

from .formats import E2M1, dequantize_format, micro_format, unswizzled
from .grouped import grouped_mm, grouped_wgrad
from .quantize import column_offs


def _micro_values(codes: Tensor, scale: Tensor, offs: Tensor | None = None) -> Tensor:
    """What codes with swizzled scales stand for, in float32."""
    data = E2M1 if codes.dtype == torch.uint8 else codes.dtype
    form = micro_format(data)
    wide = codes.shape[-1] * (2 if data is E2M1 else 1)
    plain = unswizzled(scale, codes.shape[-2], -(-wide // form.block[1]), offs)
    return dequantize_format(codes, plain.view(form.scale), data, form.block)


def micro_mm(
    x: Tensor,
    x_scale: Tensor,
    weight: Tensor,
    weight_scale: Tensor,
    offs: Tensor | None = None,
    whole: Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """See `fuseops.kernels.micro_mm`."""
    left, right = _micro_values(x, x_scale, offs), _micro_values(weight, weight_scale)
    if offs is None:
        y = left @ right.t()
        return (y if whole is None else y * whole).to(dtype)
    right = right if whole is None else right * whole[:, None, None]
    return grouped_mm(left, right, offs).to(dtype)


def micro_wgrad(
    dy: Tensor,
    dy_scale: Tensor,
    x: Tensor,
    x_scale: Tensor,
    offs: Tensor | None = None,
    whole: Tensor | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> Tensor:
    """See `fuseops.kernels.micro_wgrad`."""
    left, right = _micro_values(dy, dy_scale), _micro_values(x, x_scale)
    if offs is None:
        dw = left @ right.t()
        return (dw if whole is None else dw * whole).to(dtype)
    dw = grouped_wgrad(left.t(), right.t(), column_offs(offs))
    return (dw if whole is None else dw * whole[:, None, None]).to(dtype)
