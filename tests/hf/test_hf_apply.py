"""What `hf.apply` and the registered experts do at their borders."""

from __future__ import annotations

import copy
import functools
import inspect
import shutil
import subprocess
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from families import FAMILIES, MOE, SIZES, agree, keeps_the_laws, step, stock, tokens
from torch import Tensor, nn
from torch.nn.utils import parametrize
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, Trainer, TrainingArguments
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, use_experts_implementation
from transformers.loss.loss_utils import LOSS_MAPPING
from transformers.modeling_outputs import CausalLMOutput
from transformers.models.llama import modeling_llama

import fuseops as fo
from fuseops.explain.explanation import FusionPlan
from fuseops.integrations import hf
from fuseops.integrations.hf import experts as hf_experts
from fuseops.integrations.hf import recognise, rope
from fuseops.kernels.registry import as_if_on
from fuseops.ops.op import Op
from fuseops.ops.paths import STAND_IN, walk
from fuseops.ops.scopes import SCALES
from fuseops.recipes.recipe import POLICIES
from fuseops.recipes.scales import ScaleState

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")


def layer_of(name: str) -> Any:
    """The experts of a tiny model."""
    return next(m for m in stock(name).modules() if hasattr(m, "is_transposed"))


def called(experts: Any, run: Any, x: Tensor, chosen: Tensor, weights: Tensor) -> list[Tensor]:
    """y and the gradients of x, the weights and every parameter."""
    leaves = [t.detach().clone().requires_grad_() for t in (x, weights)]
    y = run(experts, leaves[0], chosen, leaves[1])
    parameters = list(experts.parameters())
    return [y, *torch.autograd.grad(y.sin().sum(), [*leaves, *parameters], allow_unused=True)]


def close(found: list[Tensor], expected: list[Tensor]) -> None:
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


def routed(experts: Any, rows: int = 7) -> tuple[Tensor, Tensor, Tensor]:
    width = experts.down_proj.shape[1 if not experts.is_transposed else 2]
    x = torch.randn(rows, width, dtype=torch.float64)
    chosen = torch.stack([torch.randperm(experts.num_experts)[:2] for _ in range(rows)])
    return x, chosen, torch.rand(rows, 2, dtype=torch.float64)


# --- the registry


@pytest.mark.parametrize("name", ["Mixtral", "GPT-OSS", "Nemotron-H"])
def test_the_registered_experts_are_the_model_s_own(name: str) -> None:
    model, x = stock(name), tokens()
    expected = step(model, x)
    model.set_experts_implementation("fuseops")
    agree(step(model, x), expected)
    assert "fuseops" not in model.config.to_json_string()


def test_weights_are_read_at_every_call() -> None:
    experts = layer_of("Mixtral")
    args = routed(experts)
    hf_experts.forward(experts, *args)
    experts.gate_up_proj = nn.Parameter(experts.gate_up_proj.detach() * 2)
    with torch.no_grad():
        experts.down_proj.mul_(3)
    close(called(experts, hf_experts.forward, *args), called(experts, type(experts).forward, *args))
    parametrize.register_parametrization(experts, "down_proj", nn.Hardtanh(-0.1, 0.1))
    close(called(experts, hf_experts.forward, *args), called(experts, type(experts).forward, *args))


def test_of_lent_experts_the_same_is_kept_as_of_an_op_s_own() -> None:
    experts = layer_of("Mixtral").float()
    args = tuple(t.float() if t.is_floating_point() else t for t in routed(experts))

    def found(weights: str) -> list[Tensor]:
        with fo.recipe(fo.recipes.Float8BlockScaling(weights=weights), strict=True):
            return called(experts, hf_experts.forward, *args)

    parameters = experts.gate_up_proj, experts.down_proj
    cold = found("step")
    assert fo.weights_changed(experts) >= 2 * sum(p.numel() for p in parameters)
    found("step")
    with torch.no_grad():
        experts.down_proj.mul_(3)  # tells its version
    experts.gate_up_proj = nn.Parameter(experts.gate_up_proj.detach() * 2)
    warm = found("step")
    assert all(torch.equal(a, b) for a, b in zip(warm, found("none"), strict=True))
    assert not torch.equal(warm[0], cold[0])
    experts.gate_up_proj.data.mul_(2)  # tells nobody
    assert torch.equal(found("step")[0], warm[0])
    assert fo.weights_changed(experts)
    assert torch.equal(found("step")[0], found("none")[0])


RECIPES = {
    **{f"block, {kept}": fo.recipes.Float8BlockScaling(weights=kept) for kept in POLICIES},
    "hidden": fo.recipes.Float8BlockScaling(hidden="float8", weights="step"),
    "current": fo.recipes.Float8CurrentScaling(),
    "delayed": fo.recipes.DelayedScaling(),
    "mxfp8": fo.recipes.MXFP8BlockScaling(),
    "nvfp4": fo.recipes.NVFP4BlockScaling(),
}


def planned(experts: Any, recipe: fo.recipes.Recipe | None) -> FusionPlan:
    """Of a step of lent experts, as on a Hopper GPU."""
    width = experts.config.hidden_size
    x = torch.empty(2048, width, dtype=torch.bfloat16, requires_grad=True)
    weights = torch.empty(2048, 2, dtype=torch.bfloat16, requires_grad=True)
    layer = hf_experts.get_or_build(experts, 2)
    assert layer is not None
    with as_if_on(90), fo.recipe(recipe, strict=recipe is not None):
        return layer.plan(x, experts=torch.zeros(2048, 2, dtype=torch.int64), weights=weights)


@pytest.mark.parametrize("name", ["mixtral", "gpt_oss", "qwen3_moe"])
def test_a_recipe_takes_no_fusion_from_lent_experts(name: str) -> None:
    """An adapter that could lie beside a weight, and does not, is no reason. What is kept is on a line of its own."""
    sizes = SIZES | dict(hidden_size=256, intermediate_size=512, moe_intermediate_size=512)
    sizes |= dict(num_local_experts=4, num_experts=4, num_hidden_layers=1)
    model = AutoModelForCausalLM.from_config(CONFIG_MAPPING[name](**sizes), dtype=torch.bfloat16)
    experts: Any = next(m for m in model.modules() if hasattr(m, "is_transposed"))
    high = planned(experts, None)
    assert [span.rule for span in high.forward].count("routed_mlp") == 1 and high.rehearsed
    for label, recipe in RECIPES.items():
        plan = planned(experts, recipe)
        assert [span.rule for span in plan.forward] == [span.rule for span in high.forward], label
        assert plan.saved_bytes <= high.saved_bytes, label
        kept, asked = plan.kept_bytes / 2**20, getattr(recipe, "weights", "none") != "none"
        assert (kept > 0) == (asked and not experts.is_transposed), label  # of a transpose nothing
        said = f"quantized weights: {kept:.1f} MiB kept beside the saved tensors"
        assert (said in str(plan)) == (kept > 0), label


@pytest.mark.parametrize("name", ["Mixtral", "GPT-OSS", "Nemotron-H"])
def test_experts_of_other_ranks_take_nothing(name: str) -> None:
    """An index of num_experts, of weight 0: no row of a product, no gradient, and none to its weight."""
    experts = layer_of(name)
    x, chosen, weights = routed(experts)
    elsewhere = torch.rand(chosen.shape) < 0.5
    elsewhere[0] = True
    there = weights.masked_fill(elsewhere, 0)
    experts._is_expert_parallel = True
    beyond = chosen.masked_fill(elsewhere, experts.num_experts)
    found = called(experts, hf_experts.forward, x, beyond, there)
    expected = called(experts, type(experts).forward, x, chosen, there)  # the products, times 0
    expected[2] = expected[2].masked_fill(elsewhere, 0)
    close(found, expected)


class Odd(nn.Module):
    """Experts whose gate is their own, and has a parameter."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.num_experts = 4
        self.gate_up_proj = nn.Parameter(torch.randn(4, 6, 5, dtype=torch.float64))
        self.down_proj = nn.Parameter(torch.randn(4, 5, 3, dtype=torch.float64))
        self.slope = nn.Parameter(torch.tensor(0.7, dtype=torch.float64))

    def _apply_gate(self, h: Tensor) -> Tensor:
        gate, up = h.chunk(2, -1)
        return torch.tanh(self.slope * gate) * up

    def forward(self, x: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        y = torch.zeros_like(x)
        for t in range(len(x)):
            for k, e in enumerate(chosen[t].tolist()):
                a = self._apply_gate(x[t] @ self.gate_up_proj[e].t())
                y[t] = y[t] + weights[t, k] * (a @ self.down_proj[e].t())
        return y


def test_a_gate_that_is_not_known_runs_as_written() -> None:
    plain = Odd.forward
    config: Any = type("Config", (), {"_experts_implementation": "eager"})()
    experts = use_experts_implementation(Odd)(config)
    assert recognise.gate_of(experts) is None
    args = routed(experts)
    close(called(experts, ALL_EXPERTS_FUNCTIONS["fuseops"], *args), called(experts, plain, *args))
    assert "as written" in str(hf.apply(experts, dry_run=True))
    assert str(hf.apply(nn.Linear(3, 3))).startswith("Linear: nothing here for fuseops to run.")


def test_another_activation_is_noticed() -> None:
    experts = layer_of("Mixtral")
    args = routed(experts)
    hf_experts.forward(experts, *args)
    experts.act_fn = nn.GELU()
    close(called(experts, hf_experts.forward, *args), called(experts, type(experts).forward, *args))


# --- apply


def test_a_dry_run_changes_nothing() -> None:
    model = stock("Qwen3-MoE")
    report = hf.apply(model, dry_run=True)
    assert report.replaced and "would run" in str(report)
    assert not [m for m in model.modules() if "forward" in m.__dict__]


@pytest.mark.parametrize("name", ["DeepSeek-V3", "GPT-OSS", "Gemma 2"])
def test_what_is_recognised_depends_on_no_default(name: str) -> None:
    """A default device or dtype, autocast, a model without data: the same report. Random states stay as they are."""
    expected, state = hf.apply(stock(name), dry_run=True), torch.get_rng_state()
    with torch.device("meta"):
        assert hf.apply(stock(name), dry_run=True) == expected
    with torch.autocast("cpu", torch.bfloat16):
        assert hf.apply(stock(name).bfloat16(), dry_run=True) == expected
    assert hf.apply(stock(name).to("meta"), dry_run=True) == expected
    for mode in (torch.no_grad(), torch.inference_mode()):
        with mode:
            assert hf.apply(stock(name), dry_run=True) == expected
    torch.set_default_dtype(torch.float64)
    try:
        assert hf.apply(stock(name), dry_run=True) == expected
    finally:
        torch.set_default_dtype(torch.float32)
    assert torch.equal(torch.get_rng_state(), state)


def test_the_report_says_why_not() -> None:
    model: Any = stock("Llama")
    one, two = (layer.mlp for layer in model.model.layers)
    one.act_fn = nn.Mish()
    two.up_proj.register_forward_hook(lambda *_: None)
    model.model.norm.forward = type(model.model.norm).forward.__get__(model.model.norm)
    codes = nn.Parameter(torch.zeros(32, dtype=torch.int8), requires_grad=False)
    model.model.layers[0].input_layernorm.weight = codes
    model.loss_function = lambda logits, labels, *_, **__: logits.sum()
    said = {e.path: e.why for e in hf.apply(model).left}
    assert said[""] == "the loss is <lambda>"
    assert said["model.layers.0.mlp"] == "unknown activation Mish"
    assert said["model.layers.1.mlp"] == "up_proj has hooks"
    assert "a forward of its own" in str(said["model.norm"])
    assert said["model.layers.0.input_layernorm"] == "is quantized (int8)"


def test_remote_code_is_left_alone() -> None:
    model: Any = stock("Qwen3")
    kind = type(model.model.norm)
    model.model.norm.__class__ = type(
        kind.__name__, (kind,), {"__module__": "transformers_modules.x"}
    )
    assert [e.why for e in hf.apply(model).left] == ["remote code"]


class AlmostRMSNorm(nn.Module):
    """An RMSNorm by its name and attributes, that divides by the standard deviation."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.variance_epsilon = nn.Parameter(torch.ones(8)), 1e-6

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * (x / (x.std(-1, keepdim=True) + self.variance_epsilon))


def test_what_computes_something_else_is_left_alone() -> None:
    model = nn.ModuleList([AlmostRMSNorm()])
    assert [e.why for e in hf.apply(model).left] == [
        "computes something else than an RMSNorm over the last axis"
    ]


class Dropping(modeling_llama.LlamaMLP):
    """An MLP with a dropout, as GTE's."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.dropout = nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.dropout(self.act_fn(self.gate_proj(x)) * self.up_proj(x)))


def test_a_dropout_is_seen_in_evaluation_too() -> None:
    mlp = Dropping(stock("Llama").config).eval()
    assert len(hf.apply(mlp).left) == 1


class Halved(nn.Module):
    """A causal language model whose logits are not what its head gives."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.model, self.lm_head, self.config = inner.model, inner.lm_head, inner.config
        self.loss_function = LOSS_MAPPING["ForCausalLM"]

    def forward(self, input_ids: Tensor, labels: Any = None, **keywords: Any) -> Any:
        logits = self.lm_head(self.model(input_ids).last_hidden_state) / 2
        loss = None if labels is None else self.loss_function(logits, labels, logits.shape[-1])
        return CausalLMOutput(loss=loss, logits=logits)


def test_logits_that_are_not_the_head_s_keep_their_loss() -> None:
    model, x = Halved(stock("Qwen3")).train(), tokens()
    expected = step(model, x)
    left = {e.part: e.why for e in hf.apply(model).left}
    assert left == {"loss": "the loss reads something else than the head's logits"}
    agree(step(model, x), expected)


def own_class(module: Any, more: Any) -> None:
    """Another class, whose forward does more with what it inherits."""

    def forward(self: Any, *args: Any, **keywords: Any) -> Any:
        out = super(type(self), self).forward(*args, **keywords)
        more(self, out)
        return out

    kind = type(module)
    module.__class__ = type(kind.__name__, (kind,), {"forward": forward})


def test_a_loss_that_is_added_to_keeps_its_logits() -> None:
    model, x = stock("Llama").train(), tokens()

    def penalty(self: Any, out: Any) -> None:
        if out.loss is not None:
            out.loss = out.loss + out.logits.logsumexp(-1).square().mean()

    own_class(model, penalty)
    expected = step(model, x)
    assert hf.apply(model).left[0].why == "its forward adds something to the loss"
    agree(step(model, x), expected)


def test_a_penalty_that_sets_in_later_is_seen() -> None:
    model, x = stock("Llama").train(), tokens()
    model.by, model.losses = 0.0, []  # type: ignore[assignment]

    def penalty(self: Any, out: Any) -> None:
        if out.loss is not None and self.by:
            out.loss = out.loss + self.by * out.logits.logsumexp(-1).square().mean()

    own_class(model, penalty)
    hf.apply(model)
    assert model(x, labels=x).logits is None
    model.by = 0.1  # type: ignore[assignment]
    found = step(model, x)
    hf.revert(model)
    agree(found, step(model, x))


@pytest.mark.parametrize(
    ("name", "end"),
    [
        *(("Llama", "MLP"), ("Llama", "Norm"), ("Llama", "SiLUActivation")),
        *(("Mixtral", "Router"), ("Mixtral", "SiLUActivation")),
    ],
)
def test_a_part_that_is_detached_stays_so(name: str, end: str) -> None:
    """Of two modules with the same outputs, the one with other gradients is another."""
    model, x = stock(name).train(), tokens()
    for module in [*model.modules()]:
        if type(module).__name__.endswith(end):
            kind = type(module)

            def forward(self: Any, x: Tensor) -> Any:
                return super(type(self), self).forward(x.lerp(x.detach(), 0.5))

            module.__class__ = type(kind.__name__, (kind,), {"forward": forward})
    expected = step(model, x)
    hf.apply(model)
    agree(step(model, x), expected)


class Gain(nn.Module):
    """A scale that is learned, as it begins."""

    def __init__(self) -> None:
        super().__init__()
        self.by = nn.Parameter(torch.ones(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.by * x


class Scaled(modeling_llama.LlamaMLP):
    """An MLP whose output is scaled."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.gain = Gain()

    def forward(self, x: Tensor) -> Tensor:
        return self.gain(super().forward(x))


def test_what_changes_nothing_yet_learns() -> None:
    mlp = Scaled(stock("Llama").config)
    hf.apply(mlp)
    mlp(torch.randn(3, 32)).sum().backward()
    assert mlp.gain.by.grad is not None


class Swish(nn.Module):
    """A SiLU whose slope is learned, as it begins."""

    def __init__(self) -> None:
        super().__init__()
        self.beta = nn.Parameter(torch.ones((), dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        return x * (self.beta * x).sigmoid()


@pytest.mark.parametrize("name", ["Llama", "Mixtral"])
def test_an_activation_that_is_learned_learns(name: str) -> None:
    model, x = stock(name).train(), tokens()
    for module in [*model.modules()]:
        if hasattr(module, "act_fn"):
            module.act_fn = Swish()
    expected = step(model, x)
    hf.apply(model)
    agree(step(model, x), expected)


@pytest.mark.parametrize("name", ["Llama", "Mixtral"])
def test_what_a_forward_keeps_is_kept(name: str) -> None:
    """As the outputs of a layer that is studied, and the tokens of experts that are counted."""
    model, x = stock(name).train(), tokens()
    kinds = ("Norm", "MLP", "Router", "ForCausalLM")
    modules = [m for m in model.modules() if type(m).__name__.endswith(kinds)]
    for module in modules:
        own_class(module, lambda self, out: setattr(self, "kept", out))
    report = hf.apply(model)
    assert report.left[0].why == "its forward keeps something on the model"
    assert model(x, labels=x).logits is not None
    assert all(hasattr(m, "kept") for m in modules)


def test_a_config_that_asks_for_a_tuple_gets_one() -> None:
    config = CONFIG_MAPPING["bloom"](vocab_size=64, hidden_size=32, n_layer=1, n_head=2)
    model, x = AutoModelForCausalLM.from_config(config).train(), tokens()
    report = hf.apply(model)
    assert "loss" in {e.part for e in report.replaced}
    expected = model(x, labels=x, return_dict=True).loss
    model.config.return_dict = False
    assert torch.allclose(model(x, labels=x)[0], expected)
    assert model(x, labels=x, return_dict=True).logits is None


def test_callers_find_the_parameters_of_forward() -> None:
    """Trainer drops the columns that are none of them."""
    model = stock("Qwen3")
    known = list(inspect.signature(model.forward).parameters)
    hf.apply(model)
    assert list(inspect.signature(model.forward).parameters) == known


@pytest.mark.parametrize("name", FAMILIES)
def test_stand_ins_follow_a_recipe_or_say_why_not(name: str) -> None:
    model, x = stock(name).train(), tokens()
    hf.apply(model)
    recipe = fo.recipes.Float8BlockScaling()
    with fo.recipe(recipe):
        text = fo.explain(model, x, labels=x)
    ops = [op for _, op in walk(model) if isinstance(op, Op)]
    weights = {
        op: [n for n in op.parameter_names() if (p := getattr(op, n)) is not None and p.dim() > 1]
        for op in ops
    }
    silent = [op for op, own in weights.items() if own and not op.multiplies and not op.stays_high]
    assert not silent
    assert all(type(op).__name__ in text and op.stays_high in text for op in ops if op.stays_high)
    ignoring = any(op.ignores_recipe for op in ops)
    refused = pytest.raises(fo.FusionMissError, match=r"not quantized.*recipe={glob")
    with fo.recipe(recipe, strict=True), refused if ignoring else nullcontext():
        model(x, labels=x)
    follows = any(op.multiplies for op in ops)
    assert follows or ignoring
    refused = pytest.raises(fo.FuseOpsError, match=r"would change nothing.*MLP: projections")
    with nullcontext() if follows else refused:
        fo.configure(model, recipe=recipe, strict_recipe=True)
    if follows and ignoring:
        fo.configure(model, recipe={"**.experts.**": recipe})
        model(x, labels=x)


@pytest.mark.parametrize("name", MOE)
def test_scales_of_lent_experts_move_with_the_optimizer_of_the_model(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    advanced: list[ScaleState] = []
    monkeypatch.setattr(ScaleState, "advance", lambda state: advanced.append(state))
    model, x = stock(name).float().train(), tokens()
    hf.apply(model)
    for path, p in model.named_parameters():
        p.requires_grad_(not path.endswith("_bias"))  # GPT-OSS's weights are views, transposed
    fo.configure(model, recipe=fo.recipes.DelayedScaling())
    model(x, labels=x).loss.backward()
    apart = nn.Parameter(torch.zeros(1))
    apart.grad = torch.ones(1)
    torch.optim.SGD(model.parameters(), lr=0.0).step()
    known = [op.__dict__[SCALES] for _, op in walk(model) if SCALES in op.__dict__]
    assert len(known) == 2 * sum(hasattr(m, "has_gate") for m in model.modules())
    assert sorted(map(id, advanced)) == sorted(map(id, known))
    torch.optim.SGD([apart], lr=0.0).step()
    assert len(advanced) == len(known)


@pytest.mark.parametrize("name", FAMILIES)
def test_no_weight_of_a_stock_model_is_said_to_live_in_fp8(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    recipe = fo.recipes.Float8BlockScaling()
    model, x = stock(name), tokens()
    with fo.quantized_init(recipe), pytest.raises(fo.FuseOpsError, match=r"hf.apply .* outside"):
        hf.apply(model)
    assert not any(STAND_IN in vars(module) for module in model.modules())
    if name in MOE:
        model.set_experts_implementation("fuseops")
        with pytest.raises(fo.FuseOpsError, match="outside"), fo.quantized_init(recipe):
            model(x)
    with fo.quantized_init(recipe):
        AutoModelForCausalLM.from_config(model.config)
    (said,) = caplog.messages
    assert "no weight lives in FP8" in said and "Linear" in said


def test_a_hook_that_comes_later_is_run() -> None:
    """And so is an adapter in the place of a projection."""
    model, x = stock("Llama"), tokens()
    expected = step(copy.deepcopy(model), x)
    hf.apply(model)
    seen: list[str] = []
    for layer in model.model.layers:  # type: ignore[union-attr]
        layer.mlp.up_proj.register_forward_hook(lambda *_: seen.append("hook"))
    agree(step(model, x), expected)
    assert len(seen) == 2


def test_configuration_reaches_what_stands_in() -> None:
    model, x = stock("Mixtral"), tokens()
    hf.apply(model)
    assert "routed_mlp" in fo.explain(model, x)
    fo.configure(model, disable=["routed_mlp"])
    text = fo.explain(model, x)
    assert "rule routed_mlp" not in text and "rule grouped_mlp" in text
    assert "model.layers.0.mlp.experts" in text.replace("{0-1}", "0")


@pytest.mark.parametrize("name", ["Llama", "Gemma 3", "Nemotron-H", "DeepSeek-V3", "GPT-OSS"])
def test_what_stands_in_alone_keeps_the_laws(name: str) -> None:
    """Every op over lent parameters: its backward is the vjp of its forward, for every subset of needs."""
    model = stock(name)
    hf.apply(model)
    stand_ins = {
        str(op): op for m in model.modules() if isinstance(op := vars(m).get(STAND_IN), fo.Op)
    }
    drawn = functools.partial(torch.randn, dtype=torch.float64)
    for op in stand_ins.values():
        if isinstance(op, rope.RotaryPair):
            q, k = (drawn(2, 3, heads, op.width) for heads in (3, 2))
            cos, sin = (drawn(2, 3, op.width // 2) for _ in range(2))
            fo.testing.assert_bwd_is_vjp(op, q, keys=k, cos=cos, sin=sin)
            continue
        width = op.normalized_shape[0] if isinstance(op, fo.ops.RMSNorm) else op.width
        keeps_the_laws(op, width)
    assert len(stand_ins) > 1


# --- positions


def test_queries_and_keys_are_turned_in_one_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """A layer and direction, with positions that all rows share and with positions of each row."""
    model, x = stock("Llama"), tokens()
    each = torch.stack([torch.arange(9), torch.arange(9).flip(0)])
    expected = [step(model, x, **keywords) for keywords in ({}, {"position_ids": each})]
    hf.apply(model)
    launches: list[str] = []
    for name in ("apply_rope", "apply_rope_pair"):
        own = getattr(fo.kernels, name)
        monkeypatch.setattr(
            fo.kernels, name, lambda *a, own=own, name=name: launches.append(name) or own(*a)
        )
    for keywords, wanted in zip(({}, {"position_ids": each}), expected, strict=True):
        launches.clear()
        agree(step(model.train(), x, skip_logits=False, **keywords), wanted)
        assert launches == ["apply_rope_pair"] * 4


def in_a_closure(function: Any) -> Any:
    @functools.wraps(function)
    def wrapper(*args: Any, **keywords: Any) -> Any:
        return function(*args, **keywords)

    return wrapper


def in_an_attribute(function: Any) -> Any:
    @functools.wraps(function)
    def wrapper(*args: Any, **keywords: Any) -> Any:
        return wrapper.__wrapped__(*args, **keywords)  # type: ignore[attr-defined]

    return wrapper


@pytest.mark.parametrize(
    ("decorators", "launched"),
    [
        ([in_a_closure], 2),
        ([in_a_closure, in_a_closure], 2),
        ([in_an_attribute], 0),
        ([in_a_closure, in_an_attribute], 0),
    ],
)
def test_decorators_of_a_forward_are_kept(
    decorators: list[Any], launched: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Renamed keywords of transformers, caches of users: an attention without them would be another one."""
    model, x = stock("Llama"), tokens()
    expected = step(copy.deepcopy(model), x)
    attention: Any = type(model.model.layers[0].self_attn)  # type: ignore[union-attr,index]
    calls: list[str] = []

    def counted(function: Any) -> Any:
        @functools.wraps(function)
        def wrapper(*args: Any, **keywords: Any) -> Any:
            calls.append("decorator")
            return function(*args, **keywords)

        return wrapper

    forward = functools.reduce(lambda f, decorator: decorator(f), decorators, attention.forward)
    monkeypatch.setattr(attention, "forward", counted(forward))
    own = fo.kernels.apply_rope_pair
    monkeypatch.setattr(fo.kernels, "apply_rope_pair", lambda *a: calls.append("launch") or own(*a))
    whys = why_rope_is_left(model)
    agree(step(model, x), expected)
    held = (
        {None} if launched else {"a decorator of its forward holds it elsewhere than in a closure"}
    )
    assert whys == held
    # A layer and direction
    assert calls.count("decorator") == 2 and calls.count("launch") == 2 * launched


def rotary_model(kind: str, **sizes: Any) -> Any:
    config = CONFIG_MAPPING[kind](**{k: v for k, v in {**SIZES, **sizes}.items() if v is not None})
    return AutoModelForCausalLM.from_config(config).double()


def why_rope_is_left(model: Any) -> set[str | None]:
    return {e.why for e in hf.apply(model).entries if e.part == "rope"}


def test_other_rotations_stay_as_they_are_written() -> None:
    x = tokens()
    partial = rotary_model("stablelm", head_dim=None)
    expected = step(partial, x)
    assert why_rope_is_left(partial) == {"partial: 4 of 16 columns are turned"}
    agree(step(partial, x), expected)
    (why,) = why_rope_is_left(stock("DeepSeek-V3"))
    assert (
        why == "apply_rotary_pos_emb_interleave turns other pairs of columns than i and D / 2 + i"
    )


def test_a_rotation_that_detaches_stays_as_it_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    model, x = stock("Llama"), tokens()
    own = modeling_llama.apply_rotary_pos_emb

    def detached(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> Any:
        return own(q, k.detach(), cos, sin)

    monkeypatch.setattr(modeling_llama, "apply_rotary_pos_emb", detached)
    expected = step(model, x)
    hf.apply(model)
    agree(step(model, x), expected)


def test_tables_whose_halves_differ_keep_their_function() -> None:
    model: Any = stock("Llama")
    table = model.model.rotary_emb

    class OddRotaryEmbedding(type(table)):  # type: ignore[misc]
        def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
            cos, sin = super().forward(x, position_ids)
            return torch.cat([cos[..., :8], 2 * cos[..., 8:]], -1), sin

    table.__class__ = OddRotaryEmbedding
    (why,) = why_rope_is_left(model)
    assert why == "OddRotaryEmbedding gives other angles to the second half of the columns"
    del model.model.rotary_emb
    assert why_rope_is_left(model) == {"where its angles come from is not known"}


def test_a_norm_without_a_weight_is_left() -> None:
    """DiffLlama's norms of heads: an RMSNorm of torch whose weight is None."""
    model, x = rotary_model("diffllama", num_key_value_heads=2), tokens()
    expected = step(model, x)
    norms = [e for e in hf.apply(model).entries if e.part == "norm"]
    assert {e.why for e in norms} == {None, "has no weight"}
    agree(step(model, x), expected)


def test_autocast_rounds_as_stock_does() -> None:
    model, x = stock("Llama").float(), tokens()
    expected = step(copy.deepcopy(model), x)
    found = []
    for apply in (lambda m: None, hf.apply):
        apply(model)
        with torch.autocast("cpu", torch.bfloat16):
            found.append(step(model, x))
    errors = [(float((f[k] - t).norm() / t.norm()), k) for f in found for k, t in expected.items()]
    stock_worst, ours = max(errors[: len(expected)]), max(errors[len(expected) :])
    assert ours[0] < 1.5 * stock_worst[0] < 0.5, (ours, stock_worst)


def test_no_module_is_refused() -> None:
    with pytest.raises(fo.FuseOpsError, match=r"expects an nn\.Module, got str"):
        hf.apply("Qwen/Qwen3-30B-A3B")  # type: ignore[arg-type]


# --- training


class Rows(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 16

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        x = torch.randint(3, 64, (8,), generator=torch.Generator().manual_seed(i))
        return {"input_ids": x, "labels": x}


def trained(model: Any, folder: Any, steps: int, resume: bool = False) -> dict[str, Tensor]:
    options = dict(per_device_train_batch_size=2, gradient_accumulation_steps=2, learning_rate=0.1)
    options |= dict(
        optim="sgd", save_steps=2, report_to=[], use_cpu=True, disable_tqdm=True, logging_steps=100
    )
    arguments: Any = TrainingArguments(str(folder), max_steps=steps, **options)
    Trainer(model, arguments, train_dataset=Rows()).train(resume_from_checkpoint=resume)
    return {n: p.detach().clone() for n, p in model.named_parameters()}


def test_trainer_and_resume(tmp_path: Any) -> None:
    """As stock trains, whole and from a checkpoint."""
    for steps in ("all", "the last two"):
        found = []
        for ours in (True, False):
            model, folder = stock("Mixtral"), tmp_path / str(ours)
            if ours:
                hf.apply(model)
            if steps == "the last two":
                shutil.rmtree(folder / "checkpoint-4")
            found.append(trained(model, folder, 4, resume=steps == "the last two"))
        torch.testing.assert_close(*found, rtol=1e-5, atol=1e-6)


def test_trainer_s_steps_end_what_is_kept(tmp_path: Path) -> None:
    """Micro-batches share quantized weights, steps do not: as if they were quantized where they are read."""
    found = []
    for weights in ("none", "step"):
        model = stock("Mixtral").float()
        hf.apply(model)
        with fo.recipe(fo.recipes.Float8BlockScaling(weights=weights), strict=True):
            found.append(trained(model, tmp_path / weights, 3))
        assert bool(fo.weights_changed(model)) == (weights == "step")
    assert all(torch.equal(t, found[1][name]) for name, t in found[0].items())


@pytest.mark.slow
def test_accelerate_on_two_processes() -> None:
    """Gradients averaged over two ranks are those of the stock model over both batches."""
    script = Path(__file__).with_name("on_two_ranks.py")
    launch = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        "--standalone",
        "--nproc-per-node",
        "2",
    ]
    said = subprocess.run([*launch, str(script)], capture_output=True, text=True, timeout=200)
    assert said.returncode == 0, said.stderr[-3000:]
    assert said.stdout.count("equal") == 2
