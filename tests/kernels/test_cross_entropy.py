"""The loss of a linear layer's logits: kernel equals twin, the twin torch, and no chunk changes the result."""

import itertools

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from laws import DEVICE, DTYPES, SEEDS, WIDTHS, few, tensor

from fuseops.kernels import cross_entropy as k
from fuseops.kernels.cross_entropy import row_chunks
from fuseops.observe.memory import OpWatcher

pytestmark = pytest.mark.usefixtures("kernels")

OPTIONS = st.tuples(
    st.sampled_from([0.0, 0.25]),
    st.sampled_from([0.0, 0.01]),
    st.sampled_from([0.0, 3.0]),
    st.sampled_from([1.0, 0.5]),
).map(list)
IGNORED = -100


@st.composite
def cases(draw):
    """(x, weight, bias, targets, class weights), with large logits, targets that do not count, and any layout."""
    rows, width, dtype, seed = (
        draw(st.sampled_from([0, 1, 7, 65])),
        draw(st.sampled_from([8, 16, 33])),
        draw(DTYPES),
        draw(SEEDS),
    )
    vocab = draw(WIDTHS)
    scale = draw(st.sampled_from([1.0, 20.0]))  # of logits
    x = tensor((rows, width), dtype, "normal", seed, draw(st.booleans()))
    weight = tensor((vocab, width), dtype, "normal", seed + 1) * (scale / width**0.5)
    bias = tensor((vocab,), dtype, "normal", seed + 2) if draw(st.booleans()) else None
    g = torch.Generator().manual_seed(seed)
    targets = torch.randint(0, vocab, (rows,), generator=g)
    targets = targets.where(torch.rand(rows, generator=g) < 0.8, IGNORED)
    weights = torch.rand(vocab, generator=g) if draw(st.booleans()) else None
    return x, weight.to(dtype), bias, targets, weights


def on_device(values):
    return [v.to(DEVICE) if isinstance(v, torch.Tensor) else v for v in values]


def close(got, want, dtype, terms=1.0):
    """Within a rounding of `dtype` of the largest number, of each number and of the terms that it is a sum of."""
    eps = {torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10, torch.float32: 2e-5}[dtype]
    got, want = got.cpu().double(), want.cpu().double()
    assert got.shape == want.shape
    assert bool((got - want).abs().le(eps * (want.abs() + terms)).all()), (got - want).abs().max()


@given(cases(), OPTIONS, st.sampled_from([1, 3]))
@few
def test_rows_and_gradients_are_the_twins(case, options, chunks):
    x, vocab = case[0], len(case[1])
    chunk = max(len(x) * vocab * x.itemsize // chunks, 1)
    moved = on_device(case)
    rows = k.linear_cross_entropy_fwd.launcher(*moved, options, IGNORED, chunk)
    want = k.linear_cross_entropy_fwd.twin(*case, options, IGNORED, 1 << 30)
    # a logit of the kernel is rounded once, as that of the twin; they differ by its last bit
    largest = max(1.0, 20.0 / options[3]) if x.dtype != torch.float32 else 1.0
    for got, expected in zip(rows, want, strict=True):
        close(got, expected, x.dtype, terms=largest)
    grads = [tensor((len(x),), torch.float32, "normal", seed) for seed in (1, 2, 3, 4)]
    ends, needs = (options, IGNORED, chunk), [True, True, True]
    for given_grads in (grads[:1], grads):
        tail = want[1], want[3], given_grads
        got = k.linear_cross_entropy_bwd.launcher(
            *moved, *ends, *on_device(tail[:2]), on_device(tail[2]), needs
        )
        expected = k.linear_cross_entropy_bwd.twin(*case, *ends, *tail, needs)
        for mine, theirs in zip(got, expected, strict=True):
            size = theirs.abs().max().item() if theirs.numel() else 0.0
            close(mine, theirs, x.dtype, terms=max(size, 1.0) * largest)
    got = k.linear_cross_entropy_grads.launcher(*moved, *ends, grads[0].to(DEVICE), needs)
    for mine, theirs in zip(
        got, k.linear_cross_entropy_grads.twin(*case, *ends, grads[0], needs), strict=True
    ):
        size = theirs.abs().max().item() if theirs.numel() else 0.0
        close(mine, theirs, x.dtype, terms=max(size, 1.0) * largest)


def test_what_lies_between_rows_of_logits_is_a_number_on_a_cpu():
    """Torch's product of bfloat16 multiplies it by zero where the CPU has tiles (AMX)."""
    held = k.logits_buffer(torch.empty(3, 8, dtype=torch.bfloat16), 100)
    between = held.as_strided((3, held.stride(0)), (held.stride(0), 1))[:, 100:]
    assert held.shape == (3, 100) and between.numel() == 84 and not between.isnan().any()


@given(cases(), OPTIONS)
@few
def test_the_weights_gradient_is_added_to_main_grad(case, options):
    x, weight = case[0], case[1]
    rows = k.linear_cross_entropy_fwd.twin(*case, options, IGNORED, 1 << 30)
    head = *on_device(case), options, IGNORED, max(len(x) * len(weight), 1)
    lse, expected = rows[1].to(DEVICE), rows[3].to(DEVICE)
    args = *head, lse, expected, [lse], [False, True, False]
    buffer = torch.ones(weight.shape, device=DEVICE)
    dx, dweight, dbias = k.linear_cross_entropy_bwd.launcher(*args, buffer)
    assert dx.numel() == dweight.numel() == dbias.numel() == 0
    _, expected, _ = k.linear_cross_entropy_bwd.launcher(*args)
    close(buffer - 1, expected, x.dtype, terms=max(expected.abs().max().item(), 1.0))


@pytest.mark.parametrize("into", [False, True])
def test_nothing_of_the_weights_size_is_made_where_main_grad_takes_it(into):
    rows, vocab, width = 8, 512, 64
    x, weight = (torch.randn(n, width, dtype=torch.bfloat16, device=DEVICE) for n in (rows, vocab))
    targets, lse = torch.zeros(rows, dtype=torch.int64, device=DEVICE), x.new_ones(rows).float()
    main_grad = torch.zeros(vocab, width, device=DEVICE)
    args = x, weight, None, targets, None, [0.0, 0.0, 0.0, 1.0], IGNORED, rows * 16 * x.itemsize
    made = []
    with OpWatcher(lambda *call: made.extend(t.untyped_storage().nbytes() for t in call[-1])):
        k.linear_cross_entropy_bwd.launcher(
            *args, lse, lse, [lse], [True, True, False], *[main_grad] * into
        )
    assert (max(made) < weight.nbytes) == into


@given(cases(), OPTIONS, st.integers(1, 100))
@few
def test_logits_of_some_classes_are_the_twins_and_all_together_the_whole(case, options, percent):
    """A vocabulary in two parts, as two ranks have it: numbers of each, then gradients from the lse of all."""
    x, weight, bias, targets, weights = case
    vocab, dloss = len(weight), tensor((len(x),), torch.float32, "normal", 1)
    cut, ends = max(vocab * percent // 100, 1), (options, IGNORED)
    raw, _, lse, *_ = k.logits_with_rows.twin(x, weight, bias, targets, weights, *ends)
    whole, sums = raw.clone(), (torch.zeros(weight.shape), torch.zeros(vocab))
    rest = targets, weights, lse, dloss, *ends
    dx = k.logit_grads_into.twin(whole, x, weight, *rest, 0, vocab, True, *sums, True)
    size = max(1.0, 20.0 / options[3])
    for first, last in ((0, cut), (cut, vocab)):
        if first == last:
            continue
        part = slice(first, last)
        at = targets.where((targets >= first) & (targets < last), first) - first
        own = x, weight[part], *(None if t is None else t[part] for t in (bias,)), at
        rows = *own, None if weights is None else weights[part], *ends
        got, want = k.logits_with_rows.launcher(*on_device(rows)), k.logits_with_rows.twin(*rows)
        for mine, theirs in zip(got, want, strict=True):
            close(mine, theirs, x.dtype, terms=2 * size)
        logits = raw.clone().to(DEVICE)[:, part]
        args = (*rest, first, vocab, True)
        mine = torch.ones(weight[part].shape), torch.zeros(last - first)
        moved = on_device(mine)
        got_dx = k.logit_grads_into.launcher(
            logits, *on_device((x, weight[part], *args)), *moved, False
        )
        close(logits, whole[:, part], x.dtype, terms=size)
        twins = raw[:, part].clone(), torch.ones(weight[part].shape), torch.zeros(last - first)
        want_dx = k.logit_grads_into.twin(twins[0], x, weight[part], *args, *twins[1:], False)
        assert torch.equal(twins[0], whole[:, part])
        for a, b in ((got_dx, want_dx), *zip(moved, twins[1:], strict=True)):
            terms = max(b.abs().max().item() if b.numel() else 0.0, 1.0) * size
            close(a, b, x.dtype, terms=terms)
        close(twins[1] - 1, sums[0][part], x.dtype, terms=max(len(x), 1) * size)
    assert dx.shape == x.shape


@given(cases(), st.sampled_from([0.0, 0.25]))
@few
def test_the_twin_is_torch(case, smoothing):
    x, weight, bias, targets, weights = (
        t if t is None or t.dtype == torch.int64 else t.double() for t in case
    )
    loss, *_ = k.linear_cross_entropy_fwd.twin(
        x, weight, bias, targets, weights, [smoothing, 0.0, 0.0, 1.0], IGNORED, 500
    )
    logits = torch.nn.functional.linear(x, weight, bias)
    expected = torch.nn.functional.cross_entropy(
        logits, targets, weights, reduction="none", label_smoothing=smoothing
    )
    torch.testing.assert_close(loss, expected, rtol=1e-9, atol=1e-9)


def test_a_target_outside_of_the_vocabulary_is_nan():
    x, weight = torch.randn(3, 8, device=DEVICE), torch.randn(5, 8, device=DEVICE)
    targets = torch.tensor([1, 5, -1], device=DEVICE)
    for run in (k.linear_cross_entropy_fwd.launcher, k.linear_cross_entropy_fwd.twin):
        loss = run(x, weight, None, targets, None, [0.0, 0.0, 0.0, 1.0], IGNORED, 1000)[0]
        assert loss.isnan().tolist() == [False, True, True]


@given(st.integers(0, 5000), st.integers(1, 300), st.integers(1, 1 << 20))
def test_chunks_cover_the_rows_within_their_bytes_and_are_as_few(rows, vocab, chunk):
    slices = list(row_chunks(rows, vocab, 2, chunk))
    assert slices[0].start == 0 and slices[-1].stop == rows
    assert all(a.stop == b.start for a, b in itertools.pairwise(slices))
    longest = max(s.stop - s.start for s in slices)
    assert longest <= 1 or longest * vocab * 2 <= chunk
    assert len(slices) == max(-(-rows // max(chunk // (vocab * 2), 1)), 1)


@given(
    st.tuples(DTYPES, DTYPES),
    st.sampled_from([(0,), (1,), (65, 33), (3, 4097)]),
    st.booleans(),
    SEEDS,
)
@few
def test_a_gradient_is_scaled_into_another_dtype(dtypes, shape, strided, seed):
    made, dtype = dtypes
    t = tensor(shape, made, "normal", seed, strided)
    scale = torch.tensor(0.3)
    got = k.scaled_to.launcher(t.to(DEVICE), scale.to(DEVICE), dtype)
    torch.testing.assert_close(got.cpu(), k.scaled_to.twin(t, scale, dtype), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({1: torch.randn(5, 9)}, r"weight is \(5, 9\), expected \(V, 8\)"),
        ({3: torch.zeros(3, dtype=torch.int32)}, r"expected int64\(3,\)"),
        ({2: torch.zeros(4)}, r"bias is \(4,\), expected \(5,\)"),
    ],
)
def test_wrong_operands_are_refused(change, message):
    args = [torch.randn(3, 8), torch.randn(5, 8), None, torch.zeros(3, dtype=torch.int64), None]
    for place, value in change.items():
        args[place] = value
    with pytest.raises(k.FuseOpsError, match=message):
        k.linear_cross_entropy_fwd.launcher(*on_device(args), [0.0, 0.0, 0.0, 1.0], IGNORED, 100)
