"""Grouped GEMM of Hopper in Gluon: two consumer warpgroups fed through rings of tiles in shared
memory, on alternate tiles of a program (ping-pong: one multiplies while the other stores) or,
COOPERATIVE, on the upper and the lower half of each tile.

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

from .gluon_names import store_tile
from .grouped_dswiglu import act_back, ask, column_halves, keep_scales, room_for
from .grouped_rings import Descriptor as Descriptor
from .grouped_rings import decode_tile, gather_producer, load_tile_entry, tma_producer
from .grouped_swiglu import room_to_stage, row_scale, store_act

ZEROS = gl.constexpr(1024)


@gluon.jit
def store_part(
    out, probs_ptr, place, part, row, col,
    HAS_BIAS: gl.constexpr, HAS_PROBS: gl.constexpr, NUMBER: gl.constexpr,
):  # fmt: skip
    """Rows of a full tile leave by TMA, those of a ragged one from the same buffer by pointers."""
    y, y_ptr, bias_ptr, buffers = out
    group, start, size, N = place
    ROWS: gl.constexpr = part.shape[0]
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    buffer = buffers.index(NUMBER % buffers.shape[0])
    if HAS_BIAS:
        at = col + gl.arange(0, part.shape[1], layout=gl.SliceLayout(0, part.type.layout))
        bias = gl.load(bias_ptr + group.to(gl.int64) * N + at, mask=at < N, other=0.0)
        each = row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, part.type.layout))
        scale = row_scale(probs_ptr, start, size, each, HAS_PROBS)
        part += bias.to(gl.float32)[None, :] * scale[:, None]
    if row + ROWS <= size:
        tma.store_wait(buffers.shape[0] - 1)
        buffer.store(part.to(y.dtype))
        fence_async_shared()
        store_tile(y, [start + row, col], buffer)
    else:
        tma.store_wait(0)
        buffer.store(part.to(y.dtype))
        rows = row + gl.arange(0, ROWS, layout=gl.SliceLayout(1, layout))
        cols = col + gl.arange(0, part.shape[1], layout=gl.SliceLayout(0, layout))
        to = y_ptr + (start + rows).to(gl.int64)[:, None] * N + cols[None, :]
        gl.store(to, buffer.load(layout), mask=(rows < size)[:, None] & (cols < N)[None, :])


@gluon.jit
def multiply_tiles(
    out, act_ptr, probs_ptr, back, problem, ring, order,
    TRANSPOSED: gl.constexpr, HAS_BIAS: gl.constexpr, ACT: gl.constexpr, PAIRS: gl.constexpr,
    ALPHA: gl.constexpr, LIMIT: gl.constexpr, OFFSET: gl.constexpr, HAS_PROBS: gl.constexpr,
    KEEPS: gl.constexpr, GATHER: gl.constexpr, COOPERATIVE: gl.constexpr, GROUP: gl.constexpr,
    SLOTS: gl.constexpr, WHICH: gl.constexpr,
):  # fmt: skip
    _, _, total, R, N, K, _ = problem
    x_ring, w_ring, empty, ready = ring
    PART: gl.constexpr = out[0].block_type.shape[1]
    STAGES: gl.constexpr = x_ring.shape[0]
    BLOCK_M: gl.constexpr = x_ring.shape[1]
    BLOCK_K: gl.constexpr = x_ring.shape[2]
    BLOCK_N: gl.constexpr = w_ring.shape[2 if TRANSPOSED else 1]
    ROWS: gl.constexpr = BLOCK_M // 2 if COOPERATIVE else BLOCK_M
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, BLOCK_N, 16]
    )
    TURNS: gl.constexpr = 1 if COOPERATIVE else 2
    steps = K // BLOCK_K
    stride = TURNS * gl.num_programs(0)
    first_tile = gl.program_id(0) + (0 if COOPERATIVE else WHICH * gl.num_programs(0))
    at = decode_tile(first_tile, load_tile_entry(first_tile, problem), problem, BLOCK_M, GROUP)
    first = (0 if COOPERATIVE else WHICH) * steps
    phase = gl.to_tensor(0)
    for tile in range(first_tile, total, stride):
        entry = load_tile_entry(tile + stride, problem)
        group, start, size, block_m, block_n = at
        row, col = block_m * BLOCK_M, block_n * BLOCK_N
        if COOPERATIVE:
            row += WHICH * ROWS
        if SLOTS:
            sums_ptr, hidden, staged, scales = back
            place = group, start, size, N
            for i in gl.static_range(SLOTS):
                ask(hidden, place, row, col, i, ACT, BLOCK_N // PART)
            if HAS_PROBS:
                keep_scales(scales, probs_ptr, place, row)
        acc = gl.zeros((ROWS, BLOCK_N), dtype=gl.float32, layout=layout)
        if not COOPERATIVE:
            mbarrier.wait(order.index(WHICH), (phase + 1 - WHICH) & 1)
        mine = steps
        if COOPERATIVE:
            mine = gl.where(row < size, steps, 0)  # a lower half may lie beyond the group
        for k in range(mine):
            step = first + k
            mbarrier.wait(ready.index(step % STAGES), (step // STAGES) & 1)
            if GATHER:
                fence_async_shared()
            a, b = x_ring.index(step % STAGES), w_ring.index(step % STAGES)
            if COOPERATIVE:
                a = a.slice(WHICH * ROWS, ROWS, 0)
            if not TRANSPOSED:
                b = b.permute((1, 0))
            acc = warpgroup_mma(a, b, acc, is_async=True)
            acc = warpgroup_mma_wait(num_outstanding=1, deps=(acc,))
            mbarrier.arrive(empty.index((step + STAGES - 1) % STAGES), count=1, pred=k > 0)
        if COOPERATIVE:
            for k in range(mine, steps):
                step = first + k
                mbarrier.wait(ready.index(step % STAGES), (step // STAGES) & 1)
                mbarrier.arrive(empty.index(step % STAGES), count=1)
        else:
            mbarrier.arrive(order.index(1 - WHICH), count=1)
        if COOPERATIVE:  # the next tile: found beside the last products, or beside the other's
            at = decode_tile(tile + stride, entry, problem, BLOCK_M, GROUP)
        acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
        mbarrier.arrive(empty.index((first + steps - 1) % STAGES), count=1, pred=row < size)
        place = group, start, size, N
        if SLOTS:
            outs = out[1], act_ptr
            sums_ptr += block_n * R
            act_back(acc, hidden, staged, scales, outs, sums_ptr, place, row, col, ACT, HAS_PROBS)
        elif ACT != "":
            if ACT != "srelu" and not PAIRS:
                col = block_n * (BLOCK_N // 2)
            to = act_ptr, probs_ptr, place, row, col
            store_act(acc, out, to, HAS_BIAS, ACT, PAIRS, ALPHA, LIMIT, OFFSET, HAS_PROBS, KEEPS)
        elif BLOCK_N == 2 * PART:
            left, right = column_halves(acc)
            store_part(out, probs_ptr, place, left, row, col, HAS_BIAS, HAS_PROBS, 0)
            store_part(out, probs_ptr, place, right, row, col + PART, HAS_BIAS, HAS_PROBS, 1)
        else:
            left, right = column_halves(acc)
            part0, part1 = column_halves(left)
            part2, part3 = column_halves(right)
            store_part(out, probs_ptr, place, part0, row, col, HAS_BIAS, HAS_PROBS, 0)
            store_part(out, probs_ptr, place, part1, row, col + PART, HAS_BIAS, HAS_PROBS, 1)
            store_part(out, probs_ptr, place, part2, row, col + 2 * PART, HAS_BIAS, HAS_PROBS, 0)
            store_part(out, probs_ptr, place, part3, row, col + 3 * PART, HAS_BIAS, HAS_PROBS, 1)
        if not COOPERATIVE:
            at = decode_tile(tile + stride, entry, problem, BLOCK_M, GROUP)
        first += TURNS * steps
        phase += 1
    tma.store_wait(0)


@gluon.jit
def zero_padding(y_ptr, offs_ptr, R, E, N):
    """Zero the rows at and beyond offs[-1]."""
    step = gl.arange(0, ZEROS, layout=gl.BlockedLayout([8], [32], [4], [0]))
    end = R.to(gl.int64) * N
    first = gl.load(offs_ptr + E - 1).to(gl.int64) * N + gl.program_id(0) * ZEROS
    for i in range(first, end, gl.num_programs(0) * ZEROS):
        gl.store(y_ptr + i + step, (0 * step).to(y_ptr.dtype.element_ty), mask=i + step < end)


@gluon.jit(do_not_specialize=["R", "E", "first_entry"])
def grouped_mm_pingpong_kernel(
    y_ptr, x, index_ptr, weight, y, bias_ptr, act_ptr, probs_ptr, h, sums_ptr, offs_ptr,
    tiles_ptr, first_entry, R, E, N, K, stride_x,
    GATHER: gl.constexpr, TRANSPOSED: gl.constexpr, HAS_BIAS: gl.constexpr,
    ACT: gl.constexpr, PAIRS: gl.constexpr, ALPHA: gl.constexpr, LIMIT: gl.constexpr,
    OFFSET: gl.constexpr, HAS_PROBS: gl.constexpr, KEEPS: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, COOPERATIVE: gl.constexpr, GROUP: gl.constexpr,
    STAGES: gl.constexpr, SLOTS: gl.constexpr,
):  # fmt: skip
    """y[rows of e] = x[rows of e] @ weight[e].T (+ bias[e] (* probs)), or y and act = ACT(y) * probs; 64
    divides K, and 256 N where gate and up are halves of it (not PAIRS). Without KEEPS y is not written. With
    SLOTS, y and act are the gradient of h and ACT of it, for the gradient of ACT that the product is.
    """
    GATED: gl.constexpr = ACT != "" and ACT != "srelu"
    HALVES: gl.constexpr = GATED and SLOTS == 0 and not PAIRS
    SIDES: gl.constexpr = 2 if GATED else 1
    BLOCK_K: gl.constexpr = 64
    COUNT: gl.constexpr = SLOTS if SLOTS else 2 if COOPERATIVE else 1
    BUFFERS: gl.constexpr = [COUNT, y.block_type.shape[0], y.block_type.shape[1]]
    W_SHAPE: gl.constexpr = [STAGES, BLOCK_K, BLOCK_N] if TRANSPOSED else [STAGES, BLOCK_N, BLOCK_K]
    x_ring = gl.allocate_shared_memory(y.dtype, [STAGES, BLOCK_M, BLOCK_K], y.layout)
    w_ring = gl.allocate_shared_memory(y.dtype, W_SHAPE, y.layout)
    if ACT != "" and SLOTS == 0:
        ROWS: gl.constexpr = BLOCK_M // (1 + COOPERATIVE)
        buffers0 = room_to_stage(y.dtype, 2 if HALVES else 1, ROWS)
        buffers1 = room_to_stage(y.dtype, 2 if HALVES else 1, ROWS)
    else:
        buffers0 = gl.allocate_shared_memory(y.dtype, BUFFERS, y.layout)
        buffers1 = gl.allocate_shared_memory(y.dtype, BUFFERS, y.layout)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    order = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    mbarrier.init(order.index(0), count=1)
    mbarrier.init(order.index(1), count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(empty.index(i), count=2 if COOPERATIVE else 1)
        mbarrier.init(ready.index(i), count=129 if GATHER else 1)  # 128 threads and one TMA

    if SLOTS:
        back0 = room_for(h, buffers0, sums_ptr, ACT, BLOCK_M // (1 + COOPERATIVE), BLOCK_N)
        back1 = room_for(h, buffers1, sums_ptr, ACT, BLOCK_M // (1 + COOPERATIVE), BLOCK_N)
    else:
        back0, back1 = order, order

    if KEEPS:
        zero_padding(y_ptr, offs_ptr, R, E, SIDES * N if SLOTS else N)
    if SLOTS:
        zero_padding(act_ptr, offs_ptr, R, E, N)
        if HAS_PROBS:
            for i in range(gl.cdiv(N, BLOCK_N)):
                zero_padding(sums_ptr + i * R, offs_ptr, R, E, 1)
    elif ACT != "":
        zero_padding(act_ptr, offs_ptr, R, E, N // SIDES)
    num_n = gl.cdiv(N, BLOCK_N)
    total = gl.load(tiles_ptr + BLOCK_M // 128) * num_n
    problem = tiles_ptr + first_entry, offs_ptr, total, R, N, K, num_n
    ring = x_ring, w_ring, empty, ready
    out0, out1 = (y, y_ptr, bias_ptr, buffers0), (y, y_ptr, bias_ptr, buffers1)
    # fmt: off
    if GATHER:
        gl.warp_specialize(
            [
                (multiply_tiles, (out0, act_ptr, probs_ptr, back0, problem, ring, order, TRANSPOSED, HAS_BIAS,
                                  ACT, PAIRS, ALPHA, LIMIT, OFFSET, HAS_PROBS, KEEPS, GATHER, COOPERATIVE,
                                  GROUP, SLOTS, 0)),
                (multiply_tiles, (out1, act_ptr, probs_ptr, back1, problem, ring, order, TRANSPOSED, HAS_BIAS,
                                  ACT, PAIRS, ALPHA, LIMIT, OFFSET, HAS_PROBS, KEEPS, GATHER, COOPERATIVE,
                                  GROUP, SLOTS, 1)),
                (gather_producer, (x, index_ptr, stride_x, weight, problem, ring, TRANSPOSED, HALVES,
                                GROUP)),
            ],
            [4, 4],
            [224, 56],
        )
    else:
        gl.warp_specialize(
            [
                (multiply_tiles, (out0, act_ptr, probs_ptr, back0, problem, ring, order, TRANSPOSED, HAS_BIAS,
                                  ACT, PAIRS, ALPHA, LIMIT, OFFSET, HAS_PROBS, KEEPS, GATHER, COOPERATIVE,
                                  GROUP, SLOTS, 0)),
                (multiply_tiles, (out1, act_ptr, probs_ptr, back1, problem, ring, order, TRANSPOSED, HAS_BIAS,
                                  ACT, PAIRS, ALPHA, LIMIT, OFFSET, HAS_PROBS, KEEPS, GATHER, COOPERATIVE,
                                  GROUP, SLOTS, 1)),
                (tma_producer, (x, weight, problem, ring, TRANSPOSED, HALVES, GROUP)),
            ],
            [4, 1],
            [232, 40],
        )
    # fmt: on
