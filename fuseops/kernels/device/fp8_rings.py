"""Producer warp, tile scheduler and TMA descriptors of Hopper's FP8 GEMM (`fp8_gemm`).

One warp issues the TMA loads of both operands, K-major, into a ring of STAGES slots: a slot holds BLOCK_M x 128 codes
of a, BLOCK_N x 128 of b and, where scales are of vectors (columns of a weight gradient), their float32 scales.
`full[slot]` counts the bytes, `empty[slot]` the two consumers. The step of the pipeline runs on over the tiles of the
persistent loop: slot = step % STAGES, and its barriers have the parity of step // STAGES.

The scheduler decodes a tile in two parts, because the first is a load: `load_tile_entry` reads the tile's entry of the
table, one tile ahead, and `tile_coords` finds the group and the block row and column. Loads don't stop at the end of a
group: rows of a tile beyond it are the next group's, and end in rows of the accumulator that are not stored.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from . import gluon_gemm
from .gluon_gemm import Descriptor, load_group_rows, swizzle
from .gluon_names import load_tile
from .grouped_mm import MAX_GROUPS, ragged_shape

BLOCK = gl.constexpr(128)  # K of a step, and side of the blocks that have one scale
CODES_SMEM_LAYOUT = gl.NVMMASharedLayout.get_default_for([128, 128], gl.float8e4nv)
SCALES_SMEM_LAYOUT = gl.NVMMASharedLayout.get_default_for([1, 128], gl.float32)
# Granularity of an operand's scales along K: none (a tensor's or a row's scale, applied in the epilogue), 128 x 128
# squares, or 1 x 128 vectors. TMA loads vectors, except ROW_VECTOR: rows of a group begin anywhere and TMA at multiples
# of 16 bytes only, so consumers load those from global memory.
NONE, SQUARE, VECTOR, ROW_VECTOR = (gl.constexpr(i) for i in range(4))


class CodesDescriptor(Descriptor):
    """A `CodesDescriptor` is the TMA descriptor of FP8 codes, in boxes of 128 codes a row."""

    def __init__(self, t, shape, strides, block_shape):
        super().__init__(t, shape, strides, block_shape)
        self.layout = CODES_SMEM_LAYOUT


class ScalesDescriptor(Descriptor):
    """A `ScalesDescriptor` is the TMA descriptor of float32 scales of 1 x 128 vectors."""

    def __init__(self, t, shape, strides, block_shape):
        super().__init__(t, shape, strides, block_shape)
        self.layout = SCALES_SMEM_LAYOUT


def describe_codes(t, box_rows):
    """Make the descriptor of codes (..., K), in boxes of (box_rows, 128)."""
    width = t.shape[-1]
    return CodesDescriptor(t, (t.numel() // width, width), (width, 1), [box_rows, 128])


def describe_vectors(t, box_rows):
    """Make the descriptor of the scales (ceil(K / 128), R) of vectors, in boxes of (1, box_rows)."""
    return ScalesDescriptor(t, t.shape, t.stride(), [1, box_rows])


def describe_rows(t):
    """Make the ragged descriptor of a result (R, N) whose rows form groups, in boxes of 64 x 64, of codes 64 x 128."""
    if t.itemsize == 1:
        return CodesDescriptor(t, *ragged_shape(t), [1, 1, 64, 128])
    return gluon_gemm.describe_rows(t)


@gluon.jit
def load_tile_entry(tile, problem, GROUPED: gl.constexpr):
    """Load the table entry of a tile. Called one tile ahead, so that the latency of the load is hidden."""
    entries_ptr, _, num_tiles, tiles_per_entry, _, _, _, _ = problem
    entry = gl.to_tensor(0)
    if GROUPED:
        entry = gl.load(entries_ptr + tile // tiles_per_entry, mask=tile < num_tiles, other=0)
    return entry


@gluon.jit
def tile_coords(
    tile, entry, problem,
    WGRAD: gl.constexpr, GROUPED: gl.constexpr, BLOCK_M: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """Decode a tile into (group, group_start, group_rows, block_m, block_n, first_k_block, k_steps).

    The K of a weight gradient is the rows of a group: its first block is group_start // 128 + group, since the columns
    of each group begin at a multiple of 128. Other GEMMs have all K blocks.
    """
    _, offs_ptr, _, tiles_per_entry, total_rows, k_blocks, num_m, num_n = problem
    group = entry % MAX_GROUPS
    group_start = gl.to_tensor(0)
    group_rows = total_rows
    if GROUPED:
        group_start, group_rows = load_group_rows(offs_ptr, group, total_rows)
    first_k_block = gl.to_tensor(0)
    k_steps = k_blocks
    if WGRAD:
        block_m, block_n = swizzle(tile % tiles_per_entry, num_m, num_n, GROUP)
        first_k_block = group_start // BLOCK + group
        k_steps = gl.minimum((group_rows + BLOCK - 1) // BLOCK, k_blocks - first_k_block)
    else:
        tile_in_group = tile
        if GROUPED:
            tile_in_group = (entry // MAX_GROUPS) * num_n + tile % num_n
        block_m, block_n = swizzle(
            tile_in_group, (group_rows + BLOCK_M - 1) // BLOCK_M, num_n, GROUP
        )
    return group, group_start, group_rows, block_m, block_n, first_k_block, k_steps


@gluon.jit
def load_tiles(
    a, b, a_scale, b_scale, N, problem, ring,
    WGRAD: gl.constexpr, GROUPED: gl.constexpr, A_SCALE: gl.constexpr, B_SCALE: gl.constexpr,
    GROUP: gl.constexpr,
):  # fmt: skip
    """Produce: load the operands of each step of each tile of this program into the ring, ahead of the consumers.

    problem: (entries_ptr, offs_ptr, num_tiles, tiles_per_entry, total_rows, k_blocks, num_m, num_n)
    ring: (a_ring, b_ring, a_scale_ring, b_scale_ring, empty, full)
    """
    _, _, num_tiles, _, _, _, _, _ = problem
    a_ring, b_ring, a_scale_ring, b_scale_ring, empty, full = ring
    STAGES: gl.constexpr = a_ring.shape[0]
    BLOCK_M: gl.constexpr = a_ring.shape[1]
    BLOCK_N: gl.constexpr = b_ring.shape[1]
    A_SCALE_BYTES: gl.constexpr = BLOCK_M * 4 if A_SCALE == VECTOR else 0
    B_SCALE_BYTES: gl.constexpr = BLOCK_N * 4 if B_SCALE == VECTOR else 0
    STEP_BYTES: gl.constexpr = (BLOCK_M + BLOCK_N) * BLOCK + A_SCALE_BYTES + B_SCALE_BYTES
    step = gl.to_tensor(0)
    entry = load_tile_entry(gl.program_id(0), problem, GROUPED)
    for tile in range(gl.program_id(0), num_tiles, gl.num_programs(0)):
        next_entry = load_tile_entry(tile + gl.num_programs(0), problem, GROUPED)
        coords = tile_coords(tile, entry, problem, WGRAD, GROUPED, BLOCK_M, GROUP)
        group, group_start, _, block_m, block_n, first_k_block, k_steps = coords
        row, col = block_m * BLOCK_M, block_n * BLOCK_N
        if not WGRAD:
            row += group_start
            col += group * N
        # not from `first_k_block` on: Triton 3.6 takes a value that only bounds of an inner loop depend on for
        # invariant over the outer loop, the same for all tiles
        for k_step in range(k_steps):
            k_block = first_k_block + k_step
            slot = step % STAGES
            mbarrier.wait(empty.index(slot), ((step // STAGES) & 1) ^ 1)
            full_bar = full.index(slot)
            mbarrier.expect(full_bar, STEP_BYTES)
            if A_SCALE == VECTOR:
                load_tile(a_scale, [k_block, row], full_bar, a_scale_ring.index(slot))
            if B_SCALE == VECTOR:
                load_tile(b_scale, [k_block, col], full_bar, b_scale_ring.index(slot))
            load_tile(a, [row, k_block * BLOCK], full_bar, a_ring.index(slot))
            load_tile(b, [col, k_block * BLOCK], full_bar, b_ring.index(slot))
            step += 1
        entry = next_entry
