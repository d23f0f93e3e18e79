"""Reference of `fuseops.kernels.dropout`: dropout as a function of a seed."""

from __future__ import annotations

import torch
from torch import Tensor

EACH = 8  # draws of a counter
ROUNDS = 7
BITS = 16  # of a draw
LOW = (1 << 32) - 1
FACTORS = 0xD2511F53, 0xCD9E8D57
KEYS = 0x9E3779B9, 0xBB67AE85


def draws(seed: Tensor, count: int) -> Tensor:
    """`count` numbers of 16 random bits, as int32: halves of the words of Philox4x32-7 (Salmon et al. 2011) of a
    counter, with seed (1,) int64 as its key.

    Element i has half i % 8 of counter i // 8: the high one of word i % 8 // 2, or the low one.
    """
    counter = torch.arange(-(-count // EACH), device=seed.device)
    a, b = counter & LOW, counter >> 32
    c, d = torch.zeros_like(counter), torch.zeros_like(counter)
    key, other = seed & LOW, (seed >> 32) & LOW
    for _ in range(ROUNDS):
        first, second = a * FACTORS[0], c * FACTORS[1]  # 64 bits, of which the sign is one
        a, b = ((second >> 32) & LOW) ^ b ^ key, second & LOW
        c, d = ((first >> 32) & LOW) ^ d ^ other, first & LOW
        key, other = (key + KEYS[0]) & LOW, (other + KEYS[1]) & LOW
    halves = [half for word in (a, b, c, d) for half in (word >> BITS, word & 0xFFFF)]
    return torch.stack([half.to(torch.int32) for half in halves], -1).view(-1)[:count]


def threshold(p: float) -> int:
    """What a draw has to reach to be kept: p of them do not, to 2^-16."""
    return min(round(p * 2**BITS), 2**BITS - 1) if p < 1 else 2**BITS


def dropout_mask(seed: Tensor, like: Tensor, p: float) -> Tensor:
    """Keep-mask of the shape of `like`. The same seed and shape give the same mask, whatever runs it."""
    from_least = draws(seed, like.numel()) ^ 1 << BITS - 1  # a kernel compares signed numbers
    return (from_least >= threshold(p)).view(like.shape)


def apply_dropout(x: Tensor, seed: Tensor, p: float) -> Tensor:
    """x / (1 - p) where the mask of the seed keeps it, 0 elsewhere."""
    scale = 1 / (1 - p) if p < 1 else 0.0
    return torch.where(dropout_mask(seed, x, p), x * scale, 0)
