"""Permutation kernels equal their twins, the twins equal autograd; padding and lost copies count
for nothing.
"""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from laws import DTYPES, SEEDS, WIDTHS, assert_matches, few, run, tensor

from fuseops import kernels as K
from fuseops.errors import FuseOpsError
from fuseops.kernels import permute as k

pytestmark = pytest.mark.usefixtures("kernels")
TOKENS = st.sampled_from([0, 1, 2, 7, 33, 65])
TOP_K = st.sampled_from([1, 2, 3, 8, 17, 70])


def routed(tokens, top_k, seed, lost=False, experts=5, padding=0):
    """(offs, index, pos, probs, rows) of random choices; some of them lost, some rows padding."""
    g = torch.Generator().manual_seed(seed)
    chosen = torch.randint(-1 if lost else 0, experts, (tokens, top_k), generator=g)
    weights = torch.rand(tokens, top_k, generator=g)
    offs, index, pos, probs = K.route.twin(chosen, experts, weights)
    nowhere = torch.where(torch.arange(pos.numel()).view(pos.shape) % 2 == 0, -1, pos.numel() - 1)
    pos = torch.where(pos < 0, nowhere, pos).to(torch.int32)  # a negative or a padding row
    beyond = torch.full((padding,), float("nan"))
    index = torch.cat([index, torch.full((padding,), -(2**40))])
    index[int(offs[-1]) :] = -(2**40)  # never read
    return offs, index, pos, torch.cat([probs, beyond]), tokens * top_k + padding


@st.composite
def cases(draw):
    tokens, top_k, seed = draw(TOKENS), draw(TOP_K), draw(SEEDS)
    maps = routed(tokens, top_k, seed, draw(st.booleans()), padding=seed % 4)
    make = lambda rows, i: tensor((rows, n), dtype, "normal", seed + i, strided)  # noqa: E731
    n, dtype, strided = draw(WIDTHS), draw(DTYPES), draw(st.booleans())
    x, y = make(tokens, 0), make(maps[-1], 1)
    y[int(maps[0][-1]) :] = float("nan")
    return x, y, *maps


@given(cases())
@few
def test_scatter_and_gather(case):
    x, _, offs, index, pos, _, rows = case
    y = assert_matches(k.scatter_rows, x, pos, offs, rows, exact=True)
    assert torch.equal(y, assert_matches(k.gather_rows, x, index, offs))
    assert torch.equal(y, run(k.scatter_rows, x, pos.long(), offs, rows))


@given(cases(), st.booleans())
@few
def test_combine(case, scaled):
    _, y, offs, _, pos, probs, _ = case
    assert_matches(k.combine_fwd, y, pos, offs, probs if scaled else None, sums=True)


def test_rows_wider_than_a_tile():
    offs, index, pos, probs, rows = routed(5, 3, 0, lost=True, padding=2)
    x, y = torch.randn(5, 2500), torch.randn(rows, 2500)
    assert_matches(k.scatter_rows, x, pos, offs, rows)
    assert_matches(k.gather_rows, x, index, offs)
    assert_matches(k.combine_fwd, y, pos, offs, probs, sums=True)


@pytest.mark.parametrize("lost", [False, True])
def test_twins_are_autograd(lost):
    offs, _, pos, probs, rows = routed(9, 3, 4, lost)
    x, dy = torch.randn(rows, 8), torch.randn(9, 8)
    leaves = [t.double().requires_grad_() for t in (x, probs)]
    y = k.combine_fwd.twin(leaves[0], pos, offs, leaves[1])
    kept = ((pos >= 0) & (pos < offs[-1])).double()[:, :, None]
    plain = (leaves[0] * leaves[1][:, None])[pos.clamp(min=0).long()] * kept
    torch.testing.assert_close(y.float(), plain.sum(1).float(), rtol=1e-5, atol=1e-5)
    plain = leaves[0][pos.clamp(min=0).long()] * kept
    (dx,) = torch.autograd.grad(plain.sum(1), leaves[:1], dy.double())
    assert torch.equal(k.scatter_rows.twin(dy, pos, offs, rows).double(), dx)
    tokens = torch.randn(9, 8, dtype=torch.float64, requires_grad=True)
    scattered = k.scatter_rows.twin(tokens, pos, offs, rows)
    (dtokens,) = torch.autograd.grad(scattered, tokens, x.double())
    torch.testing.assert_close(
        k.combine_fwd.twin(x, pos, offs).double(), dtokens, rtol=1e-5, atol=1e-5
    )


def test_one_number_a_copy():
    """probs travel as rows of one column."""
    offs, _, pos, probs, rows = routed(40, 2, 1, lost=True)
    weights = torch.rand(40, 2)
    flat = pos.view(-1, 1)
    moved = run(k.scatter_rows, weights.view(-1, 1), flat, offs, rows)
    kept = ((flat >= 0) & (flat < offs[-1]))[:, 0]
    assert torch.equal(moved[flat[kept, 0].long(), 0], weights.view(-1)[kept])
    back = run(k.values_of_copies, moved[:, 0], pos, offs)
    assert torch.equal(back.view(-1), torch.where(kept, weights.view(-1), 0.0))
    assert torch.equal(back, k.values_of_copies.twin(moved[:, 0], pos, offs))
    assert probs.shape == (rows,)


def test_errors_name_what_was_given():
    offs, _, pos, _, _ = routed(4, 2, 0)
    x = torch.ones(5, 3)
    with pytest.raises(FuseOpsError, match=r"pos is \(4, 2\), expected \(5, K\)"):
        k.scatter_rows.launcher(x, pos, offs, 8)
    with pytest.raises(FuseOpsError, match=r"probs is \(4,\), expected \(5,\)"):
        k.combine_fwd.launcher(x, pos, offs, torch.ones(4))
    with pytest.raises(FuseOpsError, match=r"values is \(5, 3\), expected \(R,\)"):
        k.values_of_copies.launcher(x, pos, offs)
    with pytest.raises(FuseOpsError, match=r"probs is torch.float16, expected torch.float32"):
        k.combine_fwd.launcher(x, pos, offs, torch.ones(5).half())
