"""`hf.apply(model, pack=True)`: gate and up as one parameter, under the names of a stock checkpoint."""

from __future__ import annotations

import copy
import pickle
import shutil
from typing import Any

import pytest
import torch
from families import Step, agree, step, stock, tokens
from test_hf_apply import trained
from torch import nn
from transformers import AutoModelForCausalLM

import fuseops as fo
from fuseops.integrations import hf
from fuseops.integrations.hf import packing
from fuseops.ops.paths import STAND_IN

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::UserWarning")
GATED = ["Llama", "Qwen2-MoE", "DeepSeek-V3", "Gemma 2"]


def apart(found: Step) -> Step:
    """Gradients under the names of the stock model."""
    named: Step = {}
    for name, t in found.items():
        before, packed, after = name.partition(f".{packing.PACKED}.")
        names = [f"{before}.{h}.{after}" for h in packing.HALVES] if packed else [name]
        named |= zip(names, t.chunk(2) if packed else [t], strict=True)
    return named


@pytest.mark.parametrize("name", GATED)
def test_as_the_stock_model(name: str, tmp_path: Any) -> None:
    """Numbers, gradients and checkpoints, both ways, and back in its own parameters."""
    model, x = stock(name), tokens()
    own, expected = model.state_dict(), step(stock(name), x)
    report = hf.apply(model, pack=True)
    assert "gate and up packed" in str(report) and str(hf.apply(model, pack=True)) == str(report)
    assert any(packing.is_packed(m) for m in model.modules())
    agree(apart(step(model, x)), expected)
    model.save_pretrained(tmp_path)  # type: ignore[operator]
    options: Any = dict(dtype=torch.float64, experts_implementation="eager")
    again = AutoModelForCausalLM.from_pretrained(tmp_path, **options).eval()
    agree(step(again, x), expected)
    moved = {n: t + 1 for n, t in own.items() if t.is_floating_point()}
    model.load_state_dict({**own, **moved})  # of a stock model
    hf.revert(model)
    back = model.state_dict()
    assert back.keys() == own.keys() and all(
        torch.equal(back[n], moved.get(n, own[n])) for n in own
    )
    assert [n for n, _ in model.named_parameters()] == [
        n for n, _ in stock(name).named_parameters()
    ]


def test_shards_of_a_stock_checkpoint() -> None:
    """Of which one may have a gate and another its up: nothing is lost, and what no shard has is missing."""
    model, own = stock("Qwen2-MoE"), stock("Qwen2-MoE").state_dict()
    model.load_state_dict({n: torch.zeros_like(t) for n, t in own.items()})
    hf.apply(model, pack=True)
    for name, t in own.items():
        assert not model.load_state_dict({name: t}, strict=False).unexpected_keys
    half = next(name for name in own if "up_proj" in name and name.endswith("weight"))
    del own[half]
    with pytest.raises(RuntimeError, match=f'Missing key.*"{half}"'):
        model.load_state_dict(own)
    hf.revert(model)
    expected = stock("Qwen2-MoE").state_dict()
    assert all(torch.equal(t, expected[n]) for n, t in model.state_dict().items())


def _stand_ins(model: nn.Module) -> list[Any]:
    return [vars(m)[STAND_IN] for m in model.modules() if packing.is_packed(m)]


def test_the_packed_op_keeps_the_laws() -> None:
    model = stock("Llama")
    hf.apply(model, pack=True)
    fo.testing.assert_bwd_is_vjp(_stand_ins(model)[0], torch.randn(3, 32, dtype=torch.float64))


def test_a_copy_and_what_runs_as_written() -> None:
    """A hook on the packed projection runs; a copy, and one through pickle, has weights of its own, and is unpacked."""
    model, x = stock("Llama"), tokens()
    expected = step(copy.deepcopy(model), x)
    hf.apply(model, pack=True)
    others, seen = (copy.deepcopy(model), pickle.loads(pickle.dumps(model))), []
    model.model.layers[0].mlp.gate_up_proj.register_forward_hook(lambda *_: seen.append(1))  # type: ignore[index, union-attr]
    with torch.no_grad():
        for p in model.parameters():
            p.mul_(1)
    for again in (False, True):
        if again:
            hf.apply(model)
        agree(apart(step(model, x)), expected)
        assert seen
        seen.clear()
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    for other in others:
        agree(apart(step(other, x)), expected)
        hf.revert(other)
        agree(step(other, x), expected)
        assert other._weight_conversions == []


def test_what_cannot_be_packed_stays_apart_with_the_reason() -> None:
    model = stock("Llama")
    first, second = (layer.mlp for layer in model.model.layers)  # type: ignore[union-attr]
    first.gate_proj.requires_grad_(False)
    second.up_proj.weight = first.up_proj.weight
    report = str(hf.apply(model, pack=True))
    assert "differ in more than their values" in report or "shared with another" in report
    assert not any(packing.is_packed(m) for m in model.modules())
    dry = stock("Llama")
    hf.apply(dry, pack=True, dry_run=True)
    assert dry.state_dict().keys() == stock("Llama").state_dict().keys()


def test_trainer_resumes(tmp_path: Any) -> None:
    """From a checkpoint of stock names, to the weights that training in one go ends with."""
    found = []
    for resume in (False, True):
        model = stock("Llama")
        hf.apply(model, pack=True)
        found.append(trained(model, tmp_path, 4, resume))
        shutil.rmtree(tmp_path / "checkpoint-4")
    torch.testing.assert_close(*found, rtol=1e-5, atol=1e-6)
