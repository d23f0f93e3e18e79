"""Reference of `fuseops.kernels.activation`.

An activation is a line in VALUES and one in SLOPES. `clamped_silu` and `situ` are gates alone: their other half is
shaped too.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .precision import wide

SQRT_HALF, SQRT_2_OVER_PI, GELU_CUBIC = math.sqrt(0.5), math.sqrt(2 / math.pi), 0.044715
QGELU = 1.702

GATES = {
    "glu": "sigmoid",
    "geglu": "gelu",
    "geglu_tanh": "gelu_tanh",
    "qgeglu": "qgelu",
    "reglu": "relu",
    "sreglu": "srelu",
    "swiglu": "silu",
    "clamped_swiglu": "clamped_silu",
    "situglu": "situ",
}
"""Gated kinds and the activation of their gate."""


def _gelu_cdf(x: Tensor) -> Tensor:
    return 0.5 + 0.5 * torch.erf(x * SQRT_HALF)


def _gelu_tanh_slope(x: Tensor) -> Tensor:
    s = torch.sigmoid(2 * SQRT_2_OVER_PI * (x + GELU_CUBIC * x**3))  # 0.5 (1 + tanh(z / 2))
    return s + x * s * (1 - s) * 2 * SQRT_2_OVER_PI * (1 + 3 * GELU_CUBIC * x * x)


def _silu_slope(x: Tensor, alpha: float = 1.0) -> Tensor:
    s = torch.sigmoid(alpha * x)
    return s + alpha * x * s * (1 - s)


VALUES = {
    "gelu": lambda x: x * _gelu_cdf(x),  # F.gelu of float32 gives NaN at infinity on the CPU
    "gelu_tanh": lambda x: F.gelu(x, approximate="tanh"),
    "qgelu": lambda x: x * torch.sigmoid(QGELU * x),
    "relu": F.relu,
    "srelu": lambda x: F.relu(x).square(),
    "silu": F.silu,
    "sigmoid": torch.sigmoid,
}
SLOPES = {
    "gelu": lambda x: _gelu_cdf(x) + x * torch.exp(-0.5 * x * x) / math.sqrt(2 * math.pi),
    "gelu_tanh": _gelu_tanh_slope,
    "qgelu": lambda x: _silu_slope(x, QGELU),
    "relu": lambda x: torch.where(x <= 0, 0.0, torch.ones_like(x)),
    "srelu": lambda x: 2 * F.relu(x),
    "silu": _silu_slope,
    "sigmoid": lambda x: torch.sigmoid(x) * (1 - torch.sigmoid(x)),
}
KINDS = (*VALUES, *GATES)


def split_gate(x: Tensor, interleave: int = 0) -> tuple[Tensor, Tensor]:
    """(gate, linear) halves of the last axis, or of its alternating blocks of `interleave` columns."""
    if not interleave:
        gate, linear = x.chunk(2, dim=-1)
        return gate, linear
    gate, linear = x.unflatten(-1, (-1, 2, interleave)).unbind(-2)
    return gate.flatten(-2), linear.flatten(-2)


def join_gate(gate: Tensor, linear: Tensor, interleave: int = 0) -> Tensor:
    """Inverse of `split_gate`."""
    if not interleave:
        return torch.cat([gate, linear], dim=-1)
    halves = [h.unflatten(-1, (-1, interleave)) for h in (gate, linear)]
    return torch.stack(halves, dim=-2).flatten(-3)


class ActivationForm(NamedTuple):
    """An `ActivationForm` holds the constants of an activation, as kernels take them behind `kind`; each kind reads
    those that its formula has.
    """

    interleave: int = 0
    alpha: float = 1.702
    limit: float = 7.0
    offset: float = 1.0


def _halves(gate: Tensor, linear: Tensor, kind: str, form: ActivationForm) -> tuple[Tensor, Tensor]:
    """(f(gate), l(linear)), whose product is y."""
    _, alpha, limit, offset = form
    if kind == "clamped_swiglu":
        h = gate.clamp(max=limit)
        return h * torch.sigmoid(alpha * h), linear.clamp(-limit, limit) + offset
    if kind == "situglu":
        gate = alpha * torch.tanh(gate / alpha) * torch.sigmoid(gate)
        return gate, limit * torch.tanh(linear / limit)
    return VALUES[GATES[kind]](gate), linear


def _half_slopes(
    gate: Tensor, linear: Tensor, kind: str, form: ActivationForm
) -> tuple[Tensor, Tensor | float]:
    """(f'(gate), l'(linear))."""
    _, alpha, limit, _ = form
    if kind == "clamped_swiglu":
        slope = _silu_slope(gate.clamp(max=limit), alpha).masked_fill(gate > limit, 0.0)
        inside = torch.where((linear > limit) | (linear < -limit), 0.0, torch.ones_like(linear))
        return slope, inside
    if kind == "situglu":
        t, s = torch.tanh(gate / alpha), torch.sigmoid(gate)
        return (1 - t * t) * s + alpha * t * s * (1 - s), 1 - torch.tanh(linear / limit).square()
    return SLOPES[GATES[kind]](gate), 1.0


def _value(x: Tensor, kind: str, *options: Any) -> Tensor:
    """f(x), or f(gate) * l(linear), of a wide x."""
    if kind not in GATES:
        return VALUES[kind](x)
    form = ActivationForm(*options)
    f, linear = _halves(*split_gate(x, form.interleave), kind, form)
    return f * linear


def _gradient(dy: Tensor, x: Tensor, kind: str, *options: Any) -> Tensor:
    """dx of `_value`."""
    if kind not in GATES:
        return dy * SLOPES[kind](x)
    form = ActivationForm(*options)
    halves = split_gate(x, form.interleave)
    f, linear = _halves(*halves, kind, form)
    df, dlinear = _half_slopes(*halves, kind, form)
    return join_gate(dy * df * linear, dy * f * dlinear, form.interleave)


def act_fwd(x: Tensor, kind: str, *options: Any) -> Tensor:
    """f(x), or f(gate) * linear; the gate is the first half of the last axis.

    kind: one of KINDS.  options: here and below the fields of an ActivationForm, in their order.
    """
    return _value(wide(x), kind, *options).to(x.dtype)


def scaled_act_fwd(x: Tensor, probs: Tensor, kind: str, *options: Any) -> Tensor:
    """act_fwd(x) * probs[..., None] with one rounding."""
    y = _value(wide(x), kind, *options)
    return (y * probs.to(y.dtype).unsqueeze(-1)).to(x.dtype)


def act_bwd(dy: Tensor, x: Tensor, kind: str, *options: Any) -> Tensor:
    """dx of act_fwd."""
    return _gradient(wide(dy), wide(x), kind, *options).to(x.dtype)


def act_bwd_bias(dy: Tensor, x: Tensor, kind: str, *options: Any) -> tuple[Tensor, Tensor]:
    """(dx, dbias) where x had a bias added: dbias is dx summed over rows before rounding."""
    dx = _gradient(wide(dy), wide(x), kind, *options)
    return dx.to(x.dtype), dx.reshape(-1, dx.shape[-1]).sum(0)


def scaled_act_bwd(
    dy: Tensor, x: Tensor, probs: Tensor | None, kind: str, need_dprobs: bool = True, need_y: bool = False,
    *options: Any,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(dx, dprobs, y) of scaled_act_fwd; what is not needed is empty. probs: None for ones."""
    full, grad = wide(x), wide(dy)
    scale = 1 if probs is None else probs.to(full.dtype).unsqueeze(-1)
    dx = _gradient(grad * scale, full, kind, *options).to(x.dtype)
    dprobs, y = full.new_empty(0), x.new_empty(0)
    if need_dprobs or need_y:
        value = _value(full, kind, *options)
        dprobs = (grad * value).sum(-1) if need_dprobs else dprobs
        y = (value * scale).to(x.dtype) if need_y else y
    return dx, dprobs, y


def scaled_act_bwd_into(
    x: Tensor, dy: Tensor, probs: Tensor, kind: str, *options: Any
) -> tuple[Tensor, Tensor]:
    """(dprobs, y) of scaled_act_bwd, whose dx is written over x."""
    dx, *rest = scaled_act_bwd(dy, x, probs, kind, *options)
    x.copy_(dx)
    return rest[0], rest[1]


def act_dprobs(dy: Tensor, x: Tensor, kind: str, *options: Any) -> Tensor:
    """dprobs of scaled_act_fwd alone, without reading probs: the row sum of dy * act_fwd(x)."""
    return (wide(dy) * _value(wide(x), kind, *options)).sum(-1)
