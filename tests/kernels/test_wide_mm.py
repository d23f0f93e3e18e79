"""The product of halves is the product of the same numbers in float32, unrounded."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from laws import SEEDS, few, tensor

from fuseops import kernels as K

pytestmark = pytest.mark.usefixtures("kernels")
SIZES = st.sampled_from([0, 1, 7, 65])
DTYPE = st.sampled_from([torch.bfloat16, torch.float16, torch.float32, torch.float64])


@given(SIZES, SIZES, SIZES, DTYPE, DTYPE, SEEDS)
@few
def test_nothing_is_rounded_to_a_half(tokens, experts, dim, one, other, seed):
    x, weight = (
        tensor((tokens, dim), one, "normal", seed),
        tensor((experts, dim), other, "normal", seed + 1),
    )
    y = K.wide_mm(x, weight)
    wide = torch.promote_types(torch.promote_types(one, other), torch.float32)
    assert y.dtype is wide and y.shape == (tokens, experts)
    exact = x.double() @ weight.double().t()
    size = x.double().abs() @ weight.double().abs().t()
    assert ((y.double() - exact).abs() <= dim * torch.finfo(wide).eps * size).all()
