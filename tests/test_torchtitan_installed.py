"""Overrides on torchtitan's own classes, where it is installed. Beside a CPU build of torch, 0.3.0 is by

pip install --no-deps torchtitan spmd_types==0.2.3 tyro docstring-parser typeguard einops
"""

from __future__ import annotations

import copy
import importlib
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

for needed in ("tyro", "spmd_types", "torchtitan.config"):
    pytest.importorskip(needed, reason="torchtitan is not installed")

pytestmark = pytest.mark.filterwarnings("ignore")  # torchtitan's own
INTEGRATION = "fuseops.integrations.torchtitan"
MODELS = {  # with how many of their layers fuseops runs
    ("llama3", "debugmodel"): {"FusedFeedForward": 6},
    ("qwen3", "debugmodel"): {"FusedFeedForward": 8},
    ("qwen3", "debugmodel_moe"): {"FusedExperts": 8},
    ("deepseek_v3", "debugmodel"): {"FusedFeedForward": 6, "FusedExperts": 5},
}


@pytest.fixture
def titan() -> Iterator[Any]:
    """The integration over torchtitan's classes, registered once."""
    overrides = importlib.import_module("torchtitan.config.override")
    overrides.clear_overrides()
    sys.modules.pop(INTEGRATION, None)  # it may be over stand-ins
    yield importlib.import_module(INTEGRATION)
    sys.modules.pop(INTEGRATION, None)
    overrides.clear_overrides()


def stepped(layer: Any, x: Tensor) -> list[Tensor]:
    layer.zero_grad()
    x = x.clone().requires_grad_()
    y = layer(x)
    y.float().square().mean().backward()
    return [y.detach(), x.grad, *[p.grad for p in layer.parameters()]]  # type: ignore[list-item]


def agree(found: list[Tensor], expected: list[Tensor], tolerance: float) -> None:
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.dtype is theirs.dtype
        scale = float(theirs.float().abs().max())
        torch.testing.assert_close(mine, theirs, rtol=tolerance, atol=tolerance * scale)


def layers(model: nn.Module) -> dict[str, Any]:
    """Feed-forward layers and layers of experts, routers included, by path."""
    return {
        path: m
        for path, m in model.named_modules()
        if isinstance(getattr(m, "w2", None), nn.Linear) or hasattr(m, "routed_experts")
    }


@pytest.mark.parametrize("family, flavor", MODELS)
def test_layers_of_its_models_compute_what_they_did(titan: Any, family: str, flavor: str) -> None:
    overrides = importlib.import_module("torchtitan.config.override")
    config = importlib.import_module(f"torchtitan.models.{family}").model_registry(flavor).model
    torch.manual_seed(0)
    stock = config.build()
    stock.init_states()
    asked = [f"{INTEGRATION}.{name}" for name in ("feed_forward", "grouped_experts")]
    other = copy.deepcopy(config)
    overrides.apply_overrides(overrides.OverrideConfig(imports=asked), other)
    ours = other.build()
    assert ours.state_dict().keys() == stock.state_dict().keys()
    ours.load_state_dict(stock.state_dict())
    kinds = [type(m).__name__ for m in ours.modules()]
    assert {name: kinds.count(name) for name in MODELS[family, flavor]} == MODELS[family, flavor]
    x = torch.randn(2, 8, config.dim)
    found, expected = layers(ours), layers(stock)
    assert found.keys() == expected.keys() and expected
    for path, layer in expected.items():
        experts = hasattr(layer, "routed_experts")  # which multiply in bfloat16
        agree(stepped(found[path], x), stepped(layer, x), 3e-2 if experts else 1e-5)


@pytest.mark.parametrize("valid", [None, 14.0])
def test_the_loss_of_the_head_is_what_the_chunks_give(titan: Any, valid: float | None) -> None:
    from torchtitan.models.common.linear import Linear

    torch.manual_seed(0)
    head = Linear.Config(in_features=16, out_features=33).build()
    labels = torch.randint(0, 33, (2, 8))
    labels[0, 3] = -100
    x = torch.randn(2, 8, 16)
    tokens = None if valid is None else torch.tensor(valid)
    config = titan.ChunkedLossWrapper.Config(num_chunks=4)
    results = []
    for made in (config, titan.chunked_loss(config)):
        loss = made.build()
        loss.set_lm_head(head)
        head.zero_grad()
        hidden = x.clone().requires_grad_()
        value, _ = loss(1.0 * hidden, labels, tokens)
        value.backward()
        with torch.no_grad():
            evaluated, _ = loss(x, labels, tokens)
        results.append([value.detach(), evaluated, hidden.grad, head.weight.grad.clone()])
    agree(results[1], results[0], 1e-5)
