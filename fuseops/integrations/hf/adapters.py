"""LoRA of PEFT beside the weights that it adapts: two small products next to the large one, in one op.

PEFT adapts the parameters of experts (`target_parameters`) by making, in each forward, weights of their full size that
autograd then keeps, and whose full gradient the backward makes. Here W + up down is never made: experts read the
factors at each call, and so does `AdaptedLinear`, in the place of an adapted Linear's forward. What PEFT has merged or
made in another way (DoRA, dropout in training, adapters of mixed batches) runs as PEFT wrote it.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from fuseops import kernels as K
from fuseops.errors import ShapeError
from fuseops.ops.op import Call, Grads, Op, Out, Shape
from fuseops.ops.paths import LENT

from . import lent

Factors = dict[
    str, tuple[Tensor, Tensor]
]  # of a parameter by name: down (E, r, in) and up (E, out, r)
READ = "_adapters"  # key in the `__dict__` of experts, during a call: its Factors


def wraps(module: nn.Module) -> bool:
    """Whether a module is an adapter of PEFT around a Linear or a parameter."""
    return (
        type(module).__module__.startswith("peft.")
        and {"base_layer", "lora_A"} <= module._modules.keys()
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


class Factor:
    """Reads one factor of a parameter, or None."""

    def __init__(self, name: str, which: int) -> None:
        self.name, self.which = name, which

    def __call__(self, owner: Any) -> Tensor | None:
        found = owner.__dict__.get(READ, {}).get(self.name)
        return None if found is None else found[self.which]


# --- of a Linear


class AdaptedLinearSaved(NamedTuple):
    x: Tensor | None  # (R, in)
    through: Tensor | None  # (R, r)
    weight: Tensor | None  # parameters themselves
    down: Tensor | None
    up: Tensor | None


class AdaptedLinear(Op[AdaptedLinearSaved]):
    """y = x W^T + b + (x down^T) up^T; down (r, in), up (out, r).   x (..., in) -> (..., out)"""

    saves_for = {
        "x": ("weight", "down", "up"),
        "weight": ("x",),
        "bias": (),
        "down": ("x", "up"),
        "up": ("through",),
    }
    floats = True
    autocast = True

    weight = lent.lent("weight")
    bias = lent.lent("bias")
    down = lent.lent("down")
    up = lent.lent("up")

    def __init__(self, width: int, out: int) -> None:
        super().__init__()
        self.width, self.out = width, out

    def extra_repr(self) -> str:
        return f"{self.width}, {self.out}"

    def out_shape(self, shape: Shape) -> Shape:
        if not shape or shape[-1] != self.width:
            raise ShapeError(
                f"AdaptedLinear expects x to end in {self.width}, got shape {tuple(shape)}."
            )
        return (*shape[:-1], self.out)

    def fwd(
        self,
        x: Tensor,
        *,
        weight: Tensor,
        bias: Tensor | None,
        down: Tensor,
        up: Tensor,
        call: Call,
    ) -> Out:
        cast, rows = call.precision.cast, x.reshape(-1, self.width)
        through = F.linear(rows, down.to(rows.dtype))
        y = F.linear(rows, cast(weight), cast(bias))  # type: ignore[arg-type]
        y = torch.addmm(y, through, up.to(rows.dtype).t())
        saved = AdaptedLinearSaved(rows, through, weight, down, up)
        return Out(y.view(*x.shape[:-1], self.out), saved)

    def bwd(self, saved: AdaptedLinearSaved, dy: Tensor, *, call: Call) -> Grads:
        x, through, weight, down, up = saved
        needs, rows = call.needs, dy.reshape(-1, dy.shape[-1])
        params: dict[str, Tensor | None] = {}
        if "weight" in needs:
            params["weight"] = torch.mm(rows.t(), x)  # type: ignore[arg-type]
        if "bias" in needs:
            params["bias"] = K.bias_bwd(rows)
        if "up" in needs:
            params["up"] = torch.mm(rows.t(), through)  # type: ignore[arg-type]
        if needs.isdisjoint(("x", "down")):
            return Grads(None, params)
        back = torch.mm(rows, up.to(rows.dtype))  # type: ignore[union-attr]
        if "down" in needs:
            params["down"] = torch.mm(back.t(), x)  # type: ignore[arg-type]
        if "x" not in needs:
            return Grads(None, params)
        dx = torch.mm(rows, call.precision.cast(weight))  # type: ignore[arg-type]
        dx = torch.addmm(dx, back, down.to(rows.dtype))  # type: ignore[union-attr]
        return Grads(dx.view(*dy.shape[:-1], self.width), params)


def _read(name: str, owner: Any) -> Tensor | None:
    found: Tensor | None = getattr(owner._modules["base_layer"], name)
    return found


def _read_factor(which: int, owner: Any) -> Tensor:
    parts = [
        (owner.lora_A[n].weight, owner.lora_B[n].weight * owner.scaling[n])
        for n in active(owner) or ()
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


def build(wrapper: Any) -> AdaptedLinear:
    """The op for an adapted Linear."""
    base = wrapper._modules["base_layer"]
    op = AdaptedLinear(base.in_features, base.out_features)
    sources: dict[str, lent.Source] = {
        name: functools.partial(_read, name) for name in ("weight", "bias")
    }
    sources |= {
        name: functools.partial(_read_factor, which) for which, name in enumerate(("down", "up"))
    }
    lent.lend(op, wrapper, sources)
    return op


def forward(self: Any, x: Tensor, *args: Any, **keywords: Any) -> Tensor:
    """As PEFT's, of an adapted Linear."""
    base = self._modules["base_layer"]
    plain = lent.plain(base, nn.Linear) is None and not lent.sharded(base) and not args
    if keywords or torch.compiler.is_compiling() or not plain or not active(self):
        return type(self).forward(self, x, *args, **keywords)
    return self.__dict__[LENT](x)
