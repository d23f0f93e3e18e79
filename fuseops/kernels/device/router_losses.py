"""Kernels of the router's losses (balance, z): two launches forward, partial sums and their reduction, one backward.
Triton, sm_80 and later. BLOCK_E holds all experts of a token.
"""

import triton
import triton.language as tl

from fuseops.kernels.device.reduce import mul_rn, pdl_trigger, pdl_wait, row_dots
from fuseops.kernels.device.router import TINY, load_logits, scores_of, softmax_stats


@triton.jit(do_not_specialize=["T", "ROWS"])
def router_loss_kernel(
    logits_ptr, partial_ptr, T, E, ROWS, stride_logits,
    SOFTMAX: tl.constexpr, PDL: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """Sum the shares of experts and lse^2 over ROWS tokens a program.   -> a row of partial (programs, E + 1): the sums
    of the shares, then that of lse^2
    """
    pdl_trigger(PDL)
    program = tl.program_id(0)
    first_token = program.to(tl.int64) * ROWS
    end_token = tl.minimum(first_token + ROWS, T)
    cols = tl.arange(0, BLOCK_E)[None, :]
    shares = tl.zeros((BLOCK_R, BLOCK_E), dtype=tl.float32)
    squares = tl.zeros((BLOCK_R, 1), dtype=tl.float32)
    for start in range(0, ROWS, BLOCK_R):
        tokens = first_token + start + tl.arange(0, BLOCK_R)
        row_mask = (tokens < end_token)[:, None]
        mask = row_mask & (cols < E)
        logits = load_logits(logits_ptr + (tokens * stride_logits)[:, None] + cols, mask, cols, E)
        row_max, row_sum = softmax_stats(logits)
        scores = scores_of(logits, row_max, row_sum, SOFTMAX)
        if not SOFTMAX:
            scores = scores / (tl.sum(scores, axis=1)[:, None] + TINY)
        shares += tl.where(mask, scores, 0.0)
        lse = row_max + tl.log(row_sum)
        squares += tl.where(row_mask, lse * lse, 0.0)
    partial_row = partial_ptr + program.to(tl.int64) * (E + 1)
    tl.store(partial_row + cols, tl.sum(shares, axis=0)[None, :], mask=cols < E)
    tl.store(partial_row + E, tl.sum(squares))


@triton.jit(do_not_specialize=["P"])
def sum_loss_kernel(
    partial_ptr, counts_ptr, loss_ptr, P, E, balance, z,
    BALANCED: tl.constexpr, PDL: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """Reduce partial (P, E + 1) in one program, in a fixed order: loss = z * sum(lse^2) + balance * sum(counts *
    shares).
    """
    pdl_wait(PDL)
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
        loss += balance * tl.sum(mul_rn(tl.sum(shares, axis=0)[None, :], counts))
    tl.store(loss_ptr, loss)


@triton.jit(do_not_specialize=["T"])
def router_loss_bwd_kernel(
    dlogits_ptr, logits_ptr, counts_ptr, dloss_ptr, y_ptr, T, E, stride_logits, balance, z,
    SOFTMAX: tl.constexpr, BALANCED: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """Add the gradient of both losses to dlogits (T, E), BLOCK_R tokens a program; their shares and lse are computed
    again.
    """
    tokens = tl.program_id(0).to(tl.int64) * BLOCK_R + tl.arange(0, BLOCK_R)
    cols = tl.arange(0, BLOCK_E)[None, :]
    mask = (tokens < T)[:, None] & (cols < E)
    logits = load_logits(logits_ptr + (tokens * stride_logits)[:, None] + cols, mask, cols, E)
    dloss = tl.load(dloss_ptr).to(tl.float32)
    row_max, row_sum = softmax_stats(logits)
    shares = scores_of(logits, row_max, row_sum, True)
    grad = 2.0 * z * (row_max + tl.log(row_sum)) * shares
    if BALANCED:
        dshares = balance * tl.load(counts_ptr + cols, mask=cols < E, other=0).to(tl.float32)
        if SOFTMAX:
            grad += shares * (dshares - row_dots(dshares, shares)[:, None])
        else:
            scores = scores_of(logits, row_max, row_sum, False)
            score_sum = tl.sum(scores, axis=1)[:, None] + TINY
            mean_dshare = row_dots(dshares, scores)[:, None] / score_sum
            grad += (dshares - mean_dshare) / score_sum * scores * (1.0 - scores)
    offsets = (tokens * E)[:, None] + cols
    y = tl.load(dlogits_ptr + offsets, mask=mask, other=0.0) + dloss * grad
    tl.store(y_ptr + offsets, y, mask=mask)
