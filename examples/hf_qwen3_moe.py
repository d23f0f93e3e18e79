"""A stock Hugging Face Qwen3-MoE with its experts, MLPs and norms replaced by fuseops, under stock checkpoint keys."""

import copy
from typing import Any

import torch
from torch import Tensor, nn
from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

import fuseops as fo
from fuseops.integrations import hf


class Experts(fo.Sequential):
    """Stands in for `Qwen3MoeExperts`, and is called as that is."""

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x, experts=chosen, weights=weights)


def experts(config: Qwen3MoeConfig) -> Experts:
    e, k = config.num_experts, config.num_experts_per_tok
    d, f = config.hidden_size, config.moe_intermediate_size
    fc1 = fo.ops.GroupedLinear(e, d, 2 * f, bias=False)
    fc2 = fo.ops.GroupedLinear(e, f, d, bias=False)
    rows = {"dispatch": fo.ops.Dispatch(e), "permute": fo.ops.Permute(k)}
    mlp = {"fc1": fc1, "act": fo.ops.ScaledSwiGLU(), "fc2": fc2}
    return Experts({**rows, **mlp, "combine": fo.ops.Combine(k)})


def mlp(config: Qwen3MoeConfig) -> fo.Sequential:
    d, f = config.hidden_size, config.intermediate_size
    fc1, fc2 = fo.ops.Linear(d, 2 * f, bias=False), fo.ops.Linear(f, d, bias=False)
    return fo.Sequential({"fc1": fc1, "act": fo.ops.SwiGLU(), "fc2": fc2})


def ported(stock: Qwen3MoeForCausalLM) -> Qwen3MoeForCausalLM:
    """A copy of the stock model, built of fuseops, with the same weights."""
    model, config = copy.deepcopy(stock), stock.config
    weights = hf.to_fuseops(model.state_dict())
    for layer in model.model.layers:
        if hasattr(layer.mlp, "experts"):
            layer.mlp.experts = experts(config)
        else:
            layer.mlp = mlp(config)
        for name in ("input_layernorm", "post_attention_layernorm"):
            setattr(layer, name, fo.ops.RMSNorm(config.hidden_size, eps=config.rms_norm_eps))
    model.model.norm = fo.ops.RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
    model.load_state_dict(weights, assign=True)  # in the stock model's dtype
    return model


def gradients(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def stock_model() -> Qwen3MoeForCausalLM:
    torch.manual_seed(0)
    sizes: dict[str, Any] = dict(vocab_size=128, hidden_size=64, num_hidden_layers=2)
    sizes |= dict(num_attention_heads=4, intermediate_size=96, moe_intermediate_size=32)
    config = Qwen3MoeConfig(**sizes, num_experts=8, num_experts_per_tok=2, mlp_only_layers=[1])
    return Qwen3MoeForCausalLM(config)


def build() -> tuple[nn.Module, tuple[Tensor], dict[str, Tensor]]:
    return ported(stock_model()), (torch.randint(128, (2, 16)),), {}


if __name__ == "__main__":
    stock = stock_model()
    model, tokens = ported(stock), torch.randint(128, (2, 16))

    expected, got = stock(tokens, labels=tokens).loss, model(tokens, labels=tokens).loss
    expected.backward()
    got.backward()
    torch.testing.assert_close(got, expected)
    grads = hf.to_hf(gradients(model))
    torch.testing.assert_close(grads, gradients(stock), rtol=1e-4, atol=1e-6)  # float32 sums
    print(f"loss {got.item():.4f}; loss and {len(grads)} gradients equal the stock model's")

    torch.optim.AdamW(model.parameters(), lr=1e-3).step()
    # a trained model under the stock keys again
    stock.load_state_dict(hf.to_hf(model.state_dict()))
    print(fo.explain(model, tokens))
