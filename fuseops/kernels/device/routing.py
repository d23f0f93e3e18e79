"""Kernels of fuseops.kernels.routing. A copy is one of the R = T * K entries of ``experts``."""

import triton
import triton.language as tl

from fuseops.kernels.device.reduce import pdl_trigger, pdl_wait
from fuseops.kernels.device.select import bitonic_sort_by_threads


@triton.jit
def experts_of(experts_ptr, copies, R, E):
    """(the expert of every copy, E where there is none; whether there is one)"""
    e = tl.load(experts_ptr + copies, mask=copies < R, other=-1)
    kept = (e >= 0) & (e < E)
    return tl.where(kept, e, E).to(tl.int32), kept


@triton.jit(do_not_specialize=["R", "P"])
def count_kernel(
    experts_ptr, counts_ptr, R, E, P,
    PDL: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """Column c of counts (E, P): copies of each expert in chunk c, which has BLOCK_S of them."""
    pdl_trigger(PDL)
    chunk, bins = tl.program_id(0), tl.arange(0, BLOCK_E)
    e, kept = experts_of(experts_ptr, chunk * BLOCK_S + tl.arange(0, BLOCK_S), R, E)
    counts = tl.histogram(e, BLOCK_E, mask=kept)
    tl.store(counts_ptr + bins.to(tl.int64) * P + chunk, counts, mask=bins < E)


@triton.jit(do_not_specialize=["P"])
def scan_kernel(counts_ptr, total_ptr, P, PDL: tl.constexpr, BLOCK_P: tl.constexpr):
    """A program has a row of counts (E, P): each becomes the sum of those before it, in place; their
    total goes to total (E,).
    """
    pdl_trigger(PDL)
    pdl_wait(PDL)
    expert = tl.program_id(0)
    sums = tl.zeros((), dtype=tl.int32)
    for start in range(0, P, BLOCK_P):
        c = start + tl.arange(0, BLOCK_P)
        at = counts_ptr + expert.to(tl.int64) * P + c
        counts = tl.load(at, mask=c < P, other=0)
        tl.store(at, sums + tl.cumsum(counts, axis=0) - counts, mask=c < P)
        sums += tl.sum(counts, axis=0)
    tl.store(total_ptr + expert, sums)


@triton.jit(do_not_specialize=["R", "P"])
def route_kernel(
    experts_ptr, weights_ptr, counts_ptr, total_ptr, offs_ptr, index_ptr, pos_ptr, probs_ptr, R, E, P,
    K: tl.constexpr, COUNTED: tl.constexpr, WEIGHTED: tl.constexpr, PDL: tl.constexpr,
    BLOCK_S: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """A program gives rows to one chunk of BLOCK_S copies: sorted by expert, their rows are
    consecutive but for a step at each expert.

    It needs the copies of each expert in all chunks and in those before its own: from
    ``scan_kernel`` if COUNTED, otherwise it counts all copies itself, which saves two launches.
    """
    program = tl.program_id(0)
    bins, place = tl.arange(0, BLOCK_E), tl.arange(0, BLOCK_S)
    e, _ = experts_of(experts_ptr, program * BLOCK_S + place, R, E)
    keys = e * BLOCK_S + place
    if BLOCK_S <= 256:
        keys = tl.gather(
            bitonic_sort_by_threads(keys, BLOCK_S // 8), place, axis=0
        )  # neighbours in lanes
    else:
        keys = tl.sort(keys)
    e, copies = keys // BLOCK_S, program * BLOCK_S + keys % BLOCK_S
    kept = e < E
    if WEIGHTED:
        weights = tl.load(weights_ptr + copies, mask=kept, other=0.0).to(tl.float32)
    if COUNTED:
        pdl_wait(PDL)
        at, mask = counts_ptr + bins.to(tl.int64) * P + program, bins < E
        total = tl.load(total_ptr + bins, mask=mask, other=0)
        before = tl.load(at, mask=mask, other=0)
        after = tl.load(at + 1, mask=mask & (program + 1 < P), other=0)
        counts = tl.where(program + 1 < P, after, total) - before
    else:
        total = tl.zeros((BLOCK_E,), dtype=tl.int32)
        before = tl.zeros((BLOCK_E,), dtype=tl.int32)
        counts = tl.zeros((BLOCK_E,), dtype=tl.int32)
        for chunk in range(P):
            others, some = experts_of(experts_ptr, chunk * BLOCK_S + place, R, E)
            found = tl.histogram(others, BLOCK_E, mask=some)
            total += found
            before += tl.where(chunk < program, found, 0)
            counts += tl.where(chunk == program, found, 0)
    ends = tl.cumsum(total, axis=0)
    if program == 0:
        tl.store(offs_ptr + bins, ends, mask=bins < E)
    used = tl.sum(total, axis=0)
    skipped = tl.cumsum(counts, axis=0) - counts
    row = place + tl.gather(ends - total + before - skipped, tl.minimum(e, E - 1), axis=0)
    tl.store(pos_ptr + copies, tl.where(kept, row, -1), mask=copies < R)
    padding = (copies >= used) & (copies < R)  # here the copies' numbers stand for rows
    tl.store(index_ptr + row, (copies // K).to(tl.int64), mask=kept)
    tl.store(index_ptr + copies, tl.zeros((BLOCK_S,), tl.int64), mask=padding)
    if WEIGHTED:
        tl.store(probs_ptr + row, weights, mask=kept)
        tl.store(probs_ptr + copies, tl.zeros((BLOCK_S,), tl.float32), mask=padding)
