"""The router's backward. Triton, sm_80 and later. BLOCK_E holds all experts of a token.

A program owns BLOCK_R tokens: it stores whole rows of dlogits, then scatters the K entries of the chosen experts over
them. A barrier between the two orders these stores to the same addresses. Tiles of the chosen (BLOCK_R, BLOCK_K) are
loaded flat, one slot a lane, so that the reshape to a tile moves nothing; rows of a dense gradient come in pieces of
BLOCK_P columns, whose loads are issued before the loads of experts that the gather of logits has to wait for.
"""

# Tuples grow in loops that Triton unrolls.
# mypy: disable-error-code="assignment, misc, var-annotated"

import triton
import triton.language as tl

from fuseops.kernels.device.reduce import row_dots
from fuseops.kernels.device.router import TINY, load_logits, softmax_exps


@triton.jit(do_not_specialize=["T"])
def router_bwd_kernel(
    dweights_ptr, logits_ptr, experts_ptr, dlogits_ptr, T, stride_logits, scale,
    K: tl.constexpr, SOFTMAX: tl.constexpr, NORMALIZE: tl.constexpr, ALL_LOGITS: tl.constexpr,
    E: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_P: tl.constexpr,
    BLOCK_E: tl.constexpr,
):  # fmt: skip
    """Compute dlogits (T, E) of BLOCK_R tokens from dweights (T, K).

    ALL_LOGITS: `logits` are all (T, E); otherwise those of the chosen (T, K), whose softmax is one over those. DENSE
    rows, of a softmax over all experts, are written as -s dot everywhere, others as zeros, in both cases as if nothing
    were chosen; the K entries of the chosen are then stored over that.
    """
    DENSE: tl.constexpr = SOFTMAX and ALL_LOGITS
    PIECES: tl.constexpr = BLOCK_E // BLOCK_P
    FLAT: tl.constexpr = BLOCK_R * BLOCK_K
    dtype = dlogits_ptr.dtype.element_ty
    start = tl.program_id(0).to(tl.int64) * BLOCK_R
    tokens = start + tl.arange(0, BLOCK_R)
    row_mask, piece_cols = (tokens < T)[:, None], tl.arange(0, BLOCK_P)[None, :]
    dlogits_rows = dlogits_ptr + (tokens * E)[:, None]
    exps = ()
    if DENSE:
        for p in tl.static_range(PIECES):
            cols = piece_cols + p * BLOCK_P
            # pointers here, offsets below
            offsets = logits_ptr + (tokens * stride_logits)[:, None] + cols
            exps = exps + (load_logits(offsets, row_mask & (cols < E), cols, E),)
    flat = tl.arange(0, FLAT)  # a lane has one slot of one token, in every tile of the chosen below
    token, slot = start + flat // BLOCK_K, flat % BLOCK_K
    mask, offsets = (token < T) & (slot < K), token * K + slot
    expert = tl.load(experts_ptr + offsets, mask=mask, other=0)
    ds = tl.load(dweights_ptr + offsets, mask=mask, other=0.0).to(tl.float32) * scale
    if DENSE:
        tl.debug_barrier()  # keeps the loads of rows ahead of the wait for the experts
    if ALL_LOGITS:
        offsets = token * stride_logits + expert
    chosen = tl.load(logits_ptr + offsets, mask=mask, other=0.0).to(tl.float32)
    if not DENSE:  # while the loads above are in flight
        cols = tl.arange(0, BLOCK_E)[None, :]
        tl.store(
            dlogits_rows + cols, tl.zeros((BLOCK_R, BLOCK_E), dtype), mask=row_mask & (cols < E)
        )
        tl.debug_barrier()
    ds, chosen = tl.reshape(ds, (BLOCK_R, BLOCK_K)), tl.reshape(chosen, (BLOCK_R, BLOCK_K))
    slots = tl.arange(0, BLOCK_K)[None, :]
    if DENSE:
        row_max, row_sum, exps = softmax_exps(exps, PIECES)
        scores = tl.where(slots < K, tl.exp(chosen - row_max) / row_sum, 0.0)
    elif SOFTMAX:
        chosen = tl.where(slots < K, chosen, float("-inf"))
        scores = tl.exp(chosen - tl.max(chosen, axis=1)[:, None])
    else:
        scores = tl.where(slots < K, tl.sigmoid(chosen), 0.0)
    if NORMALIZE:
        score_sum = tl.sum(scores, axis=1)[:, None] + (0.0 if SOFTMAX and not ALL_LOGITS else TINY)
        ds = (ds - row_dots(ds, scores)[:, None] / score_sum) / score_sum
    if DENSE:
        dot = row_dots(ds, scores)[:, None]
        ds = (ds - dot) * scores
        factor = -dot / row_sum
        for p in tl.static_range(PIECES):
            cols = piece_cols + p * BLOCK_P
            tl.store(dlogits_rows + cols, (factor * exps[p]).to(dtype), mask=row_mask & (cols < E))
        tl.debug_barrier()
    elif SOFTMAX:
        ds = ds * scores
    else:
        ds = ds * scores * (1.0 - scores)
    # behind a barrier: over the row stored above
    tl.store(dlogits_ptr + token * E + expert, tl.reshape(ds, (FLAT,)).to(dtype), mask=mask)
