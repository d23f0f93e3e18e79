"""The dense MLP is one joint op: maybe a norm, fc1, an activation, fc2.

Saves x and the pre-activation h only. The backward computes the activation again, for fc2's weight gradient, in the
pass that makes dh, and the normed x for fc1's. Under a recompute policy h goes too, and fc1 runs again.
Where data says that it is faster for a shape, SwiGLU or squared ReLU is the end of fc1's GEMM, and its backward that
of fc2's input gradient, by the kernels of grouped GEMMs over one group: the gradient of the activation never reaches
memory. Elsewhere cuBLAS multiplies and a kernel of its own follows.
Under a recipe in blocks the norm, SwiGLU and its backward write the codes that the GEMMs read (`front`,
`coded_swiglu`), and with `hidden="float8"` h is saved as codes, which both directions of SwiGLU read.
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
from fuseops.kernels.grouped_paths import BACKWARD_ACTS, EPILOGUE_ACTS, act_bwd_path, act_path
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

from . import coded_swiglu
from .activated import through_activation
from .front import Front, FrontSaved
from .gemm_bwd import backward, shaped

# Whether the activation is the end of the GEMM. On an H200 both together gain 1 to 2 % of a training step of the MLPs
# of Llama-3.1-8B and Qwen3-8B at 8192 rows and more. At 512 rows that of fc2 gains 2 %, and that of fc1 loses 7 %: its
# tiles leave multiprocessors idle. The first is of fc1, the second of fc2's input gradient.
SWIGLU = Switch("mlp_swiglu", "EPILOGUE", lambda rows, dims: rows >= 4096)
DSWIGLU = Switch("mlp_dswiglu", "EPILOGUE", lambda rows, dims: rows >= 512)
SLOWER = "two kernels are faster for this shape"
NO_PATH = "no path of the GEMM can, see its own"


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
    bias: Tensor | None  # of fc1, or of the Bias behind it: where h is made again


class DenseMLP(FusedOp):
    """y = fc2(act(fc1(norm(x)))), for every activation, with or without norm and biases."""

    Saved = DenseMLPSaved
    takes_saved = True
    recipes = True
    recomputes = ("h",)

    def __init__(self, *members: Op[Any]) -> None:
        super().__init__(*members)
        self.at = next(i for i, op in enumerate(members) if isinstance(op, Linear))
        self.front = Front(members[: self.at])
        self.takes_quantized = not self.front.ops
        self.last = len(members) - 1
        self.act = members[-2]
        self.biased = self.last - self.at == 3  # by a Bias
        first, act, last = self.at, self.last - 1, self.last
        at = f"{first + 1}.bias" if self.biased else f"{first}.bias"
        own = {"h": f"{act}.x", "form": f"{act}.form", "bias": at}
        own |= {"fc1": f"{first}.weight", "fc2": f"{last}.weight"}
        self.names = {**self.front.names(), **own}
        dh = ("h", "form", "fc2")
        self.saves_for = {
            **self.front.saves_for((*dh, "fc1")),
            f"{first}.weight": (*dh, *self.front.remakes),
            f"{first}.bias": dh,
            f"{last}.weight": ("h", "form"),
            f"{last}.bias": (),
        }
        if self.biased:
            self.saves_for[f"{first + 1}.bias"] = dh

    def fwd(self, x: Operand, t: MemberTensors, calls: Calls, keep: frozenset[str]) -> Out:
        first, last = t[self.at], t[-1]
        y, saved, side = self.front.fwd(x, t[: self.at], calls[self.at])
        bias = t[self.at + 1]["bias"] if self.biased else first["bias"]
        own = form_of(self.act), first["weight"], last["weight"], bias
        s = make_tuple(DenseMLPSaved, (*saved, None, *own))
        h, a = self.activated(s, y, calls)
        del y
        if "h" in keep:
            s = make_tuple(DenseMLPSaved, (*saved, h, *own))
        del h
        if self.takes_quantized:
            x_saved = saved_input(s.x, calls[self.at], again=s.h is None)  # type: ignore[arg-type]
            s = fast_replace(s, x=x_saved)
        y = linear(a, last["weight"], last["bias"], calls[-1], columns=False)[0]
        return Out(y if y.dim() == x.dim() else shaped(y, x), s, side)

    def hidden(self, s: DenseMLPSaved, y: Operand, call: Call) -> Operand:
        """fc1 of its input y, as h is saved: what the backward reads, the forward reads too."""
        roles = call.precision.roles
        weight: Tensor = s.fc1  # type: ignore[assignment]
        if roles is None:
            return linear(y, weight, s.bias, call)[0]
        if coded_swiglu.hidden_from_gemm(roles, y.dtype, len(weight)):
            x = input_operand(y, call, columns=False)
            h = coded_swiglu.hidden(x, weight_rows(weight, call), None, None, s.bias)
            if h is not None:
                return h
        return coded_swiglu.saved(linear(y, weight, s.bias, call, columns=False)[0], roles)

    def activated(self, s: DenseMLPSaved, y: Operand, calls: Calls) -> tuple[Operand, Operand]:
        """fc1 and the activation of it: h and a."""
        call = calls[self.at]
        roles = call.precision.roles
        if roles is None and self.why_apart(s, y, call) is None and not is_fake(y):  # type: ignore[arg-type]
            rows: Tensor = y.reshape(-1, y.shape[-1])  # type: ignore[union-attr]
            weight: Tensor = call.precision.cast(s.fc1)  # type: ignore[assignment]
            kind: str = s.form[0]  # type: ignore[index]
            h, a = K.grouped_swiglu(rows, weight[None], *K.one_group(len(rows), rows), kind=kind)
            return shaped(h, y), shaped(a, y)
        if roles is None:
            h = linear(y, s.fc1, s.bias, call)[0]  # type: ignore[arg-type]
            return h, K.act_fwd(h, *s.form)  # type: ignore[misc]
        hidden = self.hidden(s, y, call)
        if self.why_not_codes(s.form, hidden, calls) is None:
            return hidden, coded_swiglu.forward(flat(hidden), None, None, calls[-1])
        return hidden, K.act_fwd(to_high_precision(hidden), *s.form)  # type: ignore[misc]

    def why_not_codes(self, form: Form | None, h: Operand, calls: Calls) -> str | None:
        """Why SwiGLU and its backward write tensors; None where they write the operands of the GEMMs around them."""
        reads_dh = any("bias" in call.needs for call in calls[self.at : self.last])
        return coded_swiglu.why_apart(form, flat(h), calls[self.at], calls[-1], reads_dh)

    def bwd(
        self, held: list[DenseMLPSaved], dy: Tensor | None, calls: Calls, dside: SideGrads
    ) -> tuple[Grads, ...]:
        s = held.pop()
        taken, s = [s.h, dy], fast_replace(s, h=None)
        lead, first = None if dy is None else dy.shape[:-1], calls[self.at]
        del dy
        dh, last = self.above(s, taken, calls)
        between = calls[self.at + 1 : self.last - 1]
        bias = self._bias_grads(dh[0], between) if between else ()
        own, weight_grad = backward(s.fc1, dh.pop(), first)
        dx = [own.x]
        if own.x is not None and own.x.dim() != len(lead) + 1:  # type: ignore[arg-type]
            dx = [own.x.view(*lead, own.x.shape[-1])]  # type: ignore[misc]
        own = Grads(dx.pop() if self.front.norm is None else None, own.params)
        front = self.front.bwd(s, dx.pop() if dx else None, calls[: self.at], dside)
        if weight_grad is not None:
            own.params["weight"] = weight_grad(self.front.again(s, first, columns=True))  # type: ignore[index]
        return *front, own, *bias, Grads(), last

    def above(self, s: DenseMLPSaved, taken: list[Any], calls: Calls) -> tuple[list[Any], Grads]:
        """dh, and the gradients of fc2.

        taken: h and dy. They go when they are read: h before the gradient of the weight is made, and then dy.
        """
        dy, h = taken.pop(), taken.pop()
        first, call = calls[self.at], calls[-1]
        if h is None and dy is not None and not call.needs.isdisjoint(("x", "weight")):
            h = self.hidden(s, self.front.again(s, first, columns=False), first)
        dh: Operand | None = None
        a: Operand | None = None
        apart = call.precision.roles is not None or self.why_apart_bwd(s, dy, h, call) is not None
        needs = call.needs if apart else call.needs - {"x"}
        grads, weight_grad = backward(s.fc2, dy, fast_replace(call, needs=needs), stays=True)
        if not apart:
            weight: Tensor = call.precision.cast(s.fc2)  # type: ignore[assignment]
            rows = dy.reshape(-1, dy.shape[-1])
            given = h.reshape(-1, h.shape[-1]), rows, weight[None].transpose(1, 2)
            groups, kind = K.one_group(len(rows), rows), s.form[0]  # type: ignore[index]
            dh, a, _ = K.grouped_dswiglu(*given, *groups, kind=kind)
            dh, a = shaped(dh, dy), shaped(a, dy)
            del rows, given
        else:
            between, grads = [h, grads.x], Grads(None, grads.params)
            del h
            trio = first, calls[self.last - 1], call
            reads_dh = any("bias" in call.needs for call in calls[self.at : self.last])
            dh, a, _ = through_activation(s.form, None, None, between, trio, True, reads_dh)
            h = None
        del h, dy
        if weight_grad is not None:
            grads.params["weight"] = weight_grad(a)  # type: ignore[index, arg-type]
        return [dh], grads

    def _bias_grads(self, dh: Any, calls: Calls) -> tuple[Grads, ...]:
        """The Grads of the Bias op."""
        wanted = "bias" in calls[0].needs
        dbias = K.bias_bwd(dh) if wanted and dh is not None else None
        return tuple(Grads(None, {"bias": dbias} if wanted else None) for _ in calls)

    # --- which kernels

    def why_apart(self, s: DenseMLPSaved, y: Any, call: Call) -> str | None:
        """Why the activation is a kernel of its own; None where fc1's GEMM ends in it.   y: the input of fc1"""
        compute, roles = call.precision
        facts = s.form, compute, roles is not None, s.bias is not None
        return cached_decision(_why_apart, (y, s.fc1), *facts)

    def why_apart_bwd(self, s: DenseMLPSaved, dy: Any, h: Any, call: Call) -> str | None:
        """Why the activation's backward is a kernel of its own; None where the GEMM of fc2 goes on through it."""
        needs = call.needs
        if s.fc2 is None or h is None or "x" not in needs or "weight" not in needs:
            return "not every gradient is needed"
        return cached_decision(
            _why_apart_bwd, (dy, h, s.fc2), s.form, call.precision.roles is not None
        )

    def choices(self, x: Any, t: MemberTensors, calls: Calls) -> str:
        first, last, act = t[self.at], t[-1], form_of(self.act)
        bias = t[self.at + 1]["bias"] if self.biased else first["bias"]
        s = DenseMLPSaved(*FrontSaved(None), None, act, first["weight"], last["weight"], bias)
        dtype = calls[self.at].precision.compute or s.fc1.dtype  # type: ignore[union-attr]
        widths = s.fc1.shape[1], s.fc1.shape[0], s.fc2.shape[0]  # type: ignore[union-attr]
        y, h, dy = (x.new_empty(len(x), width, dtype=dtype) for width in widths)
        if calls[self.at].precision.roles is not None:
            return "; ".join(self._producers(x, h, calls))
        name = EPILOGUE_ACTS.get(act[0], "the activation")
        parts = [("fc1", name, self.why_apart(s, y, calls[self.at]))]
        if calls[-1].needs:
            why = self.why_apart_bwd(s, dy, h, calls[-1])
            parts.append(("fc2's input gradient", f"the backward of {name}", why))
        return "; ".join(_in_words(*part) for part in parts)

    def _producers(self, x: Any, h: Tensor, calls: Calls) -> Iterator[str]:
        """Who writes the operands of quantized GEMMs."""
        if self.front.codes(x, calls[self.at]) is not None:
            yield "the norm writes fc1's operand"
        why = self.why_not_codes(form_of(self.act), h, calls)
        if why is None:
            yield "SwiGLU and its backward write those of the GEMMs around them"
        else:
            yield f"the activation writes tensors, which are quantized: {why}"


def _why_apart(
    y: Any,
    weight: Tensor,
    form: Form | None,
    compute: torch.dtype | None,
    quantized: bool,
    biased: bool,
) -> str | None:
    why = _why_no_epilogue(form, y, quantized, compute or weight.dtype)
    if why is None and biased:
        why = "fc1 has a bias"
    if why is not None:
        return why
    if not K.grouped_swiglu.launches((y, weight), {}):
        return "the reference runs"
    if not SWIGLU.enabled(numel(y.shape[:-1]), tuple(weight.shape), y):
        return SLOWER
    kind: str = form[0]  # type: ignore[index]
    return None if act_path(flat(y), weight[None], kind=kind) else NO_PATH


def _why_apart_bwd(
    dy: Any, h: Any, weight: Tensor, form: Form | None, quantized: bool
) -> str | None:
    why = _why_no_epilogue(form, dy, quantized, h.dtype)
    if why is not None:
        return why
    if not K.grouped_dswiglu.launches((dy, h, weight), {}):
        return "the reference runs"
    if not DSWIGLU.enabled(numel(dy.shape[:-1]), tuple(weight.shape[::-1]), dy):
        return SLOWER
    path = act_bwd_path(flat(dy), weight[None].transpose(1, 2), flat(h))
    return None if path else NO_PATH


def _why_no_epilogue(form: Form | None, x: Any, quantized: bool, dtype: torch.dtype) -> str | None:
    """What of a call no GEMM that goes on through an activation takes."""
    kind, *options = form or ("",)
    if kind not in BACKWARD_ACTS or any(options):
        said = ", its gate and up alternate" if kind in BACKWARD_ACTS else ""
        return f"the activation is {kind}{said}"
    if quantized:
        return "a recipe quantizes the operands"
    if torch.compiler.is_compiling() or not isinstance(x, Tensor):
        return "x is traced, or quantized"
    if x.dtype is not dtype:
        return "the operands differ in dtype"
    return None


def _in_words(gemm: str, act: str, why: str | None) -> str:
    """An answer of `why_apart`, for `explain()`."""
    if why is None:
        return f"the GEMM of {gemm} goes on through {act}"
    return f"{act} is a kernel of its own behind {gemm}: {why}"
