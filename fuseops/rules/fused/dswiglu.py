"""The backward of an activation as the epilogue of the GEMM before it: the input gradient of an expert MLP's fc2.

One kernel reads h and writes dh, the activation and dprobs; the gradient of the activation never reaches memory. It is
used for shapes for which measurements say that it is faster. Otherwise (`unfused_reason`) the GEMM and a pass over h
are two kernels. Both give the same bits, but for the order in which dprobs is summed.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fuseops import kernels as K
from fuseops import torch_private
from fuseops.kernels.activation import Form
from fuseops.kernels.configs import Switch
from fuseops.kernels.grouped_paths import BACKWARD_ACTS, act_bwd_path
from fuseops.kernels.registry import cached_decision
from fuseops.ops.op import Call, Calls
from fuseops.ops.tiles import tiles_of

EPILOGUE = Switch(
    # of fc2. On an H200 it gains on every shape where rows lie in order; by index it gains
    # where F is 256 and 768, and loses where it is 1024 (benchmarks/grouped_dswiglu.py). Of few rows a group, where
    # reading the weights takes longest, small tiles read them faster, and a pass over the rows is short.
    "dswiglu_epilogue",
    "EPILOGUE",
    lambda rows, dims: rows >= 32 * dims[0] and (not dims[3] or dims[1] < 1024),
    dims=("groups", "n", "k", "by_index"),
)
SLOWER = "two kernels are faster for this shape"
NO_PATH = "no path of the GEMM can, see its own"


class DswigluFacts(NamedTuple):
    """`DswigluFacts` hold the facts about the calls of fc1 and fc2 that the choice of the epilogue depends on."""

    fc1_needs_grad: bool
    needs: frozenset[str]  # of fc2
    dx_has_buffer: bool  # the caller has a buffer for the gradient of the activation
    compute: torch.dtype | None
    prefer: str


def facts_of(calls: Calls) -> DswigluFacts:
    first, _, last = calls
    dx_has_buffer = last.out is not None and last.out.get("dx") is not None
    return DswigluFacts(
        bool(first.needs), last.needs, dx_has_buffer, last.precision.compute, last.prefer
    )


class Operands(NamedTuple):
    """`Operands` are the inputs of the backward through fc2 and the activation, except dy and h."""

    form: Form | None  # of the activation; None where no gradient reads it
    probs: Tensor | None  # (R,) factors of the activation
    fc2: Tensor | None  # (E, D, F)
    offs: Tensor | None


def unfused_reason(
    operands: Operands,
    dy: Any,
    h: Tensor | None,
    dy_index: Tensor | None,
    facts: DswigluFacts,
    rows: int,
) -> str | None:
    """Why the activation's backward is a separate kernel; None where it is the epilogue of the GEMM.

    rows: of the product; dy and h may be proxies of one row
    """
    tensors = dy, h, operands.fc2, operands.probs, dy_index
    return cached_decision(_unfused_reason, tensors, operands.form, facts, rows)


def _unfused_reason(
    dy: Any,
    h: Tensor | None,
    fc2: Tensor | None,
    probs: Tensor | None,
    dy_index: Tensor | None,
    form: Form | None,
    facts: DswigluFacts,
    rows: int,
) -> str | None:
    if (why := form_reason(form)) is not None:
        return why
    if not (facts.fc1_needs_grad and {"x", "weight"} <= facts.needs) or h is None:
        return "not every gradient is needed"
    if facts.dx_has_buffer:
        return "the gradient of the activation has a buffer"
    if torch.compiler.is_compiling() or not isinstance(dy, Tensor):
        return "dy is traced, or quantized"
    if probs is not None and probs.dtype is not torch.float32:
        return "probs are not float32"
    weight = fc2.transpose(1, 2)  # type: ignore[union-attr]
    if dy.dim() != 2 or not dy.dtype == h.dtype == (facts.compute or weight.dtype):
        return "dy, h and the weight differ in dtype, or have more than two axes"
    if not K.grouped_dswiglu.launches((dy, h, weight), {}):
        return "the twin runs"
    if not act_bwd_path(dy, weight, h, dy_index):
        return NO_PATH
    dims = (*weight.shape, dy_index is not None)
    if facts.prefer == "speed" and not EPILOGUE.enabled(rows, dims, dy):
        return SLOWER
    return None


def form_reason(form: Form | None) -> str | None:
    """Why no GEMM goes on through this activation, and back through it; None if one may."""
    if form is None:  # not kept: only biases of fc2 want a gradient
        return "not every gradient is needed"
    kind, *options = form
    if kind not in BACKWARD_ACTS or any(options):
        suffix = ", its gate and up alternate" if kind in BACKWARD_ACTS else ""
        return f"the activation is {kind}{suffix}"
    return None


def expected_unfused_reason(
    operands: Operands, dy_index: Tensor | None, facts: DswigluFacts, rows: int
) -> str | None:
    """`unfused_reason` of a backward whose dy and h do not exist yet, or may be copied."""
    if torch.compiler.is_compiling():  # traced code can read neither the cache nor torch's modes
        return "dy is traced, or quantized"
    return unfused_reason(operands, *_proxy_rows(operands, facts), dy_index, facts, rows)


def gathers_dy(operands: Operands, dy_index: Tensor, facts: DswigluFacts, rows: int) -> bool:
    """Whether the GEMM with the SwiGLU epilogue can read rows of dy by index, without a copy."""
    if expected_unfused_reason(operands, dy_index, facts, rows) is not None:
        return False
    weight: Tensor = operands.fc2.transpose(1, 2)  # type: ignore[union-attr]
    dy, h = _proxy_rows(operands, facts)
    return act_bwd_path(dy, weight, h, dy_index) == "gather"


def _proxy_rows(operands: Operands, facts: DswigluFacts) -> tuple[Tensor, Tensor]:
    """One row of dy and one of h, as proxies for all rows."""
    fc2: Tensor = operands.fc2  # type: ignore[assignment]
    dtype = facts.compute or fc2.dtype
    gated = operands.form is not None and operands.form[0] in K.GATES
    widths = fc2.shape[1], fc2.shape[2] * (1 + gated)
    if torch_private.is_fake(fc2) or _in_torch_mode():
        dy, h = (fc2.new_empty(1, width, dtype=dtype) for width in widths)
    else:
        dy, h = (_proxy_row(width, dtype, fc2.device) for width in widths)
    return dy, h


def _in_torch_mode() -> bool:
    """Whether a torch mode is active: a tensor made under one may not be cached."""
    return bool(torch_private.num_dispatch_modes() or torch_private.num_function_modes())


@functools.lru_cache(maxsize=256)
def _proxy_row(width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """An empty row, as the proxy for all rows in checks of shapes and dtypes."""
    return torch.empty(1, width, dtype=dtype, device=device)


def describe(why: str | None) -> str:
    """The result of `expected_unfused_reason` as a sentence of `explain()`."""
    if why is None:
        return "the GEMM of fc2's input gradient goes on through the activation"
    return f"the backward of the activation is a kernel of its own: {why}"


def fused_backward(
    operands: Operands, dy: Tensor, h: Tensor, dy_index: Tensor | None, call: Call, reuse_h: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Run the GEMM of fc2's input gradient with the activation's backward.   -> dh, the activation, dprobs

    reuse_h: dh is written over h
    """
    offs: Tensor = operands.offs  # type: ignore[assignment]
    weight: Tensor = call.precision.cast(operands.fc2).transpose(1, 2)  # type: ignore[union-attr]
    shared = offs, tiles_of(call, offs, h.shape[0]), operands.probs, dy_index, operands.form[0]  # type: ignore[index]
    if reuse_h:
        return h, *K.grouped_dswiglu_into(h, dy, weight, *shared)
    return K.grouped_dswiglu(h, dy, weight, *shared)
