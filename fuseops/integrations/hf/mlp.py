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
import torch.nn.functional as F
from torch import Tensor, nn

from fuseops import kernels as K
from fuseops.errors import ShapeError
from fuseops.ops.op import Call, Grads, Op, Out, Shape
from fuseops.ops.paths import LENT

from . import lent, packing
from .recognise import GATED, PLAIN_MLP, Gate, mlp_of


class MLPSaved(NamedTuple):
    x: Tensor | None  # (R, D)
    h: Tensor | None  # (R, 2F) or (R, F)
    gate: Tensor | None  # parameters themselves
    up: Tensor | None
    down: Tensor | None


class MLP(Op[MLPSaved]):
    """y = down(act([gate(x) | up(x)])), of weights that a module lends.   x (..., D) -> (..., D)"""

    _dh = ("h", "down")
    saves_for = {
        "x": (*_dh, "gate", "up"),
        "gate": (*_dh, "x"),
        "up": (*_dh, "x"),
        "down": ("h",),
        "gate_bias": _dh,
        "up_bias": _dh,
        "down_bias": (),
    }
    floats = True
    autocast = True

    gate = lent.lent("gate")
    up = lent.lent("up")
    down = lent.lent("down")
    gate_bias = lent.lent("gate_bias")
    up_bias = lent.lent("up_bias")
    down_bias = lent.lent("down_bias")

    def __init__(self, act: Gate, width: int, out: int) -> None:
        super().__init__()
        self.kind, self.options, self.width, self.out = *act, width, out

    def extra_repr(self) -> str:
        return f"{self.kind}, {self.width}"

    def out_shape(self, shape: Shape) -> Shape:
        if not shape or shape[-1] != self.width:
            raise ShapeError(f"MLP expects x to end in {self.width}, got shape {tuple(shape)}.")
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
        call: Call,
    ) -> Out:
        cast = call.precision.cast
        rows = x.reshape(-1, self.width)
        halves = [(cast(up), cast(up_bias))]
        if gate is not None:
            halves.insert(0, (cast(gate), cast(gate_bias)))
        h = _beside(rows, halves)
        a = K.act_fwd(h, self.kind, *self.options)
        y = F.linear(a, cast(down), cast(down_bias))  # type: ignore[arg-type]
        return Out(y.view(*x.shape[:-1], y.shape[-1]), MLPSaved(rows, h, gate, up, down))

    def bwd(self, saved: MLPSaved, dy: Tensor, *, call: Call) -> Grads:
        x, h, gate, up, down = saved
        needs, cast = call.needs, call.precision.cast
        rows = dy.reshape(-1, dy.shape[-1])
        params: dict[str, Tensor | None] = {}
        dh, a = self._through_act(rows, h, cast(down), needs)
        if "down" in needs:
            params["down"] = torch.mm(rows.t(), a)  # type: ignore[arg-type]
        if "down_bias" in needs:
            params["down_bias"] = K.bias_bwd(rows)
        del a
        if dh is None:
            return Grads(None, params)
        dx: Tensor | None = None
        for name, weight, part in self._parts(dh, gate, up):
            if name in needs:
                params[name] = torch.mm(part.t(), x)  # type: ignore[arg-type]
            if f"{name}_bias" in needs:
                params[f"{name}_bias"] = K.bias_bwd(part)
            if "x" in needs:
                w: Any = cast(weight)
                dx = torch.mm(part, w) if dx is None else torch.addmm(dx, part, w)
        return Grads(None if dx is None else dx.view(*dy.shape[:-1], self.width), params)

    def _parts(
        self, dh: Tensor, gate: Tensor | None, up: Tensor | None
    ) -> list[tuple[str, Tensor | None, Tensor]]:
        """(name, weight, dh) of the first products: one, where there is no gate or `up` holds both."""
        if gate is None:
            return [("up", up, dh)]
        left, right = dh.chunk(2, dim=1)
        return [("gate", gate, left), ("up", up, right)]

    def _through_act(
        self, dy: Tensor, h: Tensor | None, down: Tensor | None, needs: frozenset[str]
    ) -> tuple[Tensor | None, Tensor | None]:
        """dh, where a gradient before the activation is wanted, and the activation, where that of `down` is."""
        need_a = "down" in needs
        if needs.isdisjoint(("x", "gate", "up", "gate_bias", "up_bias")):
            return None, K.act_fwd(h, self.kind, *self.options) if need_a else None  # type: ignore[arg-type]
        da = torch.mm(dy, down)  # type: ignore[arg-type]
        if not need_a:
            return K.act_bwd(da, h, self.kind, *self.options), None  # type: ignore[arg-type]
        ones = torch.ones(len(dy), device=dy.device)  # exact
        dh, _, a = K.scaled_act_bwd(da, h, ones, self.kind, False, True, *self.options)  # type: ignore[arg-type]
        return dh, a


def _beside(x: Tensor, halves: list[Any]) -> Tensor:
    """The products of x side by side; written there where nobody differentiates or traces."""
    if len(halves) == 1 or torch.is_grad_enabled() or torch.compiler.is_compiling():
        found = [F.linear(x, weight, bias) for weight, bias in halves]
        return found[0] if len(found) == 1 else torch.cat(found, 1)
    h = x.new_empty(len(x), sum(len(weight) for weight, _ in halves))
    for part, (weight, bias) in zip(h.chunk(2, dim=1), halves, strict=True):
        if bias is None:
            torch.mm(x, weight.t(), out=part)
        else:
            torch.addmm(bias, x, weight.t(), out=part)
    return h


# --- in the place of a module's forward


def refused(module: nn.Module) -> str | None:
    """Why fuseops does not run this module of gate_proj, up_proj and down_proj, or None."""
    for name in _names(module):
        child = module._modules[name]
        if (why := lent.plain(child, nn.Linear)) is not None:
            return f"{name} {why}"
        if (why := lent.quantized(child.weight)) is not None:  # type: ignore[union-attr, arg-type]
            return f"{name} {why}"
    return None


def _names(module: nn.Module) -> tuple[str, ...]:
    if packing.packed(module):
        return packing.PACKED, "down_proj"
    return GATED if "gate_proj" in module._modules else PLAIN_MLP


def build(module: nn.Module) -> MLP | None:
    """The op for this module, None where it computes something else."""
    if packing.packed(module):  # nobody can run its class any more
        found: MLP = module.__dict__[LENT]
        return found
    act = mlp_of(module)
    if act is None:
        return None
    parts: Any = module._modules
    op = MLP(act, parts["up_proj"].in_features, parts["down_proj"].out_features)
    lend(op, module)
    return op


def lend(op: MLP, module: nn.Module) -> None:
    """Let the op read the module's weights, as they are named now."""
    sources: dict[str, lent.Source] = {}
    for name in _names(module):
        short = "up" if name == packing.PACKED else name.removesuffix("_proj")
        sources[short] = functools.partial(_read, name, "weight")
        sources[f"{short}_bias"] = functools.partial(_read, name, "bias")
    lent.lend(op, module, sources)


def in_words(op: MLP) -> str:
    return f"one op, {op.kind}" + ", gate and up packed" * packing.packed(op.__dict__["owner"])


def _read(child: str, name: str, owner: Any) -> Tensor | None:
    return getattr(getattr(owner, child), name)


def forward(self: nn.Module, x: Tensor) -> Tensor:
    """As the module's own, which runs where a projection is no plain Linear at the moment: an adapter, a hook."""
    parts = [self._modules[name] for name in _names(self)]
    if any(lent.plain(part, nn.Linear) is not None for part in parts) or lent.sharded(*parts):
        return _written(self, x) if packing.packed(self) else type(self).forward(self, x)
    return self.__dict__[LENT](x)


def _written(module: Any, x: Tensor) -> Tensor:
    """What a class says of gate and up, of both in one."""
    gate, up = module.gate_up_proj(x).chunk(2, dim=-1)
    y: Tensor = module.down_proj(module.act_fn(gate) * up)
    return y
