"""Recipes on the device: no word to the host, kept weights equal to fresh ones, graphs that take any split."""

import copy
import functools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import fuseops as fo
from fuseops.kernels import amax

pytestmark = pytest.mark.gpu

D, F, E, K, T = 256, 256, 8, 2, 1024
BLOCK, CURRENT = fo.recipes.Float8BlockScaling, fo.recipes.Float8CurrentScaling
MX = fo.recipes.MXFP8BlockScaling
NV = functools.partial(fo.recipes.NVFP4BlockScaling, stochastic=False)
DELAYED = functools.partial(fo.recipes.DelayedScaling, amax_history_len=4)
RECIPES = [BLOCK, CURRENT, MX, NV, DELAYED]
POLICIES = ["none", "step"]


def moe() -> fo.MoE:
    torch.manual_seed(0)
    return fo.MoE(D, F, E, K, device="cuda", dtype=torch.bfloat16)


def dense() -> fo.Sequential:
    torch.manual_seed(0)
    where: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    return fo.Sequential(
        fo.ops.RMSNorm(D, **where),
        fo.ops.Linear(D, 2 * F, bias=False, **where),
        fo.ops.SwiGLU(),
        fo.ops.Linear(F, D, bias=False, **where),
    )


MODELS = [moe, dense]


def tokens(seed: int) -> Tensor:
    """Rows whose magnitudes and routes change with the seed."""
    g = torch.Generator(device="cuda").manual_seed(seed)
    x = torch.randn(T, D, device="cuda", generator=g)
    x *= torch.exp2(torch.randint(-3, 4, (T, 1), device="cuda", generator=g).float())
    return (x + 2 * torch.randn(1, D, device="cuda", generator=g)).bfloat16()


def step(model: nn.Module, x: Tensor, recipe: Any) -> list[Tensor]:
    x = x.detach().requires_grad_()
    with fo.recipe(recipe, strict=True):  # so few rows would stay in bfloat16
        y = model(x)
    return [y.detach(), *torch.autograd.grad(y, [x, *model.parameters()], y.detach().sin())]


def same(mine: list[Tensor], other: list[Tensor]) -> None:
    for a, b in zip(mine, other, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("make", MODELS)
def test_a_step_never_asks_the_host_and_repeats_bit_for_bit(
    make: Any, recipe: Any, policy: str, no_synchronisation: Any
) -> None:
    model, x = make(), tokens(1)
    first = step(model, x, recipe(weights=policy))
    with no_synchronisation():
        again = step(model, x, recipe(weights=policy))
    same(first, again)


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("make", MODELS)
def test_kept_weights_are_those_that_would_be_made(make: Any, recipe: Any) -> None:
    mine = make()
    other = copy.deepcopy(mine)
    opts = [
        torch.optim.AdamW(m.parameters(), lr=1e-2, foreach=f, fused=not f)
        for m, f in ((mine, True), (other, True))
    ]
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    for turn in range(3):
        for micro in range(2):
            x = tokens(10 * turn + micro)
            expected = step(other, x, recipe())
            same(step(mine, x, recipe(weights="step")), expected)
            side.wait_stream(torch.cuda.current_stream())
            with (
                torch.cuda.stream(side),
                torch.no_grad(),
                fo.recipe(recipe(weights="step"), strict=True),
            ):
                same([mine(x)], expected[:1])
            torch.cuda.current_stream().wait_stream(side)
            leaf = x.detach().requires_grad_()
            with fo.recipe(recipe(weights="step"), strict=True):
                y = checkpoint(mine, leaf, use_reentrant=False, context_fn=fo.checkpoint_contexts)
            same([torch.autograd.grad(y, leaf, y.detach().sin())[0]], expected[1:2])
        for model, opt, grads in ((mine, opts[0], expected), (other, opts[1], expected)):
            for p, g in zip(model.parameters(), grads[2:], strict=True):
                p.grad = g.clone()
            opt.step()


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("make", MODELS)
def test_a_graph_takes_any_split_and_the_weights_that_it_finds(
    make: Any, recipe: Any, policy: str
) -> None:
    model, x = make(), tokens(0)
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            step(model, x, recipe(weights=policy))
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step(model, x, recipe(weights=policy))
    for seed in (1, 2, 3):
        x.copy_(tokens(seed))
        with torch.no_grad():
            for p in model.parameters():
                p.mul_(1.25)
        graph.replay()
        same(out, step(model, x, recipe()))


def test_the_state_of_delayed_scaling_goes_on_between_replays() -> None:
    mine, other, x = moe(), moe(), tokens(0)
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for model in (mine, other):
            step(model, x, DELAYED())
            fo.weights_changed(model)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step(mine, x, DELAYED())
    for seed in (1, 2, 3):
        x.copy_(tokens(seed))
        x.mul_(2.0**seed)
        graph.replay()
        same(out, step(other, x, DELAYED()))
        for model in (mine, other):
            fo.weights_changed(model)
        same([*mine.buffers()], [*other.buffers()])


def test_a_replayed_graph_rounds_gradients_in_another_way_each_time() -> None:
    recipe, model, x = fo.recipes.NVFP4BlockScaling(), moe(), tokens(0)
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        step(model, x, recipe)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = step(model, x, recipe)
    seen = []
    for _ in range(3):
        graph.replay()
        seen.append([t.clone() for t in out])
    for a, b in ((seen[0], seen[1]), (seen[1], seen[2])):
        assert torch.equal(a[0], b[0]) and not torch.equal(a[1], b[1])
        torch.testing.assert_close(a[1].norm(), b[1].norm(), rtol=0.1, atol=0)


@pytest.mark.parametrize("recipe", RECIPES[:4])
def test_quantized_values_are_captured_and_replayed_with_other_splits(
    recipe: Any, no_synchronisation: Any
) -> None:
    torch.manual_seed(0)
    where: dict[str, Any] = {"bias": False, "device": "cuda", "dtype": torch.bfloat16}
    model = fo.Sequential(
        fo.ops.GroupedLinear(E, D, 2 * F, **where),
        fo.ops.SwiGLU(),
        fo.ops.GroupedLinear(E, F, D, **where),
    )
    x, offs = tokens(0), torch.full((E,), T // E, device="cuda").cumsum(0).int()

    def gradients() -> list[Tensor]:
        leaf = x.detach().requires_grad_()
        with fo.recipe(recipe(), strict=True):
            y = model(fo.quantize(leaf, recipe().roles().input, offs), offs=offs)
        return [y.detach(), *torch.autograd.grad(y, [leaf, *model.parameters()], y.detach().sin())]

    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        gradients()
        with no_synchronisation():
            gradients()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = gradients()
    for seed in (1, 2, 3):
        counts = torch.randint(0, T // E, (E,), generator=torch.Generator().manual_seed(seed))
        x.copy_(tokens(seed))
        offs.copy_(counts.cumsum(0).int())
        graph.replay()
        same(out, gradients())


def test_another_split_of_a_quantized_gives_nan_and_never_waits(no_synchronisation: Any) -> None:
    op = fo.ops.GroupedLinear(2, D, F, bias=False, device="cuda", dtype=torch.bfloat16)
    offs, other = (torch.tensor([n, T], device="cuda", dtype=torch.int32) for n in (300, 301))
    with fo.recipe(CURRENT(), strict=True):
        q = fo.quantize(tokens(0), CURRENT().roles().input, offs)
        right = op(q, offs=offs)
        with no_synchronisation():
            same_split, lost = op(q, offs=offs.clone()), op(q, offs=other)
    assert torch.equal(same_split, right) and lost.isnan().all()


@pytest.mark.parametrize("fmt", [torch.float8_e4m3fn, torch.float8_e5m2])
@pytest.mark.parametrize("n", [128, 1100])
def test_scales_of_groups_and_matrices_are_those_of_their_twins(n: int, fmt: torch.dtype) -> None:
    x = tokens(3).repeat(1, 5)[:, :n]
    x[7, 5], x[900, 3] = float("inf"), float("nan")
    for counts in (None, [300, 0, 1, 500, 100]):
        offs = None
        if counts is not None:
            offs = torch.tensor(counts, device="cuda").cumsum(0).int()
        got = amax.quantize_groups(x, offs, fmt, True, True)
        want = amax.quantize_groups.twin(x, offs, fmt, True, True)
        end = T if offs is None else int(offs[-1])
        for a, b in zip((got[0][:end], *got[1:]), (want[0][:end], *want[1:]), strict=True):
            torch.testing.assert_close(a.float(), b.float(), rtol=0, atol=0, equal_nan=True)
    w = tokens(4).view(4, 256, D)
    for a, b in zip(
        amax.quantize_matrices(w, fmt), amax.quantize_matrices.twin(w, fmt), strict=True
    ):
        assert torch.equal(a.float(), b.float())
