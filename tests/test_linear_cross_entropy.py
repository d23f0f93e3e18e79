"""The loss of a head beside torch's, on own and on given weights; memory, main_grad, refusals."""

import gc
import weakref
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import fuseops as fo
from fuseops.ops import cross_entropy
from fuseops.ops.cross_entropy import MAX_CACHED_OPS

D, V = 12, 37


def operands(dtype: torch.dtype = torch.float64) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    torch.manual_seed(0)
    x, weight, bias = torch.randn(2, 9, D), torch.randn(V, D), torch.randn(V)
    targets = torch.randint(0, V, (2, 9))
    targets[0, :3], targets[1, :2] = -100, torch.tensor([0, V - 1])
    return x.to(dtype), weight.to(dtype), bias.to(dtype), targets


@given(
    reduction=st.sampled_from(["mean", "sum", "none"]),
    smoothing=st.sampled_from([0.0, 0.2, 1.0]),
    weighted=st.booleans(),
    biased=st.booleans(),
    gradients=st.sampled_from([None, "backward"]),
    chunk=st.sampled_from([1 << 20, V * 8 * 4, 1]),
    more=st.fixed_dictionaries(
        {
            "soft_cap": st.sampled_from([None, 3.0]),
            "temperature": st.sampled_from([1.0, 0.7]),
            "z_loss": st.sampled_from([0.0, 0.1]),
        }
    ),
)
def test_it_is_torchs_loss_of_capped_logits_and_a_penalty(
    reduction: str,
    smoothing: float,
    weighted: bool,
    biased: bool,
    gradients: Any,
    chunk: int,
    more: dict[str, Any],
) -> None:
    x, weight, bias, targets = operands()
    class_weights = torch.rand(V, dtype=x.dtype) if weighted else None
    leaves = [t.requires_grad_() for t in ((x, weight, bias) if biased else (x, weight))]
    logits = F.linear(x, weight, bias if biased else None).view(-1, V)
    if (cap := more["soft_cap"]) is not None:
        logits = cap * (logits / cap).tanh()
    logits, at = logits / more["temperature"], targets.view(-1)
    options: dict[str, Any] = dict(reduction=reduction, label_smoothing=smoothing)
    want = F.cross_entropy(logits, at, class_weights, **options)
    counts = at != -100
    penalty = more["z_loss"] * logits.logsumexp(-1).square() * counts
    own = counts if class_weights is None else counts * class_weights[at.where(counts, 0)]
    reduced = {"none": penalty, "sum": penalty.sum(), "mean": penalty.sum() / own.sum()}
    want = want + reduced[reduction]
    got = fo.linear_cross_entropy(
        x,
        weight,
        targets,
        linear_bias=bias if biased else None,
        weight=class_weights,
        gradients=gradients,
        chunk_bytes=chunk,
        **options,
        **more,
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
@pytest.mark.parametrize("overwrite", [False, True])
def test_the_weights_gradient_goes_to_main_grad(gradients: str, overwrite: bool) -> None:
    x, weight, _, targets = operands(torch.float32)
    head = fo.ops.LinearCrossEntropy(D, V, gradients=gradients, chunk_bytes=V * 4 * 5)
    head.weight.data.copy_(weight)
    head.accumulate_into_main_grad = True
    before = torch.full_like(weight, torch.nan if overwrite else 1.0)
    head.weight.main_grad, head.weight.overwrite_main_grad = before, overwrite  # type: ignore[attr-defined]
    (3 * head(x, targets=targets)).backward()
    assert head.weight.grad is None
    want = weight.requires_grad_()
    (3 * F.cross_entropy(F.linear(x, want).view(-1, V), targets.view(-1))).backward()
    found = head.weight.main_grad - (0 if overwrite else 1)  # type: ignore[operator]
    torch.testing.assert_close(found, want.grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("gradients", ["forward", "backward"])
def test_a_main_grad_in_halves_gets_the_sum_over_chunks_rounded_once(gradients: str) -> None:
    torch.manual_seed(0)
    x, weight = torch.randn(256, D).bfloat16(), torch.randn(V, D).bfloat16()
    targets = torch.randint(0, V, (256,))

    def made(into_main_grad: bool) -> Any:
        head = fo.ops.LinearCrossEntropy(D, V, gradients=gradients, chunk_bytes=1).bfloat16()
        head.weight.data.copy_(weight)
        head.accumulate_into_main_grad = into_main_grad
        if into_main_grad:
            head.weight.main_grad = torch.zeros_like(weight)  # type: ignore[attr-defined]
        head(x, targets=targets).backward()
        return head.weight.main_grad if into_main_grad else head.weight.grad

    assert torch.equal(made(True), made(False))


@pytest.mark.parametrize("gradients", [None, "forward", "backward"])
def test_gradients_are_made_in_the_pass_that_was_asked_for(gradients: Any) -> None:
    x, _, _, targets = operands(torch.float32)
    head = fo.ops.LinearCrossEntropy(D, V, gradients=gradients)
    plan = fo.Sequential(head).plan(x.requires_grad_(), targets=targets)
    saved = {t.name.removeprefix("0.") for t in plan.saved}
    forward, backward = {"dx", "dweight", "unit"}, {"x", "targets", "total", "lse"}
    assert saved - {"weight"} == (backward if gradients == "backward" else forward)


def test_nothing_is_made_that_nobody_needs() -> None:
    x, _, _, targets = operands(torch.float32)
    head = fo.ops.LinearCrossEntropy(D, V)
    head.weight.requires_grad_(False)
    plan = fo.Sequential(head).plan(x.requires_grad_(), targets=targets)
    assert [t.name for t in plan.saved] == ["0.dx", "0.unit"]  # one number
    with torch.no_grad():
        assert not head(x, targets=targets).requires_grad


@pytest.mark.parametrize("gradients", ["forward", "backward"])
def test_a_grad_scaler_finds_float16_gradients_as_good_as_those_of_whole_logits(
    gradients: str,
) -> None:
    """Of 1024 tokens a share of 1 / 1024 is gone from float16 before the scaler multiplies it."""
    torch.manual_seed(0)
    tokens, vocab, scale = 1024, 512, 2.0**16
    x, weight = torch.randn(tokens, D).half(), torch.randn(vocab, D).half() / 8
    targets = torch.randint(0, vocab, (tokens,))

    def error(loss: Any, dtype: torch.dtype = torch.float16) -> list[Tensor]:
        leaves = [t.to(dtype).requires_grad_() for t in (x, weight)]
        return list(torch.autograd.grad(loss(*leaves) * scale, leaves))

    exact = error(lambda x, w: F.cross_entropy(F.linear(x, w), targets), torch.float64)
    whole = error(lambda x, w: F.cross_entropy(F.linear(x, w).float(), targets))
    mine = error(lambda x, w: fo.linear_cross_entropy(x, w, targets, gradients=gradients))
    for got, plain, want in zip(mine, whole, exact, strict=True):
        assert (got - want).norm() <= 1.1 * (plain - want).norm()


@pytest.mark.parametrize("shape", [(0,), (2, 0), ()])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
@pytest.mark.parametrize("gradients", [None, "backward"])
def test_no_tokens_and_one_are_as_in_torch(
    shape: tuple[int, ...], reduction: str, gradients: Any
) -> None:
    _, weight, _, _ = operands()
    x, targets = torch.randn(*shape, D, dtype=weight.dtype), torch.ones(shape, dtype=torch.int64)
    leaves = [x.requires_grad_(), weight.requires_grad_()]
    got = fo.linear_cross_entropy(x, weight, targets, reduction=reduction, gradients=gradients)
    want = F.cross_entropy(F.linear(x, weight).view(-1, V), targets.view(-1), reduction=reduction)
    torch.testing.assert_close(got, want.nan_to_num().view(got.shape))  # the mean of none is 0
    dy = torch.ones_like(got)
    mine = torch.autograd.grad(got, leaves, dy)
    theirs = torch.autograd.grad(want, leaves, dy.view(want.shape))
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("gradients", [None, "backward"])
def test_where_all_is_ignored_the_loss_is_nan_and_its_gradients_are_zero(gradients: Any) -> None:
    x, weight, _, targets = operands()
    leaves = [x.requires_grad_(), weight.requires_grad_()]
    ignored = torch.full_like(targets, 3)
    loss = fo.linear_cross_entropy(x, weight, ignored, ignore_index=3, gradients=gradients)
    assert loss.isnan()
    assert not any(g.any() for g in torch.autograd.grad(loss, leaves))


def test_ignore_index_may_be_none_as_torchs_is() -> None:
    x, weight, _, targets = operands()
    assert fo.linear_cross_entropy(x, weight, targets, ignore_index=None) == (
        fo.linear_cross_entropy(x, weight, targets)
    )
    assert fo.ops.LinearCrossEntropy(D, V, ignore_index=None).ignore_index == -100


def test_the_function_is_traced_without_a_break() -> None:
    """Twice in one graph, under options that nobody has used before."""
    x, weight, _, targets = operands()
    leaves = [x.requires_grad_(), weight.requires_grad_()]

    def losses(x: Tensor, weight: Tensor) -> Tensor:
        first = fo.linear_cross_entropy(x, weight, targets, z_loss=0.0123)
        second = fo.linear_cross_entropy(x, weight, targets, z_loss=0.0321, publishes=("lse",))
        return first + second[1].sum()

    torch._dynamo.reset()
    got = torch.compile(losses, fullgraph=True, backend="aot_eager")(x, weight)
    torch.testing.assert_close(got, losses(x, weight))
    mine, theirs = (torch.autograd.grad(t, leaves) for t in (got, losses(x, weight)))
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"linear_weight": torch.ones(V, D)}, "one dtype, got torch.float64 and torch.float32"),
        ({"linear_weight": torch.ones(V, 5).double()}, r"\(2, 9, 12\) and \(37, 5\)"),
        ({"linear_weight": torch.ones(V, 1, D).double()}, r"\(37, 1, 12\)"),
        ({"linear_bias": torch.ones(5)}, r"bias of a float dtype and shape \(37,\)"),
        ({"weight": torch.ones(5)}, r"class weights of a float dtype and shape \(37,\)"),
        ({"weight": torch.ones(V, dtype=torch.int64)}, "class weights of a float dtype"),
        ({"weight": torch.ones(V, requires_grad=True)}, "wants a gradient"),
        ({"input": torch.ones(()), "linear_weight": torch.ones(V)}, r"got \(\) and \(37,\)"),
        ({"linear_weight": None}, "linear_weight to be a tensor, got NoneType"),
        ({"weight": [1.0] * V}, "weight to be a tensor, got list"),
    ],
)
def test_operands_that_do_not_fit_are_refused(change: dict[str, Any], message: str) -> None:
    x, weight, _, targets = operands()
    given = {"input": x, "linear_weight": weight, **change}
    with pytest.raises(fo.FuseOpsError, match=message):
        fo.linear_cross_entropy(target=targets, **given)


@pytest.mark.parametrize("gradients", [None, "backward"])
@given(exponent=st.integers(-30, 37), ignored=st.booleans())
def test_logits_as_large_as_float32_holds_have_torchs_loss(
    gradients: Any, exponent: int, ignored: bool
) -> None:
    """No power of them is made that nobody asked for."""
    x = torch.tensor([[1.0, 2.0], [0.5, -1.0]]) * 10.0**exponent
    weight, targets = torch.eye(3, 2), torch.tensor([2, -100 if ignored else 0])
    leaves = [x.requires_grad_(), weight.requires_grad_()]
    found = fo.linear_cross_entropy(x, weight, targets, gradients=gradients)
    expected = torch.nn.functional.cross_entropy(x @ weight.t(), targets)
    torch.testing.assert_close(found, expected)
    mine, theirs = (torch.autograd.grad(loss, leaves) for loss in (found, expected))
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a, b)


def test_an_option_that_is_another_in_each_step_keeps_no_more_and_more_ops() -> None:
    x, weight, _, targets = operands()
    kept = weakref.WeakSet[Any]()
    for step in range(3 * MAX_CACHED_OPS):
        temperature = 1 + step / 100
        loss = fo.linear_cross_entropy(x, weight, targets, temperature=temperature)
        kept.update(op for op in vars(cross_entropy._OPS).values() if isinstance(op, fo.Op))
    expected = torch.nn.functional.cross_entropy(
        (x @ weight.t() / temperature).flatten(0, -2), targets.flatten()
    )
    torch.testing.assert_close(loss, expected)
    gc.collect()
    assert len(kept) < 2 * MAX_CACHED_OPS


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
        ({"publishes": 5}, "names among"),
        ({"temperature": 0.0}, "temperature=0.0"),
        ({"soft_cap": -1.0}, "soft_cap=-1.0"),
        ({"soft_cap": 0.0}, "soft_cap=0.0"),
        ({"gradients": "forward", "reduction": "none"}, "one number"),
        ({"chunk_bytes": 0}, "chunk_bytes is 0"),
        ({"chunk_bytes": 1e9}, "chunk_bytes is 1000000000.0, expected an integer from 1 on"),
        ({"weight": torch.ones(3)}, r"of shape \(37,\)"),
        ({"weight": torch.ones(37, requires_grad=True)}, "weight wants a gradient"),
    ],
)
def test_options_that_mean_nothing_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(fo.FuseOpsError, match=message):
        fo.ops.LinearCrossEntropy(D, V, **options)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("label_smoothing", 2.0),
        ("temperature", 0.0),
        ("soft_cap", -1.0),
        ("z_loss", float("nan")),
        ("chunk_bytes", 1e9),
        ("ignore_index", 1.5),
    ],
)
def test_options_that_are_assigned_are_checked_too(name: str, value: float) -> None:
    head = fo.ops.LinearCrossEntropy(D, 37)
    x, targets = torch.randn(3, D), torch.zeros(3, dtype=torch.int64)
    head(x, targets=targets)
    setattr(head, name, value)
    with pytest.raises(fo.FuseOpsError, match=name):
        head(x, targets=targets)


@pytest.mark.parametrize("targets", [torch.zeros(2, 8, dtype=torch.int64), torch.zeros(2, 9)])
def test_targets_of_another_shape_or_dtype_are_refused(targets: Tensor) -> None:
    x, weight, _, _ = operands()
    with pytest.raises(fo.FuseOpsError, match=r"target int64 of shape \(2, 9\)"):
        fo.linear_cross_entropy(x, weight, targets)
