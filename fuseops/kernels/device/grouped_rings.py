"""Producers of Hopper's grouped GEMM (`grouped_pingpong`): they load operand tiles into rings in shared memory.

The pipeline: x_ring (STAGES, BLOCK_M, BLOCK_K) and w_ring (STAGES, BLOCK_N, BLOCK_K), or (STAGES, BLOCK_K, BLOCK_N) of
a TRANSPOSED weight, share one mbarrier pair a slot. `full_bars[slot]` completes when both tiles have arrived,
`empty_bars[slot]` when every consumer that reads the slot has released it. All warpgroups count the same `step`, one
for each BLOCK_K of each tile of the program's persistent loop: slot = step % STAGES, phase = step // STAGES & 1, and a
producer waits for the opposite phase of `empty_bars`, so that the first round finds the ring free.

`tma_producer` is one warp that issues TMA for both operands. `gather_producer` is a warpgroup: cp.async of rows of x by
index, and TMA of the weight; there a full barrier counts 128 arrivals by threads and the one of TMA. Producers run
up to STAGES steps ahead of the consumers. So that a new tile does not stall them, its table entry and the indices of
its rows are loaded one tile early.

`problem` is what a tile is decoded from: (entries_ptr, offs_ptr, num_tiles, R, N, K, num_n), num_n column blocks.

Small tiles read more than the L2 cache gives; they live on neighbouring programs that run in lockstep and load the same
tiles, which the GPU coalesces on the way. So programs start together, in the GPU's own order: programmatic dependent
launch lost up to a quarter, clusters and other orders as much. Slower too: two warps for the rows beside one for the
weights, which lets the two drift apart, by 1 to 5 %. Wide tiles of long products drift apart, and read twice as much
from memory; a counter that kept the programs in lockstep mended that, and then they took as long as small ones.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from .gluon_gemm import load_group_rows, swizzle
from .gluon_names import load_rows, load_tile
from .grouped_mm import MAX_GROUPS


@gluon.jit
def load_tile_entry(tile, problem):
    """Load the tile table's entry of a tile, group + MAX_GROUPS * row block, 0 beyond the last; issued one tile early,
    so that its latency is hidden.
    """
    entries_ptr, _, num_tiles, _, _, _, num_n = problem
    return gl.load(entries_ptr + tile // num_n, mask=tile < num_tiles, other=0)


@gluon.jit
def decode_tile(tile, entry, problem, BLOCK_M: gl.constexpr, GROUP: gl.constexpr):
    """Decode a tile into (group, its first row, its number of rows, row block, column block), as grouped_mm_kernel."""
    _, offs_ptr, _, R, _, _, num_n = problem
    group = entry % MAX_GROUPS
    start, size = load_group_rows(offs_ptr, group, R)
    tile_in_group = (entry // MAX_GROUPS) * num_n + tile % num_n
    block_m, block_n = swizzle(tile_in_group, (size + BLOCK_M - 1) // BLOCK_M, num_n, GROUP)
    return group, start, size, block_m, block_n


@gluon.jit
def load_weight(
    w_desc, w_slot, full_bar, group, k, block_n, N, K,
    TRANSPOSED: gl.constexpr, GATE_UP_SPLIT: gl.constexpr,
):  # fmt: skip
    """Issue TMA of one BLOCK_K of a weight tile into its slot, by a descriptor of the weight as a matrix: (E N, K), or
    (E K, N) if TRANSPOSED. With GATE_UP_SPLIT, half of the tile's columns are gates, and half the up columns that they
    gate, N / 2 rows below in the weight.
    """
    if GATE_UP_SPLIT:
        HALF_N: gl.constexpr = w_slot.shape[0] // 2
        row = group * N + block_n * HALF_N
        load_tile(w_desc, [row, k], full_bar, w_slot.slice(0, HALF_N, 0))
        load_tile(w_desc, [row + N // 2, k], full_bar, w_slot.slice(HALF_N, HALF_N, 0))
    elif TRANSPOSED:
        PANEL: gl.constexpr = w_desc.block_type.shape[1]
        BLOCK_N: gl.constexpr = w_slot.shape[1]
        # panels beyond N load the last one again: out-of-bounds zero fill is slow
        last_panel_col = (gl.cdiv(N, PANEL) - 1) * PANEL
        for i in gl.static_range(BLOCK_N // PANEL):
            col = gl.minimum(block_n * BLOCK_N + i * PANEL, last_panel_col)
            panel = w_slot.slice(i * PANEL, PANEL, 1)
            load_tile(w_desc, [group * K + k, col], full_bar, panel)
    else:
        coords = [group * N + block_n * w_slot.shape[0], k]
        load_tile(w_desc, coords, full_bar, w_slot)


@gluon.jit
def load_row_boxes(x_desc, row, rows_left, k, full_bar, x_slot, OTHER_BYTES: gl.constexpr):
    """Issue TMA of one BLOCK_K of a tile of x in boxes of the descriptor's height, without those that begin at or
    beyond `rows_left`, where the group ends: their rows of the product are never stored. full_bar expects the bytes of
    these boxes and OTHER_BYTES, of the weight.
    """
    BOX_ROWS: gl.constexpr = x_desc.block_type.shape[0]
    BOX_BYTES: gl.constexpr = x_desc.block_type.nbytes
    if x_slot.shape[0] == BOX_ROWS:
        mbarrier.expect(full_bar, BOX_BYTES + OTHER_BYTES)
        load_tile(x_desc, [row, k], full_bar, x_slot)
    else:
        num_boxes = gl.minimum((rows_left + BOX_ROWS - 1) // BOX_ROWS, x_slot.shape[0] // BOX_ROWS)
        for i in gl.static_range(x_slot.shape[0] // BOX_ROWS):
            mbarrier.expect(full_bar, (i + 1) * BOX_BYTES + OTHER_BYTES, pred=num_boxes == i + 1)
        for i in gl.static_range(x_slot.shape[0] // BOX_ROWS):
            box = x_slot.slice(i * BOX_ROWS, BOX_ROWS, 0)
            load_tile(x_desc, [row + i * BOX_ROWS, k], full_bar, box, pred=i < num_boxes)


@gluon.jit
def tma_producer(
    x_desc, w_desc, problem, ring,
    TRANSPOSED: gl.constexpr, GATE_UP_SPLIT: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """Run the producer warp: TMA of both operands for every k step of every tile of this program."""
    _, _, num_tiles, _, N, K, _ = problem
    x_ring, w_ring, empty_bars, full_bars = ring
    STAGES: gl.constexpr = x_ring.shape[0]
    BLOCK_M: gl.constexpr = x_ring.shape[1]
    BLOCK_K: gl.constexpr = x_ring.shape[2]
    W_BYTES: gl.constexpr = w_ring.shape[1] * w_ring.shape[2] * 2
    step = gl.to_tensor(0)
    entry = load_tile_entry(gl.program_id(0), problem)
    for tile in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        next_entry = load_tile_entry(tile + gl.num_programs(0), problem)
        group, start, size, block_m, block_n = decode_tile(tile, entry, problem, BLOCK_M, GROUP)
        row0 = block_m * BLOCK_M
        for k in range(0, K, BLOCK_K):
            slot = step % STAGES
            mbarrier.wait(empty_bars.index(slot), ((step // STAGES) & 1) ^ 1)
            full_bar = full_bars.index(slot)
            load_row_boxes(
                x_desc, start + row0, size - row0, k, full_bar, x_ring.index(slot), W_BYTES
            )
            w_slot = w_ring.index(slot)
            load_weight(
                w_desc, w_slot, full_bar, group, k, block_n, N, K, TRANSPOSED, GATE_UP_SPLIT
            )
            step += 1
        entry = next_entry


@gluon.jit
def load_row_indices(index_ptr, row_offsets, start, size, block_m, BLOCK_M: gl.constexpr):
    """Load the rows of x that make up a row block, int32 (BLOCK_M,), 0 beyond the group."""
    rows = block_m * BLOCK_M + row_offsets
    return gl.load(index_ptr + start + rows, mask=rows < size, other=0).to(gl.int32)


@gluon.jit
def gather_producer(
    x_ptr, index_ptr, stride_x, w_desc, problem, ring,
    TRANSPOSED: gl.constexpr, GATE_UP_SPLIT: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """Run the producer warpgroup: in every k step cp.async of the rows of x, whose latency is longer, then TMA of the
    weight. The indices of a tile are loaded one tile early.
    """
    _, _, num_tiles, _, N, K, _ = problem
    x_ring, w_ring, empty_bars, full_bars = ring
    STAGES: gl.constexpr = x_ring.shape[0]
    BLOCK_M: gl.constexpr = x_ring.shape[1]
    BLOCK_K: gl.constexpr = x_ring.shape[2]
    W_BYTES: gl.constexpr = w_ring.shape[1] * w_ring.shape[2] * 2
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    row_offsets = gl.arange(0, BLOCK_M, layout=gl.SliceLayout(1, layout))
    k_offsets = gl.arange(0, BLOCK_K, layout=gl.SliceLayout(0, layout))
    step = gl.to_tensor(0)
    first_tile, entry = gl.program_id(0), load_tile_entry(gl.program_id(0), problem)
    group, start, size, block_m, block_n = decode_tile(first_tile, entry, problem, BLOCK_M, GROUP)
    index = load_row_indices(index_ptr, row_offsets, start, size, block_m, BLOCK_M)
    entry = load_tile_entry(first_tile + gl.num_programs(0), problem)
    for tile in range(first_tile, num_tiles, gl.num_programs(0)):
        next_tile = tile + gl.num_programs(0)
        next_group, start, size, block_m, next_block_n = decode_tile(
            next_tile, entry, problem, BLOCK_M, GROUP
        )
        next_index = load_row_indices(index_ptr, row_offsets, start, size, block_m, BLOCK_M)
        entry = load_tile_entry(next_tile + gl.num_programs(0), problem)
        for k in range(0, K, BLOCK_K):
            x_ptrs = x_ptr + index.to(gl.int64)[:, None] * stride_x + (k + k_offsets)[None, :]
            slot = step % STAGES
            mbarrier.wait(empty_bars.index(slot), ((step // STAGES) & 1) ^ 1)
            full_bar = full_bars.index(slot)
            load_rows(x_ring.index(slot), x_ptrs)
            async_copy.mbarrier_arrive(full_bar, increment_count=False)
            mbarrier.expect(full_bar, W_BYTES)
            w_slot = w_ring.index(slot)
            load_weight(
                w_desc, w_slot, full_bar, group, k, block_n, N, K, TRANSPOSED, GATE_UP_SPLIT
            )
            step += 1
        group, block_n, index = next_group, next_block_n, next_index
