"""Rotary embedding in the attention of a transformers model: queries and keys are rotated in one launch.

The attention's forward calls a function of its file, `apply_rotary_pos_emb(q, k, cos, sin)`. The stand-in runs a copy
of that forward whose globals map this name to `RotaryPair`; other modules are not affected. Probes check the function
and the model's rotary embedding (the module that makes cos and sin). Interleaved pairs, and angles for a part of the
columns, stay with the model's own function.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from operator import is_
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

from . import recognise, stand_ins

ROTARY_ARGS = ("q", "k", "cos", "sin")


class RotaryPairSaved(NamedTuple):
    q: Tensor | None  # (B, T, H, D)
    k: Tensor | None  # (B, T, HK, D)
    cos: Tensor | None  # (T, P) or (B, T, P)
    sin: Tensor | None


class RotaryPair(Op[RotaryPairSaved]):
    """Rotates queries (x) and `keys` by their positions; publishes `turned_keys`.   both (B, T, heads, D)"""

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
        self.stock_forward, self.names, self.width = forward, names, width
        self._rewrite_forward()

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

    # --- the copy of the attention's forward

    def _rewrite_forward(self) -> None:
        """Copy the forward, with globals that map the names of rotary functions to `rotate`."""
        *decorators, own = _decorator_chain(self.stock_forward)
        known = dict(own.__globals__)
        # without `__name__` dynamo looks names up in these globals, not in the module of that name
        known.pop("__name__", None)
        read = [name for name in own.__code__.co_names if name in known]
        self.globals_read = own.__globals__, read, [known[name] for name in read]
        known |= {name: self._rotate_function(known[name]) for name in self.names}
        rewritten = _copy_function(own, known, own.__closure__)
        for decorator in reversed(decorators):
            rewritten = _rewrapped(decorator, rewritten)
        self.rewritten = rewritten

    def _rotate_function(self, own: Any) -> Callable[..., tuple[Tensor, Tensor]]:
        def rotate(
            q: Tensor, k: Tensor, cos: Tensor, sin: Tensor, *args: Any, **keywords: Any
        ) -> tuple[Tensor, Tensor]:
            if args or keywords or not _is_supported(q, k, cos, self.width):
                return own(q, k, cos, sin, *args, **keywords)
            pairs = q.shape[-1] // 2
            cos, sin = (shared_angles(q, t[..., :pairs]) for t in (cos, sin))
            q, k = (t.transpose(1, 2) for t in (q, k))
            q, k = self(q, keys=k, cos=cos, sin=sin)
            return q.transpose(1, 2), k.transpose(1, 2)

        return rotate

    def __getstate__(self) -> dict[str, Any]:
        return {
            k: v
            for k, v in super().__getstate__().items()
            if k not in ("rewritten", "globals_read")
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self._rewrite_forward()


def _is_supported(q: Tensor, k: Tensor, cos: Tensor, width: int) -> bool:
    """Whether all columns of q and k (B, heads, T, D) are rotated, by angles of the same precision."""
    if q.dim() != 4 or k.dim() != 4 or cos.dim() != 3 or any(is_dtensor(type(t)) for t in (q, k)):
        return False
    if q.shape[-1] != width or k.shape[-1] != width or k.dtype is not q.dtype:
        return False
    rounds = torch.is_autocast_enabled(q.device.type) or q.dtype is cos.dtype
    return rounds and cos.shape[0] in (1, q.shape[0]) and cos.shape[-1] in (width, width // 2)


# --- copies of a function and of its decorators


def _decorator_chain(forward: Any) -> list[FunctionType]:
    """The functions from a forward, as decorated, to the one below all decorators.

    Empty where a decorator keeps the wrapped function outside of its closure, so that a copy could not call another.
    """
    layers = [forward]
    while (wrapped := getattr(layers[-1], "__wrapped__", None)) is not None:
        if not any(_cells_holding(layers[-1], wrapped)):
            return []
        layers.append(wrapped)
    return layers if all(isinstance(layer, FunctionType) for layer in layers) else []


def _cells_holding(decorator: Any, wrapped: Any) -> list[bool]:
    """For each cell of a decorator's closure, whether it holds the wrapped function."""
    empty = CellType()  # of a variable that is not assigned yet
    return [
        cell != empty and cell.cell_contents is wrapped
        for cell in getattr(decorator, "__closure__", None) or ()
    ]


def _rewrapped(decorator: Any, new: FunctionType) -> FunctionType:
    """A copy of a decorator that wraps `new`."""
    holding = _cells_holding(decorator, decorator.__wrapped__)
    cells = zip(decorator.__closure__, holding, strict=True)
    closure = tuple(CellType(new) if holds else cell for cell, holds in cells)
    return _copy_function(decorator, decorator.__globals__, closure)


def _copy_function(
    function: FunctionType, known: dict[str, Any], closure: tuple[CellType, ...] | None
) -> FunctionType:
    """A copy of a function with `known` as its globals."""
    new = FunctionType(function.__code__, known, function.__name__, function.__defaults__, closure)
    new.__kwdefaults__ = function.__kwdefaults__
    return new


# --- recognition


def rotary_names(module: nn.Module) -> tuple[str, ...]:
    """Global names of the rotary functions, f(q, k, cos, sin), in the forward of a module."""
    return tuple(_rotary_functions(module))


def _rotary_functions(module: nn.Module) -> dict[str, Callable[..., Any]]:
    own = inspect.unwrap(type(module).forward)
    if not isinstance(own, FunctionType):
        return {}
    found = {n: own.__globals__.get(n) for n in own.__code__.co_names}
    return {n: f for n, f in found.items() if isinstance(f, FunctionType) and _is_rotary(f)}


def _is_rotary(function: FunctionType) -> bool:
    return tuple(inspect.signature(function).parameters)[:4] == ROTARY_ARGS


def rotary_embeddings(model: nn.Module) -> dict[str, nn.Module]:
    """The modules that make cos and sin, by the path of their parent."""
    named = model.named_modules()
    return {p.rpartition(".")[0]: m for p, m in named if "RotaryEmbedding" in type(m).__name__}


def enclosing(path: str, known: dict[str, nn.Module]) -> nn.Module | None:
    """The rotary embedding whose parent is the closest one to enclose a module."""
    around = [at for at in known if not at or f"{path}.".startswith(f"{at}.")]
    return known[max(around, key=len)] if around else None


def build(table: nn.Module | None, module: nn.Module) -> RotaryPair | str:
    """The stand-in of an attention, or the reason why there is none.   table: its rotary embedding"""
    own: Any = type(module).forward
    for name, function in _rotary_functions(module).items():
        if not _rotates_halves(function):
            return f"{name} turns other pairs of columns than i and D / 2 + i"
    if not _decorator_chain(own):
        return "a decorator of its forward holds it elsewhere than in a closure"
    if table is None:
        return "where its angles come from is not known"
    width, columns = _head_dim(module), _rotated_columns(table)
    if columns is None:
        return f"{type(table).__name__} gives other angles to the second half of the columns"
    if width is None or columns != width:
        return f"partial: {columns} of {width} columns are turned"
    return RotaryPair(own, rotary_names(module), width)


@stand_ins.only_while_attached
def forward(self: nn.Module, *args: Any, **keywords: Any) -> Any:
    """The attention's forward with `RotaryPair`; the stock one where a global that it reads was replaced."""
    if not stand_ins.evaluate(_globals_unchanged, self):
        return type(self).forward(self, *args, **keywords)
    return self.__dict__[STAND_IN].rewritten(self, *args, **keywords)


def _globals_unchanged(owner: nn.Module) -> bool:
    """Whether the globals that an attention's forward reads are those of when it was copied."""
    known, names, values = owner.__dict__[STAND_IN].globals_read
    return all(map(is_, map(known.get, names), values)) or stand_ins.warn_changed(owner)


def _head_dim(module: Any) -> int | None:
    width = vars(module).get("head_dim")
    return width if isinstance(width, int) else None


@recognise.isolated()
def _rotates_halves(function: Any) -> bool:
    """Whether a function rotates columns i and D / 2 + i, by angles (T, D / 2) or those twice side by side."""
    q, k = (recognise.random_tensor(2, heads, 5, 8).requires_grad_() for heads in (3, 1))
    angles = recognise.random_tensor(2, 5, 4)
    cos, sin = angles.cos(), angles.sin()
    expected = [K.apply_rope.twin(t.transpose(1, 2), cos, sin, False) for t in (q, k)]
    for times in (1, 2):
        angle_pair = [torch.cat([t] * times, -1) for t in (cos, sin)]
        found = recognise.run_or_none(function, q.clone(), k.clone(), *angle_pair)
        if not isinstance(found, tuple) or len(found) != 2:
            continue
        triples = zip(found, expected, (q, k), strict=True)
        if all(recognise.matches(f, e.transpose(1, 2), t) for f, e, t in triples):
            return True
    return False


@recognise.isolated()
def _rotated_columns(table: Any) -> int | None:
    """How many columns of a head a rotary embedding rotates; None if its two halves of angles differ."""
    new = recognise.shallow_copy(table)
    new._buffers = {
        n: recognise.random_tensor(*b.shape) for n, b in table._buffers.items() if b is not None
    }
    x, positions = torch.zeros(1, 4, 8), torch.arange(4)[None]
    pairs = {b.shape[-1] for b in new._buffers.values()}
    kinds = getattr(table, "layer_types", None)
    calls = [(x, positions)] if kinds is None else [(x, positions, kind) for kind in kinds]
    for call in calls:
        found = recognise.run_or_none(type(table).forward, new, *call)
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
