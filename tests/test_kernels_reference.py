"""The reference kernels are the specification: checked against torch's own ops and autograd, in float64."""

import itertools
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from plain_acts import TORCH
from torch import Tensor

import fuseops as fo
from fuseops import kernels as K
from fuseops.kernels.activation import KINDS
from fuseops.kernels.dropout import dropout_mask
from fuseops.testing.strategies import Split, filled, group_splits, row_counts, widths

FP8 = [torch.float8_e4m3fn, torch.float8_e5m2]
every_fp8 = pytest.mark.parametrize("dtype", FP8, ids=str)


def quantized(x: Tensor, dtype: torch.dtype, offs: Tensor | None = None) -> tuple[Tensor, Tensor]:
    data, _, scale = K.quantize_groups.twin(x, offs, dtype)
    return data, scale


def close(mine: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(mine, theirs, rtol=1e-9, atol=1e-9, equal_nan=True)


def vjp(f: Any, dy: Tensor, *inputs: Tensor) -> tuple[Tensor, ...]:
    leaves = [t.detach().requires_grad_() for t in inputs]
    return torch.autograd.grad(f(*leaves), leaves, dy, materialize_grads=True)


def randn(*shape: int, seed: int = 0) -> Tensor:
    return filled(shape, torch.float64, "normal", seed)


def test_every_activation_has_torchs_twin() -> None:
    kinds = {K.GATES.get(kind, kind) for kind in KINDS}
    assert TORCH.keys() == kinds, "give it its formula in tests/plain_acts.py"


@pytest.mark.parametrize("kind", sorted(TORCH.keys() & {*KINDS}))
@given(kind_of_value=st.sampled_from(["normal", "large", "denormal", "zeros"]), rows=row_counts())
def test_activations(kind: str, kind_of_value: str, rows: int) -> None:
    x, dy = filled((rows, 33), torch.float64, kind_of_value, 1), randn(rows, 33)
    close(K.act_fwd.twin(x, kind), TORCH[kind](x))
    close(K.act_bwd.twin(dy, x, kind), vjp(TORCH[kind], dy, x)[0])
    dx, dbias = K.act_bwd_bias.twin(dy, x, kind)
    close(dx, K.act_bwd.twin(dy, x, kind))
    close(dbias, dx.sum(0))


@given(rows=row_counts(), width=widths(), dims=st.sampled_from([1, 2]), affine=st.booleans())
def test_rms_norm(rows: int, width: int, dims: int, affine: bool) -> None:
    shape = (rows, 3, width)
    x, dy, weight = randn(*shape), randn(*shape, seed=1), randn(*shape[-dims:], seed=2)
    w = weight if affine else None

    def norm(x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, shape[-dims:], weight if affine else None, 1e-5)

    y, rstd = K.rmsnorm_fwd.twin(x, w, 1e-5, dims=dims)
    close(y, norm(x, weight))
    dx, dweight = K.rmsnorm_bwd.twin(dy, x, w, rstd)
    expected = vjp(norm, dy, x, weight)
    close(dx, expected[0])
    if affine:
        close(dweight, expected[1])


def glu(x: Tensor, probs: Tensor) -> Tensor:
    gate, up = x.chunk(2, -1)
    return F.silu(gate) * up * probs[:, None]


@given(rows=row_counts(), width=widths())
def test_swiglu(rows: int, width: int) -> None:
    x, dy, probs = randn(rows, 2 * width), randn(rows, width, seed=1), randn(rows, seed=2)
    close(K.scaled_act_fwd.twin(x, probs, "swiglu"), glu(x, probs))
    close(K.act_fwd.twin(x, "swiglu"), glu(x, torch.ones_like(probs)))
    dx, dprobs = vjp(glu, dy, x, probs)
    y = glu(x, probs)
    scaled = K.scaled_act_bwd.twin(dy, x, probs, "swiglu", True, True)
    for mine, theirs in zip(scaled, (dx, dprobs, y), strict=True):
        close(mine, theirs)
    close(K.act_dprobs.twin(dy, x, "swiglu"), dprobs)
    close(K.act_bwd.twin(dy, x, "swiglu"), vjp(lambda x: glu(x, torch.ones_like(probs)), dy, x)[0])


def by_group(split: Split) -> Tensor:
    """(R, E): 1 where the row belongs to the group; padding rows belong to none."""
    group = torch.tensor([e for e, n in enumerate(split.counts) for _ in range(n)])
    one_hot = torch.zeros(split.rows, len(split.counts), dtype=torch.float64)
    one_hot[torch.arange(len(group)), group.long()] = 1
    return one_hot


@given(split=group_splits(), n=widths(), k=widths())
def test_grouped_gemm(split: Split, n: int, k: int) -> None:
    groups, member = len(split.counts), by_group(split)
    x, w = randn(split.rows, k), randn(groups, n, k, seed=1)
    dy, bias = randn(split.rows, n, seed=2), randn(groups, n, seed=3)

    def mm(x: Tensor, w: Tensor) -> Tensor:
        return torch.einsum("re,rk,enk->rn", member, x, w)

    close(K.grouped_mm.twin(x, w, split.offs), mm(x, w))
    close(K.grouped_wgrad.twin(dy, x, split.offs), vjp(mm, dy, x, w)[1])
    close(K.grouped_mm.twin(dy, w.transpose(1, 2), split.offs), vjp(mm, dy, x, w)[0])
    inside = member.sum(1, keepdim=True)
    close(K.grouped_bias_fwd.twin(dy, bias, split.offs), dy * inside + member @ bias)
    close(K.grouped_bias_bwd.twin(dy, split.offs)[0], member.t() @ dy)


@given(p=st.sampled_from([0.1, 0.5, 0.9]), seed=st.integers(0, 2**62 - 1))
def test_dropout_masks(p: float, seed: int) -> None:
    like = torch.empty(500, 37)
    mask = dropout_mask(torch.tensor([seed]), like, p)
    assert torch.equal(mask, dropout_mask(torch.tensor([seed]), like.half(), p))
    # Six standard deviations of a share of 18500 draws, at most 0.5 / sqrt(18500) each.
    assert abs(mask.double().mean().item() - (1 - p)) < 0.022
    for lag in (1, 37):  # neighbours in a row and in a column agree as often as strangers
        flat = mask.flatten()
        agree = (flat[lag:] == flat[:-lag]).double().mean().item()
        assert abs(agree - (p * p + (1 - p) ** 2)) < 0.03
    other = dropout_mask(torch.tensor([seed + 1]), like, p)
    assert abs((mask == other).double().mean().item() - (p * p + (1 - p) ** 2)) < 0.03


# --- fp8: torch's cast, after clamping finite and infinite values to the largest of the format


def steps(dtype: torch.dtype) -> Tensor:
    """Every value of the format, finite ones in order."""
    found = torch.arange(256, dtype=torch.uint8).view(dtype).float()
    return found[found.isfinite()].unique()


@every_fp8
def test_saturate_keeps_every_value_of_the_format(dtype: torch.dtype) -> None:
    values = steps(dtype)
    assert torch.equal(K.saturate(values, dtype).float(), values)


@every_fp8
def test_saturate_rounds_to_nearest_even(dtype: torch.dtype) -> None:
    values = steps(dtype)
    middle = (values[1:] + values[:-1]) / 2  # exact in float32
    for shift in (-1e-3, 0.0, 1e-3):
        gap = values[1:] - values[:-1]
        got = K.saturate(middle + shift * gap, dtype)
        down, up = values[:-1], values[1:]
        even = (K.saturate(down, dtype).view(torch.uint8) % 2) == 0
        nearest = down if shift < 0 else up if shift > 0 else torch.where(even, down, up)
        assert torch.equal(got.float(), nearest)


@every_fp8
def test_saturate_at_and_beyond_the_edge(dtype: torch.dtype) -> None:
    most = torch.finfo(dtype).max
    inf, nan = float("inf"), float("nan")
    x = torch.tensor([most * 1.01, most * 8, 3e38, inf, -most * 1.01, -3e38, -inf, nan, -0.0])
    got = K.saturate(x, dtype).float()
    assert got[:4].eq(most).all() and got[4:7].eq(-most).all()
    assert got[7].isnan() and got[8] == 0 and got[8].signbit()


@every_fp8
@given(rows=row_counts(), seed=st.integers(0, 99), hard=st.sampled_from(["none", "nan", "inf"]))
def test_quantize(dtype: torch.dtype, rows: int, seed: int, hard: str) -> None:
    x = filled((rows, 17), torch.float32, "normal" if hard == "none" else hard, seed)
    data, scale = quantized(x, dtype)
    most, largest = torch.finfo(dtype).max, torch.finfo(torch.float32).max
    expected = x.abs().nan_to_num(nan=0.0, posinf=largest).max() if rows else torch.zeros(())
    inv = torch.tensor(most) / expected if expected > 0 else torch.ones(())
    assert scale.shape == () and torch.equal(scale, 1 / inv)
    assert torch.equal(
        data.float().nan_to_num(nan=-1),
        (x * inv).clamp(-most, most).to(dtype).float().nan_to_num(nan=-1),
    )
    assert torch.equal(data.float().isnan(), x.isnan())


@pytest.mark.parametrize("value", [0.0, 1e-45, 1e-38, 3e38])
@every_fp8
def test_quantize_of_the_smallest_and_the_largest(dtype: torch.dtype, value: float) -> None:
    data, scale = quantized(torch.tensor([[value, -value]]), dtype)
    assert scale > 0 and data.float().isfinite().all()


@every_fp8
@given(split=group_splits(), k=widths())
def test_a_split_is_quantized_group_by_group(dtype: torch.dtype, split: Split, k: int) -> None:
    x = filled((split.rows, k), torch.float32, "normal", 1)
    end = sum(split.counts)
    x[end:] = float("nan")
    data, scale = quantized(x, dtype, split.offs)
    assert not data[end:].float().any()
    for e, part in enumerate(x[:end].split(split.counts)):
        mine = data[:end].split(split.counts)[e]
        expected, expected_scale = quantized(part, dtype)
        assert torch.equal(mine.float(), expected.float()) and scale[e] == expected_scale


@every_fp8
def test_experts_are_quantized_one_by_one(dtype: torch.dtype) -> None:
    weight = randn(3, 5, 7).float() * torch.tensor([1.0, 0.0, 1e4])[:, None, None]
    data, _, scale = K.quantize_matrices.twin(weight, dtype)
    for e, w in enumerate(weight):
        expected, expected_scale = quantized(w, dtype)
        assert torch.equal(data[e].float(), expected.float()) and scale[e] == expected_scale


@pytest.mark.parametrize("grouped", [False, True])
@every_fp8
def test_a_gemm_of_codes_is_in_range_where_its_result_is(dtype: torch.dtype, grouped: bool) -> None:
    """Of operands of any magnitude, by numpy in float64."""
    offs = torch.tensor([5], dtype=torch.int32) if grouped else None
    for powers in itertools.product((-120, -60, 0, 60, 120, 126), repeat=2):
        tensors = [
            randn(5, 128, seed=k).float().clamp(-1, 1) * 2.0**p for k, p in enumerate(powers)
        ]
        (a, a_scale), (b, b_scale) = (quantized(t, dtype) for t in tensors)
        values = [
            q.double().numpy() * scale.item()
            for q, scale in ((a.float(), a_scale), (b.float(), b_scale))
        ]
        exact = values[0] @ values[1].T
        largest = np.abs(exact).max()
        if not 1e-30 < largest < torch.finfo(torch.float32).max:
            continue
        scales = (a_scale[None], b_scale[None]) if grouped else (a_scale, b_scale)
        weight, ends = (b, None) if offs is None else (b[None], torch.full_like(offs, 128))
        y = K.fp8_mm.twin(
            a, scales[0], weight, scales[1], "tensor", offs, None, dtype=torch.float32
        )
        dw = K.fp8_wgrad.twin(a, scales[0], b, scales[1], "tensor", ends, None, torch.float32)
        for got in (y, dw):
            error = np.abs(got.double().numpy() - exact).max()
            assert error <= 1e-5 * largest, (powers, error, largest)


@given(split=group_splits(), n=widths(), k=widths(), bias=st.booleans())
def test_the_registered_grouped_gemms_differentiate_as_their_twins(
    split: Split, n: int, k: int, bias: bool
) -> None:
    """In traced code, where the twin, which reads `offs`, cannot stand in for them."""
    x, w, dy = randn(split.rows, k), randn(len(split.counts), n, k, seed=1), randn(split.rows, n)
    given_: list[Tensor] = [x, w, *([randn(len(split.counts), n, seed=2)] if bias else [])]

    def mm(op: Any) -> Any:
        return lambda x, w, b=None: op(x, w, split.offs, None, b)

    for mine, theirs in zip(
        vjp(mm(K.grouped_mm.op), dy, *given_), vjp(mm(K.grouped_mm.twin), dy, *given_), strict=True
    ):
        torch.testing.assert_close(mine, theirs, rtol=1e-6, atol=1e-5)  # a bias' is float32
    d = torch.randn(len(split.counts), n, k, dtype=torch.float64)
    ops = (K.grouped_wgrad.op, K.grouped_wgrad.twin)
    mine, theirs = (vjp(lambda a, b, op=op: op(a, b, split.offs), d, dy, x) for op in ops)
    for a, b in zip(mine, theirs, strict=True):
        close(a, b)


def test_a_gathered_grouped_gemm_has_no_derivative_and_says_so() -> None:
    x, w = randn(4, 3).requires_grad_(), randn(2, 5, 3)
    offs, index = torch.tensor([2, 4], dtype=torch.int32), torch.tensor([0, 3, 1, 1])
    y = K.grouped_mm.op(x, w, offs, None, None, index)
    with pytest.raises(fo.FuseOpsError, match="with an index has no derivative"):
        y.sum().backward()
