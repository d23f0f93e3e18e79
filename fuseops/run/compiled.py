"""A call as dynamo traces it, under torch.compile.

Dynamo guards on everything that traced code reads, and every later call evaluates these guards. So traced code reads
what a plan depends on and nothing else. Its global names are in closures (`guard_free`), except those that must be
guarded on. It queries the planner, which runs outside of the trace, with constants, and gets constants: numbers, and
lists of words in one string. Modules are passed by address: `id()` makes dynamo guard on their identity. Conditions
are evaluated in traced code, so that their outcome becomes a guard and dim 0 stays dynamic.

A segment of fuseops' own ops is one call in dynamo's graph, which AOTAutograd traces, so that the compiler sees every
ATen op. These ops read only their arguments and their attributes, which are guarded on. Other ops may read anything:
dynamo traces them.
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
from fuseops.ops.object_table import TABLE, object_at
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
from .composed import Composed
from .guard_free import guard_free
from .run import call_op, run_segment
from .runner import runner_of
from .sides import check_input, returned_names, side_inputs
from .steps import CallContext, write_forward
from .trace_queries import UNREAD, query


def forward(
    module: Any,
    x: Any,
    args: tuple[Any, ...],
    returns: Iterable[str] | None,
    out: Mapping[str, Any] | None,
    side: dict[str, Any],
) -> Any:
    """`forward` of a Sequential, or of an op that is called alone."""
    returns = returned_names(returns)
    if out:
        raise FuseOpsError("out= is eager only: compile around the ops that write to buffers.")
    check_input(module, x)
    if isinstance(x, Quantized):
        x = x.dequantize()
    modules = _flat_children(module, [])
    runner = _prepared(id(module), tuple([_identity(child) for child in modules]))
    reads = _split_words(query(runner, "reads"))
    env = {}
    if args or side or reads:
        writes = frozenset(_split_words(query(runner, "writes")))
        env = side_inputs(module, tuple(reads), writes, args, side)
    tokens = scopes.tokens(module._settings)
    for piece in range(query(runner, "pieces", returns)):
        place = query(runner, "module_index", piece)
        if place is None:
            live = tuple(_split_words(query(runner, "live_after", piece, returns)))
            run = (module, runner, piece, modules, x, env, tokens, live)
            if query(runner, "parametrized", piece):
                with parametrize.cached():  # computed once a forward
                    x = _run(*run)
            else:
                x = _run(*run)
        else:
            takes = _split_words(query(runner, "module_sides", piece))
            given = {keyword: env[name] for keyword, name in _pairs(takes)}
            x = modules[place](x, **given)
    return (x, *[env[name] for name in returns]) if returns else x


def _run(
    module: Any,
    runner: int,
    piece: int,
    modules: Sequence[Any],
    x: Any,
    env: dict[str, Any],
    tokens: Tokens,
    live: tuple[str, ...],
) -> Any:
    """Run the ops of a piece of a runner."""
    ops = [_op_at(modules, place) for place in _split_words(query(runner, "op_places", piece))]
    numbered = _enumerate(ops)
    for i in _split_words(query(runner, "first_of_each_class", piece)):
        cls = type(ops[int(i)])
        query(runner, "guard_on", id(cls.fwd), id(cls.bwd))
    outside = _split_words(query(runner, "outside", piece))
    if query(runner, "takes_local_x", piece) and torch_private.is_dtensor(type(x)):
        first = query(runner, "layout_op", piece)
        x = to_local_input(x, None if first is None else ops[first]._layout)
    unchanged = [_attributes_unchanged(runner, piece, i, op) for i, op in numbered]
    width = query(runner, "accepted_width", piece, x.dim(), tuple(unchanged))
    if width is None or x.shape[-1] != width:
        if query(runner, "has_swap", piece):
            _check_swapped(module, piece, tuple(x.shape), {n: tuple(env[n].shape) for n in outside})
        else:
            _check_widths(ops, tuple(x.shape))
    call = call_facts(outside, x, env, tokens, live, torch_private.global_hooks())
    modes = tuple([_mode(runner, piece, i, op) for i, op in numbered])
    parameters = tuple([_parameters(runner, piece, i, op) for i, op in numbered])
    entry = query(runner, "entry", piece, modes, parameters, call)
    reasons: tuple[str | None, ...] | None = None
    if query(runner, "depends_on_symbols", piece, entry, x.dtype, x.dim()):
        reasons = _reasons(module, piece, entry, x, env)
    plan = query(runner, "plan", piece, entry, reasons, x.dtype, x.dim())
    for k in range(query(runner, "segments", plan)):
        mode = query(runner, "segment_mode", plan, k, tuple(unchanged))
        if mode == "tap":
            env[query(runner, "segment_field", plan, k, "tap")] = x
        elif mode == "call":
            x = _run_called(plan, k, x, env)
        elif mode == "traced":
            x = _run_traced(plan, k, x, env)
        else:
            x = _run_opaque(runner, piece, plan, k, ops, x, env)
    return x


def _check_widths(ops: Sequence[Any], shape: tuple[Any, ...]) -> None:
    for op in ops:
        if op is not None:
            shape = op.out_shape(shape)


def _mode(runner: int, piece: int, i: int, op: Any) -> tuple[bool, bool] | None:
    """(training, alias) of the `OpFacts` of an op, read in the trace so that dynamo guards on them.

    Dynamo guards on the class too, but not on hooks: the planner reads those.
    """
    if op is None:
        return None
    _ = op.forward, op.fwd, op.bwd  # guards that they are not replaced on the instance
    # a branch makes it constant: op.alias may compare a symbol, the p of a Dropout
    alias = query(runner, "alias", piece, i)
    if alias is None:
        alias = True if op.alias else False  # noqa: SIM210
    return op.training, alias


def _parameters(runner: int, piece: int, i: int, op: Any) -> tuple[Any, ...]:
    """The `ParameterFacts` of an op."""
    if op is None:
        return ()
    grad_enabled, found = torch.is_grad_enabled(), []
    for name in _split_words(query(runner, "parameters", piece, i)):
        owner = query(runner, "owner_dict", piece, i, name)
        p = getattr(op, owner)[name] if owner else op.sample(name)
        found.append(None if p is None else parameter_facts(p, grad_enabled))
    return tuple(found)


def _run_opaque(
    runner: int, piece: int, plan: int, k: int, ops: Sequence[Any], x: Any, env: dict[str, Any]
) -> Any:
    """Run a segment as one call in dynamo's graph."""
    inputs = [env[name] for name in _split_words(query(runner, "segment_field", plan, k, "reads"))]
    for i, name in _pairs(_split_words(query(runner, "segment_params", plan, k))):
        owner = query(runner, "owner_dict", piece, int(i), name)
        inputs.append(getattr(ops[int(i)], owner)[name] if owner else getattr(ops[int(i)], name))
    y = in_graph(query(runner, "segment_field", plan, k, "number"), x, *inputs)
    exports = _split_words(query(runner, "segment_field", plan, k, "exports"))
    if not exports:
        return y
    for name, t in zip(exports, y[1:], strict=True):
        env[name] = t
    return y[0]


def in_graph(number: int, x: Any, *inputs: Any) -> Any:
    """Run the segment of a number: traced by AOTAutograd, or run by a backend without it.   -> y, or (y, *exports)"""
    seg: Segment = TABLE[number]
    own = torch.autocast(seg.device, enabled=False) if seg.autocast else contextlib.nullcontext()
    with torch_private.compiling(), own:
        if seg.needs_grad:
            return bridge.Node.apply(seg, None, x, *inputs)  # type: ignore[no-untyped-call]
        t = list(inputs)
        y, _, _ = (seg.fwd or write_forward(seg))(x, t, CallContext())
    return (y, *[t[place] for place in seg.export_positions]) if seg.exports else y


# --- inside and outside of the trace


def _flat_children(module: Any, found: list[Any]) -> list[Any]:
    """Append every child that runs, nested ones included, to `found`. The Tap and Add of a Residual, which never
    change, are left out.
    """
    for child in module._modules.values() if isinstance(module, Composed) else (module,):
        found.append(child)
        if isinstance(child, Composed):
            _flat_children(child, found)
    return found


def _op_at(modules: Sequence[Any], place: str) -> Any:
    """The op at a place: a flat child, or an op that a style of parallelism has put around one ("child.side.index").

    None for one that never changes.
    """
    if place == UNREAD:
        return None
    if "." not in place:
        return modules[int(place)]
    child, side, k = place.split(".")
    return modules[int(child)]._around[int(side)][int(k)]


def _positions(modules: Sequence[Any]) -> dict[int, str]:
    """The place of each flat child, and of the ops around it, by address."""
    found = {id(child): str(k) for k, child in enumerate(modules)}
    for index, child in enumerate(modules):
        for side, ops in enumerate(getattr(child, "_around", ())):
            found |= {id(op): f"{index}.{side}.{k}" for k, op in enumerate(ops)}
    return found


def _identity(child: Any) -> Any:
    """The part of a child that a runner depends on and that may differ at the next call."""
    return (id(child), child._settings) if isinstance(child, Composed) else id(child)


def _split_words(words: str) -> list[str]:
    return words.split("\n") if words else []


def _pairs(items: list[str]) -> Any:
    return zip(items[::2], items[1::2], strict=True)


def _enumerate(items: Sequence[Any]) -> list[tuple[int, Any]]:
    """`enumerate`, without the guards that dynamo adds when it traces that."""
    return [*zip(range(len(items)), items, strict=True)]


def _attributes_unchanged(runner: int, piece: int, i: int, op: Any) -> bool:
    """Whether the attributes of an op equal those outside of the trace; dynamo guards on the comparisons."""
    if op is None:
        return True
    for name in _split_words(query(runner, "attributes_of_kind", piece, i, "number")):
        # dynamo may hold a symbol
        if getattr(op, name) != query(runner, "attribute", piece, i, name):
            return False
    for name in _split_words(query(runner, "attributes_of_kind", piece, i, "constant")):
        if not query(runner, "attribute_equals", piece, i, name, getattr(op, name)):
            return False
    for name in _split_words(query(runner, "attributes_of_kind", piece, i, "mixed")):
        for k, item in _enumerate(getattr(op, name)):
            if item != query(runner, "attribute", piece, i, name, k):
                return False
    for name in _split_words(query(runner, "attributes_of_kind", piece, i, "mapping")):
        if not query(runner, "attribute_equals", piece, i, name, tuple(getattr(op, name).items())):
            return False
    for name in _split_words(query(runner, "attributes_of_kind", piece, i, "object")):
        if not query(runner, "attribute_is", piece, i, name, id(getattr(op, name))):
            return False
    return not query(runner, "attributes_of_kind", piece, i, "other")


# --- not in `_forward_class`: dynamo guards on what these read


def _check_swapped(module: Any, piece: int, shape: Any, known: dict[str, Any]) -> None:
    for _ in module._runner.pieces[piece][1].chain.shapes(shape, known):
        pass


def _reasons(module: Any, piece: int, entry: int, x: Any, env: dict[str, Any]) -> Any:
    return module._runner.pieces[piece][1].plans.reasons(TABLE[entry], x, env)


def _run_called(plan: int, k: int, x: Any, env: dict[str, Any]) -> Any:
    return call_op(TABLE[plan].segments[k], x, env)


def _run_traced(plan: int, k: int, x: Any, env: dict[str, Any]) -> Any:
    return run_segment(TABLE[plan].segments[k], x, env, None)


# --- outside of the trace


@functools.cache
def _forward_class() -> type:
    return guard_free(
        [
            *(autocast_of, side_facts, call_facts, parameter_facts, check_input, side_inputs),
            *(_split_words, _pairs, _enumerate, _flat_children, _op_at, _identity),
            *(_check_widths, _attributes_unchanged, _mode, _parameters, _run_opaque, _run, forward),
        ]
    )


@torch_private.assume_constant_result
def forward_class() -> type:
    """A class whose `run`, called on an instance that traced code makes, is `forward` without guards on names."""
    return _forward_class()


@torch_private.assume_constant_result
def _prepared(module: int, identities: tuple[Any, ...]) -> int:
    """The address of a module's runner, valid for these `identities` of its children."""
    found = object_at(module)
    runner = runner_of(found)
    if not runner.places:
        runner.places = _positions(_flat_children(found, []))
        torch.compiler.allow_in_graph(in_graph)  # type: ignore[no-untyped-call]
    return id(runner)
