"""Kernels of fuseops.kernels.router_losses. BLOCK_E holds all experts of a token."""

import triton
import triton.language as tl

from fuseops.kernels.device.reduce import after_launch, apart, before_launch, row_dots
from fuseops.kernels.device.router import TINY, load_logits, scores_of, softmax_terms


@triton.jit(do_not_specialize=["T", "ROWS"])
def router_loss_kernel(
    logits_ptr, partial_ptr, T, E, ROWS, stride_logits,
    SOFTMAX: tl.constexpr, PDL: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """A program owns ROWS tokens: a row of partial is the sums of their shares, and behind them that
    of lse^2.
    """
    before_launch(PDL)
    program = tl.program_id(0)
    first = program.to(tl.int64) * ROWS
    last = tl.minimum(first + ROWS, T)
    cols = tl.arange(0, BLOCK_E)[None, :]
    shares = tl.zeros((BLOCK_R, BLOCK_E), dtype=tl.float32)
    squares = tl.zeros((BLOCK_R, 1), dtype=tl.float32)
    for start in range(0, ROWS, BLOCK_R):
        tokens = first + start + tl.arange(0, BLOCK_R)
        here = (tokens < last)[:, None]
        mask = here & (cols < E)
        logits = load_logits(logits_ptr + (tokens * stride_logits)[:, None] + cols, mask, cols, E)
        largest, total = softmax_terms(logits)
        scores = scores_of(logits, largest, total, SOFTMAX)
        if not SOFTMAX:
            scores = scores / (tl.sum(scores, axis=1)[:, None] + TINY)
        shares += tl.where(mask, scores, 0.0)
        lse = largest + tl.log(total)
        squares += tl.where(here, lse * lse, 0.0)
    at = partial_ptr + program.to(tl.int64) * (E + 1)
    tl.store(at + cols, tl.sum(shares, axis=0)[None, :], mask=cols < E)
    tl.store(at + E, tl.sum(squares))


@triton.jit(do_not_specialize=["P"])
def sum_loss_kernel(
    partial_ptr, counts_ptr, loss_ptr, P, E, balance, z,
    BALANCED: tl.constexpr, PDL: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """One program: the rows of partial (P, E + 1), weighted with the copies of each expert."""
    after_launch(PDL)
    cols = tl.arange(0, BLOCK_E)[None, :]
    squares = tl.zeros((BLOCK_P, 1), dtype=tl.float32)
    shares = tl.zeros((BLOCK_P, BLOCK_E), dtype=tl.float32)
    for start in range(0, P, BLOCK_P):
        rows = (start + tl.arange(0, BLOCK_P))[:, None]
        squares += tl.load(partial_ptr + rows * (E + 1) + E, mask=rows < P, other=0.0)
        mask = (rows < P) & (cols < E)
        shares += tl.load(partial_ptr + rows * (E + 1) + cols, mask=mask, other=0.0)
    loss = z * tl.sum(squares)
    if BALANCED:
        counts = tl.load(counts_ptr + cols, mask=cols < E, other=0).to(tl.float32)
        loss += balance * tl.sum(apart(tl.sum(shares, axis=0)[None, :], counts))
    tl.store(loss_ptr, loss)


@triton.jit(do_not_specialize=["T"])
def router_loss_bwd_kernel(
    dlogits_ptr, logits_ptr, counts_ptr, dloss_ptr, y_ptr, T, E, stride_logits, balance, z,
    SOFTMAX: tl.constexpr, BALANCED: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    tokens = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    cols = tl.arange(0, BLOCK_E)[None, :]
    mask = (tokens < T)[:, None] & (cols < E)
    logits = load_logits(logits_ptr + (tokens * stride_logits)[:, None] + cols, mask, cols, E)
    dloss = tl.load(dloss_ptr).to(tl.float32)
    largest, total = softmax_terms(logits)
    shares = scores_of(logits, largest, total, True)
    d = 2.0 * z * (largest + tl.log(total)) * shares
    if BALANCED:
        slope = balance * tl.load(counts_ptr + cols, mask=cols < E, other=0).to(tl.float32)
        if SOFTMAX:
            d += shares * (slope - row_dots(slope, shares)[:, None])
        else:
            scores = scores_of(logits, largest, total, False)
            whole = tl.sum(scores, axis=1)[:, None] + TINY
            mean = row_dots(slope, scores)[:, None] / whole
            d += (slope - mean) / whole * scores * (1.0 - scores)
    at = (tokens * E)[:, None] + cols
    y = tl.load(dlogits_ptr + at, mask=mask, other=0.0) + dloss * d
    tl.store(y_ptr + at, y, mask=mask)
