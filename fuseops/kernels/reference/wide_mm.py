"""Reference of `fuseops.kernels.wide_mm`."""

import torch
from torch import Tensor

from .precision import accumulator


def wide_mm(x: Tensor, weight: Tensor) -> Tensor:
    """x @ weight.T in the accumulator's dtype.   x (T, D), weight (E, D) -> (T, E)"""
    dtype = accumulator(torch.promote_types(x.dtype, weight.dtype))
    return x.to(dtype) @ weight.to(dtype).t()
