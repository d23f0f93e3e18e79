"""FP8 GEMM of Hopper in Gluon, persistent and warp-specialized: a TMA producer warp and two consumer warpgroups.

Forward and dgrad (a: rows, b: weights) and weight gradient (a, b: columns), dense or grouped. A program walks over
tiles of BLOCK_M x BLOCK_N; consumer 0 owns the upper half of each tile, consumer 1 the lower one. `fp8_rings` has the
producer and the tile scheduler, `fp8_stores` the epilogue, which runs beside the producer's loads for the next tile.

Two-level accumulation (promotion): tensor cores sum FP8 products with about 14 bits, so a consumer multiplies one K
block of 128 into a partial accumulator, and one FMA an element adds that, scaled, to the float32 accumulator. It does
so in subtiles of 64 x 128, one or two a tile, which share the registers of one partial accumulator. `compiler_fence`
keeps the second subtile's MMA behind the first one's FMAs: ptxas hoists it otherwise, needs a second partial
accumulator, and spills in the loop.

Consumers take turns, subtile by subtile, at two named barriers (ping-pong): while one adds, the other multiplies. With
FAST_ACCUM there are neither partials nor turns: the tensor cores accumulate over all of K.

Parameters of the kernel:
    M, N         rows of a, of all groups, and of b, of one group
    rows         M, or with WGRAD the columns of a and b, which are summed
    blocks       blocks of 128 along K
    first_entry  where the entries of tiles of BLOCK_M rows begin in tiles_ptr
    count_at     where tiles_ptr has the number of these entries
    a_step       1 where each group has a "tensor" scale of its own, else 0; so b_step
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .fp8_rings import (
    BLOCK,
    NONE,
    ROW_VECTOR,
    SQUARE,
    VECTOR,
    load_tile_entry,
    load_tiles,
    tile_coords,
)
from .fp8_rings import describe_codes as describe_codes
from .fp8_rings import describe_rows as describe_rows
from .fp8_rings import describe_vectors as describe_vectors
from .fp8_stores import store_subtile, zero_padding_scales
from .gluon_gemm import column_halves, zero_padding
from .gluon_gemm import describe_weight as describe_weight
from .sums import F32_BOX_COLS
from .sums import describe_sums as describe_sums

MOV_ASM = gl.constexpr("mov.b32 $0, $1;")
# Named barriers, 14 and 15, which Triton does not use: consumer c waits at barrier 14 + c until the other has arrived
# there, 128 threads each.
WAIT_TURN_ASM = gl.constexpr(
    ("bar.sync 14, 256; mov.b32 $0, $1;", "bar.sync 15, 256; mov.b32 $0, $1;")
)
PASS_TURN_ASM = gl.constexpr(
    ("bar.arrive 15, 256; mov.b32 $0, $1;", "bar.arrive 14, 256; mov.b32 $0, $1;")
)


@gluon.jit
def compiler_fence(acc):
    """Return acc unchanged; the compiler moves no later MMA above this, as it doesn't see through volatile assembly."""
    return gl.inline_asm_elementwise(MOV_ASM, "=r,r", [acc], gl.float32, is_pure=False, pack=1)


@gluon.jit
def named_barrier(ASM: gl.constexpr, CONSUMER: gl.constexpr):
    """Run a bar.sync or bar.arrive in every thread of a consumer: each has one element of `token`, so runs it once."""
    token = gl.full([128], 0, gl.int32, gl.BlockedLayout([1], [32], [4], [0]))
    gl.inline_asm_elementwise(ASM[CONSUMER], "=r,r", [token], gl.int32, is_pure=False, pack=1)


@gluon.jit
def wait_turn(step, subtile: gl.constexpr, CONSUMER: gl.constexpr):
    """Wait until the other consumer has issued its MMA. Consumer 0 begins the very first step without waiting.

    From there on the turns alternate strictly, over tiles too, so no barrier sees one consumer twice in a row.
    """
    if CONSUMER == 1 or subtile == 1:
        named_barrier(WAIT_TURN_ASM, CONSUMER)
    elif step > 0:
        named_barrier(WAIT_TURN_ASM, CONSUMER)


@gluon.jit
def scale_accumulate(
    acc, partial, row_scale, col_scale, A_SCALE: gl.constexpr, B_SCALE: gl.constexpr
):
    """Return acc + partial * scales: the promotion of one K block.

    row_scale  of a's rows, or one number; times b's scale if that is one number for the subtile (SQUARE)
    col_scale  of b's rows, with B_SCALE VECTOR
    """
    if B_SCALE == VECTOR:
        partial *= col_scale[None, :]
    if A_SCALE == VECTOR or A_SCALE == ROW_VECTOR:
        acc += partial * row_scale[:, None]
    elif A_SCALE == SQUARE:
        acc += partial * row_scale
    else:
        acc += partial
    return acc


@gluon.jit
def load_pair(ptr0, ptr1, DISTINCT: gl.constexpr):
    """Load the values of two subtiles. Unless DISTINCT both have those of the first."""
    value0 = gl.load(ptr0)
    value1 = value0
    if DISTINCT:
        value1 = gl.load(ptr1)
    return value0, value1


@gluon.jit
def square_scale_ptrs(b_scale, coords, N, k_blocks, WGRAD: gl.constexpr, BLOCK_N: gl.constexpr):
    """Return pointers to the scales of b's squares, at the tile's first K block, for both subtiles' columns.

    Squares beyond N are clamped to the last one: their columns aren't stored.
    """
    group, _, _, _, block_n, first_k_block, _ = coords
    last_square = (N + BLOCK - 1) // BLOCK - 1
    b_scale += first_k_block
    if not WGRAD:
        b_scale += group * (last_square + 1) * k_blocks
    square = block_n * (BLOCK_N // BLOCK)
    ptr0 = b_scale + gl.minimum(square, last_square) * k_blocks
    return ptr0, b_scale + gl.minimum(square + BLOCK_N // BLOCK - 1, last_square) * k_blocks


@gluon.jit
def skip_steps(begin, end, ring, SUBTILES: gl.constexpr, CONSUMER: gl.constexpr):
    """Take part in steps without a product, whose rows are beyond the group: pass every turn, and free the slots."""
    a_ring, _, _, _, empty, full = ring
    STAGES: gl.constexpr = a_ring.shape[0]
    for step in range(begin, end):
        mbarrier.wait(full.index(step % STAGES), (step // STAGES) & 1)
        for subtile in gl.static_range(SUBTILES):
            wait_turn(step, subtile, CONSUMER)
            named_barrier(PASS_TURN_ASM, CONSUMER)
        mbarrier.arrive(empty.index(step % STAGES), count=1)


@gluon.jit
def mma_promoted(
    a_scale, b_scale, coords, M, N, problem, ring, first_step,
    WGRAD: gl.constexpr, A_SCALE: gl.constexpr, B_SCALE: gl.constexpr, CONSUMER: gl.constexpr,
):  # fmt: skip
    """Multiply a consumer's half of a tile, promoting the partial accumulator to float32 after each K block of 128.

    Return the float32 accumulators of its subtiles (64, 128): acc1 is 64 rows below acc0 in a tile of 256 x 128, 128
    columns to the right in one of 128 x 256, and unused in one of 128 x 128. Scales in global memory are prefetched one
    step ahead, at clamped addresses, while the MMA runs.
    """
    _, group_start, group_rows, block_m, _, first_k_block, k_steps = coords
    _, _, _, _, total_rows, k_blocks, _, _ = problem
    a_ring, b_ring, a_scale_ring, b_scale_ring, empty, full = ring
    STAGES: gl.constexpr = a_ring.shape[0]
    BLOCK_M: gl.constexpr = a_ring.shape[1]
    BLOCK_N: gl.constexpr = b_ring.shape[1]
    ROWS: gl.constexpr = BLOCK_M // 2
    SUBTILES: gl.constexpr = ROWS * BLOCK_N // (64 * BLOCK)
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 32])
    row_layout: gl.constexpr = gl.SliceLayout(1, acc_layout)
    col_layout: gl.constexpr = gl.SliceLayout(0, acc_layout)
    acc0 = gl.zeros((64, BLOCK), gl.float32, acc_layout)
    acc1 = gl.zeros((64, BLOCK), gl.float32, acc_layout)
    partial = gl.zeros((64, BLOCK), gl.float32, acc_layout)
    row = block_m * BLOCK_M + CONSUMER * ROWS
    if A_SCALE == SQUARE:
        last_square = (M + BLOCK - 1) // BLOCK - 1
        a_scale += gl.minimum(row // BLOCK, last_square) * k_blocks + first_k_block
        next_a_scale = gl.load(a_scale)
    if A_SCALE == ROW_VECTOR:
        rows = group_start + row + gl.arange(0, 64, layout=row_layout)
        rows0 = gl.minimum(rows, total_rows - 1)
        rows1 = gl.minimum(rows + ROWS - 64, total_rows - 1)
        next_a_scale0, next_a_scale1 = load_pair(a_scale + rows0, a_scale + rows1, ROWS > 64)
    if B_SCALE == SQUARE:
        b_scale_ptr0, b_scale_ptr1 = square_scale_ptrs(b_scale, coords, N, k_blocks, WGRAD, BLOCK_N)
        next_b_scale0, next_b_scale1 = load_pair(b_scale_ptr0, b_scale_ptr1, BLOCK_N > BLOCK)
    own_steps = k_steps
    if CONSUMER == 1:  # the lower half may lie beyond the group, or the weight
        own_steps = gl.where(row < (M if WGRAD else group_rows), k_steps, 0)
    for k in range(own_steps):
        slot = (first_step + k) % STAGES
        mbarrier.wait(full.index(slot), ((first_step + k) // STAGES) & 1)
        a0 = a_ring.index(slot).slice(CONSUMER * ROWS, 64, 0)
        b0 = b_ring.index(slot).slice(0, BLOCK, 0).permute((1, 0))
        wait_turn(first_step + k, 0, CONSUMER)
        partial = warpgroup_mma(a0, b0, partial, is_async=True, use_acc=False)
        named_barrier(PASS_TURN_ASM, CONSUMER)
        row_scale0, row_scale1, col_scale0, col_scale1 = 1.0, 1.0, 1.0, 1.0
        if A_SCALE == VECTOR:
            a_scale_slot = a_scale_ring.index(slot).reshape((BLOCK_M,))
            row_scale0 = a_scale_slot.slice(CONSUMER * ROWS, 64, 0).load(row_layout)
            row_scale1 = row_scale0
            if ROWS > 64:
                row_scale1 = a_scale_slot.slice(CONSUMER * ROWS + 64, 64, 0).load(row_layout)
        if A_SCALE == ROW_VECTOR:
            row_scale0, row_scale1 = next_a_scale0, next_a_scale1
            next_ptr = a_scale + gl.minimum(k + 1, k_steps - 1).to(gl.int64) * total_rows
            next_a_scale0, next_a_scale1 = load_pair(next_ptr + rows0, next_ptr + rows1, ROWS > 64)
        if A_SCALE == SQUARE:
            row_scale0, row_scale1 = next_a_scale, next_a_scale
            next_a_scale = gl.load(a_scale + gl.minimum(k + 1, k_steps - 1))
        if B_SCALE == VECTOR:
            b_scale_slot = b_scale_ring.index(slot).reshape((BLOCK_N,))
            col_scale0 = b_scale_slot.slice(0, BLOCK, 0).load(col_layout)
            col_scale1 = col_scale0
            if BLOCK_N > BLOCK:
                col_scale1 = b_scale_slot.slice(BLOCK, BLOCK, 0).load(col_layout)
        if B_SCALE == SQUARE:
            row_scale0, row_scale1 = row_scale0 * next_b_scale0, row_scale1 * next_b_scale1
            next_k = gl.minimum(k + 1, k_steps - 1)
            next_b_scale0, next_b_scale1 = load_pair(
                b_scale_ptr0 + next_k, b_scale_ptr1 + next_k, BLOCK_N > BLOCK
            )
        partial = warpgroup_mma_wait(num_outstanding=0, deps=(partial,))
        if SUBTILES == 1:
            mbarrier.arrive(empty.index(slot), count=1)
            acc0 = scale_accumulate(acc0, partial, row_scale0, col_scale0, A_SCALE, B_SCALE)
        else:
            acc0 = compiler_fence(
                scale_accumulate(acc0, partial, row_scale0, col_scale0, A_SCALE, B_SCALE)
            )
            a1 = a_ring.index(slot).slice(CONSUMER * ROWS + ROWS - 64, 64, 0)
            b1 = b_ring.index(slot).slice(BLOCK_N - BLOCK, BLOCK, 0).permute((1, 0))
            wait_turn(first_step + k, 1, CONSUMER)
            partial = warpgroup_mma(a1, b1, partial, is_async=True, use_acc=False)
            named_barrier(PASS_TURN_ASM, CONSUMER)
            partial = warpgroup_mma_wait(num_outstanding=0, deps=(partial,))
            mbarrier.arrive(empty.index(slot), count=1)
            acc1 = scale_accumulate(acc1, partial, row_scale1, col_scale1, A_SCALE, B_SCALE)
    skip_steps(first_step + own_steps, first_step + k_steps, ring, SUBTILES, CONSUMER)
    return acc0, acc1


@gluon.jit
def mma_fast_accum(coords, ring, first_step, CONSUMER: gl.constexpr):
    """Multiply a consumer's half of a tile of 128 x 256 with fast accumulation: the tensor cores sum over all of K.

    One MMA stays in flight, so a slot is freed one step after its own. Return the halves (64, 128) of the columns.
    """
    _, _, _, _, _, _, k_steps = coords
    a_ring, b_ring, _, _, empty, full = ring
    STAGES: gl.constexpr = a_ring.shape[0]
    BLOCK_N: gl.constexpr = b_ring.shape[1]
    acc_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 32])
    acc = gl.zeros((64, BLOCK_N), gl.float32, acc_layout)
    for k in range(k_steps):
        slot = (first_step + k) % STAGES
        mbarrier.wait(full.index(slot), ((first_step + k) // STAGES) & 1)
        a = a_ring.index(slot).slice(CONSUMER * 64, 64, 0)
        acc = warpgroup_mma(a, b_ring.index(slot).permute((1, 0)), acc, is_async=True)
        acc = warpgroup_mma_wait(num_outstanding=1, deps=(acc,))
        mbarrier.arrive(empty.index((first_step + k + STAGES - 1) % STAGES), count=1, pred=k > 0)
    acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
    mbarrier.arrive(
        empty.index((first_step + k_steps + STAGES - 1) % STAGES), count=1, pred=k_steps > 0
    )
    return column_halves(acc)


@gluon.jit
def multiply_tiles(
    out, epilogue, a_scale, b_scale, M, N, problem, ring,
    WGRAD: gl.constexpr, GROUPED: gl.constexpr, A_SCALE: gl.constexpr, B_SCALE: gl.constexpr,
    FAST_ACCUM: gl.constexpr, SCALING: gl.constexpr, HAS_BIAS: gl.constexpr, ACCUMULATE: gl.constexpr,
    GROUP: gl.constexpr, CONSUMER: gl.constexpr,
):  # fmt: skip
    """Consume: run the mainloop and the epilogue of this consumer's half of each tile of the program.

    problem and ring: as of `load_tiles`; out, epilogue and bounds: as `fp8_stores` says. The table entry of the next
    tile is loaded before the mainloop, and the tile decoded before the epilogue.
    """
    _, _, num_tiles, _, _, _, _, _ = problem
    BLOCK_M: gl.constexpr = ring[0].shape[1]
    BLOCK_N: gl.constexpr = ring[1].shape[1]
    ROWS: gl.constexpr = BLOCK_M // 2
    first_step = gl.to_tensor(0)
    entry = load_tile_entry(gl.program_id(0), problem, GROUPED)
    coords = tile_coords(gl.program_id(0), entry, problem, WGRAD, GROUPED, BLOCK_M, GROUP)
    for tile in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        next_tile = tile + gl.num_programs(0)
        entry = load_tile_entry(next_tile, problem, GROUPED)
        group, group_start, group_rows, block_m, block_n, _, k_steps = coords
        if FAST_ACCUM:
            acc0, acc1 = mma_fast_accum(coords, ring, first_step, CONSUMER)
        else:
            acc0, acc1 = mma_promoted(
                a_scale, b_scale, coords, M, N, problem, ring, first_step,
                WGRAD, A_SCALE, B_SCALE, CONSUMER,
            )  # fmt: skip
        coords = tile_coords(next_tile, entry, problem, WGRAD, GROUPED, BLOCK_M, GROUP)
        first_step += k_steps
        row, col = block_m * BLOCK_M + CONSUMER * ROWS, block_n * BLOCK_N
        bounds = group, group_start, group_rows, M, N
        store_subtile(
            out, epilogue, acc0, bounds, row, col, WGRAD, SCALING, HAS_BIAS, ACCUMULATE, 0
        )
        if ROWS > 64:
            store_subtile(
                out, epilogue, acc1, bounds, row + 64, col, WGRAD, SCALING, HAS_BIAS, ACCUMULATE, 1
            )
        elif BLOCK_N > BLOCK:
            store_subtile(
                out, epilogue, acc1, bounds, row, col + BLOCK,
                WGRAD, SCALING, HAS_BIAS, ACCUMULATE, 1,
            )  # fmt: skip
    if not FAST_ACCUM and CONSUMER == 0:
        if first_step > 0:  # the last arrival of consumer 1, which leaves the barrier balanced
            named_barrier(WAIT_TURN_ASM, CONSUMER)
    tma.store_wait(0)


@gluon.jit(
    do_not_specialize=["first_entry", "count_at", "rows", "E", "M", "blocks", "a_step", "b_step"]
)
def fp8_gemm_kernel(
    out_ptr, a, b, out, a_scale, b_scale, bias_ptr, out_scale_ptr, offs_ptr, tiles_ptr,
    first_entry, count_at, rows, E, M, N, blocks, a_step, b_step,
    WGRAD: gl.constexpr, GROUPED: gl.constexpr, SCALING: gl.constexpr, FAST_ACCUM: gl.constexpr,
    HAS_BIAS: gl.constexpr, ACCUMULATE: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, GROUP: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Compute out[rows of e] = a[rows of e] @ b[e].T (+ bias[e]) or, WGRAD, out[e] (+)= a[:, columns of e] @
    b[:, columns of e].T, of codes times their scales.
    """
    BLOCK_SCALE: gl.constexpr = VECTOR if WGRAD else ROW_VECTOR
    BLOCK_OR_NONE: gl.constexpr = BLOCK_SCALE if SCALING == "block" else NONE
    A_SCALE: gl.constexpr = SQUARE if SCALING == "square" else BLOCK_OR_NONE
    B_SCALE: gl.constexpr = SQUARE if A_SCALE == ROW_VECTOR else A_SCALE
    a_ring = gl.allocate_shared_memory(a.dtype, [STAGES, BLOCK_M, BLOCK], a.layout)
    b_ring = gl.allocate_shared_memory(b.dtype, [STAGES, BLOCK_N, BLOCK], b.layout)
    a_scale_ring, b_scale_ring = a_ring, b_ring
    if A_SCALE == VECTOR:
        a_scale_ring = gl.allocate_shared_memory(gl.float32, [STAGES, 1, BLOCK_M], a_scale.layout)
    if B_SCALE == VECTOR:
        b_scale_ring = gl.allocate_shared_memory(gl.float32, [STAGES, 1, BLOCK_N], b_scale.layout)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(empty.index(i), count=2)
        mbarrier.init(full.index(i), count=1)
    if GROUPED and not WGRAD:
        if out_ptr.dtype.element_ty == gl.float8e4nv:
            zero_padding(out_ptr.to(gl.pointer_type(gl.uint8)), offs_ptr, rows, E, N)
            zero_padding_scales(out_scale_ptr, offs_ptr, rows, E, N)
        else:
            zero_padding(out_ptr, offs_ptr, rows, E, N)
    num_m, num_n = gl.cdiv(M, BLOCK_M), gl.cdiv(N, BLOCK_N)
    if not GROUPED:
        num_tiles, tiles_per_entry = num_m * num_n, num_m * num_n
    elif WGRAD:
        num_tiles, tiles_per_entry = E * num_m * num_n, num_m * num_n
    else:
        num_tiles, tiles_per_entry = gl.load(tiles_ptr + count_at) * num_n, num_n
    problem = (
        tiles_ptr + first_entry, offs_ptr, num_tiles, tiles_per_entry, rows, blocks, num_m, num_n,
    )  # fmt: skip
    ring = a_ring, b_ring, a_scale_ring, b_scale_ring, empty, full
    epilogue = a_scale, b_scale, bias_ptr, a_step, b_step, out_scale_ptr, rows
    # fmt: off
    if out_ptr.dtype.element_ty == gl.float32 and not WGRAD:
        out0, out1 = (out_ptr, out, out), (out_ptr, out, out)
    else:
        # Staging buffers of a consumer, one for each MMA of a tile. Tiles of empty groups have no products and follow
        # each other at once: with one buffer, each waits for the store before it.
        SUBTILES: gl.constexpr = 1 if FAST_ACCUM or BLOCK_M * BLOCK_N == BLOCK * BLOCK else 2
        F32_OUT: gl.constexpr = out.dtype == gl.float32
        BUFFER_SHAPE: gl.constexpr = [2 * SUBTILES, 64, F32_BOX_COLS] if F32_OUT else [SUBTILES, 64, BLOCK]
        buffers0 = gl.allocate_shared_memory(out.dtype, BUFFER_SHAPE, out.layout)
        buffers1 = gl.allocate_shared_memory(out.dtype, BUFFER_SHAPE, out.layout)
        out0, out1 = (out_ptr, out, buffers0), (out_ptr, out, buffers1)
    gl.warp_specialize(
        [
            (multiply_tiles, (out0, epilogue, a_scale, b_scale, M, N, problem, ring, WGRAD, GROUPED, A_SCALE, B_SCALE,
                              FAST_ACCUM, SCALING, HAS_BIAS, ACCUMULATE, GROUP, 0)),
            (multiply_tiles, (out1, epilogue, a_scale, b_scale, M, N, problem, ring, WGRAD, GROUPED, A_SCALE, B_SCALE,
                              FAST_ACCUM, SCALING, HAS_BIAS, ACCUMULATE, GROUP, 1)),
            (load_tiles, (a, b, a_scale, b_scale, N, problem, ring, WGRAD, GROUPED, A_SCALE, B_SCALE, GROUP)),
        ],
        [4, 1],
        [240, 24],
    )
    # fmt: on
