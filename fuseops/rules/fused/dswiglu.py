"""The backward of an activation as the epilogue of a GEMM: of the input gradient of an expert MLP's fc2.

One kernel reads h and writes dh, the activation and dprobs; the gradient of the activation never reaches memory. It is
taken for a shape where data says that it is faster, and nowhere is it the only way: `why_apart` says what stands in
its way, and the GEMM and a pass over h are two kernels then. Both ways give the same, dprobs but for the order of its
sum.
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


class DswigluFacts(NamedTuple):
    """`DswigluFacts` are what the choice of the epilogue depends on, of the calls of fc1, the activation and fc2."""

    below: bool  # whether fc1 needs any gradient
    needs: frozenset[str]  # of fc2
    buffer: bool  # the gradient of the activation goes into one
    compute: torch.dtype | None
    prefer: str


def facts_of(calls: Calls) -> DswigluFacts:
    first, _, last = calls
    buffer = last.out is not None and last.out.get("dx") is not None
    return DswigluFacts(bool(first.needs), last.needs, buffer, last.precision.compute, last.prefer)


class Operands(NamedTuple):
    """`Operands` are the tensors that the backward through fc2 and the activation before it reads, but for dy and h."""

    form: Form | None  # of the activation, where some gradient reads it
    probs: Tensor | None  # (R,) that the activation multiplies by, if it does
    fc2: Tensor | None  # (E, D, F)
    offs: Tensor | None


def why_apart(
    given: Operands,
    dy: Any,
    h: Tensor | None,
    dy_index: Tensor | None,
    facts: DswigluFacts,
    rows: int,
) -> str | None:
    """Why the activation's backward is a kernel of its own; None where the GEMM goes on through it.

    rows: of the product; dy and h may stand for tensors of so many rows.
    """
    tensors = dy, h, given.fc2, given.probs, dy_index
    return cached_decision(_why_apart, tensors, given.form, facts, rows)


def _why_apart(
    dy: Any,
    h: Tensor | None,
    fc2: Tensor | None,
    probs: Tensor | None,
    dy_index: Tensor | None,
    form: Form | None,
    facts: DswigluFacts,
    rows: int,
) -> str | None:
    if form is None:  # not kept: only biases of fc2 want a gradient
        return "not every gradient is needed"
    kind, *options = form
    if kind not in BACKWARD_ACTS or any(options):
        said = ", its gate and up alternate" if kind in BACKWARD_ACTS else ""
        return f"the activation is {kind}{said}"
    if not (facts.below and {"x", "weight"} <= facts.needs) or h is None:
        return "not every gradient is needed"
    if facts.buffer:
        return "the gradient of the activation has a buffer"
    if torch.compiler.is_compiling() or not isinstance(dy, Tensor):
        return "dy is traced, or quantized"
    if probs is not None and probs.dtype is not torch.float32:
        return "probs are not float32"
    weight = fc2.transpose(1, 2)  # type: ignore[union-attr]
    if dy.dim() != 2 or not dy.dtype == h.dtype == (facts.compute or weight.dtype):
        return "dy, h and the weight differ in dtype, or have more than two axes"
    if not K.grouped_dswiglu.launches((dy, h, weight), {}):
        return "the reference runs"
    if not act_bwd_path(dy, weight, h, dy_index):
        return "no path of the GEMM can, see its own"
    dims = (*weight.shape, dy_index is not None)
    if facts.prefer == "speed" and not EPILOGUE.enabled(rows, dims, dy):
        return "two kernels are faster for this shape"
    return None


def expected_why_apart(
    given: Operands, dy_index: Tensor | None, facts: DswigluFacts, rows: int
) -> str | None:
    """`why_apart` of a backward whose dy and h are not there yet, or may be copied."""
    if torch.compiler.is_compiling():  # which can look neither into a cache nor at modes
        return "dy is traced, or quantized"
    return why_apart(given, *_rows(given, facts), dy_index, facts, rows)


def gathers(given: Operands, dy_index: Tensor, facts: DswigluFacts, rows: int) -> bool:
    """Whether the GEMM that goes on through SwiGLU can read rows of dy by index. Others copy them."""
    if expected_why_apart(given, dy_index, facts, rows) is not None:
        return False
    weight: Tensor = given.fc2.transpose(1, 2)  # type: ignore[union-attr]
    dy, h = _rows(given, facts)
    return act_bwd_path(dy, weight, h, dy_index) == "gather"


def _rows(given: Operands, facts: DswigluFacts) -> tuple[Tensor, Tensor]:
    """A row of dy, and one of h, that stand for many."""
    fc2: Tensor = given.fc2  # type: ignore[assignment]
    dtype = facts.compute or fc2.dtype
    gated = given.form is not None and given.form[0] in K.GATES
    widths = fc2.shape[1], fc2.shape[2] * (1 + gated)
    if torch_private.is_fake(fc2) or _somebody_sees():
        dy, h = (fc2.new_empty(1, width, dtype=dtype) for width in widths)
    else:
        dy, h = (_row(width, dtype, fc2.device) for width in widths)
    return dy, h


def _somebody_sees() -> bool:
    """Whether what is made now may be other than a plain tensor, which nobody may keep."""
    return bool(torch_private.num_dispatch_modes() or torch_private.num_function_modes())


@functools.lru_cache(maxsize=256)
def _row(width: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A row that stands for many, where a path is asked for by shapes."""
    return torch.empty(1, width, dtype=dtype, device=device)


def in_words(why: str | None) -> str:
    """An answer of `expected_why_apart`, for `explain()`."""
    if why is None:
        return "the GEMM of fc2's input gradient goes on through the activation"
    return f"the backward of the activation is a kernel of its own: {why}"


def run(
    given: Operands, dy: Tensor, h: Tensor, dy_index: Tensor | None, call: Call, spare: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Runs the GEMM of fc2's input gradient through the activation.   -> dh, over a spare h, the activation, dprobs"""
    offs: Tensor = given.offs  # type: ignore[assignment]
    weight: Tensor = call.precision.cast(given.fc2).transpose(1, 2)  # type: ignore[union-attr]
    rest = offs, tiles_of(call, offs, h.shape[0]), given.probs, dy_index, given.form[0]  # type: ignore[index]
    if spare:
        return h, *K.grouped_dswiglu_into(h, dy, weight, *rest)
    return K.grouped_dswiglu(h, dy, weight, *rest)
