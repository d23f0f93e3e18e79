"""The steps of a segment, as two functions that are written out once: a repeated call loops over nothing.

A step that is nothing but a call of its op stands there in full, any other as a call of `forward_of` or `results_of`.
Segments alike have one source and one compiled code, which closes over their steps and ops.
"""

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from keyword import iskeyword
from typing import Any, NamedTuple

from torch import Tensor

from fuseops.ops.op import Call, Grads, Out
from fuseops.plan.segment import BackwardStep, ForwardStep, Segment, Slot, Step
from fuseops.recipes import Quantized

from . import buffers, checks, pure, weight_grads
from .buffers import Buffers
from .checks import WRITTEN
from .first import FirstCall
from .ranges import label, ranged

OUT = Call._fields.index("out")  # `scratch` is the last field
new = tuple.__new__
NAMED = Quantized, buffers, ranged  # by what is written
Written = Callable[..., Any]


class Once(NamedTuple):
    """What lives for one call only."""

    scratch: dict[str, dict[str, Any]] | None = None  # by the Sequential that an op was written in
    out: Buffers | None = None  # the caller's, of an op that runs alone
    look: FirstCall | None = None  # looks at the first forward and the first backward of a segment
    seed: Tensor | None = None  # (1,) int64, of a backward that rounds at random


# --- the writer ----------------------------------------------------------------------------------------------------


def write_forward(seg: Segment) -> Written:
    """Give a segment its `fwd`, which runs its steps.   (x, t, once) -> y, what is kept, dtypes of x

    Published side tensors are appended to `t`.
    """
    known: dict[str, Any] = {}
    casts, kept = _casts(seg), _named("k", range(len(seg.kept) if seg.needs_grad else 0))
    lines = ["look = once.look", *_apart(_named("t", range(seg.inputs)), "t")]
    for k, step in enumerate(seg.forward):
        known |= {f"s{k}": step, f"o{k}": step.target, f"c{k}": step.calls[0]}
        body = [f"step = s{k}", *[f"e{step.first} = x.dtype"] * (step.first in casts)]
        body += ["if type(x) is Quantized: x = x.dequantize()"] * (not step.codes)
        body += ["if look is not None: look.before_fwd(step, x, t)"]
        if step.plain:
            given = [(name, f"t{at}") for name, at in step.args[0]]
            body += [f"out = o{k}.fwd(x{_keywords(given, step, k)})"]
            body += ["if type(out) is not Out: out = checks.bare(step, out)"]
        else:
            body += [f"out = forward_of(step, x, t, once, {seg.needs_grad})"]
        body += ["if look is not None: look.after_fwd(step, out)"]
        body += ["x, own, side = out"]
        body += [f"t{at} = published(step, {name!r}, side, t)" for name, at in step.writes]
        for m, (slot, names) in enumerate(_saved(seg, step) if seg.needs_grad else ()):
            if slot is not None:
                known[f"n{slot.owner}"] = slot.cls._make([None] * len(slot.names))
                places = _tuple([names.get(at, "_") for at in range(len(slot.names))])
                body += [f"{places} = own{f'[{m}]' * (step.kind == 'forward')} or n{slot.owner}"]
        lines += _in_range([*body, "out = own = side = _ = None"], seg, step, f"l{k}", "", known)
    lines += ["if look is not None: look.seg.checked_forward = True"]
    lines += ["if once.out is not None: x = buffers.given('y', once.out, x)"]
    lines += [f"return x, {_tuple(kept)}, {_tuple(_named('e', casts))}"]
    seg.fwd = _made("written(x, t, once)", lines, known)
    return seg.fwd


def write_backward(seg: Segment) -> Written:
    """Give a segment its `bwd`.   (kept, dy, dsides, entered, once) -> gradients of the inputs of the node

    They are None where nobody wants one. Each op gets dy in the dtype of its y; the gradients that leave the node are
    cast by autograd itself. `kept` is emptied: what an op saved lives no longer than it is read.
    """
    known: dict[str, Any] = {}
    casts, grads = _casts(seg), _named("g", range(seg.size))
    lines = ["look = once.look", *_apart(_named("k", range(len(seg.kept))), "kept"), "kept.clear()"]
    lines += [*_apart(_named("e", casts), "entered"), " = ".join([*grads, "None"])]
    lines += _apart(_named("g", seg.export_positions), "dsides")
    lines += ["if once.out is not None: buffers.check_dy(once.out, dy)"]
    for k, step in enumerate(seg.backward):
        known |= {f"s{k}": step, f"o{k}": step.target, f"c{k}": step.calls[0]}
        dys = ["dy", *_named("g", [at for _, at in step.writes])]
        body = [f"step = s{k}", *_backward_call(seg, step, k, known)]
        body += _read(step, "r" if step.plain else "r[{}]", "(r,)" if step.plain else "r")
        if step.first in casts:
            at = f"e{step.first}"
            body += [f"if dy is not None and dy.dtype is not {at}: dy = dy.to({at})"]
        lines += [f"if {' or '.join(f'{d} is not None' for d in dys)}:"]
        lines += _indented(_in_range(body, seg, step, f"l{k}", " backward", known))
    lines += ["if look is not None: look.seg.checked_backward = True"]
    lines += ["if dy is not None and once.out is not None: dy = buffers.given('dx', once.out, dy)"]
    lines += [f"return {_tuple(['None', 'None', 'dy', *grads[: seg.inputs]])}"]
    seg.bwd = _made("written(kept, dy, dsides, entered, once)", lines, known)
    return seg.bwd


def _backward_call(seg: Segment, step: BackwardStep, k: int, known: dict[str, Any]) -> list[str]:
    """Lines that call what runs a backward step, and let go of what it saved."""
    owns: list[str] = []
    read: list[str] = []
    for m, (slot, names) in enumerate(_saved(seg, step)):
        if slot is None:
            known[f"n{k}_{m}"] = step.empty[m]
            owns.append(f"n{k}_{m}")
            continue
        known[f"S{k}_{m}"] = slot.cls
        fields = [names.get(at, "None") for at in range(len(slot.names))]
        owns.append(f"new(S{k}_{m}, {_tuple(fields)})")
        read += names.values()
    free = [" = ".join([*read, "None"])] if read else []
    if step.plain:
        look = "if look is not None: look.before_bwd(step, (own,), dy, None)"
        call = f"r = o{k}.bwd(own, dy{_keywords([], step, k)})"
        return [f"own = {owns[0]}", *free, look, call, "own = None"]
    sides = [(name, f"g{at}") for name, at in step.writes]
    dside = f"{{{', '.join(f'{name!r}: {g}' for name, g in sides)}}}" if sides else "None"
    partly = " or ".join(f"{d} is None" for d in ("dy", *[g for _, g in sides]))
    return [
        *[f"mine, dside = [{', '.join(owns)}], {dside}", *free],
        *[f"partly = {partly}"] * bool(sides),
        "if look is not None: look.before_bwd(step, mine, dy, dside)",
        "r = results_of(step, mine, dy, dside, once)",
    ]


def _read(step: BackwardStep, of: str, results: str) -> list[str]:
    """Lines that take the gradients from what a backward step gave.   of: a member's Grads"""
    taken = [f"g{at} = {of.format(m)}.params[{name!r}]" for m, name, at in step.params]
    wanted = _named("g", [at for *_, at in step.params])
    for n, (m, name, at) in enumerate(step.sides):
        taken += [f"d{n} = {of.format(m)}.side[{name!r}]", f"g{at} = add(g{at}, d{n})"]
        wanted.append(f"d{n}")
    taken.append(f"dy = {of.format(0)}.x")
    wanted += ["dy"] * step.dx
    if wanted:
        missing = " or ".join(f"{name} is None" for name in wanted)
        complete = f"checks.check_complete(step, {results}, {'partly' if step.writes else False})"
        taken.append(f"if {missing}: {complete}")
    return [
        *["try:", *_indented(taken), "except checks.UNREADABLE:"],
        f" raise checks.wrong_grads(step, {results}) from None",
        f"if look is not None: look.after_bwd(step, {results})",
    ]


def _casts(seg: Segment) -> list[int]:
    """The ops before whose forward the dtype of x is noted, which is that of the dx of a backward step."""
    gives = {step.first for step in seg.backward}
    return [step.first for step in seg.forward if step.first in gives]


def _saved(seg: Segment, step: Step) -> Iterator[tuple[Slot | None, dict[int, str]]]:
    """Of every Saved that a step gives or reads: its slot, None where nothing of it is kept, and the names of the
    fields that are.
    """
    numbers = {at: f"k{n}" for n, at in enumerate(seg.kept)}
    slots = {slot.owner: slot for slot in seg.slots}
    for i in step.members[:1] if step.kind == "joint" else step.members:
        slot = slots.get(i)
        yield slot, {} if slot is None else {k: numbers[i, k] for k in slot.kept}


def _keywords(given: list[tuple[str, str]], step: Step, k: int) -> str:
    """Further arguments of a call, with the call of step k where it takes one."""
    given = [*given, *[("call", f"c{k}")] * bool(step.keywords)]
    usual = [f", {name}={value}" for name, value in given if _usual(name)]
    others = [f"{name!r}: {value}" for name, value in given if not _usual(name)]
    return "".join(usual) + (f", **{{{', '.join(others)}}}" if others else "")


def _usual(name: str) -> bool:
    return name.isidentifier() and not iskeyword(name)


def _named(kind: str, numbers: Iterable[int]) -> list[str]:
    return [f"{kind}{n}" for n in numbers]


def _tuple(names: Iterable[str]) -> str:
    return f"({''.join(f'{name}, ' for name in names)})"


def _apart(names: Sequence[str], whole: str) -> list[str]:
    return [f"{_tuple(names)} = {whole}"] if names else []


def _indented(lines: Iterable[str]) -> list[str]:
    return [f" {line}" for line in lines]


def _in_range(
    body: list[str], seg: Segment, step: Step, name: str, behind: str, known: dict[str, Any]
) -> list[str]:
    """The lines of a step, in a range of the profile where the segment runs in one."""
    if seg.path is None:
        return body
    known[name] = label(seg, step, seg.path) + behind
    return [f"with ranged({name}):", *_indented(body)]


def _made(head: str, lines: Sequence[str], known: Mapping[str, Any]) -> Written:
    text = [f"def make({', '.join(known)}):", f" def {head}:", *_indented(_indented(lines))]
    made: Written = _compiled("\n".join([*text, " return written"]))(*known.values())
    return made


@functools.lru_cache(maxsize=256)
def _compiled(source: str) -> Callable[..., Written]:
    made: dict[str, Any] = {}
    exec(compile(source, WRITTEN, "exec"), globals(), made)
    make: Callable[..., Written] = made["make"]
    return make


# --- what the written functions call -------------------------------------------------------------------------------


def forward_of(step: ForwardStep, x: Any, t: Sequence[Any], once: Once, needs_grad: bool) -> Out:
    """What the forward of a step gives.   needs_grad: a backward may follow"""
    if step.cast is not None:
        x = x.to(step.cast)
    if step.kind != "op":
        if step.kind == "forward" and needs_grad:
            pure.keep_states(step.target.members, step.at, once.scratch)
        return run_fused(step, x, t, once)
    keywords = {name: t[position] for name, position in step.args[0]}
    if step.keywords:
        keywords["call"] = _calls(step, once)[0] if step.live else step.calls[0]
    if not step.pure:
        out = step.target.fwd(x, **keywords)
        return out if type(out) is Out else checks.bare(step, out)
    out = pure.run_fwd(step, x, keywords, needs_grad, once.scratch)
    out = out if type(out) is Out else checks.bare(step, out)
    return Out(out.y, pure.inputs_saved(step, x, keywords), out.side)


def run_fused(step: ForwardStep, x: Any, t: Sequence[Any], once: Once) -> Out:
    """What the forward of a fused op gives."""
    members = tuple([{name: t[position] for name, position in args} for args in step.args])
    calls = _calls(step, once) if step.live else step.calls
    if step.kind == "joint":
        out: Out = step.target.fwd(x, members, calls, step.keep)
    else:
        out = step.target.fwd(x, members, calls)
        if type(out) is not Out or out.saved is None or len(out.saved) != len(members):
            raise checks.wrong_saved(step, out)
    return out


def published(step: ForwardStep, name: str, side: Any, t: list[Any]) -> Any:
    """What a step published under a name, which the steps behind find in `t`."""
    try:
        t.append(side[name])
    except (TypeError, KeyError):
        raise checks.unpublished(step, name, side) from None
    return t[-1]


def _calls(
    step: Step, once: Once, main: Sequence[weight_grads.Destinations] | None = None
) -> Sequence[Any]:
    """The calls of a step with what lives for one call only."""
    shared, out = once.scratch, once.out
    if shared is not None:
        for scope in step.scopes:
            if scope not in shared:
                shared[scope] = {}
    calls: list[Any] = [
        # `_replace`, without a call for each
        new(
            Call, (*call[:OUT], out, *call[OUT + 1 : -1], None if shared is None else shared[scope])
        )
        for call, scope in zip(step.calls, step.scopes, strict=True)
    ]
    if once.seed is not None:  # numbers of its own for each op, and each of its two layouts
        first = 2 * step.at
        calls = [c._replace(seed=once.seed + first + 2 * k) for k, c in enumerate(calls)]
    return tuple(calls) if main is None else weight_grads.with_buffers(calls, main)


def results_of(
    step: BackwardStep, mine: list[Any], dy: Any, dside: dict[str, Any] | None, once: Once
) -> Sequence[Grads]:
    """The Grads of every member of a step, and parameter gradients that do not go through autograd put where they
    belong.   mine: the Saved of its members, which leave the list as the op takes them
    """
    if step.later is None and not step.main:
        return _results(step, None, mine, dy, dside, once)
    # what waits for backward_dw holds what this step saved
    saved: Sequence[Any] = mine if step.later is None else tuple(mine)
    run = partial(_results, mine=saved, dy=dy, dside=dside, once=once)
    ops = [step.target] if step.kind == "op" else step.target.members
    return weight_grads.elsewhere(step, ops, run, saved, dy)


def _results(
    step: BackwardStep,
    out: Sequence[weight_grads.Destinations] | None,
    mine: Sequence[Any],
    dy: Any,
    dside: dict[str, Any] | None,
    once: Once,
) -> Sequence[Grads]:
    if step.kind == "op":
        return (_op_bwd(step, _first(mine), dy, dside or {}, once, out),)
    calls = _calls(step, once, out) if step.live else step.calls
    bwd: Callable[..., Sequence[Grads]] = step.target.bwd
    if step.kind == "backward":
        saved = tuple(mine)
        if type(mine) is list:
            mine.clear()
        return bwd(saved, dy, calls, dside or {})
    taken = [_first(mine)]
    return bwd(taken if step.target.takes_saved else taken.pop(), dy, calls, dside or {})


def _first(mine: Sequence[Any]) -> Any:
    """The one Saved of a step; a list lets go of it."""
    return mine.pop() if type(mine) is list else mine[0]


def _op_bwd(
    step: BackwardStep, saved: Any, dy: Any, dside: dict[str, Any], once: Once, out: Any
) -> Grads:
    if step.pure:
        first = once.look is not None
        return pure.bwd_by_autograd(step, saved, dy, dside, first, once.scratch)
    keywords = step.keywords
    if step.takes_dside:
        keywords = {**keywords, "dside": dside}
    if step.live:
        keywords = {**keywords, "call": _calls(step, once, out)[0]}
    grads: Grads = step.target.bwd(saved, dy, **keywords)
    return grads


def add(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    """The sum of two gradients, either of which may be missing."""
    return b if a is None else a if b is None else a + b
