"""The fused MoE layer on Triton kernels, against itself in float64: outputs and every gradient."""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

import fuseops as fo
from fuseops.kernels.registry import watch_launches

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
    with watch_launches() as launched:  # it holds h, which its launch was given
        got = step(model, x)
    ran = {op.name for op, *_ in launched}
    assert {"grouped_mm", "grouped_wgrad", "scaled_act_bwd", "combine_fwd"} <= ran
    with fo.reference():
        expected = step(judge, x.double())
    for mine, exact in zip(got, expected, strict=True):
        torch.testing.assert_close(mine.double(), exact, rtol=1e-4, atol=1e-4)


def kept(held: list[Tensor]) -> Any:
    """Hooks that keep what is saved."""
    return torch.autograd.graph.saved_tensors_hooks(lambda t: held.append(t) or t, lambda t: t)


HOLDERS: dict[str, Callable[[list[Tensor]], Any]] = {
    "a hook": kept,
    "a view": lambda held: torch.autograd.graph.saved_tensors_hooks(
        lambda t: held.append(t.detach()) or t, lambda t: t
    ),
    "nobody": lambda held: nullcontext(),
}


@pytest.mark.parametrize("retain", [False, True])
@pytest.mark.parametrize("how", HOLDERS)
def test_only_what_nobody_else_holds_is_written_over(how: str, retain: bool) -> None:
    """By a graph that is retained, a second backward through it, or a hook of the user's: gradients are the same."""
    torch.manual_seed(0)
    model, x, held = fo.MoE(D, F, E, TOP_K), torch.randn(37, D), list[Tensor]()
    leaves = [x.requires_grad_(), *model.parameters()]
    with HOLDERS[how](held):
        y = model(x)
    before = [t.clone() for t in held]
    found = []
    for again in (retain, False)[not retain :]:
        with watch_launches() as launched:
            found.append(torch.autograd.grad(y, leaves, torch.ones_like(y), retain_graph=again))
        over = "scaled_act_bwd_into" in {op.name for op, *_ in launched}
        assert over == (how == "nobody" and not again)
    want = torch.autograd.grad(model(x), leaves, torch.ones_like(y))
    assert all(torch.equal(a, b) for grads in found for a, b in zip(grads, want, strict=True))
    assert all(map(torch.equal, held, before))
