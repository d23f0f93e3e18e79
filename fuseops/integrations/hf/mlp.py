"""A dense MLP over the projections of a module that keeps them: gate and up are two weights of one product.

    h = [x Wg^T + bg | x Wu^T + bu];  a = silu(gate) * up, or what the module has;  y = a Wd^T + bd

Saves x and h alone: the activation comes again in the backward, from the pass that makes dh. Stock saves the gate, its
activation, up and a beside x, twice as much.
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

from . import adapters, lent, packing
from .adapters import LowRankProduct, lowered
from .recognise import GATED, PLAIN_MLP, activation_of, gated_by, mlp_of


class MLPSaved(NamedTuple):
    x: Tensor | None  # (R, D)
    h: Tensor | None  # (R, 2F) or (R, F)
    gate_through: Tensor | None  # x a^T of each adapter, (R, r)
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


FIRSTS = "gate", "up"


@lent.borrows(*(name + suffix for name in (*FIRSTS, "down") for suffix in SUFFIXES.values()))
class MLP(Op[MLPSaved]):
    """y = down(act([gate(x) | up(x)])), of weights that a module lends; any of the three with low-rank factors beside
    it.   x (..., D) -> (..., D)
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
        firsts = [LowRankProduct(cast(up), cast(up_bias), *lowered(rows, up_a, up_b))]
        if gate is not None:
            own = LowRankProduct(cast(gate), cast(gate_bias), *lowered(rows, gate_a, gate_b))
            firsts.insert(0, own)
        h, through = _beside(rows, firsts)
        a = K.act_fwd(h, self.kind, *self.options)
        last = LowRankProduct(cast(down), cast(down_bias), *lowered(rows, down_a, down_b))
        y, down_through = last.fwd(a)
        gate_through, up_through = (None, *through) if gate is None else through
        factors = gate_a, gate_b, up_a, up_b, down_a, down_b
        saved = MLPSaved(rows, h, gate_through, up_through, down_through, gate, up, down, *factors)
        return Out(y.view(*x.shape[:-1], y.shape[-1]), saved)

    def bwd(self, saved: MLPSaved, dy: Tensor, *, call: Call) -> Grads:
        rows = dy.reshape(-1, dy.shape[-1])
        params: dict[str, Tensor | None] = {}
        dh = self._through_act(rows, saved, call, params)
        dx: Tensor | None = None
        for name, part in self._parts(dh):
            wanted = [*_wanted(call, name), *{"x"} & call.needs]
            product, through = _product(saved, name, part, call)
            dx, grads = product.bwd(part, saved.x, through, wanted, dx)
            params |= _named(name, grads)
        return Grads(None if dx is None else dx.view(*dy.shape[:-1], self.width), params)

    def _parts(self, dh: Tensor | None) -> list[tuple[str, Tensor]]:
        """(name, dh) of the first products: one, where there is no gate or `up` holds both."""
        if dh is None:
            return []
        apart = (
            "gate" in self.__dict__[PARAMETER_SOURCE].sources
        )  # a gate that is not saved is one, too
        return [*zip(FIRSTS, dh.chunk(2, dim=1), strict=True)] if apart else [("up", dh)]

    def _through_act(
        self, dy: Tensor, saved: MLPSaved, call: Call, params: dict[str, Tensor | None]
    ) -> Tensor | None:
        """dh, where a gradient before the activation is wanted; those of the last product are added to params."""
        h: Any = saved.h
        product, through = _product(saved, "down", dy, call)
        wanted = _wanted(call, "down")
        before = "x" in call.needs or any(_wanted(call, name) for name in FIRSTS)
        need_a = not {"weight", "a"}.isdisjoint(wanted)
        back = product.through_grad(dy) if before or "a" in wanted else None
        dh = a = None
        if before:
            da: Any = product.bwd(dy, None, None, ("x",), through_grad=back)[0]
            if need_a:
                dh, _, a = K.scaled_act_bwd(da, h, None, self.kind, False, True, *self.options)
            else:
                dh = K.act_bwd(da, h, self.kind, *self.options)
        elif need_a:
            a = K.act_fwd(h, self.kind, *self.options)
        params |= _named("down", product.bwd(dy, a, through, wanted, through_grad=back)[1])
        return dh


def _wanted(call: Call, name: str) -> list[str]:
    """Of a product's parameters, those whose gradients are wanted."""
    return [part for part, suffix in SUFFIXES.items() if name + suffix in call.needs]


def _named(name: str, grads: dict[str, Tensor | None]) -> dict[str, Tensor | None]:
    return {name + SUFFIXES[part]: grad for part, grad in grads.items()}


def _product(
    saved: MLPSaved, name: str, dy: Tensor, call: Call
) -> tuple[LowRankProduct, Tensor | None]:
    """A product as its backward needs it, and what went through its factors."""
    weight, a, b, through = (getattr(saved, name + s) for s in ("", "_a", "_b", "_through"))
    return LowRankProduct(call.precision.cast(weight), None, *lowered(dy, a, b)), through


def _beside(x: Tensor, products: list[LowRankProduct]) -> tuple[Tensor, tuple[Tensor | None, ...]]:
    """The products of x side by side, written there where nobody differentiates or traces, and what went through their
    factors.
    """
    if len(products) == 1 or torch.is_grad_enabled() or torch.compiler.is_compiling():
        found = [product.fwd(x) for product in products]
        y = found[0][0] if len(found) == 1 else torch.cat([y for y, _ in found], 1)
        return y, tuple([through for _, through in found])
    width = sum(p.weight.shape[0] for p in products)  # type: ignore[union-attr, misc]
    h = x.new_empty(len(x), width)
    halves = h.chunk(2, dim=1)
    return h, tuple([p.fwd_into(part, x) for p, part in zip(products, halves, strict=True)])


# --- in the place of a module's forward


def _refused(module: nn.Module) -> str | None:
    """Why fuseops does not run this module of gate_proj, up_proj and down_proj, or None."""
    for name in _names(module):
        child: Any = module._modules[name]
        why = adapters.refused(child) if adapters.wraps(child) else lent.plain(child, nn.Linear)
        why = why or lent.quantized(adapters.adapted(child).weight)  # type: ignore[arg-type]
        if why is not None:
            return f"{name} {why}"
    return None


def _names(module: nn.Module) -> tuple[str, ...]:
    if packing.packed(module):
        return packing.PACKED, "down_proj"
    return GATED if "gate_proj" in module._modules else PLAIN_MLP


def build(module: nn.Module) -> MLP | str:
    """The op for this module, or why there is none."""
    packed = packing.packed(module)  # nobody can run its class any more
    found: MLP | None = module.__dict__[STAND_IN] if packed else None
    if (why := _refused(module)) is not None:
        return found or why
    if found is not None and lent.stands(module):
        return found
    form = gated_by(module) if packed else mlp_of(module)
    if form is None:
        return found or _unknown(module)
    first = packing.PACKED if packed else "up_proj"
    sizes: Any = [adapters.adapted(module._modules[name]) for name in (first, "down_proj")]
    op = MLP(form, sizes[0].in_features, sizes[1].out_features)
    lend(op, module)
    return op


def _unknown(module: Any) -> str:
    act_fn = getattr(module, "act_fn", None)
    if act_fn is not None and activation_of(act_fn) is None:
        return f"unknown activation {type(act_fn).__name__}"
    return "computes something else than down_proj(act_fn(gate_proj(x)) * up_proj(x))"


def lend(op: MLP, module: nn.Module) -> None:
    """Let the op read the module's weights, as they are named now."""
    sources: dict[str, lent.Source] = {}
    for name in _names(module):
        short = "up" if name == packing.PACKED else name.removesuffix("_proj")
        sources[short] = functools.partial(adapters.read, name, "weight")
        sources[f"{short}_bias"] = functools.partial(adapters.read, name, "bias")
        for which, part in enumerate(("a", "b")):
            sources[f"{short}_{part}"] = functools.partial(_read_factor, name, which)
    lent.lend(op, module, sources)


def in_words(op: MLP) -> str:
    """What runs a module now, for the report."""
    owner = op.__dict__[PARAMETER_SOURCE].owner
    adapted = [name for name in _names(owner) if adapters.wraps(owner._modules[name])]
    packed = ", gate and up packed" * packing.packed(owner)
    return f"one op, {op.kind}{packed}" + f", with adapters of {', '.join(adapted)}" * bool(adapted)


def _read_factor(child: str, which: int, owner: Any) -> Tensor | None:
    part = owner._modules[child]
    adapted = adapters.wraps(part) and adapters.active(part)
    return adapters.factor(which, part) if adapted else None


@lent.while_hung
def forward(self: nn.Module, x: Tensor) -> Tensor:
    """As the module's own, which runs where a projection cannot be read past its forward at the moment, as with a
    hook, or where the activation is another one.
    """
    if lent.stands(self) and all(_readable(self._modules[name]) for name in _names(self)):
        return self.__dict__[STAND_IN](x)
    return _written(self, x) if packing.packed(self) else type(self).forward(self, x)


def _readable(part: Any) -> bool:
    """Whether a projection is a plain Linear now, or one with adapters that multiply beside it."""
    if not adapters.wraps(part):
        return lent.plain(part, nn.Linear) is None and not lent.sharded(part)
    lent.watch(part, "forward")
    own = part.__dict__.get("forward")
    ours = own is None or getattr(own, "func", None) is adapters.forward
    return ours and not lent.hooked(part) and adapters.here(part)


def _written(module: Any, x: Tensor) -> Tensor:
    """What a class says of gate and up, of both in one."""
    gate, up = module.gate_up_proj(x).chunk(2, dim=-1)
    y: Tensor = module.down_proj(module.act_fn(gate) * up)
    return y
