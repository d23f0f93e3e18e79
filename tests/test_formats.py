"""Formats of operands: bit for bit those of an oracle, and every GEMM multiplies what they stand for."""

from typing import Any

import numpy as np
import pytest
import torch
from format_oracle import Array, Coded, hard, mxfp8
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import fuseops as fo
from fuseops.recipes import Layout, Quantized, Scaling
from fuseops.recipes import mxfp8 as mx
from fuseops.recipes.operands import operand, weight_operand
from fuseops.recipes.recipe import BACKWARDS
from fuseops.testing.strategies import Split, filled

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
ROWS = [mx.mxfp8(E4M3), mx.mxfp8(E5M2)]
SQUARES = [mx.mxfp8(E4M3, True), mx.mxfp8(E5M2, True)]
ORACLES = {torch.float8_e8m0fnu: mxfp8}


def coded(x: Array, scaling: Scaling) -> Coded:
    """A matrix by the oracle, along its last axis."""
    return ORACLES[scaling.scale](x, str(scaling.data).removeprefix("torch."), scaling.grain)


def same(found: Layout, wanted: Coded) -> None:
    """The same bits; of NaN, that it is one."""
    for mine, theirs in zip(found, (wanted.codes, wanted.scale), strict=True):
        wide = theirs.astype(np.float32)
        assert np.array_equal(np.isnan(mine.float().numpy()), np.isnan(wide))
        bits = mine.contiguous().view(torch.uint8).numpy()
        assert np.array_equal(bits[~np.isnan(wide)], theirs.view(np.uint8)[~np.isnan(wide)])


def in_groups(x: Array, counts: list[int]) -> Array:
    """The transpose of x over tokens that begin anew in each group at a multiple of 128."""
    rows, k = x.shape
    full = np.zeros(((rows // 128 + len(counts)) * 128, k), x.dtype)
    begin = 0
    for group, count in enumerate(counts):
        at = (begin // 128 + group) * 128
        full[at : at + count] = x[begin : begin + count]
        begin += count
    return np.ascontiguousarray(full.T)


# --- bit for bit


@pytest.mark.parametrize("scaling", ROWS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rows_and_columns_are_those_of_the_oracle(scaling: Scaling, dtype: torch.dtype) -> None:
    x = torch.from_numpy(hard(37, 70)).to(dtype)
    wide = x.float().numpy()
    q = operand(x, scaling, row=True, col=True)
    assert q.row is not None and q.col is not None
    same(q.row, coded(wide, scaling))
    same(q.col, coded(np.ascontiguousarray(np.pad(wide, ((0, 91), (0, 0))).T), scaling))
    counts = [3, 0, 30]
    offs = torch.tensor(counts).cumsum(0).int()
    grouped = operand(x, scaling, offs, row=False, col=True)
    assert grouped.col is not None and grouped.row is None
    same(grouped.col, coded(in_groups(wide, counts), scaling))


@pytest.mark.parametrize("scaling", [*ROWS, *SQUARES], ids=str)
def test_weights_are_those_of_the_oracle(scaling: Scaling) -> None:
    weight = torch.stack(
        [torch.from_numpy(hard(40, 70)), torch.from_numpy(hard(40, 70)[::-1].copy())]
    )
    q = weight_operand(weight, scaling, row=True, col=True)
    assert q.row is not None and q.col is not None
    for k, matrix in enumerate(weight.numpy()):
        same(Layout(*[t[k] for t in q.row]), coded(matrix, scaling))
        same(Layout(*[t[k] for t in q.col]), coded(np.ascontiguousarray(matrix.T), scaling))
    if scaling.square:  # one set of codes for both directions
        for mine, theirs in zip(q.row, q.col, strict=True):
            assert torch.equal(mine.mT.contiguous().view(torch.uint8), theirs.view(torch.uint8))


@pytest.mark.parametrize("scaling", [*ROWS, *SQUARES], ids=str)
def test_what_codes_stand_for_is_exact_in_bfloat16(scaling: Scaling) -> None:
    x = (
        filled((40, 70), torch.bfloat16, "normal", 1)
        * torch.logspace(-38, 37, 40).bfloat16()[:, None]
    )
    q = Quantized(*_layouts(x, scaling), scaling, None, torch.bfloat16)
    values = coded(x.float().numpy(), scaling).values
    assert np.array_equal(q.dequantize().double().numpy(), values)


def _layouts(x: Tensor, scaling: Scaling) -> tuple[Layout | None, None]:
    q = weight_operand(x, scaling, row=True, col=False) if scaling.square else operand(x, scaling)
    return q.row, None


# --- GEMMs, in float64 of what the operands stand for

RECIPES = st.builds(
    fo.recipes.MXFP8BlockScaling,
    square_weights=st.booleans(),
    backward=st.sampled_from(BACKWARDS),
    fwd=st.sampled_from([E4M3, E5M2]),
    bwd=st.sampled_from([E4M3, E5M2]),
)


@given(
    recipe=RECIPES,
    counts=st.lists(st.sampled_from([0, 1, 33, 130]), min_size=1, max_size=3),
    padding=st.sampled_from([0, 5]),
    k=st.sampled_from([4, 32, 50]),
    n=st.sampled_from([8, 70]),
    dense=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_products_are_those_of_what_operands_stand_for(
    recipe: Any, counts: list[int], padding: int, k: int, n: int, dense: bool, dtype: torch.dtype
) -> None:
    counts, padding = (counts[:1], 0) if dense else (counts, padding)
    split, roles, form = (
        Split(tuple(counts), padding),
        recipe.roles(),
        {"bias": False, "dtype": dtype},
    )
    op: Any = (
        fo.ops.Linear(k, n, **form) if dense else fo.ops.GroupedLinear(len(counts), k, n, **form)
    )
    x, dy = filled((split.rows, k), dtype, "normal", 1), filled((split.rows, n), dtype, "normal", 2)
    for t in (x, dy):
        t[sum(counts) :] = float("nan")
    x.requires_grad_()
    with fo.recipe(recipe):
        y = op(x) if dense else op(x, offs=split.offs)
    dx, dw = torch.autograd.grad(y, [x, op.weight], dy)
    weights = op.weight.detach().float().reshape(-1, n, k).numpy()
    parts = (t[: sum(counts)].detach().split(counts) for t in (x, dy, y, dx))
    for xe, dye, ye, dxe, dwe, w in zip(*parts, dw.reshape(-1, n, k), weights, strict=True):
        expected = products(xe.float().numpy(), w, dye.float().numpy(), roles)
        for mine, theirs in zip((ye, dxe, dwe), expected, strict=True):
            near(mine, theirs, dtype)
    assert not y[sum(counts) :].any() and not dx[sum(counts) :].any()


def products(x: Array, w: Array, dy: Array, roles: Any) -> tuple[Array, Array, Array]:
    """y, dx and dw, each of the operands that its GEMM reads."""
    y = coded(x, roles.input).values @ coded(w, roles.weight).values.T
    if roles.backward == "high_precision":
        return y, dy @ w.astype(np.float64), dy.T @ x.astype(np.float64)
    if roles.backward == "dequantized":
        return y, dy @ coded(w, roles.weight).values, dy.T @ coded(x, roles.input).values
    turned = (np.ascontiguousarray(t.T) for t in (w, x, dy))
    weight, columns, grad = map(coded, turned, (roles.weight, roles.input, roles.grad_output))
    dx = coded(dy, roles.grad_output).values @ weight.values.T
    return y, dx, grad.values @ columns.values.T


def near(mine: Tensor, theirs: Array, dtype: torch.dtype) -> None:
    """Products are summed in float32 and rounded to it; bfloat16 rounds once more."""
    tol = 1e-5 if dtype is torch.float32 else 1e-2
    wanted = torch.from_numpy(theirs)
    scale = float(wanted.abs().max()) if wanted.numel() else 0.0
    torch.testing.assert_close(mine.double(), wanted, rtol=tol, atol=tol * scale)


EVERY = [
    fo.recipes.Float8BlockScaling,
    fo.recipes.Float8CurrentScaling,
    fo.recipes.MXFP8BlockScaling,
]


@pytest.mark.parametrize("recipe", EVERY)
@pytest.mark.parametrize("backward", BACKWARDS[1:])
@pytest.mark.parametrize("weights", ["none", "step"])
def test_a_backward_of_its_own_is_that_of_a_plain_product(
    recipe: Any, backward: str, weights: str
) -> None:
    recipe = recipe(backward=backward, weights=weights)
    op, x = fo.ops.Linear(40, 24, bias=False), filled((50, 40), torch.float32, "normal", 1)
    dy, leaf = filled((50, 24), torch.float32, "normal", 2), x.clone().requires_grad_()
    with fo.recipe(recipe):
        fo.Sequential(op)(leaf).backward(dy)
    w = op.weight.detach()
    if backward == "dequantized":
        w = weight_operand(w, recipe.roles().weight, row=True, col=False).dequantize()
        x = operand(x, recipe.roles().input).dequantize()
    assert leaf.grad is not None and op.weight.grad is not None
    torch.testing.assert_close(leaf.grad, dy @ w)
    torch.testing.assert_close(op.weight.grad, dy.t() @ x)
