"""Recipes: which operand of which GEMM gets which format. A recipe is a value; equal recipes give equal plans."""

from dataclasses import dataclass
from typing import ClassVar

import torch

from fuseops.errors import FuseOpsError

from .quantized import Format, Roles

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


@dataclass(frozen=True, eq=False)
class Recipe:
    """Base of recipes. A recipe turns a granularity and the layouts that an op reads into formats.

    A subclass that is a frozen dataclass is compared by its fields, any other one by identity.
    """

    def roles(self, granularity: str) -> Roles:
        """Formats of input, weight and grad_output of an op; layouts are filled in by the plan."""
        raise NotImplementedError(f"{type(self).__name__} defines no roles()")


@dataclass(frozen=True)
class _Float8(Recipe):
    fwd: torch.dtype = E4M3
    bwd: torch.dtype = E5M2
    blocks: ClassVar[bool] = False

    def __post_init__(self) -> None:
        for name in ("fwd", "bwd"):
            dtype = getattr(self, name)
            if dtype not in (E4M3, E5M2):
                raise FuseOpsError(
                    f"{type(self).__name__}({name}={dtype}): expected torch.float8_e4m3fn or torch.float8_e5m2."
                )

    def roles(self, granularity: str) -> Roles:
        forward, backward = (
            Format(dtype, granularity, blocks=self.blocks) for dtype in (self.fwd, self.bwd)
        )
        return Roles(input=forward, weight=forward, grad_output=backward)


@dataclass(frozen=True)
class Float8CurrentScaling(_Float8):
    """FP8 with one float32 scale a tensor (a group, when grouped), taken from the tensor's own amax.

    inv = max(format) / amax, data = cast(x * inv) clamped to the format's range, scale = 1 / inv. In amax NaN does not
    count and an infinity counts as the largest float32 (TransformerEngine: scale 1); amax 0 gives scale 1.
    fwd: format of inputs and weights; bwd: of gradients.
    """


@dataclass(frozen=True)
class Float8BlockScaling(_Float8):
    """FP8 with a power-of-two scale for every 128 elements along the axis that a GEMM sums, and for every square of
    128 x 128 of a weight (DeepSeek-V3, arXiv:2412.19437, section 3.3).

    inv = max(format) / amax rounded down to a power of two, data = cast(x * inv), scale = 1 / inv. Blocks of rows begin
    anew in each group of a grouped op. Data times scale is exact in bfloat16, which is what the GEMMs multiply, rounded
    once at the store; tensors of another dtype are multiplied in float32.
    fwd: format of inputs and weights; bwd: of gradients.
    """

    bwd: torch.dtype = E4M3
    blocks = True
