"""Rules that overlap a collective of tensor parallelism with the Linear next to it.

    fo.configure(model, rules=fuseops.distributed.overlap_rules, disable=["mlp"])

The rule `mlp`, which fuses both products of an MLP, would take precedence. AllGather and Linear are one op of torch's
symmetric memory: all-gather and GEMM in the forward, GEMM and reduce-scatter in the backward; Linear and ReduceScatter
the other way round. Copy engines move shards from peer to peer, without multicast. Where a rule does not apply,
`explain()` has the reason.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fuseops import torch_private
from fuseops.ops.collectives import AllGather, ReduceScatter
from fuseops.ops.linear import Linear, LinearSaved, linear_bwd
from fuseops.ops.op import Call, Calls, FusedOp, Grads, MemberTensors, Out
from fuseops.rules.rule import Conditions, Rule, require


class AllGatherLinear(FusedOp):
    """y = gathered x W^T + b.   (T / ranks, K) -> (T, N)   Saves what its members save: gathered x."""

    def fwd(self, x: Tensor, t: MemberTensors, calls: Calls) -> Out:
        weight, bias = t[1]["weight"], t[1]["bias"]
        w = calls[1].precision.cast(weight)
        s = self.members[0].settings()  # type: ignore[operator]
        rows, y = torch_private.all_gather_matmul(x.to(w.dtype), w.t(), s.ranks.group)  # type: ignore[union-attr]
        if bias is not None:
            y = y + bias.to(y.dtype)
        return Out(y, (s, LinearSaved(rows, weight)))

    def bwd(self, saved: Any, dy: Tensor, calls: Calls, dside: Any) -> tuple[Grads, ...]:
        s, linear = saved
        dx = None
        if "x" in calls[0].needs:
            group = s.ranks.group
            dx = torch_private.matmul_reduce_scatter(dy, linear.weight.to(dy.dtype), group)
        return Grads(dx), Grads(None, _weight_grads(linear, dy, calls[1]))


class LinearReduceScatter(FusedOp):
    """y = this rank's rows of the sum of the ranks' x W^T.   (T, K) -> (T / ranks, N)   Saves what its members save."""

    def fwd(self, x: Tensor, t: MemberTensors, calls: Calls) -> Out:
        weight = t[0]["weight"]
        w = calls[0].precision.cast(weight)
        s = self.members[1].settings()  # type: ignore[operator]
        x = x.to(w.dtype)  # type: ignore[union-attr]
        y = torch_private.matmul_reduce_scatter(x, w.t(), s.ranks.group)  # type: ignore[union-attr]
        return Out(y, (LinearSaved(x, weight), s))

    def bwd(self, saved: Any, dy: Tensor, calls: Calls, dside: Any) -> tuple[Grads, ...]:
        linear, s = saved
        needs, group = calls[0].needs, s.ranks.group
        dx = None
        if "x" in needs:
            weight = linear.weight.to(dy.dtype)
            dy, dx = torch_private.all_gather_matmul(dy, weight, group)
        else:
            dy = torch_private.all_gather(dy.contiguous(), 0, group)
        return Grads(dx, _weight_grads(linear, dy, calls[0])), Grads()


def _weight_grads(linear: LinearSaved, dy: Tensor, call: Call) -> Mapping[str, Tensor | None]:
    """The needed gradients of a Linear's parameters."""
    call = call._replace(needs=call.needs - {"x"})
    return linear_bwd(linear, dy, call).params or {}


# --- conditions


def _collective(ops: Any) -> Any:
    return next(op for op in ops if not isinstance(op, Linear))


def several_ranks(ops: Any, c: Conditions) -> str | None:
    size = _collective(ops)._ranks.size
    return require(size > 1, "there is one rank, and nothing to overlap")


def on_one_host(ops: Any, c: Conditions) -> str | None:
    if c.device.type != "cuda":
        return f"x is on {c.device.type}: symmetric memory is CUDA's"
    size, local_gpus = _collective(ops)._ranks.size, torch.cuda.device_count()
    return require(
        size <= local_gpus, f"{size} ranks are on more than this host, with {local_gpus} GPUs"
    )


def rows_first(ops: Any, c: Conditions) -> str | None:
    dim, axes = _collective(ops).dim, len(c.shape)
    first = dim in (0, -axes)
    return require(axes == 2 and first, f"x has {axes} axes and goes along dim={dim}, not rows")


def sums_gradients(ops: Any, c: Conditions) -> str | None:
    grad = getattr(_collective(ops), "grad", "partial")
    return require(
        grad == "partial", f"the AllGather has grad={grad!r}: its backward sends nothing"
    )


def no_bias(ops: Any, c: Conditions) -> str | None:
    return require(ops[0].bias is None, "a bias is added before the sum over the ranks")


def sixteen_bits(ops: Any, c: Conditions) -> str | None:
    known = (torch.bfloat16, torch.float16)
    return require(c.dtype in known, f"the product is one of {c.dtype}, not of 16 bits")


_ALWAYS = (several_ranks, on_one_host, rows_first, sixteen_bits)
_IN, _OUT = (AllGather, Linear), (Linear, ReduceScatter)

overlap_rules = (
    Rule("all_gather_linear", _IN, AllGatherLinear, "forward", _ALWAYS),
    Rule("linear_reduce_scatter", _OUT, LinearReduceScatter, "forward", (*_ALWAYS, no_bias)),
    Rule("all_gather_linear_bwd", _IN, AllGatherLinear, "backward", (*_ALWAYS, sums_gradients)),
    Rule("linear_reduce_scatter_bwd", _OUT, LinearReduceScatter, "backward", (*_ALWAYS, no_bias)),
)
"""Of tensor parallelism with sequences sharded: `fo.configure(model, rules=overlap_rules, disable=["mlp"])`."""
