"""Sequential: ops and plain modules in a row, run by plans.  Residual: one with a Tap before and an Add after."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from fuseops import torch_private
from fuseops.errors import FuseOpsError, RecomputationError, SideInputError
from fuseops.ops import names as naming
from fuseops.ops import op as op_module
from fuseops.ops import scopes
from fuseops.ops.op import Op
from fuseops.ops.structure import Add, Tap

from . import buffers, traced, weight_grads
from .buffers import Buffers
from .key import Tokens
from .run import Run
from .sides import check_input, check_returns, described, no_tensor, side_inputs

RESIDUAL = "<residual>"  # a name that no Tap or Add inside a Residual has


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
        self.nested = tuple((m, m.reads) for m in self.children if isinstance(m, Sequential))
        self.said = [
            (op, op.reads, op.writes, op.delays, op.accumulate_into_main_grad)
            for op in self.children
            if isinstance(op, Op)
        ]
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
        """Are these still the children, and do they still say the same of what they read, write and put elsewhere?"""
        if self.children != children:
            return False
        for op, reads, writes, delays, into_main_grad in self.said:
            if op.reads is not reads or op.writes is not writes:
                return False
            if op.delays is not delays or op.accumulate_into_main_grad is not into_main_grad:
                return False
        return all(nested.reads == known for nested, known in self.nested)

    def live_after(self, returns: tuple[str, ...]) -> tuple[tuple[str, ...], ...]:
        """For every piece, the side names that are read after it, or returned.

        Raises SideInputError when a Tap is read by nobody.
        """
        if returns in self._live:
            return self._live[returns]
        self._check_published(returns)
        reads = [frozenset(getattr(piece, "reads", ())) for _, piece in self.pieces]
        live = tuple(
            [tuple(sorted(frozenset(returns).union(*reads[k + 1 :]))) for k in range(len(reads))]
        )
        if not torch.compiler.is_compiling():  # a checkpoint inside compiled code may not write
            self._live[returns] = live
        return live

    def _check_published(self, returns: tuple[str, ...]) -> None:
        read = {name for _, piece in self.pieces for name in getattr(piece, "reads", ())} | set(
            returns
        )
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
            kind = "a nested Sequential" if isinstance(module, Sequential) else "a plain module"
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
        reads |= dict.fromkeys(name for name in getattr(piece, "reads", ()) if name not in written)
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
    if runner is None or not runner.fits(children) or runner.names != [*module._modules]:
        runner = module.__dict__["_runner"] = Runner(module._planned(), isinstance(module, Op))
        runner.names = [*module._modules]


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


class Sequential(nn.Sequential):
    """A `torch.nn.Sequential` of ops and plain modules that plans, fuses and names what it runs.

    Children by position, or by name: `Sequential({"fc1": ..., "act": ..., "fc2": ...})`. State_dict keys, indexing,
    slices, iteration, `+`, `*`, append, insert and extend are `torch.nn.Sequential`'s; configuration comes along.

    forward(x, routing=None, *, returns=(), out=None, **side): side inputs by name, or one `Routing` that holds several.
    Returns y, or (y, *side tensors) when `returns` names some.
    out: buffers of the caller, {"fc2.y": tensor, "fc1.dx": tensor}: the output of op "fc2", and in the backward the
    gradient of the input of "fc1", are written there. Such an op fuses with no other.
    Raises SideInputError for a missing, unknown or non-tensor side input.
    """

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

    # --- structure

    def _planned(self) -> list[tuple[str, nn.Module]]:
        """(name, module) of everything that runs, in order."""
        return list(self._modules.items())

    def _planned_modules(self) -> tuple[Any, ...]:
        return tuple(self._modules.values())

    @property
    def reads(self) -> tuple[str, ...]:
        """Side inputs that the caller must pass."""
        return runner_of(self).reads

    def _like(self, children: Iterable[tuple[str, nn.Module]]) -> Sequential:
        """A Sequential of this class over other children, with this one's configuration."""
        new = type(self).__new__(type(self))
        nn.Module.__init__(new)
        for name, module in children:
            new.add_module(name, module)
        for key, value in self.__dict__.items():
            if key in ("_settings", "training") or isinstance(value, (Tap, Add)):
                new.__dict__[key] = value
        return new

    def __getitem__(self, idx: Any) -> Any:
        if isinstance(idx, slice):
            return self._like(list(self._modules.items())[idx])
        if isinstance(idx, str):
            return self._modules[idx]
        return super().__getitem__(idx)

    def __add__(self, other: Any) -> Sequential:
        if not isinstance(other, nn.Sequential):
            raise TypeError(
                f"can only add a Sequential to a Sequential, got {type(other).__name__}"
            )
        return self._like((str(i), m) for i, m in enumerate([*self, *other]))

    def __mul__(self, other: int) -> Sequential:
        if not isinstance(other, int) or other <= 0:
            wrong = ValueError if isinstance(other, int) else TypeError
            raise wrong(f"a Sequential is repeated a positive number of times, got {other!r}")
        return self._like((str(i), m) for i, m in enumerate(list(self) * other))

    def __rmul__(self, other: int) -> Sequential:
        return self * other

    def __iter__(self) -> Iterator[nn.Module]:
        return iter(self._modules.values())

    def __getstate__(self) -> dict[str, Any]:
        return scopes.portable(self.__dict__)

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(scopes.restored(state))  # type: ignore[no-untyped-call]

    # --- running

    def forward(  # type: ignore[override]
        self,
        x: Any,
        *args: Any,
        returns: Iterable[str] = (),
        out: Mapping[str, Any] | None = None,
        **side: Any,
    ) -> Any:
        runner = runner_of(self)
        returns = (returns,) if isinstance(returns, str) else tuple(returns)
        env = side_inputs(self, runner, args, side)
        if returns:
            check_returns(self, runner, returns)
        check_input(self, x)
        tokens = tokens_of(self, runner)
        outs: dict[str, Buffers] = {}
        if out:
            ops = tuple([name for name, m in runner.planned if isinstance(m, Op)])
            outs = buffers.by_op(described(self), out, ops)
            runner = runner.with_apart(frozenset(outs))
        path, entered = _enter(self)
        scratch: dict[str, Any] = {}
        at = 0
        try:
            for at, live in enumerate(runner.live_after(returns)):  # the except reads it
                name, piece = runner.pieces[at]
                if isinstance(piece, Run):
                    x = piece(x, env, tokens, live, path, scratch, outs.get(name) if outs else None)
                elif isinstance(piece, Sequential):
                    x = piece(x, **{n: env[n] for n in piece.reads})
                else:
                    x = piece(x)
        except Exception as error:
            if runner.pieces and not isinstance(runner.pieces[at][1], Run):
                error.add_note(f"in {runner.pieces[at][0]!r} of {described(self)}")
            elif not isinstance(x, Tensor):
                raise no_tensor(self, runner.pieces[at - 1 : at + 1], x) from error
            raise
        finally:
            if entered:
                naming.thread.outermost = None
        return (x, *(env[name] for name in returns)) if returns else x

    def backward_dw(self) -> int:
        """Compute the weight gradients that ops with `delays` have put off, oldest backward first, and add them to
        `.grad` or main_grad: a schedule runs them where a pipeline would wait.   -> how many there were

        Until then the activations that they read stay alive.  Raises FuseOpsError for a parameter that FSDP2 has
        sharded again since.
        """
        return weight_grads.run_delayed(self)

    def plan(self, x: Any, *args: Any, returns: Iterable[str] = (), **side: Any) -> Any:
        """The FusionPlan of this call: what runs, what did not fuse and why, what is saved. Runs the forward once."""
        from .explain import plan_of

        return plan_of(self, x, *args, returns=returns, **side)

    def explain(self, x: Any, *args: Any, returns: Iterable[str] = (), **side: Any) -> str:
        """`plan` as text."""
        return str(self.plan(x, *args, returns=returns, **side))


def _enter(module: Sequential) -> tuple[str, bool]:
    """The prefix of saved names, and whether this Sequential is the outermost one that runs."""
    if torch.compiler.is_compiling():
        return "", False  # the partitioner decides what is saved there: it has no names
    if not naming.thread.observers:
        return module.__dict__.get("_prefix", ""), False
    if "_prefix" in module.__dict__:
        return module.__dict__["_prefix"], False
    outermost = naming.thread.outermost
    if outermost is None:
        naming.thread.outermost = {id(m): f"{n}." if n else "" for n, m in module.named_modules()}
        return "", True
    return outermost.get(id(module), ""), False


class Residual(Sequential):
    """y = x + f(x): a Tap before and an Add after, under a name of its own. State_dict keys are the children's."""

    _tap: Tap
    _add: Add

    def __init__(self, *args: Any, **named: Any) -> None:
        super().__init__(*args, **named)
        # not registered: the keys and positions of the children stay as they are
        self.__dict__["_tap"], self.__dict__["_add"] = Tap(RESIDUAL), Add(RESIDUAL)

    def _planned(self) -> list[tuple[str, nn.Module]]:
        return [("tap", self._tap), *super()._planned(), ("add", self._add)]

    def _planned_modules(self) -> tuple[Any, ...]:
        return (self._tap, *super()._planned_modules(), self._add)


def _run_alone(
    op: Op[Any], x: Any, *args: Any, out: Mapping[str, Any] | None = None, **side: Any
) -> Any:
    """One op, called by itself: planned, saved and named exactly as inside a Sequential."""
    check_input(op, x)
    runner = runner_of(op)
    env = side_inputs(op, runner, args, side)
    tokens = tokens_of(op, runner)
    run = runner.pieces[0][1]
    if not isinstance(run, Run):
        raise FuseOpsError(f"{type(op).__name__} is not an op")
    outs = None
    if out:
        name = type(op).__name__
        outs = buffers.by_op(name, {f"{name}.{what}": t for what, t in out.items()}, (name,))[name]
    y = run(x, env, tokens, tuple(op.writes), op.__dict__.get("_prefix", ""), {}, outs)
    return (y, *(env[name] for name in op.writes)) if op.writes else y


op_module.run_alone = _run_alone
op_module.run_delayed = weight_grads.run_delayed
