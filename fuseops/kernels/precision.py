"""The dtype in which twins compute."""

import torch
from torch import Tensor


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """The dtype that sums are kept in: float32, or wider if the input is."""
    return torch.promote_types(dtype, torch.float32)


def wide(t: Tensor) -> Tensor:
    """t in its accumulator's dtype."""
    return t.to(accumulator(t.dtype))
