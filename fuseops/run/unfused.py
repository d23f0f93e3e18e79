"""What the members of a fused op give by themselves, by shape and dtype."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch

from fuseops.kernels.registry import meta
from fuseops.ops import scopes
from fuseops.ops.op import Op, Out, Precision
from fuseops.ops.structure import Add
from fuseops.plan.segment import ForwardStep, Segment
from fuseops.recipes import Quantized
from fuseops.torch_private import without_modes


def unfused(seg: Segment, step: ForwardStep, x: Any, t: Sequence[Any]) -> Out | None:
    """y and the side outputs of the members, on the meta device; None where a member does not run there.

    A recipe changes no shape and no dtype, so that there is none here.
    """
    side: dict[str, Any] = {}
    try:
        # nobody who watches the step, its bytes say, sees this
        with without_modes(), unchecked(), torch.no_grad(), torch.random.fork_rng(devices=[]):
            out = Out(meta(x.carrier if isinstance(x, Quantized) else x))
            for i, args, call in zip(step.members, step.args, step.calls, strict=True):
                tensors = {name: t[position] for name, position in args if position < len(t)}
                out = _member(seg.ops[i], out.y, {**meta_of(tensors), **side}, call)
                side |= out.side or {}
    except Exception:  # it may read values, which meta tensors have none of
        return None
    return Out(out.y, side={name: side[name] for name, _ in step.writes})


@contextmanager
def unchecked() -> Iterator[None]:
    """Inside, `fo.debug()` looks at no values: meta tensors have none."""
    here = scopes.current()
    before, here.debug = here.debug, None
    try:
        yield
    finally:
        here.debug = before


def meta_of(tensors: Mapping[str, Any]) -> dict[str, Any]:
    return {name: meta(t) for name, t in tensors.items()}


def _member(op: Op[Any], x: Any, tensors: dict[str, Any], call: Any) -> Out:
    if type(op) is Add:  # which torch, on the meta device, would import all of dynamo for
        dtype = torch.promote_types(x.dtype, op.operand(x, tensors[op.reads[0]]).dtype)
        return Out(torch.empty(x.shape, dtype=dtype, device="meta"))
    compute = call.precision.compute
    if op.pure and compute is not None:
        raise NotImplementedError("autocast knows no meta device")
    if op.autocast and compute is not None:
        x = x.to(compute)
    if op.signature.fwd_call:
        tensors["call"] = call._replace(precision=Precision(compute), scratch={})
    out = op.fwd(x, **tensors)
    return out if isinstance(out, Out) else Out(out)
