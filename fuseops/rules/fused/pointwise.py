"""A run of elementwise ops, level-1 ops of users too, as one kernel each way, which torch's inductor writes.

It saves what its gradients read of x, parameters and side inputs, and nothing between the ops: the backward computes
the run again. Numerics: bfloat16 and float16 are rounded where the run ends, not behind each op.
"""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from fuseops import torch_private
from fuseops.kernels.generated import (
    ElementwiseKernels,
    RefusedError,
    TensorSpec,
    trace_elementwise,
    vjp,
)
from fuseops.ops.code import FOLLOWED, referenced_values
from fuseops.ops.op import (
    NON_CONFIG_ATTRS,
    Call,
    Calls,
    FusedOp,
    Grads,
    MemberTensors,
    Op,
    Out,
    SideGrads,
)
from fuseops.ops.structure import Add
from fuseops.rules.rule import Conditions

KNOWN: dict[Any, ElementwiseKernels | RefusedError] = {}
"""What was traced: layers that are alike share their kernels."""
MOST_KNOWN = 256  # an attribute may be another in each step
NOT_COMPUTED = NON_CONFIG_ATTRS | {"_path", "_prefix", "renames", "note", "delays"}
CONSTANTS = (int, float, str, bool, type(None), torch.dtype, torch.device)
Described = tuple[Sequence[int], torch.dtype]


class Pointwise(FusedOp):
    """A `Pointwise` runs elementwise ops that follow each other as one kernel each way."""

    def __init__(self, *members: Op[Any]) -> None:
        super().__init__(*members)
        own = [(i, name) for i, op in enumerate(members) for name in op.parameter_names()]
        self.absent = [(i, name) for i, name in own if members[i].sample(name) is None]
        sides = [(i, name) for i, op in enumerate(members) for name in op.side_names()]
        self.places = [place for place in own if place not in self.absent] + sides
        # a Residual reads "<residual>", which names no field
        fields = {f"t{k}": f"{i}.{name}" for k, (i, name) in enumerate(self.places)}
        self.names = {"x": "0.x", **fields}
        self.Saved = namedtuple("PointwiseSaved", ["x", *fields, "kernels"])  # type: ignore[misc]

    def fwd(self, x: Tensor, t: MemberTensors, calls: Calls, keep: frozenset[str]) -> Out:
        inputs = [x, *(t[i][name] for i, name in self.places)]
        kernels = self._kernels(inputs, calls)
        (y,) = kernels.forward(*[t.contiguous() for t in inputs])
        if not keep:
            return Out(y)
        kept = [t if k in kernels.read else None for k, t in enumerate(inputs)]
        return Out(y, self.Saved(*kept, kernels))

    def bwd(self, saved: Any, dy: Tensor, calls: Calls, dside: SideGrads) -> tuple[Grads, ...]:
        kernels: ElementwiseKernels = saved.kernels
        given = [dy, *(saved[k] for k in kernels.read)]
        found = iter(kernels.backward(*[t.contiguous() for t in given]))  # type: ignore[misc]
        dx = next(found) if "x" in calls[0].needs else None
        grads: list[dict[str, Tensor]] = [{} for _ in self.members]
        for i, name in self.places:
            if name in calls[i].needs:
                grads[i][name] = next(found)
        return tuple(Grads(None if i else dx, own, own) for i, own in enumerate(grads))

    def choices(self, x: Any, t: Any, calls: Any) -> str:
        return f"{len(self.members)} ops as one kernel each way, which inductor writes"

    # --- what is traced

    def composed(self, calls: Sequence[Call]) -> Callable[..., Tensor]:
        """The run as one function of x and of what is at `places`."""

        def run(x: Tensor, *tensors: Tensor) -> Tensor:
            keywords: list[dict[str, Any]] = [{} for _ in self.members]
            for i, name in self.absent:
                keywords[i][name] = None
            for (i, name), t in zip(self.places, tensors, strict=True):
                keywords[i][name] = t
            for op, call, own in zip(self.members, calls, keywords, strict=True):
                with call.precision.autocast(x.device.type) if op.pure else nullcontext():
                    out = op.fwd(x, **own)
                x = out.y if isinstance(out, Out) else out
            return x

        return run

    def wanted(self, needs: Sequence[frozenset[str]]) -> tuple[int, ...]:
        """Which of x, 0, and of what is at `places` want a gradient."""
        own = [k for k, (i, name) in enumerate(self.places, 1) if name in needs[i]]
        return (*([0] if "x" in needs[0] else []), *own)

    def _kernels(self, inputs: Sequence[Tensor], calls: Sequence[Call]) -> ElementwiseKernels:
        """The kernels for tensors of these shapes and dtypes; where none can be made, torch runs op by op."""
        try:
            return self.traced([(t.shape, t.dtype) for t in inputs], inputs[0].device, calls)
        except RefusedError:
            run, wanted = self.composed(calls), self.wanted([call.needs for call in calls])
            every = tuple(range(len(inputs)))
            return ElementwiseKernels(lambda *t: (run(*t),), lambda *t: vjp(run, wanted, *t), every)

    def traced(
        self, inputs: Sequence[Described], device: torch.device, calls: Sequence[Call]
    ) -> ElementwiseKernels:
        """The kernels for tensors of these shapes and dtypes.  Raises RefusedError where there are none."""
        leading = inputs[0][0][:-1]
        if not leading:
            raise RefusedError(f"x has {len(inputs[0][0])} axes, and no rows")
        fixed = [
            i > -1 and name not in self.members[i].reads for i, name in [(-1, ""), *self.places]
        ]
        likes = tuple(
            TensorSpec(False, tuple(shape), dtype) if own else TensorSpec.of(shape, dtype, leading)
            for own, (shape, dtype) in zip(fixed, inputs, strict=True)
        )
        wanted = self.wanted([call.needs for call in calls])
        ops = tuple(
            (_state(op), call.precision.compute)
            for op, call in zip(self.members, calls, strict=True)
        )
        key = ops, likes, len(leading), device, wanted
        found = KNOWN.get(key)  # once: another thread may clear it
        if found is None:
            if len(KNOWN) >= MOST_KNOWN:
                KNOWN.clear()
            try:
                found = trace_elementwise(self.composed(calls), likes, len(leading), wanted, device)
            except RefusedError as refused:
                found = refused
            KNOWN[key] = found
        if isinstance(found, RefusedError):
            raise found
        return found


def _state(op: Op[Any]) -> Any:
    """What an op computes with besides the tensors that come by keyword.  Raises RefusedError where that may change."""
    if op.signature.fwd_call:
        raise RefusedError("it takes `call`, which may say something else in the next one")
    values = [item for item in op.__dict__.items() if item[0] not in NOT_COMPUTED]
    values.append(("training", op.training))
    for name, value in referenced_values(type(op).fwd, type(op)):
        if not (callable(value) or isinstance(value, FOLLOWED | ModuleType)):
            values.append((name, value))
    for name, value in values:
        items = value if isinstance(value, tuple) else (value,)
        if not all(isinstance(item, CONSTANTS) for item in items):
            raise RefusedError(f"its {name!r} is a {type(value).__name__}, and may change")
    if op._modules:
        raise RefusedError("it has modules of its own")
    return type(op), type(op).fwd, repr(values)  # in which 1, 1.0 and True differ


def one_kernel(ops: tuple[Op[Any], ...], c: Conditions) -> str | None:
    """Whether the run becomes one kernel each way: it is traced, once for layers that are alike."""
    if c.compiling:
        return "torch.compile fuses it"
    if any(c.needs) and not c.needs[0]:
        return "its first op has no gradient, and would have its input saved for those that have"
    if any(isinstance(op, Add) for op in ops[:-1]):
        return "an Add before the end: both of its terms would be saved for their sum"
    if (why := torch_private.why_not_generated(c.device)) is not None:
        return why
    run = Pointwise(*ops)
    inputs: list[Described] = [(c.shape, c.dtype)]
    for i, name in run.places:
        if name in ops[i].reads:
            known = c.sides.get(dict(c.reads[i])[name])
            if known is None:
                return f"the shape of {name!r} is not known before the call"
            inputs.append((known, c.dtype))
        else:
            own = ops[i].sample(name)
            inputs.append((own.shape, own.dtype))
    try:
        run.traced(inputs, c.device, [Call(needs=needs) for needs in c.needs])
    except RefusedError as refused:
        return str(refused)
    return None
