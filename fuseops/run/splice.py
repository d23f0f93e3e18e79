"""Splicing: the ops of a nested Sequential become part of the plan of the outer one.

A rule matches within one plan. So a nested Sequential is spliced into the outer plan, with its name as a prefix, unless
it has to be called: it has hooks, a forward of its own, or settings of its own. Then it is a border between plans.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple

from torch import nn

from fuseops.errors import SideInputError
from fuseops.ops import scopes
from fuseops.ops.op import Op
from fuseops.plan.chain import Child, Sides
from fuseops.plan.key import has_hooks, hooked

from .checks import check_declared
from .composed import Composed
from .sides import check_side_names

FORWARD, CALL = Op.forward, nn.Module.__call__  # before anybody replaces them


def opaque_reason(op: Op[Any]) -> str | None:
    """Why an op is called through its own `__call__` and matched by no rule, or None."""
    own = op.__dict__
    if has_hooks(own):
        return "has hooks"
    for method in ("forward", "fwd", "bwd"):
        if method in own:
            return f"has a {method} of its own (replaced on the instance)"
    kind = op.__class__
    if kind.forward is not FORWARD:
        return "overrides forward"
    if kind.__call__ is not CALL:
        return "overrides __call__"
    if kind.own_methods and kind.own_methods != (kind.fwd, kind.bwd):
        return "has another fwd or bwd than its class was made with"
    return None


def border_reason(module: Composed, settings: int) -> str | None:
    """Why a nested Sequential is called, and not spliced into the outer plan, or None.

    settings: the token of the outer Sequential.
    """
    own, cls = module.__dict__, module.__class__
    if has_hooks(own):
        return "has hooks"
    if "forward" in own or cls.forward is not cls.planned_forward:
        return "overrides forward"
    if cls.__call__ is not CALL:
        return "overrides __call__"
    if hooked():
        return "is seen by hooks on all modules"
    if own.get("_compiled_call_impl") is not None:
        return "is compiled by itself"
    own_settings = module._settings
    if own_settings != settings and _differ(
        settings, own_settings, scopes.process.token, scopes.current().token
    ):
        return "has settings of its own"
    return None


@functools.lru_cache(1024)
def _differ(outer: int, inner: int, process: int, scoped: int) -> bool:
    """Whether the tokens of two models resolve to different settings. Cached, since tokens are immutable."""
    return scopes.resolve(process, outer, scoped) != scopes.resolve(process, inner, scoped)


def side_names_of(module: Any) -> tuple[str, ...]:
    """Side inputs that a module takes by keyword: its `reads`, or those of the layer that it wraps, as PEFT's do."""
    reads = getattr(module, "reads", None)
    if reads is not None:
        return tuple(reads)
    wrapped = getattr(module, "base_layer", None)
    return () if wrapped is None else side_names_of(wrapped)


class Nested:
    """A `Nested` records a nested Sequential as it was when the outer one was spliced."""

    def __init__(self, module: Composed, reason: str | None) -> None:
        self.module = module
        self.reason = reason  # why it is a border; None where it is spliced
        self.children = module._planned_modules()
        self.names = [*module._modules]

    def is_unchanged(self, settings: int) -> bool:
        """Whether it would still be spliced, or not, as then, with the same children."""
        module = self.module
        if border_reason(module, settings) != self.reason:
            return False
        if self.reason is not None:  # its own runner checks its children
            return True
        return module._planned_modules() == self.children and [*module._modules] == self.names


class Spliced(NamedTuple):
    """A `Spliced` lists the ops and modules that a Sequential (or an op that is called alone) runs, in order."""

    children: tuple[Child, ...]
    nested: tuple[Nested, ...]  # every Sequential inside it, down to the borders
    reads: tuple[str, ...]  # side inputs that the caller passes
    writes: frozenset[str]  # side tensors that the caller may ask for


def splice(module: Composed | Op[Any]) -> Spliced:
    """Walk a module's children.  Raises SideInputError for a side name that is written twice, or read too early."""
    nested: list[Nested] = []
    names = _SideNames("", None)
    children = tuple(_walk(module, names, module._settings, nested))
    return Spliced(children, tuple(nested), tuple(names.read), frozenset(names.written))


class _SideNames:
    """A `_SideNames` resolves the side names of one Sequential; inner Sequentials see the names of outer ones."""

    def __init__(self, scope: str, outer: _SideNames | None) -> None:
        self.scope, self.outer = scope, outer
        self.read: dict[str, str] = {}  # from outside -> the child that reads it first
        self.written: dict[str, str] = {}  # -> the child that writes it

    def resolve_reads(self, sides: Sides, at: str) -> Sides:
        return tuple([(keyword, self._resolve(name, at)) for keyword, name in sides])

    def _resolve(self, name: str, at: str) -> str:
        """The name in the plan of the side tensor that is called `name` in this Sequential."""
        if name in self.written:
            return self.scope + name
        self.read.setdefault(name, at)
        return name if self.outer is None else self.outer._resolve(name, at)

    def declare_writes(self, names: tuple[str, ...], at: str) -> Sides:
        for name in names:
            before = self.written.get(name)
            if before is not None:
                raise SideInputError(
                    f"side tensor {name!r} is written twice, at {before!r} and at {at!r}."
                )
            if name in self.read:
                raise SideInputError(
                    f"side tensor {name!r} is written at {at!r}, after it was read at {self.read[name]!r}."
                )
            self.written[name] = at
        return tuple([(name, self.scope + name) for name in names])


def wrapping_ops(op: Op[Any], alone: bool) -> Any:
    """The ops that run before and after an op for a style of parallelism; none where the op's own call runs them."""
    if op._around is Op._around or (not alone and opaque_reason(op) is not None):
        return Op._around
    return op._around


def _wrapping_children(ops: Iterable[Op[Any]], path: str, names: _SideNames) -> Iterator[Child]:
    """The `Child` of each op that a style of parallelism has put around another one."""
    for op in ops:
        yield Child(f"{path}.{type(op).__name__}", op, names.scope)


def _walk(module: Any, names: _SideNames, settings: int, nested: list[Nested]) -> Iterator[Child]:
    for name, child in module._planned():
        path = names.scope + name
        if isinstance(child, Op):
            before, after = wrapping_ops(child, child is module)
            yield from _wrapping_children(before, path, names)
            if opaque_reason(child) is None:
                check_declared(path, child)
            read = child.side_bindings()
            check_side_names(path, child, (*[name for _, name in read], *child.writes))
            reads = names.resolve_reads(read, path)
            yield Child(path, child, names.scope, reads, names.declare_writes(child.writes, path))
            yield from _wrapping_children(after, path, names)
            continue
        if isinstance(child, Composed):
            nested.append(Nested(child, border_reason(child, settings)))
            if nested[-1].reason is None:
                yield from _walk(child, _SideNames(f"{path}.", names), settings, nested)
                continue
        plain = tuple([(keyword, keyword) for keyword in side_names_of(child)])
        yield Child(path, child, names.scope, names.resolve_reads(plain, path))
