"""Bias kernels equal their twins; grouped sums repeat bit for bit and ignore padding."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from laws import DTYPES, ROWS, SEEDS, WIDTHS, assert_matches, few, run, splits, tensor

from fuseops.kernels import bias as k

pytestmark = pytest.mark.usefixtures("kernels")


@given(ROWS, WIDTHS, DTYPES, SEEDS, st.booleans())
@few
def test_bias(rows, n, dtype, seed, strided):
    x, bias = (
        tensor((rows, n), dtype, "normal", seed, strided),
        tensor((n,), dtype, "normal", seed + 1),
    )
    assert_matches(k.bias_fwd, x, bias)
    assert_matches(k.bias_bwd, x, sums=True)


@given(
    ROWS,
    WIDTHS,
    DTYPES,
    SEEDS,
    st.sampled_from([1, 2, 5]),
    st.booleans(),
    st.booleans(),
    st.booleans(),
)
@few
def test_grouped_bias(rows, n, dtype, seed, groups, scaled, with_bias, strided):
    padding = min(rows, seed % 5)
    x, bias = (
        tensor((rows, n), dtype, "normal", seed, strided),
        tensor((groups, n), dtype, "normal", seed + 1),
    )
    offs = splits(rows, groups, seed, padding)
    probs = tensor((rows,), torch.float32, "normal", seed + 2) if scaled else None
    x[rows - padding :] = float("nan")
    assert_matches(k.grouped_bias_fwd, x, bias, offs, probs)
    assert_matches(k.grouped_bias_bwd, x, offs, probs, bias if with_bias else None, sums=True)
    again = [run(k.grouped_bias_bwd, x, offs, probs, bias) for _ in range(2)]
    assert all(map(torch.equal, *again))


ENDS = st.integers(0, 270) | st.sampled_from([127, 128, 129, 256])  # where a chunk of rows ends too


@given(st.lists(ENDS, min_size=1, max_size=9), st.sampled_from([3, 64, 130]), st.booleans(), SEEDS)
@few
def test_groups_end_anywhere(ends, n, with_bias, seed):
    """Empty groups in a row, many in one block of rows, one over all chunks, nothing but padding."""
    dy, bias = (
        tensor((270, n), torch.bfloat16, "normal", seed),
        tensor((len(ends), n), torch.bfloat16, "normal", seed + 1),
    )
    offs = torch.tensor(sorted(ends), dtype=torch.int32)
    dy[max(ends) :] = float("nan")
    probs = tensor((270,), torch.float32, "normal", seed + 2)
    assert_matches(k.grouped_bias_bwd, dy, offs, probs, bias if with_bias else None, sums=True)


@given(st.lists(ENDS, min_size=2, max_size=9), st.sampled_from([3, 64, 130]), SEEDS)
@few
def test_groups_keep_to_themselves(ends, n, seed):
    """NaN in dy, probs and bias of one group changes no other group and no dprobs of another's rows."""
    dy = tensor((270, n), torch.bfloat16, "normal", seed)
    bias = tensor((len(ends), n), torch.bfloat16, "normal", seed + 1)
    probs = tensor((270,), torch.float32, "normal", seed + 2)
    offs = torch.tensor(sorted(ends), dtype=torch.int32)
    clean = run(k.grouped_bias_bwd, dy, offs, probs, bias)
    group = seed % len(ends)
    rows = slice(offs[group - 1].item() if group else 0, offs[group].item())
    for x, of_group in (dy, rows), (probs, rows), (bias, group):
        x[of_group] = float("nan")
    for got, want, of_group in zip(
        run(k.grouped_bias_bwd, dy, offs, probs, bias), clean, (group, rows), strict=True
    ):
        got[of_group] = want[of_group] = 0.0
        assert torch.equal(got, want)


@given(
    st.sampled_from([3, 64, 700]), WIDTHS, st.sampled_from([torch.bfloat16, torch.float16]), SEEDS
)
@few
def test_a_gradient_in_the_dtype_of_its_owner_is_the_sum_rounded_once(rows, n, dtype, seed):
    dy = tensor((rows, n), dtype, "normal", seed)
    found = run(k.bias_bwd, dy, dtype)
    assert found.dtype is dtype and torch.equal(found, run(k.bias_bwd, dy).to(dtype))
