"""Reference of `fuseops.kernels.wide_mm`."""

from torch import Tensor

from .precision import wide


def wide_mm(x: Tensor, weight: Tensor) -> Tensor:
    """x @ weight.T in the accumulator's dtype.   x (T, D), weight (E, D) -> (T, E)"""
    return wide(x) @ wide(weight).t()
