"""Ops that are one kernel on CUDA and several on the CPU, whose kernels a dry run uses."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from fuseops import torch_private
from fuseops.attributes import attributes_set

_lock = threading.RLock()


@contextmanager
def fused_ops() -> Iterator[None]:
    """Inside, RMSNorm of fake CPU tensors saves what CUDA's kernel saves: its input and a number for each row. It
    replaces torch's function, since a checkpoint runs its recomputation outside of dispatch modes.
    """
    with _lock:
        composed = torch.rms_norm

        def rms_norm(
            input: Tensor,
            normalized_shape: Sequence[int],
            weight: Tensor | None = None,
            eps: float | None = None,
        ) -> Tensor:
            if not _is_fake_of_cuda(input):
                return composed(input, normalized_shape, weight, eps)
            if torch_private.any_autocast():  # to float32, as on CUDA
                input, weight = _to_float32(input), None if weight is None else _to_float32(weight)
            if weight is not None and weight.dtype != input.dtype:  # CUDA's kernel does not take it
                return composed(input, normalized_shape, weight, eps)
            dims = len(normalized_shape)
            y, _ = FusedRmsNorm.apply(input, weight, dims)  # type: ignore[no-untyped-call]
            normed: Tensor = y
            return normed

        with attributes_set([(torch, "rms_norm", rms_norm)]):
            yield


def _is_fake_of_cuda(x: Tensor) -> bool:
    """Whether x stands for a CUDA tensor: fakes on CUDA run its kernel themselves."""
    if not torch_private.is_fake(x) or x.device.type != "cpu":
        return False
    if torch_private.inside_transform():
        return False
    return x.dim() not in (4, 5) or x.is_contiguous()  # no channels-last images


def _to_float32(t: Tensor) -> Tensor:
    return t.float() if t.dtype in (torch.bfloat16, torch.float16) else t


class FusedRmsNorm(torch.autograd.Function):
    """A `FusedRmsNorm` has the name of the node of CUDA's kernel, so that its saved tensors get the same names."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, dims: int) -> tuple[Tensor, Tensor]:
        wide = torch.float64 if x.dtype == torch.float64 else torch.float32
        rstd = x.new_empty((*x.shape[:-dims], *[1] * dims), dtype=wide)
        ctx.save_for_backward(x, weight, rstd)
        ctx.set_materialize_grads(False)
        y = x.clone() if weight is None else x * weight  # reads and writes as many bytes
        return y, rstd

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, None]:
        (x, weight, _), dy = ctx.saved_tensors, grads[0]
        dx = dy * x if ctx.needs_input_grad[0] else None
        return dx, dy.sum_to_size(weight.shape) if ctx.needs_input_grad[1] else None, None
