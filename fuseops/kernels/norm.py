"""RMSNorm and LayerNorm, alone and with the residual add before it; backward with the residual's gradient added.

Maths (float32, one rounding at each store), of RMSNorm with mean and bias 0 and without dbias:
    h = x + residual, as stored;  c = h - mean, mean over its rows
    rstd = 1 / sqrt(mean(c^2) + eps);  x_hat = c * rstd;  y = x_hat * (weight + weight_offset) + bias
    dx = (w dy - mean(w dy) - x_hat mean(w dy x_hat)) rstd + dres, of RMSNorm without the first mean
    dweight and dbias = sums over rows of dy x_hat and of dy
with mean=False RMSNorm takes sums in place of the means: x over its length.
The norm is taken of h as stored (rounded), so that fused equals unfused and backward needs only h and the statistics;
the variance is of the centred row, in registers. dweight and dbias are summed in two stages of fixed order, so they
repeat bit for bit on one kind of GPU; of rows wider than BOTH_SUMS, for which one sum fills the registers, dbias is a
pass of its own.
Shapes: x, residual, dy, dres (..., N), weight and bias (N,) or None, mean and rstd (...) float32, dweight and dbias
(N,); with `dims` the norm is over the last axes together, and N stands for all of them.
Layout: columns are contiguous, rows may be strided, those of heads twice (tokens, heads). Rows wider than
MAX_WIDTH run the twin.
Hardware: sm_80 and later.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from torch import Tensor

from fuseops.kernels import tiles
from fuseops.kernels.bias import bias_bwd, sum_all_partials
from fuseops.kernels.configs import Config, Space
from fuseops.kernels.launch import device, launch, pdl_chain, pdl_overlap
from fuseops.kernels.registry import Cases, floats, kernel_op, on_meta
from fuseops.kernels.tiles import (
    as_heads,
    as_rows,
    cdiv,
    check_shape,
    pointers,
    pow2,
    require,
    upcast,
)


def _rmsnorm_fwd(
    x: Tensor,
    weight: Tensor | None,
    eps: float,
    weight_offset: float = 0.0,
    dims: int = 1,
    mean: bool = True,
) -> tuple[Tensor, Tensor]:
    full, axes = upcast(x), tuple(range(-dims, 0))
    total = torch.mean if mean else torch.sum
    rstd = torch.rsqrt(total(full.square(), axes, keepdim=True) + eps)
    y = full * rstd
    if weight is not None:
        y = y * (weight.to(y.dtype) + weight_offset)
    return y.to(x.dtype), rstd.flatten(-dims).squeeze(-1)


def _layernorm_fwd(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    weight_offset: float = 0.0,
    dims: int = 1,
) -> tuple[Tensor, Tensor, Tensor]:
    full = upcast(x)
    mean = full.mean(tuple(range(-dims, 0)), keepdim=True)
    y, rstd = _rmsnorm_fwd(full - mean, weight, eps, weight_offset, dims)
    y = y if bias is None else y + bias.to(y.dtype)
    return y.to(x.dtype), mean.flatten(-dims).squeeze(-1), rstd


def _add_rmsnorm_fwd(
    x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, weight_offset: float = 0.0
) -> tuple[Tensor, Tensor, Tensor]:
    h = (upcast(x) + upcast(residual)).to(x.dtype)
    y, rstd = _rmsnorm_fwd(h, weight, eps, weight_offset)
    return y, h, rstd


def _add_layernorm_fwd(
    x: Tensor,
    residual: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    eps: float,
    weight_offset: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    h = (upcast(x) + upcast(residual)).to(x.dtype)
    y, mean, rstd = _layernorm_fwd(h, weight, bias, eps, weight_offset)
    return y, h, mean, rstd


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
    total = torch.mean if mean else torch.sum
    dx, by_row, _ = _gradients(dy, x, weight, None, rstd, dres, weight_offset, total)
    return dx, _sum_of_rows(by_row, rstd.dim(), need_dw, dtype)


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
    dx, *by_row = _gradients(dy, x, weight, mean, rstd, dres, weight_offset)
    wanted = zip(by_row, (need_dw, need_db), strict=True)
    dw, db = (_sum_of_rows(t, rstd.dim(), need, dtype) for t, need in wanted)
    return dx, dw, db


def _gradients(
    dy: Tensor,
    x: Tensor,
    weight: Tensor | None,
    mean: Tensor | None,
    rstd: Tensor,
    dres: Tensor | None,
    weight_offset: float,
    total: Callable[..., Tensor] = torch.mean,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dx, summands of dw, summands of db).   mean: None for RMSNorm"""
    full, grad = upcast(x), upcast(dy)
    dims = x.dim() - rstd.dim()
    axes, ones = tuple(range(-dims, 0)), (1,) * dims
    centred = full if mean is None else full - mean.view(*mean.shape, *ones)
    rstd = rstd.view(*rstd.shape, *ones)
    xhat = centred * rstd
    by_row = grad * xhat, grad
    if weight is not None:
        grad = grad * (weight.to(grad.dtype) + weight_offset)
    along = total(grad * xhat, axes, keepdim=True)
    even = grad if mean is None else grad - grad.mean(axes, keepdim=True)
    dx = (even - xhat * along) * rstd
    dx = dx if dres is None else dx + upcast(dres)
    return dx.to(x.dtype), *by_row


def _sum_of_rows(t: Tensor, axes: int, need: bool, dtype: torch.dtype | None) -> Tensor:
    """The sum over `axes` leading axes; empty where it is not needed."""
    if not need:
        return t.new_empty(0)
    total = t.sum(tuple(range(axes))) if axes else t
    return total if dtype is None else total.to(dtype)


MAX_WIDTH = 1 << 14
BOTH_SUMS = 1 << 13


def _fwd_candidates(dims: tuple[int, ...], itemsize: int) -> list[Config]:
    n = pow2(dims[-1])
    sizes = {(max(total // n, 1), max(4, min(n * max(total // n, 1) // per_warp, 32)))
             for total in (1024, 2048) for per_warp in (512, 1024)}  # fmt: skip
    return [
        {"BLOCK_R": rows, "BLOCK_N": n, "num_warps": pow2(warps)} for rows, warps in sorted(sizes)
    ]


def _fwd_default(rows: int, dims: tuple[int, ...], itemsize: int) -> Config:
    """Of short rows, such as heads, as many as make 2048 elements; one of longer ones."""
    choices = _fwd_candidates(dims, itemsize)
    return choices[-1] if dims[-1] <= 256 else choices[0]


def _rms_bwd_candidates(dims: tuple[int, ...], itemsize: int) -> list[Config]:
    n = pow2(dims[-1])
    warps = pow2(n // 512, most=32, least=4)
    choices = [(max(2048 // n, 1), warps, 2, 3)]
    if 1 << 11 <= n * itemsize <= 1 << 13:  # more rows at once share one sum of dw
        choices.insert(0, ((1 << 14) // (n * itemsize), 8, 1, 3))
    elif n * itemsize > 1 << 14:  # wider rows leave no room to load ahead
        choices = [(1, warps, 4, 1)] if n <= 8192 else [(1, warps, 1, 1)]
    return _loops(n, choices)


def _layer_bwd_candidates(
    dims: tuple[int, ...], itemsize: int, residual: bool = False
) -> list[Config]:
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
    return _loops(n, choices)


def _loops(n: int, choices: list[tuple[int, int, int, int]]) -> list[Config]:
    """Configurations of programs that loop over rows.   choices: (rows at a time, warps, programs an SM, loads
    ahead)
    """
    return [
        {"BLOCK_R": r, "BLOCK_N": n, "STAGES": stages, "PER_SM": per_sm, "num_warps": w}
        for r, w, per_sm, stages in choices
    ]


RMS_FWD = Space("rmsnorm_fwd", _fwd_candidates, _fwd_default)
RMS_BWD = Space("rmsnorm_bwd", _rms_bwd_candidates)
LAYER_FWD = Space("layernorm_fwd", _fwd_candidates, _fwd_default)
LAYER_BWD = Space("layernorm_bwd", _layer_bwd_candidates)
LAYER_ADD_BWD = Space("add_layernorm_bwd", partial(_layer_bwd_candidates, residual=True))
SIZES = {True: (100, 2048, 4096, 16384), False: (100, 128, 2048, 4096, 7168, 16384)}  # of LayerNorm


def _cases(layer: bool, *, residual: bool = False, backward: bool = False) -> Cases:
    sizes = [(torch.bfloat16, n) for n in SIZES[layer]]
    for dtype, n in [*sizes, (torch.float16, 4096), (torch.float32, 4096)]:
        x, weight, row = on_meta(8192, n, dtype=dtype), on_meta(n, dtype=dtype), floats(8192)
        for w in (weight, None) if n == 4096 else (weight,):
            rows, parameters = (row,) * (1 + layer), (w,) * (1 + layer)
            needs = (w is not None,) * (1 + layer)
            if backward:
                yield from ((x, x, w, *rows, dres, *needs) for dres in (None, x))
            else:
                yield (x, *(x,) * residual, *parameters, 1e-6)
    q = on_meta(8192, 48, 128)[:, :32]
    w, row = q.new_empty(128), floats(8192, 32)
    if backward and layer:
        yield q, q, w, row, row, None, True, False
    elif backward:
        yield q, q, w, row, None, True
        yield q, q, None, row, None, False, 0.0, None, False
    elif layer and not residual:
        yield q, w, None, 1e-6
    elif not residual:
        yield q, w, 1e-6, 0.0, 1, True
        yield q, None, 1e-6, 0.0, 1, False


@kernel_op(twin=_rmsnorm_fwd, fuses=True, cases=lambda: _cases(False))
def rmsnorm_fwd(
    x: Tensor, weight: Tensor | None, eps: float, weight_offset: float = 0.0, dims: int = 1, mean: bool = True,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(y, rstd): y = x * rstd * (weight + weight_offset), normed over the last `dims` axes."""
    if width(x, dims) > MAX_WIDTH:
        return _rmsnorm_fwd(x, weight, eps, weight_offset, dims, mean)
    form = "rms" if mean else "sum"
    y, _, _, rstd = _forward(form, x, None, weight, None, eps, weight_offset, dims)
    return y, rstd


@kernel_op(twin=_layernorm_fwd, fuses=True, cases=lambda: _cases(True))
def layernorm_fwd(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float, weight_offset: float = 0.0,
    dims: int = 1,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(y, mean, rstd): y = (x - mean) * rstd * (weight + weight_offset) + bias, over the last `dims` axes."""
    if width(x, dims) > MAX_WIDTH:
        return _layernorm_fwd(x, weight, bias, eps, weight_offset, dims)
    y, _, mean, rstd = _forward("layer", x, None, weight, bias, eps, weight_offset, dims)
    return y, mean, rstd


@kernel_op(twin=_add_rmsnorm_fwd, fuses=True, cases=lambda: _cases(False, residual=True))
def add_rmsnorm_fwd(
    x: Tensor, residual: Tensor, weight: Tensor | None, eps: float, weight_offset: float = 0.0
) -> tuple[Tensor, Tensor, Tensor]:
    """(y, h, rstd): h = x + residual as stored, y and rstd of h."""
    check_shape("residual", residual, x.shape)
    if x.shape[-1] > MAX_WIDTH:
        return _add_rmsnorm_fwd(x, residual, weight, eps, weight_offset)
    y, h, _, rstd = _forward("rms", x, residual, weight, None, eps, weight_offset)
    return y, h, rstd


@kernel_op(twin=_add_layernorm_fwd, fuses=True, cases=lambda: _cases(True, residual=True))
def add_layernorm_fwd(
    x: Tensor, residual: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float,
    weight_offset: float = 0.0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """(y, h, mean, rstd): h = x + residual as stored, the others of h."""
    check_shape("residual", residual, x.shape)
    if x.shape[-1] > MAX_WIDTH:
        return _add_layernorm_fwd(x, residual, weight, bias, eps, weight_offset)
    return _forward("layer", x, residual, weight, bias, eps, weight_offset)


@kernel_op(twin=_rmsnorm_bwd, fuses=True, cases=lambda: _cases(False, backward=True))
def rmsnorm_bwd(
    dy: Tensor, x: Tensor, weight: Tensor | None, rstd: Tensor, dres: Tensor | None = None,
    need_dw: bool = True, weight_offset: float = 0.0, dtype: torch.dtype | None = None,
    mean: bool = True,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(dx + dres, dw); x is what was normed (h after a residual add), dw is empty if not needed.

    dtype: of dw, float32 if not given; its sum is float32 in any case, and rounded once.
    """
    if _checked_width(dy, x, weight, rstd, rstd) > MAX_WIDTH:
        return _rmsnorm_bwd(dy, x, weight, rstd, dres, need_dw, weight_offset, dtype, mean)
    form, needs = "rms" if mean else "sum", (need_dw, False)
    dx, dw, _ = _backward(form, dy, x, weight, rstd, rstd, dres, needs, weight_offset, dtype)
    return dx, dw


@kernel_op(twin=_layernorm_bwd, fuses=True, cases=lambda: _cases(True, backward=True))
def layernorm_bwd(
    dy: Tensor, x: Tensor, weight: Tensor | None, mean: Tensor, rstd: Tensor,
    dres: Tensor | None = None, need_dw: bool = True, need_db: bool = True,
    weight_offset: float = 0.0, dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(dx + dres, dw, db); x is what was normed (h after a residual add), what is not needed is empty.

    dtype: of dw and db, float32 if not given; their sums are float32 in any case, and rounded once.
    """
    n = _checked_width(dy, x, weight, mean, rstd)
    if n > MAX_WIDTH:
        return _layernorm_bwd(
            dy, x, weight, mean, rstd, dres, need_dw, need_db, weight_offset, dtype
        )
    needs = need_dw, need_db and n <= BOTH_SUMS
    found = _backward("layer", dy, x, weight, mean, rstd, dres, needs, weight_offset, dtype)
    dx, dw, db = found
    if need_db and n > BOTH_SUMS:
        db = bias_bwd.launcher(dy.reshape(-1, n), dtype).view(x.shape[rstd.dim() :])
    return dx, dw, db


def _forward(
    form: str, x: Tensor, residual: Tensor | None, weight: Tensor | None, bias: Tensor | None, eps: float,
    offset: float, dims: int = 1,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """(y, h, mean, rstd); without a residual h is y, and without a mean that is rstd."""
    n = width(x, dims)
    check_shape("weight", weight, x.shape[-dims:])
    check_shape("bias", bias, x.shape[-dims:])
    x3 = as_heads(x, dims)
    residual2 = x if residual is None else as_rows(residual)
    y = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    h = y if residual is None else torch.empty_like(y)
    rstd = torch.empty(x.shape[:-dims], dtype=torch.float32, device=x.device)
    mean, space = (torch.empty_like(rstd), LAYER_FWD) if form == "layer" else (rstd, RMS_FWD)
    rows = rstd.numel()
    config = space.pick(rows, (n,), x)
    launch(
        device("norm").norm_fwd_kernel, (cdiv(rows, config["BLOCK_R"]),),
        x3, residual2, *pointers(x3, weight, bias), y, h, mean, rstd,
        rows, n, x3.shape[1], *x3.stride()[:2], residual2.stride(0), float(eps), float(offset),
        HAS_RESIDUAL=residual is not None, HAS_WEIGHT=weight is not None, HAS_BIAS=bias is not None, FORM=form,
        **pdl_overlap(x.device), **config,
    )  # fmt: skip
    return y, h, mean, rstd


def _backward(
    form: str, dy: Tensor, x: Tensor, weight: Tensor | None, mean: Tensor, rstd: Tensor, dres: Tensor | None,
    needs: tuple[bool, bool], offset: float, dtype: torch.dtype | None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """dx, dw and db, which without a mean is dw.   needs: of these two"""
    shape, rows = x.shape[rstd.dim() :], rstd.numel()
    n, dims = shape.numel(), len(shape)
    x3, dy3 = as_heads(x, dims), as_heads(dy, dims)
    dres2 = x if dres is None else as_rows(dres, dims)
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    space = RMS_BWD if form != "layer" else LAYER_BWD if dres is None else LAYER_ADD_BWD
    config = dict(space.pick(rows, (n,), x))
    programs = tiles.row_programs(rows, 1, config, x)
    sums = torch.empty(sum(needs), programs, n, dtype=torch.float32, device=x.device)
    launch(
        device("norm").norm_bwd_kernel, (programs,),
        dy3, x3, *pointers(x3, weight, mean, rstd), dres2, dx, sums,
        rows, n, dy3.shape[1], x3.shape[1], *dy3.stride()[:2], *x3.stride()[:2], dres2.stride(0), float(offset),
        HAS_WEIGHT=weight is not None, HAS_DRES=dres is not None, NEED_DW=needs[0], NEED_DB=needs[1], FORM=form,
        **pdl_chain(x.device)[0], AT_ONCE=tiles.rows_at_once(config, x.itemsize), **config,
    )  # fmt: skip
    summed = sum_all_partials(sums, dtype or torch.float32)
    dw = summed[0].view(shape) if needs[0] else sums.new_empty(0)
    if form != "layer":
        return dx, dw, dw
    return dx, dw, summed[-1].view(shape) if needs[1] else sums.new_empty(0)


def _checked_width(dy: Tensor, x: Tensor, weight: Tensor | None, mean: Tensor, rstd: Tensor) -> int:
    """The number of columns that were normed, after checking the arguments."""
    axes = rstd.dim()
    check_shape("weight", weight, x.shape[axes:])
    check_shape("dy", dy, x.shape)
    require(
        axes < x.dim() and mean.shape == rstd.shape == x.shape[:axes],
        f"mean and rstd are {tuple(mean.shape)} and {tuple(rstd.shape)}, expected the leading axes of "
        f"{tuple(x.shape)}.",
    )
    return width(x, x.dim() - axes)


def width(x: Tensor, dims: int) -> int:
    """The number of columns of x, over the last `dims` axes."""
    return x.shape[-1] if dims == 1 else x.shape[-dims:].numel()
