"""The contract of an op: `bwd` is the vjp of `fwd`, and `saves_for` names exactly the fields that `bwd` reads."""

import copy
import itertools
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fuseops.arguments import instance_of
from fuseops.errors import FuseOpsError
from fuseops.ops.op import Call, Grads, Op, Out
from fuseops.ops.routing import Routing
from fuseops.plan.facts import kept_fields
from fuseops.torch_private import pytree

from .compare import UNITS, Difference, difference, is_floating, largest
from .trees import scrambled, tensors

TOLERANCE = 1e-9  # of float64 sums over the few hundred terms of a test
# ... and where large terms cancel: the gradient of a saturated softmax is d - sum(d s), and the variance
# of a row of one number is the rounding error of its mean, which rstd amplifies.
ROUNDING = UNITS[torch.float64] * torch.finfo(torch.float64).eps
LABELS = ("bwd", "autograd over fwd")
# Set before every fwd, so that an op draws the same random numbers again. Inputs are drawn with other
# seeds: a norm whose dy equals its x has no gradient.
SEED = 1 << 20

Tensors = dict[str, Tensor | None]
Named = Mapping[str, Tensor | None]


class OpCase(NamedTuple):
    """An `OpCase` is an op and its inputs in float64. Parameters are among the inputs, passed by keyword."""

    op: Op[Any]
    nan_op: Op[Any]  # a copy with NaN parameters: reading one from `self` gives NaN
    x: Any
    keywords: Tensors  # parameters and side inputs
    sides: tuple[str, ...]  # which of them are side inputs

    @property
    def own(self) -> set[str]:
        """The inputs, and the parameters that the op itself has: others belong to a module of another library."""
        return {"x", *self.sides, *(name for name, _ in self.op.named_parameters())}

    @property
    def needs(self) -> tuple[str, ...]:
        """All inputs and parameters that can need a gradient."""
        given = {*self.own, *(self.op.saves_for or ())}
        floating = [
            n for n, t in self.keywords.items() if n in given and t is not None and is_floating(t)
        ]
        return ("x", *floating) if is_floating(self.x) else tuple(floating)


class Vjp(NamedTuple):
    """A `Vjp` holds the gradients by autograd over `fwd`, for one choice of which results have a gradient."""

    dy: Tensor | None
    dside: Named
    grads: Tensors
    size: float  # magnitude of the terms that are summed in the gradients

    @property
    def partial(self) -> bool:
        """Whether some result has no gradient, so that `bwd` may leave out gradients that depend on it alone."""
        return self.dy is None or any(d is None for d in self.dside.values())

    def vanishes(self, need: str) -> bool:
        """Whether this gradient is too small to show a missing term."""
        gradient = self.grads[need]
        return gradient is None or bool(gradient.abs().le(TOLERANCE * self.size).all())


def assert_bwd_is_vjp(op: Op[Any], *inputs: Any, **side: Any) -> None:
    """Check the hand-written backward of `op` against autograd over its `fwd`, in float64.

    For every subset of needs `bwd` gets what `saves_for` keeps for it, and must give the right
    gradients. For every single need each kept field must matter. Neither method may read a parameter
    from `self`, or write to a tensor that it was given. Then the op runs as a module, so that a
    level-1 op (which has no `bwd` of its own) is checked too.
    inputs: x and, as in a call, at most one Routing. They are copied to float64.
    Raises AssertionError that names the need, and the field of Saved that is missing or too many, and FuseOpsError for
    what is no op.
    """
    if not isinstance(op, Op):
        raise FuseOpsError(
            f"assert_bwd_is_vjp expects an op of fuseops, got {type(op).__name__}: a model of ops is what "
            "assert_fused_matches_unfused takes."
        )
    _check_inputs(op, inputs, side)
    case = _case(op, inputs, side)
    with torch.random.fork_rng(devices=()):
        out = _fwd(case.op, case, frozenset(case.needs), case.keywords)
        _check_fwd(case, out)
        patterns = _patterns(out)
        references = [_reference(case, pattern) for pattern in patterns]
        for needs in _subsets(case.needs):
            for vjp in references:
                if not op.pure:
                    _check_subset(case, needs, vjp)
            if needs <= case.own:
                _check_module(case, needs, references[0])
        if not op.pure and op.saves_for is not None:
            for need in case.needs:
                _check_every_field_matters(case, need, references[0], patterns[0])


# --- the case


def _check_inputs(op: Op[Any], inputs: tuple[Any, ...], side: dict[str, Any]) -> None:
    """Raise FuseOpsError for what are not x and, behind it, a Routing, nor side inputs that the op reads."""
    who = f"assert_bwd_is_vjp({type(op).__name__}(...), *inputs)"
    if not inputs:
        raise FuseOpsError(f"{who} expects x as its first input, got none.")
    for kind, given in zip((Tensor, Routing), inputs, strict=False):
        instance_of(given, kind, who, "x, a tensor, and behind it at most one Routing")
    if not (inputs[0].is_floating_point() or inputs[0].is_complex()):
        raise FuseOpsError(
            f"{who} expects x of a float dtype, which has a gradient, got {inputs[0].dtype}."
        )
    if len(inputs) > 2:
        raise FuseOpsError(
            f"{who} expects x and at most one Routing, got {len(inputs)} inputs: side inputs are passed by name."
        )
    for name, t in side.items():
        if name not in op.side_names():
            raise FuseOpsError(f"{who} got {name}, and the op reads {list(op.side_names())}.")
        instance_of(t, Tensor, f"{who}, side input {name},", "a tensor")


def _to_float64(t: Tensor) -> Tensor:
    if t.is_complex():
        return t.detach().to(torch.complex128)
    return t.detach().to(torch.float64) if t.is_floating_point() else t.detach()


def _case(op: Op[Any], inputs: tuple[Any, ...], side: dict[str, Any]) -> OpCase:
    (x, *rest), given = pytree.tree_map_only(Tensor, _to_float64, (inputs, dict(side)))
    for routing in rest:
        if isinstance(routing, Routing):
            given |= {n: t for n, t in routing._asdict().items() if t is not None}
    wide = copy.deepcopy(op)._apply(_to_float64)
    generator = torch.Generator().manual_seed(SEED)
    for p in wide.parameters():  # ones and zeros, as many start out, hide what is left out
        p.data += 0.1 * torch.randn(p.shape, generator=generator, dtype=p.dtype).to(p.device)
    nan_op = copy.deepcopy(wide)
    for p in nan_op.parameters():
        p.data.fill_(float("nan"))
    sides = wide.side_names()
    keywords: Tensors = {}
    for name in wide.parameter_names():
        value = getattr(wide, name)
        keywords[name] = value.detach().clone() if isinstance(value, Tensor) else value
    missing = [name for name in sides if name not in given]
    if missing:
        raise TypeError(f"{type(op).__name__} reads {list(sides)}: pass {missing} by name.")
    return OpCase(wide, nan_op, x, keywords | {name: given[name] for name in sides}, sides)


def _subsets(names: tuple[str, ...]) -> Iterator[frozenset[str]]:
    for size in range(1, len(names) + 1):
        yield from map(frozenset, itertools.combinations(names, size))


def _call(op: Op[Any], needs: frozenset[str], keep: frozenset[str]) -> Call:
    return Call(needs=needs, keep=keep, training=op.training, scratch={})


def _keep(op: Op[Any], needs: frozenset[str]) -> frozenset[str]:
    return kept_fields(op.saves_for, op.Saved._fields, needs)


# --- running the two methods


def _fwd(op: Op[Any], case: OpCase, needs: frozenset[str], keywords: Tensors, x: Any = None) -> Out:
    extra: dict[str, Any] = {}
    if op.signature.fwd_call:
        extra["call"] = _call(op, needs, _keep(op, needs))
    torch.manual_seed(SEED)
    out = op.fwd(case.x if x is None else x, **keywords, **extra)
    return out if isinstance(out, Out) else Out(out)


def _bwd(op: Op[Any], saved: Any, dy: Tensor | None, dside: Named, needs: frozenset[str]) -> Grads:
    extra: dict[str, Any] = {}
    if op.signature.bwd_call:
        extra["call"] = _call(op, needs, _keep(op, needs))
    if op.signature.bwd_dside:
        extra["dside"] = dict(dside)
    grads: Grads = op.bwd(saved, dy, **extra)
    return grads


def _published(out: Out) -> Tensors:
    return {n: t for n, t in (out.side or {}).items() if is_floating(t)}


def _patterns(out: Out) -> list[frozenset[str]]:
    """The subsets of results that can have a gradient: y alone for most ops, more where an op publishes."""
    return list(_subsets(("y", *_published(out))))[::-1]


def _reference(case: OpCase, pattern: frozenset[str]) -> Vjp:
    leaves: Tensors = {"x": case.x, **case.keywords}
    leaves = {
        name: t if t is None else t.clone().requires_grad_(name in case.needs)
        for name, t in leaves.items()
    }
    keywords = {name: t for name, t in leaves.items() if name != "x"}
    with torch.enable_grad():
        out = _fwd(case.op, case, frozenset(case.needs), keywords, leaves["x"])
    results = {name: t for name, t in {"y": out.y, **_published(out)}.items() if name in pattern}
    generator = torch.Generator().manual_seed(SEED)
    d = {
        name: torch.randn(t.shape, generator=generator, dtype=t.dtype).to(t.device)
        for name, t in results.items()
    }
    wanted = [leaves[name] for name in case.needs]
    reached = [name for name, t in results.items() if t.requires_grad]
    if not reached:
        raise AssertionError(
            f"{type(case.op).__name__}.fwd gives nothing that autograd can differentiate."
        )
    found = torch.autograd.grad(
        [results[n] for n in reached],
        wanted,  # type: ignore[arg-type]
        [d[n] for n in reached],
        materialize_grads=True,
    )
    slope = max(largest(d.values()), largest(found))  # by which rounding of an input is amplified
    return Vjp(
        d.get("y"),
        {name: d.get(name) for name in case.op.writes},
        dict(zip(case.needs, found, strict=True)),
        slope * max(1.0, largest(leaves.values())),
    )


# --- what is checked


def _check_fwd(case: OpCase, out: Out) -> None:
    """Check that fwd is pure: it reads no parameter from self and writes to no input; a level-1 fwd is not random."""
    op, name = case.op, type(case.op).__name__
    before = _versions((case.x, case.keywords))
    again = _fwd(case.nan_op, case, frozenset(case.needs), case.keywords)
    _check_not_modified(f"{name}.fwd", (case.x, case.keywords), before)
    results = {"y": out.y, **_published(out)}
    of_nan_op = {"y": again.y, **_published(again)}
    for key, t in results.items():
        if difference(key, of_nan_op[key], t, TOLERANCE):
            raise AssertionError(
                f"{name}.fwd reads a parameter from self: {key} changed with it. Parameters arrive by "
                f"keyword; add it to fwd(self, x, *, ...). A swapped weight would be missed."
            )
    if op.pure:
        extra = (
            {"call": _call(op, frozenset(case.needs), frozenset())} if op.signature.fwd_call else {}
        )
        again_out = op.fwd(case.x, **case.keywords, **extra)
        y = again_out.y if isinstance(again_out, Out) else again_out
        if difference("y", y, out.y, 0.0):
            raise AssertionError(
                f"{name}.fwd is random, and has no bwd: the backward runs fwd again and would draw "
                "other numbers. Save a seed, and write bwd by hand."
            )


def _versions(tree: Any) -> list[int]:
    return [t._version for _, t in tensors(tree, "")]


def _check_not_modified(who: str, tree: Any, before: list[int]) -> None:
    for (name, t), version in zip(tensors(tree, ""), before, strict=True):
        if t._version != version:
            raise AssertionError(
                f"{who} writes in place to {name or 'a tensor'} that it was given, "
                "which others may read or save."
            )


def _saved(op: Op[Any], case: OpCase, needs: frozenset[str]) -> Any:
    """The Saved of fwd under these needs, with None for every field where it saves nothing."""
    saved = _fwd(op, case, needs, case.keywords).saved
    if saved is None:
        return op.Saved._make([None] * len(op.Saved._fields))
    if type(saved) is not op.Saved:
        raise AssertionError(
            f"{type(op).__name__}.fwd saves {type(saved).__name__}, its class says {op.Saved.__name__}."
        )
    return saved


def _keep_only(saved: Any, fields: Iterable[str]) -> Any:
    return saved._replace(**{name: None for name in saved._fields if name not in fields})


def _first_difference(
    op: Op[Any], saved: Any, vjp: Vjp, needs: frozenset[str]
) -> Difference | None:
    """The first gradient that differs from autograd's, or None.  Raises what `bwd` raises."""
    grads = _bwd(op, saved, vjp.dy, vjp.dside, needs)
    sides = op.side_names()
    for need in sorted(needs):
        if need == "x":
            got = grads.x
        else:
            got = ((grads.side if need in sides else grads.params) or {}).get(need)
        expected = vjp.grads[need]
        if got is None and vjp.partial and expected is not None and not expected.any():
            continue
        text, atol = f"gradient of {need}", ROUNDING * vjp.size
        if found := difference(text, got, expected, TOLERANCE, LABELS, atol):
            return found
    return None


def _failure(op: Op[Any], saved: Any, vjp: Vjp, needs: frozenset[str]) -> str | None:
    """A message of how `bwd` fails with this Saved, or None."""
    try:
        found = _first_difference(op, saved, vjp, needs)
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return None if found is None else str(found)


def _check_subset(case: OpCase, needs: frozenset[str], vjp: Vjp) -> None:
    op, nan_op = case.op, case.nan_op
    name, wanted = type(op).__name__, ", ".join(sorted(needs))
    all_saved = _saved(nan_op, case, needs)
    keep = _keep(op, needs)
    saved = _keep_only(all_saved, keep)
    before = _versions((saved, vjp.dy, vjp.dside))
    failure = _failure(nan_op, saved, vjp, needs)
    _check_not_modified(f"{name}.bwd", (saved, vjp.dy, vjp.dside), before)
    if failure is None:
        return
    if _failure(op, saved, vjp, needs) is None:
        raise AssertionError(
            f"{name}.bwd reads a parameter from self, for the gradient of {wanted}. Make it a field of "
            f"{op.Saved.__name__}: a parameter there costs no memory, and a swapped one is not missed."
        )
    if _failure(nan_op, all_saved, vjp, needs) is not None:
        raise AssertionError(f"{name}.bwd is wrong for needs {{{wanted}}}: {failure}")
    missing = _missing(nan_op, all_saved, keep, vjp, needs)
    failing = [
        n
        for n in sorted(needs)
        if _failure(nan_op, _keep_only(all_saved, _keep(op, frozenset({n}))), vjp, frozenset({n}))
    ]
    raise AssertionError(
        f"{name}.saves_for keeps too little: for the gradient of {', '.join(failing) or wanted} bwd also "
        f"reads {', '.join(map(repr, missing))}. Without it: {failure}"
    )


def _missing(
    op: Op[Any], all_saved: Any, keep: frozenset[str], vjp: Vjp, needs: frozenset[str]
) -> list[str]:
    """The fields that `bwd` needs and `saves_for` does not list."""
    fields = {*all_saved._fields}
    unlisted = (f for f in all_saved._fields if f not in keep)
    return [f for f in unlisted if _failure(op, _keep_only(all_saved, fields - {f}), vjp, needs)]


def _check_every_field_matters(case: OpCase, need: str, vjp: Vjp, results: frozenset[str]) -> None:
    for field in (case.op.saves_for or {}).get(need, ()):
        if field in case.op.recomputes or not _is_unused(field, case, need, vjp):
            continue
        # Extreme values can hide that a field is read: a saturated softmax has no gradient.
        normal = _with_normal_x(case)
        if _is_unused(field, normal, need, _reference(normal, results)):
            raise AssertionError(
                f"{type(case.op).__name__}.saves_for[{need!r}] keeps too much: bwd does without "
                f"{field!r}, which would stay in memory for nothing."
            )


def _with_normal_x(case: OpCase) -> OpCase:
    generator = torch.Generator().manual_seed(SEED + 1)
    if not is_floating(case.x):
        return case
    x = torch.randn(case.x.shape, generator=generator, dtype=case.x.dtype)
    return case._replace(x=x.to(case.x.device))


def _is_unused(field: str, case: OpCase, need: str, vjp: Vjp) -> bool:
    """Whether the gradient is right both without this field and with other numbers in it."""
    op, needs = case.nan_op, frozenset({need})
    saved = _keep_only(_saved(op, case, needs), _keep(op, needs))
    value = getattr(saved, field)
    if not isinstance(value, Tensor):  # takes no memory
        return False
    if vjp.vanishes(need):  # where all rows are padding, say
        return False
    others = None, scrambled(value)
    return not any(_failure(op, saved._replace(**{field: t}), vjp, needs) for t in others)


def _check_module(case: OpCase, needs: frozenset[str], vjp: Vjp) -> None:
    """Check the gradients of the op as a module, with requires_grad set for these needs only."""
    op = copy.deepcopy(case.op)
    given = {
        name: t if t is None else t.clone().requires_grad_(name in needs)
        for name, t in {"x": case.x, **{n: case.keywords[n] for n in case.sides}}.items()
    }
    for name, p in op.named_parameters():
        p.requires_grad_(any(name in op.registered(need) for need in needs))
    torch.manual_seed(SEED)
    with torch.enable_grad():
        out = op(given["x"], **{name: given[name] for name in case.sides})
    leaves: dict[str, list[Any]] = {
        name: [given[name]] if name in given else [op.get_parameter(n) for n in op.registered(name)]
        for name in sorted(needs)
    }
    found = iter(_module_grads(op, out, vjp, [leaf for own in leaves.values() for leaf in own]))
    labels = ("the op as a module", "autograd over fwd")
    for name, own in leaves.items():
        parts = [next(found) for _ in own]
        whole = name in given or op.registered(name) == (name,)
        grad = parts[0] if whole else torch.stack(parts)
        text, atol = f"gradient of {name}", ROUNDING * vjp.size
        if wrong := difference(text, grad, vjp.grads[name], TOLERANCE, labels, atol):
            raise AssertionError(f"{type(op).__name__} with needs {sorted(needs)}: {wrong}")


def _module_grads(op: Op[Any], out: Any, vjp: Vjp, leaves: list[Any]) -> tuple[Tensor, ...]:
    """The gradients of leaves by autograd, from the results of a call of the op."""
    results = (out,) if isinstance(out, Tensor) else out
    given = (vjp.dy, *(vjp.dside.get(name) for name in op.writes))
    pairs = [
        (t, d) for t, d in zip(results, given, strict=True) if d is not None and t.requires_grad
    ]
    return torch.autograd.grad(
        [t for t, _ in pairs], leaves, [d for _, d in pairs], materialize_grads=True
    )
