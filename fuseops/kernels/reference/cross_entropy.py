"""Reference of `fuseops.kernels.cross_entropy`, in chunks of rows as there, so that no backend holds all logits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from .precision import accumulator, wide


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


def scaled_to(t: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """t * scale in another dtype, of one number."""
    return (wide(t) * scale).to(dtype)


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
    """(loss, lse, logp, expected) of each row: see the kernel."""
    parts = [
        _row_results(
            _logits(x[s], weight, bias, options), targets[s], class_weights, options, ignore_index
        )
        for s in row_chunks(len(x), len(weight), x.itemsize, chunk_bytes)
    ]
    loss, lse, logp, expected = (torch.cat(part) for part in zip(*parts, strict=True))
    return loss, lse, logp, expected


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
    """(dx, dweight, dbias) from the gradients of the row results: see the kernel."""
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


def logits_with_rows(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    targets: Tensor,
    class_weights: Tensor | None,
    options: Sequence[float],
    ignore_index: int,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """(logits, loss, lse, logp, expected): see the kernel."""
    line = -(-len(weight) // 64) * 64
    logits = x.new_empty(len(x), line)[:, : len(weight)]
    logits.copy_(F.linear(x, weight, None if bias is None else bias.to(x.dtype)))
    divided = _divided(logits, options)
    return logits, *_row_results(divided, targets, class_weights, options, ignore_index)


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
    """The gradients of the logits, in their place: see the kernel.   -> dx"""
    divided = _divided(logits, options)
    ends = options, ignore_index, first, vocab
    logits.copy_(_dlogits(divided, targets, class_weights, lse, lse, [dloss], *ends))
    if dweight is not None:
        product = (wide(logits).t() @ wide(x)).to(dweight.dtype)
        dweight.copy_(product if begin else dweight + product)
    if dbias is not None:
        dbias += wide(logits).sum(0)
    return logits @ weight if need_dx else x.new_empty(0)


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
    """(loss, dx, dweight, dbias) where the gradient of each row's loss is known beforehand: see the kernel."""
    args = x, weight, bias, targets, class_weights
    ends = options, ignore_index, chunk_bytes
    loss, lse, _, expected = linear_cross_entropy_fwd(*args, *ends)
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


def _row_results(
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
