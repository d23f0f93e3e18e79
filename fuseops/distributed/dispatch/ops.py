"""The ops of an expert-parallel layer: one in the place of `ops.Dispatch`, one behind Combine.

ExpertDispatch   x (T, D) -> (C, D), the received tokens; publishes offs, probs, index, pos over them
ExpertArrive     waits for the tokens of an ExpertDispatch, which travel while the ops between the two run
ExpertCollect    y (C, D) -> (T, D), the sums of this rank's tokens
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fuseops import kernels as K
from fuseops import torch_private
from fuseops.distributed.pairs import BACKWARD, give_way
from fuseops.errors import FuseOpsError, ShapeError
from fuseops.ops.checks import check_chosen
from fuseops.ops.linear import to_high_precision
from fuseops.ops.local import differentiates_again, with_backward
from fuseops.ops.op import AcrossRanks, Call, Grads, NothingSaved, Op, Out, SideGrads
from fuseops.ops.paths import path_of
from fuseops.ops.permute import DISPATCHED, ON_DX, REDISPATCH, DispatchRecord, OnDx
from fuseops.ops.structure import Alias
from fuseops.plan.key import hooked
from fuseops.recipes import Operand, Quantized, Roles, quantize
from fuseops.run.splice import opaque_reason

from . import compiled, lost
from .codes import is_transportable, pack_rows, transport_format, unpack_rows
from .dispatcher import Dispatcher, ReceivedTokens, within_capacity

# keys of `call.scratch`
PENDING_TOKENS = "dispatch"  # a function that waits for tokens in flight
PENDING_GRADS = "dispatch_bwd"  # dx, dprobs, and a function that finishes sending them


class ExpertDispatchSaved(NamedTuple):
    experts: Tensor | None  # (T, K) int
    slots: Tensor | None  # (T, W) int32
    arrivals: Tensor | None
    pos: Tensor | None  # (C, K) int32
    offs: Tensor | None  # (L,) int32
    dtype: torch.dtype | None  # of dx, if dy may have another


class ExpertCollectSaved(NamedTuple):
    slots: Tensor | None
    arrivals: Tensor | None
    tokens: int | None  # C


class ExpertDispatch(Op[ExpertDispatchSaved]):
    """`ExpertDispatch` sends each token once to every rank that has one of its experts.   -> the received tokens

    Publishes, as `ops.Dispatch`, the rows of the local experts over these tokens, and `slots` and `arrivals`, by which
    `ExpertCollect` sends the sums back. num_experts: of this rank.
    capacity_factor: as of `ops.Dispatch`, over the tokens of all ranks in the order of ranks.
    Under a recipe tokens travel as the codes that the experts read, if these suffice: with scales of blocks, and weight
    gradients of squares. The received tokens are a `Quantized` then.
    """

    reads = ("experts", "weights")
    writes: tuple[str, ...] = ("offs", "probs", "index", "pos", "slots", "arrivals")
    integers = frozenset({"offs", "index", "pos", "slots", "arrivals", "like"})
    saves_for = {
        "x": ("slots", "arrivals", "dtype"),
        "weights": ("experts", "slots", "arrivals", "pos", "offs"),
    }
    autocast = True  # before it travels
    takes_quantized = True
    live_call = True

    def __init__(
        self,
        dispatcher: Dispatcher,
        capacity_factor: float | None = None,
        arrive: ExpertArrive | None = None,
    ) -> None:
        """arrive: a later op that waits for the tokens; the ops between run in the meantime."""
        super().__init__()
        self.dispatcher, self.capacity_factor = dispatcher, capacity_factor
        self.num_experts = dispatcher.local_experts
        self._arrive_op = () if arrive is None else (arrive,)  # no child
        if dispatcher.sums is not None:
            self.writes = (*self.writes, "like")

    @property
    def across_ranks(self) -> AcrossRanks:  # type: ignore[override]
        d = self.dispatcher
        overlaps = "beside other kernels" if d.overlaps_compute else "in line"
        takes = f" on {d.kernel_resources}" if d.kernel_resources else ""
        note = f"experts over {d.world} ranks, {d.local_experts} here; {d.name}; {overlaps}{takes}"
        return AcrossRanks(d.group, sends=True, outside=d.outside(), note=note)

    def extra_repr(self) -> str:
        d = self.dispatcher
        limit = (
            "" if self.capacity_factor is None else f", capacity_factor={self.capacity_factor:g}"
        )
        return f"{d.num_experts} over {d.world} ranks{limit}"

    def fwd(self, x: Operand, *, experts: Tensor, weights: Tensor, call: Call) -> Out:
        check_chosen("ExpertDispatch", experts, weights)
        if len(experts) != x.shape[0]:
            raise ShapeError(
                f"ExpertDispatch expects experts of each of {x.shape[0]} tokens, got those of {len(experts)}."
            )
        if weights.element_size() < 4:  # as `Routing` has them
            weights = weights.float()
        local_x, scaling = x, transport_format(call.precision.roles)
        if isinstance(x, Quantized) and not is_transportable(x.scaling):
            x = x.dequantize()
        if isinstance(x, Tensor) and scaling is not None:
            x = quantize(x, scaling, col=False)
        plain = torch.is_grad_enabled() and (x.requires_grad or weights.requires_grad)
        if isinstance(x, Quantized) and not plain:
            out = self._send(pack_rows(x), experts, weights, call)
            _wait_pending(call)
            out = out._replace(y=unpack_rows(out.y, x))
        else:
            out = self._send(to_high_precision(x), experts, weights, call)
        if call.scratch is not None and out.saved is not None and isinstance(local_x, Tensor):
            call.scratch[DISPATCHED] = DispatchRecord(
                out.y, local_x, out.saved.slots, out.saved.arrivals
            )
            call.scratch[REDISPATCH] = self._begin_resend
        return out

    def _send(self, x: Tensor, experts: Tensor, weights: Tensor, call: Call) -> Out:
        if torch.compiler.is_compiling():
            return self._compiled(x, experts, weights)
        if torch.is_grad_enabled() and (x.requires_grad or weights.requires_grad):
            y, *side = _DispatchFunction.apply(self, x, experts, weights)  # type: ignore[no-untyped-call]
            return Out(y, None, dict(zip(self.writes, side, strict=True)))
        gradients = 1 + ("weights" in call.needs) if call.needs else 0
        got, side = self._dispatch(x, experts, weights, gradients)
        if self._defers_wait() and call.scratch is not None and got.ready is not None:
            call.scratch[PENDING_TOKENS] = got.wait
        else:
            got = got.wait()
        saved = ExpertDispatchSaved(
            *(experts, side["slots"], side["arrivals"], side["pos"], side["offs"]),
            dtype=None if self.dispatcher.sums is None else x.dtype,
        )
        overlaps, sums = self.dispatcher.overlaps_compute, self.dispatcher.sums
        if call.scratch is not None and "x" in call.needs and (overlaps or sums is not None):
            call.scratch[ON_DX] = OnDx(partial(self._begin_bwd, saved), overlaps)
        return Out(got.x, saved, side)

    def _defers_wait(self) -> bool:
        """Whether an `ExpertArrive` will wait for the tokens. It cannot if one of the two ops is called by itself, as
        one with hooks is: such a call has its own scratch.
        """
        alone = (opaque_reason(op) is not None for op in (self, *self._arrive_op))
        return bool(self._arrive_op) and not hooked() and not any(alone)

    def _begin_bwd(
        self,
        saved: ExpertDispatchSaved,
        scratch: dict[str, Any],
        dx: Tensor,
        dprobs: Any,
        sums: Any,
    ) -> None:
        """Start sending dx back, before weight gradients are computed."""
        scratch[PENDING_GRADS] = dx, dprobs, self._return_grads(sums, dprobs, *saved[:-1])

    def _begin_resend(
        self, local_x: Tensor, slots: Tensor, arrivals: Tensor, tokens: int, roles: Roles | None
    ) -> Callable[[], Operand]:
        """Start sending tokens again, for a backward that did not save them.   -> a function that returns them"""
        scaling = transport_format(roles)
        codes = None if scaling is None else quantize(local_x, scaling, col=False)
        x = local_x if codes is None else pack_rows(codes)
        if torch_private.is_fake(x) or x.is_meta:
            ready = self._resend_in_dry_run(x, tokens)
        else:
            ready = self.dispatcher.begin_resend(x, slots, arrivals, tokens)
        return ready if codes is None else lambda: unpack_rows(ready(), codes)

    def _resend_in_dry_run(self, x: Tensor, tokens: int) -> Callable[[], Tensor]:
        if not self.dispatcher.overlaps_compute:
            return lambda: self.dispatcher.dry_run_rows(x, tokens)
        rows = self.dispatcher.dry_run_rows(x, tokens)
        return lambda: rows

    def _compiled(self, x: Tensor, experts: Tensor, weights: Tensor) -> Out:
        number, factor = self.dispatcher.number, self.capacity_factor or 0.0
        y, ids, weights, slots, arrivals = compiled.dispatch(x, experts, weights, number, factor)
        offs, index, pos, probs = K.route(ids, self.num_experts, weights)
        side = {"offs": offs, "probs": probs, "index": index, "pos": pos}
        return Out(y, None, {**side, "slots": slots, "arrivals": arrivals, **self._dtype_output(x)})

    def _dtype_output(self, x: Tensor) -> dict[str, Tensor]:
        """The side output `like`: a tensor without elements that has the dtype of x, for `ExpertCollect`."""
        return {} if self.dispatcher.sums is None else {"like": x.new_empty(0)}

    def _dispatch(
        self, x: Tensor, experts: Tensor, weights: Tensor, gradients: int
    ) -> tuple[ReceivedTokens, dict[str, Tensor]]:
        """Send tokens.   gradients: as of the dispatcher   -> what has arrived, and the side outputs"""
        dry_run = torch_private.is_fake(x) or x.is_meta
        if dry_run:
            got = _dry_run_dispatch(self.dispatcher, x, experts, weights)
        else:
            self.dispatcher.path, self.dispatcher.gradients = path_of(self), gradients
            with lost.telling(self.dispatcher.group):
                if self.capacity_factor is not None:
                    experts = within_capacity(self.dispatcher, experts, self.capacity_factor)
                got = self.dispatcher.dispatch(x, experts, weights)
        offs, index, pos, probs = K.route(got.experts, self.num_experts, got.weights)
        if not dry_run:
            self.dispatcher.clamp_offs(offs, got.rows)
        side = {"offs": offs, "probs": probs[: got.rows], "index": index[: got.rows], "pos": pos}
        return got, {**side, "slots": got.slots, "arrivals": got.arrivals, **self._dtype_output(x)}

    def bwd(
        self, saved: ExpertDispatchSaved, dy: Tensor | None, *, dside: SideGrads, call: Call
    ) -> Grads:
        dtype = saved.dtype
        dprobs = dside["probs"] if "weights" in call.needs else None
        begun = (call.scratch or {}).pop(PENDING_GRADS, None)
        if begun is not None and (begun[0] is not dy or begun[1] is not dprobs):
            begun[2]()  # started with other gradients: all ranks start again
            begun = None
        finish = self._return_grads(dy, dprobs, *saved[:-1]) if begun is None else begun[2]
        give_way(BACKWARD)
        dx, dweights = finish()
        if "x" not in call.needs:
            return Grads(side={"weights": dweights})
        return Grads(dx if dtype is None else dx.to(dtype), side={"weights": dweights})

    def _return_grads(
        self, dy: Any, dprobs: Any, experts: Any, slots: Any, arrivals: Any, pos: Any, offs: Any
    ) -> Callable[[], tuple[Any, Any]]:
        """Start sending gradients back.   -> a function that returns dx and dweights"""
        if torch_private.is_fake(slots) or slots.is_meta:
            dx = None if dy is None else self.dispatcher.dry_run_rows(dy, len(slots))
            dweights = None if dprobs is None else dprobs.new_empty(experts.shape)
            return lambda: (dx, dweights)
        if dprobs is not None:
            dprobs = K.values_of_copies(dprobs, pos, offs)
        if dy is None:  # the other ranks send theirs
            raise FuseOpsError(
                "ExpertDispatch: nothing came back for the tokens that arrived, while others wait for it: every rank "
                "runs the same backward."
            )
        with lost.telling(self.dispatcher.group):
            return self.dispatcher.begin_dispatch_bwd(dy, dprobs, experts, slots, arrivals)


def _wait_pending(call: Call) -> None:
    """Wait, on the device, for the tokens of an `ExpertDispatch`."""
    ready = (call.scratch or {}).pop(PENDING_TOKENS, None)
    if ready is not None:
        ready()


class ExpertArrive(Alias[NothingSaved]):
    """y = x, the tokens of an earlier `ExpertDispatch`, once they have arrived."""

    takes_quantized = True
    live_call = True

    def fwd(self, x: Operand, *, call: Call) -> Out:
        if not torch.compiler.is_compiling():
            _wait_pending(call)
        return Out(x, NothingSaved())

    def bwd(self, saved: NothingSaved, dy: Tensor) -> Grads:
        return Grads(dy)


class ExpertCollect(Op[ExpertCollectSaved]):
    """`ExpertCollect` sends partial sums of the local experts back to the tokens' ranks, which add them up."""

    reads: tuple[str, ...] = ("slots", "arrivals")
    live_call = True
    saves_for = {"x": ("slots", "arrivals", "tokens")}

    def __init__(self, dispatcher: Dispatcher) -> None:
        super().__init__()
        self.dispatcher = dispatcher
        if dispatcher.sums is not None:
            self.reads = (*self.reads, "like")

    @property
    def across_ranks(self) -> AcrossRanks:  # type: ignore[override]
        return AcrossRanks(self.dispatcher.group, sends=True)

    def fwd(self, x: Tensor, *, call: Call, **side: Tensor) -> Out:
        (call.scratch or {}).pop(DISPATCHED, None)  # if no op has taken it
        slots, arrivals = side["slots"], side["arrivals"]
        saved = None
        if torch.compiler.is_compiling():
            y = compiled.collect(x, slots, arrivals, self.dispatcher.number)
        elif torch.is_grad_enabled() and x.requires_grad:
            y = _CollectFunction.apply(self, x, slots, arrivals)  # type: ignore[no-untyped-call]
        else:
            y = self._collect(x, slots, arrivals)
            saved = ExpertCollectSaved(slots, arrivals, len(x))
        return Out(y.to(side["like"].dtype) if "like" in side else y, saved)

    def _collect(self, x: Tensor, slots: Tensor, arrivals: Tensor) -> Tensor:
        if torch_private.is_fake(x) or x.is_meta:
            return self.dispatcher.dry_run_rows(x, len(slots))
        with lost.telling(self.dispatcher.group):
            return self.dispatcher.collect(x, slots, arrivals)

    def bwd(self, saved: ExpertCollectSaved, dy: Tensor, *, call: Call) -> Grads:
        return Grads(self._collect_bwd(dy, *saved))

    def _collect_bwd(self, dy: Tensor, slots: Any, arrivals: Any, tokens: Any) -> Tensor:
        if torch_private.is_fake(dy) or dy.is_meta:
            return self.dispatcher.dry_run_rows(dy, tokens)
        with lost.telling(self.dispatcher.group):
            return self.dispatcher.collect_bwd(dy, slots, arrivals, tokens)


def _dry_run_dispatch(
    dispatcher: Dispatcher, x: Tensor, experts: Tensor, weights: Tensor
) -> ReceivedTokens:
    """The received tokens of a dry run, which assumes even routing: shapes only, without the other ranks."""
    tokens, rows = dispatcher.expected_sizes(x)
    return ReceivedTokens(
        dispatcher.dry_run_rows(x, tokens),
        dispatcher.dry_run_rows(experts.to(torch.int32), tokens),
        weights.new_empty(tokens, weights.shape[1]),
        rows,
        experts.new_empty(len(x), dispatcher.world, dtype=torch.int32),
        dispatcher.no_arrivals(x),
    )


class _DispatchFunction(torch.autograd.Function):
    """A `_DispatchFunction` is the autograd node of an ExpertDispatch as plain differentiable torch, for
    `fo.reference()`.
    """

    @staticmethod
    def forward(ctx: Any, op: ExpertDispatch, x: Tensor, experts: Tensor, weights: Tensor) -> Any:
        got, side = op._dispatch(x, experts, weights, 2)
        ctx.op = op
        ctx.save_for_backward(experts, *(side[n] for n in ("slots", "arrivals", "pos", "offs")))
        ctx.mark_non_differentiable(*(t for n, t in side.items() if n in op.integers))
        return (got.wait().x, *(side[name] for name in op.writes))

    @staticmethod
    def backward(ctx: Any, dy: Any, *dside: Any) -> Any:
        dprobs = dict(zip(ctx.op.writes, dside, strict=True))["probs"]
        if differentiates_again(dy, dprobs):
            given = ctx.op, dy, dprobs, *ctx.saved_tensors
            dx, dweights = _ReturnFunction.apply(*given)  # type: ignore[no-untyped-call]
        else:
            dx, dweights = ctx.op._return_grads(dy, dprobs, *ctx.saved_tensors)()
        return None, dx, None, dweights


class _ReturnFunction(torch.autograd.Function):
    """A `_ReturnFunction` is the node of the backward of a dispatch, whose own gradients travel as tokens do."""

    @staticmethod
    def forward(ctx: Any, op: ExpertDispatch, dy: Tensor, dprobs: Tensor, *saved: Tensor) -> Any:
        ctx.op, ctx.experts = op, saved[0]
        return op._return_grads(dy, dprobs, *saved)()

    @staticmethod
    def backward(ctx: Any, x: Tensor, weights: Tensor) -> Any:
        y, *side = _DispatchFunction.apply(ctx.op, x, ctx.experts, weights)  # type: ignore[no-untyped-call]
        probs = dict(zip(ctx.op.writes, side, strict=True))["probs"]
        return None, y, probs, *(5 * [None])


class _CollectFunction(torch.autograd.Function):
    """A `_CollectFunction` is the autograd node of an ExpertCollect as plain differentiable torch."""

    @staticmethod
    def forward(ctx: Any, op: ExpertCollect, x: Tensor, slots: Tensor, arrivals: Tensor) -> Any:
        ctx.op, ctx.tokens = op, len(x)
        ctx.save_for_backward(slots, arrivals)
        return op._collect(x, slots, arrivals)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        slots, arrivals = ctx.saved_tensors
        if differentiates_again(dy):
            collect = partial(ctx.op._collect, slots=slots, arrivals=arrivals)
            send = partial(ctx.op._collect_bwd, slots=slots, arrivals=arrivals, tokens=ctx.tokens)
            return None, with_backward(dy, send, collect), None, None
        return None, ctx.op._collect_bwd(dy, slots, arrivals, ctx.tokens), None, None
