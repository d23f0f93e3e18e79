"""The fused MoE layer on Triton kernels, against itself in float64: outputs and every gradient."""

import pytest
import torch
from torch import Tensor

import fuseops as fo
from fuseops.kernels.registry import watching

pytestmark = pytest.mark.usefixtures("interpreted")

D, F, E, TOP_K = 32, 16, 4, 2


def step(model: fo.Sequential, x: Tensor) -> list[Tensor]:
    x = x.clone().requires_grad_()
    y = model(x)
    leaves = [x, *model.parameters()]
    return [y.detach(), *torch.autograd.grad(y, leaves, torch.ones_like(y))]


@pytest.mark.parametrize("tokens", [1, 37])
@pytest.mark.parametrize("bias", [False, True])
def test_the_fused_layer_equals_float64(tokens: int, bias: bool) -> None:
    torch.manual_seed(tokens)
    model = fo.MoE(D, F, E, TOP_K, bias=bias)
    judge = fo.MoE(D, F, E, TOP_K, bias=bias).double()
    judge.load_state_dict(model.state_dict())
    x = torch.randn(tokens, D)
    with watching() as launched:
        got = step(model, x)
    ran = {op.name for op, *_ in launched}
    assert {"grouped_mm", "grouped_wgrad", "scaled_act_bwd", "combine_fwd"} <= ran
    with fo.reference():
        expected = step(judge, x.double())
    for mine, exact in zip(got, expected, strict=True):
        torch.testing.assert_close(mine.double(), exact, rtol=1e-4, atol=1e-4)
