"""The router picks what a stable sort picks, its weights equal the twin's, its gradient equals
autograd's.
"""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from laws import DTYPES, SEEDS, assert_matches, few, reference, run, tensor

from fuseops.errors import FuseOpsError
from fuseops.kernels import router as k
from fuseops.kernels import router_losses as losses_k
from fuseops.kernels.configs import forced
from fuseops.kernels.routing import expert_counts

pytestmark = [
    pytest.mark.usefixtures("kernels"),
    # numpy, inside the interpreter, where every logit of a token is NaN
    pytest.mark.filterwarnings("ignore:All-NaN slice encountered:RuntimeWarning"),
]
TOKENS = st.sampled_from([0, 1, 7, 65])
SIZES = st.sampled_from([(1, 1), (3, 2), (8, 2), (40, 8), (64, 5), (130, 3), (512, 10), (70, 20)])
SCORE = st.sampled_from(k.SCORES)


def logits_of(tokens, experts, dtype, seed, values, strided):
    """``ties``: few distinct values, zeros of both signs and masked experts among them; ``close``:
    all differ, by the last bits of float32.
    """
    if values == "close":
        bits = torch.ones(tokens, experts, dtype=torch.int32).cumsum(1)
        return (1 + bits[:, torch.randperm(experts)] * 2**-23).to(dtype)
    if values != "ties":
        return tensor((tokens, experts), dtype, values, seed, strided)
    g = torch.Generator().manual_seed(seed)
    levels = torch.tensor([0.0, -0.0, 1.0, -1.0, -float("inf")])
    return levels[torch.randint(0, 5, (tokens, experts), generator=g)].to(dtype)


@given(
    TOKENS,
    SIZES,
    DTYPES,
    SEEDS,
    st.sampled_from(["normal", "large", "ties", "close", "nonfinite"]),
    SCORE,
    st.booleans(),
    st.booleans(),
)
@few
def test_forward(tokens, sizes, dtype, seed, values, score, normalize, strided):
    experts, top_k = sizes
    x = logits_of(tokens, experts, dtype, seed, values, strided)
    _, chosen, picked = assert_matches(k.router_fwd, x, top_k, score, normalize, 2.5)
    assert torch.equal(picked, x.float().gather(1, chosen.long())) or not x.isfinite().all()
    assert chosen.sort(-1).values.diff().gt(0).all()  # no expert twice


@given(
    st.sampled_from([(4, 3), (64, 4), (128, 8), (512, 10)]),
    SEEDS,
    st.sampled_from([0.0, 0.5, 1.0, 4.0]),
)
@few
def test_both_ways_choose_the_same(sizes, seed, apart):
    """The network, and K times the maximum, where all logits, some or few differ in their last bits
    alone: the network settles two of them by what they are, and knows that of more it may be wrong.
    """
    experts, top_k = sizes
    g = torch.Generator().manual_seed(seed)
    values = max(int(experts * apart), 1)
    same = torch.randint(0, values, (5, experts), generator=g)  # a row more than a tile
    x = torch.randn(5, values, generator=g).gather(1, same)
    x = x * (1 + torch.randint(0, 9, x.shape, generator=g) * 2**-23)
    with forced(k.FWD, {"BLOCK_R": 4, "BLOCK_P": 0, "num_warps": 4}):
        slow = run(k.router_fwd, x, top_k, "softmax", True)
    fast = run(k.router_fwd, x, top_k, "softmax", True)
    assert all(map(torch.equal, fast[1:], slow[1:]))
    torch.testing.assert_close(fast[0], slow[0])  # tiles of another form sum in another order
    assert torch.equal(slow[1], k.router_fwd.twin(x, top_k)[1])


@given(TOKENS, SIZES, SEEDS, SCORE, st.booleans())
@few
def test_bias_corrects_the_choice_alone(tokens, sizes, seed, score, normalize):
    """Two keys may differ by less than a rounding of the scores: keys are compared, not experts."""
    experts, top_k = sizes
    x = tensor((tokens, experts), torch.float32, "normal", seed)
    bias = tensor((experts,), torch.float32, "normal", seed + 1)
    args = x, top_k, score, normalize, 1.5, bias
    weights, chosen, _ = run(k.router_fwd, *args)
    _, wanted, _ = reference(k.router_fwd, *args)
    want_scores = x.double().softmax(1) if score == "softmax" else x.double().sigmoid()
    keys = want_scores + bias
    torch.testing.assert_close(
        keys.gather(1, chosen.long()), keys.gather(1, wanted.long()), rtol=1e-5, atol=1e-5
    )
    taken = want_scores.gather(1, chosen.long())
    taken = taken / taken.sum(1, keepdim=True) if normalize else taken
    torch.testing.assert_close(weights.double(), 1.5 * taken, rtol=1e-5, atol=1e-7)


@given(
    TOKENS,
    st.sampled_from([(8, 4, 2, 2), (12, 4, 1, 3), (40, 8, 3, 8), (6, 6, 2, 2), (48, 3, 2, 9)]),
    SEEDS,
    SCORE,
)
@few
def test_groups_limit_the_choice(tokens, sizes, seed, score):
    """Against a loop over tokens; two sums may differ by a rounding: what is chosen is worth as much."""
    experts, groups, top_groups, top_k = sizes
    x = tensor((tokens, experts), torch.float32, "normal", seed)
    bias = tensor((experts,), torch.float32, "normal", seed + 1) if seed % 2 else None
    _, chosen, _ = run(k.router_fwd, x, top_k, score, True, 1.0, bias, groups, top_groups)
    keys = x.double().softmax(1) if score == "softmax" else x.double().sigmoid()
    keys = keys if bias is None else keys + bias
    for key, mine in zip(keys.unflatten(1, (groups, -1)), chosen.long(), strict=True):
        worth = key.sort(1, descending=True).values[:, :2].sum(1)
        best = worth.sort(descending=True, stable=True).indices[:top_groups]
        inside = torch.full_like(key, -float("inf")).index_copy(0, best, key[best]).flatten()
        wanted = inside.sort(descending=True).values[:top_k]
        torch.testing.assert_close(inside[mine], wanted, rtol=1e-5, atol=1e-6)


@given(TOKENS, SIZES, DTYPES, SEEDS, SCORE, st.booleans(), st.booleans(), st.booleans())
@few
def test_backward(tokens, sizes, dtype, seed, score, normalize, alone, strided):
    """alone: from the logits of the chosen, which have the gradient of all logits where they suffice."""
    experts, top_k = sizes
    normalize = normalize or (alone and score == "softmax")
    x = tensor((tokens, experts), dtype, "normal", seed, strided)
    chosen, picked = k.router_fwd.twin(x, top_k, score)[1:]
    dw = tensor((tokens, top_k), torch.float32, "normal", seed + 1)
    args = dw, picked if alone else x, chosen, score, normalize, 2.5, experts if alone else 0, dtype
    got = assert_matches(k.router_bwd, *args, sums=True)
    assert torch.equal(got, run(k.router_bwd, *args))
    if alone:
        want = k.router_bwd.twin(dw, x.float(), chosen, score, normalize, 2.5)
        torch.testing.assert_close(got.float(), want, rtol=2**-7, atol=1e-4)


@pytest.mark.parametrize("normalize", [False, True])
@pytest.mark.parametrize("score", k.SCORES)
def test_twins_are_autograd(score, normalize):
    x = torch.randn(9, 12, dtype=torch.float64, requires_grad=True)
    dw = torch.randn(9, 3)
    scores = torch.softmax(x, -1) if score == "softmax" else torch.sigmoid(x)
    top = scores.topk(3)
    weights = top.values / top.values.sum(-1, keepdim=True) if normalize else top.values
    (want,) = torch.autograd.grad(2.5 * weights, x, dw.double())
    logits = x.detach().float()
    got, experts, _ = k.router_fwd.twin(logits, 3, score, normalize, 2.5)
    assert torch.equal(experts.long(), top.indices)
    torch.testing.assert_close(got.double(), 2.5 * weights.detach(), rtol=1e-5, atol=1e-6)
    got = k.router_bwd.twin(dw, logits, experts, score, normalize, 2.5)
    torch.testing.assert_close(got.double(), want, rtol=1e-4, atol=1e-6)


LOSSES = st.sampled_from([(0.5, 0.25), (0.5, 0.0), (None, 0.25)])


@given(TOKENS, SIZES, SEEDS, SCORE, LOSSES, st.booleans())
@few
def test_losses(tokens, sizes, seed, score, losses, strided):
    (experts, top_k), (balance, z) = sizes, losses
    x = tensor((tokens, experts), torch.float32, "normal", seed, strided)
    chosen = k.router_fwd.twin(x, top_k, score)[1]
    counts = None if balance is None else expert_counts.twin(chosen, experts)
    args = counts, top_k, score, balance or 0.0, z
    loss = assert_matches(losses_k.router_loss, x, *args, sums=True)
    assert torch.equal(loss, run(losses_k.router_loss, x, *args))
    d = tensor((tokens, experts), torch.float32, "normal", seed + 1)
    dloss = torch.tensor(-1.5)
    assert_matches(losses_k.router_loss_bwd, d, x, counts, dloss, *args[1:], sums=True)


@pytest.mark.parametrize("balanced", [False, True])
@pytest.mark.parametrize("score", k.SCORES)
def test_the_twin_of_the_losses_gradient_is_autograd(score, balanced):
    x = torch.randn(9, 12, dtype=torch.float64, requires_grad=True)
    counts = torch.randint(0, 9, (12,), dtype=torch.int32) if balanced else None
    args = 3, score, 0.5 * balanced, 0.25
    loss = losses_k.router_loss.twin(x, counts, *args)
    (want,) = torch.autograd.grad(2 * loss, x)
    d, dloss = torch.randn(9, 12, dtype=torch.float64), torch.tensor(2.0, dtype=torch.float64)
    got = losses_k.router_loss_bwd.twin(d, x.detach(), counts, dloss, *args)
    torch.testing.assert_close(got - d, want, rtol=1e-9, atol=1e-12)


def test_more_experts_than_a_program_holds_run_the_twin():
    x = torch.randn(2, k.MAX_EXPERTS + 1)
    assert torch.equal(run(k.router_fwd, x, 2)[1], k.router_fwd.twin(x, 2)[1])


def test_errors_name_what_was_given():
    x = torch.zeros(2, 4)
    with pytest.raises(FuseOpsError, match="k is 5, expected 1 to 4"):
        k.router_fwd.launcher(x, 5)
    with pytest.raises(FuseOpsError, match="unknown score 'relu'"):
        k.router_fwd.launcher(x, 2, "relu")
    with pytest.raises(FuseOpsError, match=r"dweights is \(2, 3\), expected \(2, 2\)"):
        k.router_bwd.launcher(torch.zeros(2, 3), x, torch.zeros(2, 2, dtype=torch.int32))
    with pytest.raises(FuseOpsError, match="2 of 3 groups of 4 experts"):
        k.router_fwd.launcher(x, 2, groups=3, top_groups=2)
