"""The result that a fused op must have, by shape and dtype: its members run one by one on the meta device."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from fuseops.attributes import attributes_set
from fuseops.kernels.registry import meta
from fuseops.ops import scopes
from fuseops.ops.op import Op, Out, Precision
from fuseops.ops.structure import Add
from fuseops.plan.segment import ForwardStep, Segment
from fuseops.recipes import Quantized
from fuseops.torch_private import without_modes


def expected_out(seg: Segment, step: ForwardStep, x: Any, t: Sequence[Any]) -> Out | None:
    """y and the side outputs of the members of a step, on the meta device; None where a member cannot run there.

    The members run without the recipe, which changes neither shapes nor dtypes.
    """
    side: dict[str, Any] = {}
    try:
        # no mode that observes the step (its bytes, say) may see these ops, and meta tensors have no values to check
        undebugged = attributes_set([(scopes.current(), "debug", None)])
        with without_modes(), undebugged, torch.no_grad(), torch.random.fork_rng(devices=[]):
            out = Out(meta(x.carrier if isinstance(x, Quantized) else x))
            for i, args, call in zip(step.members, step.args, step.calls, strict=True):
                tensors = {name: t[position] for name, position in args if position < len(t)}
                out = _member_out(seg.ops[i], out.y, {**_on_meta(tensors), **side}, call)
                side |= out.side or {}
    except Exception:  # it may read values, which meta tensors have none of
        return None
    return Out(out.y, side={name: side[name] for name, _ in step.writes})


def _on_meta(tensors: Mapping[str, Any]) -> dict[str, Any]:
    return {name: meta(t) for name, t in tensors.items()}


def _member_out(op: Op[Any], x: Any, tensors: dict[str, Any], call: Any) -> Out:
    if type(op) is Add:  # torch would import dynamo for an addition on the meta device
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
