"""RMSNorm, alone and with the residual add before it; backward with the residual's gradient added.

Maths (float32, one rounding at each store):
    h = x + residual;  rstd = 1 / sqrt(mean(h^2) + eps);  y = h * rstd * (weight + weight_offset)
    dx = (w dy - x_hat mean(w dy x_hat)) rstd + dres;  dweight = sum over rows of dy x_hat;  x_hat = h * rstd
with mean=False sums in place of the means: x over its length.
The norm is taken of h as stored (rounded), so that fused equals unfused and backward needs only h
and rstd. dweight is summed in two stages of fixed order, so it repeats bit for bit on one kind of
GPU.
Shapes: x, residual, dy, dres (..., N), weight (N,) or None, rstd (...) and dweight (N,) float32; with `dims` the norm
is over the last axes together, and N stands for all of them.
Layout: columns are contiguous, rows may be strided, those of heads twice (tokens, heads). Rows wider than
MAX_WIDTH run the twin.
Hardware: sm_80 and later.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from fuseops.kernels import tiles
from fuseops.kernels.bias import sum_partials
from fuseops.kernels.configs import Config, Space
from fuseops.kernels.launch import chain, device, launch, overlap
from fuseops.kernels.precision import wide
from fuseops.kernels.registry import floats, kernel_op, on_meta
from fuseops.kernels.tiles import as_heads, as_rows, cdiv, check_shape, pow2, require


def _rmsnorm_fwd(
    x: Tensor,
    weight: Tensor | None,
    eps: float,
    weight_offset: float = 0.0,
    dims: int = 1,
    mean: bool = True,
) -> tuple[Tensor, Tensor]:
    full, axes = wide(x), tuple(range(-dims, 0))
    total = torch.mean if mean else torch.sum
    rstd = torch.rsqrt(total(full.square(), axes, keepdim=True) + eps)
    y = full * rstd
    if weight is not None:
        y = y * (weight.to(y.dtype) + weight_offset)
    return y.to(x.dtype), rstd.flatten(-dims).squeeze(-1)


def _add_rmsnorm_fwd(
    x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, weight_offset: float = 0.0
) -> tuple[Tensor, Tensor, Tensor]:
    h = (wide(x) + wide(residual)).to(x.dtype)
    y, rstd = _rmsnorm_fwd(h, weight, eps, weight_offset)
    return y, h, rstd


def _rmsnorm_bwd(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    rstd: Tensor,
    dres: Tensor | None = None,
    need_dw: bool = True,
    weight_offset: float = 0.0,
    dtype: torch.dtype | None = None,
    mean: bool = True,
) -> tuple[Tensor, Tensor]:
    full, grad = wide(x), wide(dy)
    dims = x.dim() - rstd.dim()
    axes, rows = tuple(range(-dims, 0)), tuple(range(rstd.dim()))
    rstd = rstd.view(*rstd.shape, *(1,) * dims)
    xhat = full * rstd
    dw = (grad * xhat).sum(rows) if rows else grad * xhat
    if weight is not None:
        grad = grad * (weight.to(grad.dtype) + weight_offset)
    total = torch.mean if mean else torch.sum
    dx = (grad - xhat * total(grad * xhat, axes, keepdim=True)) * rstd
    dx = dx if dres is None else dx + wide(dres)
    if not need_dw:
        return dx.to(x.dtype), dw.new_empty(0)
    return dx.to(x.dtype), dw if dtype is None else dw.to(dtype)


MAX_WIDTH = 1 << 14


def _fwd_candidates(dims: tuple[int, ...], itemsize: int) -> list[Config]:
    n = pow2(dims[-1])
    sizes = {(max(total // n, 1), max(4, min(n * max(total // n, 1) // per_warp, 32)))
             for total in (1024, 2048) for per_warp in (512, 1024)}  # fmt: skip
    return [
        {"BLOCK_R": rows, "BLOCK_N": n, "num_warps": pow2(warps)} for rows, warps in sorted(sizes)
    ]


def _bwd_candidates(dims: tuple[int, ...], itemsize: int) -> list[Config]:
    n = pow2(dims[-1])
    warps = pow2(n // 512, most=32, least=4)
    choices = [(max(2048 // n, 1), warps, 2, 3)]
    if 1 << 11 <= n * itemsize <= 1 << 13:  # more rows at once share one sum of dw
        choices.insert(0, ((1 << 14) // (n * itemsize), 8, 1, 3))
    elif n * itemsize > 1 << 14:  # wider rows leave no room to load ahead
        choices = [(1, warps, 4, 1)] if n <= 8192 else [(1, warps, 1, 1)]
    return [
        {"BLOCK_R": r, "BLOCK_N": n, "STAGES": stages, "PER_SM": per_sm, "num_warps": w}
        for r, w, per_sm, stages in choices
    ]


def fwd_default(rows: int, dims: tuple[int, ...], itemsize: int) -> Config:
    """Of short rows, such as heads, as many as make 2048 elements; one of longer ones."""
    choices = _fwd_candidates(dims, itemsize)
    return choices[-1] if dims[-1] <= 256 else choices[0]


FWD = Space("rmsnorm_fwd", _fwd_candidates, fwd_default)
BWD = Space("rmsnorm_bwd", _bwd_candidates)


def _cases(*, residual: bool = False, backward: bool = False) -> Iterator[tuple[Any, ...]]:
    sizes = [(torch.bfloat16, n) for n in (100, 128, 2048, 4096, 7168, 16384)] + [
        (torch.float16, 4096),
        (torch.float32, 4096),
    ]
    for dtype, n in sizes:
        x, weight = on_meta(8192, n, dtype=dtype), on_meta(n, dtype=dtype)
        rstd = floats(8192)
        for w in (weight, None) if n == 4096 else (weight,):
            if backward:
                yield from ((x, x, w, rstd, dres, w is not None, 0.0) for dres in (None, x))
            else:
                yield (x, *(x,) * residual, w, 1e-6, 0.0)
    q = on_meta(8192, 48, 128)[:, :32]
    w, rstd = q.new_empty(128), floats(8192, 32)
    for of_heads, mean in ((w, True), (None, False)):
        if backward:
            yield q, q, of_heads, rstd, None, mean, 0.0, None, mean
        elif not residual:
            yield q, of_heads, 1e-6, 0.0, 1, mean


@kernel_op(twin=_rmsnorm_fwd, fuses=True, cases=_cases)
def rmsnorm_fwd(
    x: Tensor, weight: Tensor | None, eps: float, weight_offset: float = 0.0, dims: int = 1, mean: bool = True,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(y, rstd): y = x * rstd * (weight + weight_offset), normed over the last `dims` axes."""
    if width(x, dims) > MAX_WIDTH:
        return _rmsnorm_fwd(x, weight, eps, weight_offset, dims, mean)
    y, _, rstd = _forward(x, None, weight, eps, weight_offset, dims, mean)
    return y, rstd


@kernel_op(twin=_add_rmsnorm_fwd, fuses=True, cases=lambda: _cases(residual=True))
def add_rmsnorm_fwd(
    x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, weight_offset: float = 0.0
) -> tuple[Tensor, Tensor, Tensor]:
    """(y, h, rstd): h = x + residual as stored, y and rstd of h."""
    check_shape("residual", residual, x.shape)
    if x.shape[-1] > MAX_WIDTH:
        return _add_rmsnorm_fwd(x, residual, weight, eps, weight_offset)
    return _forward(x, residual, weight, eps, weight_offset, 1, True)


@kernel_op(twin=_rmsnorm_bwd, fuses=True, cases=lambda: _cases(backward=True))
def rmsnorm_bwd(
    dy: Tensor, x: Tensor, weight: Tensor | None, rstd: Tensor, dres: Tensor | None = None,
    need_dw: bool = True, weight_offset: float = 0.0, dtype: torch.dtype | None = None,
    mean: bool = True,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(dx + dres, dw); x is what was normed (h after a residual add), dw is empty if not needed.

    dtype: of dw, float32 if not given; its sum is float32 in any case, and rounded once.
    """
    dims = x.dim() - rstd.dim()
    n, shape = width(x, dims), x.shape[rstd.dim() :]
    check_shape("weight", weight, shape)
    check_shape("dy", dy, x.shape)
    require(
        dims > 0 and rstd.shape == x.shape[: rstd.dim()],
        f"rstd is {tuple(rstd.shape)}, expected the leading axes of {tuple(x.shape)}.",
    )
    if n > MAX_WIDTH:
        return _rmsnorm_bwd(dy, x, weight, rstd, dres, need_dw, weight_offset, dtype, mean)
    x3, dy3, rstd = as_heads(x, dims), as_heads(dy, dims), rstd.contiguous()
    dres2, rows = x if dres is None else as_rows(dres, dims), rstd.numel()
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    config = dict(BWD.pick(rows, (n,), x))
    programs = tiles.row_programs(rows, 1, config, x)
    partial = torch.empty(programs if need_dw else 0, n, dtype=torch.float32, device=x.device)
    launch(
        device("norm").rmsnorm_bwd_kernel, (programs,),
        dy3, x3, x3 if weight is None else weight.contiguous(), rstd, dres2, dx, partial,
        rows, n, dy3.shape[1], x3.shape[1], *dy3.stride()[:2], *x3.stride()[:2], dres2.stride(0),
        float(weight_offset),
        HAS_WEIGHT=weight is not None, HAS_DRES=dres is not None, NEED_DW=need_dw, MEAN=mean,
        **chain(x.device)[0], AT_ONCE=tiles.rows_at_once(config, x.itemsize), **config,
    )  # fmt: skip
    if not need_dw:
        return dx, partial.new_empty(0)
    return dx, sum_partials(partial, dtype or torch.float32).view(shape)


def _forward(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, eps: float, offset: float, dims: int, mean: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    n = width(x, dims)
    check_shape("weight", weight, x.shape[-dims:])
    x3 = as_heads(x, dims)
    residual2 = x if residual is None else as_rows(residual)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    h = y if residual is None else torch.empty_like(y)
    rstd = torch.empty(x.shape[:-dims], dtype=torch.float32, device=x.device)
    rows = rstd.numel()
    config = FWD.pick(rows, (n,), x)
    launch(
        device("norm").rmsnorm_fwd_kernel, (cdiv(rows, config["BLOCK_R"]),),
        x3, residual2, x3 if weight is None else weight.contiguous(), y, h, rstd,
        rows, n, x3.shape[1], *x3.stride()[:2], residual2.stride(0), float(eps), float(offset),
        HAS_RESIDUAL=residual is not None, HAS_WEIGHT=weight is not None, MEAN=mean,
        **overlap(x.device), **config,
    )  # fmt: skip
    return y, h, rstd


def width(x: Tensor, dims: int) -> int:
    """Columns of x whose last `dims` axes are normed."""
    return x.shape[-1] if dims == 1 else x.shape[-dims:].numel()
