"""Reference of `fuseops.kernels.dropout`: dropout as a function of a seed."""

from __future__ import annotations

import torch
from torch import Tensor

LANES = 1024  # counters of a block; each gives four words, to elements LANES apart
ROUNDS = 7
LOW = (1 << 32) - 1
FACTORS = 0xD2511F53, 0xCD9E8D57
KEYS = 0x9E3779B9, 0xBB67AE85


def random_words(seed: Tensor, count: int) -> Tensor:
    """`count` words of 32 random bits, as int64: Philox4x32-7 (Salmon et al. 2011) of a counter, with seed (1,) int64
    as its key.

    Element i has word (i % 4096) // 1024 of counter (i // 4096) 1024 + i % 1024: a thread of a kernel makes four words
    at once, and each is of an element of another run of neighbours.
    """
    blocks = -(-count // (4 * LANES))
    counter = torch.arange(blocks * LANES, device=seed.device)
    a, b = counter & LOW, counter >> 32
    c, d = torch.zeros_like(counter), torch.zeros_like(counter)
    key, other = seed & LOW, (seed >> 32) & LOW
    for _ in range(ROUNDS):
        first, second = a * FACTORS[0], c * FACTORS[1]  # 64 bits, of which the sign is one
        a, b = ((second >> 32) & LOW) ^ b ^ key, second & LOW
        c, d = ((first >> 32) & LOW) ^ d ^ other, first & LOW
        key, other = (key + KEYS[0]) & LOW, (other + KEYS[1]) & LOW
    return torch.stack([a, b, c, d]).view(4, blocks, LANES).transpose(0, 1).reshape(-1)[:count]


def dropout_threshold(p: float) -> int:
    """What a word has to reach, as an int32, to be kept: p of them do not."""
    return round(p * 2**32) - 2**31


def dropout_mask(seed: Tensor, like: Tensor, p: float) -> Tensor:
    """Keep-mask of the shape of `like`. The same seed and shape give the same mask, whatever runs it."""
    words = random_words(seed, like.numel())
    signed = ((words + 2**31) & LOW) - 2**31
    return (signed >= dropout_threshold(p)).view(like.shape)


def apply_dropout(x: Tensor, seed: Tensor, p: float) -> Tensor:
    """x / (1 - p) where the mask of the seed keeps it, 0 elsewhere."""
    scale = 1 / (1 - p) if p < 1 else 0.0
    return torch.where(dropout_mask(seed, x, p), x * scale, 0)
