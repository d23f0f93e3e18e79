"""Plain torch twin of every kernel: readable spec, CPU backend, fake-shape oracle and test oracle.

Same names and arguments as the kernels. Accumulation is float32 (float64 for float64 inputs) with one rounding at the
store. Everything here is differentiable torch, so that `fo.reference()` can differentiate it again.
Shapes: M rows, D features, F = D/2 gated features, R routed rows, E groups, N and K of a GEMM.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor

SQRT_2_OVER_PI = math.sqrt(2.0 / math.pi)
GELU_CUBIC = 0.044715


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """The dtype that sums are kept in: float32, or wider if the input is."""
    return torch.promote_types(dtype, torch.float32)


def _wide(*tensors: Tensor) -> tuple[Tensor, ...]:
    return tuple(t.to(accumulator(t.dtype)) for t in tensors)


# --- norms ---------------------------------------------------------------------------------------------------------


def rms_norm_fwd(
    x: Tensor, weight: Tensor | None, eps: float, dims: int = 1
) -> tuple[Tensor, Tensor]:
    """y = x * rstd * weight, rstd = 1 / sqrt(mean(x^2) + eps) over the last `dims` axes.   -> y as x, rstd float32"""
    (wide,) = _wide(x)
    axes = tuple(range(-dims, 0))
    rstd = torch.rsqrt(wide.square().mean(axes, keepdim=True) + eps)
    y = wide * rstd
    return (y if weight is None else y * weight.to(y.dtype)).to(x.dtype), rstd


def rms_norm_bwd(
    dy: Tensor, x: Tensor, weight: Tensor | None, rstd: Tensor, dims: int = 1
) -> tuple[Tensor, Tensor]:
    """dx = rstd * (g - xhat * mean(g * xhat)), g = dy * weight, xhat = x * rstd;  dweight = row sum of dy * xhat."""
    wide, grad = _wide(x, dy)
    axes = tuple(range(-dims, 0))
    xhat = wide * rstd
    weighted = grad if weight is None else grad * weight.to(grad.dtype)
    dx = rstd * (weighted - xhat * (weighted * xhat).mean(axes, keepdim=True))
    rows = tuple(range(x.dim() - dims))
    dweight = (grad * xhat).sum(rows) if rows else grad * xhat
    return dx.to(x.dtype), dweight


# --- activations ---------------------------------------------------------------------------------------------------


def _silu(x: Tensor) -> tuple[Tensor, Tensor]:
    s = torch.sigmoid(x)
    # -inf * 0 is NaN: the limit of x * sigmoid(x) there is 0, as in torch
    y = F.silu(x)
    return y, s + y * (1 - s)


def _gelu(x: Tensor) -> tuple[Tensor, Tensor]:
    cdf = 0.5 * (1 + torch.erf(x / math.sqrt(2.0)))
    return F.gelu(x), cdf + x * torch.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)


def _gelu_tanh(x: Tensor) -> tuple[Tensor, Tensor]:
    t = torch.tanh(SQRT_2_OVER_PI * (x + GELU_CUBIC * x**3))
    inner = SQRT_2_OVER_PI * (1 + 3 * GELU_CUBIC * x * x)
    return F.gelu(x, approximate="tanh"), 0.5 * (1 + t) + 0.5 * x * (1 - t * t) * inner


def _srelu(x: Tensor) -> tuple[Tensor, Tensor]:
    r = torch.relu(x)
    return r * r, 2 * r


ACTIVATIONS = {
    "silu": _silu,
    "gelu": _gelu,
    "gelu_tanh": _gelu_tanh,
    "srelu": _srelu,
}  # x -> value, derivative


def act_fwd(x: Tensor, kind: str) -> Tensor:
    """y = act(x), `kind` a key of ACTIVATIONS."""
    (wide,) = _wide(x)
    return ACTIVATIONS[kind](wide)[0].to(x.dtype)


def act_bwd(dy: Tensor, x: Tensor, kind: str) -> Tensor:
    """dx = dy * act'(x)."""
    wide, grad = _wide(x, dy)
    return (grad * ACTIVATIONS[kind](wide)[1]).to(x.dtype)


def swiglu_fwd(x: Tensor) -> Tensor:
    """y = silu(gate) * up; gate is the first half of the last axis.   (M, 2F) -> (M, F)"""
    gate, up = _wide(*x.chunk(2, -1))
    return (F.silu(gate) * up).to(x.dtype)


def swiglu_bwd(dy: Tensor, x: Tensor) -> Tensor:
    """dgate = dy * up * silu'(gate), dup = dy * silu(gate).   -> (M, 2F)"""
    gate, up, grad = _wide(*x.chunk(2, -1), dy)
    value, slope = _silu(gate)
    return torch.cat([grad * up * slope, grad * value], -1).to(x.dtype)


def scaled_swiglu_fwd(x: Tensor, probs: Tensor) -> Tensor:
    """y = swiglu(x) * probs, one probability a row.   x (R, 2F), probs (R,) -> (R, F)"""
    gate, up = _wide(*x.chunk(2, -1))
    return (F.silu(gate) * up * probs.to(gate.dtype).unsqueeze(-1)).to(x.dtype)


def scaled_swiglu_bwd(dy: Tensor, x: Tensor, probs: Tensor) -> tuple[Tensor, Tensor]:
    """-> dx (R, 2F) and dprobs (R,) = sum over features of dy * swiglu(x), both from one pass."""
    gate, up, grad = _wide(*x.chunk(2, -1), dy)
    value, slope = _silu(gate)
    dprobs = (grad * value * up).sum(-1)
    grad = grad * probs.to(grad.dtype).unsqueeze(-1)
    return torch.cat([grad * up * slope, grad * value], -1).to(x.dtype), dprobs


def swiglu_dprobs(dy: Tensor, x: Tensor) -> Tensor:
    """dprobs alone: the sum over features of dy * swiglu(x).   (R, F), (R, 2F) -> (R,)"""
    gate, up, grad = _wide(*x.chunk(2, -1), dy)
    return (grad * F.silu(gate) * up).sum(-1)


def act_bias_bwd(dy: Tensor, x: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """Backward of act(x) where x = input + bias.   -> dx as x, dbias = column sum of dx in the accumulator's dtype"""
    dx = act_bwd(dy, x, kind)
    return dx, column_sum(dx)


def column_sum(dy: Tensor) -> Tensor:
    """Sum over all but the last axis, kept in the accumulator's dtype (a bias gradient).   (..., D) -> (D,)"""
    rows = dy if dy.dim() == 2 else dy.reshape(-1, dy.shape[-1])
    return rows.sum(0) if rows.dtype is torch.float32 else rows.sum(0, dtype=accumulator(dy.dtype))


# --- dropout -------------------------------------------------------------------------------------------------------


def dropout_mask(seed: Tensor, like: Tensor, p: float) -> Tensor:
    """Keep-mask from a seed on the device: a counter through two rounds of a 64-bit multiply-xorshift mix.

    The same seed and shape give the same mask, so that backward redraws it instead of saving it.
    """
    z = torch.arange(like.numel(), device=like.device, dtype=torch.int64) + seed
    for shift, factor in (
        (30, -4658895280553007687),
        (27, -7723592293110705685),
    ):  # splitmix64's constants
        z = (z ^ ((z >> shift) & ((1 << (64 - shift)) - 1))) * factor
    z = z ^ ((z >> 31) & ((1 << 33) - 1))
    uniform = ((z >> 40) & ((1 << 24) - 1)).to(torch.float32) * 2.0**-24
    return (uniform >= p).view(like.shape)


# --- grouped GEMM --------------------------------------------------------------------------------------------------


def group_of_row(offs: Tensor, rows: int) -> Tensor:
    """Group index of every row; padding rows (at or beyond offs[-1]) get E.   -> (R,) int64"""
    return torch.searchsorted(
        offs, torch.arange(rows, device=offs.device, dtype=offs.dtype), right=True
    )


def padding_mask(offs: Tensor, rows: int) -> Tensor:
    """True for rows at or beyond offs[-1].   -> (R, 1) bool"""
    return (torch.arange(rows, device=offs.device, dtype=offs.dtype) >= offs[-1]).unsqueeze(-1)


def _bounds(offs: Tensor) -> list[tuple[int, int]]:
    ends = [int(end) for end in offs.tolist()]
    return list(zip([0, *ends[:-1]], ends, strict=True))


def grouped_mm(x: Tensor, weight: Tensor, offs: Tensor) -> Tensor:
    """y[rows of e] = x[rows of e] @ weight[e].T, padding rows zero.   (R, K), (E, N, K), (E,) -> (R, N)"""
    bounds = _bounds(offs)
    parts = [x[start:end] @ weight[e].t() for e, (start, end) in enumerate(bounds)]
    padding = x.new_zeros(x.shape[0] - bounds[-1][1], weight.shape[1])
    return torch.cat([*parts, padding])


def grouped_wgrad(dy: Tensor, x: Tensor, offs: Tensor) -> Tensor:
    """dw[e] = dy[rows of e].T @ x[rows of e], zeros for an empty group.   (R, N), (R, K), (E,) -> (E, N, K)"""
    return torch.stack([dy[start:end].t() @ x[start:end] for start, end in _bounds(offs)])


def grouped_bias(y: Tensor, bias: Tensor, offs: Tensor) -> Tensor:
    """y + bias of the row's group; padding rows stay as they are.   (R, N), (E, N), (E,) -> (R, N)"""
    group = group_of_row(offs, y.shape[0])
    padded = torch.cat([bias, bias.new_zeros(1, bias.shape[1])])
    return y + padded[group].to(y.dtype)


def grouped_bias_bwd(dy: Tensor, offs: Tensor) -> Tensor:
    """dbias[e] = sum of the rows of e, in the accumulator's dtype.   (R, N), (E,) -> (E, N)"""
    wide = dy.to(accumulator(dy.dtype))
    return torch.stack([wide[start:end].sum(0) for start, end in _bounds(offs)])


# --- fp8 -----------------------------------------------------------------------------------------------------------


def scale_of(amax: Tensor, dtype: torch.dtype) -> Tensor:
    """amax / max(format); 1 where amax is zero or not finite.   float32"""
    scale = amax.to(torch.float32) / torch.finfo(dtype).max
    usable = torch.isfinite(scale) & (scale > 0)
    return torch.where(usable, scale, torch.ones_like(scale))


def saturate(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Cast as the hardware's saturating conversion does: beyond the maximum (infinities too) the maximum, NaN stays."""
    limit = torch.finfo(dtype).max
    return x.clamp(-limit, limit).to(dtype)


def quantize(x: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Per-tensor current scaling.   x any shape -> data as x, scale () float32"""
    wide = x.to(torch.float32)
    amax = wide.abs().amax() if x.numel() else wide.new_zeros(())
    scale = scale_of(amax, dtype)
    return saturate(wide / scale, dtype), scale


def grouped_quantize(x: Tensor, offs: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """One scale a group of rows; padding rows become zero.   (R, K), (E,) -> data (R, K), scale (E,) float32"""
    wide = x.to(torch.float32)
    group = group_of_row(offs, x.shape[0])
    row_amax = wide.abs().amax(-1) if x.shape[1] else wide.new_zeros(x.shape[0])
    amax = wide.new_zeros(offs.shape[0] + 1).scatter_reduce(0, group, row_amax, "amax")[:-1]
    scale = scale_of(amax, dtype)
    by_row = torch.cat([scale, scale.new_ones(1)])[group].unsqueeze(-1)
    return saturate((wide / by_row).masked_fill(padding_mask(offs, x.shape[0]), 0.0), dtype), scale


def expert_quantize(weight: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """One scale an expert.   (E, N, K) -> data (E, N, K), scale (E,) float32"""
    wide = weight.to(torch.float32)
    scale = scale_of(wide.abs().amax((1, 2)), dtype)
    return saturate(wide / scale[:, None, None], dtype), scale


def scaled_mm(a: Tensor, b: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """(a @ b.T) * scale, accumulated in float32.   fp8 (M, K), (N, K), () -> (M, N)"""
    return (a.to(torch.float32) @ b.to(torch.float32).t() * scale).to(dtype)
