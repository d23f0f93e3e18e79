"""The ops of a layer whose experts are spread over ranks: they stand where `ops.Dispatch` does, and behind Combine.

ExpertDispatch   x (T, D) -> (C, D), the tokens that arrive; publishes offs, probs, index, pos over them
ExpertArrive     where the tokens are read that were sent ahead, beside what stands between the two
ExpertCollect    y (C, D) -> (T, D), the sums where the tokens came from
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
from fuseops.ops.op import Call, Grads, NothingSaved, Op, Out, SideGrads
from fuseops.ops.permute import DISPATCHED, ON_DX, REDISPATCH, DispatchRecord, OnDx
from fuseops.ops.structure import Alias
from fuseops.plan.key import hooked
from fuseops.recipes import Operand, Quantized, Roles, quantize
from fuseops.run.splice import opaque_reason

from . import compiled
from .codes import packed, travelling, travels, unpacked
from .exchange import Arrived, Exchange, within_capacity

# in `call.scratch`
READY = "dispatch"  # what is called before tokens are read that are on their way
BEGUN = "dispatch_bwd"  # dx, dprobs, and what is called for what they give at home


class ExpertDispatchSaved(NamedTuple):
    experts: Tensor | None  # (T, K) int
    slots: Tensor | None  # (T, W) int32
    arrivals: Tensor | None
    pos: Tensor | None  # (C, K) int32
    offs: Tensor | None  # (L,) int32
    dtype: torch.dtype | None  # of dx, where dy has another


class ExpertCollectSaved(NamedTuple):
    slots: Tensor | None
    arrivals: Tensor | None
    tokens: int | None  # C


class ExpertDispatch(Op[ExpertDispatchSaved]):
    """Sends every token to the ranks of its experts, once a rank, and gives the tokens that arrive here.

    Publishes, as `ops.Dispatch`, the rows of the experts that are here over what arrived, and `slots` and `arrivals`,
    by which `ExpertCollect` sends the sums back. num_experts: of this rank.
    capacity_factor: as of `ops.Dispatch`, over the tokens of all ranks in their order.
    Under a recipe tokens travel as the codes that the experts read, where those say all that these need: with scales of
    blocks, and weight gradients of squares. What arrives is a `Quantized` then.
    """

    reads = ("experts", "weights")
    writes: tuple[str, ...] = ("offs", "probs", "index", "pos", "slots", "arrivals")
    integers = frozenset({"offs", "index", "pos", "slots", "arrivals", "like"})
    saves_for = {
        "x": ("slots", "arrivals", "dtype"),
        "weights": ("experts", "slots", "arrivals", "pos", "offs"),
    }
    autocast = True  # before it travels
    sends = True
    takes_quantized = True
    live_call = True
    apart_when_compiled = True

    def __init__(
        self,
        exchange: Exchange,
        capacity_factor: float | None = None,
        until: ExpertArrive | None = None,
    ) -> None:
        """until: comes behind it; until then tokens travel beside what stands between."""
        super().__init__()
        self.exchange, self.capacity_factor = exchange, capacity_factor
        self.num_experts = exchange.local
        self._until = () if until is None else (until,)  # no child
        if exchange.sums is not None:
            self.writes = (*self.writes, "like")

    @property
    def note(self) -> str:  # type: ignore[override]
        e = self.exchange
        beside = "beside other kernels" if e.beside else "in line"
        takes = f" on {e.takes}" if e.takes else ""
        return f"experts over {e.world} ranks, {e.local} here; {e.name}; {beside}{takes}"

    @property
    def together(self) -> Any:
        return self.exchange.group

    def outside(self) -> dict[Any, int]:
        return self.exchange.outside()

    def extra_repr(self) -> str:
        e = self.exchange
        limit = (
            "" if self.capacity_factor is None else f", capacity_factor={self.capacity_factor:g}"
        )
        return f"{e.num_experts} over {e.world} ranks{limit}"

    def fwd(self, x: Operand, *, experts: Tensor, weights: Tensor, call: Call) -> Out:
        check_chosen("ExpertDispatch", experts, weights)
        if len(experts) != x.shape[0]:
            raise ShapeError(
                f"ExpertDispatch expects experts of each of {x.shape[0]} tokens, got those of {len(experts)}."
            )
        if weights.element_size() < 4:  # as `Routing` has them
            weights = weights.float()
        home, scaling = x, travelling(call.precision.roles)
        if isinstance(x, Quantized) and not travels(x.scaling):
            x = x.dequantize()
        if isinstance(x, Tensor) and scaling is not None:
            x = quantize(x, scaling, col=False)
        plain = torch.is_grad_enabled() and (x.requires_grad or weights.requires_grad)
        if isinstance(x, Quantized) and not plain:
            out = self._sent(packed(x), experts, weights, call)
            _arrive(call)
            out = out._replace(y=unpacked(out.y, x))
        else:
            out = self._sent(to_high_precision(x), experts, weights, call)
        if call.scratch is not None and out.saved is not None and isinstance(home, Tensor):
            call.scratch[DISPATCHED] = DispatchRecord(
                out.y, home, out.saved.slots, out.saved.arrivals
            )
            call.scratch[REDISPATCH] = self._begin_again
        return out

    def _sent(self, x: Tensor, experts: Tensor, weights: Tensor, call: Call) -> Out:
        if torch.compiler.is_compiling():
            return self._compiled(x, experts, weights)
        if torch.is_grad_enabled() and (x.requires_grad or weights.requires_grad):
            y, *side = _Dispatched.apply(self, x, experts, weights)  # type: ignore[no-untyped-call]
            return Out(y, None, dict(zip(self.writes, side, strict=True)))
        got, side = self._dispatched(x, experts, weights)
        if self._ahead() and call.scratch is not None and got.ready is not None:
            call.scratch[READY] = got.there
        else:
            got = got.there()
        saved = ExpertDispatchSaved(
            *(experts, side["slots"], side["arrivals"], side["pos"], side["offs"]),
            dtype=None if self.exchange.sums is None else x.dtype,
        )
        beside, sums = self.exchange.beside, self.exchange.sums
        if call.scratch is not None and "x" in call.needs and (beside or sums is not None):
            call.scratch[ON_DX] = OnDx(partial(self._begin, saved), beside)
        return Out(got.x, saved, side)

    def _ahead(self) -> bool:
        """Whether an `ExpertArrive` waits for tokens that are on their way. An op that is called by itself, as one with
        hooks is, has a scratch of its own.
        """
        alone = (opaque_reason(op) is not None for op in (self, *self._until))
        return bool(self._until) and not hooked() and not any(alone)

    def _begin(
        self,
        saved: ExpertDispatchSaved,
        scratch: dict[str, Any],
        dx: Tensor,
        dprobs: Any,
        sums: Any,
    ) -> None:
        """Send dx home while gradients of weights are made."""
        scratch[BEGUN] = dx, dprobs, self._returning(sums, dprobs, *saved[:-1])

    def _begin_again(
        self, home: Tensor, slots: Tensor, arrivals: Tensor, tokens: int, roles: Roles | None
    ) -> Callable[[], Operand]:
        """What arrived, sent once more: what is called where it is read."""
        scaling = travelling(roles)
        codes = None if scaling is None else quantize(home, scaling, col=False)
        x = home if codes is None else packed(codes)
        if torch_private.is_fake(x) or x.is_meta:
            ready = self._again_in_a_dry_run(x, tokens)
        else:
            ready = self.exchange.begin_again(x, slots, arrivals, tokens)
        return ready if codes is None else lambda: unpacked(ready(), codes)

    def _again_in_a_dry_run(self, x: Tensor, tokens: int) -> Callable[[], Tensor]:
        if not self.exchange.beside:
            return lambda: self.exchange.in_a_dry_run(x, tokens)
        rows = self.exchange.in_a_dry_run(x, tokens)
        return lambda: rows

    def _compiled(self, x: Tensor, experts: Tensor, weights: Tensor) -> Out:
        number, factor = self.exchange.number, self.capacity_factor or 0.0
        y, ids, weights, slots, arrivals = compiled.dispatch(x, experts, weights, number, factor)
        offs, index, pos, probs = K.route(ids, self.num_experts, weights)
        side = {"offs": offs, "probs": probs, "index": index, "pos": pos}
        return Out(y, None, {**side, "slots": slots, "arrivals": arrivals, **self._like(x)})

    def _like(self, x: Tensor) -> dict[str, Tensor]:
        """A tensor without elements that says the dtype of x to who adds up the sums."""
        return {} if self.exchange.sums is None else {"like": x.new_empty(0)}

    def _dispatched(
        self, x: Tensor, experts: Tensor, weights: Tensor
    ) -> tuple[Arrived, dict[str, Tensor]]:
        planned = torch_private.is_fake(x) or x.is_meta
        if planned:
            got = _as_many(self.exchange, x, experts, weights)
        else:
            if self.capacity_factor is not None:
                experts = within_capacity(self.exchange, experts, self.capacity_factor)
            got = self.exchange.dispatch(x, experts, weights)
        offs, index, pos, probs = K.route(got.experts, self.num_experts, got.weights)
        if not planned:
            self.exchange.bound(offs, got.rows)
        side = {"offs": offs, "probs": probs[: got.rows], "index": index[: got.rows], "pos": pos}
        return got, {**side, "slots": got.slots, "arrivals": got.arrivals, **self._like(x)}

    def bwd(
        self, saved: ExpertDispatchSaved, dy: Tensor | None, *, dside: SideGrads, call: Call
    ) -> Grads:
        dtype = saved.dtype
        dprobs = dside["probs"] if "weights" in call.needs else None
        begun = (call.scratch or {}).pop(BEGUN, None)
        if begun is not None and (begun[0] is not dy or begun[1] is not dprobs):
            begun[2]()  # of other gradients: every rank runs the same backward
            begun = None
        there = self._returning(dy, dprobs, *saved[:-1]) if begun is None else begun[2]
        give_way(BACKWARD)
        dx, dweights = there()
        if "x" not in call.needs:
            return Grads(side={"weights": dweights})
        return Grads(dx if dtype is None else dx.to(dtype), side={"weights": dweights})

    def _returning(
        self, dy: Any, dprobs: Any, experts: Any, slots: Any, arrivals: Any, pos: Any, offs: Any
    ) -> Callable[[], tuple[Any, Any]]:
        """Gradients on their way home, and what is called for them there."""
        if torch_private.is_fake(slots) or slots.is_meta:
            dx = None if dy is None else self.exchange.in_a_dry_run(dy, len(slots))
            dweights = None if dprobs is None else dprobs.new_empty(experts.shape)
            return lambda: (dx, dweights)
        if dprobs is not None:
            dprobs = K.values_of_copies(dprobs, pos, offs)
        if dy is None:  # all ranks send, as those do that have it
            raise FuseOpsError(
                "ExpertDispatch: nothing came back for the tokens that arrived, while others wait for it: every rank "
                "runs the same backward."
            )
        return self.exchange.begin_dispatch_bwd(dy, dprobs, experts, slots, arrivals)


def _arrive(call: Call) -> None:
    """Wait, on the device, for tokens that were sent ahead."""
    ready = (call.scratch or {}).pop(READY, None)
    if ready is not None:
        ready()


class ExpertArrive(Alias):
    """y = x, the tokens that an `ExpertDispatch` further up has sent ahead, once they are there."""

    takes_quantized = True
    live_call = True

    def fwd(self, x: Operand, *, call: Call) -> Out:
        if not torch.compiler.is_compiling():
            _arrive(call)
        return Out(x, NothingSaved())

    def bwd(self, saved: NothingSaved, dy: Tensor) -> Grads:
        return Grads(dy)


class ExpertCollect(Op[ExpertCollectSaved]):
    """Sends the sum of each token's experts here back to where it came from, and adds up what comes from all ranks."""

    reads: tuple[str, ...] = ("slots", "arrivals")
    apart_when_compiled = True
    live_call = True
    saves_for = {"x": ("slots", "arrivals", "tokens")}

    def __init__(self, exchange: Exchange) -> None:
        super().__init__()
        self.exchange = exchange
        if exchange.sums is not None:
            self.reads = (*self.reads, "like")

    def fwd(self, x: Tensor, *, call: Call, **side: Tensor) -> Out:
        (call.scratch or {}).pop(DISPATCHED, None)  # where nobody has saved what arrived
        slots, arrivals = side["slots"], side["arrivals"]
        saved = None
        if torch.compiler.is_compiling():
            y = compiled.collect(x, slots, arrivals, self.exchange.number)
        elif torch.is_grad_enabled() and x.requires_grad:
            y = _Collected.apply(self, x, slots, arrivals)  # type: ignore[no-untyped-call]
        else:
            y = self._collected(x, slots, arrivals)
            saved = ExpertCollectSaved(slots, arrivals, len(x))
        return Out(y.to(side["like"].dtype) if "like" in side else y, saved)

    def _collected(self, x: Tensor, slots: Tensor, arrivals: Tensor) -> Tensor:
        if torch_private.is_fake(x) or x.is_meta:
            return self.exchange.in_a_dry_run(x, len(slots))
        return self.exchange.collect(x, slots, arrivals)

    def bwd(self, saved: ExpertCollectSaved, dy: Tensor, *, call: Call) -> Grads:
        return Grads(self._spread(dy, *saved))

    def _spread(self, dy: Tensor, slots: Any, arrivals: Any, tokens: Any) -> Tensor:
        if torch_private.is_fake(dy) or dy.is_meta:
            return self.exchange.in_a_dry_run(dy, tokens)
        return self.exchange.collect_bwd(dy, slots, arrivals, tokens)


def _as_many(exchange: Exchange, x: Tensor, experts: Tensor, weights: Tensor) -> Arrived:
    """What arrives where ranks send each other alike, in shapes: for plans without the others."""
    tokens, rows = exchange.expected(x)
    return Arrived(
        exchange.in_a_dry_run(x, tokens),
        exchange.in_a_dry_run(experts.to(torch.int32), tokens),
        weights.new_empty(tokens, weights.shape[1]),
        rows,
        experts.new_empty(len(x), exchange.world, dtype=torch.int32),
        exchange.no_arrivals(x),
    )


class _Dispatched(torch.autograd.Function):
    """A `_Dispatched` is the autograd node of an ExpertDispatch as plain differentiable torch, for `fo.reference()`."""

    @staticmethod
    def forward(ctx: Any, op: ExpertDispatch, x: Tensor, experts: Tensor, weights: Tensor) -> Any:
        got, side = op._dispatched(x, experts, weights)
        ctx.op = op
        ctx.save_for_backward(experts, *(side[n] for n in ("slots", "arrivals", "pos", "offs")))
        ctx.mark_non_differentiable(*(t for n, t in side.items() if n in op.integers))
        return (got.there().x, *(side[name] for name in op.writes))

    @staticmethod
    def backward(ctx: Any, dy: Any, *dside: Any) -> Any:
        dprobs = dict(zip(ctx.op.writes, dside, strict=True))["probs"]
        dx, dweights = ctx.op._returning(dy, dprobs, *ctx.saved_tensors)()
        return None, dx, None, dweights


class _Collected(torch.autograd.Function):
    """A `_Collected` is the autograd node of an ExpertCollect as plain differentiable torch."""

    @staticmethod
    def forward(ctx: Any, op: ExpertCollect, x: Tensor, slots: Tensor, arrivals: Tensor) -> Any:
        ctx.op, ctx.tokens = op, len(x)
        ctx.save_for_backward(slots, arrivals)
        return op._collected(x, slots, arrivals)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Any:
        return None, ctx.op._spread(dy, *ctx.saved_tensors, ctx.tokens), None, None
