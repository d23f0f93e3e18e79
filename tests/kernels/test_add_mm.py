"""add_mm equals its twin, for any sizes and strides."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from laws import DTYPES, ROWS, SEEDS, WIDTHS, assert_matches, few, tensor

from fuseops import kernels as K

pytestmark = pytest.mark.usefixtures("kernels")


@given(
    ROWS,
    WIDTHS,
    st.sampled_from([1, 8, 17, 130, 300, 513]),
    DTYPES,
    SEEDS,
    st.booleans(),
    st.booleans(),
)
@few
def test_add_mm(m, n, inner, dtype, seed, half, strided):
    add = tensor((m, n), dtype, "normal", seed, strided)
    x = tensor((m, inner), dtype if half else torch.float32, "normal", seed + 1, strided)
    weight = tensor((inner, n), dtype, "normal", seed + 2, strided)
    assert_matches(K.add_mm, add, x, weight, sums=True)
