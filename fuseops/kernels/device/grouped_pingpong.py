"""Grouped GEMM of Hopper in Gluon: two consumer warpgroups on alternate tiles of a program, so that
one multiplies while the other stores (ping-pong), fed by one TMA warp through a ring of STAGES tiles.

`order[w]` lets consumer w multiply: without it a consumer could wait more than one phase ahead on
a ring slot, where the parity of an mbarrier says nothing.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

MAX_GROUPS = gl.constexpr(2048)
ZEROS = gl.constexpr(1024)


SWIZZLED = gl.NVMMASharedLayout.get_default_for([64, 64], gl.bfloat16)


class Descriptor(TensorDescriptor):  # type: ignore[misc]
    """A tensor descriptor of what the launcher knows to be describable: nothing is checked twice."""

    def __init__(self, base, shape, strides, block_shape):
        self.base, self.shape, self.strides, self.block_shape = base, shape, strides, block_shape
        self.layout, self.padding = SWIZZLED, "zero"


@gluon.jit
def locate(
    tile, num_n, entries_ptr, offs_ptr, R, BLOCK_M: gl.constexpr, GROUP: gl.constexpr
):  # as grouped_mm_kernel does
    entry = gl.load(entries_ptr + tile // num_n)
    group = entry % MAX_GROUPS
    start = gl.load(offs_ptr + group - 1, mask=group > 0, other=0)
    size = gl.maximum(gl.minimum(gl.load(offs_ptr + group), R) - start, 0)
    inside = (entry // MAX_GROUPS) * num_n + tile % num_n
    band = inside // (GROUP * num_n)
    height = gl.minimum((size + BLOCK_M - 1) // BLOCK_M - band * GROUP, GROUP)
    place = inside - band * GROUP * num_n
    return group, start, size, band * GROUP + place % height, place // height


@gluon.jit
def load_tiles(
    x, weight, y, y_ptr, entries_ptr, offs_ptr, total, R, N, K, num_n,
    x_ring, w_ring, buffer, empty, ready, order,
    TRANSPOSED: gl.constexpr, GROUP: gl.constexpr, STAGES: gl.constexpr, WHICH: gl.constexpr,
):  # fmt: skip
    BLOCK_M: gl.constexpr = x.block_type.shape[0]
    BLOCK_K: gl.constexpr = x.block_type.shape[1]
    BLOCK_N: gl.constexpr = w_ring.shape[2 if TRANSPOSED else 1]
    BYTES: gl.constexpr = x.block_type.nbytes + BLOCK_N * BLOCK_K * 2
    PANEL: gl.constexpr = weight.block_type.shape[1]
    last = (gl.cdiv(N, PANEL) - 1) * PANEL  # read again for what lies beyond N: zero fill is slow
    step = gl.to_tensor(0)
    for tile in range(gl.program_id(0), total, gl.num_programs(0)):
        group, start, _, block_m, block_n = locate(
            tile, num_n, entries_ptr, offs_ptr, R, BLOCK_M, GROUP
        )
        for k in range(0, K, BLOCK_K):
            slot = step % STAGES
            mbarrier.wait(empty.index(slot), ((step // STAGES) & 1) ^ 1)
            full = ready.index(slot)
            mbarrier.expect(full, BYTES)
            tma.async_copy_global_to_shared(
                x, [start + block_m * BLOCK_M, k], full, x_ring.index(slot)
            )
            if TRANSPOSED:
                for i in gl.static_range(BLOCK_N // PANEL):
                    col = gl.minimum(block_n * BLOCK_N + i * PANEL, last)
                    panel = w_ring.index(slot).slice(i * PANEL, PANEL, 1)
                    tma.async_copy_global_to_shared(weight, [group * K + k, col], full, panel)
            else:
                at = [group * N + block_n * BLOCK_N, k]
                tma.async_copy_global_to_shared(weight, at, full, w_ring.index(slot))
            step += 1


@gluon.jit
def store_part(y, y_ptr, buffer, part, start, size, row, col, N):
    """Rows of a full tile leave by TMA, those of a ragged one from the same buffer by pointers."""
    ROWS: gl.constexpr = part.shape[0]
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    tma.store_wait(0)
    buffer.store(part.to(y.dtype))
    if row + ROWS <= size:
        fence_async_shared()
        tma.async_copy_shared_to_global(y, [start + row, col], buffer)
    else:
        rows = row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
        cols = col + gl.arange(0, part.shape[1], layout=gl.SliceLayout(0, layout))
        to = y_ptr + (start + rows).to(gl.int64)[:, None] * N + cols[None, :]
        gl.store(to, buffer.load(layout), mask=(rows < size)[:, None] & (cols < N)[None, :])


@gluon.jit
def halves(acc):
    M: gl.constexpr = acc.shape[0]
    N: gl.constexpr = acc.shape[1]
    return acc.reshape((M, 2, N // 2)).permute((0, 2, 1)).split()


@gluon.jit
def multiply_tiles(
    x, weight, y, y_ptr, entries_ptr, offs_ptr, total, R, N, K, num_n,
    x_ring, w_ring, buffer, empty, ready, order,
    TRANSPOSED: gl.constexpr, GROUP: gl.constexpr, STAGES: gl.constexpr, WHICH: gl.constexpr,
):  # fmt: skip
    BLOCK_M: gl.constexpr = x.block_type.shape[0]
    BLOCK_K: gl.constexpr = x.block_type.shape[1]
    BLOCK_N: gl.constexpr = w_ring.shape[2 if TRANSPOSED else 1]
    PART: gl.constexpr = y.block_type.shape[1]
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_N, 16]
    )
    steps = K // BLOCK_K
    turn = gl.to_tensor(0)
    for tile in range(gl.program_id(0), total, gl.num_programs(0)):
        if turn % 2 == WHICH:
            _, start, size, block_m, block_n = locate(
                tile, num_n, entries_ptr, offs_ptr, R, BLOCK_M, GROUP
            )
            acc = gl.zeros((BLOCK_M, BLOCK_N), dtype=gl.float32, layout=layout)
            mbarrier.wait(order.index(WHICH), (turn // 2 + 1 - WHICH) & 1)
            first = turn * steps
            for k in range(steps):
                step = first + k
                mbarrier.wait(ready.index(step % STAGES), (step // STAGES) & 1)
                b = w_ring.index(step % STAGES)
                if not TRANSPOSED:
                    b = b.permute((1, 0))
                acc = warpgroup_mma(x_ring.index(step % STAGES), b, acc, is_async=True)
                acc = warpgroup_mma_wait(num_outstanding=1, deps=(acc,))
                mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), count=1, pred=k > 0)
            mbarrier.arrive(order.index(1 - WHICH), count=1)
            acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
            mbarrier.arrive(empty.index((first + steps - 1) % STAGES), count=1)
            row, col = block_m * BLOCK_M, block_n * BLOCK_N
            left, right = halves(acc)
            if BLOCK_N == 2 * PART:
                store_part(y, y_ptr, buffer, left, start, size, row, col, N)
                store_part(y, y_ptr, buffer, right, start, size, row, col + PART, N)
            else:
                part0, part1 = halves(left)
                part2, part3 = halves(right)
                store_part(y, y_ptr, buffer, part0, start, size, row, col, N)
                store_part(y, y_ptr, buffer, part1, start, size, row, col + PART, N)
                store_part(y, y_ptr, buffer, part2, start, size, row, col + 2 * PART, N)
                store_part(y, y_ptr, buffer, part3, start, size, row, col + 3 * PART, N)
        turn += 1
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["R", "E", "first_entry"])
def grouped_mm_pingpong_kernel(
    y_ptr, x, weight, y, offs_ptr, tiles_ptr, first_entry, R, E, N, K,
    TRANSPOSED: gl.constexpr, BLOCK_N: gl.constexpr, GROUP: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """y[rows of e] = x[rows of e] @ weight[e].T; BLOCK_K divides K."""
    BLOCK_M: gl.constexpr = x.block_type.shape[0]
    step = gl.arange(0, ZEROS, layout=gl.BlockedLayout([8], [32], [4], [0]))
    end = R.to(gl.int64) * N
    first = gl.load(offs_ptr + E - 1).to(gl.int64) * N + gl.program_id(0) * ZEROS
    for i in range(first, end, gl.num_programs(0) * ZEROS):
        gl.store(y_ptr + i + step, (0 * step).to(y.dtype), mask=i + step < end)

    num_n = gl.cdiv(N, BLOCK_N)
    total = gl.load(tiles_ptr + BLOCK_M // 128) * num_n
    BLOCK_K: gl.constexpr = x.block_type.shape[1]
    x_ring = gl.allocate_shared_memory(x.dtype, [STAGES, BLOCK_M, BLOCK_K], x.layout)
    W_SHAPE: gl.constexpr = [STAGES, BLOCK_K, BLOCK_N] if TRANSPOSED else [STAGES, BLOCK_N, BLOCK_K]
    w_ring = gl.allocate_shared_memory(x.dtype, W_SHAPE, weight.layout)
    buffer0 = gl.allocate_shared_memory(y.dtype, y.block_type.shape, y.layout)
    buffer1 = gl.allocate_shared_memory(y.dtype, y.block_type.shape, y.layout)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    order = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    mbarrier.init(order.index(0), count=1)
    mbarrier.init(order.index(1), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(empty.index(i), count=1)
        mbarrier.init(ready.index(i), count=1)
    entries_ptr = tiles_ptr + first_entry
    # fmt: off
    gl.warp_specialize(
        [
            (multiply_tiles, (x, weight, y, y_ptr, entries_ptr, offs_ptr, total, R, N, K, num_n,
                              x_ring, w_ring, buffer0, empty, ready, order,
                              TRANSPOSED, GROUP, STAGES, 0)),
            (multiply_tiles, (x, weight, y, y_ptr, entries_ptr, offs_ptr, total, R, N, K, num_n,
                              x_ring, w_ring, buffer1, empty, ready, order,
                              TRANSPOSED, GROUP, STAGES, 1)),
            (load_tiles, (x, weight, y, y_ptr, entries_ptr, offs_ptr, total, R, N, K, num_n,
                          x_ring, w_ring, buffer0, empty, ready, order,
                          TRANSPOSED, GROUP, STAGES, 0)),
        ],
        [4, 1],
        [232, 40],
    )
    # fmt: on
