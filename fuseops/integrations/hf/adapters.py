"""LoRA adapters of PEFT run as low-rank products in the op of the weight that they adapt.

For experts (`target_parameters`) PEFT materializes W + up down at full size in each forward; autograd keeps it, and the
backward makes its full gradient. Here it is never materialized: experts, and `AdaptedLinear`, the stand-in of an
adapted Linear, read the factors at each call. Merged adapters and other variants (DoRA, dropout in training, adapters
of mixed batches) run as PEFT wrote them.
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

from . import stand_ins

# by parameter name: down (E, r, in) and up (E, out, r)
Factors = dict[str, tuple[Tensor, Tensor]]
ADAPTERS = "_adapters"  # key in the `__dict__` of experts, during a call: its Factors


def is_adapter(module: nn.Module) -> bool:
    """Whether a module is an adapter of PEFT around a Linear or a parameter."""
    own = module._modules
    return (
        type(module).__module__.startswith("peft.")
        and "base_layer" in own
        and isinstance(own.get("lora_A"), nn.ModuleDict)  # AdaLoRA's are parameters
    )


def base_module(module: Any) -> nn.Module:
    """The module below all adapters that wrap it."""
    while is_adapter(module):
        module = module._modules["base_layer"]
    found: nn.Module = module
    return found


def active_names(wrapper: Any) -> list[str] | None:
    """Names of the adapters that are active now; None where only PEFT can run them."""
    if wrapper.disable_adapters or wrapper.merged:
        return None if wrapper.disable_adapters and wrapper.merged else []
    names = [name for name in wrapper.active_adapters if name in wrapper.lora_A]
    for name in names:
        has_dropout = wrapper.training and not isinstance(wrapper.lora_dropout[name], nn.Identity)
        parts = wrapper.lora_A[name], wrapper.lora_B[name]
        if has_dropout or name in wrapper.lora_variant or wrapper.lora_B[name].bias is not None:
            return None
        if not stand_ins.is_readable(*parts):
            return None
    return names


# --- of experts


def expert_factors(wrapper: Any) -> Factors | None:
    """The factors of nested adapters around experts; None where only PEFT can run one of them."""
    found: Factors = {}
    experts: Any = base_module(wrapper)
    while is_adapter(wrapper):
        names = active_names(wrapper)
        mismatched = wrapper._did_swap_in_out_features == bool(experts.is_transposed)
        if names is None or mismatched or wrapper.num_experts == 1:
            return None
        if names:
            found[wrapper.parameter_name] = _concatenated(
                [_scaled_factors(wrapper, name) for name in names]
            )
        wrapper = wrapper._modules["base_layer"]
    return found


def _scaled_factors(wrapper: Any, name: str) -> tuple[Tensor, Tensor]:
    down, up = wrapper.lora_A[name].weight, wrapper.lora_B[name].weight
    down = down.reshape(wrapper.num_experts, -1, down.shape[-1])
    up = up.reshape(up.shape[0], -1, wrapper.num_experts).permute(2, 0, 1)
    return down, (up * wrapper.scaling[name]).contiguous()


def _concatenated(parts: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    """The factors of several adapters as those of one, whose rank is the sum of theirs."""
    if len(parts) == 1:
        return parts[0]
    return torch.cat([down for down, _ in parts], 1), torch.cat([up for _, up in parts], 2)


def proxied_factors(experts: Any) -> Factors:
    """The factors of the proxies that PEFT's own forward has put in the place of parameters for this call."""
    found: Factors = {}
    parametrizations: Any = experts._modules.get("parametrizations") or {}
    for name, proxies in parametrizations.items():
        proxy: Any = proxies[0] if len(proxies) == 1 else None
        if type(proxy).__name__ != "_LoraFactorsProxy":
            continue
        left, right = proxy.lhs, proxy.rhs
        down, up = (left.mT, right.mT) if experts.is_transposed else (right, left)
        found[name] = down.contiguous(), (up * proxy.scaling).contiguous()
    return found


def read_factor(name: str, which: int, owner: Any) -> Tensor | None:
    """Factor 0 (down) or 1 (up) of an experts parameter during a call, or None."""
    found = owner.__dict__.get(ADAPTERS, {}).get(name)
    return None if found is None else found[which]


# --- of a Linear


class LowRankProduct(NamedTuple):
    """y = x W^T + bias + (x a^T) b^T over rows, all in one dtype; x W^T + bias without a and b.

    x (R, in), weight (out, in), bias (out,), a (r, in), b (out, r) -> y (R, out), and `through` = x a^T (R, r)
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
        """`fwd` that writes into y, for calls without autograd or tracing.   -> through"""
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
        """The wanted gradients: of x, added to dx if that is given, and of the parameters by name.

        through_grad: the gradient of `through`, if it is computed already.
        """
        grads: dict[str, Tensor | None] = {}
        dy_t: Any = dy.t()
        if "weight" in wanted:
            grads["weight"] = torch.mm(dy_t, x)  # type: ignore[arg-type]
        if "bias" in wanted:
            grads["bias"] = K.bias_bwd(dy)
        if "b" in wanted:
            grads["b"] = torch.mm(dy_t, through)  # type: ignore[arg-type]
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


@stand_ins.owner_parameters("weight", "bias", "a", "b")
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
    stays_high = "low-rank products are not quantized"
    ignores_recipe = True

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
        y, through = LowRankProduct(cast(weight), cast(bias), *cast_factors(rows, a, b)).fwd(rows)
        saved = AdaptedLinearSaved(rows, through, weight, a, b)
        return Out(y.view(*x.shape[:-1], self.out), saved)

    def bwd(self, saved: AdaptedLinearSaved, dy: Tensor, *, call: Call) -> Grads:
        x, through, weight, a, b = saved
        rows = dy.reshape(-1, dy.shape[-1])
        product = LowRankProduct(call.precision.cast(weight), None, *cast_factors(rows, a, b))
        dx, params = product.bwd(rows, x, through, call.needs)
        return Grads(None if dx is None else dx.view(*dy.shape[:-1], self.width), params)


def cast_factors(x: Tensor, *factors: Tensor | None) -> tuple[Tensor | None, ...]:
    """Factors in the dtype of x: PEFT keeps them in float32 even for weights in 16 bits."""
    return tuple([None if t is None else t.to(x.dtype) for t in factors])


def read_parameter(child: str, name: str, owner: Any) -> Tensor | None:
    """A parameter of a child, below the adapters that wrap it."""
    found: Tensor | None = getattr(base_module(owner._modules[child]), name)
    return found


def linear_factor(which: int, wrapper: Any) -> Tensor:
    """Factor a (r, in) or b (out, r) of an adapted Linear, concatenated over its active adapters."""
    parts = [
        (wrapper.lora_A[n].weight, wrapper.lora_B[n].weight * wrapper.scaling[n])
        for n in active_names(wrapper) or ()
    ]
    each = [part[which] for part in parts]
    return each[0] if len(each) == 1 else torch.cat(each, which)


# --- the stand-in of an adapted Linear


def unsupported_reason(wrapper: Any) -> str | None:
    """Why PEFT keeps running an adapter, or None."""
    inner = base_module(wrapper)
    if hasattr(wrapper, "parameter_name"):
        known = hasattr(inner, "is_transposed")
        return None if known else f"adapts a parameter of {type(inner).__name__}"
    base: Any = wrapper._modules["base_layer"]
    why = stand_ins.not_plain_reason(base) or stand_ins.quantized_reason(base.weight)
    return None if why is None else f"its base layer {why}"


def build(wrapper: Any) -> AdaptedLinear | str:
    """The stand-in of an adapted Linear, or the reason why there is none."""
    if (why := unsupported_reason(wrapper)) is not None:
        return why
    base = wrapper._modules["base_layer"]
    op = AdaptedLinear(base.in_features, base.out_features)
    sources: dict[str, stand_ins.Source] = {
        name: functools.partial(read_parameter, "base_layer", name) for name in ("weight", "bias")
    }
    sources |= {
        name: functools.partial(linear_factor, which) for which, name in enumerate(("a", "b"))
    }
    stand_ins.bind_parameters(op, wrapper, sources)
    return op


@stand_ins.only_while_attached
def forward(self: Any, x: Tensor, *args: Any, **keywords: Any) -> Tensor:
    """The forward of an adapted Linear, by its stand-in; by PEFT for calls that the stand-in does not support."""
    if args or keywords or not is_readable(self) or not active_names(self):
        return type(self).forward(self, x, *args, **keywords)
    return self.__dict__[STAND_IN](x)


def is_readable(wrapper: Any) -> bool:
    """Whether the parameters of an adapted Linear may be used now without calling PEFT's forward."""
    plain = stand_ins.is_readable(wrapper._modules["base_layer"])
    return plain and not torch.compiler.is_compiling() and active_names(wrapper) is not None
