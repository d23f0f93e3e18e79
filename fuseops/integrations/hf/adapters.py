"""LoRA of PEFT beside the weights that it adapts: two small products next to the large one, in one op.

PEFT adapts the parameters of experts (`target_parameters`) by making, in each forward, weights of their full size that
autograd then keeps, and whose full gradient the backward makes. Here W + up down is never made: experts read the
factors at each call, and so does `AdaptedLinear`, in the place of an adapted Linear's forward. What PEFT has merged or
made in another way (DoRA, dropout in training, adapters of mixed batches) runs as PEFT wrote it.
"""

from __future__ import annotations

import functools
from collections.abc import Collection
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fuseops import kernels as K
from fuseops.ops.checks import check_width
from fuseops.ops.op import Call, Grads, Op, Out, Shape
from fuseops.ops.paths import STAND_IN

from . import lent

# of a parameter by name: down (E, r, in) and up (E, out, r)
Factors = dict[str, tuple[Tensor, Tensor]]
READ = "_adapters"  # key in the `__dict__` of experts, during a call: its Factors


def wraps(module: nn.Module) -> bool:
    """Whether a module is an adapter of PEFT around a Linear or a parameter."""
    own = module._modules
    return (
        type(module).__module__.startswith("peft.")
        and "base_layer" in own
        and isinstance(own.get("lora_A"), nn.ModuleDict)  # AdaLoRA's are parameters
    )


def adapted(module: Any) -> nn.Module:
    """What an adapter is around, beneath all adapters."""
    while wraps(module):
        module = module._modules["base_layer"]
    found: nn.Module = module
    return found


def active(wrapper: Any) -> list[str] | None:
    """The adapters that add to the weight now; None where PEFT has to run them."""
    if wrapper.disable_adapters or wrapper.merged:
        return None if wrapper.disable_adapters and wrapper.merged else []
    names = [name for name in wrapper.active_adapters if name in wrapper.lora_A]
    for name in names:
        drops = wrapper.training and not isinstance(wrapper.lora_dropout[name], nn.Identity)
        parts = wrapper.lora_A[name], wrapper.lora_B[name]
        if drops or name in wrapper.lora_variant or wrapper.lora_B[name].bias is not None:
            return None
        if any(lent.plain(part, nn.Linear) is not None for part in parts) or lent.sharded(*parts):
            return None
    return names


# --- of experts


def factors(wrapper: Any) -> Factors | None:
    """Those of a run of adapters around experts; None where PEFT has to run one of them."""
    found: Factors = {}
    experts: Any = adapted(wrapper)
    while wraps(wrapper):
        names = active(wrapper)
        turned = wrapper._did_swap_in_out_features == bool(experts.is_transposed)
        if names is None or turned or wrapper.num_experts == 1:
            return None
        if names:
            found[wrapper.parameter_name] = _joined([_factors(wrapper, name) for name in names])
        wrapper = wrapper._modules["base_layer"]
    return found


def _factors(wrapper: Any, name: str) -> tuple[Tensor, Tensor]:
    down, up = wrapper.lora_A[name].weight, wrapper.lora_B[name].weight
    down = down.reshape(wrapper.num_experts, -1, down.shape[-1])
    up = up.reshape(up.shape[0], -1, wrapper.num_experts).permute(2, 0, 1)
    return down, (up * wrapper.scaling[name]).contiguous()


def _joined(parts: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """Several adapters are one of their ranks together."""
    if len(parts) == 1:
        return parts[0]
    return torch.cat([down for down, _ in parts], 1), torch.cat([up for _, up in parts], 2)


def in_place(experts: Any) -> Factors:
    """Those that PEFT has put in the place of parameters, for this call, where nobody has bound its adapters."""
    found: Factors = {}
    ways: Any = experts._modules.get("parametrizations") or {}
    for name, way in ways.items():
        proxy: Any = way[0] if len(way) == 1 else None
        if type(proxy).__name__ != "_LoraFactorsProxy":
            continue
        left, right = proxy.lhs, proxy.rhs
        down, up = (left.mT, right.mT) if experts.is_transposed else (right, left)
        found[name] = down.contiguous(), (up * proxy.scaling).contiguous()
    return found


def read_factor(name: str, which: int, owner: Any) -> Tensor | None:
    """Reads one factor of a parameter, or None."""
    found = owner.__dict__.get(READ, {}).get(name)
    return None if found is None else found[which]


# --- of a Linear


class LowRankProduct(NamedTuple):
    """y = x W^T + bias + (x a^T) b^T over rows, all in one dtype; without a and b a plain product.

    x (R, in), weight (out, in), bias (out,), a (r, in), b (out, r) -> y (R, out), and `through` x a^T (R, r)
    """

    weight: Tensor | None
    bias: Tensor | None = None
    a: Tensor | None = None
    b: Tensor | None = None

    def fwd(self, x: Tensor) -> tuple[Tensor, Tensor | None]:
        y = F.linear(x, self.weight, self.bias)  # type: ignore[arg-type]
        if self.a is None:
            return y, None
        through = F.linear(x, self.a)
        return torch.addmm(y, through, self.b.t()), through  # type: ignore[union-attr]

    def fwd_into(self, y: Tensor, x: Tensor) -> Tensor | None:
        """y is written; -> through. For calls that nobody differentiates or traces."""
        w: Any = self.weight
        if self.bias is None:
            torch.mm(x, w.t(), out=y)
        else:
            torch.addmm(self.bias, x, w.t(), out=y)
        if self.a is None:
            return None
        through = F.linear(x, self.a)
        y.addmm_(through, self.b.t())  # type: ignore[union-attr]
        return through

    def bwd(
        self,
        dy: Tensor,
        x: Tensor | None,
        through: Tensor | None,
        wanted: Collection[str],
        dx: Tensor | None = None,
        through_grad: Tensor | None = None,
    ) -> tuple[Tensor | None, dict[str, Tensor | None]]:
        """The gradient of x, added to dx where that is given, and those of the parameters by name; what is wanted.

        through_grad: that of `through`, where it is known.
        """
        grads: dict[str, Tensor | None] = {}
        left: Any = dy.t()
        if "weight" in wanted:
            grads["weight"] = torch.mm(left, x)  # type: ignore[arg-type]
        if "bias" in wanted:
            grads["bias"] = K.bias_bwd(dy)
        if "b" in wanted:
            grads["b"] = torch.mm(left, through)  # type: ignore[arg-type]
        if through_grad is None and not {"x", "a"}.isdisjoint(wanted):
            through_grad = self.through_grad(dy)
        if "a" in wanted:
            grads["a"] = torch.mm(through_grad.t(), x)  # type: ignore[union-attr, arg-type]
        if "x" in wanted:
            w: Any = self.weight
            dx = torch.mm(dy, w) if dx is None else torch.addmm(dx, dy, w)
            if self.a is not None:
                dx = torch.addmm(dx, through_grad, self.a)  # type: ignore[arg-type]
        return dx, grads

    def through_grad(self, dy: Tensor) -> Tensor | None:
        return None if self.b is None else torch.mm(dy, self.b)


class AdaptedLinearSaved(NamedTuple):
    x: Tensor | None  # (R, in)
    through: Tensor | None  # (R, r)
    weight: Tensor | None  # parameters themselves
    a: Tensor | None
    b: Tensor | None


@lent.borrows("weight", "bias", "a", "b")
class AdaptedLinear(Op[AdaptedLinearSaved]):
    """y = x W^T + bias + (x a^T) b^T, as `LowRankProduct`.   x (..., in) -> (..., out)"""

    saves_for = {
        "x": ("weight", "a", "b"),
        "weight": ("x",),
        "bias": (),
        "a": ("x", "b"),
        "b": ("through",),
    }
    floats = True
    autocast = True

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.width, self.out = width, out

    def extra_repr(self) -> str:
        return f"{self.width}, {self.out}"

    def out_shape(self, shape: Shape) -> Shape:
        check_width(self, shape, self.width)
        return (*shape[:-1], self.out)

    def fwd(
        self, x: Tensor, *, weight: Tensor, bias: Tensor | None, a: Tensor, b: Tensor, call: Call
    ) -> Out:
        cast, rows = call.precision.cast, x.reshape(-1, self.width)
        y, through = LowRankProduct(cast(weight), cast(bias), *lowered(rows, a, b)).fwd(rows)
        saved = AdaptedLinearSaved(rows, through, weight, a, b)
        return Out(y.view(*x.shape[:-1], self.out), saved)

    def bwd(self, saved: AdaptedLinearSaved, dy: Tensor, *, call: Call) -> Grads:
        x, through, weight, a, b = saved
        rows = dy.reshape(-1, dy.shape[-1])
        product = LowRankProduct(call.precision.cast(weight), None, *lowered(rows, a, b))
        dx, params = product.bwd(rows, x, through, call.needs)
        return Grads(None if dx is None else dx.view(*dy.shape[:-1], self.width), params)


def lowered(x: Tensor, *factors: Tensor | None) -> tuple[Tensor | None, ...]:
    """Factors in the dtype of x: PEFT keeps them in float32 beside weights of less."""
    return tuple([None if t is None else t.to(x.dtype) for t in factors])


def read(child: str, name: str, owner: Any) -> Tensor | None:
    """Reads a parameter of a child, or of what the adapters that stand there are around."""
    found: Tensor | None = getattr(adapted(owner._modules[child]), name)
    return found


def factor(which: int, wrapper: Any) -> Tensor:
    """a (r, in) or b (out, r) of an adapted Linear: of all active adapters together."""
    parts = [
        (wrapper.lora_A[n].weight, wrapper.lora_B[n].weight * wrapper.scaling[n])
        for n in active(wrapper) or ()
    ]
    each = [part[which] for part in parts]
    return each[0] if len(each) == 1 else torch.cat(each, which)


# --- in the place of an adapter's forward


def refused(wrapper: Any) -> str | None:
    """Why an adapter stays PEFT's, or None."""
    inner = adapted(wrapper)
    if hasattr(wrapper, "parameter_name"):
        known = hasattr(inner, "is_transposed")
        return None if known else f"adapts a parameter of {type(inner).__name__}"
    base: Any = wrapper._modules["base_layer"]
    why = lent.plain(base, nn.Linear) or lent.quantized(base.weight)
    return None if why is None else f"its base layer {why}"


def build(wrapper: Any) -> AdaptedLinear | str:
    """The op for an adapted Linear, or why there is none."""
    if (why := refused(wrapper)) is not None:
        return why
    base = wrapper._modules["base_layer"]
    op = AdaptedLinear(base.in_features, base.out_features)
    sources: dict[str, lent.Source] = {
        name: functools.partial(read, "base_layer", name) for name in ("weight", "bias")
    }
    sources |= {name: functools.partial(factor, which) for which, name in enumerate(("a", "b"))}
    lent.lend(op, wrapper, sources)
    return op


@lent.while_hung
def forward(self: Any, x: Tensor, *args: Any, **keywords: Any) -> Tensor:
    """As PEFT's, of an adapted Linear."""
    if args or keywords or not here(self) or not active(self):
        return type(self).forward(self, x, *args, **keywords)
    return self.__dict__[STAND_IN](x)


def here(wrapper: Any) -> bool:
    """Whether an adapted Linear may be read past PEFT's forward at the moment."""
    base = wrapper._modules["base_layer"]
    plain = lent.plain(base, nn.Linear) is None and not lent.sharded(base)
    return plain and not torch.compiler.is_compiling() and active(wrapper) is not None
