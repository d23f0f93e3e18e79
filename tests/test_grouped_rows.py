"""GroupedLinear on hard rows: any counts, 1 to 1024 groups, NaN behind the last boundary, no work that nobody wants."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import fuseops as fo
from fuseops import kernels

D, F = 6, 4
INTS = [torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
INTS += [torch.uint16, torch.uint32, torch.uint64]


@pytest.mark.parametrize("dtype", INTS)
@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_counts_of_any_int_dtype_where_they_are(dtype: torch.dtype, device: str) -> None:
    """Sums run over what the dtype of the counts could hold."""
    counts = torch.tensor([100, 0, 120, 90, 77], dtype=dtype).to(device)
    offs = fo.Routing.from_counts(counts).offs
    assert offs.dtype is torch.int32 and offs.device == counts.device
    assert offs.tolist() == [100, 100, 220, 310, 387]
    moved = fo.Routing.from_counts(counts.cpu(), device=device).offs
    assert torch.equal(moved, offs)


@st.composite
def problems(draw: st.DrawFn) -> tuple[int, list[int], int]:
    """Groups, their sizes and rows of padding."""
    groups = draw(st.sampled_from([1, 2, 3, 7, 64, 129, 1024]))
    few = st.dictionaries(st.integers(0, groups - 1), st.sampled_from([1, 2, 63, 65]), max_size=4)
    sizes = draw(few)
    return groups, [sizes.get(e, 0) for e in range(groups)], draw(st.integers(0, 3))


def loop(op: fo.ops.GroupedLinear, x: Tensor, sizes: list[int], probs: Tensor | None) -> Tensor:
    """A linear map a group; rows behind the last one are zero."""
    parts, start = [], 0
    for e, size in enumerate(sizes):
        rows = slice(start, start + size)
        shift = 0 if op.bias is None else op.bias[e]
        scale = 1 if probs is None else probs[rows, None]
        parts.append(x[rows] @ op.weight[e].t() + shift * scale)
        start += size
    return torch.cat([*parts, x.new_zeros(len(x) - start, op.out_features)])


@given(problems(), st.booleans(), st.sampled_from(["none", "plain", "scaled"]))
def test_it_is_the_loop_over_groups_with_nan_behind_them(
    problem: tuple[int, list[int], int], packed: bool, kind: str
) -> None:
    groups, sizes, padding = problem
    if groups == 1024:
        packed = True  # 2048 parameters take long to make
    torch.manual_seed(1)
    op = fo.ops.GroupedLinear(
        groups, D, F, bias=kind != "none", scale_bias=kind == "scaled", packed=packed
    ).double()
    rows = sum(sizes)
    x, probs = torch.randn(rows + padding, D).double(), torch.rand(rows + padding).double()
    dy = torch.randn(rows + padding, F).double()
    offs = fo.Routing.from_counts(sizes).offs
    scale = {"probs": probs} if kind == "scaled" else {}

    def run(dirty: bool) -> list[Tensor]:
        behind = torch.nan if dirty else 0.0
        leaves = [t.clone() for t in (x, *scale.values())]
        for t in leaves:
            t[rows:] = behind
            t.requires_grad_()
        side = dict(zip(scale, leaves[1:], strict=True))
        d = dy.clone()
        d[rows:] = behind
        y = (
            op(leaves[0], offs=offs, **side)
            if dirty
            else loop(op, leaves[0], sizes, side.get("probs"))
        )
        grads = torch.autograd.grad(y, [*leaves, *op.parameters()], d, materialize_grads=True)
        return [y.detach(), *grads]

    for got, want in zip(run(dirty=True), run(dirty=False), strict=True):
        torch.testing.assert_close(got, want, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("sizes", [[3, 0, 5], [0, 0, 0], [8, 0, 0]])
def test_padding_is_in_no_scale_of_a_quantized_group(sizes: list[int]) -> None:
    op, offs = fo.ops.GroupedLinear(3, 32, 16), fo.Routing.from_counts(sizes).offs
    rows, results = sum(sizes), []
    torch.manual_seed(0)
    x, dy = torch.randn(rows + 4, 32), torch.randn(rows + 4, 16)
    for behind in (0.0, 1e30, torch.nan):
        x[rows:] = dy[rows:] = behind
        leaf = x.clone().requires_grad_()
        with fo.recipe(fo.recipes.Float8CurrentScaling()):
            y = op(leaf, offs=offs)
        results.append([y.detach(), *torch.autograd.grad(y, [leaf, *op.parameters()], dy)])
    for other in results[1:]:
        for got, want in zip(other, results[0], strict=True):
            assert torch.isfinite(want).all() and torch.equal(got, want)


def noted(run: Any, calls: list[str]) -> Any:
    def call(*args: Any, **keywords: Any) -> Any:
        calls.append(run.name)
        return run(*args, **keywords)

    return call


@pytest.mark.parametrize("frozen", ["weight", "bias", "weight bias", "x", "x weight bias"])
def test_what_nobody_wants_is_neither_computed_nor_saved(
    frozen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[str] = []
    for name in ("grouped_mm", "grouped_wgrad", "grouped_bias_bwd"):
        monkeypatch.setattr(kernels, name, noted(getattr(kernels, name), calls))
    op, names = fo.ops.GroupedLinear(3, D, F), frozen.split()
    for name in names:
        if name != "x":
            getattr(op, name).requires_grad_(False)
    seq = fo.Sequential({"fc": op})
    x = torch.randn(9, D).requires_grad_("x" not in names)
    routing = fo.Routing.from_counts([4, 0, 5])
    saved = {s.name for s in seq.plan(x, routing).saved}
    calls.clear()
    y = seq(x, routing)
    if y.requires_grad:
        y.sum().backward()
    wanted = {"x", "weight", "bias"} - {*names}
    assert calls.count("grouped_mm") == 1 + ("x" in wanted)
    assert calls.count("grouped_wgrad") == ("weight" in wanted)
    assert calls.count("grouped_bias_bwd") == ("bias" in wanted)
    assert ("fc.x" in saved) == ("weight" in wanted)
    assert ("fc.weight" in saved) == ("x" in wanted)
    assert ("fc.offs" in saved) == bool(wanted)


@pytest.mark.parametrize("size", [0, -1])
def test_a_size_that_is_not_positive_is_refused(size: int) -> None:
    for sizes, name in (
        ((size, D, F), "num_groups"),
        ((2, size, F), "in_features"),
        ((2, D, size), "out_features"),
    ):
        with pytest.raises(fo.FuseOpsError, match=f"{name} is {size}, expected an integer from 1"):
            fo.ops.GroupedLinear(*sizes)
