"""A product that keeps its accumulator: half operands, float32 result.

Maths: y = x weight^T. Products of halves are exact in float32, so this is the product of the
operands in float32, at the speed and traffic of halves.
Shapes: x (T, D), weight (E, D) -> y (T, E) float32.
Layout: any strides that torch.mm takes.
Hardware: cuBLAS, for two halves of one dtype. Other dtypes are multiplied in the accumulator's.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fuseops.kernels.precision import accumulator
from fuseops.kernels.registry import kernel_op


def _wide_mm(x: Tensor, weight: Tensor) -> Tensor:
    dtype = accumulator(torch.promote_types(x.dtype, weight.dtype))
    return x.to(dtype) @ weight.to(dtype).t()


@kernel_op(twin=_wide_mm, flops=lambda x, weight: 2 * x.numel() * weight.shape[0], min_arch=0)
def wide_mm(x: Tensor, weight: Tensor) -> Tensor:
    """x @ weight.T in float32."""
    if x.dtype == weight.dtype and x.dtype in (torch.bfloat16, torch.float16):
        return torch.mm(x, weight.t(), out_dtype=torch.float32)
    return _wide_mm(x, weight)
