"""Ops that are one kernel on CUDA and several on the CPU, by whose kernels a dry run tells what is saved."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode


class FusedOps(TorchFunctionMode):
    """Inside `FusedOps` RMSNorm saves what CUDA's kernel saves, its input and a number a row: no values are right."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        if func in (F.rms_norm, torch.rms_norm):
            return _rms_norm(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _rms_norm(
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Tensor:
    if weight is not None and weight.dtype != input.dtype:
        return torch.rms_norm(input, normalized_shape, weight, eps)  # no kernel for it: composed
    y, _ = FusedRmsNorm.apply(input, weight, len(normalized_shape))  # type: ignore[no-untyped-call]
    normed: Tensor = y
    return normed


class FusedRmsNorm(torch.autograd.Function):
    """A `FusedRmsNorm` has the name of the node that CUDA's kernel makes, by which the plan knows what it saves."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, dims: int) -> tuple[Tensor, Tensor]:
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        rstd = x.new_empty((*x.shape[:-dims], *[1] * dims), dtype=wide)
        ctx.save_for_backward(x, weight, rstd)
        y = x.clone() if weight is None else x * weight  # reads and writes as many bytes
        return y, rstd

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, Tensor | None, None]:
        (x, weight, _), dy = ctx.saved_tensors, grads[0]
        return dy * x, None if weight is None else dy.sum_to_size(weight.shape), None
