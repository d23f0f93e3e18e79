"""LayerNorm kernels equal their twins, the twins equal torch, and sums repeat bit for bit."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from laws import DTYPES, ROWS, SEEDS, WIDTHS, assert_matches, few, run, tensor

from fuseops.kernels import norm as k

pytestmark = pytest.mark.usefixtures("kernels")
VALUES = st.sampled_from(["normal", "tiny", "constant", "nonfinite"])
EPS = 1e-3


@st.composite
def cases(draw):
    rows, n, dtype, seed = draw(ROWS), draw(WIDTHS), draw(DTYPES), draw(SEEDS)
    strided, values = draw(st.booleans()), draw(VALUES)
    x = tensor((rows, n), dtype, values, seed, strided)
    dy = tensor((rows, n), dtype, "normal", seed + 1, strided)
    weight = tensor((n,), dtype, "normal", seed + 2) if draw(st.booleans()) else None
    bias = tensor((n,), dtype, "normal", seed + 3) if draw(st.booleans()) else None
    return x, dy, weight, bias, draw(st.sampled_from([0.0, 1.0]))


@given(cases())
@few
def test_forward(case):
    x, _, weight, bias, offset = case
    assert_matches(k.layernorm_fwd, x, weight, bias, EPS, offset, sums=True)


@given(cases())
@few
def test_forward_behind_a_residual(case):
    x, residual, weight, bias, offset = case
    assert_matches(k.add_layernorm_fwd, x, residual, weight, bias, EPS, offset, sums=True)


@given(cases(), st.booleans(), st.booleans(), st.booleans())
@few
def test_backward(case, residual, need_dw, need_db):
    x, dy, weight, _, offset = case
    _, mean, rstd = k.layernorm_fwd.twin(x, weight, None, EPS, offset)
    args = (dy, x, weight, mean, rstd, dy if residual else None, need_dw, need_db, offset)
    _, *sums = assert_matches(k.layernorm_bwd, *args, sums=True)
    for first, again in zip(sums, run(k.layernorm_bwd, *args)[1:], strict=True):
        assert torch.equal(first.view(torch.int32), again.view(torch.int32))


@pytest.mark.parametrize("shape", [(40,), (5, 8)])
def test_twins_are_torch(shape):
    make = lambda *size: torch.randn(*size, dtype=torch.float64, requires_grad=True)  # noqa: E731
    x, w, b, dy = make(6, *shape), make(*shape), make(*shape), torch.randn(6, *shape).double()
    y = torch.nn.functional.layer_norm(x, shape, w, b, 1e-5)
    wanted = [y, *torch.autograd.grad(y, [x, w, b], dy)]
    args = [t.detach() for t in (x, w, b)]
    y, mean, rstd = k.layernorm_fwd.twin(*args, 1e-5, 0.0, len(shape))
    got = [y, *k.layernorm_bwd.twin(dy, *args[:2], mean, rstd)]
    for mine, theirs in zip(got, wanted, strict=True):
        torch.testing.assert_close(mine, theirs.detach())


def test_a_large_mean_does_not_cancel_the_variance():
    """E[x^2] - E[x]^2 in float32 would be 0 or worse here."""
    x = 1e4 + torch.randn(4, 256)
    y = run(k.layernorm_fwd, x, None, None, 1e-5)[0]
    torch.testing.assert_close(
        y.double(), torch.nn.functional.layer_norm(x.double(), (256,)), atol=2e-3, rtol=0
    )


def test_wide_rows_run_the_twin():
    x = torch.randn(2, k.MAX_WIDTH + 1)
    args = x, None, None, 1e-6
    assert torch.equal(k.layernorm_fwd.launcher(*args)[0], k.layernorm_fwd.twin(*args)[0])


def test_rows_too_wide_for_both_sums():
    x, dy = torch.randn(3, k.BOTH_SUMS + 5), torch.randn(3, k.BOTH_SUMS + 5)
    _, mean, rstd = k.layernorm_fwd.twin(x, None, None, EPS)
    assert_matches(k.layernorm_bwd, dy, x, x[0], mean, rstd, sums=True)


@pytest.mark.parametrize("dims", [1, 2])
def test_heads_beside_others(dims):
    """Rows with two strides, and norms over several axes, as of queries in one tensor with keys and values."""
    both, dy = torch.randn(5, 9, 4, 8), torch.randn(5, 9, 4, 8)[:, 3:6]
    x, w = both[:, :3], torch.randn(*both.shape[-dims:])
    _, mean, rstd = assert_matches(k.layernorm_fwd, x, w, w, EPS, 0.0, dims)
    assert_matches(k.layernorm_bwd, dy, x, w, mean, rstd, sums=True)
