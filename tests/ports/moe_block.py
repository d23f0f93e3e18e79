"""Port 2: a transformer-MoE in torchtitan's style, beside the same model with its norms, linears and experts as ops.

Attention is plain torch, the same class in both models; router and experts are one `fo.MoE`. Keys of a state_dict are
those of the stock model: `w1` (gate), `w3` (up) and `w2` (down) of the experts, which the port packs as `[gate | up]`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from port import Tensors
from torch import Tensor, nn

import fuseops as fo

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


class StockExperts(nn.Module):
    """SwiGLU experts as a loop over rows sorted by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.randn(EXPERTS, HIDDEN, DIM) / DIM**0.5)
        self.w2 = nn.Parameter(torch.randn(EXPERTS, DIM, HIDDEN) / HIDDEN**0.5)
        self.w3 = nn.Parameter(torch.randn(EXPERTS, HIDDEN, DIM) / DIM**0.5)

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """x (T, D), chosen (T, K), weights (T, K) -> (T, D)"""
        order = torch.argsort(chosen.flatten(), stable=True)
        counts = F.one_hot(chosen.flatten(), EXPERTS).sum(0).tolist()
        parts = x[order // TOP_K].split(counts)
        y = torch.cat(
            [
                F.linear(F.silu(F.linear(part, w1)) * F.linear(part, w3), w2)
                for part, w1, w2, w3 in zip(parts, self.w1, self.w2, self.w3, strict=True)
            ]
        )
        y = (y * weights.flatten()[order, None]).to(x.dtype)
        return torch.zeros_like(x).index_add(0, order // TOP_K, y)


class MoE(nn.Module):
    """Router and experts."""

    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = Router(), StockExperts()

    def forward(self, x: Tensor, aux_scale: Tensor) -> Tensor:
        tokens = x.flatten(0, -2)
        weights, chosen = self.router(tokens, aux_scale)
        return self.experts(tokens, chosen, weights).view_as(x)


class StockBlock(nn.Module):
    """Pre-norm residuals."""

    def __init__(self) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(DIM, eps=1e-6)
        self.attention = Attention(nn.Linear)
        self.ffn_norm = nn.RMSNorm(DIM, eps=1e-6)
        self.moe = MoE()

    def forward(self, x: Tensor, aux_scale: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x))
        return x + self.moe(self.ffn_norm(x), aux_scale)


class PortedBlock(nn.Module):
    """The same of ops: a Residual where a plain module takes one tensor, an op alone where it takes more."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = fo.Residual(
            {"norm": fo.ops.RMSNorm(DIM, eps=1e-6), "attention": Attention(fo.ops.Linear)}
        )
        self.ffn_norm = fo.ops.RMSNorm(DIM, eps=1e-6)
        self.moe = fo.MoE(DIM, HIDDEN, EXPERTS, TOP_K, balance_loss=AUX_WEIGHT, aux="inject")

    def forward(self, x: Tensor, _: Tensor) -> Tensor:
        x = self.attention(x)
        return x + self.moe(self.ffn_norm(x))


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
    ("moe.router.weight", "moe.router.gate.weight"),
    ("moe.fc2.weight", "moe.experts.w2"),
)


class MoEBlock:
    """The port, as the matrix sees it."""

    name = "moe_block"
    lora = ("wq", "wv")

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
        for module in model.modules():  # those of the port have the scale before the forward
            if isinstance(module, fo.MoE):
                module.loss_scale = batch.aux_scale
        logits = model(batch.tokens, batch.aux_scale)
        return logits, F.cross_entropy(logits.flatten(0, 1), batch.labels.flatten())

    def blocks(self, model: nn.Module) -> list[nn.Module]:
        return list(model.layers)  # type: ignore[arg-type]

    def experts(self, model: nn.Module) -> list[nn.Parameter]:
        kinds = (".experts.", ".fc1.", ".fc2.")  # of the stock model, and of the port
        return [p for name, p in model.named_parameters() if any(k in name for k in kinds)]

    def to_stock(self, tensors: Tensors) -> dict[str, Tensor]:
        stock: dict[str, Tensor] = {}
        for key, t in tensors.items():
            if key.endswith("moe.fc1.weight"):
                w1, w3 = (None, None) if t is None else t.chunk(2, dim=1)
                base = key.removesuffix("fc1.weight")
                stock |= {f"{base}experts.w1": w1, f"{base}experts.w3": w3}
            else:
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
                ported[key.removesuffix("experts.w1") + "fc1.weight"] = packed
            elif not key.endswith("experts.w3"):
                key = key.replace("experts.w2", "fc2.weight").replace("router.gate.", "router.")
                key = key.replace("attention.w", "attention.attention.w")
                ported[key.replace("attention_norm.", "attention.norm.")] = t
        return ported


PORT = MoEBlock()
