"""Counting sort of MoE copies by expert: row offsets of the groups, and the permutation both ways.

A copy is one of the R = T * K entries of ``experts``; expert ids outside [0, E) mean that there is none. Copies are cut
into P chunks of BLOCK_S. `count_kernel` makes a histogram of each chunk, `scan_kernel` prefix sums over the chunks, and
`route_kernel` sorts its own chunk and stores. Without atomics: the order of rows within a group is that of the copies,
and repeats.
"""

import triton
import triton.language as tl

from fuseops.kernels.device.reduce import pdl_trigger, pdl_trigger_and_wait, pdl_wait
from fuseops.kernels.device.select import bitonic_sort_by_threads


@triton.jit
def load_experts(experts_ptr, copies, R, E):
    """Load (the expert of each copy, E where there is none; mask of those that have one)."""
    experts = tl.load(experts_ptr + copies, mask=copies < R, other=-1)
    valid = (experts >= 0) & (experts < E)
    return tl.where(valid, experts, E).to(tl.int32), valid


@triton.jit(do_not_specialize=["R", "P"])
def count_kernel(
    experts_ptr, counts_ptr, R, E, P,
    PDL: tl.constexpr, BLOCK_S: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """counts (E, P): a histogram over experts of each chunk of BLOCK_S copies, one program and column a chunk."""
    pdl_trigger(PDL)
    chunk, bins = tl.program_id(0), tl.arange(0, BLOCK_E)
    experts, valid = load_experts(experts_ptr, chunk * BLOCK_S + tl.arange(0, BLOCK_S), R, E)
    counts = tl.histogram(experts, BLOCK_E, mask=valid)
    tl.store(counts_ptr + bins.to(tl.int64) * P + chunk, counts, mask=bins < E)


@triton.jit(do_not_specialize=["P"])
def scan_kernel(counts_ptr, total_ptr, P, PDL: tl.constexpr, BLOCK_P: tl.constexpr):
    """Replace each row of counts (E, P) by its exclusive prefix sum, in place, and store the row sums to total (E,).

    One program an expert.
    """
    pdl_trigger_and_wait(PDL)
    expert = tl.program_id(0)
    running = tl.zeros((), dtype=tl.int32)
    for start in range(0, P, BLOCK_P):
        chunks = start + tl.arange(0, BLOCK_P)
        count_ptrs = counts_ptr + expert.to(tl.int64) * P + chunks
        counts = tl.load(count_ptrs, mask=chunks < P, other=0)
        tl.store(count_ptrs, running + tl.cumsum(counts, axis=0) - counts, mask=chunks < P)
        running += tl.sum(counts, axis=0)
    tl.store(total_ptr + expert, running)


@triton.jit(do_not_specialize=["R", "P"])
def route_kernel(
    experts_ptr, weights_ptr, counts_ptr, total_ptr, offs_ptr, index_ptr, pos_ptr, probs_ptr, R, E, P,
    K: tl.constexpr, COUNTED: tl.constexpr, WEIGHTED: tl.constexpr, PDL: tl.constexpr,
    BLOCK_S: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """Assign rows to one chunk of BLOCK_S copies a program, and store offs, pos, index and probs.

    The chunk is sorted in registers by (expert, copy): the rows of its copies are then consecutive within each expert,
    and stores to them coalesce. A program needs of each expert the copies in all chunks and in those before its own:
    from ``scan_kernel`` if COUNTED, otherwise it counts all copies itself, which saves two launches.
    """
    program = tl.program_id(0)
    bins, offsets = tl.arange(0, BLOCK_E), tl.arange(0, BLOCK_S)
    experts, _ = load_experts(experts_ptr, program * BLOCK_S + offsets, R, E)
    keys = experts * BLOCK_S + offsets
    if BLOCK_S <= 256:
        # the gather moves neighbours of the order, which one thread holds, to neighbouring lanes
        keys = tl.gather(bitonic_sort_by_threads(keys, BLOCK_S // 8), offsets, axis=0)
    else:
        keys = tl.sort(keys)
    experts, copies = keys // BLOCK_S, program * BLOCK_S + keys % BLOCK_S
    valid = experts < E
    if WEIGHTED:
        weights = tl.load(weights_ptr + copies, mask=valid, other=0.0).to(tl.float32)
    if COUNTED:
        pdl_wait(PDL)
        count_ptrs, mask = counts_ptr + bins.to(tl.int64) * P + program, bins < E
        total = tl.load(total_ptr + bins, mask=mask, other=0)
        copies_before = tl.load(count_ptrs, mask=mask, other=0)
        copies_through = tl.load(count_ptrs + 1, mask=mask & (program + 1 < P), other=0)
        counts = tl.where(program + 1 < P, copies_through, total) - copies_before
    else:
        total = tl.zeros((BLOCK_E,), dtype=tl.int32)
        copies_before = tl.zeros((BLOCK_E,), dtype=tl.int32)
        counts = tl.zeros((BLOCK_E,), dtype=tl.int32)
        for chunk in range(P):
            chunk_experts, chunk_valid = load_experts(experts_ptr, chunk * BLOCK_S + offsets, R, E)
            chunk_counts = tl.histogram(chunk_experts, BLOCK_E, mask=chunk_valid)
            total += chunk_counts
            copies_before += tl.where(chunk < program, chunk_counts, 0)
            counts += tl.where(chunk == program, chunk_counts, 0)
    ends = tl.cumsum(total, axis=0)
    if program == 0:
        tl.store(offs_ptr + bins, ends, mask=bins < E)
    num_used = tl.sum(total, axis=0)
    sorted_before = tl.cumsum(counts, axis=0) - counts
    row = offsets + tl.gather(
        ends - total + copies_before - sorted_before, tl.minimum(experts, E - 1), axis=0
    )
    tl.store(pos_ptr + copies, tl.where(valid, row, -1), mask=copies < R)
    padding = (copies >= num_used) & (copies < R)  # here `copies` are numbers of rows
    tl.store(index_ptr + row, (copies // K).to(tl.int64), mask=valid)
    tl.store(index_ptr + copies, tl.zeros((BLOCK_S,), tl.int64), mask=padding)
    if WEIGHTED:
        tl.store(probs_ptr + row, weights, mask=valid)
        tl.store(probs_ptr + copies, tl.zeros((BLOCK_S,), tl.float32), mask=padding)
