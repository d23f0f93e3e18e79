"""A dense MLP over the projections of a transformers module; h holds the outputs of gate and up side by side.

    h = [x Wg^T + bg | x Wu^T + bu];  a = silu(gate) * up, or the module's activation;  y = a Wd^T + bd

Saves only x and h: the pass that makes dh recomputes a. The stock module saves gate, its activation, up and a besides
x, twice as much.
Shapes: x (..., D), gate and up (F, D), down (D, F), h (R, 2F); without a gate h (R, F). R is all rows of x.
Numerics: each product rounds once; dx is the sum of two products, rounded after the first and after the sum.
"""

from __future__ import annotations

import functools
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fuseops import kernels as K
from fuseops.kernels.activation import Form
from fuseops.ops.checks import check_width
from fuseops.ops.op import Call, Grads, Op, Out, Shape
from fuseops.ops.paths import PARAMETER_SOURCE, STAND_IN

from . import adapters, packing, stand_ins
from .adapters import LowRankProduct, cast_factors
from .recognise import GATED, PLAIN_MLP, activation_of, mlp_of, packed_mlp_of


class MLPSaved(NamedTuple):
    x: Tensor | None  # (R, D)
    h: Tensor | None  # (R, 2F) or (R, F)
    gate_through: Tensor | None  # x a^T of each projection's adapter, (R, r)
    up_through: Tensor | None
    down_through: Tensor | None
    gate: Tensor | None  # parameters themselves
    up: Tensor | None
    down: Tensor | None
    gate_a: Tensor | None
    gate_b: Tensor | None
    up_a: Tensor | None
    up_b: Tensor | None
    down_a: Tensor | None
    down_b: Tensor | None


SUFFIXES = {"weight": "", "bias": "_bias", "a": "_a", "b": "_b"}  # of a product's parameters
FIRST_PRODUCTS = "gate", "up"


@stand_ins.owner_parameters(
    *(name + suffix for name in (*FIRST_PRODUCTS, "down") for suffix in SUFFIXES.values())
)
class MLP(Op[MLPSaved]):
    """y = down(act([gate(x) | up(x)])) with the parameters of another module; each projection may have low-rank
    factors.   x (..., D) -> (..., D)
    """

    _dh = ("h", "down", "down_a", "down_b")
    saves_for = {
        "x": (*_dh, "gate", "up", "gate_a", "gate_b", "up_a", "up_b"),
        "gate": (*_dh, "x"),
        "up": (*_dh, "x"),
        "down": ("h",),
        "gate_bias": _dh,
        "up_bias": _dh,
        "down_bias": (),
        "gate_a": (*_dh, "x", "gate_b"),
        "gate_b": (*_dh, "gate_through"),
        "up_a": (*_dh, "x", "up_b"),
        "up_b": (*_dh, "up_through"),
        "down_a": ("h", "down_b"),
        "down_b": ("down_through",),
    }
    floats = True
    autocast = True
    stays_high = "projections of a dense MLP of transformers are not quantized"
    ignores_recipe = True

    def __init__(self, form: Form, width: int, out: int) -> None:
        super().__init__()
        self.kind, self.options, self.width, self.out = form[0], form[1:], width, out

    def extra_repr(self) -> str:
        return f"{self.kind}, {self.width}"

    def out_shape(self, shape: Shape) -> Shape:
        check_width(self, shape, self.width)
        return (*shape[:-1], self.out)

    def fwd(
        self,
        x: Tensor,
        *,
        gate: Tensor | None,
        up: Tensor,
        down: Tensor,
        gate_bias: Tensor | None,
        up_bias: Tensor | None,
        down_bias: Tensor | None,
        gate_a: Tensor | None,
        gate_b: Tensor | None,
        up_a: Tensor | None,
        up_b: Tensor | None,
        down_a: Tensor | None,
        down_b: Tensor | None,
        call: Call,
    ) -> Out:
        cast = call.precision.cast
        rows = x.reshape(-1, self.width)
        firsts = [LowRankProduct(cast(up), cast(up_bias), *cast_factors(rows, up_a, up_b))]
        if gate is not None:
            own = LowRankProduct(cast(gate), cast(gate_bias), *cast_factors(rows, gate_a, gate_b))
            firsts.insert(0, own)
        h, through = _concat_products(rows, firsts)
        a = K.act_fwd(h, self.kind, *self.options)
        last = LowRankProduct(cast(down), cast(down_bias), *cast_factors(rows, down_a, down_b))
        y, down_through = last.fwd(a)
        gate_through, up_through = (None, *through) if gate is None else through
        factors = gate_a, gate_b, up_a, up_b, down_a, down_b
        saved = MLPSaved(rows, h, gate_through, up_through, down_through, gate, up, down, *factors)
        return Out(y.view(*x.shape[:-1], y.shape[-1]), saved)

    def bwd(self, saved: MLPSaved, dy: Tensor, *, call: Call) -> Grads:
        rows = dy.reshape(-1, dy.shape[-1])
        params: dict[str, Tensor | None] = {}
        dh = self._act_bwd(rows, saved, call, params)
        dx: Tensor | None = None
        for name, part in self._first_parts(dh):
            wanted = [*_wanted(call, name), *{"x"} & call.needs]
            product, through = _product(saved, name, part, call)
            dx, grads = product.bwd(part, saved.x, through, wanted, dx)
            params |= _grads_by_name(name, grads)
        return Grads(None if dx is None else dx.view(*dy.shape[:-1], self.width), params)

    def _first_parts(self, dh: Tensor | None) -> list[tuple[str, Tensor]]:
        """(name, its columns of dh) of the first products: one if there is no gate, or if `up` holds both."""
        if dh is None:
            return []
        # not by `saved.gate`, which may be None though there is a gate
        has_gate = "gate" in self.__dict__[PARAMETER_SOURCE].sources
        return [*zip(FIRST_PRODUCTS, dh.chunk(2, dim=1), strict=True)] if has_gate else [("up", dh)]

    def _act_bwd(
        self, dy: Tensor, saved: MLPSaved, call: Call, params: dict[str, Tensor | None]
    ) -> Tensor | None:
        """dh, or None if no gradient before the activation is wanted; adds the gradients of `down` to params."""
        h: Any = saved.h
        product, through = _product(saved, "down", dy, call)
        wanted = _wanted(call, "down")
        before = "x" in call.needs or any(_wanted(call, name) for name in FIRST_PRODUCTS)
        need_a = not {"weight", "a"}.isdisjoint(wanted)
        through_grad = product.through_grad(dy) if before else None
        dh = a = None
        if before:
            da: Any = product.bwd(dy, None, None, ("x",), through_grad=through_grad)[0]
            if need_a:
                dh, _, a = K.scaled_act_bwd(da, h, None, self.kind, False, True, *self.options)
            else:
                dh = K.act_bwd(da, h, self.kind, *self.options)
        elif need_a:
            a = K.act_fwd(h, self.kind, *self.options)
        params |= _grads_by_name(
            "down", product.bwd(dy, a, through, wanted, through_grad=through_grad)[1]
        )
        return dh


def _wanted(call: Call, name: str) -> list[str]:
    """The parameters of a product whose gradients are wanted."""
    return [part for part, suffix in SUFFIXES.items() if name + suffix in call.needs]


def _grads_by_name(name: str, grads: dict[str, Tensor | None]) -> dict[str, Tensor | None]:
    return {name + SUFFIXES[part]: grad for part, grad in grads.items()}


def _product(
    saved: MLPSaved, name: str, dy: Tensor, call: Call
) -> tuple[LowRankProduct, Tensor | None]:
    """A product for its backward, and its saved `through`."""
    weight, a, b, through = (getattr(saved, name + s) for s in ("", "_a", "_b", "_through"))
    return LowRankProduct(call.precision.cast(weight), None, *cast_factors(dy, a, b)), through


def _concat_products(
    x: Tensor, products: list[LowRankProduct]
) -> tuple[Tensor, tuple[Tensor | None, ...]]:
    """The outputs of products of x, concatenated, and `through` of each. Without autograd or tracing they are written
    into one buffer.
    """
    if len(products) == 1 or torch.is_grad_enabled() or torch.compiler.is_compiling():
        found = [product.fwd(x) for product in products]
        y = found[0][0] if len(found) == 1 else torch.cat([y for y, _ in found], 1)
        return y, tuple([through for _, through in found])
    width = sum(p.weight.shape[0] for p in products)  # type: ignore[union-attr, misc]
    h = x.new_empty(len(x), width)
    halves = h.chunk(2, dim=1)
    return h, tuple([p.fwd_into(part, x) for p, part in zip(products, halves, strict=True)])


# --- the stand-in of a module


def _unsupported_reason(module: nn.Module) -> str | None:
    """Why the projections of a module cannot be read, or None."""
    for name in _projection_names(module):
        child: Any = module._modules[name]
        why = (
            adapters.unsupported_reason(child)
            if adapters.is_adapter(child)
            else stand_ins.not_plain_reason(child) or stand_ins.quantized_reason(child.weight)
        )
        if why is not None:
            return f"{name} {why}"
    return None


def _projection_names(module: nn.Module) -> tuple[str, ...]:
    if packing.is_packed(module):
        return packing.PACKED, "down_proj"
    return GATED if "gate_proj" in module._modules else PLAIN_MLP


def build(module: nn.Module) -> MLP | str:
    """The stand-in of a module, or the reason why there is none."""
    packed = packing.is_packed(module)  # the forward of its class cannot run
    found: MLP | None = module.__dict__[STAND_IN] if packed else None
    if (why := _unsupported_reason(module)) is not None:
        return found or why
    if found is not None and stand_ins.is_current(module):
        return found
    form = packed_mlp_of(module) if packed else mlp_of(module)
    if form is None:
        return found or _mismatch_reason(module)
    first = packing.PACKED if packed else "up_proj"
    sizes: Any = [adapters.base_module(module._modules[name]) for name in (first, "down_proj")]
    op = MLP(form, sizes[0].in_features, sizes[1].out_features)
    bind_parameters(op, module)
    return op


def _mismatch_reason(module: Any) -> str:
    act_fn = getattr(module, "act_fn", None)
    if act_fn is not None and activation_of(act_fn) is None:
        return f"unknown activation {type(act_fn).__name__}"
    return "computes something else than down_proj(act_fn(gate_proj(x)) * up_proj(x))"


def bind_parameters(op: MLP, module: nn.Module) -> None:
    """Have the op read the module's parameters by their current names."""
    sources: dict[str, stand_ins.Source] = {}
    for name in _projection_names(module):
        short = "up" if name == packing.PACKED else name.removesuffix("_proj")
        sources[short] = functools.partial(adapters.read_parameter, name, "weight")
        sources[f"{short}_bias"] = functools.partial(adapters.read_parameter, name, "bias")
        for which, part in enumerate(("a", "b")):
            sources[f"{short}_{part}"] = functools.partial(_read_factor, name, which)
    stand_ins.bind_parameters(op, module, sources)


def describe(op: MLP) -> str:
    """A description of the stand-in, for the report."""
    owner = op.__dict__[PARAMETER_SOURCE].owner
    adapted = [
        name for name in _projection_names(owner) if adapters.is_adapter(owner._modules[name])
    ]
    packed = ", gate and up packed" * packing.is_packed(owner)
    return f"one op, {op.kind}{packed}" + f", with adapters of {', '.join(adapted)}" * bool(adapted)


def _read_factor(child: str, which: int, owner: Any) -> Tensor | None:
    part = owner._modules[child]
    adapted = adapters.is_adapter(part) and adapters.active_names(part)
    return adapters.linear_factor(which, part) if adapted else None


@stand_ins.only_while_attached
def forward(self: nn.Module, x: Tensor) -> Tensor:
    """The module's forward, by its stand-in. The stock code runs where a projection cannot be read now (it has a hook,
    say), or where the module's activation has changed.
    """
    if stand_ins.is_current(self) and all(
        _is_readable(self._modules[name]) for name in _projection_names(self)
    ):
        return self.__dict__[STAND_IN](x)
    return (
        _stock_packed_forward(self, x) if packing.is_packed(self) else type(self).forward(self, x)
    )


def _is_readable(part: Any) -> bool:
    """Whether a projection is now a plain Linear, or one whose adapters this op can run."""
    if not adapters.is_adapter(part):
        return stand_ins.is_readable(part)
    stand_ins.guard(part, "forward")
    own = part.__dict__.get("forward")
    ours = own is None or getattr(own, "func", None) is adapters.forward
    return ours and not stand_ins.is_hooked(part) and adapters.is_readable(part)


def _stock_packed_forward(module: Any, x: Tensor) -> Tensor:
    """The stock formula, for a module whose gate and up are packed."""
    gate, up = module.gate_up_proj(x).chunk(2, dim=-1)
    y: Tensor = module.down_proj(module.act_fn(gate) * up)
    return y
