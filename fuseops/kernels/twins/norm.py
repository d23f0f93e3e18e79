"""Twins of fuseops.kernels.norm."""

from __future__ import annotations

import torch


def rmsnorm_fwd(x, weight, eps, weight_offset=0.0):
    """(y, rstd): y = x * rstd * (weight + weight_offset)."""
    x32 = x.float()
    rstd = torch.rsqrt(x32.square().mean(-1) + eps)
    y = x32 * rstd[..., None]
    y = y if weight is None else y * (weight.float() + weight_offset)
    return y.to(x.dtype), rstd


def add_rmsnorm_fwd(x, residual, weight, eps, weight_offset=0.0):
    """(y, h, rstd): h = x + residual as stored, y and rstd of h."""
    h = (x.float() + residual.float()).to(x.dtype)
    y, rstd = rmsnorm_fwd(h, weight, eps, weight_offset)
    return y, h, rstd


def rmsnorm_bwd(dy, x, weight, rstd, dres=None, need_dw=True, weight_offset=0.0):
    """(dx + dres, dw float32); dw is empty if not needed."""
    x_hat = x.float() * rstd[..., None]
    dy = dy.float()
    dw = (dy * x_hat).flatten(0, -2).sum(0) if need_dw else rstd.new_empty(0)
    dy = dy if weight is None else dy * (weight.float() + weight_offset)
    dx = (dy - x_hat * (dy * x_hat).mean(-1, keepdim=True)) * rstd[..., None]
    dx = dx if dres is None else dx + dres.float()
    return dx.to(x.dtype), dw
