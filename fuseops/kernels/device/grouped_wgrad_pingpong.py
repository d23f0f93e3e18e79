"""Weight gradient of grouped GEMMs on Hopper in Gluon: persistent, warp-specialized, a producer and two consumer
warpgroups of WGMMA.

A tile is BLOCK_M columns of a by 256 columns of b, dw = a.T @ b, and its k loop runs over the rows of a group, BLOCK_K
a step. Consumers take alternate tiles of their program (ping-pong: one runs its mainloop while the other stores) or,
COOPERATIVE, the two halves of each tile. There nothing would hide a store at the end of a tile, so a 16-bit result
stays in registers (`deferred`) and leaves in four subtiles, one beside each of the first four k steps of the next tile.

The pipeline is that of `grouped_rings`: a_ring (STAGES, BLOCK_K, BLOCK_M), b_ring (STAGES, BLOCK_K, BLOCK_N), a full
and an empty mbarrier a slot, a `step` that all warpgroups count alike. One warp issues TMA of both operands, or a
warpgroup gathers a row by row with cp.async beside TMA of b. Both operands are MN-major in shared memory; WGMMA reads
the left one transposed. Loads are panels of 64 columns, one 128-byte swizzle atom wide. Ragged descriptors give zeros
for rows beyond the group: a sum over rows must not meet a neighbour's NaN.

`problem` is (groups_ptr, offs_ptr, num_tiles, R, M, N, num_m, num_n), groups_ptr the groups by falling size, M and N
the columns of a and of b.
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

from .gluon_gemm import describe_rows as describe_rows
from .gluon_gemm import describe_weight as describe_weight
from .gluon_gemm import load_group_rows, ragged_coords, split_columns, swizzle
from .gluon_names import load_rows, load_tile, store_tile
from .sums import F32_BOX_COLS, store_float32_grad
from .sums import describe_sums as describe_sums


@gluon.jit
def load_tile_group(tile, problem):
    """Load the group of a tile, 0 beyond the last; issued one tile early, so that its latency is hidden. Large groups
    come first, so that no long tile is left for the end.
    """
    groups_ptr, _, num_tiles, _, _, _, num_m, num_n = problem
    return gl.load(groups_ptr + tile // (num_m * num_n), mask=tile < num_tiles, other=0)


@gluon.jit
def decode_tile(tile, group, problem, GROUP: gl.constexpr):
    """Decode a tile into (first row of its group, number of rows, row block of dw, column block of dw)."""
    _, offs_ptr, _, R, _, _, num_m, num_n = problem
    tiles_per_group = num_m * num_n
    start, size = load_group_rows(offs_ptr, group, R)
    block_m, block_n = swizzle(tile % tiles_per_group, num_m, num_n, GROUP)
    return start, size, block_m, block_n


@gluon.jit
def load_panels(desc, start, size, k, col, last_panel_col, full_bar, slot_buffer):
    """Issue TMA of rows start + k, ... of an operand tile into a slot, in panels of 64 columns.

    Panels beyond the operand's columns load the last one again: out-of-bounds zero fill is slow.
    """
    for i in gl.static_range(slot_buffer.shape[1] // 64):
        panel_col = gl.minimum(col + i * 64, last_panel_col)
        panel = slot_buffer.slice(i * 64, 64, 1)
        load_tile(desc, ragged_coords(start, size, k, panel_col), full_bar, panel)


@gluon.jit
def tma_producer(a_desc, b_desc, problem, ring, GROUP: gl.constexpr, STAGES: gl.constexpr):
    """Run the producer warp: TMA of both operands for every k step of every tile of this program."""
    _, _, num_tiles, _, M, N, _, _ = problem
    a_ring, b_ring, empty_bars, full_bars = ring
    BLOCK_K: gl.constexpr = a_ring.shape[1]
    BLOCK_M: gl.constexpr = a_ring.shape[2]
    BLOCK_N: gl.constexpr = b_ring.shape[2]
    last_col_a, last_col_b = (gl.cdiv(M, 64) - 1) * 64, (gl.cdiv(N, 64) - 1) * 64
    step = gl.to_tensor(0)
    group = load_tile_group(gl.program_id(0), problem)
    for tile in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        next_group = load_tile_group(tile + gl.num_programs(0), problem)
        start, size, block_m, block_n = decode_tile(tile, group, problem, GROUP)
        for k in range(0, size, BLOCK_K):
            slot = step % STAGES
            mbarrier.wait(empty_bars.index(slot), ((step // STAGES) & 1) ^ 1)
            full_bar = full_bars.index(slot)
            mbarrier.expect(full_bar, (BLOCK_M + BLOCK_N) * BLOCK_K * 2)
            load_panels(
                a_desc, start, size, k, block_m * BLOCK_M, last_col_a, full_bar, a_ring.index(slot)
            )
            load_panels(
                b_desc, start, size, k, block_n * BLOCK_N, last_col_b, full_bar, b_ring.index(slot)
            )
            step += 1
        group = next_group


@gluon.jit
def gather_producer(
    a_ptr, index_ptr, stride_a, b_desc, problem, ring, GROUP: gl.constexpr, STAGES: gl.constexpr
):
    """Run the producer warpgroup: in every k step cp.async of the rows of a by index, then TMA of b.

    The indices of a step are loaded one step early, those of a tile's first step one tile early.
    """
    _, _, num_tiles, _, M, N, _, _ = problem
    a_ring, b_ring, empty_bars, full_bars = ring
    BLOCK_K: gl.constexpr = a_ring.shape[1]
    BLOCK_M: gl.constexpr = a_ring.shape[2]
    BLOCK_N: gl.constexpr = b_ring.shape[2]
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    last_col_b = (gl.cdiv(N, 64) - 1) * 64
    k_offsets = gl.arange(0, BLOCK_K, layout=gl.SliceLayout(1, layout))
    col_offsets = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(0, layout))
    step = gl.to_tensor(0)
    first_tile = gl.program_id(0)
    start, size, block_m, block_n = decode_tile(
        first_tile, load_tile_group(first_tile, problem), problem, GROUP
    )
    group = load_tile_group(first_tile + gl.num_programs(0), problem)
    next_tile_index = gl.load(index_ptr + start + k_offsets, mask=k_offsets < size, other=0)
    for tile in range(first_tile, num_tiles, gl.num_programs(0)):
        next_tile = tile + gl.num_programs(0)
        next_start, next_size, next_block_m, next_block_n = decode_tile(
            next_tile, group, problem, GROUP
        )
        group = load_tile_group(next_tile + gl.num_programs(0), problem)
        index = next_tile_index
        next_tile_index = gl.load(
            index_ptr + next_start + k_offsets, mask=k_offsets < next_size, other=0
        )
        a_cols = block_m * BLOCK_M + col_offsets
        for k in range(0, size, BLOCK_K):
            next_k = k + BLOCK_K + k_offsets
            next_index = gl.load(index_ptr + start + next_k, mask=next_k < size, other=0)
            a_ptrs = a_ptr + index.to(gl.int64)[:, None] * stride_a + a_cols[None, :]
            slot = step % STAGES
            mbarrier.wait(empty_bars.index(slot), ((step // STAGES) & 1) ^ 1)
            full_bar = full_bars.index(slot)
            mask = (k + k_offsets < size)[:, None] & (a_cols < M)[None, :]
            load_rows(a_ring.index(slot), a_ptrs, mask=mask)
            async_copy.mbarrier_arrive(full_bar, increment_count=False)
            mbarrier.expect(full_bar, BLOCK_N * BLOCK_K * 2)
            load_panels(
                b_desc, start, size, k, block_n * BLOCK_N, last_col_b, full_bar, b_ring.index(slot)
            )
            index = next_index
            step += 1
        start, size, block_m, block_n = next_start, next_size, next_block_m, next_block_n


@gluon.jit
def store_subtile(
    dw_desc, store_buffers, subtile, group, row, col, TRANSPOSED: gl.constexpr, INDEX: gl.constexpr
):  # fmt: skip
    """Store a 64 x 64 subtile of a 16-bit dw, or its transpose, by TMA, which clips it at the bounds of dw; INDEX picks
    the smem buffer.
    """
    buffer = store_buffers.index(INDEX % store_buffers.shape[0])
    tma.store_wait(store_buffers.shape[0] - 1)
    if TRANSPOSED:
        buffer.permute((1, 0)).store(subtile.to(dw_desc.dtype))
        fence_async_shared()
        store_tile(dw_desc, [group, col, row], buffer)
    else:
        buffer.store(subtile.to(dw_desc.dtype))
        fence_async_shared()
        store_tile(dw_desc, [group, row, col], buffer)


@gluon.jit
def store_deferred(
    dw_desc, store_buffers, deferred, deferred_coords, index, TRANSPOSED: gl.constexpr
):
    """Store one of the four subtiles of the tile that stays in registers; index is known at run time alone."""
    group, row, col = deferred_coords
    subtiles = split_columns(deferred, 64)
    for i in gl.static_range(4):
        if index == i:
            store_subtile(
                dw_desc, store_buffers, subtiles[i], group, row, col + 64 * i, TRANSPOSED, i
            )


@gluon.jit
def issue_wgmma(
    acc, ring, step, GATHER: gl.constexpr, COOPERATIVE: gl.constexpr, STAGES: gl.constexpr,
    CONSUMER: gl.constexpr,
):  # fmt: skip
    """Wait for the operands of a step and issue its WGMMA, asynchronously."""
    a_ring, b_ring, _empty_bars, full_bars = ring
    mbarrier.wait(full_bars.index(step % STAGES), (step // STAGES) & 1)
    if GATHER:
        fence_async_shared()
    a_slot = a_ring.index(step % STAGES)
    if COOPERATIVE:
        a_slot = a_slot.slice(CONSUMER * 64, 64, 1)
    return warpgroup_mma(a_slot.permute((1, 0)), b_ring.index(step % STAGES), acc, is_async=True)


@gluon.jit
def mma_consumer(
    dw_desc, problem, ring, store_buffers, order_bars,
    TRANSPOSED: gl.constexpr, ACCUMULATE: gl.constexpr, GATHER: gl.constexpr,
    COOPERATIVE: gl.constexpr, GROUP: gl.constexpr, STAGES: gl.constexpr, CONSUMER: gl.constexpr,
):  # fmt: skip
    """Run consumer warpgroup CONSUMER: mainloop and store of its tiles of this program.

    The mainloop keeps one WGMMA in flight, but waits for each that hides a deferred store. In ping-pong both consumers
    walk over all tiles, so that each counts the steps of the other's; a tile of an empty group has none, and stores
    zeros.
    """
    _, _, num_tiles, _, _, _, _, _ = problem
    a_ring, b_ring, empty_bars, _full_bars = ring
    BLOCK_K: gl.constexpr = a_ring.shape[1]
    BLOCK_M: gl.constexpr = a_ring.shape[2]
    BLOCK_N: gl.constexpr = b_ring.shape[2]
    FP32_DW: gl.constexpr = dw_desc.dtype == gl.float32
    DEFERS_STORES: gl.constexpr = COOPERATIVE and not FP32_DW
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_N, 16]
    )
    first_step = gl.to_tensor(0)
    tile_count = gl.to_tensor(0)
    deferred = gl.zeros((64, BLOCK_N), dtype=dw_desc.dtype, layout=layout)
    deferred_coords = first_step, first_step, first_step
    group = load_tile_group(gl.program_id(0), problem)
    for tile in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        next_group = load_tile_group(tile + gl.num_programs(0), problem)
        _, size, block_m, block_n = decode_tile(tile, group, problem, GROUP)
        k_steps = (size + BLOCK_K - 1) // BLOCK_K
        if COOPERATIVE or tile_count % 2 == CONSUMER:
            acc = gl.zeros((64, BLOCK_N), dtype=gl.float32, layout=layout)
            if not COOPERATIVE:
                mbarrier.wait(order_bars.index(CONSUMER), (tile_count // 2 + 1 - CONSUMER) & 1)
            overlapped_steps = gl.to_tensor(0)
            if DEFERS_STORES:
                num_deferred = gl.where(tile < gl.num_programs(0), 0, 4)
                overlapped_steps = gl.minimum(k_steps, num_deferred)
                for k in range(overlapped_steps):
                    acc = issue_wgmma(
                        acc, ring, first_step + k, GATHER, COOPERATIVE, STAGES, CONSUMER
                    )
                    store_deferred(dw_desc, store_buffers, deferred, deferred_coords, k, TRANSPOSED)
                    acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
                    mbarrier.arrive(empty_bars.index((first_step + k) % STAGES), count=1)
                # of a group of fewer steps, or none
                for k in range(overlapped_steps, num_deferred):
                    store_deferred(dw_desc, store_buffers, deferred, deferred_coords, k, TRANSPOSED)
            for k in range(overlapped_steps, k_steps):
                step = first_step + k
                acc = issue_wgmma(acc, ring, step, GATHER, COOPERATIVE, STAGES, CONSUMER)
                acc = warpgroup_mma_wait(num_outstanding=1, deps=(acc,))
                prev_empty_bar = empty_bars.index((step + STAGES - 1) % STAGES)
                mbarrier.arrive(prev_empty_bar, count=1, pred=k > overlapped_steps)
            if not COOPERATIVE:
                mbarrier.arrive(order_bars.index(1 - CONSUMER), count=1)
            acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
            last_slot = (first_step + k_steps + STAGES - 1) % STAGES
            mbarrier.arrive(empty_bars.index(last_slot), count=1, pred=k_steps > overlapped_steps)
            row, col = block_m * BLOCK_M, block_n * BLOCK_N
            if COOPERATIVE:
                row += CONSUMER * 64
            if DEFERS_STORES:
                deferred, deferred_coords = acc.to(dw_desc.dtype), (group, row, col)
            elif FP32_DW:
                store_float32_grad(
                    dw_desc, store_buffers, acc, group, row, col, TRANSPOSED, ACCUMULATE, 0
                )
            else:
                subtiles = split_columns(acc, 64)
                for i in gl.static_range(4):
                    store_subtile(
                        dw_desc, store_buffers, subtiles[i], group, row, col + 64 * i, TRANSPOSED, i
                    )
        first_step += k_steps
        tile_count += 1
        group = next_group
    if DEFERS_STORES:
        for k in range(gl.where(gl.program_id(0) < num_tiles, 4, 0)):
            store_deferred(dw_desc, store_buffers, deferred, deferred_coords, k, TRANSPOSED)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["R", "E"])
def grouped_wgrad_pingpong_kernel(
    offs_ptr, tiles_ptr, dw, a, index_ptr, b, R, E, M, N, stride_a,
    GATHER: gl.constexpr, TRANSPOSED: gl.constexpr, ACCUMULATE: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_K: gl.constexpr, COOPERATIVE: gl.constexpr, GROUP: gl.constexpr,
    STAGES: gl.constexpr, STORES: gl.constexpr,
):  # fmt: skip
    """dw[e] (+)= a[rows of e].T @ b[rows of e], or its transpose. With GATHER row r of a is its row index[r]."""
    BLOCK_N: gl.constexpr = 256
    num_m, num_n = gl.cdiv(M, BLOCK_M), gl.cdiv(N, BLOCK_N)
    num_tiles = E * num_m * num_n
    a_ring = gl.allocate_shared_memory(b.dtype, [STAGES, BLOCK_K, BLOCK_M], b.layout)
    b_ring = gl.allocate_shared_memory(b.dtype, [STAGES, BLOCK_K, BLOCK_N], b.layout)
    FP32_SUBTILE: gl.constexpr = [F32_BOX_COLS, 64] if TRANSPOSED else [64, F32_BOX_COLS]
    BUFFERS_SHAPE: gl.constexpr = [STORES] + (FP32_SUBTILE if dw.dtype == gl.float32 else [64, 64])
    buffers0 = gl.allocate_shared_memory(dw.dtype, BUFFERS_SHAPE, dw.layout)
    buffers1 = gl.allocate_shared_memory(dw.dtype, BUFFERS_SHAPE, dw.layout)
    empty_bars = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    full_bars = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    order_bars = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    mbarrier.init(order_bars.index(0), count=1)
    mbarrier.init(order_bars.index(1), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(empty_bars.index(i), count=2 if COOPERATIVE else 1)
        # cp.async of 128 threads, and TMA
        mbarrier.init(full_bars.index(i), count=129 if GATHER else 1)
    problem = tiles_ptr + 2, offs_ptr, num_tiles, R, M, N, num_m, num_n
    ring = a_ring, b_ring, empty_bars, full_bars
    # fmt: off
    gl.warp_specialize(
        [
            (mma_consumer, (dw, problem, ring, buffers0, order_bars, TRANSPOSED, ACCUMULATE, GATHER, COOPERATIVE,
                            GROUP, STAGES, 0)),
            (mma_consumer, (dw, problem, ring, buffers1, order_bars, TRANSPOSED, ACCUMULATE, GATHER, COOPERATIVE,
                            GROUP, STAGES, 1)),
            (gather_producer, (a, index_ptr, stride_a, b, problem, ring, GROUP, STAGES)) if GATHER
            else (tma_producer, (a, b, problem, ring, GROUP, STAGES)),
        ],
        [4, 4 if GATHER else 1],
        [232, 40],
    )
    # fmt: on
