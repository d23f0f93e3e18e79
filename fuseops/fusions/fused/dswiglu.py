"""Where the gradient of an expert MLP goes on through SwiGLU inside the GEMM of fc2's input gradient.

One kernel reads h and writes dh, the activation and dprobs; the gradient of the activation never reaches memory. It is
taken for a shape where data says that it is faster, and nowhere is it the only way: `apart` names what stands
between, and the GEMM and a pass over h are two kernels then. Both ways give the same, dprobs but for the order of its
sum.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from fuseops import kernels as K
from fuseops.kernels.configs import Space
from fuseops.kernels.grouped_paths import swiglu_bwd_path
from fuseops.ops.op import Call
from fuseops.ops.tiles import tiles_of

THROUGH = Space(
    # of fc2. On an H200 it gains on every shape where rows lie in order; by index it gains
    # where F is 256 and 768, and loses where it is 1024 (benchmarks/grouped_dswiglu.py).
    "dswiglu_epilogue",
    lambda dims, itemsize: [{"THROUGH": 0}, {"THROUGH": 1}],
    lambda rows, dims, itemsize: {"THROUGH": int(not dims[3] or dims[1] < 1024)},
    dims=("groups", "n", "k", "by_index"),
)


class Down(NamedTuple):
    """The way of a gradient through fc2 and the activation before it."""

    kind: str  # of the activation, and its form
    form: tuple[Any, ...]
    probs: Tensor | None  # (R,) that the activation multiplies by, if it does
    fc2: Tensor | None  # (E, D, F)
    offs: Tensor | None


def apart(
    down: Down,
    dy: Any,
    h: Tensor | None,
    dy_index: Tensor | None,
    calls: tuple[Call, ...],
    rows: int,
) -> str | None:
    """Why the activation's backward is a kernel of its own; None where the GEMM goes on through it.

    rows: of the product; dy and h may stand for tensors of so many rows.
    """
    first, _, last = calls
    if down.kind != "swiglu" or any(down.form):
        return f"the activation is {down.kind}, in another form than [gate | up]"
    if not (first.needs and {"x", "weight"} <= last.needs) or h is None:
        return "not every gradient is needed"
    if (last.out or {}).get("dx") is not None:
        return "the gradient of the activation has a buffer"
    if torch.compiler.is_compiling() or not isinstance(dy, Tensor):
        return "dy is traced, or quantized"
    if down.probs is not None and down.probs.dtype is not torch.float32:
        return "probs are not float32"
    weight = down.fc2.transpose(1, 2)  # type: ignore[union-attr]
    if dy.dim() != 2 or not dy.dtype == h.dtype == (last.precision.compute or weight.dtype):
        return "dy, h and the weight differ in dtype, or have more than two axes"
    if not K.grouped_dswiglu.launches((dy, h, weight), {}):
        return "the reference runs"
    if not swiglu_bwd_path(dy, weight, h, dy_index):
        return "no path of the GEMM can, see its own"
    if not THROUGH.pick(rows, (*weight.shape, dy_index is not None), dy)["THROUGH"]:
        return "two kernels are faster for this shape"
    return None


def expected(down: Down, dy_index: Tensor | None, calls: tuple[Call, ...], rows: int) -> str | None:
    """`apart` of a backward whose dy and h are not there yet, or may be copied."""
    fc2: Tensor = down.fc2  # type: ignore[assignment]
    dtype = calls[2].precision.compute or fc2.dtype
    dy, h = (fc2.new_empty(1, width, dtype=dtype) for width in (fc2.shape[1], 2 * fc2.shape[2]))
    return apart(down, dy, h, dy_index, calls, rows)


def said(why: str | None) -> str:
    """`expected` in words."""
    if why is None:
        return "the GEMM of fc2's input gradient goes on through SwiGLU"
    return f"the backward of the activation is a kernel of its own: {why}"


def through(
    down: Down, dy: Tensor, h: Tensor, dy_index: Tensor | None, call: Call
) -> tuple[Tensor, Tensor, Tensor]:
    """dh, the activation and dprobs."""
    offs: Tensor = down.offs  # type: ignore[assignment]
    weight: Tensor = call.precision.cast(down.fc2).transpose(1, 2)  # type: ignore[union-attr]
    tiles = tiles_of(call, offs, len(h))
    return K.grouped_dswiglu(dy, weight, h, offs, tiles, down.probs, dy_index)
