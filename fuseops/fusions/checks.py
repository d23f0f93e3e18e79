"""What a wrong op is told: which op, which tensor, what it gave and what was expected."""

from collections.abc import Iterator, Mapping, Sequence
from types import CodeType
from typing import Any

import torch

from fuseops.errors import FuseOpsError
from fuseops.ops.op import Grads, Op, Out

from .segment import Segment, Step

Shape = tuple[int, ...]
Wanted = tuple[tuple[int, str, int], ...]  # (member, name, position)


class Shapes:
    """The shapes of one forward, against which the first backward of a plan is checked."""

    def __init__(self) -> None:
        self.x: dict[int, Shape] = {}  # of the input of the op at that index
        self.inputs: list[Shape | None] = []  # of the node's side inputs and parameters


def failing_step(error: BaseException, *bodies: CodeType) -> Step | None:
    """The step that one of these functions was at when the error passed through it."""
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code in bodies:
            step: Step | None = trace.tb_frame.f_locals.get("step")
            return step
        trace = trace.tb_next
    return None


def check_parameters(name: str, op: Op[Any]) -> None:
    """Raise FuseOpsError for parameters that `fwd` does not take by keyword: it could only read them from `self`, and
    they would get no gradient.
    """
    taken = {own for keyword in op.parameter_names() for own in op.registered(keyword)}
    missed = [own for own, p in op._parameters.items() if p is not None and own not in taken]
    for path, module in op.named_children():
        if path != "parametrizations":
            missed += [f"{path}.{own}" for own, _ in module.named_parameters()]
    if missed:
        raise FuseOpsError(
            f"op {name!r} ({type(op).__name__}) has parameters {missed}, which its fwd does not take: they "
            "would get no gradient. Add them to fwd(self, x, *, ...) by name; what holds other modules is a "
            "plain nn.Module, which a Sequential takes too."
        )


def check_dtype(ops: Sequence[Op[Any]], names: Sequence[str], dtype: torch.dtype) -> None:
    """Raise FuseOpsError where an integer or complex x reaches an op that computes in floats: the kernels would round
    its results to that dtype.
    """
    if dtype.is_floating_point:
        return
    for name, op in zip(names, ops, strict=True):
        if op.floats:
            raise FuseOpsError(
                f"op {name!r} ({type(op).__name__}) expects x of a float dtype, got {dtype}: convert it with x.to(...)."
            )
        if not op.alias:  # from here on it may have another
            return


def no_tensor(step: Step, y: Any) -> FuseOpsError:
    return FuseOpsError(
        f"{type(step.target).__name__}.fwd returned {type(y).__name__}: return a tensor, or Out(y, ...)."
    )


def bare_tensor(step: Step) -> FuseOpsError:
    op = type(step.target)
    return FuseOpsError(
        f"{op.__name__}.fwd returned a bare tensor, but its bwd reads what {op.Saved.__name__} holds: "
        f"return Out(y, {op.Saved.__name__}(...)), or write a bwd for this fwd."
    )


def wrong_saved(step: Step, out: Any) -> FuseOpsError:
    fwd = f"{type(step.target).__name__}.fwd"
    given = type(out).__name__ if not isinstance(out, Out) else f"saved={type(out.saved).__name__}"
    return FuseOpsError(
        f"{fwd} of a forward rule gave {given}; it must return Out(y, saved=(...)) with the Saved of each of its "
        f"{len(step.members)} members."
    )


def check_fused_saved(seg: Segment, step: Step, saved: Any) -> None:
    """Raise FuseOpsError unless a fused op saves a value, or None, for each field of every Saved that it stands for."""
    if step.kind == "joint":
        pairs = [(step.target, saved)]
    else:
        pairs = [(seg.ops[i], own) for i, own in zip(step.members, saved, strict=True)]
    for saver, own in pairs:
        fields = saver.Saved._fields
        if own is not None and len(own) != len(fields):
            raise FuseOpsError(
                f"{type(step.target).__name__}.fwd saved {len(own)} values of {type(saver).__name__}, whose "
                f"{saver.Saved.__name__} has {len(fields)}: {list(fields)}. Give None for what nobody reads."
            )


def unpublished(step: Step, name: str, side: Mapping[str, Any] | None) -> FuseOpsError:
    return FuseOpsError(
        f"{type(step.target).__name__} writes {name!r}, but its fwd published {sorted(side or {})}: "
        f"return Out(y, saved, side={{{name!r}: ...}})."
    )


def wrong_grads(step: Step, results: Any) -> FuseOpsError:
    """The error for a backward that is no Grads, or leaves out a gradient that somebody needs."""
    bwd = f"{type(step.target).__name__}.bwd"
    if step.kind != "op" and (not isinstance(results, tuple) or len(results) != len(step.members)):
        return FuseOpsError(
            f"{bwd} must return a Grads for each of its {len(step.members)} members."
        )
    for k, result in enumerate(results):
        if not isinstance(result, Grads):
            return FuseOpsError(f"{bwd} must return Grads, got {type(result).__name__}.")
        where = "" if step.kind == "op" else f" of member {k}"
        given: list[tuple[str, Mapping[str, Any], Wanted]] = [
            ("params", result.params or {}, step.params),
            ("side", result.side or {}, step.sides),
        ]
        for field, tensors, wanted in given:
            for member, name, _ in wanted:
                if member == k and tensors.get(name) is None:
                    return FuseOpsError(
                        f"{bwd} gave no gradient of {name!r}{where}, which is needed "
                        f"(needs {sorted(step.calls[k].needs)}): put it in Grads({field}={{{name!r}: ...}})."
                    )
    return FuseOpsError(
        f"{bwd} gave no gradient of 'x', which is needed (needs {sorted(step.calls[0].needs)}): "
        "return Grads(dx, ...)."
    )


def check_gradients(
    seg: Segment, step: Step, results: Sequence[Grads], shapes: Shapes, partly: bool = False
) -> None:
    """Raise FuseOpsError for a gradient that is needed and None, or that has not the shape of its tensor.

    A level-1 op may leave one out: torch found that its `fwd` does not use the tensor.  partly: some results of the
    step have no gradient, so it may leave out what only those depend on.
    """
    if not step.pure and not partly and _incomplete(step, results):
        raise wrong_grads(step, results)
    pairs = [("x", results[0].x, shapes.x.get(step.members[0]))]
    for name, gradient, position in _given(step, results):
        if position < seg.inputs:
            pairs.append((name, gradient, shapes.inputs[position]))
    for name, gradient, expected in pairs:
        if gradient is not None and expected is not None and gradient.shape != expected:
            raise FuseOpsError(
                f"{type(step.target).__name__}.bwd gave a gradient of {name!r} of shape {tuple(gradient.shape)}; "
                f"{name!r} has shape {tuple(expected)}."
            )


def _incomplete(step: Step, results: Sequence[Grads]) -> bool:
    if results[0].x is None and "x" in step.calls[0].needs:
        return True
    elsewhere = {position for k, name, position in step.params if (k, name) in step.main}
    given = _given(step, results)
    return any(gradient is None and place not in elsewhere for _, gradient, place in given)


def _given(step: Step, results: Sequence[Grads]) -> Iterator[tuple[str, Any, int]]:
    """Name, gradient and position of everything that is needed besides dx."""
    for member, name, position in step.params:
        yield name, (results[member].params or {}).get(name), position
    for member, name, position in step.sides:
        yield name, (results[member].side or {}).get(name), position
