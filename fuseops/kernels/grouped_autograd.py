"""Derivatives of the grouped GEMMs, for traced code that differentiates a call (compiled under `fo.reference()`).

Eager autograd differentiates the twins' loop; that reads `offs`, so traced code sees the registered ops, which had
none: a gradient was left out without a word.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fuseops.errors import FuseOpsError
from fuseops.kernels.bias import grouped_bias_bwd
from fuseops.kernels.grouped import grouped_mm, grouped_wgrad
from fuseops.kernels.registry import KernelOp


def _setup_mm(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, offs, tiles, bias, index, probs = inputs
    _refuse(index)
    ctx.save_for_backward(x, weight, offs, tiles, None if probs is None else bias, probs)
    ctx.bias = None if bias is None else bias.dtype


def _mm_backward(ctx: Any, dy: Tensor) -> tuple[Tensor | None, ...]:
    x, weight, offs, tiles, scaled, probs = ctx.saved_tensors
    wants_x, wants_weight, _, *rest = ctx.needs_input_grad  # arguments left out are not in it
    dx = grouped_mm.op(dy, weight.transpose(1, 2), offs, tiles) if wants_x else None
    dw = grouped_wgrad.op(dy, x, offs, tiles) if wants_weight else None
    dbias = dprobs = None
    if True in rest[1:]:  # of a bias, or of what scales it
        dbias, dots = grouped_bias_bwd(dy, offs, probs, scaled)
        dbias, dprobs = dbias.to(ctx.bias), None if probs is None else dots
    return dx, dw, None, None, dbias, None, dprobs


def _setup_wgrad(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    dy, x, offs, tiles, dy_index, x_index = inputs
    _refuse(dy_index if x_index is None else x_index)
    ctx.save_for_backward(dy, x, offs, tiles)


def _wgrad_backward(ctx: Any, d: Tensor) -> tuple[Tensor | None, ...]:
    dy, x, offs, tiles = ctx.saved_tensors
    wants_dy, wants_x, *_ = ctx.needs_input_grad
    ddy = grouped_mm.op(x, d, offs, tiles) if wants_dy else None
    dx = grouped_mm.op(dy, d.transpose(1, 2), offs, tiles) if wants_x else None
    return ddy, dx, None, None, None, None


def _refuse(index: Tensor | None) -> None:
    if index is not None:
        raise FuseOpsError(
            "a grouped GEMM with an index has no derivative: gather the rows first (kernels.gather_rows)."
        )


def _register(op: KernelOp[Any, Any], setup: Any, backward: Any) -> None:
    torch.library.register_autograd(op.label, backward, setup_context=setup)


_register(grouped_mm, _setup_mm, _mm_backward)
_register(grouped_wgrad, _setup_wgrad, _wgrad_backward)
