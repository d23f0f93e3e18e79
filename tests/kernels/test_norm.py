"""RMSNorm kernels equal their twins, the twins equal torch, and dweight repeats bit for bit."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from laws import DTYPES, ROWS, SEEDS, WIDTHS, assert_matches, few, run, tensor

from fuseops.kernels import norm as k
from fuseops.kernels import tiles

pytestmark = pytest.mark.usefixtures("kernels")
VALUES = st.sampled_from(["normal", "tiny", "constant", "nonfinite"])


@st.composite
def cases(draw):
    rows, n, dtype, seed, strided = (
        draw(ROWS),
        draw(WIDTHS),
        draw(DTYPES),
        draw(SEEDS),
        draw(st.booleans()),
    )
    make = lambda i, values="normal": tensor((rows, n), dtype, values, seed + i, strided)  # noqa: E731
    weight = tensor((n,), dtype, "normal", seed + 9) if draw(st.booleans()) else None
    return make(0, draw(VALUES)), make(1), make(2), weight, draw(st.sampled_from([0.0, 1.0]))


@given(cases())
@few
def test_forward(case):
    x, residual, _, weight, offset = case
    assert_matches(k.rmsnorm_fwd, x, weight, 1e-6, offset)
    assert_matches(k.add_rmsnorm_fwd, x, residual, weight, 1e-6, offset)


@given(cases(), st.booleans(), st.booleans())
@few
def test_backward(case, with_dres, need_dw):
    x, dres, dy, weight, offset = case
    rstd = k.rmsnorm_fwd.twin(x, weight, 1e-3, offset)[1]
    args = (dy, x, weight, rstd, dres if with_dres else None, need_dw, offset)
    _, dw = assert_matches(k.rmsnorm_bwd, *args, sums=True)
    assert torch.equal(dw.view(torch.int32), run(k.rmsnorm_bwd, *args)[1].view(torch.int32))


def test_twins_are_torch():
    x, w, dy, dh = torch.randn(6, 40), torch.randn(40), torch.randn(6, 40), torch.randn(6, 40)
    r = torch.randn(6, 40)
    leaves = [t.double().requires_grad_() for t in (x, r, w)]
    h = leaves[0] + leaves[1]
    y = torch.nn.functional.rms_norm(h, (40,), leaves[2], 1e-5)
    dx, dr, dw = torch.autograd.grad([y, h], leaves, [dy.double(), dh.double()])
    got_y, got_h, rstd = k.add_rmsnorm_fwd.twin(x, r, w, 1e-5)
    got_dx, got_dw = k.rmsnorm_bwd.twin(dy, got_h, w, rstd, dh)
    for got, want in ((got_y, y), (got_dx, dx), (got_dx, dr), (got_dw, dw)):
        torch.testing.assert_close(got.double(), want.detach(), rtol=1e-4, atol=1e-5)


def test_wide_rows_run_the_twin():
    x = torch.randn(2, k.MAX_WIDTH + 1)
    assert torch.equal(
        k.rmsnorm_fwd.launcher(x, None, 1e-6)[0], k.rmsnorm_fwd.twin(x, None, 1e-6)[0]
    )


def test_three_axes():
    x, w = torch.randn(3, 5, 16), torch.randn(16)
    y, rstd = assert_matches(k.rmsnorm_fwd, x, w, 1e-6)
    assert y.shape == (3, 5, 16) and rstd.shape == (3, 5)


@pytest.mark.parametrize("with_weight", [True, False])
def test_a_norm_over_several_axes(with_weight):
    x, dy = torch.randn(4, 3, 5), torch.randn(4, 3, 5)
    weight = torch.randn(3, 5) if with_weight else None
    y, rstd = assert_matches(k.rmsnorm_fwd, x, weight, 1e-6, 0.0, 2)
    torch.testing.assert_close(y, torch.nn.functional.rms_norm(x, (3, 5), weight, 1e-6))
    _, dw = assert_matches(k.rmsnorm_bwd, dy, x, weight, rstd, sums=True)
    assert rstd.shape == (4,) and dw.shape == (3, 5)


HEADS = {
    "beside keys and values": lambda: torch.randn(2, 5, 9, 8)[:, :, 3:6],
    "transposed": lambda: torch.randn(1, 5, 3, 8).transpose(1, 2),
    "transposed in a batch": lambda: torch.randn(2, 5, 3, 8).transpose(1, 2),
    "columns apart": lambda: torch.randn(2, 5, 8, 3).transpose(2, 3),
}


@pytest.mark.parametrize("mean", [True, False])
@pytest.mark.parametrize("layout", HEADS)
def test_heads(layout, mean):
    x, dy = HEADS[layout](), HEADS[layout]()
    weight = torch.randn(x.shape[-1]) if mean else None
    flat, options = [t.contiguous() for t in (dy, x)], (1.0, 1, mean)
    y, rstd = run(k.rmsnorm_fwd, x, weight, 1e-3, *options)
    rest = weight, rstd, None, mean, 1.0, None, mean
    found = y, rstd, *run(k.rmsnorm_bwd, dy, x, *rest)
    wanted = *k.rmsnorm_fwd.twin(flat[1], weight, 1e-3, *options), *k.rmsnorm_bwd.twin(*flat, *rest)
    for got, want in zip(found, wanted, strict=True):
        assert got.is_contiguous()
        torch.testing.assert_close(got, want)


def test_heads_beside_others_are_not_copied():
    q = torch.randn(2, 5, 9, 8)[:, :, 3:6]
    assert tiles.as_heads(q).data_ptr() == q.data_ptr()
    assert tiles.as_heads(q).shape == (10, 3, 8)
    assert tiles.as_heads(torch.randn(1, 5, 3, 8).transpose(1, 2)).stride() == (8, 24, 1)
