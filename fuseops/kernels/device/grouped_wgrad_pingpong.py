"""Weight gradient of grouped GEMMs on Hopper in Gluon: two consumer warpgroups fed through a ring of
STAGES tiles, on alternate tiles of a program (ping-pong: one multiplies while the other stores) or,
COOPERATIVE, on the two halves of each tile. There 16-bit results are kept in registers, and are stored a
part a step beside the first products of the next tile: stored at once, nothing would hide them.

The left operand, 64 or 128 columns of a tile, may be gathered row by row with cp.async by a producer
of four warps; otherwise one warp issues TMA for both. Ragged descriptors end the rows of a group in
zeros, so that neighbours' NaN stay theirs.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .gluon_names import load_rows, load_tile, store_tile
from .grouped_dswiglu import column_halves
from .grouped_rings import Descriptor, swizzle
from .sums import F32_BOX_COLS, store_float32_grad
from .sums import describe_sums as describe_sums

RAGGED_ROWS = gl.constexpr(1 << 30)
RAGGED_SHAPE = [0x7FFF0000, 0x7FFF0000, 1 << 30]


def describe_rows(t, rows):
    """As grouped_mm.describe_ragged: panels of so many rows and 64 columns."""
    stride = t.stride(0)
    strides = [2**34 - stride, stride, stride, 1]
    return Descriptor(t, [*RAGGED_SHAPE, t.shape[1]], strides, [1, 1, rows, 64])


def describe_weight(t):
    """A weight (E, N, K) in parts of 64 x 64."""
    return Descriptor(t, t.shape, t.stride(), [1, 64, 64])


@gluon.jit
def group_of(tile, problem):
    """The group of a tile, largest first: asked for one tile ahead, so that nobody waits for it."""
    groups_ptr, _, total, _, _, _, num_m, num_n = problem
    return gl.load(groups_ptr + tile // (num_m * num_n), mask=tile < total, other=0)


@gluon.jit
def locate(tile, group, problem, GROUP: gl.constexpr):
    """(first row, rows, row block, column block) of a tile."""
    _, offs_ptr, _, R, _, _, num_m, num_n = problem
    each = num_m * num_n
    start = gl.load(offs_ptr + group - 1, mask=group > 0, other=0)
    size = gl.maximum(gl.minimum(gl.load(offs_ptr + group), R) - start, 0)
    block_m, block_n = swizzle(tile % each, num_m, num_n, GROUP)
    return start, size, block_m, block_n


@gluon.jit
def load_panels(rows, start, size, k, col, last, bar, tile):
    """A tile of consecutive rows, in panels of 64 columns; `last` is read again for what lies beyond
    the columns: zero fill is slow.
    """
    for i in gl.static_range(tile.shape[1] // 64):
        at = gl.minimum(col + i * 64, last)
        row = RAGGED_ROWS - size + k
        panel = tile.slice(i * 64, 64, 1)
        load_tile(rows, [RAGGED_ROWS, start + size, row, at], bar, panel)


@gluon.jit
def load_tiles(a, b, problem, ring, GROUP: gl.constexpr, STAGES: gl.constexpr):
    _, _, total, _, M, N, _, _ = problem
    a_ring, b_ring, empty, ready = ring
    BLOCK_K: gl.constexpr = a_ring.shape[1]
    BLOCK_M: gl.constexpr = a_ring.shape[2]
    BLOCK_N: gl.constexpr = b_ring.shape[2]
    last_a, last_b = (gl.cdiv(M, 64) - 1) * 64, (gl.cdiv(N, 64) - 1) * 64
    step = gl.to_tensor(0)
    group = group_of(gl.program_id(0), problem)
    for tile in range(gl.program_id(0), total, gl.num_programs(0)):
        following = group_of(tile + gl.num_programs(0), problem)
        start, size, block_m, block_n = locate(tile, group, problem, GROUP)
        for k in range(0, size, BLOCK_K):
            slot = step % STAGES
            mbarrier.wait(empty.index(slot), ((step // STAGES) & 1) ^ 1)
            bar = ready.index(slot)
            mbarrier.expect(bar, (BLOCK_M + BLOCK_N) * BLOCK_K * 2)
            load_panels(a, start, size, k, block_m * BLOCK_M, last_a, bar, a_ring.index(slot))
            load_panels(b, start, size, k, block_n * BLOCK_N, last_b, bar, b_ring.index(slot))
            step += 1
        group = following


@gluon.jit
def gather_tiles(
    a_ptr, index_ptr, stride_a, b, problem, ring, GROUP: gl.constexpr, STAGES: gl.constexpr
):
    _, _, total, _, M, N, _, _ = problem
    a_ring, b_ring, empty, ready = ring
    BLOCK_K: gl.constexpr = a_ring.shape[1]
    BLOCK_M: gl.constexpr = a_ring.shape[2]
    BLOCK_N: gl.constexpr = b_ring.shape[2]
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    last_b = (gl.cdiv(N, 64) - 1) * 64
    rows = gl.arange(0, BLOCK_K, layout=gl.SliceLayout(1, layout))
    cols = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(0, layout))
    step = gl.to_tensor(0)
    first = gl.program_id(0)
    start, size, block_m, block_n = locate(first, group_of(first, problem), problem, GROUP)
    group = group_of(first + gl.num_programs(0), problem)
    first_index = gl.load(index_ptr + start + rows, mask=rows < size, other=0)
    for tile in range(first, total, gl.num_programs(0)):
        next_tile = tile + gl.num_programs(0)
        next_start, next_size, next_m, next_n = locate(next_tile, group, problem, GROUP)
        group = group_of(next_tile + gl.num_programs(0), problem)
        index = first_index
        first_index = gl.load(index_ptr + next_start + rows, mask=rows < next_size, other=0)
        at = block_m * BLOCK_M + cols
        for k in range(0, size, BLOCK_K):
            ahead = k + BLOCK_K + rows
            following = gl.load(index_ptr + start + ahead, mask=ahead < size, other=0)
            pointers = a_ptr + index.to(gl.int64)[:, None] * stride_a + at[None, :]
            slot = step % STAGES
            mbarrier.wait(empty.index(slot), ((step // STAGES) & 1) ^ 1)
            bar = ready.index(slot)
            mask = (k + rows < size)[:, None] & (at < M)[None, :]
            load_rows(a_ring.index(slot), pointers, mask=mask)
            async_copy.mbarrier_arrive(bar, increment_count=False)
            mbarrier.expect(bar, BLOCK_N * BLOCK_K * 2)
            load_panels(b, start, size, k, block_n * BLOCK_N, last_b, bar, b_ring.index(slot))
            index = following
            step += 1
        start, size, block_m, block_n = next_start, next_size, next_m, next_n


@gluon.jit
def store_part(
    dw, buffers, part, group, row, col, TRANSPOSED: gl.constexpr, NUMBER: gl.constexpr
):  # fmt: skip
    """A 16-bit part leaves by TMA, which ends at the sizes of the weight, from the buffer whose turn it is."""
    buffer = buffers.index(NUMBER % buffers.shape[0])
    tma.store_wait(buffers.shape[0] - 1)
    if TRANSPOSED:
        buffer.permute((1, 0)).store(part.to(dw.dtype))
        fence_async_shared()
        store_tile(dw, [group, col, row], buffer)
    else:
        buffer.store(part.to(dw.dtype))
        fence_async_shared()
        store_tile(dw, [group, row, col], buffer)


@gluon.jit
def quarters(tile):
    left, right = column_halves(tile)
    return column_halves(left) + column_halves(right)


@gluon.jit
def store_kept(dw, buffers, kept, kept_at, number, TRANSPOSED: gl.constexpr):
    """This part of the tile that is kept."""
    group, row, col = kept_at
    parts = quarters(kept)
    for i in gl.static_range(4):
        if number == i:
            store_part(dw, buffers, parts[i], group, row, col + 64 * i, TRANSPOSED, i)


@gluon.jit
def multiply(
    acc, ring, step, GATHER: gl.constexpr, COOPERATIVE: gl.constexpr, STAGES: gl.constexpr,
    WHICH: gl.constexpr,
):  # fmt: skip
    """Begins the products of a step when its operands have come."""
    a_ring, b_ring, _empty, ready = ring
    mbarrier.wait(ready.index(step % STAGES), (step // STAGES) & 1)
    if GATHER:
        fence_async_shared()
    left = a_ring.index(step % STAGES)
    if COOPERATIVE:
        left = left.slice(WHICH * 64, 64, 1)
    return warpgroup_mma(left.permute((1, 0)), b_ring.index(step % STAGES), acc, is_async=True)


@gluon.jit
def multiply_tiles(
    dw, problem, ring, buffers, order,
    TRANSPOSED: gl.constexpr, ACCUMULATE: gl.constexpr, GATHER: gl.constexpr,
    COOPERATIVE: gl.constexpr, GROUP: gl.constexpr, STAGES: gl.constexpr, WHICH: gl.constexpr,
):  # fmt: skip
    _, _, total, _, _, _, _, _ = problem
    a_ring, b_ring, empty, _ready = ring
    BLOCK_K: gl.constexpr = a_ring.shape[1]
    BLOCK_M: gl.constexpr = a_ring.shape[2]
    BLOCK_N: gl.constexpr = b_ring.shape[2]
    SUMS: gl.constexpr = dw.dtype == gl.float32
    KEEPS: gl.constexpr = COOPERATIVE and not SUMS
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_N, 16]
    )
    first = gl.to_tensor(0)
    turn = gl.to_tensor(0)
    kept = gl.zeros((64, BLOCK_N), dtype=dw.dtype, layout=layout)
    kept_at = first, first, first
    group = group_of(gl.program_id(0), problem)
    for tile in range(gl.program_id(0), total, gl.num_programs(0)):
        following = group_of(tile + gl.num_programs(0), problem)
        _, size, block_m, block_n = locate(tile, group, problem, GROUP)
        steps = (size + BLOCK_K - 1) // BLOCK_K
        if COOPERATIVE or turn % 2 == WHICH:
            acc = gl.zeros((64, BLOCK_N), dtype=gl.float32, layout=layout)
            if not COOPERATIVE:
                mbarrier.wait(order.index(WHICH), (turn // 2 + 1 - WHICH) & 1)
            storing = gl.to_tensor(0)
            if KEEPS:
                parts_kept = gl.where(tile < gl.num_programs(0), 0, 4)
                storing = gl.minimum(steps, parts_kept)
                for k in range(storing):
                    acc = multiply(acc, ring, first + k, GATHER, COOPERATIVE, STAGES, WHICH)
                    store_kept(dw, buffers, kept, kept_at, k, TRANSPOSED)
                    acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
                    mbarrier.arrive(empty.index((first + k) % STAGES), count=1)
                for k in range(storing, parts_kept):  # of a group of few rows, or of none
                    store_kept(dw, buffers, kept, kept_at, k, TRANSPOSED)
            for k in range(storing, steps):
                step = first + k
                acc = multiply(acc, ring, step, GATHER, COOPERATIVE, STAGES, WHICH)
                acc = warpgroup_mma_wait(num_outstanding=1, deps=(acc,))
                done = empty.index((step + STAGES - 1) % STAGES)
                mbarrier.arrive(done, count=1, pred=k > storing)
            if not COOPERATIVE:
                mbarrier.arrive(order.index(1 - WHICH), count=1)
            acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
            last = (first + steps + STAGES - 1) % STAGES
            mbarrier.arrive(empty.index(last), count=1, pred=steps > storing)
            row, col = block_m * BLOCK_M, block_n * BLOCK_N
            if COOPERATIVE:
                row += WHICH * 64
            if KEEPS:
                kept, kept_at = acc.to(dw.dtype), (group, row, col)
            elif SUMS:
                store_float32_grad(dw, buffers, acc, group, row, col, TRANSPOSED, ACCUMULATE, 0)
            else:
                parts = quarters(acc)
                for i in gl.static_range(4):
                    store_part(dw, buffers, parts[i], group, row, col + 64 * i, TRANSPOSED, i)
        first += steps
        turn += 1
        group = following
    if KEEPS:
        for k in range(gl.where(gl.program_id(0) < total, 4, 0)):
            store_kept(dw, buffers, kept, kept_at, k, TRANSPOSED)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["R", "E"])
def grouped_wgrad_pingpong_kernel(
    offs_ptr, tiles_ptr, dw, a, index_ptr, b, R, E, M, N, stride_a,
    GATHER: gl.constexpr, TRANSPOSED: gl.constexpr, ACCUMULATE: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_K: gl.constexpr, COOPERATIVE: gl.constexpr, GROUP: gl.constexpr,
    STAGES: gl.constexpr, STORES: gl.constexpr,
):  # fmt: skip
    """dw[e] (+)= a[rows of e].T @ b[rows of e], or its transpose."""
    BLOCK_N: gl.constexpr = 256
    num_m, num_n = gl.cdiv(M, BLOCK_M), gl.cdiv(N, BLOCK_N)
    total = E * num_m * num_n
    a_ring = gl.allocate_shared_memory(b.dtype, [STAGES, BLOCK_K, BLOCK_M], b.layout)
    b_ring = gl.allocate_shared_memory(b.dtype, [STAGES, BLOCK_K, BLOCK_N], b.layout)
    # of one consumer
    PARTS: gl.constexpr = [F32_BOX_COLS, 64] if TRANSPOSED else [64, F32_BOX_COLS]
    BUFFERS: gl.constexpr = [STORES] + (PARTS if dw.dtype == gl.float32 else [64, 64])
    buffers0 = gl.allocate_shared_memory(dw.dtype, BUFFERS, dw.layout)
    buffers1 = gl.allocate_shared_memory(dw.dtype, BUFFERS, dw.layout)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    order = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    mbarrier.init(order.index(0), count=1)
    mbarrier.init(order.index(1), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(empty.index(i), count=2 if COOPERATIVE else 1)
        mbarrier.init(ready.index(i), count=129 if GATHER else 1)
    problem = tiles_ptr + 2, offs_ptr, total, R, M, N, num_m, num_n
    ring = a_ring, b_ring, empty, ready
    # fmt: off
    if GATHER:
        gl.warp_specialize(
            [
                (multiply_tiles, (dw, problem, ring, buffers0, order, TRANSPOSED,
                                  ACCUMULATE, GATHER, COOPERATIVE, GROUP, STAGES, 0)),
                (multiply_tiles, (dw, problem, ring, buffers1, order, TRANSPOSED,
                                  ACCUMULATE, GATHER, COOPERATIVE, GROUP, STAGES, 1)),
                (gather_tiles, (a, index_ptr, stride_a, b, problem, ring, GROUP, STAGES)),
            ],
            [4, 4],
            [232, 40],
        )
    else:
        gl.warp_specialize(
            [
                (multiply_tiles, (dw, problem, ring, buffers0, order, TRANSPOSED,
                                  ACCUMULATE, GATHER, COOPERATIVE, GROUP, STAGES, 0)),
                (multiply_tiles, (dw, problem, ring, buffers1, order, TRANSPOSED,
                                  ACCUMULATE, GATHER, COOPERATIVE, GROUP, STAGES, 1)),
                (load_tiles, (a, b, problem, ring, GROUP, STAGES)),
            ],
            [4, 1],
            [232, 40],
        )
    # fmt: on
