"""A call as dynamo traces it, under torch.compile.

What dynamo reads is guarded on, and every later call pays for it. So traced code reads of the modules what a plan
depends on, and nothing else: its own names are in closures (`closed`), except those that must be guarded on. It asks
the planner, which runs outside of the trace, by constants, and is told constants: numbers, and lists of words in one
string. Modules go there by address: `id()` makes dynamo guard on their identity. Conditions are evaluated in traced
code, so that their outcome becomes a guard and dim 0 stays free.

A segment of fuseops' own ops is one call in dynamo's graph. Dynamo does not look into it, AOTAutograd does, and so the
compiler sees all that its ops do. They read nothing but what they are given and their own attributes, which are guarded
on. What other ops read is not known: dynamo traces them.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch.nn.utils import parametrize

from fuseops import torch_private
from fuseops.errors import FuseOpsError
from fuseops.ops import scopes
from fuseops.ops.local import to_local_input
from fuseops.plan.key import (
    Tokens,
    autocast_of,
    call_facts,
    parameter_facts,
    side_facts,
)
from fuseops.plan.segment import Segment
from fuseops.recipes import Quantized

from . import bridge
from .closed import closed
from .composed import Composed
from .run import call_op, run_segment
from .runner import Runner, prepare
from .sides import asked_for, check_input, side_inputs
from .steps import Once, write_forward
from .told import STAYS, told
from .traced import TABLE, alive


def forward(
    module: Any,
    x: Any,
    args: tuple[Any, ...],
    returns: Iterable[str],
    out: Mapping[str, Any] | None,
    side: dict[str, Any],
) -> Any:
    """`forward` of a Sequential, or of an op that is called alone."""
    returns = asked_for(returns)
    if out:
        raise FuseOpsError("out= is eager only: compile around the ops that write to buffers.")
    check_input(module, x)
    if isinstance(x, Quantized):
        x = x.dequantize()
    modules = _walked(module, [])
    runner = _prepared(id(module), tuple([_identity(child) for child in modules]))
    reads = _listed(told(runner, "reads"))
    env = {}
    if args or side or reads:
        writes = frozenset(_listed(told(runner, "writes")))
        env = side_inputs(module, tuple(reads), writes, args, side)
    tokens = scopes.tokens(module._settings)
    for at in range(told(runner, "pieces", returns)):
        place = told(runner, "place", at)
        if place is None:
            live = tuple(_listed(told(runner, "live", at, returns)))
            run = (module, runner, at, modules, x, env, tokens, live)
            if told(runner, "parametrized", at):
                with parametrize.cached():  # computed once a forward
                    x = _run(*run)
            else:
                x = _run(*run)
        else:
            takes = _listed(told(runner, "takes", at))
            given = {keyword: env[name] for keyword, name in _pairs(takes)}
            x = modules[place](x, **given)
    return (x, *[env[name] for name in returns]) if returns else x


def _run(
    module: Any,
    runner: int,
    at: int,
    modules: Sequence[Any],
    x: Any,
    env: dict[str, Any],
    tokens: Tokens,
    live: tuple[str, ...],
) -> Any:
    """A run of ops, the piece `at` of a runner."""
    ops = [_op(modules, place) for place in _listed(told(runner, "ops", at))]
    numbered = _numbered(ops)
    for i in _listed(told(runner, "kinds", at)):
        kind = type(ops[int(i)])
        told(runner, "guarded", id(kind.fwd), id(kind.bwd))
    outside = _listed(told(runner, "outside", at))
    if told(runner, "local", at) and torch_private.is_dtensor(type(x)):
        laid_out = told(runner, "laid_out", at)
        x = to_local_input(x, None if laid_out is None else ops[laid_out]._layout)
    same = [_same(runner, at, i, op) for i, op in numbered]
    known = told(runner, "width", at, x.dim(), tuple(same))
    if known is None or x.shape[-1] != known:
        if told(runner, "swaps", at):
            _check_swapped(module, at, tuple(x.shape), {n: tuple(env[n].shape) for n in outside})
        else:
            _check_widths(ops, tuple(x.shape))
    call = call_facts(outside, x, env, tokens, live, torch_private.global_hooks())
    modes = tuple([_mode(runner, at, i, op) for i, op in numbered])
    parameters = tuple([_parameters(runner, at, i, op) for i, op in numbered])
    entry = told(runner, "entry", at, modes, parameters, call)
    reasons: tuple[str | None, ...] | None = None
    if told(runner, "conditional", at, entry, x.dtype, x.dim()):
        reasons = _reasons(module, at, entry, x, env)
    plan = told(runner, "plan", at, entry, reasons, x.dtype, x.dim())
    for k in range(told(runner, "segments", plan)):
        how = told(runner, "how", plan, k, tuple(same))
        if how == "tap":
            env[told(runner, "tap", plan, k)] = x
        elif how == "call":
            x = _called(plan, k, x, env)
        elif how == "traced":
            x = _traced(plan, k, x, env)
        else:
            x = _opaque(runner, at, plan, k, ops, x, env)
    return x


def _check_widths(ops: Sequence[Any], shape: tuple[Any, ...]) -> None:
    for op in ops:
        if op is not None:
            shape = op.out_shape(shape)


def _mode(runner: int, at: int, i: int, op: Any) -> tuple[bool, bool] | None:
    """Of the `OpFacts`, training and alias: read here, since dynamo guards on attributes that it reads. The class is
    guarded on; of hooks, which dynamo does not guard on, the planner tells.
    """
    if op is None:
        return None
    _ = op.forward, op.fwd, op.bwd  # that they are those of the class
    # a branch: dynamo makes a symbol of what op.alias may compare, the p of a Dropout
    alias = told(runner, "alias", at, i)
    if alias is None:
        alias = True if op.alias else False  # noqa: SIM210
    return op.training, alias


def _parameters(runner: int, at: int, i: int, op: Any) -> tuple[Any, ...]:
    """The `ParameterFacts` of an op."""
    if op is None:
        return ()
    grad, found = torch.is_grad_enabled(), []
    for name in _listed(told(runner, "parameters", at, i)):
        home = told(runner, "home", at, i, name)
        p = getattr(op, home)[name] if home else op.sample(name)
        found.append(None if p is None else parameter_facts(p, grad))
    return tuple(found)


def _opaque(
    runner: int, at: int, plan: int, k: int, ops: Sequence[Any], x: Any, env: dict[str, Any]
) -> Any:
    """A segment as one call in dynamo's graph."""
    inputs = [env[name] for name in _listed(told(runner, "inputs", plan, k))]
    for i, name in _pairs(_listed(told(runner, "params", plan, k))):
        home = told(runner, "home", at, int(i), name)
        inputs.append(getattr(ops[int(i)], home)[name] if home else getattr(ops[int(i)], name))
    y = in_graph(told(runner, "number", plan, k), x, *inputs)
    exports = _listed(told(runner, "exports", plan, k))
    if not exports:
        return y
    for name, t in zip(exports, y[1:], strict=True):
        env[name] = t
    return y[0]


def in_graph(number: int, x: Any, *inputs: Any) -> Any:
    """The segment of a number: what AOTAutograd traces, and what runs where a backend does not trace.   -> y, or
    (y, *exports)
    """
    seg: Segment = TABLE[number]
    own = torch.autocast(seg.device, enabled=False) if seg.autocast else contextlib.nullcontext()
    with torch_private.compiling(), own:
        if seg.needs_grad:
            return bridge.Node.apply(seg, None, x, *inputs)  # type: ignore[no-untyped-call]
        t = list(inputs)
        y, _, _ = (seg.fwd or write_forward(seg))(x, t, Once())
    return (y, *[t[place] for place in seg.export_positions]) if seg.exports else y


# --- what both sides of the border know


def _walked(module: Any, found: list[Any]) -> list[Any]:
    """Every child that runs, those of Sequentials inside included. The Tap and Add of a Residual, which stay what they
    are, are left out.
    """
    for child in module._modules.values() if isinstance(module, Composed) else (module,):
        found.append(child)
        if isinstance(child, Composed):
            _walked(child, found)
    return found


def _op(modules: Sequence[Any], place: str) -> Any:
    """The op at a place: one of those that were walked, or that a style of parallelism has put around one of them.
    None: it stays what it is.
    """
    if place == STAYS:
        return None
    if "." not in place:
        return modules[int(place)]
    child, side, k = place.split(".")
    return modules[int(child)]._around[int(side)][int(k)]


def _places(modules: Sequence[Any]) -> dict[int, str]:
    """Where each of them stands, and what is around it, by address."""
    found = {id(child): str(k) for k, child in enumerate(modules)}
    for at, child in enumerate(modules):
        for side, ops in enumerate(getattr(child, "_around", ())):
            found |= {id(op): f"{at}.{side}.{k}" for k, op in enumerate(ops)}
    return found


def _identity(child: Any) -> Any:
    """All that a runner depends on of a child, that may be another at the next call."""
    return (id(child), child._settings) if isinstance(child, Composed) else id(child)


def _listed(words: str) -> list[str]:
    return words.split("\n") if words else []


def _pairs(items: list[str]) -> Any:
    return zip(items[::2], items[1::2], strict=True)


def _numbered(items: Sequence[Any]) -> list[tuple[int, Any]]:
    """`enumerate`, which dynamo traces as a function of its own, with guards on what that reads."""
    return [*zip(range(len(items)), items, strict=True)]


def _same(runner: int, at: int, i: int, op: Any) -> bool:
    """Whether the attributes of an op are what they are outside of the trace; they are guarded on."""
    if op is None:
        return True
    for name in _listed(told(runner, "kept", at, i, "number")):
        if getattr(op, name) != told(runner, "attribute", at, i, name):  # dynamo may hold a symbol
            return False
    for name in _listed(told(runner, "kept", at, i, "constant")):
        if not told(runner, "equals", at, i, name, getattr(op, name)):
            return False
    for name in _listed(told(runner, "kept", at, i, "mixed")):
        for k, item in _numbered(getattr(op, name)):
            if item != told(runner, "item", at, i, name, k):
                return False
    for name in _listed(told(runner, "kept", at, i, "mapping")):
        if not told(runner, "maps", at, i, name, tuple(getattr(op, name).items())):
            return False
    for name in _listed(told(runner, "kept", at, i, "object")):
        if not told(runner, "identical", at, i, name, id(getattr(op, name))):
            return False
    return not told(runner, "kept", at, i, "other")


# --- what is guarded on: read through the names of modules


def _check_swapped(module: Any, at: int, shape: Any, known: dict[str, Any]) -> None:
    for _ in module._runner.pieces[at][1].chain.shapes(shape, known):
        pass


def _reasons(module: Any, at: int, entry: int, x: Any, env: dict[str, Any]) -> Any:
    return module._runner.pieces[at][1].reasons(TABLE[entry], x, env)


def _called(plan: int, k: int, x: Any, env: dict[str, Any]) -> Any:
    return call_op(TABLE[plan].segments[k], x, env)


def _traced(plan: int, k: int, x: Any, env: dict[str, Any]) -> Any:
    return run_segment(TABLE[plan].segments[k], x, env, None)


# --- outside of the trace


@functools.cache
def _entrance() -> type:
    return closed(
        [
            *(autocast_of, side_facts, call_facts, parameter_facts, check_input, side_inputs),
            *(_listed, _pairs, _numbered, _walked, _op, _identity),
            *(_check_widths, _same, _mode, _parameters, _opaque, _run, forward),
        ]
    )


@torch_private.assume_constant_result
def entrance() -> type:
    """A class whose instances, made in traced code, `run` a call as `forward` does, without guards on names."""
    return _entrance()


@torch_private.assume_constant_result
def _prepared(module: int, identities: tuple[Any, ...]) -> int:
    """The address of a module's runner, which holds as long as `identities` do."""
    found = alive(module)
    prepare(found)
    runner: Runner = found._runner
    if not runner.places:
        runner.places = _places(_walked(found, []))
        torch_private.allow_in_graph(in_graph)
    return id(runner)
