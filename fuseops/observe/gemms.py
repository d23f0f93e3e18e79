"""Notes of a plan: which kernel each grouped GEMM of a forward ran on, and which its backward would."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any

from torch import Tensor

from fuseops.kernels import registry
from fuseops.kernels.grouped_paths import EPILOGUE_ACTS, act_path, mm_choice, wgrad_choice
from fuseops.run.checks import running_locals
from fuseops.run.debug import running_op

GEMM_OPS = ("grouped_mm", "grouped_swiglu", "fp8_mm", "fp8_mm_operand")


def describe_launch(call: registry.Call) -> Iterator[str]:
    """Describes a launch while it happens, when the op that launches is known."""
    op, args, keywords = call
    if op.name in ("grouped_mm", "grouped_swiglu"):
        given = inspect.signature(op.launcher).bind(*args, **keywords).arguments
        operands = (given["x"], given["weight"], given.get("index"))
        form = given.get("kind", "swiglu"), given.get("interleave", 0)
        yield f"{running_op()}: {describe_gemm(*operands, form if op.name == 'grouped_swiglu' else None)}"
    if op.name in GEMM_OPS and (chosen := backward_choices()):
        yield f"{running_op()}: {chosen}"


def backward_choices() -> str:
    """The kernels that the running fused op names for its backward; "" where no fused op runs."""
    frame = running_locals()
    if "t" not in frame or frame["step"].kind == "op":
        return ""
    step, x, t = (frame[name] for name in ("step", "x", "t"))
    members = tuple([{name: t[at] for name, at in args} for args in step.args])
    chosen: str = step.target.choices(x, members, step.calls)
    return chosen


def describe_gemm(
    x: Tensor, weight: Tensor, index: Tensor | None, form: tuple[str, int] | None
) -> str:
    """Describes the kernel paths of a grouped GEMM, and of dgrad and wgrad for a contiguous dy.

    form: kind and interleave of the activation in its epilogue, if any.
    """
    _, n, k = weight.shape
    dy: Any = x.new_empty(1, n)  # only its strides are read
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
