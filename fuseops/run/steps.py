"""The steps of a segment become two functions that are written out once: a repeated call loops over nothing.

Segments alike have one source and one compiled code, which closes over their steps and ops.
"""

import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from keyword import iskeyword
from typing import Any, NamedTuple

from torch import Tensor

from fuseops.ops.op import Call, Out, make_tuple
from fuseops.plan.segment import BackwardStep, ForwardStep, Segment, Slot, Step
from fuseops.recipes import Quantized

from . import buffers, checks, pure, weight_grads
from .buffers import Buffers
from .checks import WRITTEN
from .first import FirstCall
from .ranges import label, ranged

OUT = Call._fields.index("out")  # and `scratch`, the last fields
NAMED = Quantized, buffers, ranged, weight_grads  # by what is written
Written = Callable[..., Any]


class Once(NamedTuple):
    """A `Once` holds what lives for one call of a Sequential only."""

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
        known |= {f"s{k}": step, f"o{k}": step.target}
        body = [f"step = s{k}", *[f"e{step.first} = x.dtype"] * (step.first in casts)]
        body += ["if type(x) is Quantized: x = x.dequantize()"] * (not step.codes)
        body += ["if look is not None: look.before_fwd(step, x, t)"]
        body += _forward_call(step, k, seg.needs_grad, known)
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
    lines += ["if once.out is not None and 'y' in once.out:"]
    lines += [" x = buffers.put('y', once.out['y'], x).detach()"]
    lines += [f"return x, {_tuple(kept)}, {_tuple(_named('e', casts))}"]
    seg.fwd = _made("written(x, t, once)", lines, known)
    return seg.fwd


def _forward_call(step: ForwardStep, k: int, grad: bool, known: dict[str, Any]) -> list[str]:
    """Lines that call what runs a step.   grad: a backward may follow"""
    lines = []
    if step.cast is not None:
        known[f"d{k}"] = step.cast
        lines.append(f"x = x.to(d{k})")
    tensors = [[(name, f"t{at}") for name, at in args] for args in step.args]
    if step.pure:
        out = f"pure_forward(step, x, {_dict(tensors[0])}, once, {grad})"
        return [*lines, f"out = {out}"]
    calls = _calls(step, k, known)
    if step.kind == "op":
        out = (
            f"o{k}.fwd(x{_keywords(tensors[0] + [('call', f'{calls}[0]')] * bool(step.keywords))})"
        )
        return [*lines, f"out = {out}", "if type(out) is not Out: out = checks.bare(step, out)"]
    members = _tuple(map(_dict, tensors))
    if step.kind == "joint":
        known[f"f{k}"] = step.keep
        return [*lines, f"out = o{k}.fwd(x, {members}, {calls}, f{k})"]
    keep = f"pure.keep_states(o{k}.members, step.at, once.scratch)"
    return [
        *lines,
        *[keep] * grad,
        f"out = checks.saved_of_all(step, o{k}.fwd(x, {members}, {calls}))",
    ]


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
        known |= {f"s{k}": step, f"o{k}": step.target}
        dys = ["dy", *_named("g", [at for _, at in step.writes])]
        body = [f"step = s{k}"]
        if step.writes:
            body += [f"partly = {' or '.join(f'{d} is None' for d in dys)}"]
        body += [*_backward_call(seg, step, k, known), *_read(step)]
        if step.first in casts:
            at = f"e{step.first}"
            body += [f"if dy is not None and dy.dtype is not {at}: dy = dy.to({at})"]
        lines += [f"if {' or '.join(f'{d} is not None' for d in dys)}:"]
        lines += _indented(_in_range(body, seg, step, f"l{k}", " backward", known))
    lines += ["if look is not None: look.seg.checked_backward = True"]
    lines += ["if dy is not None and once.out is not None and 'dx' in once.out:"]
    lines += [" dy = buffers.put('dx', once.out['dx'], dy)"]
    lines += [f"return {_tuple(['None', 'None', 'dy', *grads[: seg.inputs]])}"]
    seg.bwd = _made("written(kept, dy, dsides, entered, once)", lines, known)
    return seg.bwd


def _backward_call(seg: Segment, step: BackwardStep, k: int, known: dict[str, Any]) -> list[str]:
    """Lines that call what runs a backward step, and let go of what it saved."""
    owns: list[str] = []
    read: list[str] = []
    for m, (slot, names) in enumerate(_saved(seg, step)):
        known[f"n{k}_{m}"] = step.empty[m] if slot is None else slot.cls
        fields = [] if slot is None else [names.get(at, "None") for at in range(len(slot.names))]
        owns.append(f"n{k}_{m}" if slot is None else f"make_tuple(n{k}_{m}, {_tuple(fields)})")
        read += names.values()
    dside = _dict([(name, f"g{at}") for name, at in step.writes])
    elsewhere = bool(step.main) or step.later is not None
    calls = _calls(step, k, known, elsewhere)
    if step.pure:
        call = "(pure.bwd_by_autograd(step, mine[0], dy, dside, look is not None, once.scratch),)"
    elif step.kind == "op":
        given = [("dside", "dside")] * step.takes_dside
        given += [("call", f"{calls}[0]")] * bool(step.keywords)
        call = f"(o{k}.bwd(mine[0], dy{_keywords(given)}),)"
    else:
        whole = "mine" if step.target.takes_saved else "mine.pop()"
        call = f"o{k}.bwd({whole if step.kind == 'joint' else 'tuple(mine)'}, dy, {calls}, dside)"
    if elsewhere:
        known[f"m{k}"] = [step.target] if step.kind == "op" else step.target.members
        run = f"lambda step, out=None, mine=mine, dy=dy, dside=dside: {call}"
        call = f"weight_grads.elsewhere(step, m{k}, {run}, mine, dy)"
    return [
        f"mine, dside = [{', '.join(owns)}], {dside}",
        *([" = ".join([*read, "None"])] if read else []),
        "if look is not None: look.before_bwd(step, mine, dy, dside)",
        f"r = {call}",
        "mine = None",
    ]


def _read(step: BackwardStep) -> list[str]:
    """Lines that take the gradients from what a backward step gave."""
    taken = [f"g{at} = r[{m}].params[{name!r}]" for m, name, at in step.params]
    wanted = _named("g", [at for *_, at in step.params])
    for n, (m, name, at) in enumerate(step.sides):
        taken += [f"d{n} = r[{m}].side[{name!r}]", f"g{at} = add(g{at}, d{n})"]
        wanted.append(f"d{n}")
    taken.append("dy = r[0].x")
    wanted += ["dy"] * step.dx
    if wanted:
        missing = " or ".join(f"{name} is None" for name in wanted)
        complete = f"checks.check_complete(step, r, {'partly' if step.writes else False})"
        taken.append(f"if {missing}: {complete}")
    return [
        *["try:", *_indented(taken), "except checks.UNREADABLE:"],
        " raise checks.wrong_grads(step, r) from None",
        "if look is not None: look.after_bwd(step, r)",
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


def _calls(step: Step, k: int, known: dict[str, Any], apart: bool = False) -> str:
    """The calls of a step.   apart: those of the part of it that runs"""
    if step.live:
        return f"calls_of(step, once{', out' * apart})"
    known[f"c{k}"] = step.calls
    return "step.calls" if apart else f"c{k}"


def _keywords(given: Iterable[tuple[str, str]]) -> str:
    """Further arguments of a call; side tensors may have names that Python does not take."""
    usual, others = "", []
    for name, value in given:
        if name.isidentifier() and not iskeyword(name):
            usual += f", {name}={value}"
        else:
            others.append((name, value))
    return usual + (f", **{_dict(others)}" if others else "")


def _dict(given: Iterable[tuple[str, str]]) -> str:
    return f"{{{', '.join(f'{name!r}: {value}' for name, value in given)}}}"


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


def pure_forward(
    step: ForwardStep, x: Any, keywords: dict[str, Any], once: Once, needs_grad: bool
) -> Out:
    """What a level-1 op gives.   needs_grad: a backward may follow"""
    if step.keywords:
        keywords["call"] = calls_of(step, once)[0] if step.live else step.calls[0]
    out = pure.run_fwd(step, x, keywords, needs_grad, once.scratch)
    out = out if type(out) is Out else checks.bare(step, out)
    return Out(out.y, pure.inputs_saved(step, x, keywords), out.side)


def published(step: ForwardStep, name: str, side: Any, t: list[Any]) -> Any:
    """What a step published under a name, which the steps behind find in `t`."""
    try:
        t.append(side[name])
    except (TypeError, KeyError):
        raise checks.unpublished(step, name, side) from None
    return t[-1]


def calls_of(
    step: Step, once: Once, main: Sequence[weight_grads.Destinations] | None = None
) -> Sequence[Any]:
    """The calls of a step with what lives for one call only."""
    shared, out, calls = once.scratch, once.out, []
    # `_replace`, without a call for each
    for call, scope in zip(step.calls, step.scopes, strict=True):
        scratch = None if shared is None else shared.setdefault(scope, {})
        calls.append(make_tuple(Call, (*call[:OUT], out, scratch)))
    if once.seed is not None:  # numbers of its own for each op, and each of its two layouts
        first = 2 * step.at
        calls = [c._replace(seed=once.seed + first + 2 * k) for k, c in enumerate(calls)]
    return tuple(calls) if main is None else weight_grads.with_buffers(calls, main)


def add(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    """The sum of two gradients, either of which may be missing."""
    return b if a is None else a if b is None else a + b
