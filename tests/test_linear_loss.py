"""A loss of one's own over chunks of logits equals the same over whole ones."""

import gc
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor

import fuseops as fo
from fuseops.errors import ShapeError

D, V = 10, 23


def operands(
    *lead: int, dtype: torch.dtype = torch.float64
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    x, weight, bias = torch.randn(*lead, D), torch.randn(V, D), torch.randn(V)
    leaves = [t.to(dtype).requires_grad_() for t in (x, weight, bias)]
    return *leaves, torch.randint(0, V, lead)  # type: ignore[return-value]


def log_probs(logits: Tensor, targets: Tensor) -> Tensor:
    return logits.log_softmax(-1).gather(-1, targets[..., None]).squeeze(-1)


def preference(logits: Tensor, targets: Tensor, reference: Tensor) -> tuple[Tensor, Tensor]:
    """DPO of pairs (b, 2, T, V), and how many are ranked right."""
    chosen, rejected = (log_probs(logits, targets) - reference).sum(-1).unbind(1)
    margin = 0.1 * (chosen - rejected)
    return -F.logsigmoid(margin).sum() / 6, (margin > 0).sum()


def policy(logits: Tensor, targets: Tensor, advantages: Tensor) -> Tensor:
    """Clipped importance weights, and an entropy bonus: not of the log-probabilities alone."""
    logp = log_probs(logits, targets)
    ratio = (logp - logp.detach() + 0.3).exp()
    entropy = torch.distributions.Categorical(logits=logits).entropy()
    return -(
        torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages) + 0.1 * entropy
    ).sum()


def same(found: Any, expected: Any, leaves: list[Tensor]) -> None:
    torch.testing.assert_close(found, expected)
    dy = torch.tensor(0.7, dtype=found.dtype)
    mine = torch.autograd.grad(found, leaves, dy)
    for a, b in zip(mine, torch.autograd.grad(expected, leaves, dy), strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("chunk", [1, 2 * 2 * 4 * V * 8, 1 << 20])
@pytest.mark.parametrize("biased", [False, True])
def test_a_preference_loss_over_pairs(chunk: int, biased: bool) -> None:
    x, weight, bias, targets = operands(6, 2, 4)
    b, reference = (bias if biased else None), torch.randn(6, 2, 4, dtype=torch.float64)
    found, right = fo.linear_loss(
        preference, x, weight, targets, reference, linear_bias=b, chunk_bytes=chunk
    )
    expected, count = preference(F.linear(x, weight, b), targets, reference)
    assert right == count and not right.requires_grad
    same(found, expected, [x, weight, bias] if biased else [x, weight])


@pytest.mark.parametrize("frozen", ["nothing", "weight", "input"])
def test_a_policy_loss_over_tokens(frozen: str) -> None:
    x, weight, _, targets = operands(9)
    leaves = {"input": x, "weight": weight}
    leaves.pop(frozen, torch.zeros(1)).requires_grad_(False)
    advantages = torch.randn(9, dtype=torch.float64)
    found = fo.linear_loss(policy, x, weight, targets, advantages, chunk_bytes=V * 8 * 2)
    same(found, policy(x @ weight.T, targets, advantages), [*leaves.values()])


@pytest.mark.parametrize("lead", [(9,), (5, 3)])
@pytest.mark.parametrize("biased", [False, True])
def test_a_loss_may_write_in_place_to_its_logits(lead: tuple[int, ...], biased: bool) -> None:
    def tempered(logits: Tensor, targets: Tensor) -> Tensor:
        return -log_probs(logits.div_(2.0), targets).sum() + logits.tanh_().sum()

    x, weight, bias, targets = operands(*lead)
    b = bias if biased else None
    found = fo.linear_loss(tempered, x, weight, targets, linear_bias=b, chunk_bytes=V * 8 * 2)
    expected = tempered(F.linear(x, weight, b), targets)
    same(found, expected, [x, weight, bias] if biased else [x, weight])


def test_halves_sum_in_float32() -> None:
    x, weight, _, targets = operands(64, dtype=torch.bfloat16)
    mean = lambda logits, t: F.cross_entropy(logits.float(), t, reduction="sum") / 64  # noqa: E731
    found = fo.linear_loss(mean, x, weight, targets, chunk_bytes=V * 2 * 8)
    assert found.dtype is torch.float32
    grads = torch.autograd.grad(found, [x, weight])
    assert all(g.dtype is torch.bfloat16 for g in grads)
    wide = [t.detach().double().requires_grad_() for t in (x, weight)]
    expected = torch.autograd.grad(F.cross_entropy(wide[0] @ wide[1].T, targets), wide)
    for a, b in zip(grads, expected, strict=True):
        torch.testing.assert_close(a.double(), b, rtol=2e-2, atol=2e-3)


def test_no_chunk_holds_more_logits_than_it_may() -> None:
    x, weight, _, targets = operands(100)
    seen: list[int] = []

    def loss(logits: Tensor, t: Tensor) -> Tensor:
        seen.append(logits.numel() * 8)
        return F.cross_entropy(logits, t, reduction="sum")

    fo.linear_loss(loss, x, weight, targets, chunk_bytes=V * 8 * 30)
    assert max(seen) <= V * 8 * 30 and sum(seen) == 100 * V * 8


def test_without_gradients_and_in_plain_torch() -> None:
    x, weight, _, targets = operands(9)
    advantages = torch.randn(9, dtype=torch.float64)
    args = policy, x, weight, targets, advantages
    found = fo.linear_loss(*args)
    with torch.no_grad():
        assert torch.equal(fo.linear_loss(*args), found)
    with fo.reference():
        plain = fo.linear_loss(*args)
    (mine,), (theirs,) = torch.autograd.grad(found, x), torch.autograd.grad(plain, x)
    torch.testing.assert_close(mine, theirs)


@given(st.lists(st.sampled_from([0.0, 1.0]), min_size=1, max_size=6), st.sampled_from([1, 1 << 20]))
def test_chunks_whose_loss_does_not_depend_on_their_logits_have_no_gradient(
    counts: list[float], chunk_bytes: int
) -> None:
    x, weight, _, targets = operands(len(counts))
    mask = torch.tensor(counts, dtype=x.dtype)

    def masked(logits: Tensor, targets: Tensor, mask: Tensor) -> Tensor:
        if not mask.any():
            return mask.sum()
        return (F.cross_entropy(logits, targets, reduction="none") * mask).sum()

    assume(mask.any())
    found = fo.linear_loss(masked, x, weight, targets, mask, chunk_bytes=chunk_bytes)
    same(found, masked(F.linear(x, weight), targets, mask), [x, weight])


@pytest.mark.parametrize("first", [True, False])
def test_a_tensor_that_wants_a_gradient_is_found_in_any_chunk(first: bool) -> None:
    x, weight, *_ = operands(4)
    scale = torch.ones((), dtype=x.dtype, requires_grad=True)
    counts = torch.tensor([first, False, False, not first], dtype=x.dtype)

    def scaled(logits: Tensor, counts: Tensor) -> Tensor:
        return logits.sum() * scale if counts.any() else logits.sum()

    with pytest.raises(fo.FuseOpsError, match="wants a gradient, and would get none"):
        fo.linear_loss(scaled, x, weight, counts, chunk_bytes=1)


def test_what_a_loss_holds_goes_with_its_caller() -> None:
    """Not with a garbage collector, which may take a while."""
    x, weight, *_ = operands(4)

    def call() -> weakref.ref[Tensor]:
        held = torch.ones(4, dtype=x.dtype)
        fo.linear_loss(lambda logits: (logits.sum(-1) * held).sum(), x, weight).backward()
        return weakref.ref(held)

    gc.disable()
    try:
        assert call()() is None
    finally:
        gc.enable()


def total(logits: Tensor, *rows: Tensor) -> Tensor:
    return logits.sum()


def test_what_it_cannot_do_right_is_refused() -> None:
    x, weight, _, targets = operands(6)
    scale = torch.ones((), dtype=x.dtype, requires_grad=True)
    with pytest.raises(fo.FuseOpsError, match="wants a gradient, and would get none"):
        fo.linear_loss(lambda logits: (scale * logits).sum(), x, weight)
    with pytest.raises(fo.FuseOpsError, match="rows 0 want a gradient"):
        fo.linear_loss(total, x, weight, x)
    for bias in (
        weight.new_zeros(len(weight) - 1),
        weight.new_zeros(len(weight), dtype=torch.int64),
    ):
        with pytest.raises(ShapeError, match="linear_loss expects linear_bias of a float dtype"):
            fo.linear_loss(total, x, weight, linear_bias=bias)
    with pytest.raises(ShapeError, match="one dtype, got linear_weight of"):
        fo.linear_loss(total, x, weight.half())
    for chunk in (0, 1e9, "1 GiB", None):
        with pytest.raises(fo.FuseOpsError, match="chunk_bytes is"):
            fo.linear_loss(total, x, weight, chunk_bytes=chunk)
    with pytest.raises(ShapeError, match="one for each of 6"):
        fo.linear_loss(total, x, weight, targets[:5])
    with pytest.raises(fo.FuseOpsError, match=r"shape \(6, 23\), expected a number"):
        fo.linear_loss(lambda logits: logits, x, weight)
    with pytest.raises(fo.FuseOpsError, match="does not depend on the logits"):
        fo.linear_loss(lambda logits: torch.ones(()), x, weight)
    with pytest.raises(ShapeError, match="expects input"):
        fo.linear_loss(total, x, weight.T.contiguous())
    for taken in ((None, weight), (x, None), (x, weight, None), (x, weight, [1] * 6)):
        with pytest.raises(ShapeError, match=r"linear_loss expects .* to be a tensor"):
            fo.linear_loss(total, *taken)
    with pytest.raises(fo.FuseOpsError, match="loss to be a function, got int"):
        fo.linear_loss(3, x, weight)
    with pytest.raises(ShapeError, match="expects input"):
        fo.linear_loss(total, torch.ones(()), weight, targets)
    assert fo.linear_loss(total, x[:, :0], weight[:, :0]) == 0
