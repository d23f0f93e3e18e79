"""Port 1: transformers' Qwen3-MoE, one layer of experts and one dense, ported by the example that users read."""

from __future__ import annotations

import importlib.util
import itertools
import sys
from pathlib import Path
from typing import Any

import torch
from port import Tensors
from torch import Tensor, nn
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeRMSNorm, Qwen3MoeTopKRouter

import fuseops as fo
from fuseops.integrations import hf

EXAMPLE = Path(__file__).resolve().parents[2] / "examples" / "hf_qwen3_moe.py"
VOCABULARY = 32


def _example() -> Any:
    spec = importlib.util.spec_from_file_location(EXAMPLE.stem, EXAMPLE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[EXAMPLE.stem] = module  # pickle and dynamo import a class by the name of its module
    spec.loader.exec_module(module)
    return module


example = _example()


def config() -> Qwen3MoeConfig:
    return Qwen3MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=24,
        moe_intermediate_size=8,
        num_hidden_layers=2,
        mlp_only_layers=[1],
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
        norm_topk_prob=True,
        use_cache=False,
        initializer_range=0.2,
        experts_implementation="eager",
    )


def _replace(model: nn.Module, kind: type[nn.Module], new: Any) -> None:
    """Every child of `kind`, exactly, by what `new` makes of it, with its weights."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if type(child) is kind:
                made = new(child).to(next(child.parameters()).dtype)
                made.load_state_dict(child.state_dict())
                setattr(parent, name, made)


class Router(Qwen3MoeTopKRouter):
    """The stock router in the dtype of its weight: transformers' takes the softmax in float32."""

    def forward(self, hidden_states: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        logits = nn.functional.linear(hidden_states, self.weight)
        weights, chosen = logits.softmax(-1).topk(self.top_k)
        return logits, weights / weights.sum(-1, keepdim=True), chosen


class Qwen3MoE:
    name = "qwen3_moe"
    lora = ("q_proj", "v_proj")

    def stock(self) -> Qwen3MoeForCausalLM:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = Qwen3MoeForCausalLM(config()).double().train()
            for weight in model.parameters():
                if weight.dim() == 1:  # norms begin as ones, which hide a gradient's mistakes
                    nn.init.uniform_(weight, 0.5, 1.5)
        # Norms and routers of transformers round to float32 whatever the dtype of the model.
        _replace(model, Qwen3MoeTopKRouter, lambda router: Router(model.config))
        _replace(
            model,
            Qwen3MoeRMSNorm,
            lambda norm: nn.RMSNorm(norm.weight.shape[0], eps=norm.variance_epsilon),
        )
        return model

    def ported(self) -> Qwen3MoeForCausalLM:
        """The example's port, and the attention's projections as ops that are called alone."""
        model = example.ported(self.stock())
        _replace(model, nn.RMSNorm, lambda m: fo.ops.RMSNorm(m.normalized_shape, eps=m.eps))
        _replace(
            model,
            nn.Linear,
            lambda m: fo.ops.Linear(m.in_features, m.out_features, bias=m.bias is not None),
        )
        return model

    def batch(self, index: int) -> Tensor:
        draw = torch.Generator().manual_seed(100 + index)
        return torch.randint(VOCABULARY, (2, 5), generator=draw)

    def loss(self, model: nn.Module, batch: Tensor) -> tuple[Tensor, Tensor]:
        logits = model(input_ids=batch).logits
        loss = nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), batch[:, 1:].flatten())
        return logits, loss

    def blocks(self, model: nn.Module) -> list[nn.Module]:
        return list(model.model.layers)

    def experts(self, model: nn.Module) -> list[nn.Parameter]:
        layers = (
            layer.mlp.experts for layer in self.blocks(model) if hasattr(layer.mlp, "experts")
        )
        return list(itertools.chain.from_iterable(e.parameters() for e in layers))

    def to_stock(self, tensors: Tensors) -> dict[str, Tensor]:
        return hf.to_hf(tensors)

    def to_ported(self, tensors: Tensors) -> dict[str, Tensor]:
        return hf.to_fuseops(tensors)


PORT = Qwen3MoE()
