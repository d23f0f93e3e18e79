"""The loss of a head beside torch's, on own and on given weights; memory, main_grad, refusals."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import fuseops as fo

D, V = 12, 37


def operands(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    x, weight, bias = torch.randn(2, 9, D), torch.randn(V, D), torch.randn(V)
    targets = torch.randint(0, V, (2, 9))
    targets[0, :3] = -100
    return x.to(dtype), weight.to(dtype), bias.to(dtype), targets


@given(
    reduction=st.sampled_from(["mean", "sum", "none"]),
    smoothing=st.sampled_from([0.0, 0.2]),
    weighted=st.booleans(),
    biased=st.booleans(),
    gradients=st.sampled_from([None, "backward"]),
    chunk=st.sampled_from([1 << 20, V * 8 * 4, 1]),
)
def test_it_is_torchs_loss(
    reduction: str, smoothing: float, weighted: bool, biased: bool, gradients: Any, chunk: int
) -> None:
    x, weight, bias, targets = operands()
    class_weights = torch.rand(V, dtype=x.dtype) if weighted else None
    leaves = [t.requires_grad_() for t in ((x, weight, bias) if biased else (x, weight))]
    logits = F.linear(x, weight, bias if biased else None)
    options: dict[str, Any] = dict(reduction=reduction, label_smoothing=smoothing)
    want = F.cross_entropy(logits.view(-1, V), targets.view(-1), class_weights, **options)
    got = fo.linear_cross_entropy(
        x,
        weight,
        targets,
        linear_bias=bias if biased else None,
        weight=class_weights,
        gradients=gradients,
        chunk_bytes=chunk,
        **options,
    )
    torch.testing.assert_close(got, want.view(got.shape))
    dy = torch.rand_like(got)
    mine = torch.autograd.grad(got, leaves, dy)
    theirs = torch.autograd.grad(want, leaves, dy.view(want.shape))
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a, b)


def test_the_op_and_the_function_are_one() -> None:
    x, weight, bias, targets = operands(torch.float32)
    head = fo.ops.LinearCrossEntropy(D, V, bias=True, z_loss=0.1, soft_cap=3.0, temperature=0.7)
    with torch.no_grad():
        head.weight.copy_(weight), head.bias.copy_(bias)
    mine = head(x, targets=targets)
    same = dict(linear_bias=bias, z_loss=0.1, soft_cap=3.0, temperature=0.7)
    assert torch.equal(mine, fo.linear_cross_entropy(x, weight, targets, **same))  # type: ignore[arg-type]


def test_a_tied_embedding_gets_both_gradients() -> None:
    torch.manual_seed(0)
    embedding, targets = torch.nn.Embedding(V, D), torch.randint(0, V, (5,))
    fo.linear_cross_entropy(embedding(targets), embedding.weight, targets).backward()
    mine, embedding.weight.grad = embedding.weight.grad, None
    F.cross_entropy(F.linear(embedding(targets), embedding.weight), targets).backward()
    torch.testing.assert_close(mine, embedding.weight.grad)


def test_what_is_published_can_be_differentiated() -> None:
    x, weight, _, targets = operands()
    x.requires_grad_()
    loss, lse, logp, entropy = fo.linear_cross_entropy(
        x, weight, targets, publishes=("lse", "log_probs", "entropy")
    )
    logits = F.linear(x, weight)
    log_softmax, counts = logits.log_softmax(-1), targets != -100
    at = targets.where(counts, 0)[..., None]
    want = (
        F.cross_entropy(logits.view(-1, V), targets.view(-1)),
        logits.logsumexp(-1),
        log_softmax.gather(-1, at).squeeze(-1) * counts,
        -(log_softmax.exp() * log_softmax).sum(-1),
    )
    total = sum((k + 1) * t.sin().sum() for k, t in enumerate((loss, lse, logp, entropy)))
    expected = sum((k + 1) * t.sin().sum() for k, t in enumerate(want))
    torch.testing.assert_close(total, expected)
    (mine,), (theirs,) = torch.autograd.grad(total, x), torch.autograd.grad(expected, x)  # type: ignore[arg-type]
    torch.testing.assert_close(mine, theirs)


@pytest.mark.parametrize("gradients", ["forward", "backward"])
def test_the_weights_gradient_goes_to_main_grad(gradients: str) -> None:
    x, weight, _, targets = operands(torch.float32)
    head = fo.ops.LinearCrossEntropy(D, V, gradients=gradients, chunk_bytes=V * 4 * 5)
    head.weight.data.copy_(weight)
    head.accumulate_into_main_grad = True
    head.weight.main_grad = torch.ones_like(weight)  # type: ignore[attr-defined]
    (3 * head(x, targets=targets)).backward()
    assert head.weight.grad is None
    want = weight.requires_grad_()
    (3 * F.cross_entropy(F.linear(x, want).view(-1, V), targets.view(-1))).backward()
    torch.testing.assert_close(head.weight.main_grad - 1, want.grad, rtol=1e-4, atol=1e-5)  # type: ignore[operator]


def test_nothing_is_made_that_nobody_needs() -> None:
    x, _, _, targets = operands(torch.float32)
    head = fo.ops.LinearCrossEntropy(D, V)
    head.weight.requires_grad_(False)
    plan = fo.Sequential(head).plan(x.requires_grad_(), targets=targets)
    assert [t.name for t in plan.saved] == ["0.dx"]
    with torch.no_grad():
        assert not head(x, targets=targets).requires_grad


def test_a_step_holds_no_whole_logits() -> None:
    """The largest tensor that a step makes has no more elements than a chunk, a gradient or the weight."""
    tokens, vocab = 64, 512
    head = fo.ops.LinearCrossEntropy(D, vocab, chunk_bytes=8 * vocab * 4)
    x, targets = torch.randn(tokens, D, requires_grad=True), torch.randint(0, vocab, (tokens,))
    sizes = []

    class Sizes(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(
            self, func: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            out = func(*args, **(kwargs or {}))
            sizes.extend(
                t.numel()
                for t in (out if isinstance(out, tuple) else (out,))
                if isinstance(t, Tensor)
            )
            return out

    for gradients in ("forward", "backward"):
        head.__init__(D, vocab, gradients=gradients, chunk_bytes=8 * vocab * 4)  # type: ignore[misc]
        with fo.reference(), Sizes():
            head(x, targets=targets)
        with torch.no_grad(), Sizes():
            head(x, targets=targets)
    assert sizes and max(sizes) <= max(8 * vocab, vocab * D)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"reduction": "avg"}, "reduction='avg'"),
        ({"label_smoothing": 2.0}, "label_smoothing=2.0"),
        ({"publishes": ("logits",)}, "names among"),
        ({"publishes": "lse"}, "names among"),
        ({"temperature": 0.0}, "temperature=0.0"),
        ({"soft_cap": -1.0}, "soft_cap=-1.0"),
        ({"gradients": "forward", "reduction": "none"}, "one number"),
        ({"chunk_bytes": 0}, "chunk_bytes=0"),
        ({"weight": torch.ones(3)}, r"of shape \(37,\)"),
    ],
)
def test_options_that_mean_nothing_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(fo.FuseOpsError, match=message):
        fo.ops.LinearCrossEntropy(D, V, **options)


@pytest.mark.parametrize("targets", [torch.zeros(2, 8, dtype=torch.int64), torch.zeros(2, 9)])
def test_targets_of_another_shape_or_dtype_are_refused(targets: Tensor) -> None:
    x, weight, _, _ = operands()
    with pytest.raises(fo.FuseOpsError, match=r"targets int64 of shape \(2, 9\)"):
        fo.linear_cross_entropy(x, weight, targets)
