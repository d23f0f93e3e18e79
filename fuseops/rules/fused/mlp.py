"""The dense MLP is one joint op: an optional norm, fc1, an activation, fc2.

Saves x and the pre-activation h only. The backward recomputes the activation for fc2's weight gradient, in the pass
that makes dh, and the normed x for fc1's. Under a recompute policy h is not saved either, and fc1 runs again.
For shapes for which measurements say that it is faster, SwiGLU or squared ReLU is the epilogue of fc1's GEMM, and its
backward that of fc2's input gradient, by the kernels of grouped GEMMs over one group: the gradient of the activation
never reaches memory. Elsewhere cuBLAS multiplies and a separate kernel follows.
Under a recipe in blocks the norm, SwiGLU and its backward write the operands of the GEMMs (`norm_prologue`,
`quantized_swiglu`), and with `hidden="float8"` h is saved as codes, which both directions of SwiGLU read.
Shapes: x (..., D), h (..., 2F) or (..., F), y (..., D').
Numerics: every GEMM and activation rounds as the op alone does, a Bias behind fc1 is added before the one rounding; the
activation of the backward comes from another kernel than that of the forward, so it may differ in the last place.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fuseops import kernels as K
from fuseops.kernels.activation import Form
from fuseops.kernels.configs import Switch
from fuseops.kernels.grouped_paths import EPILOGUE_ACTS, act_bwd_path, act_path
from fuseops.kernels.registry import cached_decision
from fuseops.ops.activations import form_of
from fuseops.ops.linear import (
    Linear,
    flat,
    input_operand,
    linear,
    saved_input,
    to_high_precision,
    weight_rows,
)
from fuseops.ops.op import (
    Call,
    Calls,
    FusedOp,
    Grads,
    MemberTensors,
    Op,
    Out,
    SideGrads,
    fast_replace,
    make_tuple,
    numel,
)
from fuseops.recipes import Operand
from fuseops.torch_private import is_fake

from . import quantized_swiglu
from .act_backward import activation_backward
from .dswiglu import NO_PATH, SLOWER, form_reason
from .gemm_bwd import backward, shaped
from .norm_prologue import NormPrologue, PrologueSaved

# Whether the activation is the epilogue of fc1's GEMM, and its backward that of fc2's input gradient. On an H200 both
# together gain 1 to 2 % of a training step of the MLPs of Llama-3.1-8B and Qwen3-8B at 8192 rows and more. At 512 rows
# the backward gains 2 %, and the forward loses 7 %: its tiles leave multiprocessors idle.
SWIGLU = Switch("mlp_swiglu", "EPILOGUE", lambda rows, dims: rows >= 4096)
DSWIGLU = Switch("mlp_dswiglu", "EPILOGUE", lambda rows, dims: rows >= 512)


class DenseMLPSaved(NamedTuple):
    x: Operand | None
    gamma: Tensor | None
    beta: Tensor | None
    mean: Tensor | None
    rstd: Tensor | None
    eps: float | None
    dtypes: tuple[torch.dtype, torch.dtype] | None
    h: Operand | None  # the pre-activation
    form: Form | None  # of the activation in the forward
    fc1: Tensor | None  # parameters themselves
    fc2: Tensor | None
    bias: Tensor | None  # of fc1, or of the Bias behind it; read where h is recomputed


class DenseMLP(FusedOp):
    """y = fc2(act(fc1(norm(x)))), for every activation, with or without norm and biases."""

    Saved = DenseMLPSaved
    takes_saved = True
    recipes = True
    recomputes = ("h",)

    def __init__(self, *members: Op[Any]) -> None:
        super().__init__(*members)
        self.fc1_index = next(i for i, op in enumerate(members) if isinstance(op, Linear))
        self.prologue = NormPrologue(members[: self.fc1_index])
        self.takes_quantized = not self.prologue.ops
        self.last = len(members) - 1
        self.act = members[-2]
        self.bias_index = self.last - 2  # of fc1, or of the Bias behind it
        first, act, last = self.fc1_index, self.last - 1, self.last
        own = {"h": f"{act}.x", "form": f"{act}.form", "bias": f"{self.bias_index}.bias"}
        own |= {"fc1": f"{first}.weight", "fc2": f"{last}.weight"}
        self.names = {**self.prologue.names(), **own}
        dh = ("h", "form", "fc2")
        self.saves_for = {
            **self.prologue.saves_for((*dh, "fc1")),
            f"{first}.weight": (*dh, *self.prologue.recompute_fields),
            f"{self.bias_index}.bias": dh,
            f"{last}.weight": ("h", "form"),
            f"{last}.bias": (),
        }

    def fwd(self, x: Operand, t: MemberTensors, calls: Calls, keep: frozenset[str]) -> Out:
        first, last = t[self.fc1_index], t[-1]
        y, saved, side = self.prologue.fwd(x, t[: self.fc1_index], calls[self.fc1_index])
        own = form_of(self.act), first["weight"], last["weight"], t[self.bias_index]["bias"]
        s = make_tuple(DenseMLPSaved, (*saved, None, *own))
        h, a = self.fc1_and_act(s, y, calls)
        del y
        if "h" in keep:
            s = make_tuple(DenseMLPSaved, (*saved, h, *own))
        del h
        if self.takes_quantized:
            x_saved = saved_input(s.x, calls[self.fc1_index], again=s.h is None)  # type: ignore[arg-type]
            s = fast_replace(s, x=x_saved)
        y = linear(a, last["weight"], last["bias"], calls[-1], columns=False)[0]
        return Out(y if y.dim() == x.dim() else shaped(y, x), s, side)

    def hidden(self, s: DenseMLPSaved, y: Operand, call: Call) -> Operand:
        """h = fc1(y) in the format in which it is saved, for forward and recomputation."""
        roles = call.precision.roles
        weight: Tensor = s.fc1  # type: ignore[assignment]
        if roles is None:
            return linear(y, weight, s.bias, call)[0]
        if quantized_swiglu.gemm_quantizes_hidden(roles, y.dtype, len(weight)):
            x = input_operand(y, call, columns=False)
            h = quantized_swiglu.fc1_to_codes(x, weight_rows(weight, call), None, None, s.bias)
            if h is not None:
                return h
        return quantized_swiglu.quantize_hidden(
            linear(y, weight, s.bias, call, columns=False)[0], roles
        )

    def fc1_and_act(self, s: DenseMLPSaved, y: Operand, calls: Calls) -> tuple[Operand, Operand]:
        """(h, the activation of it), in one kernel where that is faster."""
        call = calls[self.fc1_index]
        roles = call.precision.roles
        if roles is None and self.unfused_reason(s, y, call) is None and not is_fake(y):  # type: ignore[arg-type]
            rows: Tensor = y.reshape(-1, y.shape[-1])  # type: ignore[union-attr]
            weight: Tensor = call.precision.cast(s.fc1)  # type: ignore[assignment]
            kind: str = s.form[0]  # type: ignore[index]
            h, a = K.grouped_swiglu(rows, weight[None], *K.one_group(len(rows), rows), kind=kind)
            return shaped(h, y), shaped(a, y)
        if roles is None:
            h = linear(y, s.fc1, s.bias, call)[0]  # type: ignore[arg-type]
            return h, K.act_fwd(h, *s.form)  # type: ignore[misc]
        hidden = self.hidden(s, y, call)
        if self.unquantized_reason(s.form, hidden, calls) is None:
            return hidden, quantized_swiglu.forward(flat(hidden), None, None, calls[-1])
        return hidden, K.act_fwd(to_high_precision(hidden), *s.form)  # type: ignore[misc]

    def unquantized_reason(self, form: Form | None, h: Operand, calls: Calls) -> str | None:
        """Why SwiGLU and its backward write tensors; None where they write the operands of the next GEMMs."""
        return quantized_swiglu.unfused_reason(
            form, flat(h), calls[self.fc1_index], calls[-1], self._needs_dh_tensor(calls)
        )

    def _needs_dh_tensor(self, calls: Calls) -> bool:
        """Whether dh is read in high precision, for the gradient of a bias."""
        return any("bias" in call.needs for call in calls[self.fc1_index : self.last])

    def bwd(
        self, owned: list[DenseMLPSaved], dy: Tensor | None, calls: Calls, dside: SideGrads
    ) -> tuple[Grads, ...]:
        s = owned.pop()
        h_and_dy, s = [s.h, dy], fast_replace(s, h=None)
        lead, first = None if dy is None else dy.shape[:-1], calls[self.fc1_index]
        del dy
        dh, last = self.fc2_and_act_backward(s, h_and_dy, calls)
        bias = [_bias_grads(dh[0], call) for call in calls[self.fc1_index + 1 : self.last - 1]]
        own, weight_grad = backward(s.fc1, dh.pop(), first)
        dx = [own.x]
        if own.x is not None and own.x.dim() != len(lead) + 1:  # type: ignore[arg-type]
            dx = [own.x.view(*lead, own.x.shape[-1])]  # type: ignore[misc]
        own = Grads(dx.pop() if self.prologue.norm is None else None, own.params)
        prologue_grads = self.prologue.bwd(
            s, dx.pop() if dx else None, calls[: self.fc1_index], dside
        )
        if weight_grad is not None:
            own.params["weight"] = weight_grad(self.prologue.recompute(s, first, columns=True))  # type: ignore[index]
        return *prologue_grads, own, *bias, Grads(), last

    def fc2_and_act_backward(
        self, s: DenseMLPSaved, h_and_dy: list[Any], calls: Calls
    ) -> tuple[list[Any], Grads]:
        """([dh], the Grads of fc2).

        h_and_dy: popped, so that h is freed before the gradient of the weight is made, and dy after it
        """
        dy, h = h_and_dy.pop(), h_and_dy.pop()
        first, call = calls[self.fc1_index], calls[-1]
        if h is None and dy is not None and not call.needs.isdisjoint(("x", "weight")):
            h = self.hidden(s, self.prologue.recompute(s, first, columns=False), first)
        dh: Operand | None = None
        a: Operand | None = None
        unfused = (
            call.precision.roles is not None or self.unfused_reason_bwd(s, dy, h, call) is not None
        )
        needs = call.needs if unfused else call.needs - {"x"}
        grads, weight_grad = backward(s.fc2, dy, fast_replace(call, needs=needs), dy_stays=True)
        if not unfused:
            weight: Tensor = call.precision.cast(s.fc2)  # type: ignore[assignment]
            rows = dy.reshape(-1, dy.shape[-1])
            operands = h.reshape(-1, h.shape[-1]), rows, weight[None].transpose(1, 2)
            groups, kind = K.one_group(len(rows), rows), s.form[0]  # type: ignore[index]
            dh, a, _ = K.grouped_dswiglu(*operands, *groups, kind=kind)
            dh, a = shaped(dh, dy), shaped(a, dy)
            del rows, operands
        else:
            h_and_da, grads = [h, grads.x], Grads(None, grads.params)
            del h
            mlp_calls = first, calls[self.last - 1], call
            dh, a, _ = activation_backward(
                s.form, None, None, h_and_da, mlp_calls, True, self._needs_dh_tensor(calls)
            )
            h = None
        del h, dy
        if weight_grad is not None:
            grads.params["weight"] = weight_grad(a)  # type: ignore[index, arg-type]
        return [dh], grads

    # --- which kernels

    def unfused_reason(self, s: DenseMLPSaved, y: Any, call: Call) -> str | None:
        """Why the activation is a separate kernel; None where it is the epilogue of fc1's GEMM.   y: input of fc1"""
        facts = s.form, call.precision.compute, s.bias is not None
        return cached_decision(_unfused_reason, (y, s.fc1), *facts)

    def unfused_reason_bwd(self, s: DenseMLPSaved, dy: Any, h: Any, call: Call) -> str | None:
        """Why the activation's backward is a separate kernel; None where it is the epilogue of fc2's GEMM."""
        needs = call.needs
        if s.fc2 is None or h is None or "x" not in needs or "weight" not in needs:
            return "not every gradient is needed"
        return cached_decision(_unfused_reason_bwd, (dy, h, s.fc2), s.form)

    def choices(self, x: Any, t: MemberTensors, calls: Calls) -> str:
        first, last, act = t[self.fc1_index], t[-1], form_of(self.act)
        bias = t[self.bias_index]["bias"]
        s = DenseMLPSaved(*PrologueSaved(None), None, act, first["weight"], last["weight"], bias)
        dtype = calls[self.fc1_index].precision.compute or s.fc1.dtype  # type: ignore[union-attr]
        widths = s.fc1.shape[1], s.fc1.shape[0], s.fc2.shape[0]  # type: ignore[union-attr]
        y, h, dy = (x.new_empty(len(x), width, dtype=dtype) for width in widths)
        if calls[self.fc1_index].precision.roles is not None:
            return "; ".join(self._describe_producers(x, h, calls))
        name = EPILOGUE_ACTS.get(act[0], "the activation")
        parts = [("fc1", name, self.unfused_reason(s, y, calls[self.fc1_index]))]
        if calls[-1].needs:
            why = self.unfused_reason_bwd(s, dy, h, calls[-1])
            parts.append(("fc2's input gradient", f"the backward of {name}", why))
        return "; ".join(_describe(*part) for part in parts)

    def _describe_producers(self, x: Any, h: Tensor, calls: Calls) -> Iterator[str]:
        """Notes on the kernels that write the operands of quantized GEMMs."""
        if self.prologue.operand_format(x, calls[self.fc1_index]) is not None:
            yield "the norm writes fc1's operand"
        why = self.unquantized_reason(form_of(self.act), h, calls)
        if why is None:
            yield "SwiGLU and its backward write those of the GEMMs around them"
        else:
            yield f"the activation writes tensors, which are quantized: {why}"


def _bias_grads(dh: Any, call: Call) -> Grads:
    """The Grads of the Bias behind fc1."""
    if "bias" not in call.needs:
        return Grads()
    return Grads(None, {"bias": None if dh is None else K.bias_bwd(dh)})


def _unfused_reason(
    y: Any,
    weight: Tensor,
    form: Form | None,
    compute: torch.dtype | None,
    has_bias: bool,
) -> str | None:
    why = _no_epilogue_reason(form, y, compute or weight.dtype)
    if why is None and has_bias:
        why = "fc1 has a bias"
    if why is not None:
        return why
    if not K.grouped_swiglu.launches((y, weight), {}):
        return "the twin runs"
    if not SWIGLU.enabled(numel(y.shape[:-1]), tuple(weight.shape), y):
        return SLOWER
    kind: str = form[0]  # type: ignore[index]
    return None if act_path(flat(y), weight[None], kind=kind) else NO_PATH


def _unfused_reason_bwd(dy: Any, h: Any, weight: Tensor, form: Form | None) -> str | None:
    why = _no_epilogue_reason(form, dy, h.dtype)
    if why is not None:
        return why
    if not K.grouped_dswiglu.launches((dy, h, weight), {}):
        return "the twin runs"
    if not DSWIGLU.enabled(numel(dy.shape[:-1]), tuple(weight.shape[::-1]), dy):
        return SLOWER
    path = act_bwd_path(flat(dy), weight[None].transpose(1, 2), flat(h))
    return None if path else NO_PATH


def _no_epilogue_reason(form: Form | None, x: Any, dtype: torch.dtype) -> str | None:
    """Why no GEMM with an activation as its epilogue takes these operands, None if one may."""
    if (why := form_reason(form)) is not None:
        return why
    if torch.compiler.is_compiling() or not isinstance(x, Tensor):
        return "x is traced, or quantized"
    if x.dtype is not dtype:
        return "the operands differ in dtype"
    return None


def _describe(gemm: str, act: str, why: str | None) -> str:
    """A result of `unfused_reason` as a sentence of `explain()`."""
    if why is None:
        return f"the GEMM of {gemm} goes on through {act}"
    return f"{act} is a kernel of its own behind {gemm}: {why}"
