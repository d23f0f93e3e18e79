"""GroupedLinear on a CUDA device: precision of its sums, hard sizes, one Parameter a group."""

from typing import Any

import pytest
import torch
from torch import Tensor

import fuseops as fo

pytestmark = pytest.mark.gpu


def op(groups: int, k: int, n: int, **options: Any) -> fo.ops.GroupedLinear:
    torch.manual_seed(0)
    return fo.ops.GroupedLinear(groups, k, n, **{"device": "cuda", "bias": False, **options})


def splits(groups: int, rows: int) -> Tensor:
    counts = torch.multinomial(torch.ones(groups), rows, replacement=True).bincount(
        minlength=groups
    )
    return counts.cumsum(0).to(device="cuda", dtype=torch.int32)


def step(layer: fo.ops.GroupedLinear, x: Tensor, offs: Tensor, dy: Tensor) -> list[Tensor]:
    x = x.detach().requires_grad_()
    y = layer(x, offs=offs)
    y.backward(dy)
    assert x.grad is not None
    return [y.detach(), x.grad]


def exact(
    layer: fo.ops.GroupedLinear, x: Tensor, offs: Tensor, dy: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """y, dx, dw in float64."""
    weight, x, dy = layer.weight.detach().double(), x.double(), dy.double()
    y, dx, dw = torch.zeros_like(dy), torch.zeros_like(x), torch.zeros_like(weight)
    start = 0
    for e, end in enumerate(offs.tolist()):
        rows = slice(start, end)
        y[rows], dx[rows] = x[rows] @ weight[e].t(), dy[rows] @ weight[e]
        dw[e] = dy[rows].t() @ x[rows]
        start = end
    return y, dx, dw


def error(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b).norm() / b.norm().clamp_min(1e-30))


def data(rows: int, k: int, n: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    return (
        torch.randn(rows, k, device="cuda", dtype=dtype),
        torch.randn(rows, n, device="cuda", dtype=dtype),
    )


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize(("k", "n"), [(256, 320), (104, 72), (33, 65)])
def test_a_float32_main_grad_is_not_rounded_before(packed: bool, k: int, n: int) -> None:
    layer = op(4, k, n, dtype=torch.bfloat16, accumulate_into_main_grad=True, packed=packed)
    main = torch.full((4, n, k), torch.nan, device="cuda")
    for name, buffer in zip(
        layer.registered("weight"), main if not packed else [main], strict=True
    ):
        p = getattr(layer, name)
        p.main_grad, p.overwrite_main_grad = buffer, True
    total = torch.zeros_like(main, dtype=torch.float64)
    for _ in range(3):
        x, dy = data(1000, k, n, torch.bfloat16)
        offs = splits(4, 900)
        step(layer, x, offs, dy)
        total += exact(layer, x, offs, dy)[2]
        for p in layer.parameters():
            p.overwrite_main_grad = False
    assert error(main, total) < 1e-5  # bfloat16's rounding would show as 2e-3


@pytest.mark.parametrize("allowed", [False, True])
def test_float32_follows_the_tf32_switch(allowed: bool) -> None:
    layer, (x, dy) = op(3, 512, 256), data(700, 512, 256, torch.float32)
    offs, before = splits(3, 700), torch.backends.cuda.matmul.allow_tf32
    torch.backends.cuda.matmul.allow_tf32 = allowed
    try:
        results = [*step(layer, x, offs, dy), layer.weight.grad]
    finally:
        torch.backends.cuda.matmul.allow_tf32 = before
    for got, want in zip(results, exact(layer, x, offs, dy), strict=True):
        assert got is not None
        assert (1e-5 < error(got, want) < 2e-3) if allowed else error(got, want) < 2e-6


@pytest.mark.parametrize(
    ("groups", "rows", "routed"),
    [(1024, 5000, 5000), (1024, 64, 40), (7, 300, 0), (1, 127, 127), (5, 0, 0)],
)
def test_many_groups_and_empty_ones(groups: int, rows: int, routed: int) -> None:
    layer, (x, dy) = op(groups, 64, 40, dtype=torch.bfloat16), data(rows, 64, 40, torch.bfloat16)
    offs = splits(groups, routed) if routed else torch.zeros(groups, dtype=torch.int32).cuda()
    clean = x.clone(), dy.clone()
    x[routed:] = dy[routed:] = torch.nan
    results = [*step(layer, x, offs, dy), layer.weight.grad]
    for got, want in zip(results, exact(layer, clean[0], offs, clean[1]), strict=True):
        assert got is not None and torch.isfinite(got).all()
        assert error(got, want) < 5e-3
        assert want.any() or not got.any()


def test_rows_past_two_to_the_31_elements() -> None:
    rows, k, n = (1 << 31) // 1024 + 1000, 1024, 64
    layer, offs = op(3, k, n, dtype=torch.bfloat16), None
    x, dy = data(rows, k, n, torch.bfloat16)
    ends = [rows // 3, rows - 300, rows - 5]
    offs = torch.tensor(ends, dtype=torch.int32, device="cuda")
    y, dx = step(layer, x, offs, dy)
    last, weight = slice(rows - 300, rows - 5), layer.weight.detach()
    assert error(y[last], x[last].double() @ weight[2].double().t()) < 5e-3
    assert error(dx[last], dy[last].double() @ weight[2].double()) < 5e-3
    assert not y[-5:].any() and not dx[-5:].any()
    assert layer.weight.grad is not None
    assert error(layer.weight.grad[2], dy[last].double().t() @ x[last].double()) < 5e-3


def test_one_parameter_a_group_without_a_copy() -> None:
    whole = op(8, 256, 192, dtype=torch.bfloat16, bias=True)
    apart = op(8, 256, 192, dtype=torch.bfloat16, bias=True, packed=False, device="cpu")
    apart.load_state_dict(whole.state_dict())
    apart = apart.cuda()
    assert apart.repacks == 1 and apart.weight.data_ptr() == apart.weight0.data_ptr()
    (x, dy), offs = data(1000, 256, 192, torch.bfloat16), splits(8, 990)
    assert all(map(torch.equal, step(apart, x, offs, dy), step(whole, x, offs, dy)))
    for name in ("weight", "bias"):
        grads = torch.stack([getattr(apart, key).grad for key in apart.registered(name)])
        assert torch.equal(grads, getattr(whole, name).grad)


@pytest.mark.parametrize(("k", "n"), [(256, 320), (104, 72), (33, 65)])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("shift", [0, 1])
def test_buffers_of_the_caller(k: int, n: int, bias: bool, shift: int) -> None:
    """At any address: shifted ones are not aligned to 16 bytes. The next step reuses them, and an old graph is told."""
    layer, (x, dy) = op(4, k, n, dtype=torch.bfloat16, bias=bias), data(1000, k, n, torch.bfloat16)
    x[900:] = dy[900:] = torch.nan
    offs = splits(4, 900)
    want = step(layer, x, offs, dy)
    x.requires_grad_()
    room = [torch.full((1000 * w + 1,), torch.nan, device="cuda").bfloat16() for w in (n, k)]
    out = {
        what: t[shift : 1000 * w + shift].view(1000, w)
        for what, t, w in zip(("y", "dx"), room, (n, k), strict=True)
    }
    for _ in range(2):
        x.grad, layer.weight.grad = None, None
        y = layer(x, offs=offs, out=out)
        assert y.data_ptr() == out["y"].data_ptr() and torch.equal(y, want[0])
        y.backward(dy)
        assert torch.equal(out["dx"], want[1]) and torch.equal(x.grad, want[1])
    old = layer(x, offs=offs, out=out).square()
    layer(x, offs=offs, out=out)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        old.backward(dy)


def test_buffers_of_the_caller_in_a_graph() -> None:
    layer, (x, dy) = op(4, 256, 128, dtype=torch.bfloat16), data(640, 256, 128, torch.bfloat16)
    offs, x = splits(4, 600), x.requires_grad_()
    out = {"y": torch.empty_like(dy), "dx": torch.empty_like(x, requires_grad=False)}

    def run() -> None:
        torch.autograd.grad(layer(x, offs=offs, out=out), [x, layer.weight], dy)

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        run()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    for buffer in out.values():
        buffer.fill_(torch.nan)
    offs.copy_(splits(4, 500))
    graph.replay()
    want = step(layer, x, offs, dy)
    assert torch.equal(out["y"], want[0]) and torch.equal(out["dx"], want[1])
