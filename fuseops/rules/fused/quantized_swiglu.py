"""SwiGLU between two quantized GEMMs: it reads fc1's output as it is saved, and writes the operands of fc2 and its
gradients.

h is a tensor, or quantized under `hidden="float8"`. Numerics: those of the activation alone; its result is rounded to
the tensor's dtype before it is quantized.
"""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from fuseops import kernels as K
from fuseops.kernels.activation import Form
from fuseops.ops.op import Call
from fuseops.recipes import Layout, Operand, Quantized, Roles, Scaling, operand
from fuseops.recipes.numerics import QuantizationStats, active_stats
from fuseops.recipes.quantized import BLOCK

GEMM_OUTPUT = Scaling()  # the format of the codes that a GEMM writes


def unfused_reason(
    form: Form | None, h: Operand, fc1_call: Call, fc2_call: Call, needs_dh_tensor: bool
) -> str | None:
    """Why the activation and the quantization run as separate kernels; None where SwiGLU's kernels write operands.

    needs_dh_tensor: dh is read in high precision, for the gradient of a bias
    """
    kind, *options = form or ("",)
    if kind != "swiglu" or any(options):
        return f"the activation is {kind}, in another form than [gate | up]"
    if isinstance(h, Tensor) and h.dim() != 2:
        return "h is not (R, 2F)"
    if needs_dh_tensor:
        return "the gradient of a bias reads dh"
    fc1_roles, fc2_roles = fc1_call.precision.roles, fc2_call.precision.roles
    if not all(roles is not None and roles.square_columns for roles in (fc1_roles, fc2_roles)):
        return "the recipe has other columns than squares"
    if QuantizationStats.active and active_stats():
        return "fo.debug() compares codes with tensors"
    return None


def forward(h: Operand, probs: Tensor | None, offs: Tensor | None, fc2_call: Call) -> Quantized:
    """swiglu(h) (* probs) as fc2 reads it.   (R, 2F) -> over (R, F)"""
    scaling: Scaling = fc2_call.precision.roles.input  # type: ignore[union-attr, assignment]
    data, scale = _codes_and_scale(h)
    parts = K.swiglu_operand(data, probs, None, scaling.data, True, False, scale)
    return Quantized(Layout(*parts[:2]), None, scaling, offs, h.dtype)


def backward(
    da: Tensor,
    h: Operand,
    probs: Tensor | None,
    offs: Tensor | None,
    fc1_call: Call,
    fc2_call: Call,
) -> tuple[Quantized, Quantized | None, Tensor]:
    """(operand dh of fc1's gradients, operand a of fc2's weight gradient, dprobs), in one pass over h."""
    row, need_a = "x" in fc1_call.needs, "weight" in fc2_call.needs
    col = "weight" in fc1_call.needs and not row  # with dx, they are made from rows later
    dh_scaling: Scaling = fc1_call.precision.roles.grad_output  # type: ignore[union-attr, assignment]
    a_scaling: Scaling = fc2_call.precision.roles.input  # type: ignore[union-attr, assignment]
    data, scale = _codes_and_scale(h)
    parts = K.dswiglu_operand(
        da, data, probs, offs, dh_scaling.data, a_scaling.data, row, col, need_a, scale
    )
    rows, columns = Layout(*parts[:2]), Layout(*parts[2:4])
    dh = Quantized(rows if row else None, columns if col else None, dh_scaling, offs, h.dtype)
    a = Quantized(None, Layout(*parts[4:6]), a_scaling, offs, h.dtype) if need_a else None
    return dh, a, parts[6]


def halves_fit_squares(da: Tensor) -> bool:
    """Whether no square of dh's columns spans its gate and up halves."""
    return da.shape[-1] % BLOCK == 0


# --- h under `hidden="float8"`


def gemm_quantizes_hidden(roles: Roles, dtype: torch.dtype, width: int) -> bool:
    """Whether fc1's GEMM writes h in the format in which the recipe saves it.   width: of h; dtype: of x"""
    fits = roles.hidden == GEMM_OUTPUT and width % (2 * BLOCK) == 0
    return fits and dtype is torch.bfloat16 and not (QuantizationStats.active and active_stats())


def fc1_to_codes(
    x: Operand, weight: Operand, offs: Tensor | None, tiles: Tensor | None, bias: Tensor | None
) -> Quantized | None:
    """h = fc1(x), quantized by the GEMM; None if an operand is in high precision."""
    if not isinstance(x, Quantized) or not isinstance(weight, Quantized):
        return None
    operands = *cast("Layout", x.row)[:2], *cast("Layout", weight.row)[:2]
    parts = K.fp8_mm_operand(*operands, "block", offs, tiles, bias)
    return Quantized(Layout(*parts), None, GEMM_OUTPUT, None, x.dtype)


def quantize_hidden(h: Tensor, roles: Roles) -> Operand:
    """h in the format in which the recipe saves it."""
    return h if roles.hidden is None else operand(h, roles.hidden)


def _codes_and_scale(h: Operand) -> tuple[Tensor, Tensor | None]:
    """h as the kernels read it: codes of bfloat16 values with their scales, or the tensor."""
    if isinstance(h, Tensor):
        return h, None
    if h.row is None or h.dtype is not torch.bfloat16:
        return h.dequantize(), None
    return h.row.data, h.row.scale
