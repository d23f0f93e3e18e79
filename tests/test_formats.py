"""Formats of operands: bit for bit those of an oracle, and every GEMM multiplies what they stand for."""

from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from format_oracle import Array, Coded, float32, hadamard, hard, mxfp8, nvfp4, shifted
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.checkpoint import checkpoint

import fuseops as fo
from fuseops import kernels as K
from fuseops.kernels import scales
from fuseops.recipes import Layout, Scaling, gemm, micro, operands
from fuseops.recipes.operands import operand, weight_operand
from fuseops.recipes.quantized import dequantize_columns, dequantize_layout, factors
from fuseops.recipes.recipe import BACKWARDS
from fuseops.recipes.scaling import COLUMN, E2M1, FAMILIES
from fuseops.testing.strategies import Formats, Split, filled, scalings

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
ROWS = [micro.mxfp8(E4M3), micro.mxfp8(E5M2), micro.nvfp4(), micro.nvfp4(hadamard=True)]
SQUARES = [micro.mxfp8(E4M3, True), micro.mxfp8(E5M2, True), micro.nvfp4(True)]
ORACLES = {torch.float8_e8m0fnu: mxfp8, E4M3: nvfp4}


def coded(x: Array, scaling: Scaling, columns: bool = False) -> Coded:
    """A matrix by the oracle, along its last axis.   columns: that is the one of tokens"""
    scaling = scaling.of("col") if columns else scaling
    if columns and scaling.hadamard:
        x = hadamard(x)
    if scaling.scale is torch.float32:
        tensor = max(x.shape[0], 1), max(x.shape[1], 1)
        return by_float32(x, scaling, tensor if scaling.block is None else scaling.code_block)
    return ORACLES[scaling.scale](x, str(scaling.data).removeprefix("torch."), scaling.code_block)


def same(found: Any, wanted: Coded) -> None:
    """The same bits; of NaN, that it is one."""
    data, scale, whole = found
    for mine, theirs in ((data, wanted.codes), (scale, wanted.scale)):
        wide = theirs.astype(np.float32)
        assert np.array_equal(np.isnan(mine.float().numpy()), np.isnan(wide))
        bits = mine.contiguous().view(torch.uint8).numpy()
        assert np.array_equal(bits[~np.isnan(wide)], theirs.view(np.uint8)[~np.isnan(wide)])
    assert (None if whole is None else whole.item()) == wanted.whole


def of_matrix(layout: Layout, k: int) -> Layout:
    """One of the matrices of a weight (E, N, K)."""
    return Layout(*[t if t is None else t[k] for t in layout])  # type: ignore[arg-type]


def turned(x: Array, count: int) -> Array:
    """The transpose over so many tokens, zeros behind."""
    return np.ascontiguousarray(np.pad(x, ((0, count - len(x)), (0, 0))).T)


EVERY = [
    Scaling(data, block, columns, scale)
    for scale, family in FAMILIES.items()
    for data in family.data
    for block, known in family.columns.items()
    for columns in known
]
NEAR = {E4M3: 0.05, E5M2: 0.1, E2M1: 0.2}  # of values with a few bits


@pytest.mark.parametrize("scaling", EVERY, ids=lambda s: f"{s}, columns {s.columns}")
def test_codes_stand_for_what_is_near(scaling: Scaling) -> None:
    """Of every format there is: what is read in other blocks than it was written in is far away."""
    sizes = [(torch.arange(n) // 16 % 3).exp2() for n in (130, 200)]
    x = filled((130, 200), torch.float32, "normal", 0) * sizes[0][:, None] * sizes[1]
    for made in (weight_operand,) if scaling.is_square else (weight_operand, operand):
        q = made(x, scaling, row=True, col=True)
        for layout, wanted in (("row", x), ("col", x.t())):
            error = dequantize_layout(q, layout)[: len(wanted), : wanted.shape[1]] - wanted
            assert error.norm() < NEAR[scaling.data] * x.norm(), (made, layout)


@pytest.mark.parametrize("scaling", [s for s in EVERY if s.is_square], ids=str)
@pytest.mark.parametrize("role", ["input", "grad_output", "hidden"])
def test_squares_of_tokens_are_refused(scaling: Scaling, role: str) -> None:
    for form in (scaling, Scaling(columns=COLUMN, colwise=scaling)):
        with pytest.raises(fo.FuseOpsError, match=rf"{role} is .*: squares are of weights"):
            fo.recipes.Roles(**{role: form})
    fo.recipes.Roles(weight=scaling)


# --- bit for bit


@pytest.mark.parametrize("scaling", ROWS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("width", [70, 33])
def test_rows_and_columns_are_those_of_the_oracle(
    scaling: Scaling, dtype: torch.dtype, width: int
) -> None:
    x = torch.from_numpy(hard(37, width)).to(dtype)
    wide = x.float().numpy()
    for rows in (x, x[[0, 1, 6, 7, 8, 12]]):  # without and with infinities
        q = operand(rows, scaling, row=True, col=True)
        same(q.row, coded(rows.float().numpy(), scaling))
        same(q.col, coded(turned(rows.float().numpy(), 128), scaling, columns=True))
        assert q.shape == rows.shape
    offs = torch.tensor([3, 3, 33], dtype=torch.int32)  # and padding
    grouped = operand(x, scaling, offs, row=True, col=True)
    assert grouped.row is not None and grouped.col is not None
    step, packs = scaling.code_block[1], scaling.codes_per_byte
    for group, (begin, end, at) in enumerate([(0, 3, 0), (3, 3, 128), (3, 33, 256)]):
        data, scale, whole = grouped.col
        parts = (
            data[:, at // packs : (at + 128) // packs],
            scale[:, at // step : (at + 128) // step],
        )
        own = None if whole is None else whole[group]
        same((*parts, own), coded(turned(wide[begin:end], 128), scaling, columns=True))
        data, scale, whole = grouped.row
        own = None if whole is None else whole[group]
        same((data[begin:end], scale[begin:end], own), coded(wide[begin:end], scaling))


@pytest.mark.parametrize("scaling", [*ROWS, *SQUARES], ids=str)
def test_weights_are_those_of_the_oracle(scaling: Scaling) -> None:
    weight = torch.stack(
        [torch.from_numpy(hard(40, 70)), torch.from_numpy(hard(40, 70)[::-1].copy())]
    )
    q = weight_operand(weight, scaling, row=True, col=True)
    assert q.row is not None and q.col is not None
    for k, matrix in enumerate(weight.numpy()):
        same(of_matrix(q.row, k), coded(matrix, scaling))
        same(of_matrix(q.col, k), coded(np.ascontiguousarray(matrix.T), scaling))
    if scaling.is_square:  # one set of codes for both directions
        mine, theirs = (
            dequantize_layout(replace(q, dtype=torch.float32), "row"),
            dequantize_layout(q, "col"),
        )
        assert torch.equal(mine.mT.nan_to_num(7.0), theirs.nan_to_num(7.0))


@pytest.mark.parametrize("scaling", [*ROWS, *SQUARES], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_what_codes_stand_for_is_exact_in_the_dtype_of_products(
    scaling: Scaling, dtype: torch.dtype
) -> None:
    x = filled((40, 70), dtype, "normal", 1) * torch.logspace(-38, 37, 40)[:, None].to(dtype)
    if scaling.is_square:
        q = weight_operand(x, scaling, row=True, col=False)
    else:
        q = operand(x, scaling, row=True)
    wanted = torch.from_numpy(coded(x.float().numpy(), scaling).values)
    if scaling.scale is E4M3:  # times a float32 scale
        torch.testing.assert_close(
            dequantize_layout(q, "row").double(), wanted, rtol=2**-23, atol=2**-149
        )
        found, whole = factors(q, "row")
        assert found.dtype is dtype and whole is not None
        expected = wanted / float(whole)  # codes times the scales of blocks alone
        torch.testing.assert_close(found.double(), expected, rtol=2**-50, atol=0)
    else:
        assert torch.equal(dequantize_layout(q, "row").double(), wanted)


# --- float32 scales: of blocks, tensors and groups

FREE = [
    {},
    {"data": E5M2},
    {"columns": COLUMN},
    {"columns": COLUMN, "powers": False},
    {"columns": COLUMN, "epsilon": 0.5},
    {"epsilon": 0.5, "data": E5M2},
    {"columns": COLUMN, "powers": False, "epsilon": 3.0},
]
WHOLE = [{}, {"data": E5M2}, {"powers": True}, {"epsilon": 0.5}, {"powers": True, "epsilon": 700.0}]


def by_float32(x: Array, scaling: Scaling, block: tuple[int, int]) -> Coded:
    name = str(scaling.data).removeprefix("torch.")
    return float32(x, name, block, bool(scaling.powers), scaling.epsilon)


def like(found: Any, codes: Array, scale: Any) -> None:
    """The same codes, bit for bit but for NaN, and the same float32 scales."""
    mine, wide = found[0].contiguous(), codes.astype(np.float32)
    there = ~np.isnan(wide)
    assert np.array_equal(~np.isnan(mine.float().numpy()), there)
    assert np.array_equal(mine.view(torch.uint8).numpy()[there], codes.view(np.uint8)[there])
    assert np.array_equal(found[1].numpy(), scale)


@pytest.mark.parametrize("options", FREE, ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_vectors_are_those_of_the_oracle(options: Any, dtype: torch.dtype) -> None:
    scaling = Scaling(**options)
    x = torch.from_numpy(hard(150, 140)).to(dtype)
    offs = torch.tensor([3, 3, 140], dtype=torch.int32)  # and padding
    q = operand(x, scaling, offs, row=True, col=True)
    assert q.row is not None and q.col is not None
    wide = x.float().numpy()
    rows = by_float32(wide, scaling, (1, 128))
    like(q.row, rows.codes, rows.scale.T)
    for begin, end, at in [(0, 3, 0), (3, 3, 128), (3, 140, 256)]:
        count = -(-(end - begin) // 128) * 128 or 128
        data, scale = (t[:, at : at + count] for t in (q.col.data, q.col.scale))
        across = np.pad(wide[begin:end], ((0, count - end + begin), (0, 0)))
        if scaling.columns == COLUMN:
            columns = by_float32(np.ascontiguousarray(across.T), scaling, (1, 128))
            data, scale = q.col.data[:, at : at + count], q.col.scale[at // 128 :][: count // 128]
            like((data, scale), columns.codes, columns.scale.T)
        else:
            of_rows = by_float32(across, scaling, (1, 128))
            of_rows.scale[end - begin :] = 0  # no row is there
            codes, squares = shifted(of_rows._replace(scale=np.maximum(of_rows.scale, 2.0**-63)))
            like((data, q.col.scale[:, at // 128 :][:, : count // 128]), codes, squares)


@pytest.mark.parametrize("options", WHOLE, ids=str)
def test_scales_of_tensors_and_groups_are_those_of_the_oracle(options: Any) -> None:
    scaling = Scaling(block=None, columns=None, **options)
    x = torch.from_numpy(hard(40, 70))
    x = x[
        [k for k in range(40) if k not in (2, 3, 12)]
    ]  # without infinities, which leave nothing of the rest
    q = operand(x, scaling, row=True, col=True)
    assert q.row is not None and q.col is not None
    found = by_float32(x.numpy(), scaling, x.shape)  # type: ignore[arg-type]
    like(q.row, found.codes, found.scale[0, 0])
    assert torch.equal(q.col.scale, q.row.scale)
    assert torch.equal(
        q.col.data.float().nan_to_num(7)[:, : len(x)], q.row.data.t().float().nan_to_num(7)
    )
    ends = [3, 3, 30]
    grouped = operand(x, scaling, torch.tensor(ends, dtype=torch.int32), row=True, col=True)
    assert grouped.row is not None
    for group, (begin, end) in enumerate([(0, 3), (3, 30)]):
        part = x[begin:end].numpy()
        found = by_float32(part, scaling, part.shape)
        like(
            (grouped.row.data[begin:end], grouped.row.scale[2 * group]),
            found.codes,
            found.scale[0, 0],
        )


@pytest.mark.parametrize("options", [{}, {"powers": False}, {"epsilon": 0.5}], ids=str)
@pytest.mark.parametrize("block", [(128, 128), (1, 128), None])
def test_float32_scales_of_weights_are_those_of_the_oracle(options: Any, block: Any) -> None:
    columns = {(128, 128): (128, 128), (1, 128): COLUMN, None: None}[block]
    scaling = Scaling(block=block, columns=columns, **options)
    weight = torch.stack(
        [torch.from_numpy(hard(140, 150)), filled((140, 150), torch.float32, "normal", 1)]
    )
    weight[0, [2, 3, 12]] = 0.0
    q = weight_operand(weight, scaling, row=True, col=True)
    assert q.row is not None and q.col is not None
    for k, matrix in enumerate(weight.numpy()):
        for layout, m in ((q.row, matrix), (q.col, np.ascontiguousarray(matrix.T))):
            found = by_float32(m, scaling, block or m.shape)
            scale = found.scale[0, 0] if block is None else found.scale
            scale = scale.T if block == (1, 128) else scale
            like(of_matrix(layout, k), found.codes, scale)


@pytest.mark.parametrize("data", [E4M3, E5M2], ids=str)
@given(ends=st.lists(st.integers(0, 9), min_size=1, max_size=4).map(sorted))
def test_rows_of_no_group_are_zeros_whatever_lies_there(data: torch.dtype, ends: list[int]) -> None:
    """A kernel that scales by groups writes no codes of theirs."""
    x, offs = torch.randn(9, 5), torch.tensor(ends, dtype=torch.int32)
    q = operand(x, Scaling(data, None, None), offs, row=True, col=False)
    expected = q.dequantize().clone()
    assert q.row is not None
    q.row.data.view(torch.uint8)[ends[-1] :] = 0x7F  # NaN
    assert torch.equal(q.dequantize(), expected) and not expected[ends[-1] :].any()


PAIRS = [
    (Scaling(E4M3, (1, 128), COLUMN), Scaling(E5M2, (1, 128), COLUMN)),
    (micro.mxfp8(E4M3), micro.mxfp8(E5M2)),
    (micro.mxfp8(E4M3), micro.nvfp4(hadamard=True)),
    (micro.nvfp4(), Scaling(E5M2, (1, 128), COLUMN, powers=False)),
    (Scaling(E4M3, (1, 128), COLUMN), micro.nvfp4()),
    (Scaling(E4M3, None, None), Scaling(E5M2, None, None)),
    (micro.nvfp4(), micro.nvfp4(stochastic=True)),  # random numbers are for one of them alone
    (micro.nvfp4(stochastic=True), micro.nvfp4(hadamard=True)),
]


@pytest.mark.parametrize(("rows", "columns"), PAIRS, ids=str)
@pytest.mark.parametrize("odd", [0, 1])  # codes of four bits lie two in a byte
def test_columns_may_have_another_format_than_rows(
    rows: Scaling, columns: Scaling, odd: int
) -> None:
    x, both = filled((70, 50 + odd), torch.float32, "normal", 1), replace(rows, colwise=columns)
    offs, seed = torch.tensor([30, 66], dtype=torch.int32), torch.tensor([5])
    q = operand(x, both, offs, row=True, col=True, seed=seed)
    for layout, scaling in (("row", rows), ("col", columns)):
        own = seed if scaling.stochastic else None
        alone = operand(x, scaling, offs, row=layout == "row", col=layout == "col", seed=own)
        mine, theirs = (t.only(layout == "row", layout == "col").components() for t in (q, alone))
        assert mine.keys() == theirs.keys()
        for name, t in mine.items():
            assert torch.equal(t.view(torch.uint8), theirs[name].view(torch.uint8))
        assert torch.equal(dequantize_layout(q, layout), dequantize_layout(alone, layout))
    w = weight_operand(
        filled((2, 40 + odd, 30 + odd), torch.float32, "normal", 2), both, row=True, col=True
    )
    assert dequantize_layout(w, "row").shape == (2, 40 + odd, 30 + odd) and dequantize_layout(
        w, "col"
    ).shape == (2, 30 + odd, 40 + odd)
    assert q.groups(1, 2).shape == (36, 50 + odd) and torch.equal(
        dequantize_layout(q.groups(1, 2), "col"), dequantize_layout(q, "col")[:, 128:]
    )


@pytest.mark.parametrize("scaling", [Scaling(E4M3), Scaling(E5M2), micro.nvfp4()], ids=str)
def test_values_up_to_half_a_step_above_the_largest_code_round_to_it(scaling: Scaling) -> None:
    codes = torch.arange(256, dtype=torch.uint8)
    raw = codes if scaling.codes_per_byte == 2 else codes.view(scaling.data)
    values = K.codes_values(raw, scaling.data).flatten()
    *_, before, largest = values[values.isfinite()].unique().tolist()
    assert scaling.largest == (largest, pytest.approx(1 + (largest - before) / 2 / largest))


@pytest.mark.parametrize("grouped", [False, True])
def test_fused_ops_write_no_columns_of_rows_where_those_have_another_format(grouped: bool) -> None:
    tokens = Scaling(colwise=Scaling(E5M2, columns=COLUMN))
    recipe = fo.recipes.ByRole(
        lambda op, name, role: Scaling(E4M3, (128, 128)) if role == "weight" else tokens
    )
    x = filled((150, 128), torch.bfloat16, "normal", 1)
    torch.manual_seed(0)
    model: Any = fo.MoE(128, 128, 2, 1)
    if not grouped:
        ops = fo.ops.Linear(128, 256), fo.ops.SwiGLU(), fo.ops.Linear(128, 128)
        model = fo.Sequential(*ops)
    model, found = model.bfloat16(), []
    for fuses in (True, False):
        leaf = x.detach().requires_grad_()
        with fo.recipe(recipe), fo.fusion(fuses):
            y = model(leaf)
            found.append(
                [y, *torch.autograd.grad(y.float().square().sum(), [leaf, *model.parameters()])]
            )
    for mine, theirs in zip(*found, strict=True):
        assert (mine - theirs).float().norm() <= 5e-3 * theirs.float().norm()


# --- the Hadamard transform, and rounding at random


def test_the_hadamard_transform_is_its_own_inverse_and_that_of_the_matrix() -> None:
    matrix = np.ones((1, 1))
    for _ in range(4):
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    x = filled((5, 48), torch.float32, "normal", 1).mul(64).round().mul(16)  # sums are exact
    assert torch.equal(K.hadamard(K.hadamard(x)), x)
    expected = x.double().unflatten(1, (3, 16)) @ torch.from_numpy(matrix / 4)
    assert torch.equal(K.hadamard(x).double(), expected.flatten(1))
    q = operand(x, micro.nvfp4(hadamard=True), row=False, col=True)
    exact = operand(x, micro.nvfp4(), row=False, col=True)
    for found in (q, exact):  # both stand for x
        assert (dequantize_columns(found)[:, :5] - x.t()).norm() < 0.2 * x.norm()


@pytest.mark.parametrize("layout", ["row", "col"])
def test_rounding_at_random_is_right_in_the_mean_and_repeats_for_its_seed(layout: str) -> None:
    x = torch.linspace(-6, 6, 128).repeat(128, 1)  # 128 draws of each number
    x[::16] = x[:, ::16] = 6  # so that every block has the scale 1, which no E4M3 rounds
    scaling, wanted = micro.nvfp4(stochastic=True), {"row": layout == "row", "col": layout == "col"}
    seeds = [torch.tensor([seed]) for seed in range(40)]
    drawn = [dequantize_layout(operand(x, scaling, seed=s, **wanted), layout) for s in seeds]
    rows = [t if layout == "row" else t.t() for t in drawn]
    mean = torch.stack([t[torch.arange(128) % 16 > 0] for t in rows]).double().mean((0, 1))
    size = x[1].abs()
    step = torch.where(size < 2, 0.5, torch.where(size < 4, 1.0, 2.0)).double()
    # of 4800 draws, whose spread is half a step at most; five times the spread of the mean
    assert ((mean - x[1].double()).abs() < 5 * step / 2 / 4800**0.5).all()
    assert len({tuple(t[:, 70].tolist()) for t in rows}) == len(seeds)
    again = dequantize_layout(operand(x, scaling, seed=seeds[0], **wanted), layout)
    assert torch.equal(again, drawn[0])
    nearest = dequantize_layout(operand(x, micro.nvfp4(), **wanted), layout)
    assert (drawn[0] - nearest).abs().max() < 2.01 and not torch.equal(drawn[0], nearest)


def test_a_backward_rounds_alike_when_it_runs_twice_and_otherwise_in_another_call() -> None:
    recipe = fo.recipes.NVFP4BlockScaling()
    model = fo.Sequential(fo.ops.Linear(32, 64, bias=False), fo.ops.SwiGLU(), fo.ops.Linear(32, 32))
    x = filled((40, 32), torch.float32, "normal", 1).requires_grad_()
    dy = filled((40, 32), torch.float32, "normal", 2)

    def gradients(y: Tensor, keep: bool = False) -> list[Tensor]:
        return [*torch.autograd.grad(y, [x, *model.parameters()], dy, retain_graph=keep)]

    for fusion in (True, False):
        with fo.recipe(recipe), fo.fusion(fusion):
            torch.manual_seed(0)
            y = model(x)
            first, second = gradients(y, keep=True), gradients(y)
            other = gradients(model(x))
            torch.manual_seed(0)
            kept = gradients(
                checkpoint(model, x, use_reentrant=False, context_fn=fo.checkpoint_contexts)
            )
        for a, b, c, d in zip(first, second, other, kept, strict=True):
            assert torch.equal(a, b) and torch.equal(a, d)
            # but for a bias, which sums dy as it is
            assert not torch.equal(a, c) or a.shape == (32,)


@pytest.mark.parametrize("fusion", [False, True])
def test_every_op_and_layout_of_a_backward_has_random_numbers_of_its_own(
    fusion: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    linear = partial(fo.ops.Linear, 32, bias=False)
    model = fo.Sequential(linear(64), fo.ops.SwiGLU(), linear(32), linear(32))
    seeds: list[int] = []

    def coded(*args: Any) -> Any:
        seeds.extend(seed.item() for seed in args[3:4] if seed is not None)
        return original(*args)

    original = operands._quantize_last
    monkeypatch.setattr(operands, "_quantize_last", coded)
    with fo.recipe(fo.recipes.NVFP4BlockScaling()), fo.fusion(fusion):
        model(torch.randn(40, 32)).sum().backward()
    assert len({*seeds}) == len(seeds) == 5  # rows and columns of three gradients, but for dx


@pytest.mark.parametrize("scaling", [*ROWS, *SQUARES], ids=str)
def test_large_tensors_are_quantized_in_pieces_to_the_same_bits(
    scaling: Scaling, monkeypatch: pytest.MonkeyPatch
) -> None:
    x = torch.from_numpy(hard(300, 70))
    offs = torch.tensor([40, 40, 290], dtype=torch.int32)

    def made() -> list[Tensor]:
        if scaling.is_square:
            q = weight_operand(torch.stack([x, x.flip(0)]), scaling, row=True, col=True)
        else:
            q = operand(x, scaling, offs, row=True, col=True)
        return [t.contiguous().view(torch.uint8) for t in q.components().values()]

    whole = made()
    monkeypatch.setattr(scales, "LEAST_PIECE", 1)
    assert len(scales.pieces(x)) > 10
    for mine, theirs in zip(made(), whole, strict=True):
        assert torch.equal(mine, theirs)


@pytest.mark.parametrize(
    ("scaling", "of_weight"),
    [
        (micro.mxfp8(), micro.mxfp8()), (micro.mxfp8(), micro.mxfp8(square=True)),
        (micro.nvfp4(hadamard=True), micro.nvfp4(True)),
    ],
    ids=str,
)  # fmt: skip
def test_products_over_groups_are_the_same_in_pieces(
    scaling: Scaling, of_weight: Scaling, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of codes that are expanded: by rows, by features of the weight, and by features of dy."""
    torch.manual_seed(0)
    x, dy, weight = torch.randn(600, 70), torch.randn(600, 100), torch.randn(3, 100, 70)
    offs = torch.tensor([40, 40, 590], dtype=torch.int32)

    def made() -> list[Tensor]:
        a, g = (operand(t, scaling, offs, row=True, col=True) for t in (x, dy))
        w = weight_operand(weight, of_weight, row=True, col=True)
        dw = gemm.wgrad(g, a, torch.float32, offs)
        return [gemm.fprop(a, w, offs), gemm.dgrad(g, w, offs), dw]

    whole, parts = made(), []
    monkeypatch.setattr(scales, "LEAST_PIECE", 1)
    monkeypatch.setattr(gemm, "CHUNK", 32)
    for name in ("grouped_mm", "grouped_wgrad"):
        kernel = getattr(K, name)

        def seen(t: Tensor, *rest: Any, kernel: Any = kernel) -> Any:
            parts.append(tuple(t.shape))
            return kernel(t, *rest)

        monkeypatch.setattr(gemm.K, name, seen)
    for mine, theirs in zip(made(), whole, strict=True):
        torch.testing.assert_close(mine, theirs)
    assert len(parts) == 4 + 2 * 4 + 2 * 3


def test_the_forward_never_rounds_at_random() -> None:
    with pytest.raises(fo.FuseOpsError, match=r"input is .*stochastic.*grad_output"):
        fo.recipes.Roles(input=micro.nvfp4(stochastic=True))
    with pytest.raises(fo.FuseOpsError, match="expected stochastic to be one of"):
        replace(micro.mxfp8(), stochastic=True)


# --- GEMMs, in float64 of what the operands stand for

COMMON = {"square_weights": st.booleans(), "backward": st.sampled_from(BACKWARDS)}
SCALES = {"powers_of_two": st.booleans(), "epsilon": st.sampled_from([0.0, 1.0])}
RECIPES = (
    st.builds(fo.recipes.Float8BlockScaling, wgrad=st.just("block"), **SCALES, **COMMON)
    | st.builds(fo.recipes.Float8CurrentScaling, backward=st.sampled_from(BACKWARDS), **SCALES)
    | st.builds(
        fo.recipes.ByRole,
        st.builds(Formats, scalings(), scalings(), scalings()),
        backward=st.sampled_from(BACKWARDS),
    )
    | st.builds(
        fo.recipes.MXFP8BlockScaling,
        fwd=st.sampled_from([E4M3, E5M2]),
        bwd=st.sampled_from([E4M3, E5M2]),
        **COMMON,
    )
    | st.builds(
        fo.recipes.NVFP4BlockScaling, hadamard=st.booleans(), stochastic=st.just(False), **COMMON
    )
)


@pytest.mark.parametrize("grouped", [False, True])
def test_columns_of_other_blocks_meet_in_what_they_stand_for(grouped: bool) -> None:
    squares, columns = Scaling(), Scaling(columns=COLUMN)
    x, dy = (
        filled((150, 140), torch.float32, "normal", 1),
        filled((150, 64), torch.float32, "normal", 2),
    )
    offs = torch.tensor([20, 150], dtype=torch.int32) if grouped else None
    for of_x, of_dy in ((squares, columns), (columns, squares)):
        left = operand(dy, of_dy, offs, row=False, col=True)
        right = operand(x, of_x, offs, row=False, col=True)
        dw = gemm.wgrad(left, right, torch.float32, offs)
        a, b = dequantize_layout(left, "col").double(), dequantize_layout(right, "col").double()
        ends = [(0, 128), (128, a.shape[1])] if grouped else [(0, a.shape[1])]
        for mine, (begin, end) in zip(dw.view(-1, 64, 140), ends, strict=True):
            torch.testing.assert_close(
                mine.double(), a[:, begin:end] @ b[:, begin:end].t(), rtol=1e-5, atol=1e-4
            )


TENSOR, SQUARES = Scaling(E4M3, None, None), Scaling(E4M3, (128, 128))


@pytest.mark.parametrize("tokens", [TENSOR, Scaling(), micro.mxfp8()], ids=str)
@pytest.mark.parametrize("rows", [TENSOR, SQUARES, Scaling()], ids=str)
@pytest.mark.parametrize("columns", [TENSOR, SQUARES, Scaling()], ids=str)
@pytest.mark.parametrize("grouped", [False, True])
def test_a_weight_is_multiplied_in_the_format_of_the_layout_that_is_read(
    tokens: Scaling, rows: Scaling, columns: Scaling, grouped: bool
) -> None:
    """A kernel takes it if its scales are of the kind of the other operand's, whatever those of its other layout."""
    n, k, groups = 140, 150, (2,) if grouped else ()
    offs = torch.tensor([20, 40], dtype=torch.int32) if grouped else None
    w = filled((*groups, n, k), torch.float32, "normal", 1)
    q = weight_operand(w, replace(rows, colwise=columns), row=True, col=True)
    for layout, product, width in (("row", gemm.fprop, k), ("col", gemm.dgrad, n)):
        t = operand(filled((40, width), torch.float32, "normal", 2), tokens, offs)
        a, b = dequantize_layout(t, "row").double(), dequantize_layout(q, layout).double()
        parts = zip(a.split(20), b, strict=True) if grouped else [(a, b)]
        expected = torch.cat([left @ right.mT for left, right in parts])
        torch.testing.assert_close(product(t, q, offs).double(), expected, rtol=1e-5, atol=1e-4)


@given(
    recipe=RECIPES,
    counts=st.lists(st.sampled_from([0, 1, 33, 128, 130]), min_size=1, max_size=3),
    padding=st.sampled_from([0, 5]),
    k=st.sampled_from([4, 33, 50]),
    n=st.sampled_from([7, 70]),
    dense=st.booleans(),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)
def test_products_are_those_of_what_operands_stand_for(
    recipe: Any, counts: list[int], padding: int, k: int, n: int, dense: bool, dtype: torch.dtype
) -> None:
    counts, padding = (counts[:1], 0) if dense else (counts, padding)
    split, roles, form = (
        Split(tuple(counts), padding),
        recipe.roles_of(None, ""),
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
    y = read(x, roles.input) @ read(w, roles.weight).T
    if roles.backward == "high_precision":
        return y, dy @ w.astype(np.float64), dy.T @ x.astype(np.float64)
    if roles.backward == "dequantized":
        return y, dy @ read(w, roles.weight), dy.T @ read(x, roles.input)
    turned_w, columns, grad = (np.ascontiguousarray(t.T) for t in (w, x, dy))
    dx = read(dy, roles.grad_output) @ read(turned_w, untransformed(roles.weight), True).T
    if not roles.columns:  # one operand is as it is, so both are read by rows
        return y, dx, read(dy, roles.grad_output).T @ read(x, roles.input)
    left, right = roles.grad_output, roles.input
    if left.of("col").hadamard != right.of("col").hadamard:
        sides = (turned_back(t, s) for t, s in ((grad, left), (columns, right)))
        a, b = sides
        return y, dx, a @ b.T
    return y, dx, read(grad, left, True) @ read(columns, right, True).T


def untransformed(scaling: Scaling | None) -> Scaling | None:
    """The format of columns as a weight has them: its transpose goes through no transform."""
    return None if scaling is None else replace(scaling.of("col"), hadamard=False)


def read(x: Array, scaling: Scaling | None, columns: bool = False) -> Array:
    """What a GEMM reads of a matrix."""
    return x.astype(np.float64) if scaling is None else coded(x, scaling, columns).values


def turned_back(x: Array, scaling: Scaling) -> Array:
    """What columns stand for without the transform that they went through."""
    found = coded(x, scaling, True).values
    if not scaling.of("col").hadamard:
        return found
    signs = np.array([1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1], np.float64)
    plain = hadamard(np.tile(signs, found.shape[1] // 16) * found) if found.shape[1] else found
    return (np.tile(signs, found.shape[1] // 16) * plain)[:, : x.shape[1]]


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
    fo.recipes.NVFP4BlockScaling,
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


@pytest.mark.parametrize("square", [False, True])
@pytest.mark.parametrize(
    "recipe",
    [fo.recipes.MXFP8BlockScaling, partial(fo.recipes.NVFP4BlockScaling, stochastic=False)],
)
@pytest.mark.parametrize("kept", [False, True])
def test_a_step_by_scaled_tensor_cores_is_the_step_by_expanded_operands(
    monkeypatch: pytest.MonkeyPatch, recipe: Any, square: bool, kept: bool
) -> None:
    """Operands whose scales lie as Blackwell's tensor cores read them stand for the same, and products are the same."""
    chosen = recipe(square_weights=square, weights="step" if kept else "none")
    offs = torch.tensor([5, 5, 138, 150], dtype=torch.int32)
    torch.manual_seed(0)
    dense = fo.Sequential(fo.ops.Linear(48, 160, bias=False), fo.ops.Linear(160, 40))
    experts = fo.Sequential(
        fo.ops.GroupedLinear(4, 48, 64, bias=False),
        fo.ops.SwiGLU(),
        fo.ops.GroupedLinear(4, 32, 48),
    )
    calls: set[str] = set()

    def seen(op: Any) -> Any:
        return lambda *args: calls.add(op.name) or op(*args)

    for model, side in ((dense, {}), (experts, {"offs": offs})):
        x = torch.randn(150, 48) * torch.exp2(torch.randint(-5, 6, (150, 48)).float())
        found = []
        calls.clear()
        for blackwell in (False, True):
            with monkeypatch.context() as patch, fo.recipe(chosen, strict=True):
                fo.weights_changed(model)
                if blackwell:
                    patch.setattr(K, "multiplies", lambda x: True)
                    for name in ("micro_mm", "micro_wgrad"):
                        patch.setattr(K, name, seen(getattr(K, name)))
                leaf = x.clone().requires_grad_()
                y = model(leaf, **side)
                y.backward(torch.ones_like(y))
                found.append([y.detach(), leaf.grad, *(p.grad for p in model.parameters())])
                model.zero_grad()
        assert calls == {"micro_mm", "micro_wgrad"}
        for got, want in zip(*found, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5 * float(want.abs().max()))
