"""Kernels of fuseops.kernels.routing. A copy is one of the R = T * K entries of ``experts``."""

import triton
import triton.language as tl

from fuseops.kernels.device.reduce import after_launch, before_launch


@triton.jit
def experts_of(experts_ptr, copies, R, E):
    """The expert of every copy; E where there is none."""
    e = tl.load(experts_ptr + copies, mask=copies < R, other=-1)
    return tl.where((e >= 0) & (e < E), e, E).to(tl.int32)


@triton.jit(do_not_specialize=["R", "chunk"])
def count_kernel(
    experts_ptr, counts_ptr, R, E, chunk,
    PDL: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """Row c of counts (programs, E): copies of each expert in chunk c."""
    before_launch(PDL)
    first = tl.program_id(0) * chunk
    bins = tl.arange(0, BLOCK_E)
    total = tl.zeros((BLOCK_E,), dtype=tl.int32)
    for start in range(first, tl.minimum(first + chunk, R), BLOCK_H):
        e = experts_of(experts_ptr, start + tl.arange(0, BLOCK_H), R, E)
        total += tl.histogram(e, BLOCK_E)
    tl.store(counts_ptr + tl.program_id(0) * E + bins, total, mask=bins < E)


@triton.jit(do_not_specialize=["P"])
def scan_kernel(
    counts_ptr, total_ptr, P, E, PDL: tl.constexpr, BLOCK_P: tl.constexpr, BLOCK_E: tl.constexpr
):
    """In place: row c of counts becomes the sum of the rows before it; total (E,) is that of all."""
    before_launch(PDL)
    after_launch(PDL)
    c = tl.arange(0, BLOCK_P)[:, None]
    bins = tl.program_id(0) * BLOCK_E + tl.arange(0, BLOCK_E)
    at, mask = counts_ptr + c * E + bins[None, :], (c < P) & (bins < E)[None, :]
    counts = tl.load(at, mask=mask, other=0)
    tl.store(at, tl.cumsum(counts, axis=0) - counts, mask=mask)
    tl.store(total_ptr + bins, tl.sum(counts, axis=0), mask=bins < E)


@triton.jit(do_not_specialize=["R", "chunk"])
def route_kernel(
    experts_ptr, weights_ptr, counts_ptr, total_ptr, offs_ptr, index_ptr, pos_ptr, probs_ptr,
    R, E, chunk,
    K: tl.constexpr, COUNTED: tl.constexpr, WEIGHTED: tl.constexpr, PDL: tl.constexpr,
    BLOCK_S: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """A program gives rows to one chunk of copies (a multiple of BLOCK_H of them), BLOCK_S of them
    at a time: sorted by expert, their rows are consecutive but for a step at each expert.

    It needs the copies of each expert in all chunks and in those before its own: from
    ``scan_kernel`` if COUNTED, otherwise it counts all copies itself, which saves two launches.
    """
    program = tl.program_id(0)
    first = program * chunk
    bins = tl.arange(0, BLOCK_E)
    if COUNTED:
        after_launch(PDL)
        before = tl.load(counts_ptr + program * E + bins, mask=bins < E, other=0)
        total = tl.load(total_ptr + bins, mask=bins < E, other=0)
    else:
        total = tl.zeros((BLOCK_E,), dtype=tl.int32)
        before = tl.zeros((BLOCK_E,), dtype=tl.int32)
        for start in range(0, R, BLOCK_H):
            e = experts_of(experts_ptr, start + tl.arange(0, BLOCK_H), R, E)
            counts = tl.histogram(e, BLOCK_E)
            total += counts
            before += tl.where(start < first, counts, 0)
    total = tl.where(bins < E, total, 0)
    ends = tl.cumsum(total, axis=0)
    if program == 0:
        tl.store(offs_ptr + bins, ends, mask=bins < E)
    used = tl.sum(total, axis=0)
    free = ends - total + before  # the row of the next copy of each expert
    for start in range(first, tl.minimum(first + chunk, R), BLOCK_S):
        place = tl.arange(0, BLOCK_S)
        e = experts_of(experts_ptr, start + place, R, E)
        counts = tl.histogram(e, BLOCK_E)
        keys = tl.sort(e * BLOCK_S + place)
        e, copies = keys // BLOCK_S, start + keys % BLOCK_S
        kept = e < E
        row = place + tl.gather(free - (tl.cumsum(counts, axis=0) - counts), e, axis=0)
        free += counts
        tl.store(pos_ptr + copies, tl.where(kept, row, -1), mask=copies < R)
        padding = (copies >= used) & (copies < R)  # here the copies' numbers stand for rows
        tl.store(index_ptr + row, (copies // K).to(tl.int64), mask=kept)
        tl.store(index_ptr + copies, tl.zeros((BLOCK_S,), tl.int64), mask=padding)
        if WEIGHTED:
            weights = tl.load(weights_ptr + copies, mask=kept, other=0.0).to(tl.float32)
            tl.store(probs_ptr + row, weights, mask=kept)
            tl.store(probs_ptr + copies, tl.zeros((BLOCK_S,), tl.float32), mask=padding)


@triton.jit
def counts_to_offs_kernel(counts_ptr, offs_ptr, E, BLOCK_E: tl.constexpr):
    bins = tl.arange(0, BLOCK_E)
    counts = tl.load(counts_ptr + bins, mask=bins < E, other=0).to(tl.int32)
    tl.store(offs_ptr + bins, tl.cumsum(counts, axis=0), mask=bins < E)
