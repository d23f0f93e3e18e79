"""Cross entropy of a linear layer's logits, which are computed in chunks.

The loss is computed in chunks of rows, since it needs all logits of a row. Gradients that are computed later, from lse,
are in chunks of classes: the weight's gradient is written once, and the chunks are summed into dx, which is smaller.

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
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from fuseops.errors import FuseOpsError
from fuseops.kernels.bias import bias_bwd
from fuseops.kernels.configs import Config, Space
from fuseops.kernels.grouped import gemm_op, grouped_wgrad_into, one_group
from fuseops.kernels.grouped_paths import wgrad_choice
from fuseops.kernels.launch import device, launch
from fuseops.kernels.records import Arguments, of_fields
from fuseops.kernels.registry import Cases, floats, kernel_op, on_meta
from fuseops.kernels.tiles import accumulator, cdiv, check_spec, pointers, pow2, upcast


class Loss(NamedTuple):
    """A `Loss` holds the options of the loss, in the order in which the kernels take them."""

    smoothing: float = 0.0
    z_loss: float = 0.0
    soft_cap: float = 0.0  # 0: none
    temperature: float = 1.0


ROW_MULTIPLES = (1024, 512, 256, 1)
"""Multiples of rows that fill tiles, and waves of 132 multiprocessors in an input gradient of 4096 columns (1024). Not
128: for 13 times as many rows cuBLAS picks tiles that leave half of a wave idle, and takes a tenth longer."""


def row_chunks(
    rows: int,
    vocab: int,
    itemsize: int,
    chunk_bytes: int,
    multiples: tuple[int, ...] = ROW_MULTIPLES,
) -> Iterator[slice]:
    """The fewest slices of rows whose logits take at most `chunk_bytes` each; all but the last are equal.

    Their size is a multiple of the first of `multiples` that needs no further slice. For no rows one empty slice.
    """
    most = max(chunk_bytes // max(vocab * itemsize, 1), 1)
    each = max(-(-rows // max(-(-rows // most), 1)), 1)
    rounded = (-(-each // unit) * unit for unit in multiples)
    each = next((found for found in rounded if found <= most), most)
    return (slice(start, min(start + each, rows)) for start in range(0, max(rows, 1), each))


def _scaled_to(t: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    return (upcast(t) * scale).to(dtype)


@dataclass
class Head(Arguments):
    """A `Head` has the operands of a linear layer and of the loss of its logits.

    options  label smoothing, z_loss, soft cap (0: none), temperature
    """

    x: Tensor
    weight: Tensor
    bias: Tensor | None
    targets: Tensor
    class_weights: Tensor | None
    options: Sequence[float]
    ignore_index: int

    first: ClassVar[int] = 0
    vocab: ClassVar[int | None] = None  # all classes are there


@dataclass
class ChunkedHead(Head):
    """A `ChunkedHead` is a `Head` whose logits are at most so many bytes at a time."""

    chunk_bytes: int


@dataclass
class HeadGradient(ChunkedHead):
    """A `HeadGradient` has the operands of the gradients of a `ChunkedHead`, each if it is among `needs`.

    grads      of the rows' loss, or of loss, lse, logp and expected
    main_grad  float32 (V, D), to which the weight's gradient is added; dweight is empty then
    """

    lse: Tensor
    expected: Tensor
    grads: Sequence[Tensor]
    needs: Sequence[bool]
    main_grad: Tensor | None = None


@dataclass
class HeadAtOnce(ChunkedHead):
    """A `HeadAtOnce` has the operands of a loss and its gradients in one pass, for known gradients `dloss` of the
    rows.
    """

    dloss: Tensor
    needs: Sequence[bool]


@dataclass
class LocalClasses(Arguments):
    """`LocalClasses` are the operands of the gradients of logits (n, V) of the classes from `first` on, of a `vocab`.

    targets, class_weights and lse are of the whole vocabulary.
    dloss           (n,), of the rows' loss
    dweight, dbias  (V, D) and (V,), float32 sums that are added to; with `begin` dweight is overwritten
    """

    x: Tensor
    weight: Tensor
    targets: Tensor
    class_weights: Tensor | None
    lse: Tensor
    dloss: Tensor
    options: Sequence[float]
    ignore_index: int
    first: int
    vocab: int
    need_dx: bool
    dweight: Tensor | None
    dbias: Tensor | None
    begin: bool


Criterion = Head | LocalClasses
"""A record with the class weights, the options and the ignore_index of the loss."""


def _linear_cross_entropy_fwd(p: ChunkedHead) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    parts = [
        _results_of(_logits(p, s), p.targets[s], p)
        for s in row_chunks(len(p.x), len(p.weight), p.x.itemsize, p.chunk_bytes)
    ]
    loss, lse, logp, expected = (torch.cat(part) for part in zip(*parts, strict=True))
    return loss, lse, logp, expected


def _linear_cross_entropy_bwd(p: HeadGradient) -> tuple[Tensor, Tensor, Tensor]:
    dx, dweight, dbias = _gradients(p, p.lse, p.expected, p.grads, p.main_grad)
    return dx, dweight.to(p.weight.dtype) if p.main_grad is None else p.x.new_empty(0), dbias


def _linear_cross_entropy_grads(p: HeadAtOnce) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    loss, lse, _, expected = _linear_cross_entropy_fwd(p)
    with torch.no_grad():
        return loss, *_gradients(p, lse, expected, [p.dloss])


def _gradients(
    p: HeadGradient | HeadAtOnce,
    lse: Tensor,
    expected: Tensor,
    grads: Sequence[Tensor],
    main_grad: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """dx, and the sums of dweight (or main_grad, with them added) and dbias unrounded."""
    x, weight, dtype = p.x, p.weight, accumulator(p.x.dtype)
    need_dx, need_dweight, need_dbias = p.needs
    dx, dweight, dbias = [], main_grad, None
    for s in row_chunks(len(x), len(weight), x.itemsize, p.chunk_bytes):
        rows = lse[s], expected[s], [g[s] for g in grads]
        dlogits = _dlogits(_logits(p, s), p.targets[s], p, *rows).to(x.dtype)
        if need_dx:
            dx.append(dlogits @ weight)
        if need_dweight:
            dweight = _accumulate(dweight, (upcast(dlogits).t() @ upcast(x[s])).to(dtype))
        if need_dbias:
            dbias = _accumulate(dbias, upcast(dlogits).sum(0))
    dweight, dbias = (x.new_empty(0, dtype=dtype) if t is None else t for t in (dweight, dbias))
    return torch.cat(dx) if need_dx else x.new_empty(0), dweight, dbias


def _accumulate(total: Tensor | None, part: Tensor) -> Tensor:
    """total + part, in place; None + part is part, which may have a batch axis under is_grads_batched."""
    return part if total is None else total.add_(part)


def _logits_with_rows(p: Head) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    logits = logits_buffer(p.x, len(p.weight))
    logits.copy_(F.linear(p.x, p.weight, None if p.bias is None else p.bias.to(p.x.dtype)))
    return logits, *_results_of(_cap_and_scale(logits, p.options), p.targets, p)


def _logit_grads_into(logits: Tensor, p: LocalClasses) -> Tensor:
    divided, rows = _cap_and_scale(logits, p.options), (p.lse, p.lse, [p.dloss])
    logits.copy_(_dlogits(divided, p.targets, p, *rows))
    if p.dweight is not None:
        product = (upcast(logits).t() @ upcast(p.x)).to(p.dweight.dtype)
        p.dweight.copy_(product if p.begin else p.dweight + product)
    if p.dbias is not None:
        p.dbias += upcast(logits).sum(0)
    return logits @ p.weight if p.need_dx else p.x.new_empty(0)


def _logits(p: Head, rows: slice) -> Tensor:
    """(n, V): the logits as a GEMM stores them, then capped and divided in the accumulator's dtype."""
    bias = None if p.bias is None else p.bias.to(p.x.dtype)
    return _cap_and_scale(F.linear(p.x[rows], p.weight, bias), p.options)


def _cap_and_scale(raw: Tensor, options: Sequence[float]) -> Tensor:
    loss, logits = Loss(*options), upcast(raw)
    if loss.soft_cap:
        logits = loss.soft_cap * torch.tanh(logits / loss.soft_cap)
    return logits / loss.temperature if loss.temperature != 1 else logits


def _target_masks(targets: Tensor, c: Criterion, vocab: int) -> tuple[Tensor, Tensor, Tensor]:
    """(mask of rows that count, their targets in the vocabulary, mask of targets outside of it)."""
    counts = targets != c.ignore_index
    outside = counts & ((targets < 0) | (targets >= vocab))
    return counts, targets.where(counts & ~outside, 0), outside


def _results_of(
    logits: Tensor, targets: Tensor, c: Criterion
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    loss, vocab = Loss(*c.options), logits.shape[1]
    counts, at, outside = _target_masks(targets, c, vocab)
    lse = logits.logsumexp(1)
    logp = logits.gather(1, at[:, None]).squeeze(1) - lse
    p = torch.exp(logits - lse[:, None])
    expected = torch.where(p > 0, p * logits, 0).sum(1)
    hard, smooth = -logp, -(logits - lse[:, None]).sum(1)
    if c.class_weights is not None:
        weights = c.class_weights.to(logits.dtype)
        hard = hard * weights[at]
        smooth = -((logits - lse[:, None]) * weights).sum(1)
    rows = (1 - loss.smoothing) * hard + loss.z_loss * lse * lse
    if loss.smoothing:
        rows = rows + loss.smoothing / vocab * smooth
    nan = torch.full_like(rows, float("nan"))
    rows, logp = (torch.where(outside, nan, t) for t in (rows, logp))
    return rows.where(counts, 0), lse, logp.where(counts, 0), expected


def _dlogits(
    logits: Tensor,
    targets: Tensor,
    c: Criterion,
    lse: Tensor,
    expected: Tensor,
    grads: Sequence[Tensor],
) -> Tensor:
    """The gradient of the logits that the GEMM gave.   grads: of loss, and maybe of lse, logp and expected"""
    loss, width, first = Loss(*c.options), logits.shape[1], c.first
    vocab = c.vocab or width
    counts, at, outside = _target_masks(targets, c, vocab)
    dloss = torch.where(outside, float("nan"), grads[0].to(lse.dtype)).where(counts, 0)
    smooth = dloss * (loss.smoothing / vocab)
    hard, total = dloss * (1 - loss.smoothing), float(vocab)
    if c.class_weights is not None:
        weights = c.class_weights.to(logits.dtype)
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
        d = d - smooth[:, None] * (1 if c.class_weights is None else weights[first : first + width])
    at = at - first
    mine = (at >= 0) & (at < width)
    d = d.scatter_add(1, at.clamp(0, width - 1)[:, None], -hard.where(mine, 0)[:, None])
    if loss.soft_cap:
        d = d * (1 - (logits * (loss.temperature / loss.soft_cap)).square())
    return d / loss.temperature


LINE = 64  # rows of logits begin at multiples of this number of elements, for tensor descriptors


def _candidates(dims: tuple[int, ...], itemsize: int) -> list[Config]:
    """Few rows at a time, so that the end of one is still cached when its gradient is made."""
    sizes = ((8192, 32), (2048, 8))
    return [
        {"BLOCK": pow2(dims[-1], most=2 * block // itemsize, least=16), "num_warps": warps}
        for block, warps in sizes
    ]


SPACE = Space("cross_entropy", _candidates)
SCALED = Space("scaled_to", [{"BLOCK": 4096, "num_warps": 8}], dims=())


def _cases_fwd() -> Cases:
    for dtype, vocab in ((torch.bfloat16, 128256), (torch.bfloat16, 50257), (torch.float16, 32000)):
        x, weight = on_meta(8192, 4096, dtype=dtype), on_meta(vocab, 4096, dtype=dtype)
        head = x, weight, None, on_meta(8192, dtype=torch.int64)
        yield *head, None, [0.0, 0.0, 0.0, 1.0], -100, 1 << 29
        if vocab == 128256:
            yield *head, floats(vocab), [0.1, 1e-4, 30.0, 0.5], -100, 1 << 29


def _cases_bwd() -> Cases:
    row = floats(8192)
    for head in _cases_fwd():
        yield *head, row, row, [row] * (1 if head[4] is None else 4), [True] * 3


def _cases_grads() -> Cases:
    for head in _cases_fwd():
        yield *head, floats(8192), [True] * 3


def _flops(products: int) -> Any:
    """2 N D V operations for each of so many products."""
    return lambda x, weight, *_: 2 * products * x.numel() * weight.shape[0]


def _fake_rows(x: Tensor, *_: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    a, b, c, d = (x.new_empty(x.shape[0], dtype=accumulator(x.dtype)) for _ in range(4))
    return a, b, c, d


def _fake_gradients(
    p: HeadGradient | HeadAtOnce, dtype: torch.dtype, need_dweight: bool
) -> tuple[Tensor, Tensor, Tensor]:
    return (
        _empty(p.x, p.needs[0], p.x.dtype),
        _empty(p.weight, need_dweight, dtype),
        _empty(p.weight[:, 0], p.needs[2], accumulator(p.x.dtype)),
    )


def _fake_bwd(p: HeadGradient) -> tuple[Tensor, Tensor, Tensor]:
    return _fake_gradients(p, p.weight.dtype, p.needs[1] and p.main_grad is None)


def _fake_grads(p: HeadAtOnce) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    loss, *_ = _fake_rows(p.x)
    return loss, *_fake_gradients(p, loss.dtype, p.needs[1])


@gemm_op(twin=_linear_cross_entropy_fwd, fake=_fake_rows, flops=_flops(1), cases=_cases_fwd)
@of_fields(ChunkedHead)
def linear_cross_entropy_fwd(p: ChunkedHead) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(loss, lse, logp, expected) of each row."""
    _check(p)
    rows, total = _row_results(p.x), _total(p.class_weights, p.x)
    for s, logits in _row_chunks(p):
        _launch(logits, p.targets[s], p, total, [r[s] for r in rows], [])
    return rows[0], rows[1], rows[2], rows[3]


@gemm_op(
    twin=_linear_cross_entropy_bwd,
    fake=_fake_bwd,
    flops=_flops(3),
    cases=_cases_bwd,
    mutates=("main_grad",),
)
@of_fields(HeadGradient)
def linear_cross_entropy_bwd(p: HeadGradient) -> tuple[Tensor, Tensor, Tensor]:
    """(dx, dweight, dbias), each if it is among `needs`."""
    _check(p)
    x, weight, count = p.x, p.weight, len(p.grads)
    if count not in (1, 4):
        raise FuseOpsError(f"got {count} gradients, expected that of loss or all four.")
    lse, expected = p.lse.contiguous(), p.expected.contiguous()
    rows = [lse, lse, lse, expected]  # loss and logp are not written
    grads = [g.to(lse.dtype).contiguous() for g in p.grads]
    need_dx, need_dweight, need_dbias = p.needs
    dx = _empty(x, need_dx, torch.float32)
    dweight = _empty(weight, need_dweight and p.main_grad is None, weight.dtype)
    dbias = _empty(weight[:, 0], need_dbias, torch.float32)
    total = _total(p.class_weights, x)
    for s, logits in _class_chunks(p):
        _launch(logits, p.targets, p, total, rows, grads, s.start, len(weight))
        if need_dx:
            add_product(dx, logits, weight[s], first=s.start == 0)
        if need_dweight and p.main_grad is not None:
            add_weight_grad(p.main_grad[s], logits, x)
        elif need_dweight:
            torch.mm(logits.t(), x, out=dweight[s])
        if need_dbias:
            dbias[s] = bias_bwd(logits)
    return dx.to(x.dtype), dweight, dbias


@gemm_op(twin=_linear_cross_entropy_grads, fake=_fake_grads, flops=_flops(3), cases=_cases_grads)
@of_fields(HeadAtOnce)
def linear_cross_entropy_grads(p: HeadAtOnce) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(loss, dx, dweight, dbias), where the gradient of each row's loss, `dloss`, is known beforehand."""
    _check(p)
    rows, dloss = _row_results(p.x), p.dloss.float().contiguous()
    total = _total(p.class_weights, p.x)
    need_dx, need_dweight, need_dbias = p.needs
    dx, dweight = _empty(p.x, need_dx, p.x.dtype), _empty(p.weight, need_dweight, torch.float32)
    dbias = torch.zeros(len(p.weight) if need_dbias else 0, dtype=torch.float32, device=p.x.device)
    for s, logits in _row_chunks(p):
        _launch(logits, p.targets[s], p, total, [r[s] for r in rows], [dloss[s]])
        if need_dx:
            torch.mm(logits, p.weight, out=dx[s])
        if need_dweight:
            add_weight_grad(dweight, logits, p.x[s], first=s.start == 0)
        if need_dbias:
            dbias += bias_bwd(logits)
    return rows[0], dx, dweight, dbias


def _part_cases() -> Cases:
    """A rank's half of the classes."""
    row = floats(8192)
    for x, weight, _, targets, weights, options, ignored, _ in _cases_fwd():
        held = len(weight)
        whole = None if weights is None else floats(2 * held)
        rows = targets, whole, row, row, options, ignored, held, 2 * held
        sums = floats(*weight.shape), floats(held)
        yield x.new_empty(len(x), held), x, weight, *rows, True, *sums, True


def _fake_dx(logits: Tensor, p: LocalClasses) -> Tensor:
    return _empty(p.x, p.need_dx, p.x.dtype)


@gemm_op(
    twin=_logits_with_rows,
    fake=lambda x, weight, *_: (logits_buffer(x, len(weight)), *_fake_rows(x)),
    flops=_flops(1),
    cases=lambda: (case[:-1] for case in _cases_fwd()),
)
@of_fields(Head)
def logits_with_rows(p: Head) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(logits as the GEMM stores them, loss, lse, logp, expected) of a chunk of tokens."""
    _check(p)
    logits = _product(p.x, p.weight, p.bias, logits_buffer(p.x, len(p.weight)))
    rows = _row_results(p.x)
    _launch(logits, p.targets, p, _total(p.class_weights, p.x), rows, [])
    return logits, rows[0], rows[1], rows[2], rows[3]


@gemm_op(
    twin=_logit_grads_into,
    fake=_fake_dx,
    flops=lambda logits, x, weight, *_: 4 * x.numel() * weight.shape[0],
    cases=_part_cases,
    mutates=("logits", "dweight", "dbias"),
)
@of_fields(LocalClasses)
def logit_grads_into(logits: Tensor, p: LocalClasses) -> Tensor:
    """Write the gradients of logits in their place, and add to the sums dweight and dbias.   -> dx, if it is needed"""
    if logits.stride(-1) != 1:
        raise FuseOpsError(f"logits have strides {logits.stride()}, expected rows.")
    lse = p.lse.contiguous()
    rows, grads = [lse] * 4, [p.dloss.to(lse.dtype).contiguous()]  # rows are read, as lse alone is
    total = _total(p.class_weights, logits)
    _launch(logits, p.targets, p, total, rows, grads, p.first, p.vocab)
    if p.dweight is not None:
        add_weight_grad(p.dweight, logits, p.x, first=p.begin)
    if p.dbias is not None:
        p.dbias += bias_bwd(logits)
    return torch.mm(logits, p.weight) if p.need_dx else p.x.new_empty(0)


def _scaled_cases() -> Cases:
    scale = floats()
    for made, dtype in (
        (torch.float32, torch.bfloat16),
        (torch.float32, torch.float16),
        (torch.float32, torch.float32),
        (torch.bfloat16, torch.bfloat16),
        (torch.float16, torch.float16),
    ):
        yield on_meta(8192, 4096, dtype=made), scale, dtype


@kernel_op(twin=_scaled_to, cases=_scaled_cases)
def scaled_to(t: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """t * scale, one number on the device, in another dtype, at the speed of memory, unlike torch.mul of two dtypes."""
    if scale.numel() != 1:
        raise FuseOpsError(f"scale has shape {tuple(scale.shape)}, expected one number.")
    t = t.contiguous()
    y = torch.empty_like(t, dtype=dtype)
    config = SCALED.pick(t.numel(), (), t)
    grid = (cdiv(t.numel(), config["BLOCK"]),)
    launch(device("cross_entropy").scaled_to_kernel, grid, t, scale, y, t.numel(), **config)
    return y


def _empty(like: Tensor, wanted: bool, dtype: torch.dtype) -> Tensor:
    return torch.empty(like.shape if wanted else (0,), dtype=dtype, device=like.device)


def add_product(total: Tensor, a: Tensor, b: Tensor, first: bool = False) -> None:
    """total (float32) += a b, or = with `first`, in one pass, without rounding the product."""
    if a.is_cuda and a.dtype != total.dtype:
        torch.addmm(total, a, b, out_dtype=total.dtype, beta=0 if first else 1, out=total)
    else:
        product = torch.mm(a.to(total.dtype), b.to(total.dtype))
        total.copy_(product) if first else total.add_(product)


def add_weight_grad(total: Tensor, dy: Tensor, x: Tensor, first: bool = False) -> None:
    """total (V, D) float32 += dy^T x, or = with `first`, without rounding the product.   dy (n, V), x (n, D)

    On Hopper by the kernel of grouped GEMMs, which adds tiles in L2 while it multiplies the next ones; cuBLAS waits for
    reads of `total`.
    """
    own = dy.is_cuda and dy.dtype.itemsize == 2 and wgrad_choice(dy, x).path == "pingpong"
    if not own:
        add_product(total, dy.t(), x, first)
        return
    grouped_wgrad_into.launcher(total[None], dy, x, *one_group(len(x), x), not first)


def _check(p: Head) -> None:
    check_spec(
        vars(p), "x (N, D), weight (V, D), bias (V,), targets (N,) int64, class_weights (V,)"
    )
    if p.x.dtype != p.weight.dtype:
        raise FuseOpsError(f"x is {p.x.dtype} and weight {p.weight.dtype}, expected one dtype.")


def _row_results(x: Tensor) -> list[Tensor]:
    return [torch.empty(len(x), dtype=torch.float32, device=x.device) for _ in range(4)]


def _total(class_weights: Tensor | None, x: Tensor) -> Tensor:
    """The sum of the class weights, which stays on the device; any tensor where there are none."""
    return x if class_weights is None else class_weights.sum(dtype=torch.float32).view(1)


def _row_chunks(p: ChunkedHead) -> Iterator[tuple[slice, Tensor]]:
    """(rows, all of their logits as the GEMM stores them), chunk after chunk in one buffer."""
    x, line = p.x, cdiv(len(p.weight), LINE) * LINE
    chunks = list(row_chunks(len(x), line, x.itemsize, p.chunk_bytes))
    buffer = logits_buffer(x[chunks[0]], len(p.weight))
    for s in chunks:
        yield s, _product(x[s], p.weight, p.bias, buffer[: s.stop - s.start])


def _class_chunks(p: HeadGradient) -> Iterator[tuple[slice, Tensor]]:
    """(classes, their logits of all rows), chunk after chunk in one buffer."""
    x = p.x
    chunks = list(row_chunks(len(p.weight), len(x), x.itemsize, p.chunk_bytes, multiples=(128, 1)))
    buffer = logits_buffer(x, chunks[0].stop)
    for s in chunks:
        bias = None if p.bias is None else p.bias[s]
        yield s, _product(x, p.weight[s], bias, buffer[:, : s.stop - s.start])


def logits_buffer(x: Tensor, classes: int) -> Tensor:
    """A buffer for the logits of tokens x, with rows aligned for tensor descriptors."""
    # a CPU's product of bfloat16 multiplies the padding between rows by zero, so it must be finite
    allocate = x.new_empty if x.is_cuda else x.new_zeros
    return allocate(x.shape[0], cdiv(classes, LINE) * LINE)[:, :classes]


def _product(x: Tensor, weight: Tensor, bias: Tensor | None, out: Tensor) -> Tensor:
    if bias is None:
        return torch.mm(x, weight.t(), out=out)
    return torch.addmm(bias.to(x.dtype), x, weight.t(), out=out)


def _launch(
    logits: Tensor,
    targets: Tensor,
    c: Criterion,
    total: Tensor,
    rows: Sequence[Tensor],
    grads: Sequence[Tensor],
    first: int = 0,
    vocab: int | None = None,
) -> None:
    """Launch the kernel.   rows: loss, lse, logp and expected: outputs, or inputs where logits are of the classes from
    `first` on, of a `vocab`.
    """
    loss, width = Loss(*c.options), logits.shape[1]
    loss_rows, lse, logp, expected = rows
    dloss, dlse, dlogp, dexpected = [*grads, *(lse,) * (4 - len(grads))]
    launch(
        device("cross_entropy").cross_entropy_kernel, (len(logits),),
        logits, *pointers(lse, targets, c.class_weights), total,
        loss_rows, lse, logp, expected, dloss, dlse, dlogp, dexpected,
        first, width, vocab or width, logits.stride(0), c.ignore_index,
        float(loss.smoothing), float(loss.z_loss), float(loss.soft_cap), 1.0 / loss.temperature,
        WEIGHTED=c.class_weights is not None, SMOOTHED=loss.smoothing != 0, CAPPED=loss.soft_cap != 0,
        STATISTICS=vocab is None, GRADIENT=bool(grads), STATISTICS_GRADS=len(grads) > 1,
        **SPACE.pick(len(logits), (width,), logits),
    )  # fmt: skip
