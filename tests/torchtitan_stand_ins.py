"""Stand-ins with the interface of torchtitan's classes of today, for tests: torchtitan is not installed."""

from __future__ import annotations

import types
from dataclasses import dataclass, field, fields
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn


def module(name: str, **held: Any) -> types.ModuleType:
    made = types.ModuleType(name)
    vars(made).update(held)
    return made


def derive(cfg: Any, new: Any, **deltas: Any) -> Any:
    return new(**{f.name: getattr(cfg, f.name) for f in fields(cfg)} | deltas)


def override(*, target: Any, exact: bool = False, description: str = "") -> Any:
    assert exact and description
    return lambda factory: factory


class SwiGLU:
    def __call__(self, gate: Tensor, up: Tensor, **_: Any) -> Tensor:
        return F.silu(gate) * up


class SiTUGLU(SwiGLU):
    pass


class Linear(nn.Linear):
    """A weight (out, in), or (count, out, in) and a result of (..., count, out)."""

    def __init__(self, width: int, out: int, count: int = 1) -> None:
        super().__init__(width, count * out, bias=False)
        if count > 1:
            self.weight = nn.Parameter(self.weight.detach().unflatten(0, (count, out)))

    def forward(self, x: Tensor) -> Tensor:
        y = F.linear(x, self.weight.flatten(0, -2))
        return y.unflatten(-1, self.weight.shape[:-1]) if self.weight.dim() == 3 else y


class GroupedLinear(nn.Module):
    """A weight (E, out, in) or (E, count, out, in)."""

    def __init__(self, groups: int, width: int, out: int, count: int = 1) -> None:
        super().__init__()
        shape = (out,) if count == 1 else (count, out)
        self.weight = nn.Parameter(torch.randn(groups, *shape, width) / 3)

    def forward(self, x: Tensor, offsets: Tensor) -> Tensor:
        weight = self.weight.flatten(1, -2).bfloat16()
        counts = offsets.diff(prepend=offsets.new_zeros(1)).tolist()
        parts = [p @ w.T for p, w in zip(x[: sum(counts)].split(counts), weight, strict=True)]
        return torch.cat(parts).reshape(-1, *self.weight.shape[1:-1])


class LocalTokenDispatcher:
    def __init__(self, num_experts: int, top_k: int) -> None:
        self.num_experts, self.top_k = num_experts, top_k

    def dispatch(self, x: Tensor, scores: Tensor, ids: Tensor, counts: Tensor) -> Any:
        order = torch.argsort(ids.view(-1), stable=True)
        tokens = order // self.top_k
        return x[tokens], counts, (tokens, scores.view(-1)[order])

    def combine(self, rows: Tensor, metadata: Any, x: Tensor) -> Tensor:
        tokens, scores = metadata
        rows = (rows.float() * scores[:, None]).to(rows.dtype)
        return torch.zeros_like(x).index_add(0, tokens, rows)


class AllToAllTokenDispatcher(LocalTokenDispatcher):
    def dispatch(self, *_: Any) -> Any:
        raise AssertionError("fuseops sends the tokens")


class DeepEPTokenDispatcher(LocalTokenDispatcher):
    pass


class RoutedExperts(nn.Module):
    @dataclass(kw_only=True, slots=True)
    class Config:
        w13: tuple[int, ...]  # of GroupedLinear
        w2: tuple[int, ...]
        token_dispatcher: Any
        activation_fn: Any = field(default_factory=SwiGLU)

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.w13, self.w2 = GroupedLinear(*config.w13), GroupedLinear(*config.w2)
        self.activation_fn, self.token_dispatcher = config.activation_fn, config.token_dispatcher

    def forward(self, x: Tensor, scores: Tensor, ids: Tensor, counts: Tensor) -> Tensor:
        rows, counts, metadata = self.token_dispatcher.dispatch(x, scores, ids, counts)
        offsets = torch.cumsum(counts, 0, dtype=torch.int32)
        gate, up = self.w13(rows.bfloat16(), offsets).unbind(-2)
        y = self.w2(self.activation_fn(gate, up, offsets=offsets), offsets).type_as(rows)
        return self.token_dispatcher.combine(y, metadata, x)


class FeedForward(nn.Module):
    @dataclass(kw_only=True, slots=True)
    class Config:
        width: int
        hidden: int
        activation_fn: Any = field(default_factory=SwiGLU)

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.w13 = Linear(config.width, config.hidden, 2)
        self.w2 = Linear(config.hidden, config.width)
        self.activation_fn = config.activation_fn

    def forward(self, x: Tensor) -> Tensor:
        return self.w2(self.activation_fn(*self.w13(x).unbind(-2)))


class CrossEntropyLoss:
    def __call__(self, pred: Tensor, labels: Tensor, valid: Any = None) -> Any:
        loss = F.cross_entropy(pred.float(), labels, reduction="sum", ignore_index=-100)
        return loss if valid is None else loss / valid, {}


class ChunkedLossWrapper:
    @dataclass(kw_only=True, slots=True)
    class Config:
        num_chunks: int = 2
        loss_fn: Any = field(default_factory=CrossEntropyLoss)

    def __init__(self, config: Any) -> None:
        self.num_chunks, self.loss_fn, self.lm_head = config.num_chunks, config.loss_fn, None

    def set_lm_head(self, head: Any) -> None:
        self.lm_head = head

    def __call__(self, pred: Any, labels: Tensor, valid: Any = None, **more: Any) -> Any:
        assert self.lm_head is not None
        parts = zip(pred.chunk(self.num_chunks), labels.chunk(self.num_chunks), strict=True)
        losses = [self.loss_fn(self.lm_head(x), t, valid)[0] for x, t in parts]
        return torch.stack(losses).sum(), {}


def modules(mesh: Any = None) -> dict[str, types.ModuleType]:
    """mesh: torchtitan's sparse one, with an axis "ep"."""
    found = [
        module("torchtitan"),
        module("torchtitan.config", override=override, derive=derive),
        module("torchtitan.models"),
        module("torchtitan.models.common"),
        module("torchtitan.models.common.moe", RoutedExperts=RoutedExperts),
        module("torchtitan.models.common.feed_forward", FeedForward=FeedForward),
        module("torchtitan.components"),
        module("torchtitan.components.loss", ChunkedLossWrapper=ChunkedLossWrapper),
        module("torchtitan.distributed"),
        module(
            "torchtitan.distributed.spmd_types",
            spmd_sparse_mesh=lambda: mesh,
            spmd_mesh_size=lambda axis: 1,
        ),
    ]
    return {m.__name__: m for m in found}
