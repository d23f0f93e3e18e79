"""Grouped GEMM launchers: which backend runs, and one custom op each for traced and fake tensors.

The reference loop reads `offs`, so it must not be traced: compiled graphs and fake tensors see `fuseops::grouped_*`,
whose fakes are written by hand. CUDA runs `torch.nn.functional.grouped_mm` where it takes the dtype, otherwise a masked
dense product per group, which needs no host synchronisation either.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from . import reference

_CUDA_NATIVE = torch.bfloat16  # the dtype that F.grouped_mm takes on every supported torch


def _native(*tensors: Tensor) -> bool:
    """F.grouped_mm wants bf16 and rows of a multiple of 16 bytes."""
    return all(t.dtype is _CUDA_NATIVE and t.shape[-1] % 8 == 0 for t in tensors)


def _one_hot(offs: Tensor, rows: int, dtype: torch.dtype) -> Tensor:
    group = reference.group_of_row(offs, rows)
    return (group.unsqueeze(-1) == torch.arange(offs.shape[0], device=offs.device)).to(dtype)


def _cuda_mm(x: Tensor, weight: Tensor, offs: Tensor) -> Tensor:
    padding = reference.padding_mask(offs, x.shape[0])
    if _native(x, weight) and weight.shape[1] % 8 == 0:
        return F.grouped_mm(x.contiguous(), weight.transpose(-2, -1), offs=offs).masked_fill(
            padding, 0
        )
    member = _one_hot(offs, x.shape[0], torch.bool)
    y = x.new_zeros(x.shape[0], weight.shape[1])
    for e in range(weight.shape[0]):
        y = torch.where(member[:, e : e + 1], x @ weight[e].t(), y)
    return y


def _cuda_wgrad(dy: Tensor, x: Tensor, offs: Tensor) -> Tensor:
    padding = reference.padding_mask(offs, x.shape[0])
    dy, x = dy.masked_fill(padding, 0), x.masked_fill(padding, 0)
    if _native(dy, x):
        return F.grouped_mm(dy.t(), x, offs=offs)
    member = _one_hot(offs, x.shape[0], torch.bool)
    zero = dy.new_zeros(())
    return torch.stack(
        [torch.where(member[:, e : e + 1], dy, zero).t() @ x for e in range(offs.shape[0])]
    )


def _mm(x: Tensor, weight: Tensor, offs: Tensor) -> Tensor:
    return _cuda_mm(x, weight, offs) if x.is_cuda else reference.grouped_mm(x, weight, offs)


def _wgrad(dy: Tensor, x: Tensor, offs: Tensor) -> Tensor:
    return _cuda_wgrad(dy, x, offs) if x.is_cuda else reference.grouped_wgrad(dy, x, offs)


def _bias_bwd(dy: Tensor, offs: Tensor) -> Tensor:
    if not dy.is_cuda:
        return reference.grouped_bias_bwd(dy, offs)
    wide = dy.to(reference.accumulator(dy.dtype))
    return _one_hot(offs, dy.shape[0], wide.dtype).t() @ wide


_mm_op = torch.library.custom_op("fuseops::grouped_mm", _mm, mutates_args=())
_wgrad_op = torch.library.custom_op("fuseops::grouped_wgrad", _wgrad, mutates_args=())
_bias_bwd_op = torch.library.custom_op("fuseops::grouped_bias_bwd", _bias_bwd, mutates_args=())


@_mm_op.register_fake
def _(x: Tensor, weight: Tensor, offs: Tensor) -> Tensor:
    return x.new_empty(x.shape[0], weight.shape[1])


@_wgrad_op.register_fake
def _(dy: Tensor, x: Tensor, offs: Tensor) -> Tensor:
    return x.new_empty(offs.shape[0], dy.shape[1], x.shape[1])


@_bias_bwd_op.register_fake
def _(dy: Tensor, offs: Tensor) -> Tensor:
    return dy.new_empty(offs.shape[0], dy.shape[1], dtype=reference.accumulator(dy.dtype))


def _plain(t: Tensor) -> bool:
    """A real tensor of exactly torch's own types, outside a traced region: the body itself may run."""
    return type(t) in (Tensor, nn.Parameter) and not t.is_meta and not torch.compiler.is_compiling()


def _launch(
    t: Tensor, body: Callable[..., Tensor], op: Callable[..., Tensor], *args: Tensor
) -> Tensor:
    return body(*args) if _plain(t) else op(*args)


def grouped_mm(x: Tensor, weight: Tensor, offs: Tensor) -> Tensor:
    """See `reference.grouped_mm`.   (R, K), (E, N, K), (E,) int32 -> (R, N)"""
    return _launch(x, _mm, _mm_op, x, weight, offs)


def grouped_wgrad(dy: Tensor, x: Tensor, offs: Tensor) -> Tensor:
    """See `reference.grouped_wgrad`.   (R, N), (R, K), (E,) int32 -> (E, N, K)"""
    return _launch(x, _wgrad, _wgrad_op, dy, x, offs)


def grouped_bias_bwd(dy: Tensor, offs: Tensor) -> Tensor:
    """See `reference.grouped_bias_bwd`.   (R, N), (E,) int32 -> (E, N)"""
    return _launch(dy, _bias_bwd, _bias_bwd_op, dy, offs)


def scaled_grouped_mm(
    a: Tensor, b: Tensor, scale: Tensor, offs: Tensor, dtype: torch.dtype
) -> Tensor:
    """grouped_mm with one scale a group, accumulated in float32.   fp8 (R, K), (E, N, K), (E,) float32 -> (R, N)"""
    y = grouped_mm(a.to(torch.float32), b.to(torch.float32), offs)
    by_row = torch.cat([scale, scale.new_zeros(1)])[reference.group_of_row(offs, a.shape[0])]
    return (y * by_row.unsqueeze(-1)).to(dtype)


def scaled_grouped_wgrad(
    dy: Tensor, x: Tensor, scale: Tensor, offs: Tensor, dtype: torch.dtype
) -> Tensor:
    """grouped_wgrad with one scale a group.   fp8 (R, N), (R, K), (E,) float32 -> (E, N, K)"""
    dw = grouped_wgrad(dy.to(torch.float32), x.to(torch.float32), offs)
    return (dw * scale[:, None, None]).to(dtype)
