"""The carrier of a quantized tensor is the autograd tensor that gets its gradient: a shape and a dtype without values.

A carrier is one NaN, expanded: two bytes for a tensor of any size, and a computation that reads it by mistake gives
NaN. Its gradient is that of the high-precision tensor, in that dtype: autograd would round the gradient of FP8 codes to
FP8, and would keep alive components that are freed or moved on their own.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor


def carrier_of(
    x: Tensor, dtype: torch.dtype | None = None, device: torch.device | None = None
) -> Tensor:
    """A carrier shaped as x that passes its gradient on to x.   dtype, device: by default those of x"""
    carrier: Tensor = _Carrier.apply(x, dtype or x.dtype, device or x.device)  # type: ignore[no-untyped-call]
    return carrier


def attach_carrier(carrier: Tensor, values: Tensor) -> Tensor:
    """`values` as a tensor whose gradient goes to the carrier, which has their shape and dtype."""
    attached: Tensor = _AttachCarrier.apply(carrier, values)  # type: ignore[no-untyped-call]
    return attached


def placeholder(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor of this shape without memory for its values, as a carrier that needs no gradient."""
    return torch.full((), torch.nan, dtype=dtype, device=device).expand(tuple(shape))


class _Carrier(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, dtype: torch.dtype, device: torch.device) -> Tensor:
        ctx.source = x.dtype, x.device
        return placeholder(x.shape, dtype, device)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        dtype, device = ctx.source
        return dy.to(device=device, dtype=dtype), None, None


class _AttachCarrier(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, carrier: Tensor, values: Tensor) -> Tensor:
        return values

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        return dy, None
