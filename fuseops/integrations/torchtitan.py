"""Experts, token dispatch, feed-forward layers and the head's loss of torchtitan by fuseops, by its own overrides.

    --override.imports fuseops.integrations.torchtitan.routed_experts fuseops.integrations.torchtitan.feed_forward \\
        fuseops.integrations.torchtitan.chunked_loss

Parameters, their names, their sharding and their checkpoints stay torchtitan's, as do routers. Two forms of its classes
are known: `RoutedExperts` and FeedForward over a `w13` (2, F, D), which is `[gate | up]` without a copy; and, in its
versions before, `GroupedExperts` (the override `grouped_experts`, behind torchtitan's dispatcher in every degree) and
FeedForward over w1 and w3, which are copied together in each call. What has another form runs as torchtitan's own, and
the log says why.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import logging
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torchtitan.config import derive, override
from torchtitan.models.common.feed_forward import FeedForward

from fuseops import ops, torch_private
from fuseops.distributed.dispatch import ExpertCollect, ExpertDispatch
from fuseops.distributed.dispatch.choose import choose
from fuseops.errors import FuseOpsError
from fuseops.layers import Sequential

log = logging.getLogger("fuseops.fusion")
STOCK = "torchtitan"  # a way of tokens: by the dispatcher that the config has
# in a module's `__dict__`, where it is no child: it has no parameters of its own
_BUILT = "_fuseops"


def _known(module: str, name: str) -> Any:
    """A class of torchtitan that some of its versions do not have: None there."""
    try:
        return getattr(importlib.import_module(f"torchtitan.{module}"), name, None)
    except ImportError:
        return None


GroupedExperts: Any = _known("models.common.moe", "GroupedExperts")
RoutedExperts: Any = _known("models.common.moe", "RoutedExperts")
if RoutedExperts is not None and "w13" not in RoutedExperts.Config.__dataclass_fields__:
    RoutedExperts = None  # around GroupedExperts, which is overridden by itself
ChunkedLossWrapper: Any = _known("components.loss", "ChunkedLossWrapper")


# --- what both forms share


def _override(name: str, target: Any, description: str) -> Any:
    """torchtitan's decorator, which takes a name in some versions."""
    named = "name" in inspect.signature(override).parameters
    given = {"target": target, "exact": True, "description": description}
    return override(f"fuseops_{name}", **given) if named else override(**given)


@functools.cache
def _tell(what: str, reason: str) -> None:
    log.warning("a %s runs as torchtitan's own: %s", what, reason)


def _local(weight: Any) -> Tensor:
    return weight.to_local() if torch_private.is_dtensor(type(weight)) else weight


def _mlp(module: nn.Module, weights: dict[str, Tensor]) -> Sequential:
    """The MLP that a layer's weights are given to: one for as long as their shapes stay."""
    fc1, fc2 = weights["fc1.weight"], weights["fc2.weight"]
    shapes = fc1.shape, fc2.shape
    known = module.__dict__.get(_BUILT)
    if known is None or known[0] != shapes:
        children = {"fc1": _product(fc1), "act": ops.SwiGLU(), "fc2": _product(fc2)}
        known = module.__dict__[_BUILT] = shapes, Sequential(children)
    return known[1]


def _product(weight: Tensor) -> Any:
    *groups, out, width = weight.shape
    make: Any = ops.GroupedLinear if groups else ops.Linear
    return make(*groups, width, out, bias=False, device="meta")


def _plain(child: Any, kind: str) -> str | None:
    """Why the product of a child is not to be taken from it, or None."""
    weight = getattr(child, "weight", None)
    if weight is None:
        return "has no weight"
    if type(child).__name__ != kind:
        return f"is a {type(child).__name__}"
    if type(weight) is not nn.Parameter and not torch_private.is_dtensor(type(weight)):
        return f"has a weight that is a {type(weight).__name__}"
    if getattr(child, "bias", None) is not None:
        return "has a bias"
    if child._forward_hooks or child._forward_pre_hooks:
        return "has hooks"
    return None


def _not_swiglu(layer: Any) -> str | None:
    act = getattr(layer, "activation_fn", None)
    inner = getattr(act, "fn", act)  # in some versions inside of a module
    name = type(inner).__name__
    return None if act is None or name in ("SwiGLU", "FusedSwiGLU") else f"its activation is {name}"


# --- feed-forward


@dataclass(kw_only=True, slots=True)
class FeedForwardConfig(FeedForward.Config):  # type: ignore[misc]
    """The config of `FusedFeedForward`: that of FeedForward under a name of its own."""


class FusedFeedForward(FeedForward):  # type: ignore[misc]
    """torchtitan's FeedForward by fuseops.   (..., D) -> (..., D)"""

    Config = FeedForwardConfig  # under the name by which torchtitan finds it

    def forward(self, x: Tensor) -> Tensor:
        packed = getattr(self, "w13", None) is not None
        reason = _why_not(self, ("w13", "w2") if packed else ("w1", "w2", "w3"))
        if reason is not None:
            _tell("FeedForward", reason)
            return super().forward(x)
        if packed:
            fc1 = self.w13.weight.flatten(0, 1)
        else:
            fc1 = torch.cat([self.w1.weight, self.w3.weight])
        given = {"fc1.weight": fc1, "fc2.weight": self.w2.weight}
        return functional_call(_mlp(self, given), given, (x,))


def _why_not(layer: Any, names: tuple[str, ...]) -> str | None:
    """Why a feed-forward layer runs as torchtitan's own, or None."""
    for name in names:
        child = getattr(layer, name, None)
        reason = _plain(child, "Linear")
        if reason is None and torch_private.is_dtensor(type(child.weight)):  # type: ignore[union-attr]
            reason = "has a DTensor for a weight, whose layout is torchtitan's to keep"
        if reason is None and name == "w13" and child.weight.dim() != 3:  # type: ignore[union-attr]
            reason = "is interleaved, and no stack of gate and up"
        if reason is not None:
            return f"{name} {reason}"
    return _not_swiglu(layer)


@_override("feed_forward", FeedForward.Config, "The feed-forward layer by fuseops.")
def feed_forward(cfg: Any) -> Any:
    """A config of FeedForward made one of `FusedFeedForward`."""
    return derive(cfg, FusedFeedForward.Config)


# --- experts


if RoutedExperts is not None:

    @dataclass(kw_only=True, slots=True)
    class RoutedExpertsConfig(RoutedExperts.Config):  # type: ignore[misc]
        """The config of `FusedRoutedExperts`: that of RoutedExperts, and how tokens travel."""

        way: str | None = None
        capacity: float = 1.5

    class FusedRoutedExperts(RoutedExperts):  # type: ignore[misc]
        """torchtitan's RoutedExperts by fuseops, token dispatch included.   x (T, D), scores, ids (T, K) -> (T, D)

        way: as of `fuseops.distributed.ExpertParallel`, over the "ep" axis of torchtitan's sparse mesh, in the place of
            its local and its all-to-all dispatcher. "torchtitan", and any other dispatcher: tokens travel by that, and
            the experts between are fuseops'.
        capacity: of the ways that have a bound.
        """

        Config = RoutedExpertsConfig

        def __init__(self, config: Any) -> None:
            super().__init__(config)
            self.way, self.capacity = config.way, config.capacity

        def forward(self, x: Tensor, scores: Tensor, ids: Tensor, counts: Tensor) -> Tensor:
            reason = next(
                (
                    f"{name} {why}"
                    for name in ("w13", "w2")
                    if (why := _plain(getattr(self, name, None), "GroupedLinear"))
                ),
                _not_swiglu(self),
            )
            if reason is not None:
                _tell("RoutedExperts", reason)
                return super().forward(x, scores, ids, counts)
            given = {
                "fc1.weight": _local(self.w13.weight).flatten(1, 2).bfloat16(),
                "fc2.weight": _local(self.w2.weight).bfloat16(),
            }
            stock = self.token_dispatcher
            known = type(stock).__name__ in ("LocalTokenDispatcher", "AllToAllTokenDispatcher")
            if self.way != STOCK and known:
                side = {"experts": ids.to(torch.int32), "weights": scores}
                layer = _experts(self, given, stock)
                return functional_call(layer, given, (x.bfloat16(),), side).type_as(x)
            rows, counts, metadata = stock.dispatch(x, scores, ids, counts)
            side = {"offs": torch.cumsum(counts, 0, dtype=torch.int32)}
            y = functional_call(_mlp(self, given), given, (rows.bfloat16(),), side)
            return stock.combine(y.type_as(rows), metadata, x)

    def _experts(module: Any, weights: dict[str, Tensor], dispatcher: Any) -> Sequential:
        """What runs the experts and sends their tokens: one for as long as its shapes stay."""
        fc1, fc2 = weights["fc1.weight"], weights["fc2.weight"]
        count, top_k = dispatcher.num_experts, dispatcher.top_k
        shapes = fc1.shape, fc2.shape, top_k
        known = module.__dict__.get(_BUILT)
        if known is None or known[0] != shapes:
            dispatch, after = _dispatch(module, count, top_k, len(fc1))
            children = {
                "dispatch": dispatch,
                "permute": ops.Permute(top_k),
                "fc1": _product(fc1),
                "act": ops.ScaledSwiGLU(),
                "fc2": _product(fc2),
                "combine": ops.Combine(top_k),
                **after,
            }
            known = module.__dict__[_BUILT] = shapes, Sequential(children)
        return known[1]

    def _dispatch(module: Any, count: int, top_k: int, here: int) -> tuple[Any, dict[str, Any]]:
        """What sends tokens to `count` experts, `here` of them on this rank, and what brings the sums home."""
        if here == count:
            return ops.Dispatch(count), {}
        mesh = _known("distributed.spmd_types", "spmd_sparse_mesh")()
        mesh = None if mesh is None else mesh["ep"]
        if mesh is None or mesh.size() * here != count:
            raise FuseOpsError(
                f"RoutedExperts has {here} of {count} experts on this rank, and torchtitan's sparse mesh "
                f"{'is not there' if mesh is None else f'has {mesh.size()} ranks of experts'}: shard w13 and w2 by "
                "experts alone, or take the override with way='torchtitan'."
            )
        limits = {"capacity": module.capacity, "tokens": 0}
        exchange = choose(module.way, mesh, count, top_k, **limits)
        return ExpertDispatch(exchange), {"collect": ExpertCollect(exchange)}

    @_override("routed_experts", RoutedExperts.Config, "Experts and token dispatch by fuseops.")
    def routed_experts(cfg: Any, *, way: str | None = None, capacity: float = 1.5) -> Any:
        """A config of RoutedExperts made one of `FusedRoutedExperts`; way and capacity: as of `ExpertParallel`."""
        return derive(cfg, FusedRoutedExperts.Config, way=way, capacity=capacity)


if GroupedExperts is not None:

    @dataclass(kw_only=True, slots=True)
    class ExpertsConfig(GroupedExperts.Config):  # type: ignore[misc]
        """The config of `FusedExperts`: that of GroupedExperts under a name of its own."""

    class FusedExperts(GroupedExperts):  # type: ignore[misc]
        """torchtitan's GroupedExperts, its MLP by fuseops.   (R, D), (E,) tokens of each expert -> (R, D)"""

        Config = ExpertsConfig

        def _by_fuseops(self, x: Tensor, counts: Tensor, *_: Any, **__: Any) -> Tensor:
            w1, w2, w3 = (_local(_weight(self, number)).bfloat16() for number in (1, 2, 3))
            offs = torch.cumsum(counts, 0, dtype=torch.int32)
            given = {"fc1.weight": torch.cat([w1, w3], 1), "fc2.weight": w2}
            y = functional_call(_mlp(self, given), given, (x.bfloat16(),), {"offs": offs})
            return y.type_as(x)

        # later versions dispatch in `forward`, and compute in a method of its own
        if "_experts_forward" in vars(GroupedExperts):
            _experts_forward = _by_fuseops
        else:
            forward = _by_fuseops

    def _weight(module: nn.Module, number: int) -> Any:
        """w1, w2 or w3, which later versions name by their axes too."""
        return next(p for name, p in module._parameters.items() if name.startswith(f"w{number}"))

    @_override("grouped_experts", GroupedExperts.Config, "The experts' MLP by fuseops.")
    def grouped_experts(cfg: Any) -> Any:
        """A config of GroupedExperts made one of `FusedExperts`."""
        return derive(cfg, FusedExperts.Config)


# --- the loss


if ChunkedLossWrapper is not None:

    @dataclass(kw_only=True, slots=True)
    class ChunkedLossConfig(ChunkedLossWrapper.Config):  # type: ignore[misc]
        """The config of `FusedChunkedLoss`: that of ChunkedLossWrapper under a name of its own."""

    class FusedChunkedLoss(ChunkedLossWrapper):  # type: ignore[misc]
        """torchtitan's chunked cross entropy as one `ops.LinearCrossEntropy`: gradients are made with the loss.

        pred (T, D) hidden states, labels (T,) -> the sum of the losses over `global_valid_tokens`, and no metrics.
        """

        Config = ChunkedLossConfig

        def __call__(
            self, pred: Any, labels: Any, global_valid_tokens: Tensor | None = None, **more: Any
        ) -> tuple[Tensor, dict[str, Tensor]]:
            reason = _why_not_loss(self, pred, more)
            if reason is not None:
                _tell("ChunkedLossWrapper", reason)
                return super().__call__(pred, labels, global_valid_tokens, **more)
            loss = _of_head(self.lm_head, pred, labels)
            return (loss if global_valid_tokens is None else loss / global_valid_tokens), {}

    def _why_not_loss(loss: Any, pred: Any, more: dict[str, Any]) -> str | None:
        if type(loss.loss_fn).__name__ != "CrossEntropyLoss":
            return f"the loss of a chunk is a {type(loss.loss_fn).__name__}"
        if type(pred) is not Tensor or more:
            return "it takes more than one plain tensor of hidden states"
        size = _known("distributed.spmd_types", "spmd_mesh_size")
        if size is not None and size("tp") > 1:
            return "the head is spread over ranks by its vocabulary"
        names = {cls.__name__ for cls in type(loss.lm_head).__mro__}
        if "Linear" not in names or getattr(loss.lm_head, "bias", None) is not None:
            return f"the head is a {type(loss.lm_head).__name__}, or has a bias"
        return None

    def _of_head(head: Any, x: Tensor, labels: Tensor) -> Tensor:
        """The sum of the losses, inside of the head's own call: there FSDP2 has gathered its weight."""

        def forward(x: Tensor) -> Tensor:
            vocabulary, width = head.weight.shape
            op = ops.LinearCrossEntropy(width, vocabulary, reduction="sum", device="meta")
            return functional_call(op, {"weight": head.weight}, (x,), {"targets": labels})

        before = head.__dict__.get("forward")
        head.__dict__["forward"] = forward
        try:
            return head(x)
        finally:
            if before is None:
                del head.__dict__["forward"]
            else:
                head.__dict__["forward"] = before

    @_override("chunked_loss", ChunkedLossWrapper.Config, "The head's cross entropy by fuseops.")
    def chunked_loss(cfg: Any) -> Any:
        """A config of ChunkedLossWrapper made one of `FusedChunkedLoss`."""
        return derive(cfg, FusedChunkedLoss.Config)
