"""LayerNorm, alone and with the residual add before it; backward with the residual's gradient added.

Maths (float32, one rounding at each store):
    h = x + residual, as stored;  mean and variance of its rows
    rstd = 1 / sqrt(var + eps);  y = x_hat * (weight + weight_offset) + bias
    dx = (w dy - mean(w dy) - x_hat mean(w dy x_hat)) rstd + dres;  x_hat = (x - mean) * rstd
    dweight and dbias = sums over rows of dy x_hat and of dy
The variance is of the centred row, in registers. dweight and dbias are summed in two stages of fixed order; of rows
wider than BOTH_SUMS, for which one sum fills the registers, dbias is a pass of its own.
Shapes: x, residual, dy, dres (..., N), weight and bias (N,) or None, mean and rstd (...) float32, dweight and dbias
(N,); with `dims` the norm is over the last axes together, and N stands for all of them.
Layout: columns are contiguous, rows may be strided, those of heads twice. Rows wider than MAX_WIDTH run the twin.
Hardware: sm_80 and later.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fuseops.kernels import norm, tiles
from fuseops.kernels.bias import bias_bwd, sum_all_partials
from fuseops.kernels.configs import Config, Space
from fuseops.kernels.launch import chain, device, launch, overlap
from fuseops.kernels.norm import MAX_WIDTH, width
from fuseops.kernels.precision import wide
from fuseops.kernels.registry import floats, kernel_op, on_meta
from fuseops.kernels.tiles import as_heads, as_rows, cdiv, check_shape, pow2, require


def _layernorm_fwd(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    weight_offset: float = 0.0,
    dims: int = 1,
) -> tuple[Tensor, Tensor, Tensor]:
    full, axes = wide(x), tuple(range(-dims, 0))
    mean = full.mean(axes, keepdim=True)
    centred = full - mean
    rstd = torch.rsqrt(centred.square().mean(axes, keepdim=True) + eps)
    y = centred * rstd
    if weight is not None:
        y = y * (weight.to(y.dtype) + weight_offset)
    if bias is not None:
        y = y + bias.to(y.dtype)
    mean, rstd = (t.flatten(-dims).squeeze(-1) for t in (mean, rstd))
    return y.to(x.dtype), mean, rstd


def _add_layernorm_fwd(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    weight_offset: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    h = (wide(x) + wide(residual)).to(x.dtype)
    y, mean, rstd = _layernorm_fwd(h, weight, bias, eps, weight_offset)
    return y, h, mean, rstd


def _layernorm_bwd(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    mean: Tensor,
    rstd: Tensor,
    dres: Tensor | None = None,
    need_dw: bool = True,
    need_db: bool = True,
    weight_offset: float = 0.0,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    full, grad = wide(x), wide(dy)
    dims = x.dim() - rstd.dim()
    axes, rows = tuple(range(-dims, 0)), tuple(range(rstd.dim()))
    mean, rstd = (t.view(*t.shape, *(1,) * dims) for t in (mean, rstd))
    xhat = (full - mean) * rstd
    sums = [t.sum(rows) if rows else t for t in (grad * xhat, grad)]
    if weight is not None:
        grad = grad * (weight.to(grad.dtype) + weight_offset)
    along = (grad * xhat).mean(axes, keepdim=True)
    dx = (grad - grad.mean(axes, keepdim=True) - xhat * along) * rstd
    dx = dx if dres is None else dx + wide(dres)
    dw, db = (
        t.to(dtype or t.dtype) if need else t.new_empty(0)
        for t, need in zip(sums, (need_dw, need_db), strict=True)
    )
    return dx.to(x.dtype), dw, db


BOTH_SUMS = 1 << 13


def _bwd_candidates(dims: tuple[int, ...], itemsize: int, residual: bool = False) -> list[Config]:
    """As of RMSNorm, with two sums in registers: loads ahead, of one program a multiprocessor where rows are long, and
    further ahead where no gradient of a residual is loaded too.
    """
    n = pow2(dims[-1])
    row = n * itemsize
    warps = pow2(n // 256, most=32, least=4)
    choices = [(max(2048 // n, 1), warps, 2, 2), (max(2048 // n, 1), warps, 1, 3)]
    if 1 << 11 <= row <= 1 << 13:
        choices = [((1 << 14) // row, 8, 1, 3), (1, 8, 2, 3)]
        if row == 1 << 13 and not residual:
            choices.insert(0, (2, 16, 1, 4))
    elif row > 1 << 13:  # wider rows leave no room to load ahead
        choices = [(1, warps, 2 if n <= 8192 else 1, 1)]
    return [
        {"BLOCK_R": r, "BLOCK_N": n, "STAGES": stages, "PER_SM": per_sm, "num_warps": w}
        for r, w, per_sm, stages in choices
    ]


FWD = Space("layernorm_fwd", norm.FWD.candidates, norm.fwd_default)
BWD = Space("layernorm_bwd", _bwd_candidates)
ADD_BWD = Space("add_layernorm_bwd", partial(_bwd_candidates, residual=True))


def _cases(*, residual: bool = False, backward: bool = False) -> Iterator[tuple[Any, ...]]:
    sizes = [(torch.bfloat16, n) for n in (100, 2048, 4096, 16384)]
    for dtype, n in [*sizes, (torch.float16, 4096), (torch.float32, 4096)]:
        x = on_meta(8192, n, dtype=dtype)
        weight, row = on_meta(n, dtype=dtype), floats(8192)
        for w in (weight, None) if n == 4096 else (weight,):
            if backward:
                needs = w is not None, w is not None
                yield from ((x, x, w, row, row, dres, *needs) for dres in (None, x))
            else:
                yield (x, *(x,) * residual, w, w, 1e-5)
    q = on_meta(8192, 48, 128)[:, :32]
    w, row = q.new_empty(128), floats(8192, 32)
    if backward:
        yield q, q, w, row, row, None, True, False
    elif not residual:
        yield q, w, None, 1e-5


@kernel_op(twin=_layernorm_fwd, fuses=True, cases=_cases)
def layernorm_fwd(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, weight_offset: float = 0.0,
    dims: int = 1,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(y, mean, rstd): y = (x - mean) * rstd * (weight + weight_offset) + bias, over the last `dims` axes."""
    if width(x, dims) > MAX_WIDTH:
        return _layernorm_fwd(x, weight, bias, eps, weight_offset, dims)
    y, _, mean, rstd = _forward(x, None, weight, bias, eps, weight_offset, dims)
    return y, mean, rstd


@kernel_op(twin=_add_layernorm_fwd, fuses=True, cases=lambda: _cases(residual=True))
def add_layernorm_fwd(
    x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float,
    weight_offset: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """(y, h, mean, rstd): h = x + residual as stored, the others of h."""
    check_shape("residual", residual, x.shape)
    if x.shape[-1] > MAX_WIDTH:
        return _add_layernorm_fwd(x, residual, weight, bias, eps, weight_offset)
    return _forward(x, residual, weight, bias, eps, weight_offset, 1)


@kernel_op(twin=_layernorm_bwd, fuses=True, cases=lambda: _cases(backward=True))
def layernorm_bwd(
    dy: Tensor, x: Tensor, weight: Tensor | None, mean: Tensor, rstd: Tensor,
    dres: Tensor | None = None, need_dw: bool = True, need_db: bool = True,
    weight_offset: float = 0.0, dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(dx + dres, dw, db); x is what was normed (h after a residual add), what is not needed is empty.

    dtype: of dw and db, float32 if not given; their sums are float32 in any case, and rounded once.
    """
    dims = x.dim() - rstd.dim()
    n, shape = width(x, dims), x.shape[rstd.dim() :]
    check_shape("weight", weight, shape)
    check_shape("dy", dy, x.shape)
    require(
        dims > 0 and mean.shape == rstd.shape == x.shape[: rstd.dim()],
        f"mean and rstd are {tuple(mean.shape)} and {tuple(rstd.shape)}, expected the leading axes of "
        f"{tuple(x.shape)}.",
    )
    if n > MAX_WIDTH:
        return _layernorm_bwd(
            dy, x, weight, mean, rstd, dres, need_dw, need_db, weight_offset, dtype
        )
    x3, dy3, rows = as_heads(x, dims), as_heads(dy, dims), rstd.numel()
    dres2 = x if dres is None else as_rows(dres, dims)
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    config = dict((BWD if dres is None else ADD_BWD).pick(rows, (n,), x))
    programs = tiles.row_programs(rows, 1, config, x)
    wanted = need_dw, need_db and n <= BOTH_SUMS
    sums = torch.empty(sum(wanted), programs, n, dtype=torch.float32, device=x.device)
    launch(
        device("layer_norm").layernorm_bwd_kernel, (programs,),
        dy3, x3, x3 if weight is None else weight.contiguous(), mean.contiguous(), rstd.contiguous(),
        dres2, dx, sums,
        rows, n, dy3.shape[1], x3.shape[1], *dy3.stride()[:2], *x3.stride()[:2], dres2.stride(0),
        float(weight_offset),
        HAS_WEIGHT=weight is not None, HAS_DRES=dres is not None, NEED_DW=wanted[0], NEED_DB=wanted[1],
        **chain(x.device)[0], AT_ONCE=tiles.rows_at_once(config, x.itemsize), **config,
    )  # fmt: skip
    kept = iter(sum_all_partials(sums, dtype or torch.float32))
    dw, db = (next(kept).view(shape) if want else sums.new_empty(0) for want in wanted)
    if need_db and not wanted[1]:
        db = bias_bwd.launcher(dy.reshape(-1, n), dtype).view(shape)
    return dx, dw, db


def _forward(
    x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float, offset: float,
    dims: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    n = width(x, dims)
    check_shape("weight", weight, x.shape[-dims:])
    check_shape("bias", bias, x.shape[-dims:])
    x3 = as_heads(x, dims)
    residual2 = x if residual is None else as_rows(residual)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    h = y if residual is None else torch.empty_like(y)
    mean = torch.empty(x.shape[:-dims], dtype=torch.float32, device=x.device)
    rstd, rows = torch.empty_like(mean), mean.numel()
    config = FWD.pick(rows, (n,), x)
    launch(
        device("layer_norm").layernorm_fwd_kernel, (cdiv(rows, config["BLOCK_R"]),),
        x3, residual2, *(x3 if t is None else t.contiguous() for t in (weight, bias)), y, h, mean, rstd,
        rows, n, x3.shape[1], *x3.stride()[:2], residual2.stride(0), float(eps), float(offset),
        HAS_RESIDUAL=residual is not None, HAS_WEIGHT=weight is not None, HAS_BIAS=bias is not None,
        **overlap(x.device), **config,
    )  # fmt: skip
    return y, h, mean, rstd
