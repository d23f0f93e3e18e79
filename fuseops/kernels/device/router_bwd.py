"""The gradient kernel of fuseops.kernels.router. BLOCK_E holds all experts of a token."""

# Tuples grow in loops that Triton unrolls.
# mypy: disable-error-code="assignment, misc, var-annotated"

import triton
import triton.language as tl

from fuseops.kernels.device.reduce import row_dots
from fuseops.kernels.device.router import TINY, exponentials, load_logits


@triton.jit(do_not_specialize=["T"])
def router_bwd_kernel(
    dweights_ptr, logits_ptr, experts_ptr, dlogits_ptr, T, stride_logits, scale,
    K: tl.constexpr, SOFTMAX: tl.constexpr, NORMALIZE: tl.constexpr, ALL: tl.constexpr,
    E: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_P: tl.constexpr,
    BLOCK_E: tl.constexpr,
):  # fmt: skip
    """From all logits (T, E) if ALL; otherwise from those of the chosen (T, K), whose softmax is one
    over those. Rows are written as if nothing were chosen, and the K of the chosen over that.
    """
    WHOLE: tl.constexpr = SOFTMAX and ALL
    PIECES: tl.constexpr = BLOCK_E // BLOCK_P
    N: tl.constexpr = BLOCK_R * BLOCK_K
    dtype = dlogits_ptr.dtype.element_ty
    start = tl.program_id(0).to(tl.int64) * BLOCK_R
    tokens = start + tl.arange(0, BLOCK_R)
    here, place = (tokens < T)[:, None], tl.arange(0, BLOCK_P)[None, :]
    row = dlogits_ptr + (tokens * E)[:, None]
    rest = ()
    if WHOLE:
        for p in tl.static_range(PIECES):
            cols = place + p * BLOCK_P
            at = logits_ptr + (tokens * stride_logits)[:, None] + cols
            rest = rest + (load_logits(at, here & (cols < E), cols, E),)
    flat = tl.arange(0, N)  # of the chosen: a lane has one slot of a token, in every tile below
    token, slot = start + flat // BLOCK_K, flat % BLOCK_K
    mask, at = (token < T) & (slot < K), token * K + slot
    expert = tl.load(experts_ptr + at, mask=mask, other=0)
    d = tl.load(dweights_ptr + at, mask=mask, other=0.0).to(tl.float32) * scale
    if WHOLE:
        tl.debug_barrier()  # keeps the loads of rows before the wait for the experts
    if ALL:
        at = token * stride_logits + expert
    chosen = tl.load(logits_ptr + at, mask=mask, other=0.0).to(tl.float32)
    if not WHOLE:  # while the loads are on their way
        cols = tl.arange(0, BLOCK_E)[None, :]
        tl.store(row + cols, tl.zeros((BLOCK_R, BLOCK_E), dtype), mask=here & (cols < E))
        tl.debug_barrier()
    d, chosen = tl.reshape(d, (BLOCK_R, BLOCK_K)), tl.reshape(chosen, (BLOCK_R, BLOCK_K))
    slots = tl.arange(0, BLOCK_K)[None, :]
    if WHOLE:
        largest, total, rest = exponentials(rest, PIECES)
        s = tl.where(slots < K, tl.exp(chosen - largest) / total, 0.0)
    elif SOFTMAX:
        chosen = tl.where(slots < K, chosen, float("-inf"))
        s = tl.exp(chosen - tl.max(chosen, axis=1)[:, None])
    else:
        s = tl.where(slots < K, tl.sigmoid(chosen), 0.0)
    if NORMALIZE:
        sums = tl.sum(s, axis=1)[:, None] + (0.0 if SOFTMAX and not ALL else TINY)
        d = (d - row_dots(d, s)[:, None] / sums) / sums
    if WHOLE:
        dot = row_dots(d, s)[:, None]
        d = (d - dot) * s
        each = -dot / total
        for p in tl.static_range(PIECES):
            cols = place + p * BLOCK_P
            tl.store(row + cols, (each * rest[p]).to(dtype), mask=here & (cols < E))
        tl.debug_barrier()
    elif SOFTMAX:
        d = d * s
    else:
        d = d * s * (1.0 - s)
    # after a barrier: over what is there
    tl.store(dlogits_ptr + token * E + expert, tl.reshape(d, (N,)).to(dtype), mask=mask)
