"""Generates the code that runs the steps of a segment: one forward and one backward function, without loops.

Segments of the same structure share source and compiled code; each closes over its own steps and ops.
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
from .checks import SEGMENT_FILE
from .contract import ContractCheck
from .ranges import label, ranged

OUT = Call._fields.index("out")  # and `scratch`, the last fields
USED_BY_GENERATED_CODE = Quantized, buffers, ranged, weight_grads  # keeps the imports
GeneratedFunction = Callable[..., Any]


class CallContext(NamedTuple):
    """A `CallContext` holds the objects that belong to one call of a Sequential."""

    # by the name of the Sequential that has the op
    scratch: dict[str, dict[str, Any]] | None = None
    out: Buffers | None = None  # the caller's, of an op that runs alone
    # in the first forward and the first backward of a segment, and in those after a write to an op
    contract: ContractCheck | None = None
    seed: Tensor | None = None  # (1,) int64, of a backward with stochastic rounding


# --- code generation -----------------------------------------------------------------------------------------------


def write_forward(seg: Segment) -> GeneratedFunction:
    """Generate `seg.fwd`, which runs the forward steps.   (x, t, context) -> y, kept fields, dtypes of x

    Published side tensors are appended to `t`.
    """
    namespace: dict[str, Any] = {}
    casts, kept = _casts(seg), _variables("k", range(len(seg.kept) if seg.needs_grad else 0))
    lines = ["contract = context.contract", *_unpacking(_variables("t", range(seg.inputs)), "t")]
    for k, step in enumerate(seg.forward):
        namespace |= {f"s{k}": step, f"o{k}": step.target}
        body = [f"step = s{k}", *[f"e{step.first} = x.dtype"] * (step.first in casts)]
        body += ["if type(x) is Quantized: x = x.dequantize()"] * (not step.takes_quantized)
        body += ["if contract is not None: contract.before_fwd(step, x, t)"]
        body += _forward_call(step, k, seg.needs_grad, namespace)
        body += ["if contract is not None: contract.after_fwd(step, out)"]
        body += ["x, own, side = out"]
        body += [f"t{at} = publish(step, {name!r}, side, t)" for name, at in step.writes]
        for m, (slot, names) in enumerate(_saved_variables(seg, step) if seg.needs_grad else ()):
            if slot is not None:
                namespace[f"n{slot.owner}"] = slot.cls._make([None] * len(slot.names))
                places = _tuple([names.get(at, "_") for at in range(len(slot.names))])
                body += [f"{places} = own{f'[{m}]' * (step.kind == 'forward')} or n{slot.owner}"]
        lines += _with_range(
            [*body, "out = own = side = _ = None"], seg, step, f"l{k}", "", namespace
        )
    lines += ["if contract is not None: contract.seg.checked_forward = True"]
    lines += ["if context.out is not None and 'y' in context.out:"]
    lines += [" x = buffers.write_result('y', context.out['y'], x).detach()"]
    lines += [f"return x, {_tuple(kept)}, {_tuple(_variables('e', casts))}"]
    seg.fwd = _define("generated(x, t, context)", lines, namespace)
    return seg.fwd


def _forward_call(step: ForwardStep, k: int, grad: bool, namespace: dict[str, Any]) -> list[str]:
    """Lines that call the fwd of a step.   grad: a backward may follow"""
    lines = []
    if step.cast is not None:
        namespace[f"d{k}"] = step.cast
        lines.append(f"x = x.to(d{k})")
    tensors = [[(name, f"t{at}") for name, at in args] for args in step.args]
    if step.pure:
        out = f"pure_forward(step, x, {_dict(tensors[0])}, context, {grad})"
        return [*lines, f"out = {out}"]
    calls = _calls(step, k, namespace)
    if step.kind == "op":
        out = f"o{k}.fwd(x{_keywords(tensors[0] + [('call', f'{calls}[0]')] * step.takes_call)})"
        return [*lines, f"out = {out}", "if type(out) is not Out: out = checks.as_out(step, out)"]
    members = _tuple(map(_dict, tensors))
    if step.kind == "joint":
        namespace[f"f{k}"] = step.keep
        return [*lines, f"out = o{k}.fwd(x, {members}, {calls}, f{k})"]
    keep = f"pure.save_states(o{k}.members, step.at, context.scratch)"
    return [
        *lines,
        *[keep] * grad,
        f"out = checks.check_member_saved(step, o{k}.fwd(x, {members}, {calls}))",
    ]


def write_backward(seg: Segment) -> GeneratedFunction:
    """Generate `seg.bwd`.   (kept, dy, dsides, x_dtypes, context) -> gradients of the inputs of the node

    A gradient that is not needed is None. Each op gets dy in the dtype of its y; autograd itself casts the gradients
    that leave the node. `kept` is emptied, so that a saved tensor is freed after its last reader.
    """
    namespace: dict[str, Any] = {}
    casts, grads = _casts(seg), _variables("g", range(seg.size))
    lines = [
        "contract = context.contract",
        *_unpacking(_variables("k", range(len(seg.kept))), "kept"),
        "kept.clear()",
    ]
    lines += [*_unpacking(_variables("e", casts), "x_dtypes"), " = ".join([*grads, "None"])]
    lines += _unpacking(_variables("g", seg.export_positions), "dsides")
    lines += ["if context.out is not None: buffers.check_dy(context.out, dy)"]
    for k, step in enumerate(seg.backward):
        namespace |= {f"s{k}": step, f"o{k}": step.target}
        dys = ["dy", *_variables("g", [at for _, at in step.writes])]
        body = [f"step = s{k}"]
        if step.writes:
            body += [f"partial = {' or '.join(f'{d} is None' for d in dys)}"]
        body += [*_backward_call(seg, step, k, namespace), *_read_grads(step)]
        if step.first in casts:
            at = f"e{step.first}"
            body += [f"if dy is not None and dy.dtype is not {at}: dy = dy.to({at})"]
        lines += [f"if {' or '.join(f'{d} is not None' for d in dys)}:"]
        lines += _indented(_with_range(body, seg, step, f"l{k}", " backward", namespace))
    lines += ["if contract is not None: contract.seg.checked_backward = True"]
    lines += ["if dy is not None and context.out is not None and 'dx' in context.out:"]
    lines += [" dy = buffers.write_result('dx', context.out['dx'], dy)"]
    lines += [f"return {_tuple(['None', 'None', 'dy', *grads[: seg.inputs]])}"]
    seg.bwd = _define("generated(kept, dy, dsides, x_dtypes, context)", lines, namespace)
    return seg.bwd


def _backward_call(
    seg: Segment, step: BackwardStep, k: int, namespace: dict[str, Any]
) -> list[str]:
    """Lines that call the bwd of a step, and drop its saved tensors."""
    owns: list[str] = []
    read: list[str] = []
    for m, (slot, names) in enumerate(_saved_variables(seg, step)):
        namespace[f"n{k}_{m}"] = step.empty[m] if slot is None else slot.cls
        fields = [] if slot is None else [names.get(at, "None") for at in range(len(slot.names))]
        owns.append(f"n{k}_{m}" if slot is None else f"make_tuple(n{k}_{m}, {_tuple(fields)})")
        read += names.values()
    dside = _dict([(name, f"g{at}") for name, at in step.writes])
    diverted = bool(step.main) or step.delayed is not None
    calls = _calls(step, k, namespace, diverted)
    if step.pure:
        call = "(pure.bwd_by_autograd(step, saved[0], dy, dside, contract is not None, context.scratch),)"
    elif step.kind == "op":
        given = [("dside", "dside")] * step.takes_dside
        given += [("call", f"{calls}[0]")] * step.takes_call
        call = f"(o{k}.bwd(saved[0], dy{_keywords(given)}),)"
    else:
        whole = "saved" if step.target.takes_saved else "saved.pop()"
        call = f"o{k}.bwd({whole if step.kind == 'joint' else 'tuple(saved)'}, dy, {calls}, dside)"
    if diverted:
        namespace[f"m{k}"] = [step.target] if step.kind == "op" else step.target.members
        run = f"lambda step, out=None, saved=saved, dy=dy, dside=dside: {call}"
        call = f"weight_grads.run_diverted(step, m{k}, {run}, saved, dy)"
    return [
        f"saved, dside = [{', '.join(owns)}], {dside}",
        *([" = ".join([*read, "None"])] if read else []),
        "if contract is not None: contract.before_bwd(step, saved, dy, dside)",
        f"r = {call}",
        "saved = None",
    ]


def _read_grads(step: BackwardStep) -> list[str]:
    """Lines that read the gradients from the Grads of a backward step, and check that none is missing."""
    lines = [f"g{at} = r[{m}].params[{name!r}]" for m, name, at in step.params]
    wanted = _variables("g", [at for *_, at in step.params])
    for n, (m, name, at) in enumerate(step.sides):
        lines += [f"d{n} = r[{m}].side[{name!r}]", f"g{at} = add(g{at}, d{n})"]
        wanted.append(f"d{n}")
    lines.append("dy = r[0].x")
    wanted += ["dy"] * step.dx
    if wanted:
        missing = " or ".join(f"{name} is None" for name in wanted)
        complete = f"checks.check_complete(step, r, {'partial' if step.writes else False})"
        lines.append(f"if {missing}: {complete}")
    return [
        *["try:", *_indented(lines), "except checks.MALFORMED_ERRORS:"],
        " raise checks.grads_error(step, r) from None",
        "if contract is not None: contract.after_bwd(step, r)",
    ]


def _casts(seg: Segment) -> list[int]:
    """The ops whose dtype of x is recorded in the forward, since the backward casts dx to it."""
    in_backward = {step.first for step in seg.backward}
    return [step.first for step in seg.forward if step.first in in_backward]


def _saved_variables(seg: Segment, step: Step) -> Iterator[tuple[Slot | None, dict[int, str]]]:
    """For every Saved of a step: its slot, None where no field is kept, and the variables of the kept fields."""
    numbers = {at: f"k{n}" for n, at in enumerate(seg.kept)}
    slots = {slot.owner: slot for slot in seg.slots}
    for i in step.members[:1] if step.kind == "joint" else step.members:
        slot = slots.get(i)
        yield slot, {} if slot is None else {k: numbers[i, k] for k in slot.kept}


def _calls(step: Step, k: int, namespace: dict[str, Any], apart: bool = False) -> str:
    """The expression for the calls of a step.   apart: of the part that runs now, where another is delayed"""
    if step.live:
        return f"calls_of(step, context{', out' * apart})"
    namespace[f"c{k}"] = step.calls
    return "step.calls" if apart else f"c{k}"


def _keywords(given: Iterable[tuple[str, str]]) -> str:
    """Keyword arguments as code; a side tensor whose name is no identifier goes into a dict."""
    usual, others = "", []
    for name, value in given:
        if name.isidentifier() and not iskeyword(name):
            usual += f", {name}={value}"
        else:
            others.append((name, value))
    return usual + (f", **{_dict(others)}" if others else "")


def _dict(given: Iterable[tuple[str, str]]) -> str:
    return f"{{{', '.join(f'{name!r}: {value}' for name, value in given)}}}"


def _variables(kind: str, numbers: Iterable[int]) -> list[str]:
    return [f"{kind}{n}" for n in numbers]


def _tuple(names: Iterable[str]) -> str:
    return f"({''.join(f'{name}, ' for name in names)})"


def _unpacking(names: Sequence[str], whole: str) -> list[str]:
    return [f"{_tuple(names)} = {whole}"] if names else []


def _indented(lines: Iterable[str]) -> list[str]:
    return [f" {line}" for line in lines]


def _with_range(
    body: list[str], seg: Segment, step: Step, name: str, suffix: str, namespace: dict[str, Any]
) -> list[str]:
    """The lines of a step, inside a profiler range where the segment has one."""
    if seg.path is None:
        return body
    namespace[name] = label(seg, step, seg.path) + suffix
    return [f"with ranged({name}):", *_indented(body)]


def _define(head: str, lines: Sequence[str], namespace: Mapping[str, Any]) -> GeneratedFunction:
    text = [f"def make({', '.join(namespace)}):", f" def {head}:", *_indented(_indented(lines))]
    make = _factory_of("\n".join([*text, " return generated"]))
    function: GeneratedFunction = make(*namespace.values())
    return function


@functools.lru_cache(maxsize=256)
def _factory_of(source: str) -> Callable[..., GeneratedFunction]:
    """The function `make` of a source, which returns the generated function for its namespace."""
    scope: dict[str, Any] = {}
    exec(compile(source, SEGMENT_FILE, "exec"), globals(), scope)
    make: Callable[..., GeneratedFunction] = scope["make"]
    return make


# --- called by generated code --------------------------------------------------------------------------------------


def pure_forward(
    step: ForwardStep, x: Any, keywords: dict[str, Any], context: CallContext, needs_grad: bool
) -> Out:
    """Run the fwd of a level-1 op.   needs_grad: a backward may follow"""
    if step.takes_call:
        keywords["call"] = calls_of(step, context)[0] if step.live else step.calls[0]
    out = pure.run_fwd(step, x, keywords, needs_grad, context.scratch)
    out = out if type(out) is Out else checks.as_out(step, out)
    return Out(out.y, pure.saved_inputs(step, x, keywords), out.side)


def publish(step: ForwardStep, name: str, side: Any, t: list[Any]) -> Any:
    """Append a published side tensor to `t`, where later steps read it, and return it."""
    try:
        t.append(side[name])
    except (TypeError, KeyError):
        raise checks.unpublished_error(step, name, side) from None
    return t[-1]


def calls_of(
    step: Step, context: CallContext, main: Sequence[weight_grads.Destinations] | None = None
) -> Sequence[Any]:
    """The `Call` of every member of a step, with `out`, `scratch` and seed of this call."""
    shared, out, calls = context.scratch, context.out, []
    # `_replace`, without a call for each
    for call, scope in zip(step.calls, step.scopes, strict=True):
        scratch = None if shared is None else shared.setdefault(scope, {})
        calls.append(make_tuple(Call, (*call[:OUT], out, scratch)))
    if context.seed is not None:  # two for each op, one for each of its layouts
        first = 2 * step.at
        calls = [c._replace(seed=context.seed + first + 2 * k) for k, c in enumerate(calls)]
    return tuple(calls) if main is None else weight_grads.with_buffers(calls, main)


def add(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    """The sum of two gradients, either of which may be missing."""
    return b if a is None else a if b is None else a + b
