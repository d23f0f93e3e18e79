"""Weights go from other libraries' keys to fuseops' and back, unchanged, whole and in shards."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import fuseops as fo
from fuseops.integrations import hf, te
from fuseops.integrations.graphs import Positional


def dense(prefix: str, hidden: int, width: int) -> dict[str, Tensor]:
    return {
        f"{prefix}.gate_proj.weight": torch.randn(hidden, width),
        f"{prefix}.up_proj.weight": torch.randn(hidden, width),
        f"{prefix}.down_proj.weight": torch.randn(width, hidden),
    }


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(t, b[n]) for n, t in a.items())


@given(st.integers(1, 12), st.integers(1, 5), st.integers(1, 5))
def test_there_and_back_changes_nothing(experts: int, hidden: int, width: int) -> None:
    """Twelve experts: their numbers do not sort as text."""
    file = dense("layers.1.mlp", hidden, width) | dense("layers.1.mlp.shared_expert", hidden, width)
    file["layers.0.mlp.gate.weight"] = torch.randn(experts, width)  # a router, not a projection
    for e in range(experts):
        file |= dense(f"layers.0.mlp.experts.{e}", hidden, width)
    ours = hf.to_fuseops(file)
    assert ours["layers.0.mlp.experts.fc1.weight"].shape == (experts, 2 * hidden, width)
    assert same(hf.to_hf(ours, experts="separate"), file)
    packed = hf.to_hf(ours)
    assert packed["layers.0.mlp.experts.gate_up_proj"] is ours["layers.0.mlp.experts.fc1.weight"]
    assert same(hf.to_fuseops(packed), ours)


def test_the_gate_is_the_first_half() -> None:
    file = dense("mlp.experts.0", 3, 2) | dense("mlp", 3, 2)
    ours = hf.to_fuseops(file)
    for weight, prefix in (
        (ours["mlp.experts.fc1.weight"][0], "mlp.experts.0"),
        (ours["mlp.fc1.weight"], "mlp"),
    ):
        assert torch.equal(weight[:3], file[f"{prefix}.gate_proj.weight"])
        assert torch.equal(weight[3:], file[f"{prefix}.up_proj.weight"])


@pytest.mark.parametrize(
    "missing, said",
    [
        ("mlp.up_proj.weight", "mlp.fc1.weight .*up_proj is missing"),
        ("mlp.experts.1.down_proj.weight", "down_proj of expert 1 is missing"),
    ],
)
def test_a_missing_part_is_named(missing: str, said: str) -> None:
    file = dense("mlp", 3, 2)
    for e in range(3):
        file |= dense(f"mlp.experts.{e}", 3, 2)
    del file[missing]
    with pytest.raises(fo.FuseOpsError, match=said):
        hf.to_fuseops(file)


def test_wrong_arguments_are_refused() -> None:
    with pytest.raises(fo.FuseOpsError, match="'packed' or 'separate', got 'rows'"):
        hf.to_hf({}, experts="rows")  # type: ignore[arg-type]
    with pytest.raises(fo.FuseOpsError, match=r"two halves, got shape \(3, 2\)"):
        hf.to_hf({"mlp.fc1.weight": torch.ones(3, 2)})


def layers_of_experts() -> list[tuple[nn.Module, fo.MoE]]:
    """Layers of transformers, and an `fo.MoE` with the options that docs/moe.md gives for each."""
    from transformers import DeepseekV3Config, MixtralConfig, Qwen3MoeConfig
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE
    from transformers.models.mixtral.modeling_mixtral import MixtralSparseMoeBlock
    from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

    sizes: dict[str, Any] = {"hidden_size": 16, "num_experts_per_tok": 2}
    small: dict[str, Any] = {**sizes, "moe_intermediate_size": 8}
    qwen = [Qwen3MoeConfig(**small, num_experts=8, norm_topk_prob=norm) for norm in (True, False)]
    mixtral = MixtralConfig(**sizes, intermediate_size=8, num_local_experts=8)
    groups: dict[str, Any] = {"n_group": 4, "topk_group": 2, "n_shared_experts": 2}
    deepseek = DeepseekV3Config(**small, n_routed_experts=8, **groups, routed_scaling_factor=2.5)
    like_deepseek = fo.MoE(
        16, 8, 8, 2, score="sigmoid", scale=2.5, expert_bias=True, groups=4, top_groups=2, shared_experts=2
    )  # fmt: skip
    return [
        *[
            (Qwen3MoeSparseMoeBlock(c), fo.MoE(16, 8, 8, 2, normalize=c.norm_topk_prob))
            for c in qwen
        ],
        (MixtralSparseMoeBlock(mixtral), fo.MoE(16, 8, 8, 2)),
        (DeepseekV3MoE(deepseek), like_deepseek),
    ]


@pytest.mark.parametrize("which", range(4))
def test_a_layer_of_experts_is_replaced_whole(which: int) -> None:
    """The same outputs from the same weights, which come back under their own keys."""
    torch.manual_seed(0)
    stock, moe = layers_of_experts()[which]
    stock, moe = stock.double().eval(), moe.double().eval()
    for tensor in stock.state_dict().values():  # transformers leaves them empty
        torch.nn.init.normal_(tensor)
    file = {f"layers.1.mlp.{name}": tensor for name, tensor in stock.state_dict().items()}
    ours = hf.to_fuseops({**file, "layers.0.mlp.gate.weight": torch.ones(1)}, moe=True)
    assert "layers.0.mlp.gate.weight" in ours  # of a layer without experts
    assert same(hf.to_hf(ours), file | {"layers.0.mlp.gate.weight": torch.ones(1)})
    moe.load_state_dict({k.removeprefix("layers.1.mlp."): v for k, v in ours.items() if ".1." in k})
    x = torch.randn(2, 5, 16, dtype=torch.float64)
    y, expected = moe(x), stock(x)
    rounded = 8 * torch.finfo(torch.float32).eps * expected.abs().max()  # scores of transformers
    assert (y - expected).abs().max() <= rounded
    assert same(hf.to_hf(moe.state_dict()), {k: v.double() for k, v in stock.state_dict().items()})


def gpt_oss(dim: int = 6, hidden: int = 4) -> tuple[nn.Module, fo.MoE]:
    from transformers import GptOssConfig
    from transformers.models.gpt_oss.modeling_gpt_oss import GptOssMLP

    sizes: dict[str, Any] = {"num_local_experts": 8, "num_experts_per_tok": 2}
    stock = GptOssMLP(GptOssConfig(hidden_size=dim, intermediate_size=hidden, **sizes))
    act = fo.ops.ScaledClampedSwiGLU(interleave=1)
    moe = fo.MoE(dim, hidden, 8, 2, router_bias=True, bias=True, activation=act)
    for tensor in stock.state_dict().values():
        torch.nn.init.normal_(tensor)
    return stock.double().eval(), moe.double().eval()


# 6: down_proj is square as in gpt-oss-20b; 3: D is 2F
@pytest.mark.parametrize("hidden", [4, 6, 3])
def test_gpt_oss_goes_there_and_back(hidden: int) -> None:
    """Transposed, with biases, gate and up alternating."""
    stock, moe = gpt_oss(6, hidden)
    file = {f"layers.0.mlp.{name}": tensor for name, tensor in stock.state_dict().items()}
    ours = hf.to_fuseops(file, moe=True)
    moe.load_state_dict({k.removeprefix("layers.0.mlp."): v for k, v in ours.items()})
    x = torch.randn(2, 5, 6, dtype=torch.float64)
    torch.testing.assert_close(moe(x), stock(x)[0], rtol=1e-6, atol=1e-6)
    assert same(hf.to_hf(ours), file)
    assert same(hf.to_hf(moe.state_dict()), dict(stock.state_dict()))
    apart = hf.to_fuseops(file)  # only the experts
    assert apart["layers.0.mlp.experts.fc1.bias"].shape == (8, 2 * hidden)
    assert same(hf.to_hf(apart), file)
    assert same(hf.to_hf(file), file)  # what is theirs already stays
    with pytest.raises(fo.FuseOpsError, match="gate and up alternate"):
        hf.to_hf(ours, experts="separate")


def test_a_dense_mlp_with_biases_goes_there_and_back() -> None:
    file = dense("mlp", 3, 2)
    for name, size in (("gate_proj", 3), ("up_proj", 3), ("down_proj", 2)):
        file[f"mlp.{name}.bias"] = torch.randn(size)
    ours = hf.to_fuseops(file)
    assert ours.keys() == {"mlp.fc1.weight", "mlp.fc1.bias", "mlp.fc2.weight", "mlp.fc2.bias"}
    assert same(hf.to_hf(ours), file)


@pytest.mark.parametrize(
    "beside",
    [
        "mlp.experts.0.gate_proj.weight_scale_inv",  # of a checkpoint in FP8
        "mlp.experts.0.gate_proj.bias",
        "mlp.gate_proj.lora_A.weight",
        "mlp.gate_up_proj.weight",
    ],
)
def test_keys_that_would_be_left_behind_are_named(beside: str) -> None:
    file = dense("mlp", 3, 2) | dense("mlp.experts.0", 3, 2) | {beside: torch.ones(3)}
    with pytest.raises(fo.FuseOpsError, match=rf"to_fuseops: \['{beside}'\] stand beside"):
        hf.to_fuseops(file)
    ours = {"mlp.experts.fc1.weight": torch.ones(2, 4, 3), "mlp.experts.fc1.weight0": torch.ones(4)}
    with pytest.raises(fo.FuseOpsError, match=r"to_hf: \['mlp.experts.fc1.weight0'\] stand beside"):
        hf.to_hf(ours)


@pytest.mark.parametrize(
    "shapes, said",
    [
        # of Llama 4, transposed without biases
        ({"gate_up_proj": (2, 3, 8), "down_proj": (2, 4, 3)}, "a layout that is not known"),
        ({"gate_up_proj": (2, 8, 3)}, r"\['down_proj'\] is missing"),
        ({"gate_up_proj": (2, 8, 3), "down_proj": (2, 3, 4), "down_proj_bias": (2, 3)}, "missing"),
        (
            {"gate_up_proj": (2, 8, 3), "down_proj": (2, 3, 4)}
            | {"gate_up_proj_bias": (2, 8), "down_proj_bias": (2, 3)},
            r"and biases, a layout that is not known",
        ),
        ({"gate_up_proj_blocks": (2, 3), "gate_up_proj_bias": (2, 8)}, "stand beside"),
    ],
)
def test_experts_in_a_layout_that_is_not_known_are_refused(
    shapes: dict[str, tuple[int, ...]], said: str
) -> None:
    file = {f"mlp.experts.{name}": torch.ones(shape) for name, shape in shapes.items()}
    with pytest.raises(fo.FuseOpsError, match=said):
        hf.to_fuseops(file)


# --- TransformerEngine


@given(st.integers(1, 12), st.booleans())
def test_te_there_and_back_changes_nothing(groups: int, bias: bool) -> None:
    model = torch.nn.ModuleDict(
        {
            "fc1": fo.ops.GroupedLinear(groups, 3, 4, bias=bias, packed=False),
            "conv": torch.nn.Conv1d(2, 2, 3),  # its weight has three axes, too
        }
    )
    file = {**model.state_dict(), "fc1._extra_state": torch.zeros(2)}
    ours = te.to_fuseops(file)
    assert ours["fc1.weight"].shape == (groups, 4, 3) and "fc1._extra_state" not in ours
    for grouped in (model, ["fc1"]):
        assert same(te.to_te(ours, grouped), model.state_dict())
    packed = fo.ops.GroupedLinear(groups, 3, 4, bias=bias)
    packed.load_state_dict({k.removeprefix("fc1."): v for k, v in file.items() if "fc1" in k})
    assert torch.equal(packed.weight, ours["fc1.weight"])
    assert same(
        te.to_te(packed.state_dict(), [""]),
        {k[4:]: v for k, v in model.state_dict().items() if "fc1" in k},
    )


def test_te_says_what_is_missing_or_does_not_fit() -> None:
    file = fo.ops.GroupedLinear(3, 4, 5, packed=False).state_dict()
    with pytest.raises(fo.FuseOpsError, match="weight is made of 3 groups, and weight1 is missing"):
        te.to_fuseops({k: v for k, v in file.items() if k != "weight1"})
    with pytest.raises(fo.FuseOpsError, match=r"bias differ in shape: \[\(2,\), \(5,\)\]"):
        te.to_fuseops({**file, "bias0": torch.ones(2)})


def test_peft_adapts_the_weights_of_experts() -> None:
    """`target_parameters`: outputs and gradients are those of a layer with the adapted weights."""
    from peft import LoraConfig, inject_adapter_in_model

    torch.manual_seed(0)
    moe = fo.MoE(8, 6, num_experts=4, top_k=2).double()
    plain = {name: weight.detach() for name, weight in moe.named_parameters()}
    config = LoraConfig(r=2, target_modules=[], target_parameters=["fc1.weight", "fc2.weight"])
    adapted = inject_adapter_in_model(config, copy.deepcopy(moe)).double()
    factors = [p for name, p in adapted.named_parameters() if "lora_" in name]
    for factor in factors:  # B begins as zero: A would get no gradient
        torch.nn.init.normal_(factor)

    wrappers = {name: adapted.get_submodule(name) for name in ("fc1", "fc2")}
    deltas = {f"{n}.weight": w.get_delta_weight("default") for n, w in wrappers.items()}
    weights = plain | {name: plain[name] + delta for name, delta in deltas.items()}
    x = torch.randn(5, 8, dtype=torch.float64)
    expected = torch.func.functional_call(moe, weights, (x,))
    got = adapted(x)
    torch.testing.assert_close(got, expected)
    grads = torch.autograd.grad(got.square().sum(), factors)
    torch.testing.assert_close(grads, torch.autograd.grad(expected.square().sum(), factors))


def test_side_inputs_by_position_are_those_by_name() -> None:
    adds = [fo.ops.Add(name) for name in ("first", "second", "h")]
    model = fo.Sequential(fo.ops.Tap("h"), *adds)
    x, first, second = torch.randn(3, 2, 4).unbind()
    expected = model(x, first=first, second=second)
    assert torch.equal(Positional(model, "first", "second")(x, first, second), expected)
    assert torch.equal(Positional(model, "second", "first")(x, second, first), expected)
    y, h = Positional(model, "first", "second", returns=("h",))(x, first, second)
    assert torch.equal(y, expected) and torch.equal(h, x)
    with pytest.raises(fo.SideInputError, match=r"\['first', 'second'\].* got x and 1 tensors"):
        Positional(model, "first", "second")(x, first)
