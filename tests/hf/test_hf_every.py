"""Every causal language model of transformers that can be built small: `hf.apply` keeps what it computes."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from families import EXACT, EXPERTS, MLA, SIZES, Step, differences, step, tokens
from torch import nn
from transformers import CONFIG_MAPPING, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from fuseops.integrations import hf

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
PARAMETERS = 3_000_000  # of a larger one the sizes are not known here
MOE = EXPERTS | dict.fromkeys(("num_local_experts", "num_experts", "n_routed_experts"), 4)
MOE |= dict(
    shared_expert_intermediate_size=24, n_shared_experts=1, num_shared_experts=1, n_group=2, topk_group=1,
    first_k_dense_replace=1, norm_topk_prob=True, moe_topk=2, moe_k=2, top_k_experts=2,
)  # fmt: skip
MAMBA = dict(
    mamba_n_heads=4, mamba_d_head=16, mamba_d_state=8, mamba_n_groups=1, mamba_d_conv=2, mamba_chunk_size=8,
    mamba_expand=2, use_mamba_kernels=False,
)  # fmt: skip
DELTA = dict(
    linear_num_value_heads=4, linear_num_key_heads=2, linear_key_head_dim=8, linear_value_head_dim=8,
    linear_conv_kernel_dim=2, num_hidden_layers=4, use_cache=False,
)  # fmt: skip
OWN: dict[str, dict[str, Any]] = {
    "bailing_hybrid": dict(num_hidden_layers=8, use_cache=False),
    "bamba": MAMBA | dict(attn_layer_indices=[1]),
    "codegen": dict(n_head=4, rotary_dim=8),
    "diffllama": dict(num_key_value_heads=2),
    "falcon_h1": MAMBA | dict(mamba_d_ssm=64),
    "gemma3n_text": dict(
        vocab_size_per_layer_input=64, hidden_size_per_layer_input=8, laurel_rank=4, num_hidden_layers=4,
        num_kv_shared_layers=0, activation_sparsity_pattern=None,
        layer_types=["full_attention", "sliding_attention"] * 2,
    ),
    "gemma4_text": dict(
        vocab_size_per_layer_input=64, hidden_size_per_layer_input=8, global_head_dim=16,
        layer_types=["full_attention"] * 2,
    ),
    "gptj": dict(n_head=4, rotary_dim=8),
    "gpt_neo": dict(attention_types=[[["global"], 2]]),
    "granitemoehybrid": MAMBA | dict(layer_types=["mamba", "attention"], shared_intermediate_size=24),
    "jamba": dict(
        use_mamba_kernels=False, num_hidden_layers=4, attn_layer_period=2, attn_layer_offset=1, use_cache=False,
        mamba_d_state=4, mamba_dt_rank=4,
    ),
    "lfm2_moe": dict(
        num_hidden_layers=4, num_dense_layers=1, layer_types=["conv", "full_attention"] * 2, use_cache=False
    ),
    "mamba2": dict(num_heads=4, head_dim=16, state_size=8, n_groups=1, expand=2, conv_kernel=2, chunk_size=8),
    "qwen3_5_moe_text": DELTA,
    "qwen3_5_text": DELTA,
    "qwen3_next": DELTA,
    "recurrent_gemma": dict(num_hidden_layers=3, use_cache=False, lru_width=32, attention_window_size=16),
}  # fmt: skip


def config_of(kind: str, sizes: dict[str, Any]) -> Any:
    """With those of the sizes that it knows."""
    new = CONFIG_MAPPING[kind]
    known = {*inspect.signature(new).parameters, *getattr(new, "attribute_map", ()), *SIZES}
    return new(**{k: v for k, v in sizes.items() if k in known and v is not None})


def built(kind: str, sizes: dict[str, Any]) -> nn.Module:
    config = config_of(kind, sizes)
    with torch.device("meta"):
        count = sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
    if count > PARAMETERS:
        raise ValueError(f"{count} parameters")
    torch.manual_seed(0)
    eager = {"experts_implementation": "eager", "attn_implementation": "eager"}
    model: nn.Module = AutoModelForCausalLM.from_config(config, **eager).double().eval()
    for path, tensor in model.state_dict().items():
        if tensor.is_floating_point() and not path.endswith(("A_log", "dt_bias", "D")):
            nn.init.normal_(tensor, float("norm" in path and tensor.dim() == 1), 0.2)
    return model


def stock(kind: str, x: torch.Tensor) -> tuple[nn.Module, Step]:
    """A model with its step; skips where no sizes are known that it runs with."""
    own, whys = OWN.get(kind, {}), []
    all_heads = dict(head_dim=None, num_key_value_heads=2)
    for more in (MOE, {}, MOE | MLA, MOE | MLA | all_heads, all_heads):
        try:
            model = built(kind, SIZES | more | own)
            found = step(model, x)
            if not all(t.isfinite().all() for t in found.values()):
                raise ValueError("not finite")
            if differences(step(model, x), found):
                raise ValueError("draws random numbers")
            return model, found
        except Exception as error:  # of transformers, about sizes; whatever it be
            whys.append(f"{type(error).__name__}: {str(error)[:80]}")
    pytest.skip(f"cannot be built small: {whys[0]}")


def noise(model: nn.Module, x: torch.Tensor, expected: Step) -> float:
    """How far one rounding of every parameter to float32 moves a step."""
    held = [p.detach().clone() for p in model.parameters()]
    with torch.no_grad():
        for p in model.parameters():
            p.copy_(p.float())
    found = step(model, x)
    with torch.no_grad():
        for p, own in zip(model.parameters(), held, strict=True):
            p.copy_(own)
    each = [(found[k] - t).abs().max() / t.abs().max().clamp_min(1e-6) for k, t in expected.items()]
    return float(max(each))


ROUNDINGS = 64  # to float32, in which stock models compute norms, routers and recurrences


@pytest.mark.parametrize("kind", MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
def test_a_step_stays_the_same(kind: str) -> None:
    x = tokens()
    model, expected = stock(kind, x)
    tolerance = max(EXACT, ROUNDINGS * noise(model, x, expected))
    hf.apply(model)
    wrong = differences(step(model, x), expected, tolerance)
    assert not wrong, wrong
    hf.revert(model)
    assert not (wrong := differences(step(model, x), expected, 0.0)), wrong
