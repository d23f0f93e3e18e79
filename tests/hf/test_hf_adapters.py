"""Adapters of PEFT that fuseops runs: equal to PEFT's own, and no tensor of a weight's size is made for them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from families import agree, keeps_the_laws, step, stock, tokens
from peft import AdaLoraConfig, LoraConfig, get_peft_model
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fuseops.errors import FuseOpsError
from fuseops.integrations import hf
from fuseops.integrations.hf import adapters, mlp
from fuseops.ops.paths import STAND_IN

pytestmark = pytest.mark.filterwarnings(
    "ignore::FutureWarning",
    "ignore::UserWarning",
    "ignore:.*(rank|alpha)_pattern keys:RuntimeWarning",
)
EXPERTS = ["experts.gate_up_proj", "experts.down_proj"]
PROJECTIONS = r".*\.(q_proj|gate_proj|up_proj|down_proj)"


def wrapped(name: str, **options: Any) -> Any:
    """A model with adapters that add something, the same in every call."""
    options.setdefault("target_modules", PROJECTIONS if name == "Llama" else [])
    if name != "Llama":
        options.setdefault("target_parameters", EXPERTS)
    torch.manual_seed(1)
    model = get_peft_model(stock(name), LoraConfig(r=2, lora_alpha=3, **options))
    return filled(model)


def filled(model: Any) -> Any:
    for path, p in model.named_parameters():
        if "lora_" in path:
            torch.manual_seed(len(path))
            nn.init.normal_(p, 0.0, 0.1)
    return model


class Made(TorchDispatchMode):
    """The largest tensor that a step makes, and what makes it."""

    def __init__(self) -> None:
        super().__init__()
        self.largest: tuple[int, str] = (0, "")

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        known = {
            t.untyped_storage()._cdata
            for t in tree_leaves((args, kwargs))
            if isinstance(t, torch.Tensor)
        }
        for t in tree_leaves(out):
            if isinstance(t, torch.Tensor) and t.untyped_storage()._cdata not in known:
                self.largest = max(self.largest, (t.numel(), str(func)))
        return out


@pytest.mark.parametrize("name", ["Mixtral", "GPT-OSS"])
def test_no_weight_is_made_whole(name: str) -> None:
    """PEFT makes weights of the experts' full size, and gradients of them; a step of ours makes nothing as large."""
    model, x = wrapped(name), tokens(1, 3)
    expected = step(model, x)
    base = model.get_base_model()
    size = next(p.numel() for n, p in base.named_parameters() if "down_proj" in n and p.dim() == 3)
    made = []
    for apply in (False, True):
        if apply:
            report = hf.apply(base)
            assert [e.by for e in report.replaced if e.part == "adapter"]
            agree(step(model, x), expected)
        with Made() as mode:
            model(x, labels=x).loss.backward()
        made.append(mode.largest)
    assert made[0][0] >= size > made[1][0], made


def test_adapters_that_come_later_keep_no_weight() -> None:
    """PEFT then makes the weight for a moment; nothing of its size is saved, and no gradient of it made."""
    model: Any = stock("Mixtral")
    hf.apply(model)
    options: dict[str, Any] = {"target_modules": [], "target_parameters": EXPERTS}
    model, x = filled(get_peft_model(model, LoraConfig(r=2, lora_alpha=3, **options))), tokens(1, 3)
    agree(step(model, x), step(wrapped("Mixtral"), x))
    weights = {p.untyped_storage()._cdata for p in model.parameters()}
    size = min(p.numel() for n, p in model.named_parameters() if "down_proj" in n and p.dim() == 3)
    saved: list[int] = []

    def pack(t: torch.Tensor) -> torch.Tensor:
        saved.extend([t.numel()] * (t.untyped_storage()._cdata not in weights))
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        loss = model(x, labels=x).loss
    with Made() as mode:
        loss.backward()
    assert max(saved) < size > mode.largest[0], (max(saved), size, mode.largest)


def _off(model: Any) -> Any:
    model.disable_adapter_layers()


def _merged(model: Any) -> Any:
    model.merge_adapter()


def _two(model: Any) -> Any:
    target = (
        {"target_parameters": EXPERTS} if model.peft_config["default"].target_parameters else {}
    )
    modules = [] if target else PROJECTIONS
    model.add_adapter("more", LoraConfig(r=3, lora_alpha=2, target_modules=modules, **target))
    filled(model).base_model.set_adapter(["default", "more"])


@pytest.mark.parametrize("change", [_off, _merged, _two])
@pytest.mark.parametrize("name", ["Mixtral", "Llama"])
def test_what_peft_changes_is_what_runs(name: str, change: Callable[[Any], None]) -> None:
    """Adapters switched off, merged into the weights, or two of them, before `apply` and after, and after a call."""
    x, expected = tokens(), wrapped(name)
    change(expected)
    with torch.no_grad():
        wanted = expected(x).logits
    for order in ((hf.apply, change), (change, hf.apply)):
        model = wrapped(name)
        for what in order:
            what(model)
            with torch.no_grad():
                found = model(x).logits
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("name", ["Mixtral", "Llama"])
def test_adapters_switched_on_and_off_plan_nothing_anew(name: str) -> None:
    """As a reference model of preference training is called."""
    from hf_features import planned

    model, x = wrapped(name), tokens()
    hf.apply(model)
    for _ in range(2):
        with planned() as lines:
            model(x, labels=x).loss.backward()
            with model.disable_adapter(), torch.no_grad():
                model(x)
    assert not lines, lines


@pytest.mark.parametrize(
    "options", [{"use_dora": True}, {"lora_dropout": 0.5}, {"lora_bias": True}]
)
def test_other_adapters_run_as_peft_has_them(options: dict[str, Any]) -> None:
    model, x = wrapped("Llama", **options).train(), tokens()
    found = []
    for apply in (False, True):
        if apply:
            hf.apply(model)
        torch.manual_seed(3)
        model.zero_grad()
        model(x, labels=x).loss.backward()
        found.append({n: p.grad for n, p in model.named_parameters() if p.grad is not None})
    agree(*found)


@pytest.mark.parametrize("names", ["gate_proj", "up_proj", "gate_proj|up_proj|down_proj"])
def test_adapters_of_a_part_of_a_first_mlp(names: str) -> None:
    """Its x needs no gradient, and not all of its products do."""
    model, x = wrapped("Llama", target_modules=rf".*\.({names})"), tokens()
    expected = step(model, x)
    hf.apply(model)
    agree(step(model, x), expected)


def test_adalora_is_no_lora() -> None:
    targets = ["q_proj", "gate_proj", "down_proj"]
    config = AdaLoraConfig(r=2, init_r=3, total_step=10, target_modules=targets)
    model, x = get_peft_model(stock("Llama"), config), tokens()
    expected = step(model, x)
    assert "gate_proj is SVDLinear" in str(hf.apply(model))
    agree(step(model, x), expected)


def kept(run: Callable[[], Any], model: Any) -> int:
    """Numbers that a call keeps for its backward, beside parameters."""
    own = {p.untyped_storage()._cdata for p in model.parameters()}
    found: dict[int, int] = {}

    def pack(t: torch.Tensor) -> torch.Tensor:
        storage = t.untyped_storage()
        if storage._cdata not in own:
            found[storage._cdata] = storage.nbytes() // t.itemsize
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        run()
    return sum(found.values())


@pytest.mark.parametrize("order", ["wrap, apply", "apply, wrap"])
def test_an_adapted_mlp_stays_one_op(order: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It keeps x, h and what went through the factors; no forward of a projection runs."""
    name, model = "Llama", stock("Llama")
    if order == "wrap, apply":
        model = wrapped(name)
        report = str(hf.apply(model))
        assert "one op, swiglu, with adapters of gate_proj, up_proj, down_proj" in report
    else:
        hf.apply(model)
        config = LoraConfig(r=2, lora_alpha=3, target_modules=PROJECTIONS)
        model = filled(get_peft_model(model, config))
    module = next(m for n, m in model.named_modules() if n.endswith("layers.0.mlp"))
    for part in (module.gate_proj, module.up_proj, module.down_proj):
        monkeypatch.setattr(type(part), "forward", None)
        part.__dict__.pop("forward", None)
    rows, rank = 5, 2
    width, hidden = module.down_proj.out_features, module.down_proj.in_features
    x = torch.randn(rows, width, dtype=torch.float64, requires_grad=True)
    # times its scale
    factors = sum(p.numel() for n, p in module.named_parameters() if "lora_B" in n)
    assert kept(lambda: module(x), module) <= rows * (width + 2 * hidden + 3 * rank) + factors


def test_gates_and_ups_with_adapters_are_not_packed() -> None:
    model, x = wrapped("Llama"), tokens()
    expected = step(model, x)
    assert "pack before those are made" in str(hf.apply(model, pack=True))
    agree(step(model, x), expected)


def test_an_adapter_of_what_is_packed_is_in_the_op() -> None:
    """A hook has PEFT's forward run, to compare with."""
    model, x = stock("Llama"), tokens()
    hf.apply(model, pack=True)
    config = LoraConfig(r=2, target_modules=["gate_up_proj", "down_proj"])
    model = filled(get_peft_model(model, config))
    assert "gate and up packed, with adapters of gate_up_proj, down_proj" in str(hf.apply(model))
    found = step(model, x)
    for path, part in model.named_modules():
        if path.endswith("gate_up_proj"):
            part.register_forward_hook(lambda *_: None)
    agree(found, step(model, x))
    before = {n: p.clone() for n, p in model.state_dict().items()}
    with pytest.raises(FuseOpsError, match=r"gate_up_proj has adapters, .* nothing was reverted"):
        hf.revert(model)
    agree(model.state_dict(), before)
    agree(found, step(model, x))


def test_an_adapted_linear_keeps_the_laws() -> None:
    model = wrapped("Llama")
    hf.apply(model)
    found = [
        op
        for m in model.modules()
        if isinstance(op := vars(m).get(STAND_IN), adapters.AdaptedLinear)
    ]
    assert len(found) == 8
    whole = [op for m in model.modules() if isinstance(op := vars(m).get(STAND_IN), mlp.MLP)]
    for op in (found[0], whole[0]):
        keeps_the_laws(op, op.width)
    hf.revert(model)
    assert not [m for m in model.modules() if "forward" in m.__dict__]
