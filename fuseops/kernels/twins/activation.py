"""Twins of fuseops.kernels.activation: float32 inside, one rounding at the end."""

from __future__ import annotations

import torch
from torch import Tensor

GATES = {
    "glu": "sigmoid",
    "geglu": "gelu",
    "geglu_tanh": "gelu_tanh",
    "reglu": "relu",
    "sreglu": "srelu",
    "swiglu": "silu",
    "clamped_swiglu": "clamped_silu",
}
"""Gated kinds and the activation of their gate."""


def split_gate(x: Tensor, interleave: int = 0) -> tuple[Tensor, Tensor]:
    """(gate, linear) halves of the last axis, or of its alternating blocks of ``interleave``
    columns.
    """
    if not interleave:
        gate, linear = x.chunk(2, dim=-1)
        return gate, linear
    gate, linear = x.unflatten(-1, (-1, 2, interleave)).unbind(-2)
    return gate.flatten(-2), linear.flatten(-2)


def join_gate(gate: Tensor, linear: Tensor, interleave: int = 0) -> Tensor:
    """Inverse of ``split_gate``."""
    if not interleave:
        return torch.cat([gate, linear], dim=-1)
    return torch.stack([h.unflatten(-1, (-1, interleave)) for h in (gate, linear)], dim=-2).flatten(
        -3
    )


def act_slope(x: Tensor, act: str, alpha: float, limit: float) -> tuple[Tensor, Tensor]:
    """(f(x), f'(x)) of one activation."""
    if act in ("relu", "srelu"):
        r, step = torch.where(x <= 0, 0.0, x), torch.where(x <= 0, 0.0, torch.ones_like(x))
        return (r, step) if act == "relu" else (r * r, 2 * r)
    if act == "gelu":
        c = 0.5 + 0.5 * torch.erf(x * 0.5**0.5)
        return x * c, c + x * 0.3989422804014327 * torch.exp(-0.5 * x * x)
    if act == "sigmoid":
        s = torch.sigmoid(x)
        return s, s * (1 - s)
    if act == "gelu_tanh":
        s = torch.sigmoid(1.5957691216057308 * (x + 0.044715 * x**3))
        return x * s, s + x * s * (1 - s) * (1.5957691216057308 + 0.2140644488178074 * x * x)
    if act == "silu":
        s = torch.sigmoid(x)
        return x * s, s + x * s * (1 - s)
    g = torch.where(x > limit, limit, x)
    s = torch.sigmoid(alpha * g)
    return g * s, torch.where(x > limit, 0.0, s + alpha * g * s * (1 - s))


def act_grad(
    dy: Tensor, x: Tensor, kind: str, interleave: int, alpha: float, limit: float, offset: float
):
    """(y, dx) in float32."""
    x = x.float()
    if kind not in GATES:
        y, slope = act_slope(x, kind, alpha, limit)
        return y, dy * slope
    gate, linear = split_gate(x, interleave)
    f, df = act_slope(gate, GATES[kind], alpha, limit)
    dlin = torch.ones_like(linear)
    if kind == "clamped_swiglu":
        dlin = torch.where((linear > limit) | (linear < -limit), 0.0, dlin)
        linear = linear.clamp(-limit, limit) + offset
    return f * linear, join_gate(dy * df * linear, dy * f * dlin, interleave)


def act_fwd(x, kind, interleave=0, alpha=1.702, limit=7.0, offset=1.0):
    """f(x), or f(gate) * linear."""
    y, _ = act_grad(torch.zeros((), device=x.device), x, kind, interleave, alpha, limit, offset)
    return y.to(x.dtype)


def scaled_act_fwd(x, probs, kind, interleave=0, alpha=1.702, limit=7.0, offset=1.0):
    """act_fwd(x) * probs[..., None] with one rounding."""
    y, _ = act_grad(torch.zeros((), device=x.device), x, kind, interleave, alpha, limit, offset)
    return (y * probs[..., None]).to(x.dtype)


def act_bwd(dy, x, kind, interleave=0, alpha=1.702, limit=7.0, offset=1.0):
    """dx of act_fwd."""
    return act_grad(dy.float(), x, kind, interleave, alpha, limit, offset)[1].to(x.dtype)


def act_bwd_bias(dy, x, kind, interleave=0, alpha=1.702, limit=7.0, offset=1.0):
    """(dx, dbias) where x had a bias added: dbias is dx summed over rows before rounding."""
    dx = act_grad(dy.float(), x, kind, interleave, alpha, limit, offset)[1]
    return dx.to(x.dtype), dx.flatten(0, -2).sum(0)


def scaled_act_bwd(
    dy,
    x,
    probs,
    kind,
    need_dprobs=True,
    need_y=False,
    interleave=0,
    alpha=1.702,
    limit=7.0,
    offset=1.0,
):
    """(dx, dprobs, y) of scaled_act_fwd; what is not needed is empty."""
    dy = dy.float()
    y, dx = act_grad(dy * probs[..., None], x, kind, interleave, alpha, limit, offset)
    dprobs = (dy * y).sum(-1) if need_dprobs else probs.new_empty(0)
    y = (y * probs[..., None]).to(x.dtype) if need_y else x.new_empty(0)
    return dx.to(x.dtype), dprobs, y
