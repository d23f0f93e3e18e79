"""The skeleton on a CUDA device: same results as torch, no host synchronisation, compiled and autocast."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import fuseops as fo

pytestmark = pytest.mark.gpu

NoSync = Callable[[], AbstractContextManager[None]]

E, D, F, ROWS = 8, 256, 384, 1024


def routed(rows: int = ROWS, padding: int = 0) -> fo.Routing:
    counts = torch.multinomial(torch.ones(E), rows - padding, replacement=True).bincount(
        minlength=E
    )
    counts[1] += counts[0]
    counts[0] = 0  # an empty group
    return fo.Routing.from_counts(counts.cuda(), torch.rand(rows, device="cuda"))


def experts(dtype: torch.dtype, bias: bool = False) -> fo.Sequential:
    return fo.Sequential(
        {
            "fc1": fo.ops.GroupedLinear(E, D, 2 * F, bias=bias, dtype=dtype, device="cuda"),
            "act": fo.ops.ScaledSwiGLU(),
            "fc2": fo.ops.GroupedLinear(E, F, D, bias=bias, dtype=dtype, device="cuda"),
        }
    )


def gradients(model: nn.Module, x: Tensor, *args: Any) -> list[Tensor]:
    model.zero_grad()
    x = x.detach().requires_grad_()
    y = model(x, *args)
    y.backward(torch.ones_like(y) / 8)
    assert x.grad is not None
    return [y.detach(), x.grad, *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("bias", [False, True])
def test_experts_equal_the_float64_reference_on_cpu(dtype: torch.dtype, bias: bool) -> None:
    model, routing = experts(dtype, bias), routed(padding=40)
    x = torch.randn(ROWS, D, device="cuda", dtype=dtype)
    ours = gradients(model, x, routing)
    judge = experts(torch.float64, bias).cpu()
    judge.load_state_dict({k: v.cpu().double() for k, v in model.state_dict().items()})
    on_cpu = fo.Routing(*(None if t is None else t.cpu() for t in routing))
    for mine, exact in zip(ours, gradients(judge, x.cpu().double(), on_cpu), strict=True):
        error = (mine.cpu().double() - exact).norm() / exact.norm().clamp_min(1e-9)
        assert error < (2e-2 if dtype is torch.bfloat16 else 2e-3)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_forward_and_backward_never_ask_the_host(
    dtype: torch.dtype, bias: bool, no_synchronisation: NoSync
) -> None:
    model, routing = experts(dtype, bias), routed()
    x = torch.randn(ROWS, D, device="cuda", dtype=dtype)
    gradients(model, x, routing)
    with no_synchronisation():
        gradients(model, x, routing)


def test_routing_from_topk_never_asks_the_host(no_synchronisation: NoSync) -> None:
    chosen = torch.randint(0, E, (ROWS, 2), device="cuda")
    weights = torch.rand(ROWS, 2, device="cuda")
    fo.Routing.from_topk(chosen, weights, num_experts=E)
    with no_synchronisation():
        fo.Routing.from_topk(chosen, weights, num_experts=E)


def dense(**kwargs: Any) -> fo.Sequential:
    ops = fo.ops
    return fo.Sequential(
        fo.Residual(
            ops.RMSNorm(D, **kwargs),
            ops.Linear(D, 2 * F, bias=False, **kwargs),
            ops.SwiGLU(),
            ops.Linear(F, D, **kwargs),
        ),
        ops.Linear(D, F, **kwargs),
        ops.GELU(),
        ops.Dropout(0.1),
        ops.Linear(F, D, **kwargs),
    )


def test_a_dense_block_never_asks_the_host(no_synchronisation: NoSync) -> None:
    model = dense(device="cuda", dtype=torch.bfloat16).eval()
    x = torch.randn(ROWS, D, device="cuda", dtype=torch.bfloat16)
    fused = gradients(model, x)
    with no_synchronisation():
        gradients(model, x)
    with fo.fusion(False):
        for a, b in zip(fused, gradients(model, x), strict=True):
            torch.testing.assert_close(a, b, rtol=1.6e-2, atol=1e-2)


def test_autocast_keeps_parameters_in_float32() -> None:
    model = dense(device="cuda").eval()
    x = torch.randn(ROWS, D, device="cuda")
    with torch.autocast("cuda", torch.bfloat16):
        grads = gradients(model, x)
    assert all(g.dtype is torch.float32 for g in grads[2:])
    for a, b in zip(grads, gradients(model, x), strict=True):
        assert (a - b).norm() / b.norm() < 3e-2


@pytest.mark.slow
@pytest.mark.parametrize("make", [dense, lambda **k: experts(torch.bfloat16)])
def test_inductor_equals_eager(make: Any) -> None:
    model = make(device="cuda", dtype=torch.bfloat16).eval()
    x = torch.randn(ROWS, D, device="cuda", dtype=torch.bfloat16)
    args = (routed(),) if isinstance(model[0], fo.ops.GroupedLinear) else ()
    eager = gradients(model, x, *args)
    compiled = torch.compile(model, fullgraph=True)
    x = x.detach().requires_grad_()
    y = compiled(x, *args)
    y.backward(torch.ones_like(y) / 8)
    for a, b in zip((y, x.grad), eager[:2], strict=True):
        assert (a - b).float().norm() / b.float().norm() < 2e-2


@pytest.mark.parametrize("shape", [(ROWS, D), (3, 65, D)])
def test_fp8_runs_and_is_close(shape: tuple[int, ...]) -> None:
    model = dense(device="cuda", dtype=torch.bfloat16).eval()
    x = torch.randn(*shape, device="cuda", dtype=torch.bfloat16)
    high = gradients(model, x)
    with fo.recipe(fo.recipes.Float8CurrentScaling()):
        low = gradients(model, x)
    for a, b in zip(low, high, strict=True):
        assert (a - b).float().norm() / b.float().norm() < 0.2
