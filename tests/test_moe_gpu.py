"""fo.MoE on a CUDA device: the same layer, without a host synchronisation, and in one CUDA graph."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor

import fuseops as fo
from fuseops.kernels import configs
from fuseops.kernels.registry import watch_launches
from fuseops.rules.fused import dswiglu

pytestmark = pytest.mark.gpu

NoSync = Callable[[], AbstractContextManager[None]]
# such that fc1 ends in SwiGLU, and the gradient of fc2 goes on through it
D, F, E, K, T = 256, 256, 16, 4, 500

BF16: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}

KINDS: dict[str, dict[str, Any]] = {
    "softmax": {},
    "losses": {"balance_loss": 0.1, "z_loss": 0.01, "aux": "inject"},
    "deepseek": {
        "score": "sigmoid", "scale": 2.5, "expert_bias": True, "groups": 4, "top_groups": 2,
        "shared_experts": 1, "balance_loss": 0.1, "aux": "inject",
    },
    "gpt-oss": {"activation": "clamped_swiglu", "bias": True, "router_bias": True},
    "capacity": {"capacity_factor": 0.75},
}  # fmt: skip
kinds = pytest.mark.parametrize("kwargs", KINDS.values(), ids=KINDS)


def layer(dtype: torch.dtype, **kwargs: Any) -> fo.MoE:
    moe = fo.MoE(D, F, E, K, dtype=dtype, device="cuda", **kwargs)
    with torch.no_grad():
        moe["router"].weight.mul_(4)
        if moe["router"].bias is not None:  # experts that get most, and some that get nothing
            moe["router"].bias.copy_(-2.0 * torch.arange(E))
    return moe


def batch(dtype: torch.dtype, tokens: int = T) -> Tensor:
    return torch.randn(tokens, D, device="cuda", dtype=dtype)


def step(moe: fo.MoE, x: Tensor, **side: Any) -> list[Tensor]:
    """y and every gradient."""
    moe.zero_grad()
    leaf = x.detach().requires_grad_()
    y = moe(leaf, **side)
    y.backward(torch.linspace(-1, 1, y.numel(), device=y.device).sin().view_as(y).to(y.dtype))
    return [y.detach(), leaf.grad, *(p.grad.clone() for p in moe.parameters())]


@kinds
@pytest.mark.parametrize("tokens", [T, 1, 0])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_layer_equals_float64_on_the_cpu(
    dtype: torch.dtype, tokens: int, kwargs: dict[str, Any]
) -> None:
    """The CPU's layer is judged in test_moe.py. It takes the experts of this one: rounding may break a near tie."""
    moe, x = layer(dtype, **kwargs), batch(dtype, tokens)
    experts = moe(x, returns="experts")[1].cpu()
    judge = fo.MoE(D, F, E, K, **kwargs).double()
    judge.load_state_dict({n: t.cpu().double() for n, t in moe.state_dict().items()})
    exact = step(judge.with_given_experts(), x.cpu().double(), chosen=experts)
    # bfloat16: a rounding of 2^-9 for each of up to four tensors behind one another
    bound = 2e-2 if dtype is torch.bfloat16 else 2e-3  # TF32 or not, torch decides
    for mine, wanted in zip(step(moe, x), exact, strict=True):
        assert mine.isfinite().all()
        assert (mine.cpu().double() - wanted).norm() <= bound * wanted.norm().clamp_min(1e-9)


def zipf(tokens: int, top_k: int) -> Tensor:
    chances = 1 / torch.arange(1.0, E + 1)
    return torch.multinomial(chances.expand(tokens, E), top_k)


ROUTINGS: dict[str, tuple[int, Callable[[], Tensor]]] = {
    "zipf": (K, lambda: zipf(T, K)),
    "the same experts": (K, lambda: torch.arange(K).expand(T, K) * 3),  # and twelve empty ones
    "one expert": (1, lambda: torch.full((T, 1), E - 1)),
    "one token": (K, lambda: zipf(1, K)),
    "a full tile and a row": (1, lambda: (torch.arange(129) == 7).long()[:, None]),
}


@pytest.mark.parametrize("name", ROUTINGS)
def test_any_routing_equals_float64(name: str) -> None:
    """On the kernels of a layer that is fused throughout."""
    top_k, draw = ROUTINGS[name]
    chosen = draw().to(torch.int32)
    moe = fo.MoE(D, F, E, top_k, normalize=False, **BF16)
    judge = fo.MoE(D, F, E, top_k, normalize=False).double()
    judge.load_state_dict({n: t.cpu().double() for n, t in moe.state_dict().items()})
    x = batch(torch.bfloat16, len(chosen))
    with configs.forced(dswiglu.EPILOGUE, {"EPILOGUE": 1}), watch_launches() as launched:
        got = step(moe.with_given_experts(), x, chosen=chosen.cuda())
    hopper = torch.cuda.get_device_capability() == (9, 0)
    ran = {op.name for op, *_ in launched}
    assert {"grouped_swiglu", "grouped_dswiglu_into"} <= ran or not hopper
    exact = step(judge.with_given_experts(), x.cpu().double(), chosen=chosen)
    for mine, wanted in zip(got, exact, strict=True):
        assert mine.isfinite().all()
        # a rounding of 2^-9 for each of up to four tensors behind one another
        assert (mine.cpu().double() - wanted).norm() <= 2e-2 * wanted.norm().clamp_min(1e-9)


@kinds
def test_the_router_chooses_as_float64_does(kwargs: dict[str, Any]) -> None:
    moe, x = layer(torch.bfloat16, **kwargs), batch(torch.bfloat16)
    _, experts, weights = moe(x, returns=("experts", "weights"))
    judge = fo.MoE(D, F, E, K, **kwargs).double()
    judge.load_state_dict({n: t.cpu().double() for n, t in moe.state_dict().items()})
    _, wanted, exact = judge(x.cpu().double(), returns=("experts", "weights"))
    same = experts.cpu() == wanted
    assert same.double().mean() > 0.999  # near ties
    torch.testing.assert_close(
        weights.cpu()[same.all(1)], exact[same.all(1)].float(), rtol=1e-4, atol=1e-6
    )


@kinds
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_a_step_never_asks_the_host(
    dtype: torch.dtype, kwargs: dict[str, Any], no_synchronisation: NoSync
) -> None:
    moe, x = layer(dtype, **kwargs), batch(dtype)
    step(moe, x)
    scale = torch.full((), 0.5, device="cuda")
    with no_synchronisation():
        if "inject" in moe._modules:
            moe.loss_scale = scale
            moe.loss_scale = 0.25
        step(moe, x)
        if moe["router"].expert_bias is not None:
            moe["router"].update_expert_bias()


def test_autocast_never_asks_the_host(no_synchronisation: NoSync) -> None:
    moe, x = layer(torch.float32, shared_experts=1), batch(torch.float32)
    with torch.autocast("cuda", torch.bfloat16):
        step(moe, x)
        with no_synchronisation():
            y = step(moe, x)[0]
    assert y.dtype is torch.bfloat16


@kinds
def test_a_step_repeats_bit_for_bit(kwargs: dict[str, Any]) -> None:
    moe, x = layer(torch.bfloat16, **kwargs), batch(torch.bfloat16)
    for first, second in zip(step(moe, x), step(moe, x), strict=True):
        assert torch.equal(first, second)


@kinds
def test_a_whole_step_in_one_cuda_graph(kwargs: dict[str, Any]) -> None:
    """Forward and backward captured once, replayed over other tokens that go to other experts."""
    moe, static = layer(torch.bfloat16, **kwargs), batch(torch.bfloat16).requires_grad_()
    dy = torch.randn_like(static)
    moe.eval()  # no counting of copies in a replay

    def run() -> list[Tensor]:
        y = moe(static)
        grads = torch.autograd.grad(y, [static, *moe.parameters()], dy)
        return [y.detach(), *grads]  # no graph, whose nodes belong to the stream of the capture

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            run()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    for seed in range(3):
        torch.manual_seed(seed)
        with torch.no_grad():
            static.copy_(torch.randn_like(static) * (1 + seed))
        graph.replay()
        replayed = [t.clone() for t in captured]
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):  # where the gradients of the parameters began
            eager = run()
        torch.cuda.current_stream().wait_stream(stream)
        assert all(map(torch.equal, replayed, eager))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["losses", "deepseek"])
def test_inductor_equals_eager(name: str) -> None:
    moe, x = layer(torch.bfloat16, **KINDS[name]), batch(torch.bfloat16)
    eager = step(moe, x)
    compiled: Any = torch.compile(moe, fullgraph=True)
    for mine, wanted in zip(step(compiled, x), eager, strict=True):
        assert (mine - wanted).float().norm() <= 2e-2 * wanted.float().norm()
