"""Dropout as a function of a seed, which the backward calls again on dy: no mask is ever in memory.

Maths: y = x / (1 - p) where the draw of the element is kept, 0 elsewhere; one rounding.
Draws are halves of words of Philox4x32-7 of the place of the element and the seed (`draws`): the same
on every device; p is rounded to 2^-16.
Shapes: x any, seed (1,) int64 on the device of x.  Layout: contiguous; others are copied.
Hardware: sm_80 and later.
"""

from __future__ import annotations

import torch
from torch import Tensor

from fuseops.kernels.configs import Space
from fuseops.kernels.launch import device, launch, pdl_overlap
from fuseops.kernels.registry import Cases, kernel_op, on_meta
from fuseops.kernels.tiles import cdiv, require

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
    """The least draw that is kept: a share p of draws, rounded to 2^-16, is below."""
    return min(round(p * 2**BITS), 2**BITS - 1) if p < 1 else 2**BITS


def dropout_mask(seed: Tensor, like: Tensor, p: float) -> Tensor:
    """Keep-mask of the shape of `like`. The same seed and shape give the same mask, whatever runs it."""
    from_least = draws(seed, like.numel()) ^ 1 << BITS - 1  # a kernel compares signed numbers
    return (from_least >= threshold(p)).view(like.shape)


def _apply_dropout(x: Tensor, seed: Tensor, p: float) -> Tensor:
    scale = 1 / (1 - p) if p < 1 else 0.0
    return torch.where(dropout_mask(seed, x, p), x * scale, 0)


SPACE = Space(
    "dropout", [{"COUNTERS": 256, "num_warps": 4}, {"COUNTERS": 512, "num_warps": 8}], dims=()
)


def _cases() -> Cases:
    seed = on_meta(1, dtype=torch.int64)
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for columns in (4096, 4095):
            yield on_meta(8191, columns, dtype=dtype), seed, 0.1


@kernel_op(twin=_apply_dropout, cases=_cases)
def apply_dropout(x: Tensor, seed: Tensor, p: float) -> Tensor:
    """x / (1 - p) or 0, as the draws of the seed say."""
    require(
        seed.numel() == 1 and seed.dtype is torch.int64,
        f"seed is {seed.dtype}{tuple(seed.shape)}, expected one int64.",
    )
    if not x.is_floating_point() or p >= 1:
        return _apply_dropout(x, seed, p)
    x = x.contiguous()
    y, n = torch.empty_like(x), x.numel()
    least = (threshold(p) << 32 - BITS) - 2**31  # of a draw in the high half of an int32
    config = SPACE.pick(n, (), x)
    launch(
        device("dropout").dropout_kernel, (cdiv(n, EACH * config["COUNTERS"]),),
        x, seed, y, n, least, 1 / (1 - p),
        ROUNDS=ROUNDS, **pdl_overlap(x.device), **config,
    )  # fmt: skip
    return y
