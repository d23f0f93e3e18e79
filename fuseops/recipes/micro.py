"""The microscaling recipes: MXFP8, FP8 codes with a power-of-two scale for 32 (OCP Microscaling Formats 1.0), and
NVFP4, 4-bit codes with an E4M3 scale for 16 and a float32 scale a tensor (arXiv:2509.25149).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .recipe import BACKWARDS, POLICIES, Recipe, Roles, option
from .scaling import E2M1, E4M3, E5M2, E8M0, Scaling


def mxfp8(data: torch.dtype = E4M3, square: bool = False) -> Scaling:
    """The MXFP8 format: a scale for 32 elements along the summed axis, or for 32 x 32 of a weight (`square`)."""
    rows = 32 if square else 1
    return Scaling(data, (rows, 32), (32, rows), E8M0)


@dataclass(frozen=True, kw_only=True)
class MXFP8BlockScaling(Recipe):
    """MXFP8 is FP8 with a power-of-two scale (E8M0, eight bits) for every 32 elements along the axis that a GEMM sums.

    The scale is the smallest power of two that brings the largest magnitude into the format's range, data =
    cast(x / scale). Rows and columns are quantized from high precision, each along its own axis. Data times scale is
    exact in bfloat16, and GEMMs multiply these products where tensor cores do not take the format.

    square_weights: one scale for 32 x 32 of a weight, so that forward and input gradient read the same values.
    weights, backward: as in `Float8BlockScaling`.
    fwd: format of inputs and weights; bwd: of gradients.
    Raises FuseOpsError for another value of any of them.
    """

    square_weights: bool = option(False, True)
    weights: str = option(*POLICIES)
    backward: str | None = option(*BACKWARDS)
    fwd: torch.dtype = option(E4M3, E5M2)
    bwd: torch.dtype = option(E4M3, E5M2)

    def roles(self) -> Roles:
        weight = mxfp8(self.fwd, self.square_weights)
        forward, grad = mxfp8(self.fwd), mxfp8(self.bwd)
        return Roles(forward, weight, grad, weights=self.weights, backward=self.backward)


def nvfp4(square: bool = False, hadamard: bool = False, stochastic: bool = False) -> Scaling:
    """The NVFP4 format: a scale for 16 elements along the summed axis, or for 16 x 16 of a weight (`square`)."""
    rows = 16 if square else 1
    return Scaling(E2M1, (rows, 16), (16, rows), E4M3, hadamard, stochastic)


@dataclass(frozen=True, kw_only=True)
class NVFP4BlockScaling(Recipe):
    """NVFP4 has 4-bit codes (E2M1), an E4M3 scale for every 16 elements along the axis that a GEMM sums, and a second,
    float32 scale a tensor (a group, when grouped).

    With S = 448 * 6 / amax of the tensor, a block's scale is E4M3(amax of the block * S / 6), and data = x * S / scale,
    rounded to the nearest code. Rows and columns are quantized from high precision, each along its own axis. A NaN
    makes the scale of its block NaN. Where tensor cores do not take the format, GEMMs multiply codes times E4M3 scales,
    exact in bfloat16, and the float32 scales multiply the product.

    hadamard: columns of x and of gradients, which the weight gradient multiplies, are quantized after a Hadamard
        transform over every 16 tokens, with fixed signs. It cancels in the product, and spreads outliers.
    stochastic: gradients are rounded stochastically, which keeps the mean. The seed is drawn from torch's generator in
        the forward, so a backward that runs twice gives the same bits, and a replayed CUDA graph new ones.
    square_weights: one scale for 16 x 16 of a weight, so that forward and input gradient read the same values.
    weights, backward: as in `Float8BlockScaling`.
    Raises FuseOpsError for another value of any of them.
    """

    hadamard: bool = option(True, False)
    stochastic: bool = option(True, False)
    square_weights: bool = option(True, False)
    weights: str = option(*POLICIES)
    backward: str | None = option(*BACKWARDS)

    def roles(self) -> Roles:
        return Roles(
            nvfp4(hadamard=self.hadamard),
            nvfp4(self.square_weights),
            nvfp4(hadamard=self.hadamard, stochastic=self.stochastic),
            weights=self.weights,
            backward=self.backward,
        )
