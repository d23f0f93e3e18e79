"""MXFP8: FP8 codes with a power of two for every 32 of them (OCP Microscaling Formats 1.0)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from .recipe import BACKWARDS, Recipe, Roles, check_choices, check_formats
from .scaling import E4M3, E8M0, Scaling
from .store import POLICIES

WIDTH = 32


def mxfp8(data: torch.dtype = E4M3, square: bool = False) -> Scaling:
    """The format of an operand: a scale for 32 elements along the axis that is summed, or for 32 x 32 of a weight."""
    rows = WIDTH if square else 1
    return Scaling(data, (rows, WIDTH), (WIDTH, rows), E8M0)


@dataclass(frozen=True, kw_only=True)
class MXFP8BlockScaling(Recipe):
    """FP8 with a power-of-two scale of eight bits (E8M0) for every 32 elements along the axis that a GEMM sums.

    The scale is the smallest power of two that brings the largest magnitude into the format's range, data =
    cast(x / scale). Rows and columns are quantized from high precision, each along its own axis. Data times scale is
    exact in bfloat16, and where no tensor cores take the format that is what GEMMs multiply.

    square_weights: one scale for 32 x 32 of a weight, so that forward and input gradient read the same numbers.
    weights: how long quantized weights are kept, and backward: what the gradients' GEMMs multiply, as of
        `Float8BlockScaling`.
    fwd: format of inputs and weights; bwd: of gradients.
    Raises FuseOpsError for another value of any of them.
    """

    square_weights: bool = False
    weights: str = "none"
    backward: str | None = None
    fwd: torch.dtype = E4M3
    bwd: torch.dtype = E4M3

    def __post_init__(self) -> None:
        check_formats(self, self.fwd, self.bwd)
        check_choices(self, weights=POLICIES, backward=BACKWARDS, square_weights=(False, True))

    def roles(self) -> Roles:
        weight = mxfp8(self.fwd, self.square_weights)
        forward, grad = mxfp8(self.fwd), mxfp8(self.bwd)
        return Roles(forward, weight, grad, weights=self.weights, backward=self.backward)
