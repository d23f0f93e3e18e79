"""CUDA graphs: group sizes change between replays, and every replay gives what eager gives, to the bit."""

import gc
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

import fuseops as fo
from fuseops.integrations.graphs import Positional

pytestmark = pytest.mark.gpu

E, D, F, ROWS = 8, 256, 192, 2048


def experts(**options: Any) -> fo.Sequential:
    torch.manual_seed(0)
    options = {"device": "cuda", "dtype": torch.bfloat16, **options}
    return fo.Sequential(
        {
            "fc1": fo.ops.GroupedLinear(E, D, 2 * F, **options),
            "act": fo.ops.ScaledSwiGLU(),
            "fc2": fo.ops.GroupedLinear(E, F, D, **options),
        }
    )


def inputs(seed: int, rows: int = ROWS) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """x, offs, probs and dy; `rows` of them are routed, the others are padding full of NaN."""
    torch.manual_seed(seed)
    share = torch.rand(E).pow(2)
    share[seed % E] = 0  # an empty group, another one each time
    counts = (share / share.sum() * rows).long()
    counts[(seed + 1) % E] += rows - counts.sum()
    x, dy = (torch.randn(ROWS, D, dtype=torch.bfloat16) for _ in range(2))
    x[rows:] = dy[rows:] = torch.nan
    probs = torch.rand(ROWS)
    probs[rows:] = torch.nan
    offs = counts.cumsum(0).to(torch.int32)
    return x.cuda(), offs.cuda(), probs.cuda(), dy.cuda()


SPLITS = [(1, ROWS), (2, ROWS), (3, ROWS - 500), (4, 1), (5, 0), (6, ROWS)]


def step(model: Any, x: Tensor, offs: Tensor, probs: Tensor, dy: Tensor) -> list[Tensor]:
    """Output, and the gradients of x, probs and every parameter."""
    y = model(x, offs=offs, probs=probs)
    grads = torch.autograd.grad(y, [x, probs, *model.parameters()], dy)
    return [y.detach(), *grads]  # no graph stays: its nodes belong to the stream they were made on


@contextmanager
def sync_is_an_error() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # "a prototype feature"
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def warm_up(run: Any) -> None:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(2):
            run()
    torch.cuda.current_stream().wait_stream(side)


def same(got: list[Tensor], want: list[Tensor], rows: int) -> None:
    assert len(got) == len(want)
    for a, b in zip(got, want, strict=True):
        assert torch.isfinite(b).all() and torch.equal(a, b)
    assert not got[0][rows:].any() and not got[1][rows:].any()


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("fused", [True, False])
def test_a_captured_step_replays_with_other_groups(fused: bool, bias: bool) -> None:
    model = experts(bias=bias)
    static = inputs(0)
    static[0].requires_grad_(), static[2].requires_grad_()
    with fo.fusion(fused):
        warm_up(lambda: step(model, *static))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph), sync_is_an_error():
            captured = step(model, *static)
        before = torch.cuda.memory_stats()["allocation.all.allocated"]
        for seed, rows in SPLITS:
            fresh = inputs(seed, rows)
            with torch.no_grad():
                for a, b in zip(static, fresh, strict=True):
                    a.copy_(b)
            count = torch.cuda.memory_stats()["allocation.all.allocated"]
            with sync_is_an_error():
                graph.replay()
            assert torch.cuda.memory_stats()["allocation.all.allocated"] == count >= before
            fresh[0].requires_grad_(), fresh[2].requires_grad_()
            same(captured, step(model, *fresh), rows)


def test_what_a_capture_allocates_is_in_its_pool() -> None:
    model = experts()
    static = inputs(0)
    static[0].requires_grad_(), static[2].requires_grad_()
    warm_up(lambda: step(model, *static))
    pool = torch.cuda.graph_pool_handle()

    def outside() -> int:
        segments = torch.cuda.memory_snapshot()
        return sum(s["allocated_size"] for s in segments if tuple(s["segment_pool_id"]) != pool)

    held = torch.cuda.CUDAGraph()
    with torch.cuda.graph(held):  # torch keeps a random state on the device while any graph lives
        torch.zeros(1, device="cuda")
    gc.collect()  # as a capture does
    before = outside()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool):
        captured = step(model, *static)
    assert outside() <= before
    inside = [s for s in torch.cuda.memory_snapshot() if tuple(s["segment_pool_id"]) == pool]
    for t in captured:
        at = t.data_ptr()
        assert any(s["address"] <= at < s["address"] + s["total_size"] for s in inside), t.shape


def test_accumulation_into_main_grad_is_captured() -> None:
    model = experts(accumulate_into_main_grad=True)
    params = [*model.parameters()]
    for p in params:
        p.main_grad = torch.zeros_like(p, dtype=torch.float32)
    static = inputs(0)

    def run() -> None:
        model(static[0], offs=static[1], probs=static[2]).backward(static[3])

    warm_up(run)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), sync_is_an_error():
        run()
    for p in params:
        p.main_grad.zero_()
    for seed, rows in SPLITS:
        for a, b in zip(static, inputs(seed, rows), strict=True):
            a.copy_(b)
        graph.replay()
    torch.cuda.synchronize()
    replayed = [p.main_grad.clone() for p in params]
    for p in params:
        p.main_grad.zero_()
    for seed, rows in SPLITS:
        x, offs, probs, dy = inputs(seed, rows)
        model(x, offs=offs, probs=probs).backward(dy)
    for a, p in zip(replayed, params, strict=True):
        assert a.any() and torch.equal(a, p.main_grad)


# the callables keep the nodes of the parameters, which were made on the stream of the capture
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream does not match")
@pytest.mark.parametrize("fused", [True, False])
def test_make_graphed_callables_takes_it_by_position(fused: bool) -> None:
    model, twin = experts(), experts()
    sample = inputs(0)
    with fo.fusion(fused):
        graphed = torch.cuda.make_graphed_callables(
            Positional(model, "offs", "probs"),
            (sample[0].requires_grad_(), sample[1], sample[2].requires_grad_()),
        )
        for seed, rows in SPLITS:
            x, offs, probs, dy = inputs(seed, rows)
            x.requires_grad_(), probs.requires_grad_()
            with sync_is_an_error():
                y = graphed(x, offs, probs)
                grads = torch.autograd.grad(y, [x, probs, *model.parameters()], dy)
            got = [t.clone() for t in (y, *grads)]
            same(got, step(twin, x, offs, probs, dy), rows)
