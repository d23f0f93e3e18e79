"""Cross entropy of a linear layer's logits, which are never whole in memory.

Chunks are of rows where the loss is made, which needs all logits of a row. Where the gradients are made later, from
lse, they are of classes: the weight's gradient is written once, and it is dx, a smaller sum, that chunks are added to.

Maths, of the logits l = f(x W^T + b) of a row with target t, where f caps and divides:
    raw -> soft_cap tanh(raw / soft_cap) (if soft_cap) -> / temperature
    lse = log sum exp l;  logp = l_t - lse;  expected = sum p l, p = exp(l - lse);  entropy = lse - expected
    loss = -(1 - smoothing) w_t logp + smoothing / V sum_c w_c (lse - l_c) + z_loss lse^2
and 0 for a target of `ignore_index`; NaN for one outside of the vocabulary (nothing is read on the host). w are the
class weights, 1 without. The gradient of the logits takes their place in the chunk, in their dtype; lse and p are taken
from the same logits, in float32. Sums over chunks are float32.
Shapes: x (N, D), weight (V, D), bias (V,), targets (N,) int64, class_weights (V,); row results (N,) float32, dx (N, D)
in the dtype of x, dweight (V, D) in that of the weight or an unrounded float32 sum (`_grads`), dbias (V,) float32. What
nobody needs is empty.
Cost: 2 N D V operations forward, 6 in `linear_cross_entropy_bwd` (it makes the logits again), 6 in
`linear_cross_entropy_grads`, which is forward and backward at once.
Hardware: sm_80 and later; the GEMMs are cuBLAS's.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fuseops.errors import FuseOpsError
from fuseops.kernels.bias import bias_bwd
from fuseops.kernels.configs import Config, Space
from fuseops.kernels.grouped import grouped_wgrad_into, one_group
from fuseops.kernels.grouped_paths import wgrad_path
from fuseops.kernels.launch import device, launch
from fuseops.kernels.precision import accumulator, wide
from fuseops.kernels.registry import kernel_op
from fuseops.kernels.tiles import cdiv, pow2, require


class Loss(NamedTuple):
    """A `Loss` holds the options of the loss, in the order in which the kernels take them."""

    smoothing: float = 0.0
    z_loss: float = 0.0
    soft_cap: float = 0.0  # 0: none
    temperature: float = 1.0


WHOLE = (1024, 512, 256, 1)
"""Rows that fill tiles and, of the input gradient of 4096 columns, turns of 132 multiprocessors (1024). Not 128: for 13
times as many cuBLAS takes tiles that leave half of a turn idle, and the product a tenth longer than for a row less."""


def row_chunks(
    rows: int, vocab: int, itemsize: int, chunk_bytes: int, whole: tuple[int, ...] = WHOLE
) -> Iterator[slice]:
    """Slices of rows, as few as keep the logits of each within `chunk_bytes`, and but for the last equal.

    Their rows are a multiple of the first of `whole` that needs no further slice. Of no rows one empty slice.
    """
    most = max(chunk_bytes // max(vocab * itemsize, 1), 1)
    each = max(-(-rows // max(-(-rows // most), 1)), 1)
    rounded = (-(-each // unit) * unit for unit in whole)
    each = next((found for found in rounded if found <= most), most)
    return (slice(start, min(start + each, rows)) for start in range(0, max(rows, 1), each))


def _scaled_to(t: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    return (wide(t) * scale).to(dtype)


def _linear_cross_entropy_fwd(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    class_weights: Tensor | None,
    options: Sequence[float],
    ignore_index: int,
    chunk_bytes: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    parts = [
        _results_of(
            _logits(x[s], weight, bias, options), targets[s], class_weights, options, ignore_index
        )
        for s in row_chunks(len(x), len(weight), x.itemsize, chunk_bytes)
    ]
    loss, lse, logp, expected = (torch.cat(part) for part in zip(*parts, strict=True))
    return loss, lse, logp, expected


def _linear_cross_entropy_bwd(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    class_weights: Tensor | None,
    lse: Tensor,
    expected: Tensor,
    grads: Sequence[Tensor],
    options: Sequence[float],
    ignore_index: int,
    chunk_bytes: int,
    needs: Sequence[bool],
    main_grad: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    args = x, weight, bias, targets, class_weights, lse, expected, grads, options
    dx, dweight, dbias = _gradients(*args, ignore_index, chunk_bytes, needs, main_grad)
    return dx, dweight.to(weight.dtype) if main_grad is None else x.new_empty(0), dbias


def _gradients(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    class_weights: Tensor | None,
    lse: Tensor,
    expected: Tensor,
    grads: Sequence[Tensor],
    options: Sequence[float],
    ignore_index: int,
    chunk_bytes: int,
    needs: Sequence[bool],
    main_grad: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """dx, and the sums of dweight (or main_grad, with them added) and dbias unrounded."""
    dtype = accumulator(x.dtype)
    dx = torch.zeros_like(x, memory_format=torch.contiguous_format) if needs[0] else x.new_empty(0)
    dweight = main_grad if main_grad is not None else _zeros(weight, dtype, needs[1])
    dbias = _zeros(weight[:, 0], dtype, needs[2])
    for s in row_chunks(len(x), len(weight), x.itemsize, chunk_bytes):
        dlogits = _dlogits(
            _logits(x[s], weight, bias, options),
            targets[s],
            class_weights,
            lse[s],
            expected[s],
            [g[s] for g in grads],
            options,
            ignore_index,
        ).to(x.dtype)
        if needs[0]:
            dx[s] = dlogits @ weight
        if needs[1]:
            dweight += (wide(dlogits).t() @ wide(x[s])).to(dweight.dtype)
        if needs[2]:
            dbias += wide(dlogits).sum(0)
    return dx, dweight, dbias


def _logits_with_rows(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    class_weights: Tensor | None,
    options: Sequence[float],
    ignore_index: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    line = -(-len(weight) // 64) * 64
    logits = x.new_empty(len(x), line)[:, : len(weight)]
    logits.copy_(F.linear(x, weight, None if bias is None else bias.to(x.dtype)))
    divided = _divided(logits, options)
    return logits, *_results_of(divided, targets, class_weights, options, ignore_index)


def _logit_grads_into(
    logits: Tensor,
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    class_weights: Tensor | None,
    lse: Tensor,
    dloss: Tensor,
    options: Sequence[float],
    ignore_index: int,
    first: int,
    vocab: int,
    need_dx: bool,
    dweight: Tensor | None,
    dbias: Tensor | None,
    begin: bool,
) -> Tensor:
    divided = _divided(logits, options)
    ends = options, ignore_index, first, vocab
    logits.copy_(_dlogits(divided, targets, class_weights, lse, lse, [dloss], *ends))
    if dweight is not None:
        product = (wide(logits).t() @ wide(x)).to(dweight.dtype)
        dweight.copy_(product if begin else dweight + product)
    if dbias is not None:
        dbias += wide(logits).sum(0)
    return logits @ weight if need_dx else x.new_empty(0)


def _linear_cross_entropy_grads(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    class_weights: Tensor | None,
    dloss: Tensor,
    options: Sequence[float],
    ignore_index: int,
    chunk_bytes: int,
    needs: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    args = x, weight, bias, targets, class_weights
    ends = options, ignore_index, chunk_bytes
    loss, lse, _, expected = _linear_cross_entropy_fwd(*args, *ends)
    with torch.no_grad():
        return loss, *_gradients(*args, lse, expected, [dloss], *ends, needs)


def _zeros(like: Tensor, dtype: torch.dtype, wanted: bool) -> Tensor:
    return torch.zeros(like.shape if wanted else (0,), dtype=dtype, device=like.device)


def _logits(x: Tensor, weight: Tensor, bias: Tensor | None, options: Sequence[float]) -> Tensor:
    """(n, V): the logits as a GEMM stores them, then capped and divided in the accumulator's dtype."""
    return _divided(F.linear(x, weight, None if bias is None else bias.to(x.dtype)), options)


def _divided(raw: Tensor, options: Sequence[float]) -> Tensor:
    loss, logits = Loss(*options), wide(raw)
    if loss.soft_cap:
        logits = loss.soft_cap * torch.tanh(logits / loss.soft_cap)
    return logits / loss.temperature if loss.temperature != 1 else logits


def _chosen(targets: Tensor, ignore_index: int, vocab: int) -> tuple[Tensor, Tensor, Tensor]:
    """(which rows count, their targets within the vocabulary, which targets lie outside of it)."""
    counts = targets != ignore_index
    outside = counts & ((targets < 0) | (targets >= vocab))
    return counts, targets.where(counts & ~outside, 0), outside


def _results_of(
    logits: Tensor,
    targets: Tensor,
    class_weights: Tensor | None,
    options: Sequence[float],
    ignore_index: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    loss, vocab = Loss(*options), logits.shape[1]
    counts, at, outside = _chosen(targets, ignore_index, vocab)
    lse = logits.logsumexp(1)
    logp = logits.gather(1, at[:, None]).squeeze(1) - lse
    p = torch.exp(logits - lse[:, None])
    expected = torch.where(p > 0, p * logits, 0).sum(1)
    hard, smooth = -logp, -(logits - lse[:, None]).sum(1)
    if class_weights is not None:
        weights = class_weights.to(logits.dtype)
        hard = hard * weights[at]
        smooth = -((logits - lse[:, None]) * weights).sum(1)
    rows = (1 - loss.smoothing) * hard + loss.z_loss * lse.square()
    if loss.smoothing:
        rows = rows + loss.smoothing / vocab * smooth
    nan = torch.full_like(rows, float("nan"))
    rows, logp = (torch.where(outside, nan, t) for t in (rows, logp))
    return rows.where(counts, 0), lse, logp.where(counts, 0), expected


def _dlogits(
    logits: Tensor,
    targets: Tensor,
    class_weights: Tensor | None,
    lse: Tensor,
    expected: Tensor,
    grads: Sequence[Tensor],
    options: Sequence[float],
    ignore_index: int,
    first: int = 0,
    vocab: int | None = None,
) -> Tensor:
    """The gradient of the logits that the GEMM gave, those of the classes from `first` on, of a `vocab`.

    grads: of loss, and maybe of lse, logp and expected
    """
    loss, width = Loss(*options), logits.shape[1]
    vocab = vocab or width
    counts, at, outside = _chosen(targets, ignore_index, vocab)
    dloss = torch.where(outside, float("nan"), grads[0].to(lse.dtype)).where(counts, 0)
    smooth = dloss * (loss.smoothing / vocab)
    hard, total = dloss * (1 - loss.smoothing), float(vocab)
    if class_weights is not None:
        weights = class_weights.to(logits.dtype)
        hard, total = hard * weights[at], weights.sum()  # type: ignore[assignment]
    every = hard + smooth * total + 2 * loss.z_loss * lse * dloss
    p = torch.exp(logits - lse[:, None])
    if len(grads) > 1:
        dlse, dlogp, dexpected = (g.to(lse.dtype) for g in grads[1:])
        dlogp = torch.where(outside, float("nan"), dlogp).where(counts, 0)
        every, hard = every + dlse - dlogp, hard - dlogp
        spread = dexpected[:, None] * (1 + logits - expected[:, None])
        d = torch.where(p > 0, p * (every[:, None] + spread), 0)
    else:
        d = p * every[:, None]
    if loss.smoothing:
        d = d - smooth[:, None] * (1 if class_weights is None else weights[first : first + width])
    at = at - first
    mine = (at >= 0) & (at < width)
    d = d.scatter_add(1, at.clamp(0, width - 1)[:, None], -hard.where(mine, 0)[:, None])
    if loss.soft_cap:
        d = d * (1 - (logits * (loss.temperature / loss.soft_cap)).square())
    return d / loss.temperature


LINE = 64  # rows of logits begin at multiples of so many elements, as tensor descriptors want them


def _candidates(dims: tuple[int, ...], itemsize: int) -> list[Config]:
    """Few rows at a time, so that the end of one is still cached when its gradient is made."""
    sizes = ((8192, 32), (2048, 8))
    return [
        {"BLOCK": pow2(dims[-1], most=2 * block // itemsize, least=16), "num_warps": warps}
        for block, warps in sizes
    ]


SPACE = Space("cross_entropy", _candidates)


SCALED = Space("scaled_to", lambda dims, itemsize: [{"BLOCK": 4096, "num_warps": 8}], dims=())


def _operands() -> Iterator[tuple[Any, ...]]:
    for dtype, vocab in ((torch.bfloat16, 128256), (torch.bfloat16, 50257), (torch.float16, 32000)):
        x = torch.empty(8192, 4096, dtype=dtype, device="meta")
        weight = torch.empty(vocab, 4096, dtype=dtype, device="meta")
        yield x, weight, None, torch.empty(8192, dtype=torch.int64, device="meta")


def _rows() -> Tensor:
    return torch.empty(8192, device="meta")


def _variants(vocab: int) -> Iterator[tuple[Tensor | None, list[float]]]:
    yield None, [0.0, 0.0, 0.0, 1.0]
    if vocab == 128256:
        yield torch.empty(vocab, device="meta"), [0.1, 1e-4, 30.0, 0.5]


def _cases_fwd() -> Iterator[tuple[Any, ...]]:
    for operands in _operands():
        for weights, options in _variants(len(operands[1])):
            yield *operands, weights, options, -100, 1 << 29


def _cases_bwd() -> Iterator[tuple[Any, ...]]:
    for operands in _operands():
        for weights, options in _variants(len(operands[1])):
            grads = [_rows()] * (1 if weights is None else 4)
            yield *operands, weights, _rows(), _rows(), grads, options, -100, 1 << 29, [True] * 3


def _cases_grads() -> Iterator[tuple[Any, ...]]:
    for operands in _operands():
        for weights, options in _variants(len(operands[1])):
            yield *operands, weights, _rows(), options, -100, 1 << 29, [True] * 3


def _flops(products: int) -> Any:
    """2 N D V operations for each of so many products."""

    def formula(x: tuple[int, ...], weight: tuple[int, ...], *_: Any, **__: Any) -> int:
        return 2 * products * x[0] * x[1] * weight[0]

    return formula


def _fake_fwd(x: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    a, b, c, d = (x.new_empty(x.shape[0], dtype=accumulator(x.dtype)) for _ in range(4))
    return a, b, c, d


def _fake_gradients(
    x: Tensor, weight: Tensor, needs: Sequence[bool], dtype: torch.dtype
) -> tuple[Tensor, Tensor, Tensor]:
    sums = accumulator(x.dtype)
    return (
        _empty(x, needs[0], x.dtype),
        _empty(weight, needs[1], dtype),
        _empty(weight[:, 0], needs[2], sums),
    )


def _fake_bwd(
    x: Tensor, weight: Tensor, *rest: Any, main_grad: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    if len(rest) > 10:
        main_grad = rest[10]
    needs = [w and not (place == 1 and main_grad is not None) for place, w in enumerate(rest[9])]
    return _fake_gradients(x, weight, needs, weight.dtype)


def _fake_grads(x: Tensor, weight: Tensor, *rest: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    sums = accumulator(x.dtype)
    loss = x.new_empty(x.shape[0], dtype=sums)
    return loss, *_fake_gradients(x, weight, rest[-1], sums)


@kernel_op(
    twin=_linear_cross_entropy_fwd,
    fake=_fake_fwd,
    flops=_flops(1),
    traces_twin=False,  # it counts its chunks by the number of rows
    cases=_cases_fwd,
)
def linear_cross_entropy_fwd(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    class_weights: Tensor | None,
    options: Sequence[float],
    ignore_index: int,
    chunk_bytes: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(loss, lse, logp, expected) of each row.

    options: label smoothing, z_loss, soft cap (0: none), temperature.
    """
    _check(x, weight, bias, targets, class_weights)
    rows = _row_results(x)
    total = _total(class_weights, x)
    for s, logits in _row_chunks(x, weight, bias, chunk_bytes):
        _launch(
            logits,
            targets[s],
            class_weights,
            total,
            [r[s] for r in rows],
            [],
            options,
            ignore_index,
        )
    return rows[0], rows[1], rows[2], rows[3]


@kernel_op(
    twin=_linear_cross_entropy_bwd,
    fake=_fake_bwd,
    flops=_flops(3),
    traces_twin=False,
    cases=_cases_bwd,
    mutates=("main_grad",),
)
def linear_cross_entropy_bwd(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    class_weights: Tensor | None,
    lse: Tensor,
    expected: Tensor,
    grads: Sequence[Tensor],
    options: Sequence[float],
    ignore_index: int,
    chunk_bytes: int,
    needs: Sequence[bool],
    main_grad: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dx, dweight, dbias), each if it is among `needs`.

    grads: the gradients of the rows' loss, or of loss, lse, logp and expected.
    main_grad: float32 (V, D), to which the weight's gradient is added; dweight is empty then.
    """
    _check(x, weight, bias, targets, class_weights)
    require(len(grads) in (1, 4), f"got {len(grads)} gradients, expected that of loss or all four.")
    lse, expected = lse.contiguous(), expected.contiguous()
    rows = [lse, lse, lse, expected]  # loss and logp are not written
    grads = [g.to(lse.dtype).contiguous() for g in grads]
    dx = _empty(x, needs[0], torch.float32)
    dweight = _empty(weight, needs[1] and main_grad is None, weight.dtype)
    dbias = _empty(weight[:, 0], needs[2], torch.float32)
    total = _total(class_weights, x)
    for s, logits in _class_chunks(x, weight, bias, chunk_bytes):
        _launch(
            logits,
            targets,
            class_weights,
            total,
            rows,
            grads,
            options,
            ignore_index,
            s.start,
            len(weight),
        )
        if needs[0]:
            add_product(dx, logits, weight[s], first=s.start == 0)
        if needs[1] and main_grad is not None:
            add_weight_grad(main_grad[s], logits, x)
        elif needs[1]:
            torch.mm(logits.t(), x, out=dweight[s])
        if needs[2]:
            dbias[s] = bias_bwd(logits)
    return dx.to(x.dtype), dweight, dbias


@kernel_op(
    twin=_linear_cross_entropy_grads,
    fake=_fake_grads,
    flops=_flops(3),
    traces_twin=False,
    cases=_cases_grads,
)
def linear_cross_entropy_grads(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    class_weights: Tensor | None,
    dloss: Tensor,
    options: Sequence[float],
    ignore_index: int,
    chunk_bytes: int,
    needs: Sequence[bool],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(loss, dx, dweight, dbias), where the gradient of each row's loss, `dloss`, is known beforehand."""
    _check(x, weight, bias, targets, class_weights)
    rows, dloss = _row_results(x), dloss.float().contiguous()
    dx, dweight = _empty(x, needs[0], x.dtype), _empty(weight, needs[1], torch.float32)
    dbias = torch.zeros(len(weight) if needs[2] else 0, dtype=torch.float32, device=x.device)
    total = _total(class_weights, x)
    for s, logits in _row_chunks(x, weight, bias, chunk_bytes):
        mine = [r[s] for r in rows]
        _launch(logits, targets[s], class_weights, total, mine, [dloss[s]], options, ignore_index)
        if needs[0]:
            torch.mm(logits, weight, out=dx[s])
        if needs[1]:
            add_weight_grad(dweight, logits, x[s], first=s.start == 0)
        if needs[2]:
            dbias += bias_bwd(logits)
    return rows[0], dx, dweight, dbias


def _logits_cases() -> Iterator[tuple[Any, ...]]:
    for operands in _operands():
        for weights, options in _variants(len(operands[1])):
            yield *operands, weights, options, -100


def _part_cases() -> Iterator[tuple[Any, ...]]:
    """A rank's half of the classes."""
    for x, weight, _, targets in _operands():
        held = len(weight)
        logits, bias = x.new_empty(len(x), held), torch.empty(held, device="meta")
        for weights, options in _variants(held):
            whole = None if weights is None else torch.empty(2 * held, device="meta")
            sums = torch.empty(weight.shape, device="meta"), bias
            rows = targets, whole, _rows(), _rows(), options, -100
            yield logits, x, weight, *rows, held, 2 * held, True, *sums, True


def _fake_logits(x: Tensor, weight: Tensor, *_: Any) -> tuple[Tensor, ...]:
    return _logits_buffer(x, weight), *_fake_fwd(x)


@kernel_op(
    twin=_logits_with_rows,
    fake=_fake_logits,
    flops=_flops(1),
    cases=_logits_cases,
    traces_twin=False,
)
def logits_with_rows(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    class_weights: Tensor | None,
    options: Sequence[float],
    ignore_index: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(logits as the GEMM stores them, loss, lse, logp, expected) of a chunk of tokens."""
    _check(x, weight, bias, targets, class_weights)
    logits = _product(x, weight, bias, _logits_buffer(x, weight))
    rows, total = _row_results(x), _total(class_weights, x)
    _launch(logits, targets, class_weights, total, rows, [], options, ignore_index)
    return logits, rows[0], rows[1], rows[2], rows[3]


@kernel_op(
    twin=_logit_grads_into,
    fake=lambda logits, x, *rest: x.new_empty(x.shape if rest[9] else (0,)),
    flops=lambda logits, x, weight, *_, **__: 4 * x[0] * x[1] * weight[0],
    cases=_part_cases,
    mutates=("logits", "dweight", "dbias"),
    traces_twin=False,
)
def logit_grads_into(
    logits: Tensor,
    x: Tensor,
    weight: Tensor,
    targets: Tensor,
    class_weights: Tensor | None,
    lse: Tensor,
    dloss: Tensor,
    options: Sequence[float],
    ignore_index: int,
    first: int,
    vocab: int,
    need_dx: bool,
    dweight: Tensor | None,
    dbias: Tensor | None,
    begin: bool,
) -> Tensor:
    """Write the gradients of logits (n, V) in their place: those of the classes from `first` on, of a `vocab`.   -> dx

    Adds to the sums dweight (V, D) and dbias (V,), float32, or with `begin` overwrites dweight.
    targets, class_weights and lse are of the whole vocabulary.  dloss: (n,), of the rows' loss
    """
    require(logits.stride(-1) == 1, f"logits have strides {logits.stride()}, expected rows.")
    rows = [lse.contiguous()] * 4  # read, as lse alone is
    grads, total = [dloss.to(lse.dtype).contiguous()], _total(class_weights, logits)
    ends = options, ignore_index, first, vocab
    _launch(logits, targets, class_weights, total, rows, grads, *ends)
    if dweight is not None:
        add_weight_grad(dweight, logits, x, first=begin)
    if dbias is not None:
        dbias += bias_bwd(logits)
    return torch.mm(logits, weight) if need_dx else x.new_empty(0)


def _scaled_cases() -> Iterator[tuple[Any, ...]]:
    scale = torch.empty((), device="meta")
    for made, dtype in (
        (torch.float32, torch.bfloat16),
        (torch.float32, torch.float16),
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.bfloat16),
        (torch.float16, torch.float16),
    ):
        yield torch.empty(8192, 4096, dtype=made, device="meta"), scale, dtype


@kernel_op(twin=_scaled_to, cases=_scaled_cases)
def scaled_to(t: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """t * scale, one number on the device, in another dtype, at the speed of memory, unlike torch.mul of two dtypes."""
    require(scale.numel() == 1, f"scale has shape {tuple(scale.shape)}, expected one number.")
    t = t.contiguous()
    y = torch.empty_like(t, dtype=dtype)
    config = SCALED.pick(t.numel(), (), t)
    grid = (cdiv(t.numel(), config["BLOCK"]),)
    launch(device("cross_entropy").scaled_to_kernel, grid, t, scale, y, t.numel(), **config)
    return y


def _empty(like: Tensor, wanted: bool, dtype: torch.dtype) -> Tensor:
    return torch.empty(like.shape if wanted else (0,), dtype=dtype, device=like.device)


def add_product(total: Tensor, a: Tensor, b: Tensor, first: bool = False) -> None:
    """total (float32) += a b, or = of the first: in one pass, without a rounding between."""
    if a.is_cuda and a.dtype != total.dtype:
        torch.addmm(total, a, b, out_dtype=total.dtype, beta=0 if first else 1, out=total)
    else:
        product = torch.mm(a.to(total.dtype), b.to(total.dtype))
        total.copy_(product) if first else total.add_(product)


def add_weight_grad(total: Tensor, dy: Tensor, x: Tensor, first: bool = False) -> None:
    """total (V, D) float32 += dy^T x, or = of the first, without a rounding between.   dy (n, V), x (n, D)

    On Hopper by the kernel of grouped GEMMs, whose tiles L2 adds while the next ones are multiplied: cuBLAS reads what
    it adds to, and everything waits for that.
    """
    own = dy.is_cuda and dy.dtype.itemsize == 2 and wgrad_path(dy, x) == "pingpong"
    if not own:
        add_product(total, dy.t(), x, first)
        return
    grouped_wgrad_into.launcher(total[None], dy, x, *one_group(len(x), x), not first)


def _check(
    x: Tensor, weight: Tensor, bias: Tensor | None, targets: Tensor, class_weights: Tensor | None
) -> None:
    n, d = x.shape
    vocab = len(weight)
    require(
        weight.shape == (vocab, d) and x.dtype == weight.dtype,
        f"x is {x.dtype} of shape {tuple(x.shape)} and weight {weight.dtype} of shape {tuple(weight.shape)}, "
        "expected (N, D) and (V, D) of one dtype.",
    )
    require(
        targets.shape == (n,) and targets.dtype == torch.int64,
        f"targets are {targets.dtype} of shape {tuple(targets.shape)}, expected int64 of shape ({n},).",
    )
    for name, t in (("bias", bias), ("class_weights", class_weights)):
        if t is not None and t.shape != (vocab,):
            raise FuseOpsError(f"{name} has shape {tuple(t.shape)}, expected ({vocab},).")


def _row_results(x: Tensor) -> list[Tensor]:
    return [torch.empty(len(x), dtype=torch.float32, device=x.device) for _ in range(4)]


def _total(class_weights: Tensor | None, x: Tensor) -> Tensor:
    """The sum of the class weights, which stays on the device; any tensor where there are none."""
    return x if class_weights is None else class_weights.sum(dtype=torch.float32).view(1)


def _row_chunks(
    x: Tensor, weight: Tensor, bias: Tensor | None, chunk_bytes: int
) -> Iterator[tuple[slice, Tensor]]:
    """(rows, all of their logits as the GEMM stores them), chunk after chunk in one buffer."""
    line = cdiv(len(weight), LINE) * LINE
    chunks = list(row_chunks(len(x), line, x.itemsize, chunk_bytes))
    buffer = x.new_empty(chunks[0].stop, line)
    for s in chunks:
        yield s, _product(x[s], weight, bias, buffer[: s.stop - s.start, : len(weight)])


def _class_chunks(
    x: Tensor, weight: Tensor, bias: Tensor | None, chunk_bytes: int
) -> Iterator[tuple[slice, Tensor]]:
    """(classes, their logits of all rows), chunk after chunk in one buffer."""
    chunks = list(row_chunks(len(weight), len(x), x.itemsize, chunk_bytes, whole=(128, 1)))
    buffer = x.new_empty(len(x), cdiv(chunks[0].stop, LINE) * LINE)
    for s in chunks:
        part = None if bias is None else bias[s]
        yield s, _product(x, weight[s], part, buffer[:, : s.stop - s.start])


def _logits_buffer(x: Tensor, weight: Tensor) -> Tensor:
    """Room for the logits of all classes, whose rows begin where tensor descriptors want them."""
    return x.new_empty(x.shape[0], cdiv(len(weight), LINE) * LINE)[:, : len(weight)]


def _product(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> Tensor:
    if bias is None:
        return torch.mm(x, weight.t(), out=out)
    return torch.addmm(bias.to(x.dtype), x, weight.t(), out=out)


def _launch(
    logits: Tensor,
    targets: Tensor,
    class_weights: Tensor | None,
    total: Tensor,
    rows: Sequence[Tensor],
    grads: Sequence[Tensor],
    options: Sequence[float],
    ignore_index: int,
    first: int = 0,
    vocab: int | None = None,
) -> None:
    """rows: loss, lse, logp and expected, written; read where the logits are those from `first` on of a `vocab`."""
    loss, width = Loss(*options), logits.shape[1]
    loss_rows, lse, logp, expected = rows
    dloss, dlse, dlogp, dexpected = [*grads, *(lse,) * (4 - len(grads))]
    weights = lse if class_weights is None else class_weights.contiguous()
    launch(
        device("cross_entropy").cross_entropy_kernel, (len(logits),),
        logits, targets.contiguous(), weights, total,
        loss_rows, lse, logp, expected, dloss, dlse, dlogp, dexpected,
        first, width, vocab or width, logits.stride(0), ignore_index,
        float(loss.smoothing), float(loss.z_loss), float(loss.soft_cap), 1.0 / loss.temperature,
        WEIGHTED=class_weights is not None, SMOOTHED=loss.smoothing != 0, CAPPED=loss.soft_cap != 0,
        STATISTICS=vocab is None, GRADIENT=bool(grads), OTHERS=len(grads) > 1,
        **SPACE.pick(len(logits), (width,), logits),
    )  # fmt: skip
