"""Checks of ops, and the messages of their errors: which op, which tensor, what was given and what was expected."""

import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from fuseops.errors import DtypeError, FuseOpsError, ShapeError, SideInputError
from fuseops.kernels.registry import check_all_meta
from fuseops.kernels.transcript import TRANSCRIPT_FILE
from fuseops.ops.op import Grads, Op, Out
from fuseops.ops.paths import path_of
from fuseops.plan.chain import Chain
from fuseops.plan.key import PlanKey
from fuseops.plan.segment import BackwardStep, Segment, Step
from fuseops.recipes import Quantized
from fuseops.words import dtype_name

SEGMENT_FILE = "<fuseops segment>"  # the file name of the code that `steps` generates
# raised by reading a malformed Grads
MALFORMED_ERRORS = TypeError, KeyError, AttributeError, IndexError
Wanted = tuple[tuple[int, str, int], ...]  # (member, name, position)


def describe(t: Any) -> str:
    """Dtype, shape and device of a tensor."""
    if isinstance(t, Tensor):
        return f"{dtype_name(t.dtype)}{list(t.shape)} on {t.device}"
    if isinstance(t, Quantized):
        return f"{dtype_name(t.dtype)}{list(t.shape)} as {t} on {t.device}"
    return type(t).__name__


def failing_step(error: BaseException) -> Step | None:
    """The step of a segment that raised an error, None where none did."""
    step: Step | None = _generated_locals(error).get("step")
    return step


def running_step() -> Step | None:
    """The step of a segment that runs, found on the stack."""
    step: Step | None = running_locals().get("step")
    return step


def running_locals() -> Mapping[str, Any]:
    """The variables of the generated function (`steps`) that runs, found on the stack: callers are rare."""
    frame: Any = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename != SEGMENT_FILE:
        frame = frame.f_back
    return {} if frame is None else frame.f_locals


def _generated_locals(error: BaseException) -> Mapping[str, Any]:
    """The variables of the generated function (`steps`, `transcript`) that an error passed through."""
    trace = error.__traceback__
    while trace is not None:
        if trace.tb_frame.f_code.co_filename in (SEGMENT_FILE, TRANSCRIPT_FILE):
            return trace.tb_frame.f_locals
        trace = trace.tb_next
    return {}


def dtype_mismatch(seg: Segment, path: str, error: BaseException) -> DtypeError | None:
    """A clear error for a GEMM of two dtypes, if that is why this one was raised in a forward; else None."""
    found = _generated_locals(error)
    step, x = found.get("step"), found.get("x")
    if (
        step is None
        or step.cast is not None
        or not isinstance(x, Tensor)
        or "dtype" not in str(error)
    ):
        return None
    for i in step.members:
        op = seg.ops[i]
        if not op.autocast or op.pure:  # it is no GEMM
            continue
        for name in op.parameter_names():
            p = op.sample(name)
            if p is not None and p.dtype is not x.dtype:
                return DtypeError(
                    f"op '{path}{seg.names[i]}' ({type(op).__name__}): x is {dtype_name(x.dtype)} and {name} is "
                    f"{dtype_name(p.dtype)}, and a GEMM takes one dtype: convert either with .to(...), or run under "
                    "torch.autocast."
                )
    return None


def unsaved_fields(step: Step | None) -> str:
    """Describe the fields of Saved that a backward step did not get, for a message."""
    if step is None or step.kind != "op":
        return ""
    fields = [name for name in step.target.Saved._fields if name not in step.calls[0].keep]
    return f"; by saves_for it reads no {', '.join(fields)}, and has not saved it" if fields else ""


def check_declared(name: str, op: Op[Any]) -> None:
    """Raise FuseOpsError for an op that would lose a gradient: of a parameter that its `fwd` does not take by keyword,
    and so could only read from `self`, or of a side output whose gradient its `bwd` does not take. And for one that
    delays the gradient of no parameter of its own, which would come at once.
    """
    what = f"op {name!r} ({type(op).__name__})"
    for declared in ("reads", "writes", "delays"):
        names = getattr(op, declared)
        if isinstance(names, str):
            raise FuseOpsError(
                f"{type(op).__name__}.{declared} is the string {names!r}, expected a tuple of names: ({names!r},)."
            )
        if len({*names}) < len(names):
            raise FuseOpsError(
                f"{type(op).__name__}.{declared} is {names!r}, expected each name once: of what is named twice the "
                "gradient would count twice."
            )
    parameters = [*op.parameter_names()]
    if unknown := [delayed for delayed in op.delays if delayed not in parameters]:
        raise FuseOpsError(
            f"{what} delays the gradients of {unknown}, expected some of {parameters}."
        )
    lost = set(op.writes) - op.integers
    if lost and not op.pure and not op.signature.bwd_dside:
        raise FuseOpsError(
            f"{what} publishes {sorted(lost)}, whose gradients its bwd does not take: write bwd(self, saved, dy, *, "
            "dside), or name what has no gradient in `integers`."
        )
    by_keyword = {own for keyword in parameters for own in op.registered(keyword)}
    missed = [own for own, p in op._parameters.items() if p is not None and own not in by_keyword]
    missed += [
        own
        for own, t in op.__dict__.items()
        if isinstance(t, Tensor) and t.requires_grad and own not in by_keyword
    ]
    for path, module in op.named_children():
        if path != "parametrizations":
            missed += [f"{path}.{own}" for own, _ in module.named_parameters()]
    if missed:
        raise FuseOpsError(
            f"{what} has parameters {missed}, which its fwd does not take: they would get "
            "no gradient. Add them to fwd(self, x, *, ...) by name; what holds other modules is a "
            "plain nn.Module, which a Sequential takes too."
        )


def check_dtype(ops: Sequence[Op[Any]], names: Sequence[str], dtype: torch.dtype) -> None:
    """Raise FuseOpsError where an integer or complex x, or one of codes, reaches an op that computes in floats: the
    kernels would round its results to that dtype.
    """
    if dtype.is_floating_point and dtype.itemsize > 1:
        return
    codes = "codes of " if dtype.is_floating_point else ""
    for name, op in zip(names, ops, strict=True):
        if op.floats:
            raise FuseOpsError(
                f"op {name!r} ({type(op).__name__}) expects x of a float dtype, got {codes}{dtype}: convert it with "
                "x.to(...)."
            )
        if not op.alias:  # x may have another dtype after this op
            return


def check_meta(chain: Chain, key: PlanKey) -> None:
    """Raise FuseOpsError where some tensors of a run are on the meta device and others are not."""
    found = [("x", key.call.device.type == "meta")]
    found += [(repr(name), meta) for name, _, meta, _ in key.call.sides]
    known = zip(chain.names, chain.ops, chain.parameters, key.parameters, strict=True)
    for name, op, own, facts in known:
        pairs, what = zip(own, facts, strict=True), type(op).__name__
        found += [(f"{name}.{n} ({what})", p.meta) for n, p in pairs if p is not None]
    check_all_meta(found)


def check_losses(
    chain: Chain, key: PlanKey, needs: Sequence[frozenset[str]], names: Sequence[str]
) -> None:
    """Raise SideInputError for a loss in training that nothing reads, so that its gradient would be dropped.

    needs: the gradients of each op.  names: those of the side tensors that are read
    """
    read = {name for reads in chain.reads for _, name in reads}.union(names)
    for i, op in enumerate(chain.ops):
        lost = [k for k, name in chain.writes[i] if k in op.losses and name not in read]
        if lost and needs[i] and key.ops[i].training:
            raise SideInputError(
                f"op {(path_of(op) or chain.names[i])!r} ({type(op).__name__}) computes {lost[0]!r} in training, and "
                f"nobody reads it: ask its Sequential for it with returns=({lost[0]!r},) and add it to the loss, or "
                f"put InjectLoss({lost[0]!r}) behind the op, as fo.MoE(..., aux='inject') does, which backpropagates "
                "it from inside of any other module. Evaluation, under model.eval() or torch.no_grad(), needs neither."
            )


def _first_op(chain: Chain) -> str:
    """Describe the first op of a run, for a message."""
    op = chain.ops[0]
    return f"op {path_of(op) or chain.names[0]!r} ({type(op).__name__})"


def not_strided_error(chain: Chain, layout: torch.layout) -> FuseOpsError:
    return FuseOpsError(
        f"{_first_op(chain)} expects x with strides, got layout {str(layout).removeprefix('torch.')}: pass "
        "x.to_dense()."
    )


def nested_tensor_error(chain: Chain) -> ShapeError:
    return ShapeError(
        f"{_first_op(chain)} got a nested tensor, whose rows have no one shape: pass its values(), (rows, ...), and "
        "put the offsets back behind it; or run under fuseops.reference(), where torch takes a jagged one."
    )


def no_tensor_error(step: Step, y: Any) -> FuseOpsError:
    return FuseOpsError(
        f"{type(step.target).__name__}.fwd returned {type(y).__name__}: return a tensor, or Out(y, ...)."
    )


def as_out(step: Step, y: Any) -> Out:
    """Wrap a tensor that an op returned into an Out.  Raises FuseOpsError where its bwd needs a Saved too."""
    if not isinstance(y, Tensor):
        raise no_tensor_error(step, y)
    op = type(step.target)
    if not step.pure and op.Saved._fields:
        raise FuseOpsError(
            f"{op.__name__}.fwd returned a bare tensor, but its bwd reads what {op.Saved.__name__} holds: "
            f"return Out(y, {op.Saved.__name__}(...)), or write a bwd for this fwd."
        )
    return Out(y)


def check_member_saved(step: Step, out: Any) -> Out:
    """Return `out` of a forward rule's fused op.  Raises FuseOpsError unless it has a Saved for each member."""
    if type(out) is Out and out.saved is not None and len(out.saved) == len(step.members):
        return out
    fwd = f"{type(step.target).__name__}.fwd"
    given = type(out).__name__ if not isinstance(out, Out) else f"saved={type(out.saved).__name__}"
    raise FuseOpsError(
        f"{fwd} of a forward rule gave {given}; it must return Out(y, saved=(...)) with the Saved of each of its "
        f"{len(step.members)} members."
    )


def unpublished_error(step: Step, name: str, side: Mapping[str, Any] | None) -> FuseOpsError:
    return FuseOpsError(
        f"{type(step.target).__name__} writes {name!r}, but its fwd published {sorted(side or {})}: "
        f"return Out(y, saved, side={{{name!r}: ...}})."
    )


def check_complete(step: BackwardStep, results: Sequence[Grads], partial: bool) -> None:
    """Raise FuseOpsError where a backward leaves out a gradient that is needed.

    partial: some results of the step have no gradient, so gradients that depend on those alone may be left out. Also
    exempt: a level-1 op, where autograd found no dependency, and a gradient that went to main_grad.
    """
    if partial or step.pure:
        return
    missing = step.dx and results[0].x is None
    for k, name, _ in step.params:
        missing = missing or ((k, name) not in step.main and results[k].params[name] is None)  # type: ignore[index]
    if missing or any(results[k].side[name] is None for k, name, _ in step.sides):  # type: ignore[index]
        raise grads_error(step, results)


def grads_error(step: BackwardStep, results: Any) -> FuseOpsError:
    """The error for a backward whose result is no Grads, or leaves out a gradient that is needed."""
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
            if not isinstance(tensors, Mapping):
                return FuseOpsError(
                    f"{bwd} gave Grads({field}={type(tensors).__name__}){where}: gradients of {field} come by name, "
                    f"Grads({field}={{name: ...}})."
                )
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
