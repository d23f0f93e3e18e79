"""Tiny random models of the families that `hf.apply` is tested on."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.utils import logging

from fuseops.errors import ShapeError
from fuseops.testing import assert_bwd_is_vjp

logging.set_verbosity_error()  # tiny sizes contradict the families' defaults, which is said at length

SIZES: dict[str, Any] = dict(
    vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=2,
    num_key_value_heads=1, head_dim=16, max_position_embeddings=64, tie_word_embeddings=False,
    pad_token_id=0, bos_token_id=1, eos_token_id=2,
)  # fmt: skip
EXPERTS: dict[str, Any] = dict(num_experts_per_tok=2, moe_intermediate_size=24)
MLA = dict(q_lora_rank=16, kv_lora_rank=8, qk_rope_head_dim=8, qk_nope_head_dim=8, v_head_dim=16)
MAMBA = dict(
    layers_block_type=["mamba", "moe", "attention", "mlp"], use_mamba_kernels=False,
    mamba_num_heads=4, mamba_head_dim=16, ssm_state_size=8, n_groups=2, chunk_size=8,
    moe_shared_expert_intermediate_size=24, n_group=2, topk_group=1, routed_scaling_factor=2.5,
)  # fmt: skip
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "Mixtral": ("mixtral", EXPERTS | dict(num_local_experts=4)),
    "Qwen2-MoE": (
        "qwen2_moe",
        EXPERTS | dict(num_experts=4, shared_expert_intermediate_size=24, mlp_only_layers=[1]),
    ),
    "Qwen3-MoE": ("qwen3_moe", EXPERTS | dict(num_experts=4, norm_topk_prob=True)),
    "OLMoE": ("olmoe", EXPERTS | dict(num_experts=4)),
    "DeepSeek-V3": (
        "deepseek_v3",
        EXPERTS | MLA | dict(n_routed_experts=8, n_group=4, topk_group=2, num_key_value_heads=2)
        | dict(n_shared_experts=1, first_k_dense_replace=1, head_dim=None),
    ),
    "GPT-OSS": ("gpt_oss", EXPERTS | dict(num_local_experts=4)),
    "Nemotron-H": ("nemotron_h", EXPERTS | MAMBA | dict(n_routed_experts=4)),
    "Llama": ("llama", dict(mlp_bias=True)),
    "Qwen3": ("qwen3", {}),
    "Gemma 2": ("gemma2", dict(query_pre_attn_scalar=16)),
    "Gemma 3": ("gemma3_text", dict(query_pre_attn_scalar=16, layer_types=["full_attention"] * 2)),
}  # fmt: skip
MOE = tuple(FAMILIES)[:7]


@functools.cache
def _built(name: str) -> nn.Module:
    kind, sizes = FAMILIES[name]
    torch.manual_seed(0)
    known = {**SIZES, **sizes}
    config = CONFIG_MAPPING[kind](**{k: v for k, v in known.items() if v is not None})
    eager = {"experts_implementation": "eager"}  # torch's grouped GEMMs take no float64
    model: nn.Module = AutoModelForCausalLM.from_config(config, **eager).double().eval()
    for (
        path,
        tensor,
    ) in model.state_dict().items():  # what starts at zero chooses and scales nothing
        if "correction" in path or "gate.weight" in path or "router" in path or tensor.dim() == 1:
            if not path.endswith(("A_log", "dt_bias", "D")):
                nn.init.normal_(tensor, float("norm" in path), 0.2)
        elif tensor.is_floating_point():
            nn.init.normal_(tensor, 0.0, 0.2)
    return model


def stock(name: str) -> nn.Module:
    """A fresh model of a family, in float64, the same in every call."""
    return copy.deepcopy(_built(name))


def tokens(rows: int = 2, length: int = 9) -> Tensor:
    return torch.randint(3, SIZES["vocab_size"], (rows, length))


Step = dict[str, Tensor]


def step(model: Any, x: Tensor, **keywords: Any) -> Step:
    """Loss, logits and the gradient of every parameter that has one."""
    model.zero_grad()
    out = model(x, labels=x, **keywords)
    out.loss.backward()
    found = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}
    logits = out.logits
    if logits is None:  # in training, where nobody asked for them
        with torch.no_grad():
            logits = model(x, **keywords).logits
    named = {"loss": out.loss, "logits": logits, "aux_loss": getattr(out, "aux_loss", None)}
    return found | {k: t.detach() for k, t in named.items() if t is not None}


EXACT = 128 * torch.finfo(torch.float32).eps  # stock models compute in float32 in places


def differences(found: Step, expected: Step, tolerance: float = EXACT) -> list[str]:
    """What is missing, too much, or further away than the roundings of float32."""
    wrong = [f"only one has {name}" for name in found.keys() ^ expected.keys()]
    for name in found.keys() & expected.keys():
        scale = expected[name].abs().max().clamp_min(1e-6)
        error = float((found[name] - expected[name]).abs().max() / scale)
        if not error <= tolerance:
            wrong.append(f"{name} is {error:.1e} off")
    return wrong


def agree(found: Step, expected: Step) -> None:
    """Fail where they differ."""
    wrong = differences(found, expected)
    assert not wrong, wrong


def keeps_the_laws(op: Any, width: int) -> None:
    """Of an op over lent parameters `bwd` is the vjp of `fwd`, and `out_shape` the shape of y, for this width alone."""
    x = torch.randn(3, width, dtype=torch.float64)
    assert_bwd_is_vjp(op, x)
    y = op(x)
    assert (y if isinstance(y, Tensor) else y[0]).shape == op.out_shape((3, width))
    with pytest.raises(ShapeError):
        op.out_shape((3, width + 1))
