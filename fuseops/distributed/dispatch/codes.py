"""Quantized tokens travel as one row of words, the codes of a row and its scales, which every exchange copies.

Half the bytes of bfloat16, and the same numbers: the experts' first GEMM reads codes anyway.
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

WORD = torch.float32  # only ever copied


def travelling(roles: Roles | None) -> Scaling | None:
    """The format in which tokens travel to ops of these roles: None where the weight gradient needs more than rows."""
    if roles is None or roles.input is None or not roles.columns:
        return None
    return roles.input if travels(roles.input) else None


def travels(scaling: Scaling) -> bool:
    """Whether rows in this format say all there is to know of them: each has its own scales, and columns follow."""
    return scaling.block is not None and columns_follow(scaling)


def packed(q: Quantized) -> Tensor:
    """The rows of q as words.   -> (R, ceil(bytes of a row / 4))"""
    data, scale = cast("Layout", q.row)
    axis, _ = token_axis(q.scaling, "row")
    scales = _apart(scale.transpose(0, axis)).view(torch.uint8)
    row = torch.cat([data.contiguous().view(torch.uint8), scales], 1)
    return F.pad(row, (0, -row.shape[1] % WORD.itemsize)).view(WORD)


def unpacked(rows: Tensor, like: Quantized) -> Quantized:
    """What words stand for, in the format and the width of another."""
    data, scale = cast("Layout", like.row)
    axis, _ = token_axis(like.scaling, "row")
    width, blocks = data.shape[1], scale.shape[1 - axis]
    raw = rows.view(torch.uint8)
    codes = raw[:, :width].contiguous().view(data.dtype)
    scales = _apart(raw[:, width : width + blocks * scale.itemsize]).view(scale.dtype)
    layout = Layout(codes, scales.transpose(0, axis).contiguous())
    carrier = placeholder((len(rows), width), like.dtype, rows.device)
    return replace(like, row=layout, col=None, offs=None, carrier=carrier)


def _apart(t: Tensor) -> Tensor:
    """A copy that wider dtypes can view: what has one row or column is contiguous with other strides."""
    return t.clone(memory_format=torch.contiguous_format)
