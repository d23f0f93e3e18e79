"""Rotary positions: kernel equals twin over any layout, the twin is complex multiplication, back is the inverse."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from laws import DEVICE, DTYPES, SEEDS, assert_matches, few, tensor

from fuseops.kernels import rope as k_op

pytestmark = pytest.mark.usefixtures("kernels")


@given(
    st.sampled_from([(0, 2, 8), (5, 3, 7), (2, 9, 2, 16), (3, 1, 5, 6)]),
    DTYPES, SEEDS, st.booleans(), st.booleans(), st.booleans(), st.booleans(), st.booleans(),
)  # fmt: skip
@few
def test_kernel_is_the_twin(shape, dtype, seed, interleaved, inverse, transposed, batched, partly):
    x = tensor(shape, dtype, "normal", seed)
    if transposed:  # heads before tokens in memory
        x = x.transpose(-3, -2).contiguous().transpose(-3, -2)
    pairs = max(shape[-1] // (4 if partly else 2), 1)
    angles = tensor(
        (*shape[:-2], pairs) if batched else (shape[-3], pairs), torch.float32, "normal", seed
    )
    assert_matches(k_op.apply_rope, x, angles.cos(), angles.sin(), interleaved, inverse)


@given(
    st.sampled_from([((0, 2, 8), 2), ((5, 3, 7), 1), ((2, 9, 2, 16), 5), ((3, 4, 6), 2)]),
    DTYPES, SEEDS, st.booleans(), st.booleans(), st.booleans(),
)  # fmt: skip
@few
def test_a_pair_in_one_launch_is_two_calls(
    shape_and_heads, dtype, seed, interleaved, inverse, flat
):
    """Queries and keys of other numbers of heads, in other layouts."""
    shape, heads = shape_and_heads
    q = tensor(shape, dtype, "normal", seed)
    k = tensor((*shape[:-3], heads, shape[-3], shape[-1]), dtype, "normal", seed + 1)
    k = k.transpose(-3, -2)
    angles = tensor(
        (shape[-3], shape[-1] // 2) if flat else (*shape[:-2], shape[-1] // 2),
        torch.float32, "normal", seed,
    )  # fmt: skip
    tables, how = (angles.cos(), angles.sin()), (interleaved, inverse)
    assert_matches(k_op.apply_rope_pair, q, k, *tables, *how)
    q, k, *tables = (t.to(DEVICE) for t in (q, k, *tables))
    found = k_op.apply_rope_pair.launcher(q, k, *tables, *how)
    for y, x in zip(found, (q, k), strict=True):
        assert torch.equal(y, k_op.apply_rope.launcher(x, *tables, *how))


def test_a_pair_of_other_widths_is_refused():
    q, k, angles = torch.randn(5, 3, 8), torch.randn(5, 2, 6), torch.rand(5, 3)
    with pytest.raises(k_op.FuseOpsError, match="differ in heads at most"):
        k_op.apply_rope_pair.launcher(q, k, angles, angles, False)


@pytest.mark.parametrize("interleaved", [False, True])
def test_the_twin_is_a_complex_product(interleaved):
    x, angles = torch.randn(5, 3, 10, dtype=torch.float64), torch.randn(5, 4, dtype=torch.float64)
    cos, sin = angles.cos(), angles.sin()
    a, b = (x[..., :8:2], x[..., 1:8:2]) if interleaved else (x[..., :4], x[..., 4:8])
    turned = torch.complex(a, b) * torch.polar(torch.ones_like(angles), angles)[:, None]
    y = k_op.apply_rope.twin(x, cos, sin, interleaved)
    got = (y[..., :8:2], y[..., 1:8:2]) if interleaved else (y[..., :4], y[..., 4:8])
    torch.testing.assert_close(torch.complex(*got), turned)
    torch.testing.assert_close(k_op.apply_rope.twin(y, cos, sin, interleaved, True), x)


def test_wrong_angles_are_refused():
    x = torch.randn(5, 3, 8)
    for cos, sin in ((torch.rand(4, 4), torch.rand(4, 4)), (torch.rand(5, 5), torch.rand(5, 5))):
        with pytest.raises(k_op.FuseOpsError, match=r"P <= 4"):
            k_op.apply_rope.launcher(x, cos, sin, False)
