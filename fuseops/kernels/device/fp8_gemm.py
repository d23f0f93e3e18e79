"""FP8 GEMM of Hopper in Gluon: two consumer warpgroups own the halves of each tile, fed by one warp of TMA.

Forward, dgrad (a: rows, b: weights) and weight gradient (a, b: columns), dense or of groups of rows. The tensor cores
sum 128 products with about 14 bits; then one multiplication an element adds them, scaled, to a float32 sum. A
consumer does that in two waves of 64 x 128 that share the room of one product. `fence` keeps the second wave's
product behind the first one's additions: the compiler hoists it otherwise, and spills in the loop.

The consumers multiply in turns, wave by wave, so that one adds while the other multiplies.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)

from .fp8_rings import BLOCK, NONE, ROW_VECTOR, SQUARE, VECTOR, entry_of, load_tiles, locate
from .fp8_rings import describe_codes as describe_codes
from .fp8_rings import describe_rows as describe_rows
from .fp8_rings import describe_vectors as describe_vectors
from .fp8_rings import describe_weight as describe_weight
from .fp8_stores import store_wave, zero_scales
from .grouped_dswiglu import column_halves
from .grouped_pingpong import zero_padding
from .sums import F32_BOX_COLS
from .sums import describe_sums as describe_sums

MOVE = gl.constexpr("mov.b32 $0, $1;")
# barriers that Triton does not use, of both consumers
TAKE = gl.constexpr(("bar.sync 14, 256; mov.b32 $0, $1;", "bar.sync 15, 256; mov.b32 $0, $1;"))
PASS = gl.constexpr(("bar.arrive 15, 256; mov.b32 $0, $1;", "bar.arrive 14, 256; mov.b32 $0, $1;"))


@gluon.jit
def fence(acc):
    """What is multiplied after this stays after it."""
    return gl.inline_asm_elementwise(MOVE, "=r,r", [acc], gl.float32, is_pure=False, pack=1)


@gluon.jit
def at_barrier(WORDS: gl.constexpr, WHICH: gl.constexpr):
    token = gl.full([128], 0, gl.int32, gl.BlockedLayout([1], [32], [4], [0]))
    gl.inline_asm_elementwise(WORDS[WHICH], "=r,r", [token], gl.int32, is_pure=False, pack=1)


@gluon.jit
def take_turn(step, wave: gl.constexpr, WHICH: gl.constexpr):
    """The first consumer begins unasked, once. From there on the turns alternate strictly, over tiles as well: a
    barrier never sees one consumer twice.
    """
    if WHICH == 1 or wave == 1:
        at_barrier(TAKE, WHICH)
    elif step > 0:
        at_barrier(TAKE, WHICH)


@gluon.jit
def added(acc, part, by_row, by_column, A_SCALE: gl.constexpr, B_SCALE: gl.constexpr):
    """acc + part * scales. by_row: of a, and of b where that has one for the wave; by_column: of b's rows."""
    if B_SCALE == VECTOR:
        part *= by_column[None, :]
    if A_SCALE == VECTOR or A_SCALE == ROW_VECTOR:
        acc += part * by_row[:, None]
    elif A_SCALE == SQUARE:
        acc += part * by_row
    else:
        acc += part
    return acc


@gluon.jit
def both(left, right, TWO: gl.constexpr):
    """What lies at both places; at the first one twice, where there are not TWO."""
    found = gl.load(left)
    other = found
    if TWO:
        other = gl.load(right)
    return found, other


@gluon.jit
def squares_of(b_scale, at, N, blocks, WGRAD: gl.constexpr, BLOCK_N: gl.constexpr):
    """Where the scales of both squares of a tile's columns begin."""
    group, _, _, _, block_n, first_block, _ = at
    last = (N + BLOCK - 1) // BLOCK - 1
    b_scale += first_block
    if not WGRAD:
        b_scale += group * (last + 1) * blocks
    place = block_n * (BLOCK_N // BLOCK)
    left = b_scale + gl.minimum(place, last) * blocks
    return left, b_scale + gl.minimum(place + BLOCK_N // BLOCK - 1, last) * blocks


@gluon.jit
def pass_over(begin, end, ring, WAVES: gl.constexpr, WHICH: gl.constexpr):
    """Steps of the other consumer alone."""
    a_ring, _, _, _, empty, ready = ring
    STAGES: gl.constexpr = a_ring.shape[0]
    for step in range(begin, end):
        mbarrier.wait(ready.index(step % STAGES), (step // STAGES) & 1)
        for wave in gl.static_range(WAVES):
            take_turn(step, wave, WHICH)
            at_barrier(PASS, WHICH)
        mbarrier.arrive(empty.index(step % STAGES), count=1)


@gluon.jit
def multiply(
    a_scale, b_scale, at, M, N, problem, ring, first,
    WGRAD: gl.constexpr, A_SCALE: gl.constexpr, B_SCALE: gl.constexpr, WHICH: gl.constexpr,
):  # fmt: skip
    """The sums of a consumer's waves of a tile, every 128 products added in float32."""
    _, start, size, block_m, _, first_block, steps = at
    _, _, _, _, all_rows, blocks, _, _ = problem
    a_ring, b_ring, a_scales, b_scales, empty, ready = ring
    STAGES: gl.constexpr = a_ring.shape[0]
    BLOCK_M: gl.constexpr = a_ring.shape[1]
    BLOCK_N: gl.constexpr = b_ring.shape[1]
    ROWS: gl.constexpr = BLOCK_M // 2
    WAVES: gl.constexpr = ROWS * BLOCK_N // (64 * BLOCK)
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK, 32])
    by_rows: gl.constexpr = gl.SliceLayout(1, layout)
    by_columns: gl.constexpr = gl.SliceLayout(0, layout)
    acc0 = gl.zeros((64, BLOCK), gl.float32, layout)
    acc1 = gl.zeros((64, BLOCK), gl.float32, layout)
    part = gl.zeros((64, BLOCK), gl.float32, layout)
    row = block_m * BLOCK_M + WHICH * ROWS
    if A_SCALE == SQUARE:
        last = (M + BLOCK - 1) // BLOCK - 1
        a_scale += gl.minimum(row // BLOCK, last) * blocks + first_block
        of_a = gl.load(a_scale)
    if A_SCALE == ROW_VECTOR:
        rows = start + row + gl.arange(0, 64, layout=by_rows)
        rows0 = gl.minimum(rows, all_rows - 1)
        rows1 = gl.minimum(rows + ROWS - 64, all_rows - 1)
        of_rows0, of_rows1 = both(a_scale + rows0, a_scale + rows1, ROWS > 64)
    if B_SCALE == SQUARE:
        b_scale0, b_scale1 = squares_of(b_scale, at, N, blocks, WGRAD, BLOCK_N)
        of_b0, of_b1 = both(b_scale0, b_scale1, BLOCK_N > BLOCK)
    mine = steps
    if WHICH == 1:  # the second half may lie beyond the group, or the weight
        mine = gl.where(row < (M if WGRAD else size), steps, 0)
    for k in range(mine):
        slot = (first + k) % STAGES
        mbarrier.wait(ready.index(slot), ((first + k) // STAGES) & 1)
        a0 = a_ring.index(slot).slice(WHICH * ROWS, 64, 0)
        b0 = b_ring.index(slot).slice(0, BLOCK, 0).permute((1, 0))
        take_turn(first + k, 0, WHICH)
        part = warpgroup_mma(a0, b0, part, is_async=True, use_acc=False)
        at_barrier(PASS, WHICH)
        by_row0, by_row1, by_column0, by_column1 = 1.0, 1.0, 1.0, 1.0
        if A_SCALE == VECTOR:
            of_rows = a_scales.index(slot).reshape((BLOCK_M,))
            by_row0 = of_rows.slice(WHICH * ROWS, 64, 0).load(by_rows)
            by_row1 = by_row0
            if ROWS > 64:
                by_row1 = of_rows.slice(WHICH * ROWS + 64, 64, 0).load(by_rows)
        if A_SCALE == ROW_VECTOR:
            by_row0, by_row1 = of_rows0, of_rows1
            following = a_scale + gl.minimum(k + 1, steps - 1).to(gl.int64) * all_rows
            of_rows0, of_rows1 = both(following + rows0, following + rows1, ROWS > 64)
        if A_SCALE == SQUARE:
            by_row0, by_row1 = of_a, of_a
            of_a = gl.load(a_scale + gl.minimum(k + 1, steps - 1))
        if B_SCALE == VECTOR:
            of_columns = b_scales.index(slot).reshape((BLOCK_N,))
            by_column0 = of_columns.slice(0, BLOCK, 0).load(by_columns)
            by_column1 = by_column0
            if BLOCK_N > BLOCK:
                by_column1 = of_columns.slice(BLOCK, BLOCK, 0).load(by_columns)
        if B_SCALE == SQUARE:
            by_row0, by_row1 = by_row0 * of_b0, by_row1 * of_b1
            ahead = gl.minimum(k + 1, steps - 1)
            of_b0, of_b1 = both(b_scale0 + ahead, b_scale1 + ahead, BLOCK_N > BLOCK)
        part = warpgroup_mma_wait(num_outstanding=0, deps=(part,))
        if WAVES == 1:
            mbarrier.arrive(empty.index(slot), count=1)
            acc0 = added(acc0, part, by_row0, by_column0, A_SCALE, B_SCALE)
        else:
            acc0 = fence(added(acc0, part, by_row0, by_column0, A_SCALE, B_SCALE))
            a1 = a_ring.index(slot).slice(WHICH * ROWS + ROWS - 64, 64, 0)
            b1 = b_ring.index(slot).slice(BLOCK_N - BLOCK, BLOCK, 0).permute((1, 0))
            take_turn(first + k, 1, WHICH)
            part = warpgroup_mma(a1, b1, part, is_async=True, use_acc=False)
            at_barrier(PASS, WHICH)
            part = warpgroup_mma_wait(num_outstanding=0, deps=(part,))
            mbarrier.arrive(empty.index(slot), count=1)
            acc1 = added(acc1, part, by_row1, by_column1, A_SCALE, B_SCALE)
    pass_over(first + mine, first + steps, ring, WAVES, WHICH)
    return acc0, acc1


@gluon.jit
def multiply_in_place(at, ring, first, WHICH: gl.constexpr):
    """The sums of a consumer's waves of a tile of 128 x 256, kept in the tensor cores."""
    _, _, _, _, _, _, steps = at
    a_ring, b_ring, _, _, empty, ready = ring
    STAGES: gl.constexpr = a_ring.shape[0]
    WIDTH: gl.constexpr = b_ring.shape[1]
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, WIDTH, 32])
    acc = gl.zeros((64, WIDTH), gl.float32, layout)
    for k in range(steps):
        slot = (first + k) % STAGES
        mbarrier.wait(ready.index(slot), ((first + k) // STAGES) & 1)
        a = a_ring.index(slot).slice(WHICH * 64, 64, 0)
        acc = warpgroup_mma(a, b_ring.index(slot).permute((1, 0)), acc, is_async=True)
        acc = warpgroup_mma_wait(num_outstanding=1, deps=(acc,))
        mbarrier.arrive(empty.index((first + k + STAGES - 1) % STAGES), count=1, pred=k > 0)
    acc = warpgroup_mma_wait(num_outstanding=0, deps=(acc,))
    mbarrier.arrive(empty.index((first + steps + STAGES - 1) % STAGES), count=1, pred=steps > 0)
    return column_halves(acc)


@gluon.jit
def multiply_tiles(
    out, ends, a_scale, b_scale, M, N, problem, ring,
    WGRAD: gl.constexpr, GROUPED: gl.constexpr, A_SCALE: gl.constexpr, B_SCALE: gl.constexpr,
    IN_PLACE: gl.constexpr, SCALING: gl.constexpr, HAS_BIAS: gl.constexpr, ACCUMULATE: gl.constexpr,
    GROUP: gl.constexpr, WHICH: gl.constexpr,
):  # fmt: skip
    _, _, total, _, _, _, _, _ = problem
    BLOCK_M: gl.constexpr = ring[0].shape[1]
    BLOCK_N: gl.constexpr = ring[1].shape[1]
    ROWS: gl.constexpr = BLOCK_M // 2
    first = gl.to_tensor(0)
    entry = entry_of(gl.program_id(0), problem, GROUPED)
    at = locate(gl.program_id(0), entry, problem, WGRAD, GROUPED, BLOCK_M, GROUP)
    for tile in range(gl.program_id(0), total, gl.num_programs(0)):
        following = tile + gl.num_programs(0)
        entry = entry_of(following, problem, GROUPED)
        group, start, size, block_m, block_n, _, steps = at
        if IN_PLACE:
            acc0, acc1 = multiply_in_place(at, ring, first, WHICH)
        else:
            acc0, acc1 = multiply(
                a_scale, b_scale, at, M, N, problem, ring, first, WGRAD, A_SCALE, B_SCALE, WHICH
            )
        at = locate(following, entry, problem, WGRAD, GROUPED, BLOCK_M, GROUP)
        first += steps
        row, col = block_m * BLOCK_M + WHICH * ROWS, block_n * BLOCK_N
        place = group, start, size, M, N
        store_wave(out, ends, acc0, place, row, col, WGRAD, SCALING, HAS_BIAS, ACCUMULATE, 0)
        if ROWS > 64:
            store_wave(
                out, ends, acc1, place, row + 64, col, WGRAD, SCALING, HAS_BIAS, ACCUMULATE, 1
            )
        elif BLOCK_N > BLOCK:
            store_wave(
                out, ends, acc1, place, row, col + BLOCK, WGRAD, SCALING, HAS_BIAS, ACCUMULATE, 1
            )
    if not IN_PLACE and WHICH == 0:
        if first > 0:  # what the second consumer passed on last
            at_barrier(TAKE, WHICH)
    tma.store_wait(0)


@gluon.jit(
    do_not_specialize=["first_entry", "count_at", "rows", "E", "M", "blocks", "a_step", "b_step"]
)
def fp8_gemm_kernel(
    out_ptr, a, b, out, a_scale, b_scale, bias_ptr, out_scale_ptr, offs_ptr, tiles_ptr,
    first_entry, count_at, rows, E, M, N, blocks, a_step, b_step,
    WGRAD: gl.constexpr, GROUPED: gl.constexpr, SCALING: gl.constexpr, IN_PLACE: gl.constexpr,
    HAS_BIAS: gl.constexpr, ACCUMULATE: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, GROUP: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    """Forward: out[rows of e] = a[rows of e] @ b[e].T (+ bias[e]); weight gradient: out[e] (+)= a[:, columns of e] @
    b[:, columns of e].T. Both times the scales; M, N: rows of a (of all groups) and of b (of one); blocks: of K.
    """
    BLOCKS: gl.constexpr = VECTOR if WGRAD else ROW_VECTOR
    SCALED: gl.constexpr = BLOCKS if SCALING == "block" else NONE
    A_SCALE: gl.constexpr = SQUARE if SCALING == "square" else SCALED
    B_SCALE: gl.constexpr = SQUARE if A_SCALE == ROW_VECTOR else A_SCALE
    a_ring = gl.allocate_shared_memory(a.dtype, [STAGES, BLOCK_M, BLOCK], a.layout)
    b_ring = gl.allocate_shared_memory(b.dtype, [STAGES, BLOCK_N, BLOCK], b.layout)
    a_scales, b_scales = a_ring, b_ring
    if A_SCALE == VECTOR:
        a_scales = gl.allocate_shared_memory(gl.float32, [STAGES, 1, BLOCK_M], a_scale.layout)
    if B_SCALE == VECTOR:
        b_scales = gl.allocate_shared_memory(gl.float32, [STAGES, 1, BLOCK_N], b_scale.layout)
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    ready = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(empty.index(i), count=2)
        mbarrier.init(ready.index(i), count=1)
    if GROUPED and not WGRAD:
        if out_ptr.dtype.element_ty == gl.float8e4nv:
            zero_padding(out_ptr.to(gl.pointer_type(gl.uint8)), offs_ptr, rows, E, N)
            zero_scales(out_scale_ptr, offs_ptr, rows, E, N)
        else:
            zero_padding(out_ptr, offs_ptr, rows, E, N)
    num_m, num_n = gl.cdiv(M, BLOCK_M), gl.cdiv(N, BLOCK_N)
    if not GROUPED:
        total, each = num_m * num_n, num_m * num_n
    elif WGRAD:
        total, each = E * num_m * num_n, num_m * num_n
    else:
        total, each = gl.load(tiles_ptr + count_at) * num_n, num_n
    problem = tiles_ptr + first_entry, offs_ptr, total, each, rows, blocks, num_m, num_n
    ring = a_ring, b_ring, a_scales, b_scales, empty, ready
    ends = a_scale, b_scale, bias_ptr, a_step, b_step, out_scale_ptr, rows
    # fmt: off
    if out_ptr.dtype.element_ty == gl.float32 and not WGRAD:
        out0, out1 = (out_ptr, out, out), (out_ptr, out, out)
    else:
        # one of a consumer with one wave: two tiles without products in between follow at once, into one buffer
        WAVES: gl.constexpr = 1 if IN_PLACE or BLOCK_M * BLOCK_N == BLOCK * BLOCK else 2
        SUMS: gl.constexpr = out.dtype == gl.float32
        BUFFERS: gl.constexpr = [2 * WAVES, 64, F32_BOX_COLS] if SUMS else [WAVES, 64, BLOCK]
        buffers0 = gl.allocate_shared_memory(out.dtype, BUFFERS, out.layout)
        buffers1 = gl.allocate_shared_memory(out.dtype, BUFFERS, out.layout)
        out0, out1 = (out_ptr, out, buffers0), (out_ptr, out, buffers1)
    gl.warp_specialize(
        [
            (multiply_tiles, (out0, ends, a_scale, b_scale, M, N, problem, ring, WGRAD, GROUPED, A_SCALE, B_SCALE,
                              IN_PLACE, SCALING, HAS_BIAS, ACCUMULATE, GROUP, 0)),
            (multiply_tiles, (out1, ends, a_scale, b_scale, M, N, problem, ring, WGRAD, GROUPED, A_SCALE, B_SCALE,
                              IN_PLACE, SCALING, HAS_BIAS, ACCUMULATE, GROUP, 1)),
            (load_tiles, (a, b, a_scale, b_scale, N, problem, ring, WGRAD, GROUPED, A_SCALE, B_SCALE, GROUP)),
        ],
        [4, 1],
        [240, 24],
    )
    # fmt: on
