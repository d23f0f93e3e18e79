"""A whole layer of experts on the kernels equals itself in float64, which runs plain torch."""

import copy

import pytest
import torch
from laws import DEVICE
from torch._dynamo.testing import CompileCounterWithBackend

import fuseops as fo
from fuseops.kernels.configs import forced
from fuseops.kernels.replay import Replays
from fuseops.rules.fused.routed_copies import FC1, FC2_BWD

pytestmark = pytest.mark.usefixtures("kernels")

KINDS = [
    {},
    {"score": "sigmoid", "expert_bias": True, "groups": 2, "shared_experts": 1},
    {"balance_loss": 0.1, "z_loss": 0.1, "aux": "inject", "bias": True},
    {"capacity_factor": 0.5, "activation": "clamped_swiglu"},
]


@pytest.mark.parametrize("kwargs", KINDS)
@pytest.mark.parametrize("tokens", [33, 1])
def test_a_layer_on_the_kernels(kwargs, tokens):
    torch.manual_seed(0)
    moe, x = fo.MoE(16, 8, 8, 2, **kwargs).to(DEVICE), torch.randn(tokens, 16, device=DEVICE)
    judge = copy.deepcopy(moe).double()
    results = []
    for layer, leaf in ((moe, x), (judge, x.double())):
        leaf.requires_grad_()
        y, experts = layer(leaf, returns="experts")
        y.square().sum().backward()
        results.append([y, leaf.grad, *(p.grad for p in layer.parameters()), experts])
    for mine, exact in zip(*results, strict=True):
        torch.testing.assert_close(mine.double(), exact.double(), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kwargs", KINDS[1:])  # each has what the first one has, and more
def test_other_numbers_of_tokens_compile_nothing_again(kwargs):
    torch._dynamo.reset()
    moe = fo.MoE(16, 8, 8, 2, **kwargs).to(DEVICE)
    frames = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(moe, fullgraph=True, backend=frames)
    for tokens in (6, 12, 18):
        compiled(torch.randn(tokens, 16, device=DEVICE, requires_grad=True)).sum().backward()
    assert frames.frame_count <= 2  # one for the first number, one for any


@pytest.mark.parametrize(
    ("top_k", "chosen"),
    [
        (1, torch.full((70, 1), 5)),  # one expert has everything, more than a tile
        (2, torch.tensor([[6, 1]] * 33)),  # the same two
        (2, torch.multinomial(1 / torch.arange(1.0, 9).expand(70, 8), 2)),  # Zipf
        (2, torch.tensor([[3, 0]])),  # one token
    ],
)
def test_any_routing_on_the_kernels(top_k, chosen):
    torch.manual_seed(0)
    moe = fo.MoE(16, 8, 8, top_k, normalize=False).with_given_experts().to(DEVICE)
    x, chosen = torch.randn(len(chosen), 16, device=DEVICE), chosen.to(DEVICE, torch.int32)
    results = []
    for layer, leaf in ((moe, x), (copy.deepcopy(moe).double(), x.double())):
        leaf.requires_grad_()
        y = layer(leaf, chosen=chosen)
        y.square().sum().backward()
        results.append([y, leaf.grad, *(p.grad for p in layer.parameters())])
    for mine, exact in zip(*results, strict=True):
        torch.testing.assert_close(mine.double(), exact, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("space", "copies"), [(FC1, 2), (FC2_BWD, 1)])
def test_a_setting_that_changes_takes_effect_at_the_next_step(space, copies, monkeypatch):
    """What a repeated step has decided is forgotten: of rows by index there is no copy, of the others there is one in
    the forward, and one in the backward.
    """
    ran, run = [], Replays.run

    def noted(self, op, args):
        ran.append(op.name)
        return run(self, op, args)

    monkeypatch.setattr(Replays, "run", noted)
    moe, x = fo.MoE(16, 8, 4, 2).to(DEVICE), torch.randn(3, 16, device=DEVICE, requires_grad=True)

    def copied():
        ran.clear()
        moe(x).sum().backward()
        return ran.count("scatter_rows")

    copied()  # the first step is checked beside others
    for _ in range(2):
        assert [copied(), copied()] == [0, 0]
        with forced(space, {"COPY": 1}):
            assert [copied(), copied()] == [copies, copies]
