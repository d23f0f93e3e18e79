"""Dropout as a function of a seed, which the backward calls again on dy: no mask is ever in memory.

Maths: y = x / (1 - p) where the draw of the element is kept, 0 elsewhere; one rounding.
Draws are halves of words of Philox4x32-7 of the place of the element and the seed (`reference.dropout.draws`): the same
on every device; p is rounded to 2^-16.
Shapes: x any, seed (1,) int64 on the device of x.  Layout: contiguous; others are copied.
Hardware: sm_80 and later.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from fuseops.kernels import reference
from fuseops.kernels.configs import Config, Space
from fuseops.kernels.launch import device, launch, overlap
from fuseops.kernels.reference.dropout import BITS, EACH, ROUNDS, threshold
from fuseops.kernels.registry import kernel_op
from fuseops.kernels.tiles import cdiv, require


def _candidates(dims: tuple[int, ...], itemsize: int) -> list[Config]:
    return [{"COUNTERS": 256, "num_warps": 4}, {"COUNTERS": 512, "num_warps": 8}]


SPACE = Space("dropout", _candidates, dims=())


def _cases() -> Iterator[tuple[Any, ...]]:
    seed = torch.empty(1, dtype=torch.int64, device="meta")
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        for columns in (4096, 4095):
            yield torch.empty(8191, columns, dtype=dtype, device="meta"), seed, 0.1


@kernel_op(twin=reference.apply_dropout, cases=_cases)
def apply_dropout(x: Tensor, seed: Tensor, p: float) -> Tensor:
    """x / (1 - p) or 0, as the draws of the seed say."""
    require(
        seed.numel() == 1 and seed.dtype is torch.int64,
        f"seed is {seed.dtype}{tuple(seed.shape)}, expected one int64.",
    )
    if not x.is_floating_point() or p >= 1:
        return reference.apply_dropout(x, seed, p)
    x = x.contiguous()
    y, n = torch.empty_like(x), x.numel()
    least = (threshold(p) << 32 - BITS) - 2**31  # of a draw in the high half of an int32
    config = SPACE.pick(n, (), x)
    launch(
        device("dropout").dropout_kernel, (cdiv(n, EACH * config["COUNTERS"]),),
        x, seed, y, n, least, 1 / (1 - p),
        ROUNDS=ROUNDS, **overlap(x.device), **config,
    )  # fmt: skip
    return y
