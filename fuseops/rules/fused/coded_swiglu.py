"""SwiGLU between two quantized GEMMs: it reads fc1's output as it is saved, and writes what fc2 and its gradients read.

h is a tensor, or codes that the recipe saves instead. Numerics: as of the activation alone, whose result is rounded as
its tensor would be before it is quantized.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from fuseops import kernels as K
from fuseops.kernels.activation import Form
from fuseops.ops.op import Call
from fuseops.recipes import Layout, Operand, Quantized, Roles, Scaling, operand
from fuseops.recipes.numerics import ActiveStats, active_stats
from fuseops.recipes.quantized import BLOCK

WRITTEN = Scaling()  # the format of the codes that a GEMM writes


def why_apart(form: Form | None, h: Operand, first: Call, last: Call, reads_dh: bool) -> str | None:
    """Why the activation is a kernel of its own, with passes that quantize; None where SwiGLU's kernels write operands.

    first, last: the calls of the GEMMs around it.  reads_dh: somebody reads dh as a tensor, a bias' gradient
    """
    kind, *options = form or ("",)
    if kind != "swiglu" or any(options):
        return f"the activation is {kind}, in another form than [gate | up]"
    if isinstance(h, Tensor) and h.dim() != 2:
        return "h is not (R, 2F)"
    if reads_dh:
        return "the gradient of a bias reads dh"
    below, above = first.precision.roles, last.precision.roles
    if below is None or above is None or not (below.square_columns and above.square_columns):
        return "the recipe has other columns than squares"
    # not while somebody watches the numbers, who wants the tensors that the codes are of
    return (
        "fo.debug() compares codes with tensors" if ActiveStats.current and active_stats() else None
    )


def forward(h: Operand, probs: Tensor | None, offs: Tensor | None, last: Call) -> Quantized:
    """swiglu(h) (* probs) as fc2 reads it.   (R, 2F) -> over (R, F)"""
    scaling: Scaling = last.precision.roles.input  # type: ignore[union-attr, assignment]
    data, scale = _codes(h)
    parts = K.swiglu_operand(data, probs, None, scaling.data, True, False, scale)
    return Quantized(Layout(*parts[:2]), None, scaling, offs, h.dtype)


def backward(
    da: Tensor, h: Operand, probs: Tensor | None, offs: Tensor | None, first: Call, last: Call
) -> tuple[Quantized, Quantized | None, Tensor]:
    """(dh as fc1's gradients read it, the activation as fc2's weight gradient does, dprobs), in one pass over h."""
    row, act = "x" in first.needs, "weight" in last.needs
    col = "weight" in first.needs and not row  # else of rows, when they are read
    of_dh: Scaling = first.precision.roles.grad_output  # type: ignore[union-attr, assignment]
    of_a: Scaling = last.precision.roles.input  # type: ignore[union-attr, assignment]
    data, scale = _codes(h)
    parts = K.dswiglu_operand(da, data, probs, offs, of_dh.data, of_a.data, row, col, act, scale)
    rows, columns = Layout(*parts[:2]), Layout(*parts[2:4])
    dh = Quantized(rows if row else None, columns if col else None, of_dh, offs, h.dtype)
    a = Quantized(None, Layout(*parts[4:6]), of_a, offs, h.dtype) if act else None
    return dh, a, parts[6]


def whole_squares(da: Tensor) -> bool:
    """Whether no square of dh's columns lies in both of its halves."""
    return da.shape[-1] % BLOCK == 0


# --- h, where a recipe saves its codes


def hidden_from_gemm(roles: Roles, dtype: torch.dtype, width: int) -> bool:
    """Whether fc1's GEMM writes h as the codes that the recipe saves.   width: of h; dtype: of x"""
    codes = roles.hidden == WRITTEN and width % (2 * BLOCK) == 0
    return codes and dtype is torch.bfloat16 and not (ActiveStats.current and active_stats())


def hidden(
    x: Operand, weight: Operand, offs: Tensor | None, tiles: Tensor | None, bias: Tensor | None
) -> Quantized | None:
    """fc1 of operands, as codes; None where one of them is high precision."""
    if not isinstance(x, Quantized) or not isinstance(weight, Quantized):
        return None
    operands = *cast("Layout", x.row), *cast("Layout", weight.row)
    parts = K.fp8_mm_operand(*operands, "block", offs, tiles, bias)
    return Quantized(Layout(*parts), None, WRITTEN, None, x.dtype)


def saved(h: Tensor, roles: Roles) -> Operand:
    """A tensor h as the recipe saves it."""
    return h if roles.hidden is None else operand(h, roles.hidden)


def _codes(h: Operand) -> tuple[Tensor, Tensor | None]:
    """h as the kernels read it: codes with their scales, which stand for bfloat16, or the tensor."""
    if isinstance(h, Tensor):
        return h, None
    if h.row is None or h.dtype is not torch.bfloat16:
        return h.dequantize(), None
    return h.row
