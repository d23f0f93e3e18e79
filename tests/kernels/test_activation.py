"""Activation kernels equal their twins, and the twins equal torch."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from laws import DEVICE, DTYPES, ROWS, SEEDS, VALUES, WIDTHS, assert_matches, few, run, tensor
from plain_acts import TORCH, UPS

from fuseops import kernels as K
from fuseops.errors import FuseOpsError
from fuseops.kernels import activation as k
from fuseops.kernels.activation import GATES, split_gate

pytestmark = pytest.mark.usefixtures("kernels")


@st.composite
def cases(draw):
    kind, rows, n, dtype = draw(st.sampled_from(k.KINDS)), draw(ROWS), draw(WIDTHS), draw(DTYPES)
    values, seed, strided = draw(VALUES), draw(SEEDS), draw(st.booleans())
    gated = kind in GATES
    interleave = (
        draw(st.sampled_from([g for g in (0, 1, 4, 10) if not g or n % g == 0])) if gated else 0
    )
    x = tensor((rows, n * (1 + gated)), dtype, values, seed, strided)
    dy = tensor((rows, n), dtype, "normal", seed + 1, strided)
    probs = tensor((rows,), torch.float32, "normal", seed + 2).abs()
    return x, dy, probs, kind, interleave


@given(cases())
@few
def test_forward(case):
    x, _, probs, kind, interleave = case
    assert_matches(k.act_fwd, x, kind, interleave)
    assert_matches(k.scaled_act_fwd, x, probs, kind, interleave)


@given(cases())
@few
def test_backward(case):
    x, dy, _, kind, interleave = case
    assert_matches(k.act_bwd, dy, x, kind, interleave)
    assert_matches(k.act_bwd_bias, dy, x, kind, interleave, sums=True)


@given(cases(), st.booleans(), st.booleans())
@few
def test_scaled_backward(case, need_dprobs, need_y):
    x, dy, probs, kind, interleave = case
    for by in (probs, None):
        assert_matches(
            k.scaled_act_bwd, dy, x, by, kind, need_dprobs, need_y, interleave, sums=True
        )
    assert_matches(k.act_dprobs, dy, x, kind, interleave, sums=True)


@given(cases(), st.booleans(), st.booleans())
@few
def test_scaled_backward_over_x_gives_the_same_bits(case, need_dprobs, need_y):
    x, dy, probs, kind, interleave = case
    x, dy, probs = (t.contiguous().to(DEVICE) for t in (x, dy, probs))
    options = kind, need_dprobs, need_y, interleave
    want = k.scaled_act_bwd.launcher(dy, x, probs, *options)
    got = x.clone()
    for one, other in zip(
        (got, *k.scaled_act_bwd_into.launcher(got, dy, probs, *options)), want, strict=True
    ):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


@given(cases(), st.booleans())
@few
def test_no_probabilities_are_ones(case, need_dprobs):
    x, dy, probs, kind, interleave = case
    options = kind, need_dprobs, True, interleave
    for one, other in zip(
        k.scaled_act_bwd.launcher(dy.to(DEVICE), x.to(DEVICE), None, *options),
        k.scaled_act_bwd.launcher(
            dy.to(DEVICE), x.to(DEVICE), torch.ones_like(probs, device=DEVICE), *options
        ),
        strict=True,
    ):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)


def test_what_is_written_over_is_contiguous():
    x, dy = torch.randn(6, 40).to(DEVICE)[:, :32], torch.randn(6, 16).to(DEVICE)
    with pytest.raises(FuseOpsError, match=r"x has strides .* expected contiguous"):
        k.scaled_act_bwd_into.launcher(x, dy, x[:, 0], "swiglu")


@pytest.mark.parametrize("kind", k.KINDS)
@pytest.mark.parametrize("interleave", [0, 2])
def test_twin_is_torch(kind, interleave):
    """Value and derivative of every kind against torch's own in float64."""
    gated = kind in GATES
    if interleave and not gated:
        return
    x = (torch.randn(5, 24, dtype=torch.float64) * 5).float().double().requires_grad_()
    if gated:
        gate, u = split_gate(x, interleave)
        y = TORCH[GATES[kind]](gate) * UPS.get(kind, lambda u: u)(u)
    else:
        y = TORCH[kind](x)
    dy = torch.randn(y.shape, dtype=torch.float64)
    (dx,) = torch.autograd.grad(y, x, dy)
    got = (
        K.act_fwd.twin(x.detach().float(), kind, interleave),
        K.act_bwd.twin(dy, x.detach().float(), kind, interleave),
    )
    torch.testing.assert_close(got[0].double(), y.detach(), rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(got[1].double(), dx, rtol=1e-4, atol=1e-4)


FORMULAS = {kind: (TORCH[GATES.get(kind, kind)], UPS.get(kind, lambda u: u)) for kind in k.KINDS}
NO_LIMIT = ("clamped_swiglu", 0, 1.702, math.inf)


@pytest.mark.parametrize("form", [*zip(k.KINDS), NO_LIMIT], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_no_finite_input_is_too_large_for_a_value_or_a_slope(form, dtype):
    """At every power of two of the dtype, both signs, they are as in a wider one, where nothing overflows."""
    f, linear = (TORCH["qgelu"], lambda u: u + 1) if form == NO_LIMIT else FORMULAS[form[0]]
    limits = torch.finfo(dtype)
    powers = torch.arange(math.log2(limits.tiny), math.log2(limits.max), dtype=torch.float64)
    x = torch.cat([powers.exp2(), powers.new_tensor([0.0, limits.max])]).to(dtype)
    x = torch.cat([x, -x])[:, None]
    dy = torch.ones_like(x)
    x = torch.cat([x, dy], -1) if form[0] in GATES else x
    wider = x.double().requires_grad_()
    y = f(wider[:, :1]) * (linear(wider[:, 1:]) if form[0] in GATES else 1)
    (dx,) = torch.autograd.grad(y.sum(), wider)
    got = [(y, K.act_fwd.twin(x, *form)), (dx, K.act_bwd.twin(dy, x, *form))]
    if dtype != torch.float64:  # which has no wider one
        got += [(y, run(k.act_fwd, x, *form)), (dx, run(k.act_bwd, dy, x, *form))]
        for theirs, mine in got:
            torch.testing.assert_close(mine, theirs.detach().to(dtype), rtol=1e-2, atol=1e-5)
    assert not any(mine.isnan().any() for _, mine in got)


@pytest.mark.parametrize(
    "args,message",
    [
        (("swigloo",), "unknown activation"),
        (("swiglu",), "expected a multiple of 2"),
        (("gelu", 2), "has no gate"),
    ],
)
def test_errors_name_the_cause(args, message):
    with pytest.raises(k.tiles.FuseOpsError, match=message):
        k.act_fwd.launcher(torch.zeros(2, 5), *args)
