"""Packing of quantized tokens that are sent: the codes and scales of a row become one row of 4-byte words.

It takes half the bytes of bfloat16 and changes no number: the experts' first GEMM reads codes anyway.
"""

from __future__ import annotations

from dataclasses import replace
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor

from fuseops.recipes import Layout, Quantized, Roles, Scaling, columns_follow
from fuseops.recipes.carrier import placeholder
from fuseops.recipes.quantized import token_axis

WORD = torch.float32  # never computed with


def transport_format(roles: Roles | None) -> Scaling | None:
    """The format in which tokens travel to ops with these roles; None if they need more than row-wise codes."""
    if roles is None or roles.input is None or not roles.columns:
        return None
    return roles.input if is_transportable(roles.input) else None


def is_transportable(scaling: Scaling) -> bool:
    """Whether row-wise codes suffice: each row has its own scales, and the column layout follows from them."""
    return scaling.block is not None and columns_follow(scaling)


def pack_rows(q: Quantized) -> Tensor:
    """The rows of q, packed into words.   -> (R, ceil(bytes of a row / 4))"""
    data, scale, _ = cast("Layout", q.row)
    axis, _ = token_axis(q.scaling, "row")
    scales = _contiguous_copy(scale.transpose(0, axis)).view(torch.uint8)
    row = torch.cat([data.contiguous().view(torch.uint8), scales], 1)
    return F.pad(row, (0, -row.shape[1] % WORD.itemsize)).view(WORD)


def unpack_rows(rows: Tensor, like: Quantized) -> Quantized:
    """The inverse of `pack_rows`, with the format and width of `like`."""
    data, scale, _ = cast("Layout", like.row)
    axis, _ = token_axis(like.scaling, "row")
    width, blocks = data.shape[1], scale.shape[1 - axis]
    raw = rows.view(torch.uint8)
    codes = raw[:, :width].contiguous().view(data.dtype)
    scales = _contiguous_copy(raw[:, width : width + blocks * scale.itemsize]).view(scale.dtype)
    layout = Layout(codes, scales.transpose(0, axis).contiguous())
    carrier = placeholder((len(rows), width), like.dtype, rows.device)
    return replace(like, row=layout, col=None, offs=None, carrier=carrier)


def _contiguous_copy(t: Tensor) -> Tensor:
    """A copy that can be viewed in wider dtypes: a tensor of one row or column may be contiguous with any strides."""
    return t.clone(memory_format=torch.contiguous_format)
