"""What becomes of a model after `hf.apply` is what becomes of a stock one: nothing that it says is kept from before."""

from __future__ import annotations

import copy
import functools
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from families import FAMILIES, agree, step, stock, tokens
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn
from transformers.loss import loss_utils
from transformers.models.llama import modeling_llama

from fuseops.integrations import hf

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning")
Change = Callable[[Any], None]


def pair(name: str, change: Change, **options: Any) -> tuple[Any, Any]:
    """A model that fuseops runs and a stock one, changed alike."""
    ours, theirs = stock(name), stock(name)
    hf.apply(ours, **options)
    for model in (ours, theirs):
        model.train()
        torch.manual_seed(1)
        change(model)
    return ours, theirs


# --- numbers, of which a module computes

# which describe parameters that are there, draw random numbers, or give other gradients than tensors
OTHERS = re.compile("_|has_|is_|training|sparse|.*dropout|.*jitter")


def numbers(model: nn.Module) -> list[tuple[str, str]]:
    """(path of a module, name) of those that modules say."""
    return [
        (path, name)
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if isinstance(value, bool | float) and not OTHERS.match(name)
    ]


def another(value: bool | float) -> bool | float:
    return not value if isinstance(value, bool) else 1.5 * value + 0.01


@given(name=st.sampled_from([*FAMILIES]), data=st.data())
def test_any_number_that_a_module_says(name: str, data: st.DataObject) -> None:
    at = data.draw(st.lists(st.sampled_from(numbers(stock(name))), min_size=1, max_size=3))

    def change(model: Any) -> None:
        for path, attribute in dict.fromkeys(at):
            module = model.get_submodule(path)
            setattr(module, attribute, another(getattr(module, attribute)))

    ours, theirs = pair(name, change)
    x = tokens()
    try:
        expected = step(theirs, x)
    except Exception:  # it means another model, which this one is not
        return
    agree(step(ours, x), expected)


# --- whatever else


def every(name: str, value: Callable[[], Any]) -> Change:
    """Another child or attribute of this name, in every module that has one."""

    def change(model: Any) -> None:
        for module in [*model.modules()]:
            if hasattr(module, name):
                setattr(module, name, value())

    return change


def three_experts(model: Any) -> None:
    for module in model.modules():
        for name in {"top_k", "num_experts_per_tok"} & vars(module).keys():
            setattr(module, name, 3)


def hooks(model: Any) -> None:
    for module in model.modules():
        if type(module).__name__.endswith(
            ("SiLU", "SiLUActivation", "GELUTanh", "ReLUSquaredActivation")
        ):
            module.register_forward_hook(lambda module, args, out: 1.5 * out)


def mean_square(logits: Tensor, labels: Tensor, vocab_size: int, **_: Any) -> Tensor:
    return logits.square().mean()


def another_head(model: Any) -> None:
    model.lm_head = nn.Linear(32, 64, dtype=torch.float64)


def head_of(scale: float) -> Change:
    def change(model: Any) -> None:
        model.lm_head.weight = nn.Parameter(scale * model.lm_head.weight.detach())

    return change


def twice_as_much(model: Any) -> None:
    """Other classes, whose forwards add to those that they inherit."""

    def forward(self: Any, *args: Any, **keywords: Any) -> Any:
        out = super(type(self), self).forward(*args, **keywords)
        return 2 * out if isinstance(out, Tensor) else out

    for module in model.modules():
        if type(module).__name__.endswith(("Norm", "MLP", "Experts", "ForCausalLM")):
            module.__class__ = type(type(module).__name__, (type(module),), {"forward": forward})


CHANGES: dict[str, tuple[Change, tuple[str, ...]]] = {
    "another activation": (every("act_fn", nn.ReLU), ("Llama", "Gemma 2", "Qwen2-MoE", "Mixtral")),
    "hooks on activations": (hooks, ("Llama", "Nemotron-H", "Mixtral")),
    "more experts": (three_experts, ("Mixtral", "DeepSeek-V3", "GPT-OSS")),
    "another loss": (every("loss_function", lambda: mean_square), ("Llama", "Qwen3-MoE")),
    "another head": (another_head, ("Llama", "Mixtral", "Gemma 2")),
    "other classes": (twice_as_much, ("Llama", "Mixtral")),
    "more tokens": (lambda m: m.resize_token_embeddings(80), ("Llama", "Qwen3-MoE")),
    "another weight of the head": (head_of(1.5), ("Llama", "Gemma 2")),
    "another soft cap": (
        lambda m: setattr(m.config, "final_logit_softcapping", 2.0),
        ("Gemma 2", "Gemma 3"),
    ),
    "one more child": (lambda m: m.add_module("value_head", nn.Linear(32, 1)), ("Llama",)),
    "no soft cap": (lambda m: setattr(m.config, "final_logit_softcapping", None), ("Gemma 2",)),
    "another weight of the auxiliary loss": (
        lambda m: setattr(m, "router_aux_loss_coef", 5.0),
        ("Mixtral", "OLMoE"),
    ),
}
CELLS = [(change, name) for change, (_, names) in CHANGES.items() for name in names]


@pytest.mark.parametrize("what, name", CELLS)
@pytest.mark.parametrize("again", [False, True])
def test_a_change_is_that_of_a_stock_model(what: str, name: str, again: bool) -> None:
    """again: `hf.apply` looks at the changed model."""
    ours, theirs = pair(name, CHANGES[what][0])
    if again:
        hf.apply(ours)
    x = tokens()
    more = {"output_router_logits": True} if "auxiliary" in what else {}
    agree(step(ours, x, **more), step(theirs, x, **more))
    twin = copy.deepcopy(ours)
    agree(step(twin, x, **more), step(theirs, x, **more))


@pytest.mark.parametrize("name", ["Llama", "Mixtral", "GPT-OSS"])
def test_classes_of_one_s_own_are_left(name: str) -> None:
    model, x = stock(name).train(), tokens()
    twice_as_much(model)
    expected = step(model, x)
    hf.apply(model)
    agree(step(model, x), expected)


@pytest.mark.parametrize("pack", [False, True])
@pytest.mark.parametrize("name", ["Mixtral", "DeepSeek-V3", "GPT-OSS", "Llama"])
def test_what_wraps_a_forward_calls_it_after_apply_and_revert(name: str, pack: bool) -> None:
    """As accelerate wraps that of a model for mixed precision."""
    model, x = stock(name).train(), tokens()
    expected = step(model, x)
    hf.apply(model, pack=pack)
    for module in model.modules():
        if "forward" in vars(module):
            module.forward = wrapped(module.forward)
    for _ in range(2):
        assert model(x, labels=x).logits is None
        hf.apply(model)
    hf.revert(model)
    assert model(x, labels=x).logits is not None
    agree(step(model, x), expected)


def wrapped(forward: Any) -> Any:
    return functools.wraps(forward)(lambda *args, **keywords: forward(*args, **keywords))


@pytest.mark.parametrize("again", [False, True])
def test_a_packed_mlp_takes_another_activation(again: bool) -> None:
    ours, theirs = pair("Llama", every("act_fn", nn.ReLU), pack=True)
    if again:
        hf.apply(ours, pack=True)
    x = tokens()
    found, expected = step(ours, x), step(theirs, x)
    shared = found.keys() & expected.keys()
    agree({n: found[n] for n in shared}, {n: expected[n] for n in shared})


def test_it_is_told_once(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fuseops.integrations.hf.stand_ins._warned", set())
    ours, _ = pair("Llama", every("act_fn", nn.ReLU))
    step(ours, tokens())
    said = "a LlamaMLP has changed since hf.apply, and runs as written: apply it again."
    assert [record.getMessage() for record in caplog.records] == [said]


@pytest.mark.parametrize("named", [False, True])
@pytest.mark.parametrize("again", [False, True])
def test_a_loss_that_is_patched_is_what_runs(
    named: bool, again: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Under the name of what it stands for, and under its own."""
    ours, theirs = pair("Llama", lambda m: None)
    own, x = loss_utils.fixed_cross_entropy, tokens()

    def twice(source: Tensor, *args: Any, **keywords: Any) -> Tensor:
        return 2 * own(source, *args, **keywords)

    changed = functools.wraps(own)(twice) if named else twice
    monkeypatch.setattr(loss_utils, "fixed_cross_entropy", changed)
    if again:
        hf.apply(ours)
    agree(step(ours, x), step(theirs, x))
    monkeypatch.undo()
    whole = functools.wraps(loss_utils.ForCausalLMLoss)(mean_square)
    for model in (ours, theirs):
        model.loss_function = whole if named else mean_square
    agree(step(ours, x), step(theirs, x))


@pytest.mark.parametrize("name", ["eager_attention_forward", "apply_rotary_pos_emb"])
@pytest.mark.parametrize("again", [False, True])
def test_a_file_that_is_patched_is_what_runs(
    name: str, again: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Attention is a copy of the function of its file, with the names that this had."""
    ours, theirs = pair("Llama", lambda m: m.set_attn_implementation("eager"))
    own, x = getattr(modeling_llama, name), tokens()
    before = step(ours, x)

    def patched(first: Any, *args: Any, **keywords: Any) -> Any:
        found, *more = own(first, *args, **keywords)
        return (2 * found, *more)

    monkeypatch.setattr(modeling_llama, name, patched)
    if again:
        hf.apply(ours)
    expected = step(theirs, x)
    agree(step(ours, x), expected)
    monkeypatch.undo()
    agree(step(ours, x), before)


def every_number(name: str, value: bool | float) -> Change:
    return every(name, lambda: value)


def doubled(model: Any) -> None:
    for module in model.modules():
        if hasattr(module, "down_proj"):
            module.down_proj.forward = functools.partial(twice, module.down_proj)


def twice(module: nn.Linear, x: Tensor) -> Tensor:
    return 2 * nn.Linear.forward(module, x)


COMPILED: dict[str, tuple[str, Change]] = {
    "activation": ("Llama", every("act_fn", nn.ReLU)),
    "epsilon": ("Llama", every_number("variance_epsilon", 0.5)),
    "loss": ("Llama", every("loss_function", lambda: mean_square)),
    "forward of a projection": ("Llama", doubled),
    "soft cap": ("Gemma 2", CHANGES["another soft cap"][0]),
    "more experts": ("Qwen3-MoE", three_experts),
    "weights of experts as they are": ("Qwen3-MoE", every_number("norm_topk_prob", False)),
    "activation of experts": ("Qwen3-MoE", every("act_fn", nn.ReLU)),
}


@pytest.mark.parametrize("what", COMPILED)
def test_compiled_code_follows_a_change(what: str) -> None:
    """Dynamo guards what was asked about outside of its trace."""
    name, change = COMPILED[what]
    model, x = stock(name).train(), tokens()
    hf.apply(model)
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager")
    before = compiled(x, labels=x).loss.detach()
    change(model)
    after = compiled(x, labels=x).loss.detach()
    torch.testing.assert_close(after, model(x, labels=x).loss.detach())
    assert abs(float(after - before)) > 1e-5
