"""Checks, in the first forward and the first backward of a segment, that its ops keep the contract of ops.

These two may belong to different calls. Later calls of the same plan are not checked until an op is written to, except
that no gradient is missing (`checks.check_complete`).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fuseops import torch_private
from fuseops.errors import FuseOpsError
from fuseops.ops.op import Grads, Out
from fuseops.ops.stored import stored_in
from fuseops.plain import PLAIN
from fuseops.plan.segment import BackwardStep, ForwardStep, Segment, Step
from fuseops.recipes import Quantized

from . import checks
from .unfused import expected_out


class GradientSpec(NamedTuple):
    """A `GradientSpec` is the shape, dtype and device that a gradient must have: those of its tensor."""

    shape: torch.Size
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, t: Any) -> GradientSpec | None:
        return None if t is None else cls(t.shape, t.dtype, t.device)


class InputVersion(NamedTuple):
    """An `InputVersion` is a tensor that an op was given, and its version counter at that time."""

    name: str
    counter: Tensor  # the tensor, or an alias of no bytes that shares its version counter
    writes: int


class ContractCheck:
    """A `ContractCheck` checks the results of a segment's ops in its first call.

    Its methods raise FuseOpsError for an op that breaks the contract.
    """

    def __init__(self, seg: Segment, inputs: Sequence[Any]) -> None:
        """inputs: side inputs and parameters, as the node takes them."""
        self.seg = seg
        self.inputs = [GradientSpec.of(t) for t in inputs]
        self.x: dict[int, GradientSpec | None] = {}  # of the op at that index
        self.given: list[InputVersion] = []  # inputs of the fwd or bwd that runs
        self.expected: Out | None = None  # result of the fused op that runs, on the meta device

    # --- forward

    def before_fwd(self, step: ForwardStep, x: Any, t: Sequence[Any]) -> None:
        seg, first = self.seg, step.members[0]
        self.x[first] = GradientSpec.of(x)
        if seg.checked_forward:
            return
        checks.check_dtype(seg.ops[first : first + 1], seg.names[first : first + 1], x.dtype)
        if step.kind != "op":
            self.expected = expected_out(seg, step, x, t)
        read = [
            (name, t[position])
            for i, args in zip(step.members, step.args, strict=True)
            for name, position in args
            if name not in seg.ops[i]._buffers and not (name == "weight" and stored_in(seg.ops[i]))
        ]  # a weight that is stored quantized has no values: its version is that of its codes
        tensors = [(name, a) for name, a in (("x", x), *read) if isinstance(a, Tensor)]
        self.given = [InputVersion(name, a, torch_private.version(a)) for name, a in tensors]

    def after_fwd(self, step: ForwardStep, out: Out) -> None:
        if self.seg.checked_forward:
            return
        if not isinstance(out.y, Tensor | Quantized):
            raise checks.no_tensor_error(step, out.y)
        self._check_unwritten(step, "fwd")
        _check_published(self.seg, step, out.side)
        if step.kind != "op" and self.expected is not None:
            _check_results(step, out, self.expected)
        if self.seg.needs_grad and not step.pure:
            _check_saved(self.seg, step, out.saved)

    # --- backward

    def before_bwd(
        self, step: Step, saved: Sequence[Any], dy: Any, dside: Mapping[str, Any] | None
    ) -> None:
        """saved: the Saved of every member"""
        read: list[tuple[str, Any]] = [("dy", dy)]
        read += [(f"dside[{name!r}]", d) for name, d in (dside or {}).items()]
        read += [(f"saved.{f}", t) for s in saved for f, t in zip(s._fields, s, strict=True)]
        self.given = [
            InputVersion(name, torch_private.empty_alias(t), t._version)  # holds no memory
            for name, t in read
            if type(t) in PLAIN and not t.is_inference() and not torch_private.is_batched(t)
        ]

    def after_bwd(self, step: BackwardStep, results: Sequence[Grads]) -> None:
        self._check_unwritten(step, "bwd")
        if not step.pure:
            _check_names(self.seg, step, results)
        pairs = [("x", results[0].x, self.x.get(step.members[0]))]
        for name, gradient, position in _wanted_grads(step, results):
            if position < self.seg.inputs:
                pairs.append((name, gradient, self.inputs[position]))
        for name, gradient, expected in pairs:
            if gradient is not None and expected is not None:
                _check_gradient(step, name, gradient, expected)

    def _check_unwritten(self, step: Step, method: str) -> None:
        for name, counter, writes in self.given:
            if torch_private.version(counter) != writes:
                raise FuseOpsError(
                    f"{type(step.target).__name__}.{method} writes in place to {name!r}, which it was given: others "
                    "may read it or have saved it. Write to a new tensor, such as x.clone()."
                )
        self.given = []  # frees the tensors


def _check_results(step: Step, out: Out, expected: Out) -> None:
    """Raise FuseOpsError unless the results of a fused op have the shapes and dtypes of its members' results."""
    pairs = [("y", out.y, expected.y)]
    pairs += [
        (repr(name), (out.side or {}).get(name), t) for name, t in (expected.side or {}).items()
    ]
    for name, given, wanted in pairs:
        if given is not None and (given.shape != wanted.shape or given.dtype != wanted.dtype):
            raise FuseOpsError(
                f"{type(step.target).__name__}.fwd gave {name} of {given.dtype} and shape {tuple(given.shape)}; its "
                f"members give {wanted.dtype} and shape {tuple(wanted.shape)}: a fused op computes what they do."
            )


def _check_published(seg: Segment, step: Step, side: Mapping[str, Any] | None) -> None:
    declared = {name for i in step.members for name in seg.ops[i].writes}
    for name, t in (side or {}).items():
        if name not in declared:
            raise FuseOpsError(
                f"{type(step.target).__name__}.fwd publishes {name!r}, which its writes {sorted(declared)} do not "
                f"name: set writes = ({name!r},)."
            )
        if not isinstance(t, Tensor | Quantized):
            raise FuseOpsError(
                f"{type(step.target).__name__}.fwd publishes {name!r} as {type(t).__name__}: side outputs are tensors."
            )


def _check_saved(seg: Segment, step: Step, saved: Any) -> None:
    """Raise FuseOpsError unless a step saves a value, or None, for each field of the Saved of every member."""
    fwd = f"{type(step.target).__name__}.fwd"
    if step.kind == "joint":
        pairs = [(step.members[0], step.target, saved)]
    else:
        member_saved = (saved,) if step.kind == "op" else saved
        pairs = [(i, seg.ops[i], own) for i, own in zip(step.members, member_saved, strict=True)]
    kept = {slot.owner: slot for slot in seg.slots}
    for i, saver, own in pairs:
        fields = saver.Saved._fields
        if own is None:
            if i in kept:
                names = [fields[k] for k in kept[i].kept]
                raise FuseOpsError(
                    f"{fwd} saves nothing, and the backward of {type(saver).__name__} will read {names}: return "
                    f"Out(y, {saver.Saved.__name__}(...))."
                )
            continue
        bare = type(own) is tuple and len(own) == len(fields)
        if not bare and getattr(own, "_fields", None) != fields:
            raise FuseOpsError(
                f"{fwd} saved {_describe_saved(own)} of {type(saver).__name__}, which declares {list(fields)}: give "
                f"{saver.Saved.__name__}(...), with None for what nobody reads."
            )
        for name, value in zip(fields, own, strict=True):
            if isinstance(value, (list, tuple, dict)) and _holds_tensors(value):
                raise FuseOpsError(
                    f"{fwd} saves a {type(value).__name__} of tensors as {name!r}: no hook, offload or check of "
                    "writes in place would see them. Give every tensor a field of its own."
                )


def _describe_saved(saved: Any) -> str:
    if type(saved) is tuple:
        return f"{len(saved)} values"
    return f"{type(saved).__name__}{list(getattr(saved, '_fields', ()))}"


def _holds_tensors(value: Any) -> bool:
    values = value.values() if isinstance(value, dict) else value
    return any(isinstance(v, Tensor) for v in values)


def _check_names(seg: Segment, step: Step, results: Sequence[Grads]) -> None:
    for i, result in zip(step.members, results, strict=True):
        op = seg.ops[i]
        accepted = {*op.signature.keywords, *op.side_names()}
        unknown = sorted({*(result.params or ()), *(result.side or ())} - accepted)
        if unknown:
            raise FuseOpsError(
                f"{type(step.target).__name__}.bwd gave a gradient of {unknown[0]!r}, which fwd of "
                f"{type(op).__name__} does not take: it takes {sorted(accepted)}."
            )


def _check_gradient(step: Step, name: str, gradient: Any, expected: GradientSpec) -> None:
    bwd = f"{type(step.target).__name__}.bwd gave"
    if not isinstance(gradient, Tensor):
        raise FuseOpsError(
            f"{bwd} {type(gradient).__name__} as the gradient of {name!r}: expected a tensor."
        )
    if gradient.shape != expected.shape:
        raise FuseOpsError(
            f"{bwd} a gradient of {name!r} of shape {tuple(gradient.shape)}; "
            f"{name!r} has shape {tuple(expected.shape)}."
        )
    dtype = gradient.dtype
    if dtype.is_complex != expected.dtype.is_complex or not (
        dtype.is_complex or dtype.is_floating_point
    ):
        raise FuseOpsError(
            f"{bwd} a gradient of {name!r} of {dtype}; {name!r} is {expected.dtype}: autograd would round it."
        )
    compute = step.calls[0].precision.compute
    if name == "x" and step.kind != "op" and dtype not in (expected.dtype, compute):
        raise FuseOpsError(
            f"{bwd} a gradient of 'x' of {dtype}; 'x' is {expected.dtype}: give it in the dtype of x."
        )
    if gradient.device != expected.device:
        raise FuseOpsError(
            f"{bwd} a gradient of {name!r} on {gradient.device}; {name!r} is on {expected.device}."
        )


def _wanted_grads(step: BackwardStep, results: Sequence[Grads]) -> Iterator[tuple[str, Any, int]]:
    """Name, gradient and position of every needed gradient besides dx."""
    for member, name, position in step.params:
        yield name, (results[member].params or {}).get(name), position
    for member, name, position in step.sides:
        yield name, (results[member].side or {}).get(name), position
