"""A top-k router with the weight of a transformers module; it outputs logits too, for auxiliary losses."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from fuseops import kernels as K
from fuseops.errors import ShapeError
from fuseops.ops.op import Call, Grads, Op, Out, Shape, SideGrads
from fuseops.ops.paths import STAND_IN
from fuseops.ops.router import CHOICE_STAYS_HIGH

from . import stand_ins
from .recognise import Route, route_of


class LentRouterSaved(NamedTuple):
    x: Tensor | None  # (T, D)
    weight: Tensor | None  # the parameter itself
    logits: Tensor | None  # (T, E) float32
    experts: Tensor | None  # (T, K) int32


@stand_ins.owner_parameters("weight", "bias", "expert_bias")
class LentRouter(Op[LentRouterSaved]):
    """y = x W^T (+ b) in float32; publishes `experts` (T, K) int32 and `weights` (T, K) float32, as `ops.Router`.

    x (T, D) -> (T, E). Experts are chosen by logits in float32; stock models may round them first.
    """

    writes = ("weights", "experts")
    integers = frozenset({"experts"})
    floats = True
    stays_high = CHOICE_STAYS_HIGH
    saves_for = {
        "x": ("weight", "logits", "experts"),
        "weight": ("x", "logits", "experts"),
        "bias": ("logits", "experts"),
    }

    def __init__(self, route: Route, width: int, experts: int) -> None:
        super().__init__()
        self.route, self.width, self.experts = route, width, experts

    def extra_repr(self) -> str:
        return f"{self.width}, {self.experts}, {self.route}"

    def out_shape(self, shape: Shape) -> Shape:
        if len(shape) != 2 or shape[1] != self.width:
            raise ShapeError(
                f"Router expects x of shape (tokens, {self.width}), got {tuple(shape)}."
            )
        return (shape[0], self.experts)

    def fwd(
        self, x: Tensor, *, weight: Tensor, bias: Tensor | None, expert_bias: Tensor | None
    ) -> Out:
        r = self.route
        logits = K.wide_mm(x, weight)
        logits = logits if bias is None else logits + bias.to(logits.dtype)
        form = r.score, r.normalize, r.scale, expert_bias, r.groups, r.top_groups
        weights, experts, _ = K.router_fwd(logits, r.top_k, *form)
        side = {"weights": weights, "experts": experts}
        return Out(logits, LentRouterSaved(x, weight, logits, experts), side)

    def bwd(
        self, saved: LentRouterSaved, dy: Tensor | None, *, dside: SideGrads, call: Call
    ) -> Grads:
        x, weight, logits, experts = saved
        dlogits, dweights = dy, dside["weights"]
        if dweights is not None:
            form = self.route.score, self.route.normalize, self.route.scale
            through = K.router_bwd(dweights, logits, experts, *form)  # type: ignore[arg-type]
            dlogits = through if dlogits is None else dlogits + through
        params: dict[str, Tensor | None] = {}
        d: Tensor = dlogits  # type: ignore[assignment]
        if "bias" in call.needs:
            params["bias"] = d.sum(0)
        if "weight" in call.needs:
            params["weight"] = K.wide_mm(d.to(x.dtype).t(), x.t())  # type: ignore[union-attr]
        return Grads(d.to(weight.dtype) @ weight if "x" in call.needs else None, params)  # type: ignore[union-attr, operator]


def build(module: nn.Module) -> LentRouter | str:
    """The stand-in of a module, or the reason why there is none."""
    weight: Any = module._parameters["weight"]
    if (why := stand_ins.quantized_reason(weight)) is not None:
        return why
    route = route_of(module)
    if route is None:
        return "gives something else than (logits, weights, experts) of a known top-k"
    op = LentRouter(route, weight.shape[1], weight.shape[0])
    sources = {"weight": "weight"}
    if module._parameters.get("bias") is not None:
        sources["bias"] = "bias"
    if module._buffers:
        sources["expert_bias"] = "e_score_correction_bias"
    stand_ins.bind_parameters(op, module, sources)
    return op


@stand_ins.only_while_attached
def forward(self: nn.Module, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The module's forward.   -> logits (T, E), weights (T, K), experts (T, K) int64"""
    if stand_ins.is_sharded(self) or not stand_ins.is_current(self):
        return type(self).forward(self, hidden_states)
    op = self.__dict__[STAND_IN]
    logits, weights, experts = op(hidden_states.reshape(-1, op.width))
    return logits, weights, experts.to(torch.int64)
