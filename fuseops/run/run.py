"""A run of adjacent ops executes the plan of a call, segment by segment."""

import weakref
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils import parametrize

from fuseops import kernels
from fuseops.errors import FuseOpsError
from fuseops.ops import scopes
from fuseops.ops.local import to_local_input
from fuseops.ops.object_table import TABLE
from fuseops.plan.build import RunPlan
from fuseops.plan.chain import Chain
from fuseops.plan.key import Tokens
from fuseops.plan.segment import Segment
from fuseops.recipes import Quantized
from fuseops.rules.rule import RunEnd
from fuseops.torch_private import dict_version, is_dtensor, is_profiling

from . import bridge, buffers, ranges, repeats
from .bridge import NodeState
from .buffers import Buffers
from .checks import describe, dtype_mismatch, failing_step
from .contract import ContractCheck
from .plan_lookup import PlanLookup
from .steps import CallContext, write_forward


class Run:
    """A run is the ops of one Sequential between two plain modules (or one op that is called alone), planned and
    cached together.
    """

    def __init__(self, chain: Chain, end: RunEnd, offset: int = 0, alone: bool = False) -> None:
        self.chain, self.ops, self.names = chain, chain.ops, chain.names
        self.offset = offset  # position of the first op in the Sequential
        self.plans = PlanLookup(chain, end, offset, alone)
        self.table_numbers: list[int] = []  # of the objects that this run put into TABLE
        weakref.finalize(self, TABLE.drop, self.table_numbers)

    def register(self, item: Any) -> int:
        """Put an object into the table that traced code reads.   -> its number"""
        self.table_numbers.append(TABLE.add(item))
        return self.table_numbers[-1]

    def __call__(
        self,
        x: Any,
        env: dict[str, Any],
        tokens: Tokens,
        live: tuple[str, ...],
        path: str,
        scratch: dict[str, Any],
        versions: object,
        out: Buffers | None = None,
    ) -> Any:
        """Run the ops on x. Side tensors are read from `env`, and published to it.

        versions: of the dicts of the ops, as `Runner.versions`.  out: the caller's buffers for "y" and "dx"; then this
        run is a single op.
        """
        original = x
        if type(x) is Quantized:  # planned as the tensor that it represents
            x = x.carrier
        elif type(x) is not Tensor and is_dtensor(type(x)) and self.chain.local:
            original = x = to_local_input(x, self.chain.layout)
        watchers = scopes.thread.active.watchers
        if out is None and not watchers:
            plan = self.plans.find_repeated(x, env, tokens, live, versions)
            if plan is not None:
                return run_segments(plan.segments, original, env, path, CallContext(scratch))
        parametrized = any(op.__dict__["_modules"] for op in self.ops)
        with parametrize.cached() if parametrized else nullcontext():  # computed once a forward
            plan = self.plans.find(x, env, tokens, live)
            for watcher in watchers:
                watcher(plan)
            if out is not None:
                self._check_buffers(plan, out, x, env, path)
            return run_segments(plan.segments, original, env, path, CallContext(scratch, out))

    def _check_buffers(
        self, plan: RunPlan, out: Buffers, x: Tensor, env: dict[str, Any], path: str
    ) -> None:
        """Raise FuseOpsError unless the only op of this run can write to these buffers."""
        seg = plan.segments[0]
        op = bridge.where(seg, path)
        if seg.kind != "node":
            raise FuseOpsError(
                f"{op} cannot write to a buffer of the caller, since it runs outside of fuseops' autograd node "
                f"({plan.forward[0].note}): leave it out of `out`."
            )
        if "dx" in out and not (seg.needs_grad and "x" in seg.forward[0].calls[0].needs):
            raise FuseOpsError(
                f"dx of {op} is to be written to a buffer, but no gradient of its input is computed in this call: "
                "leave it out of `out`."
            )
        *_, shape = self.plans.shapes_of(x, env)
        buffers.check_buffers(op, out, x, shape, registered_inputs(seg, env))


def run_segments(
    segments: Sequence[Segment], x: Any, env: dict[str, Any], path: str, context: CallContext
) -> Any:
    """Run segments in order, with autocast off where the plan accounts for it. Errors get a note that names the op."""
    if is_profiling() or ranges.NVTX:
        segments = ranges.in_ranges(segments, path)
    try:
        for seg in segments:  # the except reads it
            if seg.kind == "call":
                x = call_op(seg, x, env)
            elif seg.tap is not None and seg.checked_forward:
                env[seg.tap] = x
            elif seg.autocast:
                with torch.autocast(seg.device, enabled=False):
                    x = run_segment(seg, x, env, NodeState(path, context))
            elif seg.kind == "node" and seg.needs_grad and not seg.exports:  # most
                x = bridge.run_node(seg, NodeState(path, context), x, registered_inputs(seg, env))
            else:
                x = run_segment(seg, x, env, NodeState(path, context))
            for name in seg.last_reads:
                del env[name]
        return x
    except Exception as error:
        where = bridge.where(seg, path, failing_step(error))
        note = f"in the forward of fuseops {where}; x {describe(x)}{_describe_others(seg, env)}"
        clearer = dtype_mismatch(seg, path, error)
        if clearer is None:
            error.add_note(note)
            raise
        clearer.add_note(note)
        try:
            raise clearer from error
        finally:
            del (
                clearer
            )  # a frame and its own error would hold each other, and x, until the collector runs


def _describe_others(seg: Segment, env: Mapping[str, Any]) -> str:
    """Describe the side inputs and parameters of a segment, for a message."""
    tensors = [(name, env.get(name)) for name in seg.reads]
    tensors += [(f"{seg.names[i]}.{name}", getattr(seg.ops[i], name)) for i, name in seg.params]
    return "".join(f", {name} {describe(t)}" for name, t in tensors if isinstance(t, Tensor))


def call_op(seg: Segment, x: Any, env: dict[str, Any]) -> Any:
    """Call an op through its own `__call__`, which returns (y, *published)."""
    (op,), (step,) = seg.ops, seg.forward
    reads = [(keyword, at) for keyword, at in step.args[0] if at < len(seg.reads)]
    y = op(x, **{keyword: env[seg.reads[at]] for keyword, at in reads})
    if op.writes:
        y, *published = y
        places = [at for _, at in step.writes]
        for name, at in zip(seg.exports, seg.export_positions, strict=True):
            env[name] = published[places.index(at)]
    return y


def run_segment(seg: Segment, x: Any, env: dict[str, Any], state: NodeState | None) -> Any:
    """Run a segment. In traced code, which publishes no names and has no messages, state is None."""
    inputs = inputs_of(seg, env) if state is None else registered_inputs(seg, env)
    if seg.kind == "node" and seg.needs_grad:
        if state is None:
            y = bridge.run_traced_node(seg.number, x, inputs)
        else:
            y = bridge.run_node(seg, state, x, inputs)
        if seg.exports:
            y, *exported = y
            env.update(zip(seg.exports, exported, strict=True))
        return y
    context = CallContext()
    if state is not None:
        context = state.context
        if [*map(dict_version, seg.op_dicts)] != seg.versions:
            seg.forget()
        if not seg.checked_forward:
            context = context._replace(contract=ContractCheck(seg, inputs))
    forward = seg.fwd or write_forward(seg)
    if seg.kind == "node" and state is not None:
        y, *_ = repeats.forward(seg, x, inputs, context)
    elif seg.kind == "node" or seg.aliases:
        # alias ops call no kernel; traced code writes nothing, since checkpoint refuses to trace a write
        y, _, _ = forward(x, inputs, context)
    else:
        with kernels.reference_only():
            y, _, _ = forward(x, inputs, context)
    for name, place in zip(seg.exports, seg.export_positions, strict=True):
        env[name] = inputs[place]
    return y


def registered_inputs(seg: Segment, env: dict[str, Any]) -> list[Any]:
    """`inputs_of`, faster where every parameter is a registered tensor of its op."""
    if seg.registered is None:
        return inputs_of(seg, env)
    try:
        parameters = [op.__dict__[kind][name] for op, kind, name in seg.registered]
    except KeyError:  # parametrized since the plan was built
        return inputs_of(seg, env)
    return [*_side_tensors(seg, env), *parameters] if seg.reads else parameters


def _side_tensors(seg: Segment, env: dict[str, Any]) -> list[Any]:
    """The side inputs that a segment reads, dequantized."""
    found = [env[name] for name in seg.reads]
    return [t.dequantize() if type(t) is Quantized else t for t in found]


def inputs_of(seg: Segment, env: dict[str, Any]) -> list[Any]:
    """Side inputs and parameters of a segment, in the order in which its node takes them."""
    inputs = _side_tensors(seg, env)
    for position, local in seg.local_reads:
        inputs[position] = local.compute_tensor(inputs[position])
    for i, name in seg.params:
        op = seg.ops[i]
        registered = op._parameters
        t = registered[name] if name in registered else getattr(op, name)
        own = op._local
        inputs.append(own[name].compute_tensor(t) if name in own else t)
    return inputs
