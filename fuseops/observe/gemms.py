"""Which kernel each grouped GEMM of a forward ran, and which its backward would: notes of the plans."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from fuseops.kernels import registry
from fuseops.kernels.grouped_paths import EPILOGUE_ACTS, act_path, mm_choice, wgrad_choice
from fuseops.run.checks import running_locals
from fuseops.run.debug import running_op

MULTIPLY = ("grouped_mm", "grouped_swiglu", "fp8_mm", "fp8_mm_operand")


def launched(call: registry.Call) -> Iterator[str]:
    """Says what a launch is, when it happens, which is when it is known whose it is."""
    op, args, keywords = call
    if op.name in ("grouped_mm", "grouped_swiglu"):
        given = inspect.signature(op.launcher).bind(*args, **keywords).arguments
        operands = (given["x"], given["weight"], given.get("index"))
        form = given.get("kind", "swiglu"), given.get("interleave", 0)
        yield f"{running_op()}: {words(*operands, form if op.name == 'grouped_swiglu' else None)}"
    if op.name in MULTIPLY and (chosen := choices()):
        yield f"{running_op()}: {chosen}"


def choices() -> str:
    """What the fused op that runs says of its backward."""
    seen = running_locals()
    if "t" not in seen or seen["step"].kind == "op":
        return ""
    step, x, t = (seen[name] for name in ("step", "x", "t"))
    members = tuple([{name: t[at] for name, at in args} for args in step.args])
    said: str = step.target.choices(x, members, step.calls)
    return said


def words(x: Tensor, weight: Tensor, index: Tensor | None, form: tuple[str, int] | None) -> str:
    """Names the paths of a grouped GEMM and of the two in its backward, whose dy is taken to be contiguous.

    form: of the activation that it may end in, its kind and interleave.
    """
    _, n, k = weight.shape
    dy: Any = x.new_empty(1, n)  # its strides are asked for, not its rows
    forward = mm_choice(x, weight, index).words
    ends = (
        f" with {EPILOGUE_ACTS[form[0]]} at its end"
        if form and act_path(x, weight, index, *form)
        else ""
    )
    dgrad = mm_choice(dy, weight.transpose(1, 2)).words
    wgrad = wgrad_choice(dy, x, None, index, len(weight)).words
    backward = f"dgrad {dgrad}, wgrad {wgrad}" if dgrad != wgrad else dgrad
    rest = "" if backward == forward else f"; backward {backward}"
    return f"grouped GEMM N {n}, K {k}: {forward}{ends}{rest}"
