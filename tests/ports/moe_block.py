"""Port 2: a transformer-MoE in torchtitan's style, beside the same model with its norms, linears and experts as ops.

Attention, router and the exchange of rows are plain torch, the same classes in both models. Keys of a state_dict are
those of the stock model: `w1` (gate), `w3` (up) and `w2` (down) of the experts, which the port packs as `[gate | up]`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed._functional_collectives import all_to_all_single_autograd

import fuseops as fo

from .port import Tensors

DIM, HIDDEN, EXPERTS, TOP_K, HEADS, VOCAB, BLOCKS = 16, 16, 4, 2, 2, 32, 2
SEQUENCES, LENGTH = 2, 6
AUX_WEIGHT = 0.1  # large: a gradient without the auxiliary loss must not pass for rounding


class Batch(NamedTuple):
    """One micro-batch."""

    tokens: Tensor  # (SEQUENCES, LENGTH) int64
    labels: Tensor  # (SEQUENCES, LENGTH) int64
    aux_scale: Tensor  # (): weight of the auxiliary loss in this micro-batch


class InjectLoss(torch.autograd.Function):
    """y = x; backward adds the gradient of `scale * loss`, though nobody adds the loss to the training loss."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, loss: Tensor, scale: Tensor) -> Tensor:
        ctx.save_for_backward(scale)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[override]
        (scale,) = ctx.saved_tensors
        return dy, scale.clone(), None


class Router(nn.Module):
    """Top-k of softmax scores, renormalised, with a load-balancing loss injected as a gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(DIM, EXPERTS, bias=False)

    def forward(self, x: Tensor, aux_scale: Tensor) -> tuple[Tensor, Tensor]:
        """x (T, D) -> weights (T, K), experts (T, K)"""
        scores = F.softmax(self.gate(x), dim=-1)
        experts = torch.topk(scores.detach(), TOP_K, dim=-1).indices
        load = F.one_hot(experts, EXPERTS).to(scores.dtype).mean((0, 1))
        balance = AUX_WEIGHT * EXPERTS * (load * scores.mean(0)).sum()
        scores = InjectLoss.apply(scores, balance, aux_scale.to(balance.dtype))
        weights = scores.gather(1, experts)
        return weights / weights.sum(-1, keepdim=True), experts


class Attention(nn.Module):
    """Causal self-attention."""

    def __init__(self, linear: Callable[..., nn.Module]) -> None:
        super().__init__()
        for name in ("wq", "wk", "wv", "wo"):
            self.add_module(name, linear(DIM, DIM, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            w(x).unflatten(-1, (HEADS, -1)).transpose(1, 2) for w in (self.wq, self.wk, self.wv)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.wo(y.transpose(1, 2).flatten(-2))


class Exchange:
    """Expert parallelism: every row travels to the rank of its expert and back, in uneven splits."""

    def __init__(self, group: Any, counts: Tensor) -> None:
        """counts (E,): this rank's rows of every expert."""
        self.group, world = group, dist.get_world_size(group)
        local = len(counts) // world
        received = torch.empty_like(counts)  # of every rank: rows of the experts that live here
        dist.all_to_all_single(received, counts, group=group)
        self.sent = counts.view(world, local).sum(1).tolist()
        self.received = received.view(world, local).sum(1).tolist()
        self.counts = received.view(world, local).sum(0)  # (E / world,): rows of the experts here
        expert = torch.arange(local, device=counts.device).repeat(world)
        self.order = torch.argsort(expert.repeat_interleave(received), stable=True)
        self.back = torch.argsort(self.order)

    def there(self, rows: Tensor) -> Tensor:
        """Rows by expert on the rank of their token -> rows by expert on the rank of their expert."""
        rows = all_to_all_single_autograd(rows, self.received, self.sent, self.group)
        return rows[self.order]

    def home(self, rows: Tensor) -> Tensor:
        """The way back."""
        return all_to_all_single_autograd(
            rows[self.back].contiguous(), self.sent, self.received, self.group
        )


class StockExperts(nn.Module):
    """SwiGLU experts as a loop."""

    def __init__(self, experts: int) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.randn(experts, HIDDEN, DIM) / DIM**0.5)
        self.w2 = nn.Parameter(torch.randn(experts, DIM, HIDDEN) / HIDDEN**0.5)
        self.w3 = nn.Parameter(torch.randn(experts, HIDDEN, DIM) / DIM**0.5)

    def forward(self, x: Tensor, offs: Tensor) -> Tensor:
        y, start = torch.zeros_like(x), torch.zeros_like(offs[0])
        row = torch.arange(len(x), device=x.device)[:, None]
        for w1, w2, w3, end in zip(self.w1, self.w2, self.w3, offs, strict=True):
            mine = F.linear(F.silu(F.linear(x, w1)) * F.linear(x, w3), w2)
            y = torch.where((row >= start) & (row < end), mine.to(y.dtype), y)
            start = end
        return y


class MoE(nn.Module):
    """Router, experts, weighted sum. Subclasses say how rows go through the experts."""

    group: Any = None  # of expert parallelism

    def __init__(self, experts: nn.Module) -> None:
        super().__init__()
        self.router, self.experts = Router(), experts

    def forward(self, x: Tensor, aux_scale: Tensor) -> Tensor:
        tokens = x.flatten(0, -2)
        weights, experts = self.router(tokens, aux_scale)
        return self.routed(tokens, weights, experts).to(x.dtype).view_as(x)

    def routed(self, x: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        raise NotImplementedError


class StockMoE(MoE):
    """Sorts rows by hand."""

    def routed(self, x: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        flat = experts.flatten()
        order = torch.argsort(flat, stable=True)
        token, rows = order // TOP_K, x[order // TOP_K]
        counts = F.one_hot(flat, EXPERTS).sum(0)
        if self.group is None:
            y = self.experts(rows, counts.cumsum(0))
        else:
            exchange = Exchange(self.group, counts)
            y = exchange.home(self.experts(exchange.there(rows), exchange.counts.cumsum(0)))
        return torch.zeros_like(x).index_add(
            0, token, (y * weights.flatten()[order, None]).to(x.dtype)
        )


class PortedMoE(MoE):
    """fo.Routing sorts the rows; the probabilities travel with them."""

    def routed(self, x: Tensor, weights: Tensor, experts: Tensor) -> Tensor:
        routing = fo.Routing.from_topk(experts, weights, num_experts=EXPERTS)
        rows = x[routing.index]
        if self.group is None:
            y = self.experts(rows, routing)
        else:
            counts = routing.offs.diff(prepend=routing.offs.new_zeros(1)).long()
            exchange = Exchange(self.group, counts)
            probs = exchange.there(routing.probs[:, None]).squeeze(1)
            here = fo.Routing.from_counts(exchange.counts, probs)
            y = exchange.home(self.experts(exchange.there(rows), here))
        return torch.zeros_like(x).index_add(0, routing.index, y.to(x.dtype))


class StockBlock(nn.Module):
    """Pre-norm residuals."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(DIM, eps=1e-6)
        self.attention = Attention(nn.Linear)
        self.ffn_norm = nn.RMSNorm(DIM, eps=1e-6)
        self.moe = StockMoE(StockExperts(EXPERTS))

    def forward(self, x: Tensor, aux_scale: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.moe(self.ffn_norm(x), aux_scale)


def ported_experts(experts: int) -> fo.Sequential:
    return fo.Sequential(
        {
            "fc1": fo.ops.GroupedLinear(experts, DIM, 2 * HIDDEN, bias=False),
            "act": fo.ops.ScaledSwiGLU(),
            "fc2": fo.ops.GroupedLinear(experts, HIDDEN, DIM, bias=False),
        }
    )


class PortedBlock(nn.Module):
    """The same of ops: a Residual where a plain module takes one tensor, an op alone where it takes more."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = fo.Residual(
            {"norm": fo.ops.RMSNorm(DIM, eps=1e-6), "attention": Attention(fo.ops.Linear)}
        )
        self.ffn_norm = fo.ops.RMSNorm(DIM, eps=1e-6)
        self.moe = PortedMoE(ported_experts(EXPERTS))

    def forward(self, x: Tensor, aux_scale: Tensor) -> Tensor:
        x = self.attention(x)
        return x + self.moe(self.ffn_norm(x), aux_scale)


class Transformer(nn.Module):
    """Embedding, blocks, norm, head."""

    def __init__(self, block: type[nn.Module], norm: nn.Module, head: nn.Module) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCAB, DIM)
        self.layers = nn.ModuleList(block() for _ in range(BLOCKS))
        self.norm, self.output = norm, head

    def forward(self, tokens: Tensor, aux_scale: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, aux_scale)
        return self.output(self.norm(x))


KEYS = (  # of the port, of the stock model
    ("attention.norm.", "attention_norm."),
    ("attention.attention.", "attention."),
)


class MoEBlock:
    """The port, as the matrix sees it."""

    name = "torchtitan MoE"

    def stock(self) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(2)
            model = Transformer(
                StockBlock, nn.RMSNorm(DIM, eps=1e-6), nn.Linear(DIM, VOCAB, bias=False)
            ).double()
            for p in model.parameters():
                if p.dim() == 1:  # a norm's weight of one would hide that it is left out
                    nn.init.uniform_(p, 0.5, 1.5)
        return model

    def ported(self) -> nn.Module:
        with torch.random.fork_rng(devices=[]):
            model = Transformer(
                PortedBlock,
                fo.ops.RMSNorm(DIM, eps=1e-6),
                fo.ops.Linear(DIM, VOCAB, bias=False),
            ).double()
        model.load_state_dict(self.to_ported(self.stock().state_dict()))
        return model

    def batch(self, index: int) -> Batch:
        g = torch.Generator().manual_seed(100 + index)
        tokens, labels = (torch.randint(VOCAB, (SEQUENCES, LENGTH), generator=g) for _ in range(2))
        return Batch(tokens, labels, torch.tensor(1 / (index + 1), dtype=torch.float64))

    def loss(self, model: nn.Module, batch: Batch) -> tuple[Tensor, Tensor]:
        logits = model(batch.tokens, batch.aux_scale)
        return logits, F.cross_entropy(logits.flatten(0, 1), batch.labels.flatten())

    def blocks(self, model: nn.Module) -> list[nn.Module]:
        return list(model.layers)  # type: ignore[arg-type]

    def experts(self, model: nn.Module) -> list[nn.Parameter]:
        return [p for name, p in model.named_parameters() if ".experts." in name]

    def to_stock(self, tensors: Tensors) -> dict[str, Tensor]:
        stock: dict[str, Tensor] = {}
        for key, t in tensors.items():
            if key.endswith("experts.fc1.weight"):
                w1, w3 = (None, None) if t is None else t.chunk(2, dim=1)
                base = key.removesuffix("fc1.weight")
                stock |= {f"{base}w1": w1, f"{base}w3": w3}
            else:
                key = key.replace("experts.fc2.weight", "experts.w2")
                for ours, theirs in KEYS:
                    key = key.replace(ours, theirs)
                stock[key] = t
        return stock

    def to_ported(self, tensors: Tensors) -> dict[str, Tensor]:
        ported: dict[str, Tensor] = {}
        for key, t in tensors.items():
            if key.endswith("experts.w1"):
                up = tensors[key.removesuffix("1") + "3"]
                packed = None if t is None else torch.cat([t, up], dim=1)
                ported[key.removesuffix("w1") + "fc1.weight"] = packed
            elif not key.endswith("experts.w3"):
                key = key.replace("experts.w2", "experts.fc2.weight")
                key = key.replace("attention.w", "attention.attention.w")
                ported[key.replace("attention_norm.", "attention.norm.")] = t
        return ported


def split_experts(model: nn.Module, group: Any) -> nn.Module:
    """Keep this rank's experts alone, and exchange rows with the other ranks of the group."""
    rank, world = dist.get_rank(group), dist.get_world_size(group)
    build = partial(_local, count=EXPERTS // world, first=rank * (EXPERTS // world))
    for module in model.modules():
        if isinstance(module, MoE):
            module.group, module.experts = group, build(module.experts)
    return model


def _local(experts: nn.Module, count: int, first: int) -> nn.Module:
    """Experts first to first + count, as a module of that size."""
    some = ported_experts(count) if isinstance(experts, fo.Sequential) else StockExperts(count)
    weights = {k: t[first : first + count] for k, t in experts.state_dict().items()}
    some.to(next(iter(weights.values())))
    some.load_state_dict(weights)
    return some
