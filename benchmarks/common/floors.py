"""What no kernel can be faster than that reads and writes what a case does, in as many launches.

``mixed`` reads and writes as many bytes as the case, each in its own proportion, where a copy writes as
much as it reads: a kernel that writes more than it reads is held to that. ``idle`` is the launches of the case,
grids and warps, doing nothing.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import triton
import triton.language as tl
from torch import Tensor

from fuseops.kernels.launch import Launch

BLOCK = 1024


@triton.jit
def mixed_kernel(source, target, read, written, BLOCK: tl.constexpr):
    """Reads `read` words and writes `written`, side by side as far as there are both."""
    at = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    words = tl.load(source + at, mask=at < read, other=0)
    tl.store(target + at, words, mask=at < written)


@triton.jit
def idle_kernel(unused):
    pass


def mixed(read: int, written: int) -> Callable[[Tensor], Tensor]:
    """A call that reads so many bytes of a tensor of int64, and writes as many to a new one."""
    words = read // 8, written // 8
    grid = (max(triton.cdiv(max(words), BLOCK), 1),)

    def call(source: Tensor) -> Tensor:
        target = torch.empty(words[1], dtype=torch.int64, device=source.device)
        mixed_kernel[grid](source, target, *words, BLOCK=BLOCK)
        return target

    return call


def idle(launches: list[Launch]) -> Callable[[Tensor], None]:
    """A call with these grids and warps that touches nothing."""
    grids = [(launch.grid, launch.options.get("num_warps", 4)) for launch in launches]

    def call(unused: Tensor) -> None:
        for grid, warps in grids:
            idle_kernel[grid](unused, num_warps=warps)

    return call
