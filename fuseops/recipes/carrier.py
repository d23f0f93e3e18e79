"""Autograd goes through a quantized tensor by a carrier, which has a shape, a dtype and a gradient, and no values.

A carrier is one NaN, expanded: two bytes however large the tensor is, and who computes with it by mistake sees it. The
gradient that arrives at it is that of the high-precision tensor, in its dtype; autograd would round one of codes to
their format, and a component may be freed or moved alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def carrier_of(
    x: Tensor, dtype: torch.dtype | None = None, device: torch.device | None = None
) -> Tensor:
    """A carrier of the shape of x through which gradients go to x, by default of its dtype and device."""
    carrier: Tensor = _Carrier.apply(x, dtype or x.dtype, device or x.device)  # type: ignore[no-untyped-call]
    return carrier


def through(carrier: Tensor, values: Tensor) -> Tensor:
    """The values, whose gradient goes to the carrier.   values of its shape and dtype"""
    found: Tensor = _Through.apply(carrier, values)  # type: ignore[no-untyped-call]
    return found


def blank(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A carrier of no gradient."""
    return torch.full((), torch.nan, dtype=dtype, device=device).expand(tuple(shape))


class _Carrier(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
        ctx.of = x.dtype, x.device
        return blank(x.shape, dtype, device)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        dtype, device = ctx.of
        return dy.to(device=device, dtype=dtype), None, None


class _Through(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, carrier: Tensor, values: Tensor) -> Tensor:
        return values

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        return dy, None
