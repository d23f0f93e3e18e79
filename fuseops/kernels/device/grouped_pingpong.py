"""Grouped GEMM of Hopper in Gluon: persistent, warp-specialized, a producer and two consumer warpgroups of WGMMA.

The producer (`grouped_rings`) fills rings of operand tiles in shared memory. Consumers take alternate tiles of their
program (ping-pong: one runs its mainloop while the other runs its epilogue) or, COOPERATIVE, the upper and the lower
half of each tile.

The epilogue stores y in subtiles of 64 columns through a consumer's own smem buffers, by TMA (`store_subtile`); or goes
on through an activation (`grouped_swiglu`); or, with SLOTS, through the gradient of one (`grouped_dswiglu`).

`order_bars[w]` is the ordered barrier of ping-pong: consumer w waits for it before its mainloop, and arrives at the
other's after its last k step. It is needed for more than order: without it a consumer could wait more than one phase
ahead on a ring slot, where the parity of an mbarrier says nothing.

The mainloop keeps one WGMMA in flight: a consumer releases a slot when it has issued the WGMMA of the next step and the
slot's own has completed. It counts the steps of all tiles of the program, also of those that it skips, so that slots
and phases are those of the producer. The next tile is decoded where its loads are hidden: beside the last WGMMA, or
beside the other consumer's mainloop.

Tuples: `problem` and `ring` as in `grouped_rings`; `out` is (y_desc, y_ptr, bias_ptr, smem buffers of the consumer);
`group_info` is (group, start, size, N), its first row and its rows.
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

from .gluon_gemm import Descriptor as Descriptor
from .gluon_gemm import split_columns, zero_padding
from .gluon_names import store_tile
from .grouped_dswiglu import act_bwd_epilogue, alloc_act_bwd, prefetch_h, stage_row_scales
from .grouped_rings import decode_tile, gather_producer, load_tile_entry, tma_producer
from .grouped_swiglu import act_epilogue, alloc_act_buffers, load_row_scale


@gluon.jit
def store_subtile(
    out, probs_ptr, group_info, subtile, row, col,
    HAS_BIAS: gl.constexpr, HAS_PROBS: gl.constexpr, INDEX: gl.constexpr,
):  # fmt: skip
    """Add the bias (* probs) to a subtile of the accumulator and store it through smem buffer INDEX.

    A subtile inside the group is stored by TMA; one that the group ends in, from the same buffer by masked pointers.
    """
    y_desc, y_ptr, bias_ptr, store_buffers = out
    group, start, size, N = group_info
    SUBTILE_M: gl.constexpr = subtile.shape[0]
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    buffer = store_buffers.index(INDEX % store_buffers.shape[0])
    if HAS_BIAS:
        bias_cols = col + gl.arange(
            0, subtile.shape[1], layout=gl.SliceLayout(0, subtile.type.layout)
        )
        bias = gl.load(bias_ptr + group.to(gl.int64) * N + bias_cols, mask=bias_cols < N, other=0.0)
        bias_rows = row + gl.arange(0, SUBTILE_M, layout=gl.SliceLayout(1, subtile.type.layout))
        scale = load_row_scale(probs_ptr, start, size, bias_rows, HAS_PROBS)
        subtile += bias.to(gl.float32)[None, :] * scale[:, None]
    if row + SUBTILE_M <= size:
        tma.store_wait(store_buffers.shape[0] - 1)
        buffer.store(subtile.to(y_desc.dtype))
        fence_async_shared()
        store_tile(y_desc, [start + row, col], buffer)
    else:
        tma.store_wait(0)
        buffer.store(subtile.to(y_desc.dtype))
        rows = row + gl.arange(0, SUBTILE_M, layout=gl.SliceLayout(1, layout))
        cols = col + gl.arange(0, subtile.shape[1], layout=gl.SliceLayout(0, layout))
        y_ptrs = y_ptr + (start + rows).to(gl.int64)[:, None] * N + cols[None, :]
        gl.store(y_ptrs, buffer.load(layout), mask=(rows < size)[:, None] & (cols < N)[None, :])


# fmt: off
@gluon.jit
def mma_consumer(
    out, act_ptr, probs_ptr, act_bwd, problem, ring, order_bars, TRANSPOSED: gl.constexpr, HAS_BIAS: gl.constexpr,
    ACT: gl.constexpr, INTERLEAVED: gl.constexpr, ALPHA: gl.constexpr, LIMIT: gl.constexpr, OFFSET: gl.constexpr,
    HAS_PROBS: gl.constexpr, NEED_Y: gl.constexpr, GATHER: gl.constexpr, COOPERATIVE: gl.constexpr,
    GROUP: gl.constexpr, SLOTS: gl.constexpr, CONSUMER: gl.constexpr,
):
    """Run mainloop and epilogue of the tiles of consumer warpgroup CONSUMER. act_bwd: see `alloc_act_bwd`."""
    _, _, num_tiles, R, N, K, _ = problem
    x_ring, w_ring, empty_bars, full_bars = ring
    SUBTILE_N: gl.constexpr = out[0].block_type.shape[1]
    STAGES: gl.constexpr = x_ring.shape[0]
    BLOCK_M: gl.constexpr = x_ring.shape[1]
    BLOCK_K: gl.constexpr = x_ring.shape[2]
    BLOCK_N: gl.constexpr = w_ring.shape[2 if TRANSPOSED else 1]
    WG_M: gl.constexpr = BLOCK_M // 2 if COOPERATIVE else BLOCK_M
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_N, 16]
    )
    TILES_PER_ROUND: gl.constexpr = 1 if COOPERATIVE else 2
    k_steps = K // BLOCK_K
    tile_stride = TILES_PER_ROUND * gl.num_programs(0)
    first_tile = gl.program_id(0) + (0 if COOPERATIVE else CONSUMER * gl.num_programs(0))
    tile_coords = decode_tile(first_tile, load_tile_entry(first_tile, problem), problem, BLOCK_M, GROUP)
    first_step = (0 if COOPERATIVE else CONSUMER) * k_steps
    order_phase = gl.to_tensor(0)
    for tile in range(first_tile, num_tiles, tile_stride):
        entry = load_tile_entry(tile + tile_stride, problem)
        group, start, size, block_m, block_n = tile_coords
        row, col = block_m * BLOCK_M, block_n * BLOCK_N
        if COOPERATIVE:
            row += CONSUMER * WG_M
        group_info = group, start, size, N
        if SLOTS:
            dprobs_ptr, h_ring, acc_smem, row_scales = act_bwd
            for i in gl.static_range(SLOTS):
                prefetch_h(h_ring, group_info, row, col, i, ACT, BLOCK_N // SUBTILE_N)
            if HAS_PROBS:
                stage_row_scales(row_scales, probs_ptr, group_info, row)
        acc = gl.zeros((WG_M, BLOCK_N), dtype=gl.float32, layout=layout)
        if COOPERATIVE:
            own_steps = gl.where(row < size, k_steps, 0)  # the lower half may lie beyond the group
        else:
            own_steps = k_steps
            mbarrier.wait(order_bars.index(CONSUMER), (order_phase + 1 - CONSUMER) & 1)
        for k in range(own_steps):
            step = first_step + k
            mbarrier.wait(full_bars.index(step % STAGES), (step // STAGES) & 1)
            if GATHER:
                fence_async_shared()
            a, b = x_ring.index(step % STAGES), w_ring.index(step % STAGES)
            if COOPERATIVE:
                a = a.slice(CONSUMER * WG_M, WG_M, 0)
            if not TRANSPOSED:
                b = b.permute((1, 0))
            acc = warpgroup_mma(a, b, acc, is_async=True)
            acc = warpgroup_mma_wait(num_outstanding=1, deps=(acc,))
            mbarrier.arrive(empty_bars.index((step + STAGES - 1) % STAGES), count=1, pred=k > 0)
        if COOPERATIVE:
            for k in range(own_steps, k_steps):  # release the slots of a half that is not computed
                step = first_step + k
                mbarrier.wait(full_bars.index(step % STAGES), (step // STAGES) & 1)
                mbarrier.arrive(empty_bars.index(step % STAGES), count=1)
            # the next tile, beside the last WGMMA
            tile_coords = decode_tile(tile + tile_stride, entry, problem, BLOCK_M, GROUP)
        else:
            mbarrier.arrive(order_bars.index(1 - CONSUMER), count=1)
        acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
        mbarrier.arrive(empty_bars.index((first_step + k_steps - 1) % STAGES), count=1, pred=row < size)
        if SLOTS:
            outs = out[1], act_ptr
            dprobs_ptr += block_n * R
            act_bwd_epilogue(acc, h_ring, acc_smem, row_scales, outs, dprobs_ptr, group_info, row, col, ACT, HAS_PROBS)
        elif ACT != "":
            if ACT != "srelu" and not INTERLEAVED:
                col = block_n * (BLOCK_N // 2)
            act_out = act_ptr, probs_ptr, group_info, row, col
            act_epilogue(acc, out, act_out, HAS_BIAS, ACT, INTERLEAVED, ALPHA, LIMIT, OFFSET, HAS_PROBS, NEED_Y)
        else:
            subtiles = split_columns(acc, SUBTILE_N)
            for i in gl.static_range(BLOCK_N // SUBTILE_N):
                sub_col = col + i * SUBTILE_N
                store_subtile(out, probs_ptr, group_info, subtiles[i], row, sub_col, HAS_BIAS, HAS_PROBS, i)
        if not COOPERATIVE:  # the next tile, beside the other consumer's mainloop
            tile_coords = decode_tile(tile + tile_stride, entry, problem, BLOCK_M, GROUP)
        first_step += TILES_PER_ROUND * k_steps
        order_phase += 1
    tma.store_wait(0)
# fmt: on


@gluon.jit(do_not_specialize=["R", "E", "first_entry"])
def grouped_mm_pingpong_kernel(
    y_ptr, x, index_ptr, weight, y, bias_ptr, act_ptr, probs_ptr, h, dprobs_ptr, offs_ptr,
    tiles_ptr, first_entry, R, E, N, K, stride_x,
    GATHER: gl.constexpr, TRANSPOSED: gl.constexpr, HAS_BIAS: gl.constexpr,
    ACT: gl.constexpr, INTERLEAVED: gl.constexpr, ALPHA: gl.constexpr, LIMIT: gl.constexpr,
    OFFSET: gl.constexpr, HAS_PROBS: gl.constexpr, NEED_Y: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, COOPERATIVE: gl.constexpr, GROUP: gl.constexpr,
    STAGES: gl.constexpr, SLOTS: gl.constexpr,
):  # fmt: skip
    """y[rows of e] = x[rows of e] @ weight[e].T (+ bias[e] (* probs)), or y and act = ACT(y) * probs.

    64 divides K, and 256 N where gate and up are halves of it (not INTERLEAVED). Without NEED_Y y is not written. With
    GATHER row r of x is its row index[r]. With SLOTS the product is da: y becomes dh, act is ACT(h) * probs, dprobs
    (column blocks, R) gets partial sums, and each consumer prefetches h through a ring of SLOTS subtiles.
    """
    GATED: gl.constexpr = ACT != "" and ACT != "srelu"
    GATE_UP_SPLIT: gl.constexpr = GATED and SLOTS == 0 and not INTERLEAVED
    H_PER_ACT: gl.constexpr = 2 if GATED else 1
    BLOCK_K: gl.constexpr = 64
    NUM_BUFFERS: gl.constexpr = SLOTS if SLOTS else 2 if COOPERATIVE else 1
    BUFFERS_SHAPE: gl.constexpr = [NUM_BUFFERS, y.block_type.shape[0], y.block_type.shape[1]]
    W_RING_SHAPE: gl.constexpr = (
        [STAGES, BLOCK_K, BLOCK_N] if TRANSPOSED else [STAGES, BLOCK_N, BLOCK_K]
    )
    x_ring = gl.allocate_shared_memory(y.dtype, [STAGES, BLOCK_M, BLOCK_K], y.layout)
    w_ring = gl.allocate_shared_memory(y.dtype, W_RING_SHAPE, y.layout)
    if ACT != "" and SLOTS == 0:
        WG_M: gl.constexpr = BLOCK_M // (1 + COOPERATIVE)
        buffers0 = alloc_act_buffers(y.dtype, 2 if GATE_UP_SPLIT else 1, WG_M)
        buffers1 = alloc_act_buffers(y.dtype, 2 if GATE_UP_SPLIT else 1, WG_M)
    else:
        buffers0 = gl.allocate_shared_memory(y.dtype, BUFFERS_SHAPE, y.layout)
        buffers1 = gl.allocate_shared_memory(y.dtype, BUFFERS_SHAPE, y.layout)
    empty_bars = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    full_bars = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    order_bars = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    mbarrier.init(order_bars.index(0), count=1)
    mbarrier.init(order_bars.index(1), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(empty_bars.index(i), count=2 if COOPERATIVE else 1)
        # one arrival of TMA, and with GATHER of each thread that issues cp.async
        mbarrier.init(full_bars.index(i), count=129 if GATHER else 1)

    if SLOTS:
        act_bwd0 = alloc_act_bwd(
            h, buffers0, dprobs_ptr, ACT, BLOCK_M // (1 + COOPERATIVE), BLOCK_N
        )
        act_bwd1 = alloc_act_bwd(
            h, buffers1, dprobs_ptr, ACT, BLOCK_M // (1 + COOPERATIVE), BLOCK_N
        )
    else:
        act_bwd0, act_bwd1 = order_bars, order_bars

    if NEED_Y:
        zero_padding(y_ptr, offs_ptr, R, E, H_PER_ACT * N if SLOTS else N)
    if SLOTS:
        zero_padding(act_ptr, offs_ptr, R, E, N)
        if HAS_PROBS:
            for i in range(gl.cdiv(N, BLOCK_N)):
                zero_padding(dprobs_ptr + i * R, offs_ptr, R, E, 1)
    elif ACT != "":
        zero_padding(act_ptr, offs_ptr, R, E, N // H_PER_ACT)
    num_n = gl.cdiv(N, BLOCK_N)
    num_tiles = gl.load(tiles_ptr + BLOCK_M // 128) * num_n
    problem = tiles_ptr + first_entry, offs_ptr, num_tiles, R, N, K, num_n
    ring = x_ring, w_ring, empty_bars, full_bars
    out0, out1 = (y, y_ptr, bias_ptr, buffers0), (y, y_ptr, bias_ptr, buffers1)
    # fmt: off
    gl.warp_specialize(
        [
            (mma_consumer, (out0, act_ptr, probs_ptr, act_bwd0, problem, ring, order_bars, TRANSPOSED, HAS_BIAS,
                            ACT, INTERLEAVED, ALPHA, LIMIT, OFFSET, HAS_PROBS, NEED_Y, GATHER, COOPERATIVE, GROUP,
                            SLOTS, 0)),
            (mma_consumer, (out1, act_ptr, probs_ptr, act_bwd1, problem, ring, order_bars, TRANSPOSED, HAS_BIAS,
                            ACT, INTERLEAVED, ALPHA, LIMIT, OFFSET, HAS_PROBS, NEED_Y, GATHER, COOPERATIVE, GROUP,
                            SLOTS, 1)),
            (gather_producer, (x, index_ptr, stride_x, weight, problem, ring, TRANSPOSED, GATE_UP_SPLIT, GROUP))
            if GATHER else (tma_producer, (x, weight, problem, ring, TRANSPOSED, GATE_UP_SPLIT, GROUP)),
        ],
        [4, 4 if GATHER else 1],  # warps of the second consumer and of the producer
        [224 if GATHER else 232, 56 if GATHER else 40],  # and their registers a thread
    )
    # fmt: on
