"""Recipes: which operand of which GEMM gets which format. A recipe is a value; equal recipes give equal plans."""

from dataclasses import dataclass

import torch

from fuseops.errors import FuseOpsError

from .quantized import Format, Roles

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2


@dataclass(frozen=True)
class Recipe:
    """Base of recipes. A recipe turns a granularity and the layouts that an op reads into formats."""

    def roles(self, granularity: str) -> Roles:
        """Formats of input, weight and grad_output of an op; layouts are filled in by the plan."""
        raise NotImplementedError(f"{type(self).__name__} defines no roles()")


@dataclass(frozen=True)
class Float8CurrentScaling(Recipe):
    """FP8 with one float32 scale a tensor (a group, when grouped), taken from the tensor's own amax.

    inv = max(format) / amax, data = cast(x * inv) clamped to the format's range, scale = 1 / inv. In amax NaN does not
    count and an infinity counts as the largest float32 (TransformerEngine: scale 1); amax 0 gives scale 1.
    fwd: format of inputs and weights; bwd: of gradients.
    """

    fwd: torch.dtype = E4M3
    bwd: torch.dtype = E5M2

    def __post_init__(self) -> None:
        for name, dtype in (("fwd", self.fwd), ("bwd", self.bwd)):
            if dtype not in (E4M3, E5M2):
                raise FuseOpsError(
                    f"Float8CurrentScaling({name}={dtype}): expected torch.float8_e4m3fn or torch.float8_e5m2."
                )

    def roles(self, granularity: str) -> Roles:
        forward = Format(self.fwd, granularity)
        return Roles(input=forward, weight=forward, grad_output=Format(self.bwd, granularity))
