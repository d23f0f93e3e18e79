"""Rotary positions inside an attention of transformers: queries and keys turned in one launch.

An attention's forward calls a function of its file, `apply_rotary_pos_emb(q, k, cos, sin)`. It keeps that forward, but
for the name: in a copy of it the name stands for `RotaryPair`, on this module alone. What the function computes is
found by running it, and so is what the model's tables of angles hold. Pairs that lie side by side, and angles for a
part of the columns, are turned by the model's own function.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import CellType, FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fuseops import kernels as K
from fuseops.errors import ShapeError
from fuseops.ops.op import Call, Grads, Op, Out, Shape, SideGrads
from fuseops.ops.paths import STAND_IN
from fuseops.ops.rope import angle_gradients, shared_angles
from fuseops.torch_private import is_dtensor

from . import lent, recognise

TAKES = ("q", "k", "cos", "sin")


class RotaryPairSaved(NamedTuple):
    q: Tensor | None  # (B, T, H, D)
    k: Tensor | None  # (B, T, HK, D)
    cos: Tensor | None  # (T, P) or (B, T, P)
    sin: Tensor | None


class RotaryPair(Op[RotaryPairSaved]):
    """Queries turned by their positions, and `keys`, published as `turned_keys`; both (B, T, heads, D)."""

    reads = ("keys", "cos", "sin")
    writes = ("turned_keys",)
    saves_for = {
        "x": ("cos", "sin"),
        "keys": ("cos", "sin"),
        "cos": ("q", "k", "cos"),
        "sin": ("q", "k", "cos"),
    }
    floats = True

    def __init__(self, forward: FunctionType, names: tuple[str, ...], width: int) -> None:
        super().__init__()
        self.own, self.names, self.width = forward, names, width
        self._swap()

    def extra_repr(self) -> str:
        return str(self.width)

    def out_shape(self, shape: Shape) -> Shape:
        if len(shape) != 4 or shape[-1] != self.width:
            raise ShapeError(f"RotaryPair expects q of shape (B, T, H, {self.width}), got {shape}.")
        return shape

    def fwd(self, x: Tensor, *, keys: Tensor, cos: Tensor, sin: Tensor) -> Out:
        q, k = K.apply_rope_pair(x, keys, cos, sin, False)
        return Out(q, RotaryPairSaved(x, keys, cos, sin), {"turned_keys": k})

    def bwd(
        self, saved: RotaryPairSaved, dy: Tensor | None, *, dside: SideGrads, call: Call
    ) -> Grads:
        q, k, cos, sin = saved
        dk, dq = dside["turned_keys"], dy
        side: dict[str, Tensor | None] = {}
        for x, d in ((q, dy), (k, dk)):
            for name in call.needs & {"cos", "sin"} if d is not None else ():
                part = angle_gradients(x, d, cos, False)[name]  # type: ignore[arg-type]
                side[name] = part if side.get(name) is None else side[name] + part  # type: ignore[operator]
        if dy is not None and dk is not None and {"x", "keys"} <= call.needs:
            dq, side["keys"] = K.apply_rope_pair(dy, dk, cos, sin, False, True)  # type: ignore[arg-type]
            return Grads(dq, side=side)
        if dk is not None and "keys" in call.needs:
            side["keys"] = K.apply_rope(dk, cos, sin, False, True)  # type: ignore[arg-type]
        if dy is not None and "x" in call.needs:
            return Grads(K.apply_rope(dy, cos, sin, False, True), side=side)  # type: ignore[arg-type]
        return Grads(side=side)

    # --- the attention's forward, with other names

    def _swap(self) -> None:
        """A copy of the forward in which the names of rotary functions stand for `turned`."""
        *decorators, own = _layers(self.own)
        known = dict(own.__globals__)
        # dynamo takes names of a function without a module from where the function has them, not from the module
        known.pop("__name__", None)
        known |= {name: self._turned(known[name]) for name in self.names}
        swapped = _copied(own, known, own.__closure__)
        for decorator in reversed(decorators):
            swapped = _calling(decorator, swapped)
        self.swapped = swapped

    def _turned(self, own: Any) -> Callable[..., tuple[Tensor, Tensor]]:
        def turned(
            q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *args: Any, **keywords: Any
        ) -> tuple[Tensor, Tensor]:
            if args or keywords or not _fits(q, k, cos, self.width):
                return own(q, k, cos, sin, *args, **keywords)
            pairs = q.shape[-1] // 2
            cos, sin = (shared_angles(q, t[..., :pairs]) for t in (cos, sin))
            q, k = (t.transpose(1, 2) for t in (q, k))
            q, k = self(q, keys=k, cos=cos, sin=sin)
            return q.transpose(1, 2), k.transpose(1, 2)

        return turned

    def __getstate__(self) -> dict[str, Any]:
        return {k: v for k, v in super().__getstate__().items() if k != "swapped"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._swap()


def _fits(q: Tensor, k: Tensor, cos: Tensor, width: int) -> bool:
    """Whether q and k (B, heads, T, D) are turned whole, by angles of no other precision."""
    if q.dim() != 4 or k.dim() != 4 or cos.dim() != 3 or any(is_dtensor(type(t)) for t in (q, k)):
        return False
    if q.shape[-1] != width or k.shape[-1] != width or k.dtype is not q.dtype:
        return False
    rounds = torch.is_autocast_enabled(q.device.type) or q.dtype is cos.dtype
    return rounds and cos.shape[0] in (1, q.shape[0]) and cos.shape[-1] in (width, width // 2)


# --- a forward below its decorators


def _layers(forward: Any) -> list[FunctionType]:
    """What is called in turn, from the forward of a class to the function below all its decorators.

    Empty where a decorator keeps what it wraps elsewhere than in its closure, and no copy can call something else.
    """
    layers = [forward]
    while (wrapped := getattr(layers[-1], "__wrapped__", None)) is not None:
        if not any(_holding(layers[-1], wrapped)):
            return []
        layers.append(wrapped)
    return layers if all(isinstance(layer, FunctionType) for layer in layers) else []


def _holding(decorator: Any, wrapped: Any) -> list[bool]:
    """For each cell of a decorator's closure, whether it holds what the decorator wraps."""
    empty = CellType()  # a name that was not assigned
    return [
        cell != empty and cell.cell_contents is wrapped
        for cell in getattr(decorator, "__closure__", None) or ()
    ]


def _calling(decorator: Any, new: FunctionType) -> FunctionType:
    """A copy of a decorator's function that calls another one than it wraps."""
    holding = _holding(decorator, decorator.__wrapped__)
    cells = zip(decorator.__closure__, holding, strict=True)
    closure = tuple(CellType(new) if holds else cell for cell, holds in cells)
    return _copied(decorator, decorator.__globals__, closure)


def _copied(
    function: FunctionType, known: dict[str, Any], closure: tuple[CellType, ...] | None
) -> FunctionType:
    """A copy of a function, whose names mean what `known` says."""
    new = FunctionType(function.__code__, known, function.__name__, function.__defaults__, closure)
    new.__kwdefaults__ = function.__kwdefaults__
    return new


# --- recognising


def rotary_names(module: nn.Module) -> tuple[str, ...]:
    """What the forward of a module calls with queries, keys and their angles, by names of its file."""
    return tuple(_rotary_functions(module))


def _rotary_functions(module: nn.Module) -> dict[str, Callable[..., Any]]:
    own = inspect.unwrap(type(module).forward)
    if not isinstance(own, FunctionType):
        return {}
    found = {n: own.__globals__.get(n) for n in own.__code__.co_names}
    return {n: f for n, f in found.items() if isinstance(f, FunctionType) and _takes(f)}


def _takes(function: FunctionType) -> bool:
    return tuple(inspect.signature(function).parameters)[:4] == TAKES


def tables(model: nn.Module) -> dict[str, nn.Module]:
    """Modules that make cos and sin, by the path of what holds them."""
    named = model.named_modules()
    return {p.rpartition(".")[0]: m for p, m in named if "RotaryEmbedding" in type(m).__name__}


def nearest(path: str, known: dict[str, nn.Module]) -> nn.Module | None:
    """The table of the smallest part of the model that a module stands in."""
    around = [at for at in known if not at or f"{path}.".startswith(f"{at}.")]
    return known[max(around, key=len)] if around else None


def build(table: nn.Module | None, module: nn.Module) -> RotaryPair | str:
    """The op for this module, or why its own function turns its queries and keys.   table: of its angles"""
    own: Any = type(module).forward
    for name, function in _rotary_functions(module).items():
        if not _splits_halves(function):
            return f"{name} turns other pairs of columns than i and D / 2 + i"
    if not _layers(own):
        return "a decorator of its forward holds it elsewhere than in a closure"
    if table is None:
        return "where its angles come from is not known"
    width, columns = _head(module), _columns(table)
    if columns is None:
        return f"{type(table).__name__} gives other angles to the second half of the columns"
    if width is None or columns != width:
        return f"partial: {columns} of {width} columns are turned"
    return RotaryPair(own, rotary_names(module), width)


@lent.while_hung
def forward(self: nn.Module, *args: Any, **keywords: Any) -> Any:
    """As the module's own, but for the function that turns queries and keys."""
    return self.__dict__[STAND_IN].swapped(self, *args, **keywords)


def _head(module: Any) -> int | None:
    width = vars(module).get("head_dim")
    return width if isinstance(width, int) else None


@recognise.alone()
def _splits_halves(function: Any) -> bool:
    """Whether a function turns columns i and D / 2 + i, by angles that it is given once or twice."""
    q, k = recognise.drawn(2, 3, 5, 8), recognise.drawn(2, 1, 5, 8)
    angles = recognise.drawn(2, 5, 4)
    cos, sin = angles.cos(), angles.sin()
    expected = [K.apply_rope.twin(t.transpose(1, 2), cos, sin, False) for t in (q, k)]
    for times in (1, 2):
        given = [torch.cat([t] * times, -1) for t in (cos, sin)]
        found = recognise.tried(function, q.clone(), k.clone(), *given)
        if not isinstance(found, tuple) or len(found) != 2:
            continue
        if all(recognise.same(f, e.transpose(1, 2)) for f, e in zip(found, expected, strict=True)):
            return True
    return False


@recognise.alone()
def _columns(table: Any) -> int | None:
    """Of a head, those that a table of angles is for; None where the halves of what it gives differ."""
    new = recognise.shallow(table)
    new.__dict__.pop("forward", None)
    new._buffers = {
        n: recognise.drawn(*b.shape) for n, b in table._buffers.items() if b is not None
    }
    x, positions = torch.zeros(1, 4, 8), torch.arange(4)[None]
    pairs = {b.shape[-1] for b in new._buffers.values()}
    kinds = getattr(table, "layer_types", None)
    calls = [(x, positions)] if kinds is None else [(x, positions, kind) for kind in kinds]
    for call in calls:
        found = recognise.tried(type(table).forward, new, *call)
        if not isinstance(found, tuple) or len(found) != 2 or len(pairs) != 1:
            return None
        (half,) = pairs
        for angles in found:
            first, *second = angles.split(half, -1)
            if (
                angles.dim() != 3
                or len(second) > 1
                or any(not torch.equal(s, first) for s in second)
            ):
                return None
    return 2 * half
