"""Reference of `fuseops.kernels.add_mm`."""

from torch import Tensor

from .precision import wide


def add_mm(add: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """add + x @ weight, x rounded to the dtype of weight.   add (M, N), x (M, K), weight (K, N) -> (M, N)"""
    product = wide(x.to(weight.dtype)) @ wide(weight)
    return (wide(add) + product).to(add.dtype)
