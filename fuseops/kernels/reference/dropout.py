"""Dropout as a function of a seed."""

import torch
from torch import Tensor

SPLITMIX64 = ((30, -4658895280553007687), (27, -7723592293110685705))  # shift, factor


def dropout_mask(seed: Tensor, like: Tensor, p: float) -> Tensor:
    """Keep-mask from a seed on the device: a counter through two rounds of a 64-bit multiply-xorshift mix.

    The same seed and shape give the same mask, so that backward redraws it instead of saving it.
    """
    z = torch.arange(like.numel(), device=like.device, dtype=torch.int64) + seed
    for shift, factor in SPLITMIX64:
        z = (z ^ ((z >> shift) & ((1 << (64 - shift)) - 1))) * factor
    z = z ^ ((z >> 31) & ((1 << 33) - 1))
    uniform = ((z >> 40) & ((1 << 24) - 1)).to(torch.float32) * 2.0**-24
    return (uniform >= p).view(like.shape)
