"""What runs ops and plain modules in a row: the row itself, its pieces, and the settings of a call."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Self, overload

import torch
from torch import nn

from fuseops import torch_private
from fuseops.errors import RecomputationError, SideInputError
from fuseops.ops import op as op_module
from fuseops.ops import scopes
from fuseops.ops.op import Op
from fuseops.ops.structure import Add, Tap
from fuseops.plan.key import Tokens

from . import traced
from .checks import check_declared
from .run import Run, opaque_reason
from .sides import described


class Runner:
    """The pieces of one Sequential (or one op that is called alone), rebuilt when the children change."""

    def __init__(
        self,
        children: list[tuple[str, nn.Module]],
        alone: bool = False,
        apart: frozenset[str] = frozenset(),
    ) -> None:
        """apart: names of ops that run by themselves."""
        self.alone = alone
        self.planned = children
        self.children = tuple(module for _, module in children)
        self.pieces: list[tuple[str, Run | nn.Module]] = _pieces(children, alone, apart)
        self.reads, self.writes = _side_names(self.pieces)
        self.taken = [side_names_of(piece) for _, piece in self.pieces]
        self.nested = tuple(
            (module, names)
            for (_, module), names in zip(self.pieces, self.taken, strict=True)
            if isinstance(module, Composed) or (names and isinstance(module, nn.Module))
        )
        self.said = [
            (op, op.reads, op.writes, op.delays, op.accumulate_into_main_grad)
            for op in self.children
            if isinstance(op, Op)
        ]
        kinds: set[Any] = {type(op) for op in self.children if isinstance(op, Op)}
        self.kinds = [(k, k.forward, k.__call__, k.fwd, k.bwd) for k in kinds]
        self.last: Tokens | None = None
        self.names: list[str] = []  # of the registered children
        self._live: dict[tuple[str, ...], tuple[tuple[str, ...], ...]] = {}
        self._with_apart: dict[frozenset[str], Runner] = {}

    def with_apart(self, names: frozenset[str]) -> Runner:
        """The runner of the same children where these ops run by themselves."""
        if names not in self._with_apart:
            self._with_apart[names] = Runner(self.planned, self.alone, names)
        return self._with_apart[names]

    def fits(self, children: tuple[nn.Module, ...]) -> bool:
        """Are these still the children, do they still say the same of what they read, write and put elsewhere, and are
        the methods of their classes the same?
        """
        if self.children != children:
            return False
        for op, reads, writes, delays, into_main_grad in self.said:
            if op.reads is not reads or op.writes is not writes:
                return False
            if op.delays is not delays or op.accumulate_into_main_grad is not into_main_grad:
                return False
        for kind, forward, call, fwd, bwd in self.kinds:
            if kind.forward is not forward or kind.__call__ is not call:
                return False
            if kind.fwd is not fwd or kind.bwd is not bwd:
                return False
        return all(side_names_of(nested) == known for nested, known in self.nested)

    def live_after(self, returns: tuple[str, ...]) -> tuple[tuple[str, ...], ...]:
        """For every piece, the side names that are read after it, or returned.

        Raises SideInputError when a Tap is read by nobody.
        """
        if returns in self._live:
            return self._live[returns]
        self._check_published(returns)
        reads = [frozenset(names) for names in self.taken]
        live = tuple(
            [tuple(sorted(frozenset(returns).union(*reads[k + 1 :]))) for k in range(len(reads))]
        )
        if not torch.compiler.is_compiling():  # a checkpoint inside compiled code may not write
            self._live[returns] = live
        return live

    def _check_published(self, returns: tuple[str, ...]) -> None:
        read = {name for names in self.taken for name in names} | set(returns)
        inner = {
            n
            for _, piece in self.pieces
            if isinstance(piece, Run)
            for op in piece.ops
            for n in op.side_names()
        }
        taps = {name for m in self.children if isinstance(m, Tap) for name in m.writes}
        unread = sorted(taps - read - inner)
        if unread and not self.alone:
            raise SideInputError(
                f"nobody reads the Tap of {unread}: add an op that reads it, or ask for it "
                f"with returns={tuple(unread)}."
            )


def _pieces(
    children: list[tuple[str, nn.Module]], alone: bool, apart: frozenset[str]
) -> list[tuple[str, Run | nn.Module]]:
    pieces: list[tuple[str, Run | nn.Module]] = []
    pending: list[tuple[str, Op[Any]]] = []

    def flush(end: str, stop: int) -> None:
        if pending:
            for name, op in pending:
                if opaque_reason(op) is None:
                    check_declared(name, op)
            names, ops = zip(*pending, strict=True)
            pieces.append((names[0], Run(ops, names, end, stop - len(ops), alone)))
            pending.clear()

    for position, (name, module) in enumerate(children):
        if isinstance(module, Op):
            if name in apart:
                flush(f"{name!r} writes to a buffer of the caller", position)
            pending.append((name, module))
            if name in apart:
                flush(f"{name!r} writes to a buffer of the caller", position + 1)
        else:
            kind = "a nested Sequential" if isinstance(module, Composed) else "a plain module"
            flush(f"{name!r} is {type(module).__name__}, {kind}", position)
            pieces.append((name, module))
    flush("the sequence ends", len(children))
    return pieces


def _side_names(
    pieces: list[tuple[str, Run | nn.Module]],
) -> tuple[tuple[str, ...], frozenset[str]]:
    """What the whole sequence reads from its caller, and what it writes.  Raises SideInputError on a clash."""
    reads: dict[str, None] = {}
    written: dict[str, str] = {}
    for at, piece in pieces:
        reads |= dict.fromkeys(name for name in side_names_of(piece) if name not in written)
        for name in getattr(piece, "writes", ()) if isinstance(piece, Run) else ():
            if name in written:
                raise SideInputError(
                    f"side tensor {name!r} is written twice, at {written[name]!r} and at {at!r}."
                )
            if name in reads:
                raise SideInputError(
                    f"side tensor {name!r} is written at {at!r}, after it was read."
                )
            written[name] = at
    return tuple(reads), frozenset(written)


def side_names_of(piece: Any) -> tuple[str, ...]:
    """The side inputs that a piece takes by keyword: its `reads`, or those of the layer that it wraps, as PEFT's do."""
    reads = getattr(piece, "reads", None)
    if reads is not None:
        return tuple(reads)
    wrapped = getattr(piece, "base_layer", None)
    return () if wrapped is None else side_names_of(wrapped)


def runner_of(module: Any) -> Runner:
    """The runner of a Sequential, rebuilt when a child was replaced."""
    if torch.compiler.is_compiling():
        traced.prepare(id(module), tuple([id(child) for child in module._planned_modules()]))
    else:
        module._prepare(module._planned_modules())
    runner: Runner = module._runner
    return runner


def prepare(module: Any, children: tuple[nn.Module, ...]) -> None:
    """Build the runner of a module, unless the one that it has still fits."""
    runner: Runner | None = module._runner
    alone = isinstance(module, Op)
    names = [] if alone else [*module._modules]  # parametrizations of an op come and go
    if runner is None or not runner.fits(children) or runner.names != names:
        runner = module.__dict__["_runner"] = Runner(module._planned(), alone)
        runner.names = names


op_module.prepare = prepare  # type: ignore[assignment]


def tokens_of(module: Any, runner: Runner) -> Tokens:
    """The settings of this call. A recomputation must find those of its forward."""
    tokens = (scopes.process.token, module._settings, scopes.current().token)
    if torch.compiler.is_compiling():
        return tokens
    if runner.last is not None and runner.last != tokens and torch_private.in_backward():
        scoped = tokens[2] if scopes.current().reentered else runner.last[2]
        before, now = scopes.resolve(*runner.last[:2], scoped), scopes.resolve(*tokens)
        changed = before.difference(now)
        if changed:
            raise RecomputationError(
                f"{described(module)} is recomputed under other settings than its forward ran under: "
                f"{'; '.join(changed)}. Set them with fuseops.configure(model, ...), or pass "
                "context_fn=fuseops.checkpoint_contexts to checkpoint(..., use_reentrant=False)."
            )
    runner.last = tokens
    return tokens


def _no_module(parent: nn.Module, name: str, given: Any) -> TypeError:
    if isinstance(given, type):
        return TypeError(
            f"{type(parent).__name__}: child {name!r} is the class {given.__name__}, expected an instance: "
            f"{given.__name__}(...)."
        )
    return TypeError(
        f"{type(parent).__name__}: child {name!r} is of type {type(given).__name__}, expected an nn.Module. Pass "
        f"modules one by one, {type(parent).__name__}(*modules), or in one dict by name."
    )


class Composed(nn.Sequential):
    """What a Sequential is made of: its children, the edits of `torch.nn.Sequential`, and its configuration."""

    _prepare = prepare
    _runner: Runner | None = None
    _settings: int = 0  # token of what fuseops.configure said of this model

    def __init__(self, *args: Any, **named: Any) -> None:
        if len(args) == 1 and isinstance(args[0], Mapping) and not named:
            super().__init__()
            for name, module in args[0].items():
                self.add_module(name, module)
        else:
            super().__init__(*args)
        for name, module in named.items():
            self.add_module(name, module)

    def add_module(self, name: str, module: nn.Module | None) -> None:
        """As of `torch.nn.Module`.  Raises TypeError, which says what to pass, for what is no module."""
        if not isinstance(module, nn.Module):
            raise _no_module(self, name, module)
        if "_parameters" not in module.__dict__:
            raise TypeError(
                f"{type(self).__name__}: child {name!r} was not initialised: call super().__init__() in "
                f"{type(module).__name__}.__init__."
            )
        super().add_module(name, module)

    def _planned(self) -> list[tuple[str, nn.Module]]:
        """(name, module) of everything that runs, in order."""
        return list(self._modules.items())

    def _planned_modules(self) -> tuple[Any, ...]:
        return tuple(self._modules.values())

    @property
    def reads(self) -> tuple[str, ...]:
        """Side inputs that the caller must pass."""
        return runner_of(self).reads

    def _like(self, children: Iterable[tuple[str, nn.Module]]) -> Self:
        """A Sequential of this class over other children, with this one's configuration."""
        new = type(self).__new__(type(self))
        nn.Module.__init__(new)
        for name, module in children:
            new.add_module(name, module)
        for key, value in self.__dict__.items():
            if key in ("_settings", "training") or isinstance(value, (Tap, Add)):
                new.__dict__[key] = value
        return new

    @overload
    def __getitem__(self, idx: slice) -> Self: ...
    @overload
    def __getitem__(self, idx: int | str) -> Any: ...

    def __getitem__(self, idx: Any) -> Any:
        """A child by position or name, or a Sequential of this class over a slice."""
        if isinstance(idx, slice):
            return self._like(list(self._modules.items())[idx])
        if isinstance(idx, str):
            return self._modules[idx]
        return super().__getitem__(idx)

    def __setitem__(self, idx: Any, module: nn.Module) -> None:
        """Replace a child, by position or by a name that is there."""
        if not isinstance(idx, str):
            super().__setitem__(idx, module)
            return
        if idx not in self._modules:
            raise KeyError(
                f"{idx!r}: there are {[*self._modules]}. append and insert add children."
            )
        setattr(self, idx, module)

    def __delitem__(self, idx: Any) -> None:
        """By position, after which the others are numbered anew as in `torch.nn.Sequential`, or by name."""
        if not isinstance(idx, str):
            super().__delitem__(idx)
            return
        del self._modules[idx]

    def __add__(self, other: Any) -> Self:
        if not isinstance(other, nn.Sequential):
            raise TypeError(
                f"can only add a Sequential to a Sequential, got {type(other).__name__}"
            )
        return self._like((str(i), m) for i, m in enumerate([*self, *other]))

    def __mul__(self, other: int) -> Self:
        if not isinstance(other, int) or other <= 0:
            wrong = ValueError if isinstance(other, int) else TypeError
            raise wrong(f"a Sequential is repeated a positive number of times, got {other!r}")
        return self._like((str(i), m) for i, m in enumerate(list(self) * other))

    def __rmul__(self, other: int) -> Self:
        return self * other

    def __iter__(self) -> Iterator[nn.Module]:
        return iter(self._modules.values())

    def __getstate__(self) -> dict[str, Any]:
        return scopes.portable(self.__dict__)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(scopes.restored(state))  # type: ignore[no-untyped-call]
